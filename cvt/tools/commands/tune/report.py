"""The report of ``cvt tune``: the table and the summary that it prints, and its JSON file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from cvt_kernels import __version__, backends
from cvt_kernels.autotune import FAILS_HERE, Cache, Entry, Measurement
from cvt_kernels.autotune.files import storable
from cvt_kernels.tables import aligned

from .cache_keys import Workload
from .tuning import Result

#: Written into the JSON file. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "cvt tune", 1


class _Kind(NamedTuple):
    """The calls that share a block of the table."""

    operator: str
    direction: str
    dtype: str


def table(results: Sequence[Result]) -> list[str]:
    """Returns the lines of a table: a block for each operator, direction and dtype, a line per cache key.

    A backend's column has microseconds, or its flaw in a word; the error is the largest of our kernels'.
    """
    blocks: dict[_Kind, list[Result]] = {}
    for result in results:
        kind, _ = _kind_and_case(result.cache_key)
        blocks.setdefault(kind, []).append(result)
    lines: list[str] = []
    for kind, block in blocks.items():
        lines += [""] * bool(lines) + [f"{', '.join(kind)} (times in µs)", *_rows(block)]
    return lines


def _rows(results: Sequence[Result]) -> list[str]:
    """Returns the lines of a block, with the columns of the backends that were tried for it."""
    names = [name for name in backends.BACKENDS if any(name in _measurements(result) for result in results)]
    heading = ["case", *names, "error / allowed", "chosen"]
    rows = [[_kind_and_case(result.cache_key)[1], *_cells(result, names)] for result in results]
    return aligned([heading, *rows], right=range(1, 2 + len(names)))


def _kind_and_case(cache_key: str) -> tuple[_Kind, str]:
    """Returns the two parts of a cache key, without the geometry of convolutions."""
    operator, direction, dtype, case = cache_key.split(", ", 3)
    kind = _Kind(operator, direction, dtype.replace(" under autocast to ", " → "))
    return kind, case.split(", kernel/")[0]


def _cells(result: Result, names: Sequence[str]) -> list[str]:
    measurements = _measurements(result)
    ours = [measurements[name] for name in backends.OURS if name in measurements]
    errors = [
        measurement.error / measurement.allowed
        for measurement in ours
        if measurement.error is not None and measurement.allowed
    ]
    error = f"{max(errors):.2g}" if errors else "–"
    return [*(_cell(measurements.get(name)) for name in names), error, _chosen(result.entry)]


def _cell(measurement: Measurement | None) -> str:
    if measurement is None:
        return "–"
    if measurement.flaw is not None:
        return measurement.flaw.partition(":")[0]
    return "right" if measurement.call_seconds is None else f"{1e6 * measurement.call_seconds:.0f}"


def _chosen(entry: Entry | None) -> str:
    if entry is None:
        return "not tuned"
    in_graphs = entry.chosen_in_graphs
    return entry.chosen if in_graphs == entry.chosen else f"{entry.chosen}, {in_graphs} in graphs"


def _measurements(result: Result) -> dict[str, Measurement]:
    return result.entry.measurements if result.entry is not None else {}


def summary(results: Sequence[Result], cache: Cache) -> list[str]:
    """Returns the lines of the summary: every flaw, the number of cache keys, and where the cache is."""
    lines = [
        f"{name}, {result.cache_key}: {flaw}" for result in results for name, flaw in result.flaws.items()
    ]
    if any(flaw.startswith(FAILS_HERE) for result in results for flaw in result.flaws.values()):
        lines.append("What fails here is not remembered: every process tries it again.")
    if any(name in backends.OURS for result in results for name in result.flaws):
        lines.append(
            f"No kernel with a flaw is used. Please report the lines of {', '.join(backends.OURS)} with the "
            "output of `cvt doctor`."
        )
    lines += [f"not tuned, {each.cache_key}: {each.why_not_tuned}" for each in results if not each.entry]
    tuned = [result.entry for result in results if result.entry is not None]
    chosen = ", ".join(f"{name} {count}" for name, count in _counts(tuned).items())
    lines.append(f"{len(results)} cache keys, {len(tuned)} tuned; chosen: {chosen or 'nothing'}")
    reason = cache.why_not_remembered()
    lines.append(
        f"remembered in {cache.path}" if reason is None else f"not remembered in {cache.path}: {reason}"
    )
    if (advice := cache.advice()) is not None:
        lines.append(advice)
    if files := os.environ.get("CVT_KERNELS_TUNED"):
        lines.append(f"CVT_KERNELS_TUNED is set: the entries in {files} go before them")
    if (requested := backends.requested_backends()) != ("auto",):
        lines.append(f"CVT_KERNELS_BACKEND is {','.join(requested)}: entries serve under auto only")
    return lines


def _counts(tuned: Sequence[Entry]) -> dict[str, int]:
    chosen = [entry.chosen for entry in tuned]
    return {name: chosen.count(name) for name in backends.BACKENDS if name in chosen}


def as_json(results: Sequence[Result], workload: Workload, cache: Cache) -> dict[str, Any]:
    """Returns the contents of the JSON file, with every measurement."""
    reason = cache.why_not_remembered()
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "cvt_kernels": __version__,
        "machine": cache.key,
        "workload": workload._asdict(),
        "remembered_in": str(cache.path) if reason is None else None,
        "why_not_remembered": reason,
        "cache_keys": [_cache_key_as_json(result) for result in results],
    }


def _cache_key_as_json(result: Result) -> dict[str, Any]:
    entry = None if result.entry is None else storable(result.entry)
    return {
        "cache_key": result.cache_key,
        "chosen": entry.chosen if entry else None,
        "chosen_in_graphs": entry.chosen_in_graphs if entry else None,
        "why_not_tuned": result.why_not_tuned,
        "measurements": {name: measurement._asdict() for name, measurement in entry.measurements.items()}
        if entry
        else {},
    }
