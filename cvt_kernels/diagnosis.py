"""The report of ``cvt doctor``: what is installed, which backend serves each operator, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from . import autotune, backends, dispatch, machine
from .tables import aligned, printable

_BROKEN = "the extension does not load, see above"


def doctor() -> str:
    """Describes this machine: what is installed, which backends serve each operator, and what is cached.

    Returns:
        The text that ``cvt doctor`` and ``python -m cvt_kernels`` print.

    Raises:
        ValueError: ``CVT_KERNELS_BACKEND``, ``CVT_KERNELS_CPU``, ``CVT_KERNELS_AUTOTUNE`` or
            ``CVT_KERNELS_AUTOTUNE_SECONDS`` has an unknown value.
    """
    facts = machine.facts()
    device_types = ("cpu", "cuda") if facts.gpus else ("cpu",)
    caches = {name: autotune.cache_for(torch.device(name)) for name in device_types}
    lines = [
        f"python   {facts.python}",
        f"torch    {facts.torch}",
        f"triton   {facts.triton}",
        f"cpu      {facts.cpu}",
        *(f"gpu      {gpu}" for gpu in facts.gpus or ("none",)),
        f"nvcc     {facts.nvcc}",
        f"compiled {facts.extension}",
        f"backend  {', '.join(backends.requested_backends())} requested",
        f"autotune {_tuning()}",
        *(f"entries  {_entries_line(name, cache)}" for name, cache in caches.items()),
        *(f"entries  {name}: {advice}" for name, cache in caches.items() if (advice := cache.advice())),
        *(f"entries  {line}" for line in _shipped(list(caches.values()))),
    ]
    for device_type in device_types:
        lines += ["", *aligned(_operator_rows(device_type))]
    if facts.gpus:
        lines += ["", *_AT_FIRST_USE_ON_A_GPU]
    lines += _section("not available here:", _unavailable(device_types))
    lines += _section(
        "failed their check on this machine, and not used; please report these lines:",
        (line for name, cache in caches.items() for line in _faults(name, cache)),
    )
    lines += _section(
        "not tuned in this process:", (f"{key}: {reason}" for key, reason in backends.untuned().items())
    )
    lines += _section(
        "passed over in this process:",
        (f"{operator}, {backend}: {reason}" for (operator, backend), reason in backends.fallbacks().items()),
    )
    return printable("\n".join(lines))


def as_json() -> dict[str, object]:
    """Returns the facts of :func:`doctor`, serializable to JSON.

    Raises:
        ValueError: As :func:`doctor`.
    """
    facts = machine.facts()
    device_types = ("cpu", "cuda") if facts.gpus else ("cpu",)
    devices = {}
    for device_type in device_types:
        rows = _operator_rows(device_type)[1:]
        devices[device_type] = {
            "entries": len(autotune.cache_for(torch.device(device_type)).entries()),
            "operators": {name: {"backends": able, "served_by": served} for name, able, served in rows},
            "failed": list(_faults(device_type, autotune.cache_for(torch.device(device_type)))),
        }
    return {
        **facts._asdict(),
        "requested": backends.requested_backends(),
        "autotune": autotune.tuning_enabled(),
        "seconds_per_call": _seconds_as_json(),
        "devices": devices,
        "not_available": list(_unavailable(device_types)),
        "not_tuned": backends.untuned(),
        "passed_over": {f"{op}, {name}": reason for (op, name), reason in backends.fallbacks().items()},
    }


_AT_FIRST_USE_ON_A_GPU = (
    "On a GPU the first call of each kind is slow: Triton compiles its kernel, every backend is compared",
    "with float64 and timed, and the fastest serves from then on. `cvt tune` does so ahead of time.",
)


def _section(heading: str, lines: Iterator[str]) -> list[str]:
    """Returns a heading with indented lines below it, or nothing if there are no lines."""
    indented = [f"  {line}" for line in lines]
    return ["", heading, *indented] if indented else []


# Entries -------------------------------------------------------------------------------------------------


def _tuning() -> str:
    if autotune.tuning_enabled():
        seconds = autotune.tuning_seconds()
        limit = "without a limit" if seconds == math.inf else f"for {seconds:g} s per call"
        return f"on: auto checks and times the backends at the first calls of each kind, {limit}"
    return "off (CVT_KERNELS_AUTOTUNE=0): without an entry, auto takes PyTorch's own operator"


def _seconds_as_json() -> float | None:
    """Returns the limit of a call; None for no limit, since JSON has no infinity."""
    seconds = autotune.tuning_seconds()
    return None if seconds == math.inf else seconds


def _entries_line(device_type: str, cache: autotune.Cache) -> str:
    """Returns how many entries a type of device has, how many are in the user's cache, and its file."""
    known, cached = len(cache.entries()), len(cache.cached_entries())
    counts = f"{device_type}: {known} known"
    if known:
        counts += f", {cached or 'none'} of them in the cache"
    reason = cache.why_not_remembered(may_write=False)
    if reason is None:
        return f"{counts}; new ones go to {cache.path}"
    return f"{counts}; new ones hold for one process only: {reason}"


def _shipped(caches: list[autotune.Cache]) -> Iterator[str]:
    """Yields how many entries of each file in ``CVT_KERNELS_TUNED`` apply here, or why it is ignored."""
    by_cache = [cache.shipped_files() for cache in caches]
    for path in by_cache[0]:
        found = [files[path] for files in by_cache]
        reasons = [each for each in found if isinstance(each, str)]
        counts = sum(each for each in found if isinstance(each, int))
        yield f"{path}: ignored: {reasons[0]}" if reasons else f"{path}: {counts} of them, read only"


def _faults(device_type: str, cache: autotune.Cache) -> Iterator[str]:
    """Yields the kernels of this project that were wrong or failed, each with its cache key and flaw."""
    for cache_key, entry in sorted(cache.entries().items()):
        for backend in backends.OURS:
            measurement = entry.measurements.get(backend)
            if measurement is not None and measurement.flaw is not None:
                yield f"{cache_key}, {backend} on {device_type}: {measurement.flaw}"


# Backends -------------------------------------------------------------------------------------------------


def _operator_rows(device_type: str) -> list[tuple[str, str, str]]:
    """Returns the table of operators on a type of device, with their available and serving backends."""
    rows = [(f"on {device_type}", "backends", "served by (number of entries)")]
    for operator in backends.operators:
        reasons = {
            name: _why_unavailable_or_broken(operator, name, device_type) for name in _implemented(operator)
        }
        available = [name for name, reason in reasons.items() if reason is None]
        is_broken = _BROKEN in reasons.values()
        rows.append((operator, ", ".join(available), _served_by(operator, device_type, available, is_broken)))
    return rows


def _implemented(operator: str) -> list[str]:
    return [name for name in backends.BACKENDS if name in backends.implementations[operator]]


def _served_by(operator: str, device_type: str, available: list[str], is_broken: bool) -> str:
    """Returns the backends that serve an operator, with the numbers of their entries."""
    if backends.requested_backends() != ("auto",):
        try:
            return next(iter(dispatch.chosen_backends(operator, device_type)), "none")
        except machine.ExtensionError:
            return "none"
    if is_broken:
        return "none"
    if len(available) == 1:  # nothing to choose
        return available[0]
    counts = dispatch.chosen_backends(operator, device_type)
    ordered = sorted(counts, key=lambda name: -counts[name])
    untuned = "not used yet" if autotune.tuning_enabled() else "PyTorch's own operator"
    return ", ".join(f"{name} {counts[name]}" for name in ordered) or untuned


def _unavailable(device_types: tuple[str, ...]) -> Iterator[str]:
    """Yields the backends that this machine lacks, each with the reason and the operators."""
    lacking: dict[str, list[str]] = {}
    for operator in backends.operators:
        for backend in _implemented(operator):
            served = backends.registered(operator, backend).devices or device_types
            # If a backend serves no device here, the reason for its own device.
            for device_type in [name for name in device_types if name in served] or served[:1]:
                reason = _why_unavailable_or_broken(operator, backend, device_type)
                operators = lacking.setdefault(f"{backend}: {reason}", []) if reason is not None else []
                if operator not in operators:
                    operators.append(operator)
    for reason, operators in lacking.items():
        yield reason
        yield f"  ({', '.join(operators)})"


def _why_unavailable_or_broken(operator: str, backend: str, device_type: str) -> str | None:
    """Returns ``backends.why_unavailable``, or ``_BROKEN`` where that raises."""
    try:
        return backends.why_unavailable(operator, backend, device_type)
    except machine.ExtensionError:
        return _BROKEN
