"""Pytest options of the suites, and the machine's description in their JSON."""

import signal
import time

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import machine

from . import suites

_deadline = float("inf")


def pytest_addoption(parser):
    """Adds the options of the suites."""
    group = parser.getgroup("suites")
    group.addoption("--tiny", action="store_true", help="shapes of a smoke test, as --benchmark-disable has")
    group.addoption("--seconds", type=float, help="skip what is not done after so many seconds")


def pytest_configure(config):
    """Sets the size of the shapes and the deadline, before the suites make their parameters of them."""
    global _deadline
    suites.TINY = config.getoption("tiny", False) or config.getoption("benchmark_disable", False)
    seconds = config.getoption("seconds", None)
    if seconds is not None:
        _deadline = time.monotonic() + seconds


@pytest.fixture(autouse=True, scope="session")
def _no_entries_of_a_smoke_test(tmp_path_factory):
    """Keeps a smoke test's entries out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        if suites.TINY:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def _out_of_time(*_):
    pytest.skip("out of time")


def _until_deadline():
    """Runs one phase of a test, and skips the rest of it when time is up."""
    if _deadline == float("inf"):
        return (yield)
    left = _deadline - time.monotonic()
    if left <= 0:
        _out_of_time()
    previous = signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, left)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Sets a test up, until the deadline."""
    return (yield from _until_deadline())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Runs a test, until the deadline."""
    return (yield from _until_deadline())


def pytest_benchmark_update_machine_info(config, machine_info):
    """Adds what the numbers depend on, and leaves the name of the machine out."""
    facts = machine.facts()
    machine_info.pop("node", None)
    machine_info |= facts._asdict() | {
        "cvt_kernels": ck.__version__,
        "device": suites.device_name(),
        "device_type": suites.DEVICE,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "tiny": suites.TINY,
    }


def pytest_benchmark_update_json(config, benchmarks, output_json):
    """Adds the ceilings that the shares refer to."""
    output_json["ceilings"] = suites.CEILINGS
