"""The loops of a function, and how many instructions a warp executes with given trips of them.

A loop is a backward branch. Conditional code and predicated instructions count as executed, so the counts
are a warp's that runs all the code, unless a frequency is given; calls are not followed. A loop that
only counts, which compilers leave where they moved everything else out of it, counts as straight code and has
no trips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .instructions import Block, Instruction, bytes_in_flight

_WORK = ("arithmetic", "loads", "stores", "conversion")


class Executed(NamedTuple):
    """The instructions that a warp executes.

    Attributes:
        instructions: Name → executions.
        classes: Class → executions.
        in_loops: Executions within loops.
    """

    instructions: dict[str, float]
    classes: dict[str, float]
    in_loops: float

    @property
    def total(self) -> float:
        """All executions."""
        return sum(self.classes.values())


def loops_of(blocks: Sequence[Block]) -> list[frozenset[int]]:
    """Returns the loops that do some work, each as its blocks: one for each branch backwards.

    They are in code order, an outer loop before its inner ones, with which it may share its first block.
    """
    predecessors: list[list[int]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        for successor in block.successors:
            predecessors[successor].append(index)
    found = []
    for header, latch in _backward_branches(blocks):
        body, pending = {header}, [latch]
        while pending:
            index = pending.pop()
            if index not in body:
                body.add(index)
                pending += predecessors[index]
        if any(blocks[index].classes.get(name) for index in body for name in _WORK):
            found.append((header, -len(body), frozenset(body)))
    return [body for *_, body in sorted(found, key=lambda loop: loop[:2])]


def _backward_branches(blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """Returns (target, source) of every branch to a block that leads to the branch itself."""
    found, done, path = [], set[int](), {0: iter(blocks[0].successors)} if blocks else {}
    while path:
        source = next(reversed(path))
        for target in path[source]:
            if target in path:
                found.append((target, source))
            elif target not in done:
                path[target] = iter(blocks[target].successors)
                break
        else:
            done.add(source)
            del path[source]
    return found


def why_not_counted(blocks: Sequence[Block], trips: Sequence[float]) -> str | None:
    """Returns why ``executed`` cannot count a function with these trips, or None."""
    loops = len(loops_of(blocks))
    if loops != len(trips):
        return f"not counted: the code has {loops} loops, work.py describes {len(trips)}"
    return None


def executed(blocks: Sequence[Block], trips: Sequence[float], conditional: float = 1.0) -> Executed:
    """Returns what a warp executes if every loop of ``loops_of`` takes its trips each time it is entered.

    Args:
        blocks: The basic blocks.
        trips: Trips of each loop.
        conditional: The part of the trips that run what a loop may skip.
    """
    loops = loops_of(blocks)
    skipped = set() if conditional == 1 else {block for loop in loops for block in _skippable(blocks, loop)}
    instructions, classes, in_loops = dict[str, float](), dict[str, float](), 0.0
    for index, block in enumerate(blocks):
        own = [count for loop, count in zip(loops, trips, strict=True) if index in loop]
        times = math.prod(own) * (conditional if index in skipped else 1)
        for total, counts in ((instructions, block.instructions), (classes, block.classes)):
            for name, count in counts.items():
                total[name] = total.get(name, 0) + count * times
        if own:
            in_loops += sum(block.classes.values()) * times
    return Executed(instructions, classes, in_loops)


def _skippable(blocks: Sequence[Block], loop: frozenset[int]) -> frozenset[int]:
    """Returns the blocks of a loop without which it can still come back to its first one, in code order."""
    header = min(loop)

    def comes_back_without(block: int) -> bool:
        reached, pending = {block}, [header]
        while pending:
            index = pending.pop()
            if index not in reached:
                reached.add(index)
                following = [successor for successor in blocks[index].successors if successor in loop]
                if header in following:
                    return True
                pending += following
        return False

    return frozenset(block for block in loop if block != header and comes_back_without(block))


def bytes_in_flight_of(instructions: Sequence[Instruction], blocks: Sequence[Block]) -> int:
    """Returns the most bytes that the global loads of a warp have under way at once in a loop.

    Each loop is seen twice in a row, so that what one trip loads for the next counts. A function without
    loops is seen as a whole.
    """
    loops = loops_of(blocks)
    if not loops:
        return bytes_in_flight(instructions)
    bodies = (
        [
            instructions[i]
            for index in sorted(loop)
            for i in range(blocks[index].first, blocks[index].first + sum(blocks[index].classes.values()))
        ]
        for loop in loops
    )
    return max(bytes_in_flight([*body, *body]) for body in bodies)
