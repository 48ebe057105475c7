"""Seconds that were measured elsewhere, as pytest-benchmark's: in another process, or by a GPU's events.

pytest-benchmark times a call by reading a timer before and after it. Here the timer is a clock that stands
still but for the seconds that it is told, so that its tables, JSON and comparisons are of those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest


class RecordedClock:
    """A clock that only advances by what it is told."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def read(self) -> float:
        """Returns the seconds that the clock has run: a timer, as ``time.perf_counter`` is one."""
        return self._seconds

    def run(self, seconds: float) -> None:
        """Advances the clock."""
        self._seconds += seconds


_clock = RecordedClock()
#: The mark of tests that call :func:`report`.
MARK = pytest.mark.benchmark(timer=_clock.read)


def report(benchmark: Any, seconds: Sequence[float], **extra_info: Any) -> None:
    """Hands the seconds of every round to pytest-benchmark, and ``extra_info`` for its JSON.

    Raises:
        ValueError: There are no seconds, or the test lacks ``MARK``.
    """
    if not seconds:
        raise ValueError("seconds: got none, expected those of at least one round")
    benchmark.extra_info |= extra_info
    left = iter(seconds)
    benchmark.pedantic(lambda: _clock.run(next(left, 0.0)), rounds=len(seconds))
    if benchmark.stats is not None and not math.isclose(
        benchmark.stats.stats.total, sum(seconds), rel_tol=1e-3
    ):
        raise ValueError("benchmark: got another timer, expected the test to have the mark of this module")
