"""The report of ``cvt doctor``: what is installed, which backend serves each operator, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

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
    facts = as_json()
    devices: dict[str, Any] = facts["devices"]
    lines = [
        f"python   {facts['python']}",
        f"torch    {facts['torch']}",
        f"triton   {facts['triton']}",
        f"cpu      {facts['cpu']}",
        *(f"gpu      {gpu}" for gpu in facts["gpus"] or ("none",)),
        f"nvcc     {facts['nvcc']}",
        f"compiled {facts['extension']}",
        f"backend  {', '.join(facts['requested'])} requested",
        *(f"tuned    {_tuned(device)}" for device in _devices()),
    ]
    for name, device in devices.items():
        served: dict[str, list[str]] = {}
        for operator, each in device["operators"].items():
            served.setdefault(f"  {each['served_by']}: {each['reason']}", []).append(operator)
        lines += ["", f"on {name}:"]
        for server, names in served.items():
            wrapped = textwrap.wrap(", ".join(names), 106)
            lines += [server, *(textwrap.indent(line, " " * 4) for line in wrapped)]
    faults = "failed their check on this machine, and not used; please report these lines:"
    sections = {
        "not available here:": facts["not_available"],
        faults: [fault for device in devices.values() for fault in device["failed"]],
        "passed over in this process:": [f"{pair}: {why}" for pair, why in facts["passed_over"].items()],
    }
    for heading, found in sections.items():
        lines += ["", heading, *(f"  {line}" for line in found)] if found else []
    return printable("\n".join(lines))


def as_json() -> dict[str, Any]:
    """Returns the facts of :func:`doctor`, serializable to JSON."""
    devices = {
        device.type: {
            "tuned": len(choices.entries(device)),
            "operators": {operator: _served(operator, device) for operator in backends.operators},
            "failed": [
                f"{cache_key}, {backend} on {device.type}: {entry.flaws[backend]}"
                for cache_key, entry in sorted(choices.entries(device).items())
                for backend in backends.OURS
                if backend in entry.flaws
            ],
        }
        for device in _devices()
    }
    return {
        **machine.facts()._asdict(),
        "requested": backends.requested_backends(),
        "devices": devices,
        "not_available": list(_unavailable(tuple(devices))),
        "passed_over": {f"{op}, {name}": reason for (op, name), reason in backends.fallbacks().items()},
    }


def _devices() -> list[torch.device]:
    gpu = [choices.numbered(torch.device("cuda"))] if machine.facts().gpus else []
    return [torch.device("cpu"), *gpu]


def _tuned(device: torch.device) -> str:
    """Returns how many choices were tuned for a device, and their file."""
    count = len(choices.entries(device))
    if not count:
        return f"{device.type}: nothing; the table of this release decides"
    given = ", ".join(map(str, choices.given_files()))
    return f"{device.type}: {count} choices in {choices.path(device)}{' and ' if given else ''}{given}"


def _served(operator: str, device: torch.device) -> dict[str, str]:
    """Returns the backends that serve an operator on a device, and the reasons."""
    try:
        chosen = choose.chosen_backends(operator, device) or [("none", "no backend is available")]
    except machine.ExtensionError:
        chosen = [("none", _BROKEN)]
    names, reasons = zip(*chosen, strict=True)
    return {"served_by": ", ".join(names), "reason": "; ".join(dict.fromkeys(reasons))}


def _unavailable(device_types: tuple[str, ...]) -> Iterator[str]:
    """Yields the backends that this machine lacks, each with the reason and how many operators have it."""
    lacking: dict[str, list[str]] = {}
    for operator, known in backends.implementations.items():
        for backend in (name for name in backends.BACKENDS if name in known):
            served = known[backend].devices or device_types
            # If a backend serves no device here, the reason for its own device.
            for device_type in [name for name in device_types if name in served] or served[:1]:
                try:
                    reason = backends.why_unavailable(operator, backend, device_type)
                except machine.ExtensionError:
                    reason = _BROKEN
                operators = lacking.setdefault(f"{backend}: {reason}", []) if reason is not None else []
                if operator not in operators:
                    operators.append(operator)
    for reason, operators in lacking.items():
        yield f"{reason} ({operators[0] if len(operators) == 1 else f'{len(operators)} operators'})"
