"""Tables as text, aligned for a terminal or in Markdown: the only printer of them in the project."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Pads the cells of every column to one width, two spaces apart, without spaces at the end of a line.

    Args:
        rows: Rows of equally many cells, the heading first.
        right: Indices of the columns that are aligned to the right, as numbers are.

    Returns:
        One line per row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if i in right else "<" for i in range(len(widths))]
    return [
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown.

    Args:
        rows: Rows of equally many cells, the heading first.
    """
    heading, *others = (f"| {' | '.join(row)} |" for row in rows)
    return [heading, "|---" * len(rows[0]) + "|", *others]
