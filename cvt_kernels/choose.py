"""The choice of the backend that serves a call: a constant of the process, known before the call.

Under ``auto`` it is, in this order: what :func:`cvt_kernels.tune` wrote on this machine
(``tuning.choices``); the row of :data:`TABLE` for the operator, the processor, the dtype, gradients and,
where it matters, the size; PyTorch's own operators. The first that can serve the call does. Nothing is
checked, timed or compiled for it.

This module is plain Python over module globals and the requested backends, so that
``torch.compile(fullgraph=True)`` traces through it.
"""

from __future__ import annotations

import collections
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import backends, checks, machine, messages, modes
from .backends import (
    ANY_SIZE,
    OURS,
    BackendUnavailable,
    Implementation,
    Record,
    why_unavailable,
    why_unsupported,
)
from .launch import launching
from .tuning import choices

# The table ------------------------------------------------------------------------------------------------

_HALF = (torch.float16, torch.bfloat16)


class Row(NamedTuple):
    """A row: the backends for a class of calls, in order of preference; the operator's defaults come after.

    Attributes:
        operators: Names of operators; none for all.
        processor: ``"cpu"``, or the compute capability of an NVIDIA GPU, such as ``"9.0"``.
        backends: Their names; none for the operator's defaults.
        reason: Why, in a few words: for ``fallbacks``, ``coverage`` and ``doctor``.
        dtypes: The dtypes of the calls, autocast's where it is on; none for all.
        gradient: Whether autograd records the calls; None for both.
        has, lacks: An instruction set that the CPU has, and one that it lacks (``toolkit.CPU_SETS``).
        where: Takes the record of a call; returns whether its sizes are among those that the row is for.
            Such a row does not hold where ``torch.compile`` traces, since sizes may be symbolic there.
    """

    operators: tuple[str, ...]
    processor: str
    backends: tuple[str, ...]
    reason: str
    dtypes: tuple[torch.dtype, ...] = ()
    gradient: bool | None = None
    has: str = ""
    lacks: str = ""
    where: Callable[[Record], bool] | None = None


def _rows_of(call: Record) -> int:
    return call[0].shape[:-1].numel()


def _is_narrow(call: Record) -> bool:
    """Returns whether the projection with its linear layers is faster in one kernel than in parts."""
    channels = call[0].shape[-1]
    return channels <= 64 or (channels <= 192 and _rows_of(call) <= 2**15)


def _is_small(call: Record) -> bool:
    """Returns whether a product is too small for cuBLAS to be ahead of one with an epilogue."""
    return _rows_of(call) < 2**14 or call.weight.shape[1] < 256


#: The first row that is for a call decides. CPUs have ours but for a few rows; figures of four instruction
#: sets are in docs/cpu.md. GPUs have what has run, and won, on a GPU of that capability: an H200 on
#: 2026-11-26 and 27 (benchmarks/results/nvidia-h200). Elsewhere PyTorch's serve until `tune` has run.
TABLE: tuple[Row, ...] = (
    Row(
        ("linear",), "cpu", ("convolution",), "oneDNN's convolution takes 0.75 to 0.9 of F.linear's time",
        (torch.bfloat16,), gradient=False, has="avx512_bf16",
        where=lambda call: _rows_of(call) >= 1024 and call.weight.shape[1] <= 256,
    ),
    Row(
        ("linear",), "cpu", ("float32",), "this CPU has no fast products of bfloat16: float32 takes 0.1 to 1",
        (torch.bfloat16,), gradient=False, lacks="avx512_bf16",
    ),
    Row(
        ("linear",), "cpu", ("float32",), "this CPU has no products of float16: float32 takes 0.06 to 0.2",
        (torch.float16,), gradient=False, lacks="avx512_fp16",
    ),
    Row((), "cpu", ("cpu",), "ours are ahead on CPUs"),
    Row(("layer_norm", "add_layer_norm"), "9.0", ("cuda",), "ahead on an H200", _HALF),
    Row(("conv_projection",), "9.0", ("triton",), "0.3 of PyTorch's time on an H200", _HALF),
    Row(
        ("attention", "conv_embedding", "layer_norm_mlp"), "9.0", ("triton",), "ahead on an H200",
        _HALF, False,
    ),
    Row(
        ("conv_linear",), "9.0", ("triton",), "one kernel is ahead of its parts on an H200", _HALF, False,
        where=_is_narrow,
    ),
    Row(("conv_linear",), "9.0", ("composed",), "the parts are ahead on an H200: 97 of 190 µs", _HALF, False),
    Row(("linear_gelu",), "9.0", ("gluon", "triton"), "ahead on an H200", _HALF, False),
    Row(
        ("linear_add", "linear_add_layer_norm"), "9.0", ("gluon", "triton"), "ahead on an H200", _HALF, False,
        where=_is_small,
    ),
    Row(
        ("linear_add", "linear_add_layer_norm"), "9.0", ("composed",),
        "cuBLAS is ahead on an H200: 87 of 97 µs", _HALF, False,
    ),
)  # fmt: skip


@functools.cache
def _rows(operator: str, processor: str, dtype: torch.dtype, gradient: bool) -> tuple[Row, ...]:
    """Returns the rows for a class of calls, up to the first that is for all sizes."""
    rows = [
        row
        for row in TABLE
        if _is_for(row, operator, processor)
        and (not row.dtypes or dtype in row.dtypes)
        and row.gradient in (None, gradient)
    ]
    for_all = next((i for i, row in enumerate(rows) if row.where is None), len(rows))
    return tuple(rows[: for_all + 1])


def _is_for(row: Row, operator: str, processor: str) -> bool:
    if row.processor != processor or (row.operators and operator not in row.operators):
        return False
    sets = machine.cpu_sets() if row.has or row.lacks else ()
    return (not row.has or row.has in sets) and row.lacks not in sets


def _processor(device: torch.device) -> str:
    """Returns the processor of a device as the table's rows have it, or ``""`` for one without rows."""
    if device.type == "cuda":
        capability = launching.chip(device).capability
        return f"{capability // 10}.{capability % 10}"
    return device.type


# The choice -----------------------------------------------------------------------------------------------


def choose(operator: str, call: Record) -> Implementation:
    """Chooses the first backend that can serve a call: of those requested, or under ``auto`` by the table.

    PyTorch's own operators serve under a FLOP counter, whatever is requested. Where none of the requested
    backends can serve the call, BackendUnavailable is raised.
    """
    if modes.is_counted():
        return _loaded(operator, "reference")
    if not backends.is_auto():
        return _loaded(operator, _first_able(operator, _names_requested(operator), call))
    names, reason = _names_for(operator, call)
    chosen = _first_able(operator, names, call)
    if reason is not None:
        for backend in OURS:
            if backend != chosen and why_unsupported(operator, backend, call) is None:
                backends.note_fallback(operator, backend, reason)
    return _loaded(operator, chosen)


def choose_recorded(operator: str, call: Record) -> Implementation:
    """Chooses for a call that ``torch.jit.trace`` records: PyTorch's own operators, which run anywhere.

    Public functions end here before they check their arguments, because sizes are tensors then, and every
    comparison with them would be traced.
    """
    requested = backends.operators[operator].defaults if backends.is_auto() else _names_requested(operator)
    names = [name for name in requested if name not in OURS]
    if not names:
        reason = "torch.jit.trace records PyTorch's own operators only"
        raise BackendUnavailable(operator, requested[0], reason)
    return _loaded(operator, _first_able(operator, names, call, notes=False))


def wants_gradient(call: Record) -> bool:
    """Returns whether autograd has to record a call, in reverse or forward mode."""
    return modes.wants_gradient(*checks.tensors_of(call))


def _loaded(operator: str, backend: str) -> Implementation:
    return backends.implementations[operator][backend].load()


def _names_for(operator: str, call: Record) -> tuple[tuple[str, ...], str | None]:
    """Returns the backends for a call under ``auto``, in order, and why others do not serve, or None."""
    described, x = backends.operators[operator], call[0]
    if modes.is_exporting():  # for any machine, and with symbolic sizes, which must not be guarded on
        return described.defaults, None
    if not all(
        type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided for t in checks.tensors_of(call)
    ):
        return described.defaults, "kernels do not take subclasses of tensors"
    if modes.is_transformed() or modes.forward_mode_enabled():
        return described.defaults, "kernels do not take function transforms and forward-mode differentiation"
    gradient, is_traced = wants_gradient(call), torch.compiler.is_compiling()
    if is_traced and not gradient and _is_left_to_compiler(operator, x.device.type):
        return described.defaults, None
    chosen = _tuned(operator, call, gradient)
    if chosen is not None:
        return (chosen, *described.defaults), f"{chosen} was the fastest when this machine was tuned"
    dtype = modes.autocast_dtype(x) or x.dtype
    if is_traced:
        names, reason = _row_for_all_sizes(operator, x.device, dtype, gradient)
        return (*names, *described.defaults), reason
    for row in _rows_for(operator, x.device, dtype, gradient):
        if row.where is None or row.where(call):
            return (*row.backends, *described.defaults), row.reason
    return described.defaults, _why_no_row(x.device)


def _rows_for(operator: str, device: torch.device, dtype: torch.dtype, gradient: bool) -> tuple[Row, ...]:
    return _rows(operator, _processor(device), dtype, gradient)


def _row_for_all_sizes(
    operator: str, device: torch.device, dtype: torch.dtype, gradient: bool
) -> tuple[tuple[str, ...], str | None]:
    """Returns the backends and the reason of the row for calls whose sizes are not known."""
    rows = _rows_for(operator, device, dtype, gradient)
    found = next((row for row in rows if row.where is None), None)
    return ((), _why_no_row(device)) if found is None else (found.backends, found.reason)


def _why_no_row(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return "no GPU like this one has run it yet: cvt_kernels.tune(model, inputs) checks and times it here"


def _is_left_to_compiler(operator: str, device_type: str) -> bool:
    """Returns whether ``auto`` takes PyTorch's own operator where torch.compile traces without gradients."""
    if device_type != "cpu" or not backends.operators[operator].fused_by_compiler:
        return False
    for backend in OURS:
        if why_unavailable(operator, backend, device_type) is None:
            backends.note_fallback(operator, backend, "torch.compile fuses such calls with others on a CPU")
    return True


def _names_requested(operator: str) -> tuple[str, ...]:
    requested = backends.requested_backends()
    known = backends.implementations[operator]
    # A request for our kernels does not concern operators that have none, or for some calls only.
    if not any(name in known and not known[name].is_partial for name in (*OURS, *requested)):
        return *(name for name in requested if name in known), *backends.operators[operator].defaults
    return requested


def _first_able(operator: str, names: Iterable[str], call: Record, *, notes: bool = True) -> str:
    """Returns the first backend of ``names`` that can serve a call."""
    is_auto = backends.is_auto()
    for backend in names:
        known = backends.implementations[operator].get(backend)
        if known is None and is_auto:  # a row for all operators
            continue
        reason = why_unsupported(operator, backend, call)
        if reason is None:
            return backend
        if notes and not (known is not None and known.is_partial):
            backends.note_fallback(operator, backend, reason)
    raise BackendUnavailable(operator, backend, str(reason))


# What was tuned -------------------------------------------------------------------------------------------


def _tuned(operator: str, call: Record, gradient: bool) -> str | None:
    """Returns the backend that this machine's file of choices has for a call, or None."""
    x, cost_class = call[0], backends.operators[operator].cost_class
    if not _has_choices(x.device):
        return None
    return _remembered(operator, x.dtype, x.device, gradient, cost_class(call))


def _has_choices(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda") and bool(choices.entries(device))


def _remembered(
    operator: str, dtype: torch.dtype, device: torch.device, gradient: bool, cost_class: str
) -> str | None:
    """Returns the backend in the file of choices for a class of calls, or None.

    Where a size is symbolic, the graph is for all sizes: the backend that most of their entries choose.
    """
    asked = _cache_key(operator, dtype, device, gradient, cost_class)
    entries = choices.entries(device)
    if ANY_SIZE not in asked:
        return entries[asked].chosen if asked in entries else None
    pattern = re.compile(re.escape(asked).replace(ANY_SIZE, "[0-9]+[+]"))
    known = [entry for cache_key, entry in entries.items() if pattern.fullmatch(cache_key)]
    flawed = {name for entry in known for name in entry.flaws}
    counts = collections.Counter(entry.chosen for entry in known if entry.chosen not in flawed)
    return counts.most_common(1)[0][0] if counts else None


def cache_key(operator: str, *args: Any, **kwargs: Any) -> str:
    """Returns the cache key of a call with these arguments, as in the file of choices."""
    call = backends.operators[operator].bind(*args, **kwargs)
    cost_class = backends.operators[operator].cost_class(call)
    return _cache_key(operator, call[0].dtype, call[0].device, wants_gradient(call), cost_class)


def _cache_key(
    operator: str, dtype: torch.dtype, device: torch.device, gradient: bool, cost_class: str
) -> str:
    numbers = checks.dtype_name(dtype)
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        numbers += f" under autocast to {checks.dtype_name(torch.get_autocast_dtype(device.type))}"
    precision = torch.backends.cuda.matmul.fp32_precision
    if device.type == "cuda" and dtype == torch.float32 and precision not in ("ieee", "none"):
        numbers += f" multiplied in {precision}"
    return f"{operator}, {'forward+backward' if gradient else 'forward'}, {numbers}, {cost_class}"


def able_backends(operator: str, call: Record) -> list[str]:
    """Returns the backends that can serve a call."""
    known = (name for name in backends.BACKENDS if name in backends.implementations[operator])
    return [name for name in known if why_unsupported(operator, name, call) is None]


# Questions about operators --------------------------------------------------------------------------------


def chosen_backends(operator: str, device: torch.device) -> list[tuple[str, str]]:
    """Returns the backends that may serve an operator on a device here, each with the reason.

    Where backends are requested, only the first available one is returned.
    """
    found: dict[str | None, str] = {}
    for names, reason in _preferences(operator, device):
        able = (name for name in names if why_unavailable(operator, name, device.type) is None)
        found.setdefault(next(able, None), reason)
    return [(name, reason) for name, reason in found.items() if name is not None]


def _preferences(operator: str, device: torch.device) -> list[tuple[Sequence[str], str]]:
    """Returns backends in order of preference, with the reason, for every class of an operator's calls."""
    known = backends.implementations[operator]
    if not backends.is_auto():
        names = [n for n in _names_requested(operator) if n not in known or not known[n].is_partial]
        return [(names, "requested")]
    defaults = backends.operators[operator].defaults
    tuned = choices.entries(device) if _has_choices(device) else {}
    chosen = {entry.chosen for asked, entry in tuned.items() if asked.startswith(f"{operator}, ")}
    found: list[tuple[Sequence[str], str]] = [((name,), "tuned on this machine") for name in sorted(chosen)]
    rows = [row for row in TABLE if _is_for(row, operator, _processor(device))]
    for row in rows:
        names = [name for name in row.backends if name in known]
        found.append(((*names, *defaults), row.reason if names else "PyTorch's own"))
    if all(row.dtypes or row.where or row.gradient is not None for row in rows):
        found.append((defaults, _why_no_row(device) or "PyTorch's own"))
    return found


def may_be_ours(operator: str, device_type: str, *, gradient: bool = True) -> bool:
    """Returns whether kernels of this project may serve calls of an operator on a type of device.

    ``gradient`` matters only where torch.compile traces the calls.
    """
    if modes.is_counted():
        return False
    if backends.is_auto():
        if modes.is_exporting():
            return False
        if not gradient and torch.compiler.is_compiling() and _is_left_to_compiler(operator, device_type):
            return False
        return _auto_may_take_ours(operator, device_type)
    names = (name for name in backends.requested_backends() if name in OURS)
    return any(why_unavailable(operator, name, device_type) is None for name in names)


def _auto_may_take_ours(operator: str, device_type: str) -> bool:
    if all(why_unavailable(operator, name, device_type) is not None for name in OURS):
        return False
    return any(name in OURS for name, _ in chosen_backends(operator, torch.device(device_type)))


_said: set[torch.device] = set()


def warn_of_unknown_gpu(device: torch.device) -> None:
    """Warns once of a GPU that the table has no row for and that was not tuned."""
    if device.type != "cuda" or device in _said or any(row.processor == _processor(device) for row in TABLE):
        return
    _said.add(device)
    if not _has_choices(device):
        warnings.warn(
            f"cvt_kernels: this release has not run on {torch.cuda.get_device_name(device)} or a GPU like it "
            "yet, so PyTorch's operators serve there. cvt_kernels.tune(model, images) checks and times the "
            "kernels on this machine, and remembers which of them to use.",
            RuntimeWarning,
            stacklevel=messages.stacklevel_of_caller(),
        )


# The machine and its choices do not change under a compiled graph; see the end of backends.py.
_constant: tuple[Any, ...] = (
    _is_left_to_compiler,
    _has_choices,
    _remembered,
    _row_for_all_sizes,
    _auto_may_take_ours,
)
for _function in _constant:
    _function._dynamo_marked_constant = True
