"""The counts of a kernel's machine code, and the time that a GPU is predicted to need for them.

The counts are exact, by the rules of ``loops``. The times are predictions: each of four parts of the chip is
taken to work at its full rate, and the slowest to hide the others. Nothing here was measured, and a kernel
that waits for memory or at barriers takes longer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cvt.commands.compile.gpus import LIMITS
from cvt.commands.compile.resources import Resources

from .disassembly import MachineCode
from .instructions import CLASSES
from .loops import executed
from .rates import RATES
from .work import Work

_TILE_SCORES, _TILE_WARPS = 64 * 64, 4


class Counts(NamedTuple):
    """The counts of a kernel's machine code, for one launch.

    Attributes:
        instructions_per_output: Instructions that a thread executes for one element of the output.
        classes_per_output: The same by class.
        mufu_per_output: Those among them that compute special functions (MUFU).
        instructions_per_tile: Instructions that each of 4 warps executes for 64 × 64 attention scores, within
            the loops; None for other kernels.
        warps: Warps of a multiprocessor.
        bytes_in_flight: The most bytes that the loads of these warps have under way at once in a loop,
            whether from global memory or from a cache.
    """

    instructions_per_output: float
    classes_per_output: dict[str, float]
    mufu_per_output: float
    instructions_per_tile: float | None
    warps: int
    bytes_in_flight: int


class Prediction(NamedTuple):
    """The predicted time of one launch, without a measurement.

    Attributes:
        microseconds: Part of the chip → the time that it is busy: ``issue`` of instructions, ``MUFU``,
            ``tensor`` cores, and ``DRAM``.
        bound: The part with the longest time.
        floor_microseconds: The time of what has to be moved and multiplied, whatever the code: the longer of
            DRAM and the products that were asked for, without padding.
        share_of_floor: The floor divided by the longest time; at 1, no other code would be faster.
    """

    microseconds: dict[str, float]
    bound: str
    floor_microseconds: float
    share_of_floor: float


class Analysis(NamedTuple):
    """The analysis of one launch; ``predicted`` is None for a GPU without ``RATES``."""

    work: Work
    counts: Counts
    predicted: Prediction | None


def analyze(code: MachineCode, resources: Resources, work: Work, arch: int) -> Analysis:
    """Returns the counts of a launch and what they predict.

    Args:
        code: The machine code of the kernel.
        resources: What it takes of the GPU.
        work: The work of the launch, for which ``why_not_counted`` has nothing to say.
        arch: Compute capability, 90 for sm_90.
    """
    ran = executed(code.blocks, work.trips, work.conditional)
    warps = work.programs * resources.threads / 32
    per_output = 32 * warps / work.outputs  # instructions of threads, from one of a warp
    mufu = sum(count for name, count in ran.instructions.items() if name.startswith("MUFU"))
    resident = round(resources.occupancy * LIMITS[arch].warps)
    per_tile = None
    if work.scores:
        tiles = work.scores / _TILE_SCORES
        per_tile = ran.in_loops * resources.threads / 32 / _TILE_WARPS / tiles
    counts = Counts(
        instructions_per_output=ran.total * per_output,
        classes_per_output={name: ran.classes.get(name, 0) * per_output for name in CLASSES},
        mufu_per_output=mufu * per_output,
        instructions_per_tile=per_tile,
        warps=resident,
        bytes_in_flight=code.bytes_in_flight * resident,
    )
    flops = {name: count * warps * flops_of(name) for name, count in ran.instructions.items()}
    predicted = _predict(arch, work, ran.total * warps, mufu * warps * 32, sum(flops.values()))
    return Analysis(work, counts, predicted)


def _predict(arch: int, work: Work, instructions: float, mufu: float, flops: float) -> Prediction | None:
    """Returns the prediction from the totals of a launch (MUFU of threads); None for a GPU without rates."""
    rates = RATES.get(arch)
    if rates is None:
        return None
    clocks = LIMITS[arch].multiprocessors * rates.clock  # of all multiprocessors in a microsecond
    busy = min(work.programs, LIMITS[arch].multiprocessors) * rates.clock  # of those that have a program
    microseconds = {
        "issue": instructions / rates.issue / busy,
        "MUFU": mufu / rates.mufu / busy,
        "tensor": (flops or work.flops) / work.speed / rates.tensor_flops / busy,  # sm_100 names no shapes
        "DRAM": work.bytes / rates.dram_bytes / clocks,
    }
    bound = max(microseconds, key=microseconds.__getitem__)
    products = work.flops / work.speed / rates.tensor_flops
    floor = max(work.bytes / rates.dram_bytes, products) / clocks
    return Prediction(microseconds, bound, floor, floor / microseconds[bound])


def flops_of(instruction: str) -> int:
    """Returns a warp's operations of a product on tensor cores, 0 for an instruction that names no shape."""
    if shape := re.match(r"[HIQ]GMMA\.(\d+)x(\d+)x(\d+)", instruction):  # of 4 warps
        rows, columns, depth = map(int, shape.groups())
        return 2 * rows * columns * depth // 4
    if shape := re.match(r"[HIQ]MMA\.(16)(8)(4|8|16|32)\b", instruction):
        rows, columns, depth = map(int, shape.groups())
        return 2 * rows * columns * depth
    return 0
