"""The machine key: everything that the choices of a device depend on."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from .. import machine


def machine_key(device: torch.device) -> dict[str, object]:
    """Returns everything that the choices of a device depend on, serializable to JSON."""
    return {**_installation(), **_device_facts(device)}


@functools.cache
def _installation() -> dict[str, object]:
    triton = machine.installed_version("triton") or "not installed"
    extension = _extension_file()
    return {
        "cvt-kernels": importlib.import_module("cvt_kernels").__version__,
        "kernel sources": _hash_of(_source_files()),
        "extension": _hash_of([extension]) if extension else "not built",
        "torch": str(torch.__version__),
        "triton": f"{triton}, interpreted" if machine.INTERPRETING else triton,
        "CUDA": torch.version.cuda,
        "cuDNN": _cudnn(),
    }


def _cudnn() -> int | str | None:
    try:
        return torch.backends.cudnn.version() if torch.version.cuda else None
    except RuntimeError:  # it lacks this GPU, or is not the version that torch was built with
        return "not usable"


def _source_files() -> list[Path]:
    """Returns the source files that decide what a kernel computes, whether it passes and how it is timed."""
    package = Path(__file__).parents[1]
    folders = [(package / name).rglob("*.py") for name in ("graphs", "launch", "machine", "ops", "tuning")]
    return [path for files in (*folders, package.glob("*.py")) for path in sorted(files)]


def _extension_file() -> Path | None:
    spec = importlib.util.find_spec("cvt_kernels._C")
    return Path(spec.origin) if spec is not None and spec.origin else None


def _hash_of(files: Iterable[Path]) -> str:
    contents = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        contents.update(f"{path.name} {len(content)} ".encode())
        contents.update(content)
    return contents.hexdigest()[:16]


def _device_facts(device: torch.device) -> dict[str, object]:
    if device.type == "cuda":
        return _gpu_facts(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu":
        return _cpu_facts()
    return {"device": device.type}


@functools.cache
def _gpu_facts(index: int) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "device": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": _nvidia_driver(),
    }


def _nvidia_driver() -> str:
    """Returns the versions of the driver's kernel module and library, such as ``580.65.06, CUDA 13.0``."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:  # Windows and WSL
        text = ""
    number = re.search(r"\d+(\.\d+)+", text)
    cuda = machine.cuda_driver_version()
    return f"{number[0] if number else 'unknown'}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"


@functools.cache
def _cpu_facts() -> dict[str, object]:
    return {
        "device": "cpu",
        "name": machine.cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        # The extension too reads it, at the first call of each family of kernels.
        "CVT_KERNELS_CPU": os.environ.get("CVT_KERNELS_CPU", ""),
        "instruction sets": _hash_of_instruction_sets(),
    }


def _hash_of_instruction_sets() -> str:
    """Returns the hash of the CPU's flags in ``/proc/cpuinfo``, or ``unknown``."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux
        flags = ""
    names = sorted(flags.partition(":")[2].split())
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16] if names else "unknown"


def digest(key: Mapping[str, object]) -> str:
    """Returns the hash of a machine key, which names its file."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
