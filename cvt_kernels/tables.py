"""Text tables, aligned for a terminal or in Markdown, by tabulate."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

# Cells are text already; tabulate would print "0.10" as 0.1.
_AS_IT_IS = {"disable_numparse": True}
# Control characters of terminals: C0 except for the newline, DEL, C1, and bidirectional controls that embed,
# override or isolate.
_COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Returns a text with control characters escaped, such as ``\x1b``; newlines stay."""
    return _COMMANDS.sub(lambda match: ascii(match[0])[1:-1], text)


def printable_word(text: str) -> str:
    """Returns a name with control characters escaped, newlines included."""
    return printable(text).replace("\n", "\\n")


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Returns the lines of an aligned table, with two spaces between columns.

    The heading is the first row. ``right`` has the indices of right-aligned columns, such as numbers.
    """
    from tabulate import tabulate  # here, to keep the import of the package fast

    rows = [[printable_word(cell) for cell in row] for row in rows]
    sides = ["right" if i in right else "left" for i in range(len(rows[0]))]
    return tabulate(rows, tablefmt="plain", colalign=sides, **_AS_IT_IS).split("\n")


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table, unpadded, so that a new row changes no other line."""
    from tabulate import DataRow, TableFormat, tabulate

    row = DataRow("| ", " | ", " |")
    style = TableFormat(
        lineabove=None,
        linebelowheader=lambda widths, sides: "|---" * len(widths) + "|",
        linebetweenrows=None,
        linebelow=None,
        headerrow=row,
        datarow=row,
        padding=0,
        with_header_hide=None,
    )
    return tabulate(rows, headers="firstrow", tablefmt=style, stralign=None, **_AS_IT_IS).split("\n")
