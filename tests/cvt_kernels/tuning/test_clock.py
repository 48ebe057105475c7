"""Tests of the clock."""

import gc
import os

import pytest
import torch

from cvt_kernels.tuning import clock
from tests.processes import run_python


@pytest.fixture
def timer(monkeypatch):
    """Replaces the wall clock by one that only what is measured moves on."""

    class Clock:
        now = 0.0

        def spend(self, seconds):
            self.now += seconds

    timer = Clock()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: timer.now)
    return timer


# Clocks ---------------------------------------------------------------------------------------------------


def costing(timer, calls, name, costs):
    """Returns a function that notes its name and takes one of these times after the other."""

    def call():
        calls.append(name)
        timer.spend(costs[calls.count(name) - 1])

    return call


def test_functions_take_turns_and_the_first_round_warms_up(timer):
    calls, rounds = [], []

    def before_run(i):
        rounds.append(i)
        timer.spend(1000.0)  # is not measured

    functions = [costing(timer, calls, "a", [100.0, 1.0, 3.0]), costing(timer, calls, "b", [50.0, 2.0, 4.0])]
    timed = clock.times_in_turns(functions, 2, "cpu", before_run=before_run)
    assert [times.seconds for times in timed] == [[1.0, 3.0], [2.0, 4.0]]
    assert "".join(calls) == "abbaab"
    assert rounds == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("costs", "waits", "disturbed"),
    [
        ([1.0, 1.1, 1.2, 5.0], 0.0, False),  # once
        ([1.0, 2.1, 2.2, 2.3], 0.0, True),  # half of the runs took twice as long as the fastest
        ([1.0, 1.1, 1.2, 1.3], 0.1, False),
        ([1.0, 1.1, 1.2, 1.3], 0.2, True),  # threads waited for a CPU
    ],
)
def test_turns_that_other_work_disturbs(timer, monkeypatch, costs, waits, disturbed):
    calls = []
    monkeypatch.setattr(clock, "waited_seconds", lambda: waits * len(calls))
    function = costing(timer, calls, "a", [9.0, *costs])
    (times,) = clock.times_in_turns([function], 4, "cpu")
    assert times.seconds == pytest.approx(costs)
    assert times.is_disturbed == disturbed


def test_the_clock_of_a_gpu_runs_between_two_readings_once_armed(monkeypatch):
    class Event:
        now = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = Event.now

        def synchronize(self):
            Event.now += 5.0  # what was queued takes so long

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(clock, "_flush_cache", lambda: None)
    timer = clock.DeviceClock()
    assert timer.read() == timer.read() == 0.0  # pytest-benchmark reads it at other times too
    for measured in (3.0, 4.0):
        timer.arm()
        before = timer.read()
        Event.now += measured
        assert timer.read() - before == pytest.approx(measured / 1e3)
        assert timer.read() == timer.read()


CPU = torch.device("cpu")


@pytest.fixture
def flushed(timer, monkeypatch):
    """Lists "flush" where the CPU's caches are flushed, which takes a second of the replaced clock."""
    events = []

    class Buffer:
        def zero_(self):
            events.append("flush")
            timer.spend(1.0)

    monkeypatch.setattr(clock, "_flush_buffer", lambda kind, number: Buffer())
    return events


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [(0.0, 3), (30.0, 3), (31.0, 4), (1e9, 8)],  # of ten seconds each, flushes included
)
def test_cold_runs_take_turns_until_the_time_is_over(timer, flushed, seconds, rounds):
    functions = [costing(timer, flushed, "a", [3.0] * 8), costing(timer, flushed, "b", [5.0] * 8)]
    times = clock.cold_seconds_in_turns(functions, CPU, seconds, fewest=3, most=8)
    assert times == [[3.0] * rounds, [5.0] * rounds]
    forth, back = ["flush", "a", "flush", "b"], ["flush", "b", "flush", "a"]
    assert flushed == ([*forth, *back] * 4)[: 4 * rounds]


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="needs Linux")
def test_seconds_that_threads_wait_for_a_cpu():
    """Two threads that compute on one CPU wait for each other half of the time."""
    code = """
import hashlib, os, threading, time
from cvt_kernels.tuning import clock
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
data, end = bytes(2**20), time.monotonic() + 0.2
def compute():
    while time.monotonic() < end:
        hashlib.sha256(data).digest()  # without the GIL
threads = [threading.Thread(target=compute) for _ in range(2)]
before = clock.waited_seconds()
for thread in threads:
    thread.start()
time.sleep(0.15)
print(clock.waited_seconds() - before)
"""
    result = run_python(code)
    assert float(result.stdout) > 0.03, result.stderr


@pytest.mark.gpu
def test_what_cannot_be_captured_leaves_the_process_as_it_was():
    def asks_the_host():
        torch.rand(2**26, device="cuda").sum().item()

    numbers = clock.graph_replay(lambda: torch.rand(4, device="cuda"))
    stream = torch.cuda.current_stream()
    for _ in range(8):
        assert clock.graph_replay(asks_the_host) is None
        assert torch.cuda.current_stream() == stream
        torch.rand(1, device="cuda")
    numbers()  # its random numbers go on from those outside
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 4 * 2**28  # each run takes 2²⁸ bytes


# Who measures ---------------------------------------------------------------------------------------------
