"""Checks that a compiled kernel waits: for the kernel before it, and for its own asynchronous products.

The first is what programmatic dependent launch needs, and is read from PTX. The second is the assembler's
work, and is read from machine code: ptxas 12.8 and 12.9 are known to put a number into a register that a
product under way still reads.
"""

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


# Asynchronous products ------------------------------------------------------------------------------------

#: How many registers an instruction writes, by its name; others write one.
_WIDTHS = ((r"[.]128|MMA|88[.]4", 4), (r"[.]64|[.]WIDE|^D[AFM]|^CS2R(?![.]32)|88[.]2", 2))
#: The instructions that only read the register that comes first.
_READING = ("BAR", "BRX", "DSETP", "FCHK", "FSETP", "HSETP2", "ISETP", "NANOSLEEP", "RET", "WARPSYNC")
#: The most groups of products that a path tells apart.
_MOST_GROUPS = 8


class _Products(NamedTuple):
    """The registers of products under way, by the groups that are waited for; those of the last are open."""

    groups: tuple[frozenset[int], ...] = ()
    open: frozenset[int] = frozenset()

    def after(self, text: str) -> _Products:
        """Returns the products that are under way after an instruction."""
        if wait := re.search(r"WARPGROUP[.]DEPBAR[.]LE gsb0, 0x([0-9a-f]+)", text):
            left = int(wait[1], 16)
            return self._replace(groups=self.groups[-left:] if left else ())
        used = self.open | _registers_of_product(text)
        if "gsb0" in text:
            return _Products((*self.groups, used)[-_MOST_GROUPS:])
        return self._replace(open=used)


def overwritten(sass: str) -> tuple[str, ...]:
    """Returns the instructions that write a register of a product before they have waited for it."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"([.]L_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/[*][0-9a-f]{4,}[*]/\s+([@A-Z].*?);", line):
            code.append(found[1].strip())
    flaws, seen = [], set()
    paths = [(at, _Products()) for at in {0, *labels.values()}]  # partitions are entered by a table
    while paths:
        at, products = paths.pop()
        if (at, products) in seen or at >= len(code):
            continue
        seen.add((at, products))
        text = code[at]
        if "GMMA." not in text and _written(text) & products.open.union(*products.groups):
            flaws.append(f"{' '.join(text.split())} writes a register of a product before its wait")
        products = products.after(text)
        is_jump = re.match(r"(@!?U?P\w+\s+)?(BRA|BRX|CALL|EXIT|RET)\b", text)
        targets = re.findall(r"[.]L_\w+", text) if is_jump else []
        paths += [(labels[target], products) for target in targets if target in labels]
        if not is_jump or is_jump[1] or is_jump[2] == "CALL":
            paths.append((at + 1, products))
    return tuple(dict.fromkeys(flaws))


def _registers_of_product(text: str) -> frozenset[int]:
    """Returns the registers that a product accumulates in, and those that it reads; none for the others."""
    found = re.search(r"GMMA[.]64x(\d+)x\d+[.](\w+)\S*\s+R(\d+), (?:R(\d+), )?gdesc", text)
    if found is None:
        return frozenset()
    columns, kind, first, read = found.groups()
    count = int(columns) // (4 if kind == "F16" else 2)
    operand = range(int(read), int(read) + 4) if read else ()
    return frozenset((*range(int(first), int(first) + count), *operand))


def _written(text: str) -> set[int]:
    """Returns the registers that an instruction writes."""
    name, _, operands = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
    found = re.match(r"\s*(?:U?P[T\d],\s*)*R(\d+)", operands)
    if found is None or name.startswith(_READING):
        return set()
    count = next((count for part, count in _WIDTHS if re.search(part, name)), 1)
    return set(range(int(found[1]), int(found[1]) + count))
