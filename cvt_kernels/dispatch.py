"""The choice of the backend that serves a call.

The first call of a key (``declaration``) asks :func:`choose`; a plan serves the others. Under ``auto``
the choice is the entry of the call's cache key: autotuned on this machine at the first call (``autotune``),
and cached on disk. It is plain Python over module globals and the request of the
context, so that ``torch.compile(fullgraph=True)`` traces through it.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import autotune, backends, caller, checks, machine, modes
from .backends import (
    BACKENDS,
    OURS,
    BackendUnavailable,
    Implementation,
    Record,
    why_unavailable,
    why_unsupported,
)

if TYPE_CHECKING:
    from .autotune import tuner


class Choice(NamedTuple):
    """The backends that serve calls of one key, in CUDA graphs and outside, and whether later ones too."""

    eager: Implementation
    in_graphs: Implementation
    lasts: bool

    def serving(self, x: Tensor) -> Implementation:
        """Returns the backend that serves a call now."""
        if self.in_graphs is not self.eager and machine.is_capturing(x):
            return self.in_graphs
        return self.eager


def choose(operator: str, call: Record) -> Choice:
    """Chooses between the requested backends, or under ``auto`` by entry.

    What is counted is served by PyTorch's own operators, whatever is requested.

    Raises:
        BackendUnavailable: None of the requested backends can serve the call.
    """
    if modes.is_counted():
        return _choice(operator, "reference", lasts=False)
    if not backends.is_auto():
        return _choice(operator, _first_able(operator, _names_requested(operator), call))
    if torch.compiler.is_compiling():
        return _choice(operator, _choose_traced(operator, call), lasts=False)
    return _choose(operator, call)


def choose_recorded(operator: str, call: Record) -> Choice:
    """Chooses for a call that ``torch.jit.trace`` records: PyTorch's own operators, for whatever machine.

    Public functions end here before they check their arguments: sizes are tensors then, and what is compared
    with them would become part of the record. Nothing is tuned, noted or remembered.

    Raises:
        BackendUnavailable: Kernels of this project are requested, and nothing of PyTorch's own after them.
    """
    requested = backends.operators[operator].defaults if backends.is_auto() else _names_requested(operator)
    names = [name for name in requested if name not in OURS]
    if not names:
        reason = "torch.jit.trace records PyTorch's own operators only"
        raise BackendUnavailable(operator, requested[0], reason)
    return _choice(operator, _first_able(operator, names, call, notes=False), lasts=False)


def choose_in_group(group: Any, shared: Any, operator: str, call: Record) -> Choice:
    """Chooses for a call in which the processes of a group exchange data, the same backend for all.

    The first call asks every process which backend it would take; if they differ, PyTorch's own serves.
    ``shared`` are hashable settings that tell this call from others and are the same in every process.

    Raises:
        BackendUnavailable: None of the requested backends can serve the call.
    """
    if not backends.is_auto():
        return choose(operator, call)
    x, defaults = call[0], backends.operators[operator].defaults
    if torch.compiler.is_compiling():
        return _choice(operator, _first_able(operator, defaults, call), lasts=False)
    agreed = backends.agreements.setdefault(group, {})
    key = operator, shared, x.dtype, x.device, wants_gradient(call), modes.autocast_dtype(x)
    if key not in agreed:
        if machine.is_capturing(x):
            return _choice(operator, _first_able(operator, defaults, call), lasts=False)
        proposed = _choose(operator, call).eager
        known = backends.implementations[operator]
        proposal = BACKENDS.index(next(name for name in known if known[name] is proposed))
        extremes = torch.tensor([proposal, -proposal], device=x.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
        highest, lowest = extremes[0].item(), -extremes[1].item()
        agreed[key] = (BACKENDS[proposal], *defaults) if highest == lowest else defaults
    return _choice(operator, _first_able(operator, agreed[key], call))


def wants_gradient(call: Record) -> bool:
    """Says whether autograd has to record a call, in reverse or forward mode."""
    return modes.wants_gradient(*checks.tensors_of(call))


def _names_requested(operator: str) -> tuple[str, ...]:
    requested = backends.requested_backends()
    known = backends.implementations[operator]
    # Who asks for kernels of ours does not mean the operators that have none.
    if not any(name in known for name in (*OURS, *requested)):
        return backends.operators[operator].defaults
    return requested


def _choose_traced(operator: str, call: Record) -> str:
    """Chooses for a call that torch.compile or torch.export traces; an entry is a constant of the trace."""
    described, x = backends.operators[operator], call[0]
    if modes.is_exporting():  # for whatever machine, and for sizes that may not be asked for
        return _first_able(operator, described.defaults, call, notes=False)
    gradient = wants_gradient(call)
    if not gradient and _is_left_to_compiler(operator, x.device.type):
        return _first_able(operator, described.defaults, call)
    backend = _remembered_backend(operator, x.dtype, x.device, gradient, described.kind(call))
    names = described.defaults if backend is None else (backend, *described.defaults)
    return _first_able(operator, names, call)


def _is_left_to_compiler(operator: str, device_type: str) -> bool:
    """Says whether ``auto`` takes PyTorch's own where torch.compile traces a call without gradients."""
    if device_type != "cpu" or not backends.operators[operator].fused_by_compiler:
        return False
    for backend in OURS:
        if why_unavailable(operator, backend, device_type) is None:
            backends.note_fallback(operator, backend, "torch.compile fuses such calls with others on a CPU")
    return True


def _first_able(operator: str, names: Sequence[str], call: Record, *, notes: bool = True) -> str:
    """Returns the first of some backends that can serve a call.

    Raises:
        BackendUnavailable: None can.
    """
    for backend in names:
        reason = why_unsupported(operator, backend, call)
        if reason is None:
            return backend
        if notes:
            backends.note_fallback(operator, backend, reason)
    raise BackendUnavailable(operator, backend, str(reason))


# Entries -------------------------------------------------------------------------------------------------


def _choice(operator: str, eager: str, in_graphs: str | None = None, *, lasts: bool = True) -> Choice:
    known = backends.implementations[operator]
    return Choice(known[eager].load(), known[in_graphs or eager].load(), lasts)


def _choose(operator: str, call: Record) -> Choice:
    """Chooses by entry, which is tuned if need be and possible, or else PyTorch's own."""
    x = call[0]
    able = _able(operator, call)
    default = next(name for name in backends.operators[operator].defaults if name in able)
    if len(able) == 1:
        return _choice(operator, default)
    if (reason := _why_not_for_kernels(call)) is not None:
        _note_passed_over(operator, able, default, reason)
        return _choice(operator, default, lasts=False)
    cache = autotune.cache_for(x.device)
    asked = _cache_key_of(operator, call)
    entry = cache.get(asked)
    if entry is None and is_tuning():
        return _choice(operator, able[0], lasts=False)
    if entry is None or not _knows(entry, able):
        lasting, passing = _why_not_provable(cache), _why_not_provable_now(x)
        if lasting is None and passing is None:
            try:
                entry = _tune(cache, asked, able, operator, call)
            except Warning:  # where warnings are errors
                raise
            except Exception as error:  # the call itself may be served all the same, or raises it again
                from .autotune import tuner

                reason = f"could not be tuned: {tuner.describe_error(error)}"
                _note_passed_over(operator, able, default, reason)
                return _choice(operator, default)
        elif entry is None:
            _note_passed_over(operator, able, default, f"has no entry, and {lasting or passing}")
            return _choice(operator, default, lasts=passing is None)
    elif entry.is_unsure and _may_time_again(cache, x) and cache.times_again(asked):
        entry = _time_again(cache, asked, entry, operator, call)
    if torch.are_deterministic_algorithms_enabled() and not entry.is_lasting:
        reason = "deterministic algorithms are demanded, but the entry holds for this process only"
        _note_passed_over(operator, able, default, reason)
        return _choice(operator, default)
    _note(operator, entry)
    return _choice(
        operator, *(name if name in able else default for name in (entry.chosen, entry.chosen_in_graphs))
    )


def is_tuning() -> bool:
    """Says whether a call is part of a composition that is being tuned, whose parts wait for their turn."""
    from .autotune import tuner

    return tuner.is_tuning()


def _knows(entry: autotune.Entry | None, able: list[str]) -> bool:
    """Says whether an entry is of all backends that are able; a call before may have kept one away."""
    return entry is not None and all(name in entry.measurements for name in able)


def _note_passed_over(operator: str, able: list[str], default: str, reason: str) -> None:
    for backend in able:
        if backend != default:
            backends.note_fallback(operator, backend, reason)


def _able(operator: str, call: Record) -> list[str]:
    """Lists the backends that can serve a call, and notes why others cannot."""
    able = []
    for backend in BACKENDS:
        if backend not in backends.implementations[operator]:
            continue
        reason = why_unsupported(operator, backend, call)
        if reason is None:
            able.append(backend)
        else:
            backends.note_fallback(operator, backend, reason)
    return able


def cache_key(operator: str, *args: Any, **kwargs: Any) -> str:
    """Returns the cache key that an entry on such calls answers, as in the files of entries."""
    return _cache_key_of(operator, backends.operators[operator].bind(*args, **kwargs))


def _cache_key_of(operator: str, call: Record) -> str:
    kind = backends.operators[operator].kind(call)
    return _cache_key(operator, call[0].dtype, call[0].device, wants_gradient(call), kind)


def _cache_key(operator: str, dtype: torch.dtype, device: torch.device, gradient: bool, kind: str) -> str:
    numbers = checks.dtype_name(dtype)
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        numbers += f" under autocast to {checks.dtype_name(torch.get_autocast_dtype(device.type))}"
    precision = torch.backends.cuda.matmul.fp32_precision
    if device.type == "cuda" and dtype == torch.float32 and precision not in ("ieee", "none"):
        numbers += f" multiplied in {precision}"
    return f"{operator}, {'forward+backward' if gradient else 'forward'}, {numbers}, {kind}"


def _remembered_backend(
    operator: str, dtype: torch.dtype, device: torch.device, gradient: bool, kind: str
) -> str | None:
    """Returns the backend of a remembered entry for graphs; None without one."""
    asked = _cache_key(operator, dtype, device, gradient, kind)
    entry = autotune.cache_for(device).get(asked)
    if entry is not None:
        return entry.chosen_in_graphs
    reason = "has no entry, and nothing is tuned while torch.compile traces"
    for backend in OURS:
        if why_unavailable(operator, backend, device.type) is None:
            backends.note_fallback(operator, backend, reason)
    return None


def _why_not_provable(cache: autotune.Cache) -> str | None:
    """Says why nothing is tuned at first use in this process; None if it is."""
    if not autotune.tuning_enabled():
        return "CVT_KERNELS_AUTOTUNE=0 forbids tuning it at first use"
    # An entry that cannot be remembered could be another one in the next run.
    if torch.are_deterministic_algorithms_enabled() and (reason := cache.why_not_remembered()) is not None:
        return f"deterministic algorithms are demanded, but entries cannot be remembered: {reason}"
    return None


def _why_not_provable_now(x: Tensor) -> str | None:
    """Says why a call cannot be tuned where it is made; None if it can."""
    if x.numel() == 0:
        return "nothing is tuned on an empty tensor"
    if x.device.type not in ("cpu", "cuda"):
        return f"nothing is tuned on {x.device.type} tensors"
    if machine.is_capturing(x):
        return "nothing is tuned while a CUDA graph is captured"
    return None


def _why_not_for_kernels(call: Record) -> str | None:
    """Says why a call is for PyTorch's own, whatever the entry; None if it is not."""
    tensors = checks.tensors_of(call)
    if not all(type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided for t in tensors):
        return "entries do not hold for subclasses of tensors"
    if modes.is_transformed() or modes.forward_mode_enabled():
        return "entries do not hold within function transforms and forward-mode differentiation"
    return None


def task_of(operator: str, *args: Any, **kwargs: Any) -> tuner.Task:
    """Returns the tuning task of all backends that can serve calls with such arguments.

    It is to be run by ``tuner.tune``, or in parts.
    """
    return _task_of(operator, backends.operators[operator].bind(*args, **kwargs))


def _task_of(operator: str, call: Record) -> tuner.Task:
    from .autotune import tuner  # is not needed where every entry is known

    described, known = backends.operators[operator], backends.implementations[operator]
    x, able = call[0], _able(operator, call)
    asked, gradient = _cache_key_of(operator, call), wants_gradient(call)

    def images(factor: int) -> tuner.Call:
        return tuner.Call(described.sample(factor, call), gradient)

    with tuner.undisturbed(x.device):
        return tuner.Task(
            cache_key=asked,
            reference=known["reference"].function,
            candidates={name: known[name].function for name in able},
            default=next(name for name in described.defaults if name in able),
            sample=images(64 if x.is_cuda else 1),
            timed=images(_ALL if x.is_cuda else 32),  # a GPU is busy with a whole call only
            exact=described.exact,
            unrounded=described.unrounded,
        )


_ALL = 2**40  # more than any call has


def _tune(cache: autotune.Cache, asked: str, able: list[str], operator: str, call: Record) -> autotune.Entry:
    """Tunes a call, unless another process has done so meanwhile, and remembers the entry."""
    from .autotune import tuner

    with tuner.noticed(), cache.tuning(lambda: _knows(cache.get(asked), able)):
        known = cache.get(asked)
        if known is not None and _knows(known, able):
            return known
        entry = tuner.tune(_task_of(operator, call))
        cache.remember({asked: entry}, replace=known is not None)
    _warn_of_wrong_kernels(asked, entry)
    return entry


def _may_time_again(cache: autotune.Cache, x: Tensor) -> bool:
    """Says whether a call may be timed again; not where the choice is to stay from run to run."""
    if is_tuning() or torch.are_deterministic_algorithms_enabled():
        return False
    return _why_not_provable(cache) is None and _why_not_provable_now(x) is None


def _time_again(
    cache: autotune.Cache, asked: str, entry: autotune.Entry, operator: str, call: Record
) -> autotune.Entry:
    """Times a call again and remembers the entry, unless another process tunes; returns what holds."""
    from .autotune import tuner

    with cache.tuning(waits=False) as has_turn:
        known = cache.get(asked)
        if not has_turn or known != entry:
            return known or entry
        try:
            again = tuner.time_again(_task_of(operator, call), entry)
        except Warning:  # where warnings are errors
            raise
        except Exception:  # as where there is not enough memory
            return entry
        cache.remember({asked: again}, replace=True)
    return again


def _warn_of_wrong_kernels(asked: str, entry: autotune.Entry) -> None:
    for backend in OURS:
        measurement = entry.measurements.get(backend)
        if measurement is None or measurement.flaw is None or "OutOfResources" in measurement.flaw:
            continue  # a GPU with less shared memory is no reason to worry
        if measurement.is_lasting:
            message = (
                f"failed its check on this machine and is not used for calls of this kind ({asked}): "
                f"{measurement.flaw}. {entry.chosen} serves instead, so that results are right. Please "
                "report this line with the output of `cvt doctor`."
            )
        else:
            message = (
                f"could not be tried and is not used in this process for calls of this kind ({asked}): "
                f"{measurement.flaw}. {entry.chosen} serves instead. The next process tries again."
            )
        warnings.warn(
            f"cvt_kernels: the kernel of backend {backend!r} {message}",
            RuntimeWarning,
            stacklevel=caller.stacklevel_of_caller(),
        )


def _note(operator: str, entry: autotune.Entry) -> None:
    """Notes why an entry passed over the backends that it did not choose."""
    for backend, measurement in entry.measurements.items():
        if backend != entry.chosen:
            backends.note_fallback(operator, backend, measurement.flaw or _why_slower(measurement, entry))


def _why_slower(measurement: autotune.Measurement, entry: autotune.Entry) -> str:
    chosen = entry.measurements.get(entry.chosen)
    mine, best = measurement.call_seconds, chosen and chosen.call_seconds
    if mine is None or best is None:
        return f"{entry.chosen} serves such calls here"
    if mine <= best:
        return f"is hardly faster than {entry.chosen} (measured here)"
    return f"takes {1e6 * mine:.0f} µs where {entry.chosen} takes {1e6 * best:.0f} (measured here)"


def chosen_backends(operator: str, device_type: str) -> dict[str, int]:
    """Returns the backends that serve an operator on a type of device, each with its number of entries.

    They come most frequent first. Where backends are requested, it is the first of them that may serve, with
    0; without entries nothing.
    """
    if not backends.is_auto():
        known = backends.implementations[operator]
        concerned = any(name in known for name in (*OURS, *backends.requested_backends()))
        names = backends.requested_backends() if concerned else backends.operators[operator].defaults
        able = (name for name in names if why_unavailable(operator, name, device_type) is None)
        return dict.fromkeys(itertools.islice(able, 1), 0)
    answers = autotune.cache_for(torch.device(device_type)).entries().items()
    counts = collections.Counter(
        entry.chosen for asked, entry in answers if asked.startswith(f"{operator}, ")
    )
    return dict(counts.most_common())


def may_be_ours(operator: str, device_type: str, *, gradient: bool = True) -> bool:
    """Says whether kernels of this project may serve calls of an operator on a type of device.

    Whether they want a gradient matters where torch.compile traces them.
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
    if autotune.tuning_enabled():
        return True
    return any(name in OURS for name in chosen_backends(operator, device_type))


# An entry does not change under a compiled graph; see the end of backends.py.
_is_left_to_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
_remembered_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]
_auto_may_take_ours._dynamo_marked_constant = True  # type: ignore[attr-defined]
