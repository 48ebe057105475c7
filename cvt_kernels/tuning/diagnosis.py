"""The report of ``cvt doctor``: what is installed, which backend serves each operator, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import torch

from .. import backends, choose, machine
from ..messages import printable
from . import choices

_BROKEN = "the extension does not load, see above"


def doctor() -> str:
    """Describes this machine: what is installed, which backends serve each operator, and why.

    Returns:
        The text that ``cvt doctor`` and ``python -m cvt_kernels`` print.

    Raises:
        ValueError: ``CVT_KERNELS_BACKEND`` or ``CVT_KERNELS_CPU`` has an unknown value.
    """
    facts = machine.facts()
    devices = _devices(facts)
    lines = [
        f"python   {facts.python}",
        f"torch    {facts.torch}",
        f"triton   {facts.triton}",
        f"cpu      {facts.cpu}",
        *(f"gpu      {gpu}" for gpu in facts.gpus or ("none",)),
        f"nvcc     {facts.nvcc}",
        f"compiled {facts.extension}",
        f"backend  {', '.join(backends.requested_backends())} requested",
        *(f"tuned    {_tuned(device)}" for device in devices),
    ]
    for device in devices:
        lines += ["", f"on {device.type}:", *_operators_by_server(device)]
    lines += _section("not available here:", _unavailable(devices))
    lines += _section(
        "failed their check on this machine, and not used; please report these lines:",
        (line for device in devices for line in _faults(device)),
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
    devices = {
        device.type: {
            "tuned": len(choices.entries(device)),
            "operators": {
                name: {"served_by": served, "reason": reason}
                for name, served, reason in _operator_rows(device)
            },
            "failed": list(_faults(device)),
        }
        for device in _devices(facts)
    }
    return {
        **facts._asdict(),
        "requested": backends.requested_backends(),
        "devices": devices,
        "not_available": list(_unavailable(_devices(facts))),
        "passed_over": {f"{op}, {name}": reason for (op, name), reason in backends.fallbacks().items()},
    }


def _devices(facts: machine.Machine) -> list[torch.device]:
    gpu = [torch.device("cuda", torch.cuda.current_device())] if facts.gpus else []
    return [torch.device("cpu"), *gpu]


def _section(heading: str, lines: Iterator[str]) -> list[str]:
    """Returns a heading with indented lines below it, or nothing if there are no lines."""
    indented = [f"  {line}" for line in lines]
    return ["", heading, *indented] if indented else []


# Choices -------------------------------------------------------------------------------------------------


def _tuned(device: torch.device) -> str:
    """Returns how many choices were tuned for a device, and their file."""
    count = len(choices.entries(device))
    if not count:
        return f"{device.type}: nothing; the table of this release decides"
    given = ", ".join(map(str, choices.given_files()))
    return f"{device.type}: {count} choices in {choices.path(device)}{' and ' if given else ''}{given}"


def _faults(device: torch.device) -> Iterator[str]:
    """Yields the kernels of this project that were wrong or failed, each with its cache key and flaw."""
    for cache_key, entry in sorted(choices.entries(device).items()):
        for backend in backends.OURS:
            measurement = entry.measurements.get(backend)
            if measurement is not None and measurement.flaw is not None:
                yield f"{cache_key}, {backend} on {device.type}: {measurement.flaw}"


# Backends -------------------------------------------------------------------------------------------------


def _operator_rows(device: torch.device) -> list[tuple[str, str, str]]:
    """Returns the operators on a device, each with the backends that serve it and the reasons."""
    rows = []
    for operator in backends.operators:
        try:
            chosen = choose.chosen_backends(operator, device)
        except machine.ExtensionError:
            chosen = [("none", _BROKEN)]
        names, reasons = zip(*chosen, strict=True) if chosen else (("none",), ("no backend is available",))
        rows.append((operator, ", ".join(names), "; ".join(dict.fromkeys(reasons))))
    return rows


def _operators_by_server(device: torch.device) -> Iterator[str]:
    """Yields what serves on a device and why, each followed by its operators."""
    served: dict[str, list[str]] = {}
    for name, backend, reason in _operator_rows(device):
        served.setdefault(f"  {backend}: {reason}", []).append(name)
    for server, names in served.items():
        yield server
        yield from textwrap.wrap(", ".join(names), 110, initial_indent=" " * 4, subsequent_indent=" " * 4)


def _unavailable(devices: list[torch.device]) -> Iterator[str]:
    """Yields the backends that this machine lacks, each with the reason and how many operators have it."""
    device_types = tuple(device.type for device in devices)
    lacking: dict[str, list[str]] = {}
    for operator, known in backends.implementations.items():
        for backend in (name for name in backends.BACKENDS if name in known):
            served = known[backend].devices or device_types
            # If a backend serves no device here, the reason for its own device.
            for device_type in [name for name in device_types if name in served] or served[:1]:
                reason = _why_unavailable_or_broken(operator, backend, device_type)
                operators = lacking.setdefault(f"{backend}: {reason}", []) if reason is not None else []
                if operator not in operators:
                    operators.append(operator)
    for reason, operators in lacking.items():
        yield f"{reason} ({operators[0] if len(operators) == 1 else f'{len(operators)} operators'})"


def _why_unavailable_or_broken(operator: str, backend: str, device_type: str) -> str | None:
    """Returns ``backends.why_unavailable``, or ``_BROKEN`` where that raises."""
    try:
        return backends.why_unavailable(operator, backend, device_type)
    except machine.ExtensionError:
        return _BROKEN
