"""Finds the CUDA compiler and the CPU's instruction sets, for the build of the extension and for the library.

``setup.py`` loads this file by its path, where neither torch nor the package can be imported. So it uses the
standard library only.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

#: The instruction sets that the loops of the CPU are compiled for, from the oldest to the newest, each with
#: what Linux calls it in the flags of a CPU. csrc/common/instruction_sets.h has them in the same order.
CPU_SETS = {"plain": "", "avx2": "avx2 fma f16c"}
CPU_SETS["avx2_vnni"] = f"{CPU_SETS['avx2']} avx_vnni"
CPU_SETS["avx512"] = f"{CPU_SETS['avx2']} avx512f avx512bw avx512dq avx512vl"
CPU_SETS["avx512_vnni"] = f"{CPU_SETS['avx512']} avx512_vnni"
CPU_SETS["avx512_bf16"] = f"{CPU_SETS['avx512_vnni']} avx512_bf16"
CPU_SETS["amx_bf16"] = f"{CPU_SETS['avx512_bf16']} amx_tile amx_bf16 amx_int8"


def cpu_flags() -> set[str]:
    """Returns the flags of the CPU, as Linux on x86-64 calls them; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def cpu_sets_here() -> list[str]:
    """Returns the instruction sets of CPU_SETS that this CPU has: ``plain`` alone where it is no x86-64.

    The last one serves best. Tiles are among them where Linux lets this process use them. Pairs of bfloat16
    that are slower than float32 come before ``avx512_vnni``.
    """
    has = cpu_flags()
    names = [name for name, needed in CPU_SETS.items() if has.issuperset(needed.split())]
    if "amx_bf16" in names and not may_use_tiles():
        names.pop()
    slow_pairs = "avx512_fp16" in has and "avx512_vp2intersect" not in has  # see has_slow_pairs in cpu.h
    if slow_pairs and "avx512_bf16" in names:
        names.remove("avx512_bf16")
        names.insert(names.index("avx512_vnni"), "avx512_bf16")
    return names


def may_use_tiles() -> bool:
    """Returns whether Linux on x86-64 lets this process use the CPU's tiles, which it does on request."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def gpus_here() -> list[str]:
    """Returns the compute capabilities of the NVIDIA GPUs of this machine, such as ``9.0``, by nvidia-smi."""
    try:
        asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, text=True).stdout
    except OSError:  # no driver
        return []
    return sorted(set(re.findall(r"^\d+\.\d+$", answer, re.MULTILINE)))


def find_nvcc() -> str | None:
    """Returns the path of nvcc, from ``CUDA_HOME``, the PATH or PyPI's packages, in this order, or None."""
    import sysconfig  # here, since it is slow to import and rarely needed

    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/nowhere"
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"), reverse=True)
    return (
        shutil.which("nvcc", path=str(Path(home) / "bin"))
        or shutil.which("nvcc")
        or next(map(str, packaged), None)
    )
