"""A check that a compiled kernel waits for its asynchronous products, in machine code.

ptxas 12.8 and 12.9 are known to put a number into a register that a product under way still reads.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
