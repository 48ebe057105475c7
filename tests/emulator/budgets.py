"""The most that the kernels of CvT-13 may execute for one image.

Unlike the budgets of ``cvt compile``, which are counted in machine code, these are counted while the PTX
runs: loops as often as they turn, lanes that are masked off not at all, accesses by their addresses.
ptxas makes about 0.85 to 1.25 instructions of one of PTX in these kernels, counted with the same turns.

The projection takes more than the least sectors because of its weights: the nine taps of a channel lie
beside each other, so each of the nine loads touches all of their sectors. The first brings them to the
L1 cache.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.emulator.launches import Outcome
from tests.emulator.program import Traffic


class Executed(NamedTuple):
    """The counts of a call's launches.

    Attributes:
        instructions: Of PTX, by all threads together, for an element of the result.
        sectors: Sectors of 32 bytes that requests to global memory took, by the least that they could take.
        wavefronts: The same of 128 bytes of shared memory: 1 if no two words of a bank meet.
    """

    instructions: float
    sectors: float
    wavefronts: float

    def __str__(self) -> str:
        return (
            f"{self.instructions:.1f} instructions for an output, {self.sectors:.2f} of the least sectors, "
            f"{self.wavefronts:.2f} of the least wavefronts"
        )


#: By call, the most instructions of Triton 3.7's code on sm_80 and on sm_90, and the most sectors on both.
_MOST = {
    "stage 1: attention": (167, 120, 1.00),
    "stage 1: projection": (30, 30, 1.47),
    "stage 1: linear_gelu": (19, 13, 1.00),
    "stage 1: linear_add": (30, 20, 1.00),
    "stage 2: attention": (61, 45, 1.00),
    "stage 2: projection": (37, 37, 2.41),
    "stage 2: linear_gelu": (28, 19, 1.00),
    "stage 2: linear_add": (68, 27, 1.00),
    "stage 3: attention": (33, 25, 1.00),
    "stage 3: projection": (37, 37, 2.47),
    "stage 3: linear_gelu": (43, 25, 1.00),
    "stage 3: linear_add": (98, 29, 1.00),
    "stage 1: layer_norm_mlp": (84, 51, 1.00),
    "stage 1: embedding": (35, 31, 1.04),
}
#: By compute capability and call, the most that may be executed; no two words of a bank meet.
BUDGETS: dict[int, dict[str, Executed]] = {
    arch: {name: Executed(most[i], most[2], 1.00) for name, most in _MOST.items()}
    for i, arch in enumerate((80, 90))
}


def counted(outcome: Outcome) -> Executed:
    """Returns what a call executed."""
    instructions = sum(ran.result.thread_instructions for ran in outcome.ran)
    ratios = [_ratio([ran.program.traffic_of(ran.result, space) for ran in outcome.ran]) for space in _SPACES]
    return Executed(instructions / outcome.results[0].numel(), *ratios)


_SPACES = ("global", "shared")


def _ratio(traffic: list[Traffic]) -> float:
    least = sum(each.least for each in traffic)
    return sum(each.units for each in traffic) / least if least else 1.0


def excesses(name: str, arch: int, executed: Executed) -> list[str]:
    """Returns the numbers of a call that are over its budget, with what is allowed."""
    budget = BUDGETS.get(arch, {}).get(name)
    if budget is None:
        return []
    return [
        f"{number:.2f} {field}, {allowed} allowed"
        for field, number, allowed in zip(Executed._fields, executed, budget, strict=True)
        if number > allowed
    ]
