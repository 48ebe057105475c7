"""Texts for people: where a warning points, whose error it is, tables and printable names."""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Collection, Sequence
from types import FrameType

#: Packages whose frames may lie between this package and its caller: what models are made of and called by.
_PASSED = ("cvt_kernels", "cvt", "torch", "contextlib", "transformers", "timm", "peft", "accelerate")


def stacklevel_of_caller() -> int:
    """Returns the ``stacklevel`` with which ``warnings.warn`` points to the caller of this package.

    The caller is the innermost frame outside of this project, PyTorch and the packages of models. The level
    counts from the function that calls this one.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _PASSED:
        frame = frame.f_back
        level += 1
    return level


#: Packages whose errors, besides those of Python's own, a kernel or a capture may raise.
_RAISING = ("cvt_kernels", "torch", "triton", "numpy", "filelock", "jinja2")


def is_foreign(error: Exception) -> bool:
    """Returns whether an error is none of a kernel or of PyTorch, such as a signal handler's time limit.

    It must reach the caller, whatever was computed when it came. A handler may raise any class, so its code
    is looked for among the frames of the error.
    """
    package = type(error).__module__.partition(".")[0]
    if not (package in _RAISING or package in sys.stdlib_module_names):
        return True
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


# Tables and names for terminals ---------------------------------------------------------------------------

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
    # Cells are text already; tabulate would print "0.10" as 0.1.
    return tabulate(rows, tablefmt="plain", colalign=sides, disable_numparse=True).split("\n")


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table, unpadded, so that a new row changes no other line."""
    heading, *others = [f"| {' | '.join(row)} |" for row in rows]
    return [heading, "|---" * len(rows[0]) + "|", *others]
