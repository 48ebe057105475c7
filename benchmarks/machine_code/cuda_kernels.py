"""The CUDA kernels, from the built extension if it holds code for the GPU, or else compiled by nvcc."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from cvt.commands.compile.resources import Resources, run_tool
from cvt_kernels import toolkit

from . import disassembly
from .examined import Compiled

_CSRC = Path(__file__).parents[2] / "csrc"
_FAMILY = _CSRC / "layer_norm_gelu"
_SOURCE = _FAMILY / "cuda_launches.cu"
_CUDA_TYPES = {"float32": "float", "bfloat16": "BFloat16", "float16": "Half"}
_ACTIVATIONS = ("identity", "none", "tanh", "quick")  # as activation.h numbers them


class CudaCase(NamedTuple):
    """The case that a CUDA kernel is compiled for.

    Attributes:
        activation: ``"none"`` (exact), ``"tanh"`` or ``"quick"`` GELU; ``"identity"`` is LayerNorm alone.
        vector: Elements of one access.
        vectors: Accesses of a thread in one row.
        result: The dtype of a LayerNorm that has another one than its rows; else empty.
    """

    activation: str
    vector: int
    vectors: int
    result: str = ""


class CudaKernels(NamedTuple):
    """The CUDA kernels of one type of elements; ``cubin`` is None where nvcc has yet to compile them."""

    arch: int
    dtype: str
    cubin: bytes | None = None

    def examine(self) -> dict[str, Compiled]:
        """Compiles the kernels if need be and returns each function, by mangled name.

        Raises:
            ValueError: nvcc fails.
        """
        codes = disassembly.read(self.cubin or _compile(self.arch, self.dtype))
        threads = {name: 256 if "sum_over_blocks" in name else 128 for name in codes}  # at CvT's widths
        return {
            name: Compiled(code, Resources.of(code.usage, self.arch, threads[name]))
            for name, code in codes.items()
        }


def cuda_kernels_for(arch: int, dtypes: Collection[str]) -> tuple[list[CudaKernels], str]:
    """Looks for the CUDA kernels of a GPU in the extension, then for nvcc and csrc.

    Returns:
        The kernels, and a line that says where they come from, or why there are none.
    """
    cubins = _cubins_of_extension(arch)
    if cubins:
        kernels = [CudaKernels(arch, dtype, cubin) for dtype, cubin in cubins.items() if dtype in dtypes]
        return kernels, f"CUDA kernels of sm_{arch}: those of the built extension"
    nvcc = toolkit.find_nvcc()
    if nvcc is None or not _SOURCE.exists():
        lacking = "there is no nvcc here" if nvcc is None else "csrc is not part of this installation"
        reason = f"the extension has none for it, and {lacking}"
    elif f"compute_{arch}" not in _run_nvcc(nvcc, "--list-gpu-arch").split():
        reason = f"the extension has none for it, and {nvcc} does not know it"
    else:
        kernels = [CudaKernels(arch, dtype) for dtype in dtypes]
        return kernels, f"CUDA kernels of sm_{arch}: compiled from csrc by {nvcc}"
    return [], f"CUDA kernels of sm_{arch} are left out: {reason}"


def _cubins_of_extension(arch: int) -> dict[str, bytes]:
    """Returns the machine code that the built extension has for a GPU, by type of elements."""
    extension = importlib.util.find_spec("cvt_kernels._C")
    if extension is None or extension.origin is None:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            run_tool("cuobjdump", "-xelf", "all", extension.origin, directory=scratch)
        except subprocess.CalledProcessError:  # there is none in it
            return {}
        cubins = [path.read_bytes() for path in sorted(Path(scratch).glob(f"*.sm_{arch}.cubin"))]
    return {
        dtype: cubin
        for cubin in cubins
        for dtype, name in _CUDA_TYPES.items()
        if f"sum_over_blocks_kernelI{_mangled(name)}E".encode() in cubin
    }


def _mangled(name: str) -> str:
    return "f" if name == "float" else f"NS_{len(name)}{name}"


def _compile(arch: int, dtype: str) -> bytes:
    nvcc = toolkit.find_nvcc()
    if nvcc is None:
        raise ValueError("nvcc is gone")
    flags = ["-std=c++20", "-O3", f"-arch=sm_{arch}", f"-DTYPE={_CUDA_TYPES[dtype]}", "-DKERNELS=kernels"]
    headers = (path for folder in (_CSRC / "common", _FAMILY) for path in folder.glob("*.*h"))
    sources = [_SOURCE, *sorted(headers)]

    def compile_source() -> bytes:
        with tempfile.TemporaryDirectory() as scratch:
            cubin = Path(scratch, "kernels.cubin")
            _run_nvcc(nvcc, *flags, f"-I{_CSRC}", "-cubin", "-o", str(cubin), str(_SOURCE))
            return cubin.read_bytes()

    key = [_run_nvcc(nvcc, "--version").encode(), *map(str.encode, flags)]
    return disassembly.cached("kernels.cubin", key + [path.read_bytes() for path in sources], compile_source)


def _run_nvcc(nvcc: str, *arguments: str) -> str:
    """Runs nvcc and returns what it prints.

    Raises:
        ValueError: It fails; the message has its first line.
    """
    done = subprocess.run((nvcc, *arguments), capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise ValueError(f"{nvcc} fails: {lines[0]}")
    return done.stdout


def parse_function(mangled: str) -> tuple[str, CudaCase | None]:
    """Returns the kernel of a mangled name, and the case that it is compiled for where there are several.

    Raises:
        ValueError: It is no kernel of csrc/layer_norm_gelu.
    """
    match = re.search(
        r"\d+([a-z_]+)_kernelI(f|NS_\w+?E)(?:LNS\d*_10ActivationE(\d)ELi(\d+)ELi(\d+)E(f|NS_\w+?E)?)?",
        mangled,
    )
    if match is None:
        raise ValueError(f"a kernel of another kind in the extension: {mangled}")
    kernel, rows, activation, vector, vectors, result = match.groups()
    if activation is None:
        return kernel, None
    # A type of 16 bits that is repeated has no name.
    other = "" if result in (None, rows) else _dtype_of(result)
    return kernel, CudaCase(_ACTIVATIONS[int(activation)], int(vector), int(vectors), other)


def _dtype_of(mangled: str) -> str:
    return next(dtype for dtype, name in _CUDA_TYPES.items() if mangled.startswith(_mangled(name)))
