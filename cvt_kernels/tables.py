"""Tables as text, aligned for a terminal or in Markdown: the settings in which this project uses tabulate."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

# Cells are text already; tabulate would print "0.10" as 0.1.
_AS_IT_IS = {"disable_numparse": True}
# What a terminal takes for a command, or for the direction of text: C0 but for the end of a line, DEL, C1,
# and the marks of bidirectional text that embed, override or isolate.
_COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Returns a text with escapes such as ``\x1b`` for what would command a terminal; ends of lines stay."""
    return _COMMANDS.sub(lambda match: ascii(match[0])[1:-1], text)


def printable_word(text: str) -> str:
    """Returns :func:`printable` of a name, in which the end of a line is escaped too."""
    return printable(text).replace("\n", "\\n")


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Pads the cells of every column to one width, two spaces apart; returns one line per row.

    The heading is the first row. ``right`` are the columns that are aligned to the right, as numbers are.
    """
    from tabulate import tabulate  # what imports the package need not wait for it

    rows = [[printable_word(cell) for cell in row] for row in rows]
    sides = ["right" if i in right else "left" for i in range(len(rows[0]))]
    return tabulate(rows, tablefmt="plain", colalign=sides, **_AS_IT_IS).split("\n")


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown, unpadded, so that a new row changes no other line."""
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
