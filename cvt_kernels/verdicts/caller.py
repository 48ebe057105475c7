"""Finds the code that called this package, where a warning is to point to."""

from __future__ import annotations

import sys
from types import FrameType

#: Packages whose frames lie between those of this package and of its caller.
_PASSED = ("cvt_kernels", "torch", "contextlib")


def stacklevel_of_caller() -> int:
    """Returns the ``stacklevel`` with which ``warnings.warn`` points to the caller of this package.

    That is the innermost frame outside of cvt_kernels, of PyTorch, which calls modules and gradients, and of
    contextlib. The number is for the function that calls this one.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and _package_of(frame) in _PASSED:
        frame = frame.f_back
        level += 1
    return level


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
