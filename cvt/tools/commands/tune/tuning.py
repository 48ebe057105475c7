"""Autotuning of cache keys one by one, in a worker process that may hang or crash."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from cvt_kernels import backends
from cvt_kernels.autotune import Cache, Entry, Measurement, tuner

from .cache_keys import CacheKey
from .worker import Failure, NotEnoughMemory, Worker


class Result(NamedTuple):
    """The result for one cache key: its entry, or why it could not be tuned."""

    cache_key: str
    entry: Entry | None
    why_not_tuned: str | None = None

    @property
    def flaws(self) -> dict[str, str]:
        """The flaws of the backends that failed, by name."""
        measurements = self.entry.measurements if self.entry is not None else {}
        return {
            name: measurement.flaw
            for name, measurement in measurements.items()
            if measurement.flaw is not None
        }

    @property
    def is_good(self) -> bool:
        """True if there is an entry, and no kernel of this project has a flaw."""
        return self.entry is not None and not any(name in backends.OURS for name in self.flaws)


def compile_ahead(cache_keys: Iterable[CacheKey], device: torch.device, until: float = math.inf) -> None:
    """Compiles the Triton kernels for cache keys in several processes, until a time of ``time.monotonic()``.

    So compilation does not count towards a kernel's time limit. A failure to compile shows when it is tuned.
    """
    kernels = {"triton", "gluon"}
    todo = [each for each in cache_keys if kernels & backends.implementations[each.operator].keys()]
    with Worker(device, 0.0) as worker, contextlib.suppress(Failure):
        for cache_key in todo:
            if time.monotonic() < until:
                with contextlib.suppress(Failure):
                    worker.begin_to_compile(cache_key)
        while todo and not worker.wait_for_compilers(_PART) and time.monotonic() < until:
            pass


_PART = 1.0  # seconds


def tune_all(
    cache_keys: Iterable[CacheKey], worker: Worker, cache: Cache, until: float = math.inf
) -> Iterator[Result]:
    """Tunes cache keys, and yields each result after its entry is cached.

    A cache key with a single candidate has no result. Nothing starts after ``until`` (``time.monotonic()``).
    """
    for cache_key in cache_keys:
        if time.monotonic() >= until:
            yield Result(cache_key.text, None, "the time limit was reached before")
            continue
        with cache.tuning():
            result = tune(cache_key, worker)
            if result is None:
                continue
            if result.entry is not None and cache.why_not_remembered() is None:
                cache.remember({cache_key.text: result.entry}, replace=True)
        yield result


def tune(cache_key: CacheKey, worker: Worker) -> Result | None:
    """Checks and times the candidates for a cache key; returns None if there is only one."""
    try:
        candidates = worker.candidates(cache_key)
        if len(candidates.names) == 1:
            return None
        measurements = {name: worker.check(cache_key, name) for name in candidates.names}
        measurements |= _time(cache_key, measurements, worker)
    except NotEnoughMemory:
        return Result(cache_key.text, None, "there is not enough memory")
    except Failure as failure:
        return Result(cache_key.text, None, f"the preparation {failure}")
    return Result(cache_key.text, tuner.choose(measurements, candidates.default, worker.margin))


def _time(
    cache_key: CacheKey, measurements: dict[str, Measurement], worker: Worker
) -> dict[str, Measurement]:
    """Times the candidates without a flaw, in turns; if that fails, again without those that fail alone."""
    results: dict[str, Measurement] = {}
    sound = {name: measurement for name, measurement in measurements.items() if measurement.flaw is None}
    while len(sound) > 1:
        try:
            return results | worker.time(cache_key, sound)
        except NotEnoughMemory:
            raise
        except Failure:
            failing = {
                name: _flaw_alone(cache_key, name, measurement, worker) for name, measurement in sound.items()
            }
        flawed = {name: sound.pop(name)._replace(flaw=flaw) for name, flaw in failing.items() if flaw}
        if not flawed:  # they fail only together, so that nothing is known about their speed
            break
        results |= flawed
    return results


def _flaw_alone(cache_key: CacheKey, name: str, measurement: Measurement, worker: Worker) -> str | None:
    """Returns the flaw of a candidate that is timed alone, against itself, or None."""
    try:
        worker.time(cache_key, {name: measurement})
    except NotEnoughMemory:
        raise
    except Failure as failure:
        return str(failure)
    return None
