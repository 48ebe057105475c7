"""Plants faults in compiled kernels, one at a time, and counts how many are noticed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tests.emulator.calls import Call
from tests.emulator.launches import Check, Outcome, Runner
from tests.emulator.program import Program

#: What is left out, by the text of the instruction without its guard.
KINDS = {
    "barrier": r"(bar|barrier)(\.cta)?\.sync",
    "barrier of a warp": r"bar\.warp",
    "wait for a copy": r"cp\.async(\.bulk)?\.wait|mbarrier\.try_wait",
    "wait for a wgmma": r"wgmma\.wait",
    "proxy fence": r"fence\.proxy",
    "shuffle": r"shfl",
    "wait for the kernel before": r"griddepcontrol\.wait",
    "guard": r"(ld|st)\.global|cp\.async\.c",
}
_SEEDS = range(1, 5)


class Plant(NamedTuple):
    """A fault in a kernel.

    Attributes:
        kind: One of ``KINDS``.
        ptx: The kernel.
        line, text: The instruction.
        program: The kernel without it.
    """

    kind: str
    ptx: str
    line: int
    text: str
    program: Program


class Entry(NamedTuple):
    """The outcome of a planted fault.

    Attributes:
        plant: The fault.
        noticed: True if a result was wrong or an access was.
        matters: True if it was noticed, or if results differ in some order of the warps.
    """

    plant: Plant
    noticed: bool
    matters: bool


def _without(program: Program, index: int, kind: str) -> Program | None:
    """Returns a kernel without an instruction or, of a guard, without its condition; None if it has none."""
    code = program.code[index]
    if kind == "guard":
        if "cp.async" in program.lines[index][1]:
            operands = code["o"].copy()
            operands[2] = -1
            return program.changed(index, o=operands)
        return program.changed(index, guard=-1) if code["guard"] >= 0 else None
    operands = code["o"].copy()
    if kind == "shuffle":  # every lane keeps its own
        operands[1] = operands[2]
        return program.changed(index, "mov.u32", o=operands)
    if "try_wait" in program.lines[index][1]:  # which says that it is complete
        operands[2] = operands[1]
        return program.changed(index, "setp.eq.u32", o=operands)
    return program.changed(index, "nothing", guard=-1)


def plants(programs: dict[str, Program], executed: dict[str, set[int]], most: int) -> Iterator[Plant]:
    """Returns the faults to plant: of each kernel and kind at most `most`, spread over the code."""
    for ptx, program in programs.items():
        for kind, pattern in KINDS.items():
            found = [
                Plant(kind, ptx, line, text, changed)
                for index, (line, text, _) in enumerate(program.lines)
                if index in executed[ptx] and re.match(pattern, re.sub(r"^@\S+\s+", "", text))
                and (changed := _without(program, index, kind)) is not None
            ]  # fmt: skip
            step = max(1, -(-len(found) // most))
            yield from found[::step]


def plant_all(call: Call, most: int) -> list[Entry]:
    """Plants faults in the kernels of a call; returns what came of each."""
    check, programs = Check(call), {}
    right = check.run(Runner(call.arch, programs))
    if not right.is_good:
        raise AssertionError(f"the call is wrong without a fault: {right.worst}")
    executed = {
        ptx: {int(i) for ran in right.ran if ran.program is program for i in ran.result.executed.nonzero()[0]}
        for ptx, program in programs.items()
    }
    limit = 4 * max(ran.result.warp_instructions for ran in right.ran) + 100_000
    entries = []
    for plant in plants(programs, executed, most):
        changed = {**programs, plant.ptx: plant.program}
        outcome = check.run(Runner(call.arch, changed, limit=limit))
        noticed = not outcome.is_good
        entries.append(Entry(plant, noticed, noticed or _differs(check, call, changed, right, limit)))
    return entries


def _differs(check: Check, call: Call, programs: dict[str, Program], right: Outcome, limit: int) -> bool:
    """Returns whether results are others than without the fault, in some order of the warps."""
    for seed in (0, *_SEEDS):
        results = check.run(Runner(call.arch, programs, seed=seed, limit=limit)).results
        same = (
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(results, right.results, strict=True)
        )
        if not all(same):
            return True
    return False


def table(entries: list[Entry]) -> str:
    """Returns a line for each kind: planted, noticed, and missed although results may differ."""
    planted, noticed, missed = Counter(), Counter(), Counter()
    for plant, was_noticed, matters in entries:
        planted[plant.kind] += 1
        noticed[plant.kind] += was_noticed
        missed[plant.kind] += matters and not was_noticed
    return "\n".join(
        f"{kind}: {planted[kind]} planted, {noticed[kind]} noticed, {missed[kind]} missed, "
        f"{planted[kind] - noticed[kind] - missed[kind]} change nothing"
        for kind in KINDS
        if planted[kind]
    )
