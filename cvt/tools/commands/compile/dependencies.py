"""Checks that a compiled kernel waits for the kernel before it, as programmatic dependent launch needs."""

from __future__ import annotations

import re
from typing import NamedTuple

_WAIT = "griddepcontrol.wait"
_NOT_GLOBAL = {"param", "shared", "shared::cta", "shared::cluster", "local", "const"}


class _Instruction(NamedTuple):
    """An instruction of PTX: its name, the label that it jumps to, and whether a predicate guards it."""

    name: str
    target: str | None
    guarded: bool


def unordered(ptx: str) -> tuple[str, ...]:
    """Returns what is wrong with the order of a kernel's PTX and the kernel before: nothing, as a rule.

    On every path from the start, ``griddepcontrol.wait`` must come before an access to global memory and
    before the end. A jump by a table, by which the warps of a partition begin (warp specialization), happens
    when the first warps have come to the partitions, so only the path of these is followed.
    """
    code, labels = _decode(ptx)
    flaws, seen, paths = [], set(), [0]
    while paths:
        at = paths.pop()
        if at in seen or at >= len(code):
            continue
        seen.add(at)
        name, target, guarded = code[at]
        if name == _WAIT and not guarded:
            continue
        if _touches_global(name):
            flaws.append(f"{name} before {_WAIT}")
        ends = name.split(".")[0] in ("ret", "exit")
        if ends:
            flaws.append(f"an end without {_WAIT}")
        if target is not None:
            paths.append(labels[target])
        if name.startswith("brx.idx") or ((target is not None or ends) and not guarded):
            continue
        paths.append(at + 1)
    return tuple(dict.fromkeys(flaws))


def _decode(ptx: str) -> tuple[list[_Instruction], dict[str, int]]:
    """Returns the instructions of a kernel, and which of them each label precedes."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    body = re.sub(r"//.*", "", ptx[ptx.index(".entry") :]).partition("{")[2]
    for line in re.split(r"[;\n{]|(?<=:)\s", body):
        if label := re.match(r"\s*([\w$]+):\s*$", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*(@!?\S+\s+)?([a-z][\w.:]*)\s*(.*)", line):
            is_jump = re.match(r"bra\b", found[2])
            target = found[3].strip() if is_jump else None
            code.append(_Instruction(found[2], target, found[1] is not None))
    return code, labels


def _touches_global(name: str) -> bool:
    """Returns whether an instruction may access global memory."""
    head, *parts = name.split(".")
    if head == "cp":
        return not {"commit_group", "wait_group", "wait_all"} & set(parts)
    return head in ("ld", "ldu", "st", "atom", "red", "tensormap") and not _NOT_GLOBAL & set(parts)
