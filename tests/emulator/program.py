"""Runs PTX on the CPU, on the memory of this process, and names what went wrong."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tests.checks import compiled, compiler
from tests.emulator.ptx import Kernel

HERE = Path(__file__).parent
FLAGS = ["-std=c++20", "-O1", "-march=native", "-ffp-contract=off", "-fwrapv", "-fPIC", "-shared"]
LIMIT = 2_000_000_000  # instructions of a warp, all warps together

#: What can go wrong, in the order of ``enum Fault``.
FAULTS = (
    "outside of all tensors or of shared memory",
    "not aligned to its width",
    "shared memory that nothing wrote is read",
    "shared memory that a copy in the background still writes is touched",
    "read without a barrier since another thread wrote",
    "written without a barrier since another thread wrote something else",
    "written without a barrier since another thread read",
    "not all lanes of a warp take part",
    "warps wait at different barriers, or some at none",
    "does not end",
    "memory that another program writes is touched, or written where another one reads",
    "a copy in the background or a wgmma is never waited for",
    "shared memory is overwritten that a wgmma or a bulk copy still reads",
    "a wgmma or a bulk copy reads what a thread wrote, without a proxy fence between",
    "global memory is touched before griddepcontrol.wait",
    "a program ends without griddepcontrol.wait",
)


class Fault(NamedTuple):
    """Something wrong at an instruction.

    Attributes:
        kind: One of ``FAULTS``.
        line: Of the PTX, from 1.
        text: The instruction.
        source: The line of the kernel, as the PTX tells it.
        program, thread: Who did it first.
        other: The thread that it conflicts with, −1 if there is none.
        address: Where, or 0.
        count: How many times; every byte counts.
    """

    kind: str
    line: int
    text: str
    source: str
    program: int
    thread: int
    other: int
    address: int
    count: int

    def __str__(self) -> str:
        who = f"program {self.program}, thread {self.thread}"
        if self.other >= 0:
            other = (
                "several warps" if self.other == 0x7FF else f"thread {self.other} of warp {self.other // 32}"
            )
            who += f" of warp {self.thread // 32} and {other}"
        return (
            f"{self.kind}: line {self.line}: {self.text} | {self.source} | {who}, at {self.address:#x}, "
            f"{self.count} times"
        )


class Result(NamedTuple):
    """The record of a run.

    Attributes:
        faults: What was wrong.
        warp_instructions, thread_instructions: How many were executed.
    """

    faults: list[Fault]
    warp_instructions: int
    thread_instructions: int


class Region(NamedTuple):
    """Memory that a kernel may touch: an address, and a byte for each byte there, 1 where it may."""

    address: int
    allowed: np.ndarray


_REGION = np.dtype([("begin", "u8"), ("end", "u8"), ("allowed", "u8")])
_FAULT = np.dtype(
    [(n, "i4") for n in ("kind", "pc", "program", "thread", "other", "count")] + [("address", "u8")]
)


def tensor_map(matrix: Tensor, box: Sequence[int], swizzle: int) -> bytes:
    """Returns what the machine takes for a tensor map (TMA) of a matrix.

    Args:
        matrix: A matrix whose rows are contiguous.
        box: The rows and columns of a copy.
        swizzle: Which bits of an address are exchanged: 0 for none, 1 to 3 for rows of 32, 64 and 128 bytes.
    """
    rows, columns = matrix.shape
    size = matrix.element_size()
    numbers = columns, rows, matrix.stride(0) * size, size, box[1], box[0], swizzle
    return struct.pack("Q7I", matrix.data_ptr(), *numbers).ljust(128, b"\0")


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the compiled machine; it is compiled where its sources or the command changed."""
    source = HERE / "run.cpp"
    command = [*compiler(), *FLAGS, str(source)]
    return ctypes.CDLL(str(compiled(command, [*sorted(HERE.glob("*.h")), source], ".so")))


def _number(name: str) -> int | None:
    number = library().operation(name.encode())
    return number if number >= 0 else None


class Program(Kernel):
    """A kernel that can run."""

    def __init__(self, ptx: str) -> None:
        super().__init__(ptx, _number)

    def run(
        self, grid: Sequence[int], arguments: Sequence[bytes], regions: Sequence[Region], shared: int = 0,
        overlaps: bool = False,
    ) -> Result:  # fmt: skip
        """Runs all programs of a grid.

        Args:
            grid: Programs along each axis.
            arguments: The bytes of each parameter.
            regions: The memory that the kernel may touch; they do not overlap.
            shared: Bytes of shared memory that the launch asks for.
            overlaps: Whether the kernel before on the stream may still run, until griddepcontrol.wait.
        """
        memory = bytearray(self.parameter_bytes + 8)
        for (offset, size), value in zip(self.parameters.values(), arguments, strict=True):
            if len(value) != size:
                raise ValueError(f"a parameter of {size} bytes, but {len(value)} are given")
            memory[offset : offset + size] = value
        ordered = sorted(regions)
        table = np.array(
            [(r.address, r.address + r.allowed.size, r.allowed.ctypes.data) for r in ordered], _REGION
        )
        found, totals = np.zeros(1000, _FAULT), np.zeros(2, np.uint64)
        sizes = np.array([*grid, 1, 1][:3], np.uint32)
        count = library().run(
            _pointer(self.code), _pointer(self.pool), self.register_bytes,
            _pointer(self.constants), len(self.constants),
            (ctypes.c_char * len(memory)).from_buffer(memory), _pointer(sizes), self.threads,
            shared + self.shared_bytes,
            _pointer(table), len(table), _pointer(found), len(found),
            ctypes.c_uint64(LIMIT), _pointer(totals), overlaps,
        )  # fmt: skip
        faults = [
            Fault(FAULTS[f["kind"]], *self.lines[min(f["pc"], len(self.lines) - 1)],
                  *(int(f[n]) for n in ("program", "thread", "other", "address", "count")))
            for f in found[: min(count, len(found))]
        ]  # fmt: skip
        faults.sort(key=lambda fault: (fault.kind, fault.line))
        return Result(faults, int(totals[0]), int(totals[1]))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
