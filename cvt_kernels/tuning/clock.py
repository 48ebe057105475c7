"""Timing: functions in turns, whole steps by the wall clock, single operators with caches flushed before.

On a GPU operators are captured in CUDA graphs, whose replays are timed by events, so that neither the host
nor a warm cache counts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import machine

Device = torch.device | str


def synchronize(device: Device) -> None:
    """Waits for all work of a GPU; does nothing for other devices."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def now(device: Device) -> float:
    """Synchronizes a GPU and returns the wall clock's seconds."""
    synchronize(device)
    return time.perf_counter()


#: With fewer runs nothing is said about noise.
LEAST_RUNS = 4
#: What is said of speeds that other work on the machine disturbed.
DISTURBED = "other programs kept this machine busy: the speeds are rough, measure again when it is idle"


class Times:
    """The seconds of runs by the wall clock, after those that warm up.

    Attributes:
        seconds: Of each run.
        waited: The seconds that threads waited for a CPU during each run, as of :func:`waited_seconds`.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.waited: list[float] = []

    @contextlib.contextmanager
    def run(self, device: Device) -> Iterator[None]:
        """Adds the time of the block; a GPU is synchronized before and after it."""
        waited, start = waited_seconds(), now(device)
        yield
        self.add(now(device) - start, waited_seconds() - waited)

    def add(self, seconds: float, waited: float) -> None:
        """Adds a run."""
        self.seconds.append(seconds)
        self.waited.append(waited)

    def without_first(self) -> Times:
        """Returns the times of all runs but the first, which warms up."""
        others = Times()
        others.seconds, others.waited = self.seconds[1:], self.waited[1:]
        return others

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)

    @property
    def is_disturbed(self) -> bool:
        """True if other work on the machine disturbed the runs.

        Then half of them took twice as long as the fastest one, or threads waited for a CPU for a tenth of
        the median (on Linux).
        """
        waited = statistics.median(self.waited)
        return self.median > 2 * min(self.seconds) or waited > _MOST_WAITING * self.median


def times_in_turns(
    functions: Sequence[Callable[[], Any]],
    rounds: int,
    device: Device,
    *,
    before_run: Callable[[int], Any] | None = None,
) -> list[Times]:
    """Times functions by the wall clock, one run of each per round, so that load hits all of them alike.

    Every other round goes backwards, because the caches that a function leaves behind are worth a tenth of a
    small call's time to the next one. Round 0 warms up. ``before_run`` is called before each run with the
    number of the round; a GPU is synchronized before and after.
    """
    timed, warm_up = [Times() for _ in functions], Times()
    for i in range(rounds + 1):
        turns = list(zip(functions, timed, strict=True))
        for function, times in turns if i % 2 == 0 else reversed(turns):
            if before_run is not None:
                before_run(i)
            with (times if i > 0 else warm_up).run(device):
                function()
    return timed


class DeviceClock:
    """A clock of the current GPU, which runs only between the two readings after :meth:`arm`.

    It stands in for a timer that is read before and after a call, like ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[torch.cuda.Event] = []
        self._left = 0

    def arm(self) -> None:
        """Flushes L2, which keeps the GPU busy until the host has launched the work to be timed."""
        _flush_cache()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._left = 2

    def read(self) -> float:
        """Returns the seconds that the clock has run."""
        if self._left:
            self._events[-self._left].record()
            self._left -= 1
            if not self._left:
                self._events[1].synchronize()
                self._seconds += self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._seconds


def cold_seconds_in_turns(
    functions: Sequence[Callable[[], Any]],
    device: torch.device,
    seconds: float,
    *,
    fewest: int,
    most: int,
) -> list[list[float]]:
    """Times functions in turns, with L2 flushed before each run, until the time of all rounds is up.

    Run them once before, or the first run's preparations are timed. A GPU must be the current one; the
    results are its seconds.
    """
    taken: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()
    for i in range(most):
        if i >= fewest and time.perf_counter() - start >= seconds:
            break
        turns = list(zip(functions, taken, strict=True))
        for function, times in turns if i % 2 == 0 else reversed(turns):
            times.append(_cold_seconds(function, device))
    return taken


_MOST_WAITING = 0.1  # the part of a run's time that threads may wait for a CPU on an idle machine


def waited_seconds() -> float:
    """Returns the seconds that this process's threads, together, were ready and waited for a CPU.

    It is 0 on systems other than Linux.
    """
    nanoseconds = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # the thread has ended, or all zero
            nanoseconds += int(path.read_text(encoding="ascii").split()[1])
    return nanoseconds / 1e9


def _cold_seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Returns the seconds of a run."""
    if device.type == "cuda":
        return device_seconds(function)
    _flush_buffer("cpu", torch.get_num_threads()).zero_()
    _let_others_run()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def device_seconds(function: Callable[[], Any]) -> float:
    """Returns the seconds of a run on the current GPU, with a cold L2."""
    clock = DeviceClock()
    clock.arm()
    clock.read()
    function()
    return clock.read()


#: Yields the CPU now, so that the scheduler interrupts fewer timed runs: on a busy machine 3 of 100 short
#: runs instead of 13.
_let_others_run: Callable[[], Any] = getattr(os, "sched_yield", lambda: None)  # Windows has none


def _flush_cache() -> None:
    _flush_buffer("cuda", torch.cuda.current_device()).zero_()


@functools.cache
def _flush_buffer(kind: str, number: int) -> torch.Tensor:
    """Returns a buffer that fills the L2 of GPU ``number``, or on a CPU the L2 of ``number`` cores."""
    size = number * 2**22
    if kind == "cuda":
        size = max(4 * torch.cuda.get_device_properties(number).L2_cache_size, 2**28)
    device = torch.device("cuda", number) if kind == "cuda" else "cpu"
    with torch.inference_mode(False):  # an inference tensor could not be written outside of that mode
        return torch.empty(size, dtype=torch.uint8, device=device)


def release_memory(device: torch.device) -> None:
    """Frees the memory that cold timing has taken on a device, which may be large on a GPU."""
    _flush_buffer.cache_clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def graph_replay(*functions: Callable[[], Any]) -> Callable[[], None] | None:
    """Captures functions in a CUDA graph, in order; returns the graph's replay, or None if that fails."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for function in 2 * functions:
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with machine.captured(graph, torch.cuda.graph_pool_handle(), stream):
            for function in functions:
                function()
    except RuntimeError:  # the function synchronizes with the host
        torch.cuda.synchronize()
        return None
    return graph.replay
