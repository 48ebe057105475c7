"""The choice of the backend that serves a call.

The first call of a key (``declaration``) goes through :func:`choose`; the dispatch cache serves the others.
Under ``auto``, the entry of the call's cost class decides. Without an entry, the call is autotuned first
(``autotune``).

This module is plain Python over module globals and the requested backends, so that
``torch.compile(fullgraph=True)`` traces through it.
"""

from __future__ import annotations

import collections
import itertools
import math
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import autotune, backends, caller, checks, compiling, launching, machine, modes
from .autotune import limit
from .backends import (
    ANY_SIZE,
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
    """The backends of a call, outside and in CUDA graphs, and whether later calls of its key keep them."""

    eager: Implementation
    in_graphs: Implementation
    lasts: bool

    def serving(self, x: Tensor) -> Implementation:
        """Returns the backend for a call now: ``in_graphs`` during the capture of a CUDA graph."""
        if self.in_graphs is not self.eager and machine.is_capturing(x):
            return self.in_graphs
        return self.eager


def choose(operator: str, call: Record) -> Choice:
    """Chooses the first requested backend that can serve a call, or under ``auto`` the one in its entry.

    PyTorch's own operators serve under a FLOP counter, whatever is requested.

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
    """Chooses for a call that ``torch.jit.trace`` records: PyTorch's own operators, which run anywhere.

    Public functions end here before they check their arguments, because sizes are tensors then, and every
    comparison with them would be traced. Nothing is tuned, noted or cached.

    Raises:
        BackendUnavailable: Only kernels of this project are requested.
    """
    requested = backends.operators[operator].defaults if backends.is_auto() else _names_requested(operator)
    names = [name for name in requested if name not in OURS]
    if not names:
        reason = "torch.jit.trace records PyTorch's own operators only"
        raise BackendUnavailable(operator, requested[0], reason)
    return _choice(operator, _first_able(operator, names, call, notes=False), lasts=False)


def choose_in_group(group: Any, shared: Any, operator: str, call: Record) -> Choice:
    """Chooses for a call with collective operations: the same backend in all processes of a group.

    The first call compares the choices of all processes; if they differ, PyTorch's own operator serves.
    ``shared`` has hashable settings that identify the call and are the same in every process.

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
        with limit.unlimited():  # the processes agree once
            proposed = _choose(operator, call).eager
        known = backends.implementations[operator]
        proposal = BACKENDS.index(next(name for name in known if known[name] is proposed))
        extremes = torch.tensor([proposal, -proposal], device=x.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
        highest, lowest = extremes[0].item(), -extremes[1].item()
        agreed[key] = (BACKENDS[proposal], *defaults) if highest == lowest else defaults
    return _choice(operator, _first_able(operator, agreed[key], call))


def wants_gradient(call: Record) -> bool:
    """Returns whether autograd has to record a call, in reverse or forward mode."""
    return modes.wants_gradient(*checks.tensors_of(call))


def _names_requested(operator: str) -> tuple[str, ...]:
    requested = backends.requested_backends()
    known = backends.implementations[operator]
    # A request for our kernels does not concern operators that have none, or for some calls only.
    if not any(name in known and not known[name].is_partial for name in (*OURS, *requested)):
        return *(name for name in requested if name in known), *backends.operators[operator].defaults
    return requested


def _choose_traced(operator: str, call: Record) -> str:
    """Chooses for a call that torch.compile or torch.export traces, where an entry is a constant."""
    described, x = backends.operators[operator], call[0]
    if modes.is_exporting():  # for any machine, and with symbolic sizes, which must not be guarded on
        return _first_able(operator, described.defaults, call, notes=False)
    gradient = wants_gradient(call)
    if not gradient and _is_left_to_compiler(operator, x.device.type):
        return _first_able(operator, described.defaults, call)
    backend = _remembered_backend(operator, x.dtype, x.device, gradient, described.cost_class(call))
    names = described.defaults if backend is None else (backend, *described.defaults)
    return _first_able(operator, names, call)


def _is_left_to_compiler(operator: str, device_type: str) -> bool:
    """Returns whether ``auto`` takes PyTorch's own operator where torch.compile traces without gradients."""
    if device_type != "cpu" or not backends.operators[operator].fused_by_compiler:
        return False
    for backend in OURS:
        if why_unavailable(operator, backend, device_type) is None:
            backends.note_fallback(operator, backend, "torch.compile fuses such calls with others on a CPU")
    return True


def _first_able(operator: str, names: Sequence[str], call: Record, *, notes: bool = True) -> str:
    """Returns the first backend of ``names`` that can serve a call.

    Raises:
        BackendUnavailable: None of them can.
    """
    for backend in names:
        reason = why_unsupported(operator, backend, call)
        if reason is None:
            return backend
        known = backends.implementations[operator].get(backend)
        if notes and not (known is not None and known.is_partial):
            backends.note_fallback(operator, backend, reason)
    raise BackendUnavailable(operator, backend, str(reason))


# Entries -------------------------------------------------------------------------------------------------


def _choice(operator: str, eager: str, in_graphs: str | None = None, *, lasts: bool = True) -> Choice:
    known = backends.implementations[operator]
    return Choice(known[eager].load(), known[in_graphs or eager].load(), lasts)


def _choose(operator: str, call: Record) -> Choice:
    """Chooses by the cache's entry; without one, autotunes the call if possible, else takes the default."""
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
    if is_tuning() and (entry is None or not entry.timings):
        return _choice(operator, able[0], lasts=False)
    if not _knows(entry, able):
        lasting, passing = _why_not_tunable(cache), _why_not_tunable_now(x)
        if lasting is None and passing is None:
            try:
                entry = _tune(cache, asked, able, operator, call)
            except Warning:  # where warnings are errors
                raise
            except Exception as error:  # the call itself may succeed all the same, or raise it again
                from .autotune import tuner

                if caller.is_foreign(error):
                    raise
                reason = f"could not be tuned: {tuner.describe_error(error)}"
                backends.note_untuned(asked, reason)
                _note_passed_over(operator, able, default, reason)
                return _choice(operator, default)
            if entry is None:
                _note_passed_over(operator, able, default, _TIME_IS_UP)
                # The parts are operators too, whose kernels a later timing needs.
                parts = "composed" if "composed" in able else default
                return _choice(operator, parts, lasts=False)
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
    chosen = (name if name in able else default for name in (entry.chosen, entry.chosen_in_graphs))
    return _choice(operator, *chosen, lasts=entry.timings > 0)


def is_tuning() -> bool:
    """Returns whether this thread is tuning, so that operators within a composed one are not tuned."""
    from .autotune import tuner

    return tuner.is_tuning()


_TIME_IS_UP = "not tuned yet: the call had no time left (CVT_KERNELS_AUTOTUNE_SECONDS), a later one goes on"


def _knows(entry: autotune.Entry | None, able: list[str]) -> TypeGuard[autotune.Entry]:
    """Returns whether an entry was timed and covers all able backends.

    The call that made it may have had no time left, or have excluded a backend.
    """
    return entry is not None and entry.timings > 0 and all(name in entry.measurements for name in able)


def _note_passed_over(operator: str, able: list[str], default: str, reason: str) -> None:
    for backend in able:
        if backend != default:
            backends.note_fallback(operator, backend, reason)


def _able(operator: str, call: Record) -> list[str]:
    """Returns the backends that can serve a call, and notes why others cannot."""
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
    """Returns the cache key of a call with these arguments, as in the files of entries."""
    return _cache_key_of(operator, backends.operators[operator].bind(*args, **kwargs))


def _cache_key_of(operator: str, call: Record) -> str:
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


def _remembered_backend(
    operator: str, dtype: torch.dtype, device: torch.device, gradient: bool, cost_class: str
) -> str | None:
    """Returns the backend for graphs, or None without an entry.

    Where a size is symbolic, the graph is for all sizes, and so are the entries.
    """
    asked = _cache_key(operator, dtype, device, gradient, cost_class)
    entries = autotune.cache_for(device).entries()
    pattern = re.compile(re.escape(asked).replace(ANY_SIZE, "[0-9]+[+]"))
    known = [entry for cache_key, entry in entries.items() if pattern.fullmatch(cache_key)]
    if known:
        return _chosen_in_all(known)
    reason = "has no entry, and nothing is tuned while torch.compile traces"
    for backend in OURS:
        if why_unavailable(operator, backend, device.type) is None:
            backends.note_fallback(operator, backend, reason)
    return None


def _chosen_in_all(entries: Sequence[autotune.Entry]) -> str:
    """Returns the backend that most of the entries choose for graphs, and that has no flaw in any of them."""
    counts = collections.Counter(entry.chosen_in_graphs for entry in entries)
    flawed = {name for entry in entries for name, each in entry.measurements.items() if each.flaw is not None}
    return next((name for name, _ in counts.most_common() if name not in flawed), "reference")


def _why_not_tunable(cache: autotune.Cache) -> str | None:
    """Returns why this process does not autotune at first use, or None."""
    if not (autotune.tuning_enabled() or limit.is_requested()):
        return "CVT_KERNELS_AUTOTUNE=0 forbids tuning it at first use"
    # An entry that cannot be cached could differ in the next run.
    if torch.are_deterministic_algorithms_enabled() and (reason := cache.why_not_remembered()) is not None:
        return f"deterministic algorithms are demanded, but entries cannot be remembered: {reason}"
    return None


def _why_not_tunable_now(x: Tensor) -> str | None:
    """Returns why a call cannot be autotuned now, or None."""
    if x.numel() == 0:
        return "nothing is tuned on an empty tensor"
    if x.device.type not in ("cpu", "cuda"):
        return f"nothing is tuned on {x.device.type} tensors"
    if machine.is_capturing(x):
        return "nothing is tuned while a CUDA graph is captured"
    return "nothing is tuned while launches are recorded" if launching.is_taken() else None


def _why_not_for_kernels(call: Record) -> str | None:
    """Returns why PyTorch's own operator must serve a call, whatever its entry, or None."""
    tensors = checks.tensors_of(call)
    if not all(type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided for t in tensors):
        return "entries do not hold for subclasses of tensors"
    if modes.is_transformed() or modes.forward_mode_enabled():
        return "entries do not hold within function transforms and forward-mode differentiation"
    return None


def task_of(operator: str, *args: Any, **kwargs: Any) -> tuner.Task:
    """Returns the tuning task for a call with these arguments, for ``tuner.tune``.

    Its candidates are all backends that can serve the call.
    """
    return _task_of(operator, backends.operators[operator].bind(*args, **kwargs))


def _favored(defaults: tuple[str, ...], able: list[str]) -> str:
    """Returns the backend that another one replaces by a margin only.

    It is the default, or before ``composed`` our kernel that computes the same in one pass: within a model it
    gains more than a timing shows, since the tensors between the parts are never written to memory.
    """
    fused = OURS if defaults[0] == "composed" else ()
    return next(name for name in (*fused, *defaults) if name in able)


def _task_of(operator: str, call: Record) -> tuner.Task:
    from .autotune import tuner  # not needed where every entry is cached

    described, known = backends.operators[operator], backends.implementations[operator]
    x, able = call[0], _able(operator, call)
    asked, gradient = _cache_key_of(operator, call), wants_gradient(call)

    def images(factor: int) -> tuner.Call:
        return tuner.Call(described.sample(factor, call), gradient, described.score)

    with tuner.undisturbed(x.device):
        return tuner.Task(
            cache_key=asked,
            reference=known["reference"].function,
            candidates={name: known[name].function for name in able},
            default=_favored(described.defaults, able),
            sample=images(64 if x.is_cuda else 1),
            timed=images(_ALL if x.is_cuda else 32),  # a GPU is busy with a whole call only
            exact=described.exact,
            unrounded=described.unrounded,
        )


_ALL = 2**40  # more than any call has


def _tune(
    cache: autotune.Cache, asked: str, able: list[str], operator: str, call: Record
) -> autotune.Entry | None:
    """Autotunes a call as far as there is time, unless another process has done so meanwhile.

    Without time, a default that is ours is checked all the same. PyTorch's own needs no check: without an
    entry, it serves.
    """
    from .autotune import tuner

    now = _call_to_tune_for()
    known = cache.get(asked)
    if not _are_kernels_compiled(asked, able, operator, call, now):
        backends.note_untuned(asked, _ARE_COMPILED)
        return known
    if not now.has_time():
        default = _favored(backends.operators[operator].defaults, able)
        if default not in OURS or (known is not None and default in known.measurements):
            backends.note_untuned(asked, _TIME_IS_UP)
            return known
        entry = tuner.tune(_task_of(operator, call), known, now.has_time)
        cache.remember({asked: entry}, replace=known is not None)
    else:
        with (
            limit.noticed(),
            now.spending(),
            cache.tuning(lambda: _knows(cache.get(asked), able), seconds=now.seconds) as has_turn,
        ):
            known = cache.get(asked)
            if _knows(known, able):
                return known
            if now.is_limited and not has_turn:  # another process tunes
                backends.note_untuned(asked, _TIME_IS_UP)
                return known
            entry = tuner.tune(_task_of(operator, call), known, now.has_time)
            cache.remember({asked: entry}, replace=known is not None)
    if entry.timings:
        now.tuned[asked] = entry
    backends.note_untuned(asked, None if entry.timings else _TIME_IS_UP)
    _warn_of_wrong_kernels(asked, entry, known)
    return entry


_ARE_COMPILED = "not tuned yet: its kernels are being compiled, a later call goes on"
#: Device, cache key → the keys of the kernels that are being compiled for it (``compiling``).
_begun: dict[tuple[torch.device, str], list[str]] = {}


def _are_kernels_compiled(asked: str, able: list[str], operator: str, call: Record, now: limit.Call) -> bool:
    """Returns whether the kernels that tuning a call launches are compiled, or are left to their launches.

    The first time it begins to compile them. It waits for them within the call's time, unless the call passes
    over them.
    """
    device = call[0].device
    if is_tuning() or not _has_compilers(device):
        return True
    keys = _begun.get((device, asked))
    if keys is None:
        keys = _begun[device, asked] = compiling.begin(_kernels_of(operator, able, call))
    is_done = not compiling.pending(keys)
    if not is_done and not now.waits:
        now.passed[asked] = keys
    elif not is_done and now.is_limited:
        with now.spending():
            is_done = compiling.wait(keys, seconds=max(0.0, now.seconds))
    elif not is_done:
        is_done = compiling.wait(keys)
    if is_done:
        _begun.pop((device, asked), None)
    return is_done


def _has_compilers(device: torch.device) -> bool:
    return device.type == "cuda" and compiling.workers() > 0


def kernels_of(operator: str, *args: Any, **kwargs: Any) -> list[compiling.TritonKernel]:
    """Returns the Triton kernels that tuning a call with these arguments launches, specialized."""
    call = backends.operators[operator].bind(*args, **kwargs)
    return _kernels_of(operator, _able(operator, call), call)


def _kernels_of(operator: str, able: list[str], call: Record) -> list[compiling.TritonKernel]:
    """Returns the Triton kernels that tuning a call launches; its candidates run on meta tensors."""
    from .autotune import tuner

    described, known = backends.operators[operator], backends.implementations[operator]
    chip, launches = launching.chip(call[0].device), list[launching.Launch]()
    gradient, names = wants_gradient(call), [name for name in ("gluon", "triton") if name in able]
    for factor, name in itertools.product((64, _ALL) if names else (), names):
        with tuner.undisturbed(call[0].device):
            sample = tuner.Call(described.sample(factor, call), gradient).map(_on_meta)
        # An error is described by the candidate's check.
        try:
            with launching.rehearsed_launches(launches.append, chip):
                tuner.rehearse(known[name].function, sample)
        except Exception as error:
            if caller.is_foreign(error):
                raise
    return [compiling.specialize(launch, chip.capability) for launch in launches]


def _on_meta(tensor: Tensor) -> Tensor:
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return like.requires_grad_(tensor.requires_grad)


def _call_to_tune_for() -> limit.Call:
    """Returns the call that an operator is part of, which has a limit unless later calls must agree with it.

    They must with deterministic algorithms, and where activation checkpointing will compute it again.
    """
    if torch.are_deterministic_algorithms_enabled() or modes.saved_tensors_hooked():
        return limit.Call(math.inf)
    return limit.current_call()


def _may_time_again(cache: autotune.Cache, x: Tensor) -> bool:
    """Returns whether a call may be timed again; deterministic algorithms forbid it."""
    if is_tuning() or torch.are_deterministic_algorithms_enabled():
        return False
    return _why_not_tunable(cache) is None and _why_not_tunable_now(x) is None


def _time_again(
    cache: autotune.Cache, asked: str, entry: autotune.Entry, operator: str, call: Record
) -> autotune.Entry:
    """Times a call again and caches the entry, unless another process tunes; returns the valid entry."""
    from .autotune import tuner

    with cache.tuning(seconds=0) as has_turn:
        known = cache.get(asked)
        if not has_turn or known != entry:
            return known or entry
        try:
            again = tuner.time_again(_task_of(operator, call), entry)
        except Warning:  # where warnings are errors
            raise
        except Exception as error:  # as where there is not enough memory
            if caller.is_foreign(error):
                raise
            return entry
        cache.remember({asked: again}, replace=True)
    return again


def _warn_of_wrong_kernels(asked: str, entry: autotune.Entry, before: autotune.Entry | None) -> None:
    """Warns of kernels with a flaw, unless an entry that goes on after its check had it already."""
    known = {} if before is None or before.timings else before.measurements
    for backend in OURS:
        measurement = None if backend in known else entry.measurements.get(backend)
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
    """Notes why the entry's other backends do not serve."""
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
    """Returns the backends that serve an operator on a type of device: backend → number of entries.

    The most frequent comes first. Where backends are requested, only the first available one is returned,
    with 0.
    """
    if not backends.is_auto():
        known = backends.implementations[operator]
        names = [n for n in _names_requested(operator) if n not in known or not known[n].is_partial]
        able = (name for name in names if why_unavailable(operator, name, device_type) is None)
        return dict.fromkeys(itertools.islice(able, 1), 0)
    entries = autotune.cache_for(torch.device(device_type)).entries().items()
    counts = collections.Counter(
        entry.chosen for asked, entry in entries if asked.startswith(f"{operator}, ")
    )
    return dict(counts.most_common())


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
    if autotune.tuning_enabled():
        return True
    return any(name in OURS for name in chosen_backends(operator, device_type))


# An entry does not change under a compiled graph; see the end of backends.py.
_is_left_to_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
_remembered_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]
_auto_may_take_ours._dynamo_marked_constant = True  # type: ignore[attr-defined]
