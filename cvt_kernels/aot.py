"""Ahead-of-time compilation of the Triton kernels for a named GPU, and what the compiler made of them.

Needs no GPU: the launchers run on tensors without memory (``device="meta"``), and each launch that they would
make is compiled instead. Triton ships the assembler and the disassembler.

``python -m cvt_kernels.aot --arch 90 --dtype bfloat16`` compiles every kernel at CvT's shapes, prints a line
for each and fails if registers spill.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import runtime

#: Shared memory that one block may use, KiB.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
#: 32-bit registers of a multiprocessor, and the most warps and blocks that it holds.
_REGISTERS, _MAX_WARPS = 65536, {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}

#: Instructions of the tensor cores: up to Ada and on consumer Blackwell, on Hopper, on Blackwell.
_MMA = ("HMMA", "DMMA", "QMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")

_DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
}


class Launch(NamedTuple):
    """One launch: the kernel, its grid, arguments, constants and Triton's options."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]


class Resources(NamedTuple):
    """What a compiled kernel takes, per thread or block.

    Attributes:
        registers: Per thread.
        stack, local: Bytes per thread outside registers; 0 without spills.
        spills: Loads and stores of spilled registers in the code.
        shared: Bytes of shared memory per block.
        loads, stores: Instruction → count, of global memory.
        mma: Instruction → count, of tensor cores.
        occupancy: Warps that registers and shared memory let a multiprocessor hold, of those it could.
    """

    registers: int
    stack: int
    local: int
    spills: int
    shared: int
    loads: dict[str, int]
    stores: dict[str, int]
    mma: dict[str, int]
    occupancy: float


#: What one stage's attention block works on: (H, W), channels, class tokens.
Stage = tuple[tuple[int, int], int, int]

#: The stages of CvT-13 (and, but for depth, CvT-21) and CvT-W24 at the resolutions of the paper.
STAGES: dict[str, tuple[Stage, Stage, Stage]] = {
    "cvt_13 at 224": (((56, 56), 64, 0), ((28, 28), 192, 0), ((14, 14), 384, 1)),
    "cvt_13 at 384": (((96, 96), 64, 0), ((48, 48), 192, 0), ((24, 24), 384, 1)),
    "cvt_w24 at 384": (((96, 96), 192, 0), ((48, 48), 768, 0), ((24, 24), 1024, 1)),
}


@contextlib.contextmanager
def record(chip: runtime.Chip) -> Iterator[list[Launch]]:
    """Within it, launchers of Triton kernels plan for ``chip``, list their launches and start nothing."""
    launches: list[Launch] = []

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, config: Any, **constants: Any) -> None:
        launches.append(Launch(kernel, grid, args, constants, config.options))

    with mock.patch.multiple(runtime, launch=note, chip=mock.Mock(return_value=chip)):
        yield launches


def conv_projection_launches(
    stage: Stage, dtype: torch.dtype, chip: runtime.Chip, *, batch: int = 256
) -> list[Launch]:
    """What evaluation and a training step of CvT's projection launch (q stride 1, k and v stride 2)."""
    from . import conv_projection_triton as kernels

    grid, channels, class_tokens = stage
    geometry = kernels.Geometry(grid, (3, 3, 3), (1, 2, 2), (1, 1, 1), (1, 1, 1), (1e-5,) * 3)

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = meta(batch, grid[0] * grid[1] + class_tokens, channels)
    weights, vectors = [meta(channels, 1, 3, 3)] * 3, [meta(channels, dtype=torch.float32)] * 3
    tracked = [meta(dtype=torch.int64)] * 3
    dys = [meta(batch, h * w + class_tokens, channels) for h, w in geometry.output_grids]
    with record(chip) as launches:
        kernels.forward(x, geometry, weights, *[vectors] * 4)
        mean, variance = kernels.statistics(x, geometry, weights)
        kernels.update_running(mean, variance, range(3), vectors, vectors, tracked, [0.1] * 3, [1.1] * 3)
        sums = kernels.backward_sums(x, geometry, weights, vectors, vectors, dys)
        dconvs, _ = kernels.backward_conv(
            x, geometry, weights, vectors, vectors, vectors, dys, sums, [1.0] * 3
        )
        kernels.backward_input(geometry, weights, dconvs, dys)
    return launches


def attention_launches(
    stage: Stage, dtype: torch.dtype, chip: runtime.Chip, *, batch: int = 256, bias: bool = False
) -> list[Launch]:
    """What evaluation and a training step of CvT's attention launch (heads of 64, k and v strided by 2)."""
    from . import attention_triton as kernels

    (height, width), channels, class_tokens = stage
    queries, keys = (h * w + class_tokens for h, w in ((height, width), (-(-height // 2), -(-width // 2))))
    heads = channels // 64

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = (meta(batch, tokens, heads, 64) for tokens in (queries, keys, keys))
    table = meta(heads, queries, keys) if bias else None
    with record(chip) as launches:
        out, lse = kernels.forward(q, k, v, table, channels**-0.5)
        kernels.backward(q, k, v, table, out, lse, out, channels**-0.5, need_bias=bias)
    return launches


#: What ``main`` can compile, by name.
OPERATORS: dict[str, Callable[..., list[Launch]]] = {
    "conv_projection": conv_projection_launches,
    "attention": attention_launches,
    "attention_with_bias": functools.partial(attention_launches, bias=True),
}


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
            if value.storage_offset() * value.element_size() % 16 == 0:
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
        source(launch),
        target=GPUTarget("cuda", arch, 32),
        options=launch.options,
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
    for instruction in re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", code):
        counts[instruction] = counts.get(instruction, 0) + 1

    def select(*prefixes: str) -> dict[str, int]:
        return {name: count for name, count in counts.items() if name.startswith(prefixes)}

    shared = compiled.metadata.shared
    return Resources(
        registers,
        stack,
        local,
        sum(select("LDL", "STL").values()),
        shared,
        select("LDG"),
        select("STG"),
        select(*_MMA),
        _occupancy(registers, shared, launch.options["num_warps"], arch),
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


def main(arguments: list[str] | None = None) -> int:
    """Compiles every kernel at the stages of ``STAGES``; 1 if one spills or takes too much shared memory."""
    parser = argparse.ArgumentParser(prog="python -m cvt_kernels.aot", description=main.__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], choices=SHARED_KIB)
    dtypes = ["bfloat16", "float16", "float32"]
    parser.add_argument("--dtype", nargs="+", default=dtypes, choices=dtypes)
    parser.add_argument("--operator", nargs="+", default=["conv_projection", "attention"], choices=OPERATORS)
    parser.add_argument("--model", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--stage", type=int, nargs="+", default=[1, 2, 3], choices=[1, 2, 3])
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    jobs = list(_jobs(options))
    # Forked, since launches cannot be pickled; nothing has started a thread or a GPU yet.
    with multiprocessing.get_context("fork").Pool(initializer=_keep, initargs=(jobs,)) as pool:
        failed = False
        for (row, _), found in zip(jobs, pool.imap(_compile_kept, range(len(jobs))), strict=True):
            failed |= found.spills > 0 or found.shared > SHARED_KIB[row["arch"]] * 1024
            print(json.dumps(row | found._asdict()) if options.json else _line(row, found), flush=True)
    return int(failed)


def _jobs(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Launch]]:
    """(What it is, launch) of everything to compile; launches that compile to the same code come once."""
    seen = set()
    for operator, arch, dtype, model, stage in itertools.product(
        options.operator, options.arch, options.dtype, options.model, options.stage
    ):
        chip = runtime.Chip(arch, 132)
        for launch in OPERATORS[operator](STAGES[model][stage - 1], getattr(torch, dtype), chip):
            code, name = source(launch), launch.kernel.__name__
            key = arch, name, str((code.signature, code.constants, code.attrs, launch.options))
            if key not in seen:
                seen.add(key)
                yield {"arch": arch, "dtype": dtype, "model": model, "stage": stage, "kernel": name}, launch


_kept: list[tuple[dict[str, Any], Launch]] = []


def _keep(jobs: list[tuple[dict[str, Any], Launch]]) -> None:
    _kept[:] = jobs


def _compile_kept(index: int) -> Resources:
    row, launch = _kept[index]
    return compile_launch(launch, row["arch"])


def _line(row: dict[str, Any], found: Resources) -> str:
    load, store = (max(map(_bits, counts), default=0) for counts in (found.loads, found.stores))
    return (
        f"sm_{row['arch']:<3} {row['dtype']:<8} {row['model']:<14} stage {row['stage']}  {row['kernel']:<35} "
        f"{found.registers:>3} registers  {found.spills} spills  {found.shared:>5} B shared  "
        f"{found.occupancy:.0%} occupancy  {load}-bit loads, {store}-bit stores  "
        f"{sum(found.mma.values())} tensor-core instructions"
    )


def _bits(instruction: str) -> int:
    """Width of one access: LDG.E.128 is 128, LDG.E.U16 is 16, LDG.E is 32."""
    widths = [int(n) for n in re.findall(r"\.U?(8|16|64|128)\b", instruction)]
    return widths[0] if widths else 32


if __name__ == "__main__":
    sys.exit(main())
