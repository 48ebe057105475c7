"""The machine key: everything that the choices of a device depend on."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from .. import machine


@functools.cache
def machine_key(device: torch.device) -> Mapping[str, object]:
    """Returns everything that the choices of a device depend on, serializable to JSON."""
    triton = machine.installed_version("triton") or "not installed"
    return {
        "cvt-kernels": importlib.import_module("cvt_kernels").__version__,
        "build": _build(),
        "torch": str(torch.__version__),
        "triton": f"{triton}, interpreted" if machine.INTERPRETING else triton,
        "CUDA": torch.version.cuda,
        "cuDNN": _cudnn(),
        "device": device.type,
        **(_gpu_facts(device) if device.type == "cuda" else _cpu_facts()),
    }


def _build() -> str:
    """Returns the hash of this package: of its source files and of the extension."""
    package, contents = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted((*package.rglob("*.py"), *package.glob("_C.*"))):
        content = path.read_bytes()
        contents.update(f"{path.relative_to(package)} {len(content)} ".encode())
        contents.update(content)
    return contents.hexdigest()[:16]


def _cudnn() -> int | str | None:
    try:
        return torch.backends.cudnn.version() if torch.version.cuda else None
    except RuntimeError:  # it lacks this GPU, or is not the version that torch was built with
        return "not usable"


def _gpu_facts(device: torch.device) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(device)
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:  # Windows and WSL
        text = ""
    number, cuda = re.search(r"\d+(\.\d+)+", text), machine.cuda_driver_version()
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": f"{number[0] if number else 'unknown'}, CUDA {cuda // 1000}.{cuda % 1000 // 10}",
    }


def _cpu_facts() -> dict[str, object]:
    return {
        "name": machine.cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instruction sets": ", ".join(sorted(machine.cpu_sets())),  # up to CVT_KERNELS_CPU
    }


def digest(key: Mapping[str, object]) -> str:
    """Returns the hash of a machine key, which names its file."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
