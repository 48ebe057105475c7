"""Finds the caller of this package, for the location of a warning, and knows its errors from ours."""

from __future__ import annotations

import signal
import sys
import traceback
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
    while frame is not None and _package_of(frame) in _PASSED:
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


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
