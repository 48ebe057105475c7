"""A report for people: what is installed here, which backend serves each operator, and why not another."""

from __future__ import annotations

from . import backends, machine
from .tables import aligned


def doctor() -> str:
    """Describes this machine and, for every operator and backend, whether it serves here or why it does not.

    Returns:
        Lines for a terminal; ``cvt doctor`` and ``python -m cvt_kernels`` print them.
    """
    facts = machine.facts()
    device_types = ("cpu", "cuda") if facts.gpus else ("cpu",)
    rows, reasons = _operator_rows(device_types)
    lines = [
        f"python   {facts.python}",
        f"torch    {facts.torch}",
        f"triton   {facts.triton}",
        f"cpu      {facts.cpu}",
        *(f"gpu      {gpu}" for gpu in facts.gpus or ("none",)),
        f"nvcc     {facts.nvcc}",
        f"native   {facts.native}",
        f"backend  {', '.join(backends.requested_backends())} requested",
        "",
        *aligned(rows),
        "",
        *(f"({number}) {reason}" for number, reason in enumerate(reasons, 1)),
    ]
    fallbacks = backends.fallbacks()
    if fallbacks:
        lines += ["", "passed over in this process:"]
        lines += [f"  {operator}, {backend}: {reason}" for (operator, backend), reason in fallbacks.items()]
    return "\n".join(lines)


def _operator_rows(device_types: tuple[str, ...]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns the table of operators × backends, and the reasons that its "no (n)" refer to."""
    reasons: list[str] = []
    rows = [("operator", *backends.BACKENDS, *(f"auto on {device}" for device in device_types))]
    for operator in backends.OPERATORS:
        answers = [_answer(operator, backend, device_types, reasons) for backend in backends.BACKENDS]
        chosen = [_chosen(operator, device) for device in device_types]
        rows.append((operator, *answers, *chosen))
    return rows, reasons


def _answer(operator: str, backend: str, device_types: tuple[str, ...], reasons: list[str]) -> str:
    """Answers "yes", or "no (n)" with the n-th of ``reasons``, to which a new reason is appended."""
    reasons_against = [_why_unavailable_or_broken(operator, backend, device) for device in device_types]
    if None in reasons_against:
        return "yes"
    reason = f"{backend}: {reasons_against[0]}"
    if reason not in reasons:
        reasons.append(reason)
    return f"no ({reasons.index(reason) + 1})"


def _chosen(operator: str, device_type: str) -> str:
    """Returns the backends that serve an operator, with the numbers of their verdicts."""
    try:
        counts = backends.chosen_backends(operator, device_type)
    except machine.ExtensionError:
        return "none"
    words = (f"{name} {count}" if count else name for name, count in counts.items())
    return ", ".join(words) or "not proven yet"


def _why_unavailable_or_broken(operator: str, backend: str, device_type: str) -> str | None:
    """Answers as ``backends.why_unavailable``, but goes on where a call would raise."""
    try:
        return backends.why_unavailable(operator, backend, device_type)
    except machine.ExtensionError:
        return "the extension does not load, see above"
