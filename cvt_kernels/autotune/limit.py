"""The time that a call may spend on tuning, and the notice that calls do.

A call is the outermost call of a module in its thread, or an operator's where no module is called: a forward
of a model, for example, with all its operators. What it has no time for is tuned in later calls.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO, TypeVar

from torch import nn

from .. import compiling
from .cache import tuning_seconds
from .entries import Entry

# The limit ------------------------------------------------------------------------------------------------

_Result = TypeVar("_Result")
_MODULE_CALL = nn.Module._call_impl.__code__
_NAME = "_cvt_kernels_call"


class Call:
    """A call, with the seconds that it may still tune.

    Attributes:
        seconds: These seconds.
        is_requested: Whether it tunes even if autotuning at first use is off.
        tuned: What it has tuned: cache key → entry.
        waits: Whether it waits for kernels that are being compiled, rather than passes over their operators.
        passed: What it has passed over: cache key → the keys of its kernels (``compiling``).
    """

    def __init__(self, seconds: float, *, is_requested: bool = False):
        self.seconds, self.is_requested = seconds, is_requested
        self.tuned: dict[str, Entry] = {}
        self.waits = True
        self.passed: dict[str, list[str]] = {}
        self._until: float | None = None

    @property
    def is_limited(self) -> bool:
        """Returns whether there is a limit."""
        return self.seconds < math.inf

    def has_time(self) -> bool:
        """Returns whether it may begin something."""
        return self.seconds > 0 if self._until is None else time.monotonic() < self._until

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the seconds of the block."""
        self._until = time.monotonic() + self.seconds
        try:
            yield
        finally:
            self.seconds, self._until = self._until - time.monotonic(), None


class _Here(threading.local):
    unlimited: Call | None = None


_here = _Here()


@contextlib.contextmanager
def unlimited(*, is_requested: bool = False) -> Iterator[Call]:
    """Lets all operators that this thread calls within the block tune without a limit, as one call.

    Args:
        is_requested: Whether they do so even if autotuning at first use is off.
    """
    before = _here.unlimited
    _here.unlimited = Call(math.inf, is_requested=is_requested) if before is None else before
    try:
        yield _here.unlimited
    finally:
        _here.unlimited = before


def run_until_tuned(run: Callable[[], _Result]) -> _Result:
    """Runs a call without a limit, again until everything in it is tuned; returns the last result.

    The first run begins to compile all kernels that its operators need (``compiling``). Each later one comes
    when half of what was left is compiled, tunes these operators, and passes over the others.
    """
    with unlimited() as call:
        before, call.waits = call.waits, False
        try:
            while True:
                call.passed = {}
                result = run()
                if not call.passed:
                    return result
                del result
                compiling.wait(*call.passed.values(), most_left=len(call.passed) // 2)
        finally:
            call.waits = before


def is_requested() -> bool:
    """Returns whether this thread tunes even if autotuning at first use is off."""
    return _here.unlimited is not None and _here.unlimited.is_requested


def current_call() -> Call:
    """Returns the call that an operator is part of."""
    if _here.unlimited is not None:
        return _here.unlimited
    frame: FrameType | None = sys._getframe(1)
    outermost = None
    while frame is not None:
        outermost = frame if frame.f_code is _MODULE_CALL else outermost
        frame = frame.f_back
    if outermost is None:
        return Call(tuning_seconds())
    # Another local variable of the frame lives exactly as long as the call.
    call: Call = outermost.f_locals.setdefault(_NAME, Call(tuning_seconds()))
    return call


# The notice -------------------------------------------------------------------------------------------------

_PATIENCE = 2.0  # seconds of tuning in a process without a notice
_NOTICE = (
    "cvt_kernels: checking and timing kernels, at the first call of each kind on this machine. A call does "
    "so for CVT_KERNELS_AUTOTUNE_SECONDS (2 by default) or a little longer, and later calls go on. The "
    "result is remembered; `cvt tune` and cvt_kernels.tune(model, inputs) do it ahead of time."
)
_seconds = 0.0  # of tuning at first use, of all threads
_is_noticed = False
_logger = logging.getLogger("cvt_kernels")


@contextlib.contextmanager
def noticed() -> Iterator[None]:
    """Gives a notice about autotuning, once in a process, after two seconds in such blocks.

    It is printed where stderr is a terminal, and elsewhere a warning of the logger ``cvt_kernels``. There is
    none under pytest.
    """
    global _seconds
    if _is_noticed or "PYTEST_CURRENT_TEST" in os.environ:
        yield
        return
    timer = threading.Timer(max(0.0, _PATIENCE - _seconds), _notice, [sys.stderr])
    timer.daemon = True
    start = time.monotonic()
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _seconds += time.monotonic() - start


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no stream, or a closed one
        return False


def _notice(stream: TextIO) -> None:
    global _is_noticed
    if _is_noticed:
        return
    _is_noticed = True
    if not _is_terminal(stream):
        _logger.warning(_NOTICE)
        return
    with contextlib.suppress(OSError, ValueError):  # the stream is gone
        stream.write(f"{_NOTICE}\n")
        stream.flush()
