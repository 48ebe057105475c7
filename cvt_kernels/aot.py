"""Ahead-of-time compilation of the Triton kernels for a named GPU, and what the compiler made of them.

Needs no GPU: the launchers run on tensors without memory (``device="meta"``), and each launch that they would
make is compiled instead. Triton ships the assembler and the disassembler.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Shared memory that one block may use, KiB.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
#: 32-bit registers of a multiprocessor, and the most warps and blocks that it holds.
_REGISTERS, _MAX_WARPS = 65536, {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}

_DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


class Launch(NamedTuple):
    """One launch: the kernel, its grid, arguments, constants and warps."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int


class Resources(NamedTuple):
    """What a compiled kernel takes, per thread or block.

    Attributes:
        registers: Per thread.
        stack, local: Bytes per thread outside registers; 0 without spills.
        spills: Loads and stores of spilled registers in the code.
        shared: Bytes of shared memory per block.
        loads, stores: Instruction → count, of global memory.
        occupancy: Warps that registers and shared memory let a multiprocessor hold, of those it could.
    """

    registers: int
    stack: int
    local: int
    spills: int
    shared: int
    loads: dict[str, int]
    stores: dict[str, int]
    occupancy: float


@contextlib.contextmanager
def record(module: Any) -> Iterator[list[Launch]]:
    """Within it, the launchers of ``module`` note their launches in the yielded list and start nothing."""
    launches: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, config: Any, **constants: Any) -> None:
        launches.append(Launch(kernel, grid, args, constants, config.num_warps))

    original = module._launch
    module._launch = note
    try:
        yield launches
    finally:
        module._launch = original


def source(launch: Launch) -> ASTSource:
    """The kernel specialised as a launch with these arguments would specialise it."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    names = launch.kernel.arg_names

    def describe(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            return tuple(describe(v, (*path, i)) for i, v in enumerate(value))
        if isinstance(value, Tensor):
            attributes[path] = [["tt.divisibility", 16]]
            return f"*{_DTYPES[value.dtype]}"
        if isinstance(value, float):
            return "fp32"
        if value == 1:
            constants[path] = 1
            return "constexpr"
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if value < 2**31 else "i64"

    for i, name in enumerate(names):
        if name in launch.constants:
            signature[name] = "constexpr"
            constants[i,] = launch.constants[name]
        else:
            signature[name] = describe(launch.args[i], (i,))
    return ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def compile_launch(launch: Launch, arch: int) -> Resources:
    """Compiles a launch for compute capability ``arch`` (90 for sm_90) and reads the machine code."""
    compiled = triton.compile(
        source(launch), target=GPUTarget("cuda", arch, 32), options={"num_warps": launch.num_warps}
    )
    with tempfile.TemporaryDirectory() as scratch:
        cubin = Path(scratch, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", cubin)
        code = _tool("nvdisasm", "-c", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no resources of {launch.kernel.__name__}")
    registers, stack, _, local = map(int, found.groups())
    counts: dict[str, int] = {}
    for instruction in re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?((?:LDG|STG|LDL|STL)[A-Z0-9_.]*)", code):
        counts[instruction] = counts.get(instruction, 0) + 1

    def select(prefix: str) -> dict[str, int]:
        return {name: count for name, count in counts.items() if name.startswith(prefix)}

    shared = compiled.metadata.shared
    return Resources(
        registers,
        stack,
        local,
        sum(select("LDL").values()) + sum(select("STL").values()),
        shared,
        select("LDG"),
        select("STG"),
        _occupancy(registers, shared, launch.num_warps, arch),
    )


def _tool(name: str, *arguments: object) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run(
        list(map(str, (path, *arguments))), capture_output=True, text=True, check=True
    ).stdout


def _occupancy(registers: int, shared: int, num_warps: int, arch: int) -> float:
    per_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256 per warp
    blocks = _REGISTERS // (per_warp * num_warps)
    if shared:
        blocks = min(blocks, SHARED_KIB[arch] * 1024 // shared)
    return min(blocks * num_warps, _MAX_WARPS[arch]) / _MAX_WARPS[arch]
