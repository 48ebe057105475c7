"""The choice of the backend that serves a call.

The first call of a key (``declaration``) ends in :func:`call`; :func:`plan` tells what serves the
others. Under ``auto`` the choice is a verdict: proven and measured on this machine at the first call of
its kind (``proofs``), remembered on disk (``verdicts``), and kept in a table by the exact arguments. The
choice is plain Python over module globals and the request of the context, so that
``torch.compile(fullgraph=True)`` traces through it.
"""

from __future__ import annotations

import collections
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from . import backends, checks, machine, verdicts
from .backends import BACKENDS, OURS, BackendUnavailable, Implementation, why_unavailable, why_unsupported

if TYPE_CHECKING:
    from . import proofs


def call(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves ``operator(x, ...)`` with the requested backends, or under ``auto`` by verdict.

    What is counted is served by PyTorch's own operators, whatever is requested.

    Raises:
        BackendUnavailable: None of the requested backends can serve the call.
    """
    if checks.is_counted():
        return backends.implementations[operator]["reference"].function(x, *args, **kwargs)
    if not backends.is_auto():
        return _call_requested(operator, x, *args, **kwargs)
    if torch.compiler.is_compiling():
        return _call_traced(operator, x, *args, **kwargs)
    choice = _choice(operator, x, args, kwargs)
    served = choice.eager
    if choice.in_graphs is not served and machine.is_capturing(x):
        served = choice.in_graphs
    why_unsupported = served.implementation.why_unsupported
    if why_unsupported is not None and (reason := why_unsupported(x, *args, **kwargs)) is not None:
        backends.note_fallback(operator, served.backend, reason)
        return _first_able(operator, backends.operators[operator].defaults, x, *args, **kwargs)
    return served.implementation.function(x, *args, **kwargs)


def call_recorded(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves a call that ``torch.jit.trace`` records, by PyTorch's own operators, for whatever machine.

    Public functions end here before they check their arguments: sizes are tensors then, and what is compared
    with them would become part of the record. Nothing is proven, noted or remembered.

    Raises:
        BackendUnavailable: Kernels of this project are requested, and nothing of PyTorch's own after them.
    """
    requested = backends.operators[operator].defaults if backends.is_auto() else _names_requested(operator)
    names = [name for name in requested if name not in OURS]
    if not names:
        reason = "torch.jit.trace records PyTorch's own operators only"
        raise BackendUnavailable(operator, requested[0], reason)
    with warnings.catch_warnings():
        # Whether there is a class token, and the like, are rightly constants of the record.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return _call_unnoted(operator, names, x, *args, **kwargs)


def _call_unnoted(operator: str, names: Sequence[str], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves a call with the first of PyTorch's own backends that can; nothing of it is remembered."""
    reasons = {name: why_unsupported(operator, name, x, *args, **kwargs) for name in names}
    able = [name for name, reason in reasons.items() if reason is None]
    if not able:
        raise BackendUnavailable(operator, names[-1], str(reasons[names[-1]]))
    return backends.implementations[operator][able[0]].function(x, *args, **kwargs)


def call_in_group(group: Any, shared: Any, operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves a call in which the processes of a group exchange data, all with the same backend.

    The first call asks every process which backend it would take; if they differ, PyTorch's own serves.

    Args:
        group: The process group.
        shared: Hashable settings that tell this call from others and are the same in every process.
        operator: As of :func:`call`, like the other arguments.
        x: As of :func:`call`.
        args: As of :func:`call`.
        kwargs: As of :func:`call`.

    Raises:
        BackendUnavailable: None of the requested backends can serve the call.
    """
    if not backends.is_auto():
        return call(operator, x, *args, **kwargs)
    if torch.compiler.is_compiling():
        return _first_able(operator, backends.operators[operator].defaults, x, *args, **kwargs)
    agreed = backends.agreements.setdefault(group, {})
    gradient = backends.operators[operator].signature(x, *args, **kwargs)[0]
    key = operator, shared, x.dtype, x.device, gradient, checks.autocast_dtype(x)
    if key not in agreed:
        if machine.is_capturing(x):
            return _first_able(operator, backends.operators[operator].defaults, x, *args, **kwargs)
        proposal = BACKENDS.index(_choice(operator, x, args, kwargs).eager.backend)
        extremes = torch.tensor([proposal, -proposal], device=x.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
        highest, lowest = extremes[0].item(), -extremes[1].item()
        defaults = backends.operators[operator].defaults
        agreed[key] = (BACKENDS[proposal], *defaults) if highest == lowest else defaults
    return _first_able(operator, agreed[key], x, *args, **kwargs)


def _call_requested(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _first_able(operator, _names_requested(operator), x, *args, **kwargs)


def _names_requested(operator: str) -> tuple[str, ...]:
    requested = backends.requested_backends()
    known = backends.implementations[operator]
    # Who asks for kernels of ours does not mean the operators that have none.
    if not any(name in known for name in (*OURS, *requested)):
        return backends.operators[operator].defaults
    return requested


def _call_traced(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves a call that torch.compile or torch.export traces; the verdict is a constant of the trace."""
    description = backends.operators[operator]
    if checks.is_exporting():  # for whatever machine, and for sizes that may not be asked for
        return _call_unnoted(operator, description.defaults, x, *args, **kwargs)
    signature = description.signature(x, *args, **kwargs)
    if not signature[0] and _is_left_to_compiler(operator, x.device.type):
        return _first_able(operator, description.defaults, x, *args, **kwargs)
    shape_class = description.shape_class(*signature)
    backend = _remembered_backend(operator, x.dtype, x.device, signature[0], shape_class)
    names = description.defaults if backend is None else (backend, *description.defaults)
    return _first_able(operator, names, x, *args, **kwargs)


#: The operators that torch.compile's own code for a CPU computes together with what is around them: sums,
#: LayerNorm, and GELU behind packed linear layers. An operator of ours would stand between.
_LEFT_TO_COMPILER = ("layer_norm", "add_layer_norm", "gelu", "bias_gelu", "layer_norm_gelu")


def _is_left_to_compiler(operator: str, device_type: str) -> bool:
    """Says whether ``auto`` takes PyTorch's own where torch.compile traces a call without gradients."""
    if device_type != "cpu" or operator not in _LEFT_TO_COMPILER:
        return False
    for backend in OURS:
        if why_unavailable(operator, backend, device_type) is None:
            backends.note_fallback(operator, backend, "torch.compile fuses such calls with others on a CPU")
    return True


def _first_able(operator: str, names: tuple[str, ...], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves a call with the first of some backends that can."""
    for backend in names:
        reason = why_unsupported(operator, backend, x, *args, **kwargs)
        if reason is None:
            return backends.implementations[operator][backend].function(x, *args, **kwargs)
        backends.note_fallback(operator, backend, reason)
    raise BackendUnavailable(operator, backend, str(reason))


# Calls that are like an earlier one -----------------------------------------------------------------------

_Function = TypeVar("_Function", bound=Callable[..., Any])


def prepared_by(prepare: Callable[..., Callable[..., Any] | None]) -> Callable[[_Function], _Function]:
    """Marks the function of a backend as one whose calls can be prepared.

    Args:
        prepare: Takes the arguments of a call without gradients that has been served, and returns what
            serves calls of the same key from now on; None if it cannot be prepared. That may depend on
            nothing but what is part of the key (``declaration``), and keeps no tensor. What it returns has
            parameters of the same names, or takes all of them by position (``*_``).
    """

    def mark(function: _Function) -> _Function:
        function.prepare = prepare  # type: ignore[attr-defined]
        return function

    return mark


class Plan(NamedTuple):
    """The functions that serve calls which are alike in all that a key has.

    Attributes:
        function: The backend's, with the parameters of the operator.
        run: The one that its ``prepare`` returned, which serves them sooner; None if there is none.
        why_unsupported: The backend's, see :class:`backends.Implementation`.
    """

    function: Callable[..., Any]
    run: Callable[..., Any] | None
    why_unsupported: Callable[..., str | None] | None


def plan(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Plan | None:
    """Returns the plan of calls that are like one that has been served; None if there is none."""
    if backends.is_auto():
        choice: _Choice | None = backends.choices.get(_key_of_choice(operator, x, args, kwargs))
        if choice is None or choice.in_graphs is not choice.eager:
            return None
        served = choice.eager.implementation
    else:
        served = backends.implementations[operator][_backend_requested(operator, x, args, kwargs)]
    prepare = None if torch.is_grad_enabled() else getattr(served.function, "prepare", None)
    run = None if prepare is None else prepare(x, *args, **kwargs)
    return Plan(served.function, run, served.why_unsupported)


def _backend_requested(operator: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns the requested backend that serves a call."""
    names = _names_requested(operator)
    return next(name for name in names if why_unsupported(operator, name, x, *args, **kwargs) is None)


# Verdicts -------------------------------------------------------------------------------------------------


class _Served(NamedTuple):
    """A backend and its implementation of an operator."""

    backend: str
    implementation: Implementation


class _Choice(NamedTuple):
    """The backends that serve calls of one kind, outside of CUDA graphs and in them."""

    eager: _Served
    in_graphs: _Served


# This is asked at every call, and is quicker than to ask for a device by its name.
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_MOST_CHOICES = 10_000  # ever new shapes must not fill the memory


def _choice(operator: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Choice:
    key, table = _key_of_choice(operator, x, args, kwargs), backends.choices
    try:
        choice = table.get(key)
    except TypeError:  # symbolic sizes have no hash
        return _choose(operator, x, args, kwargs).choice
    if choice is None:
        choice, lasts = _choose(operator, x, args, kwargs)
        if lasts and may_be_kept(key):
            keep(table, key, choice)
    return choice


def _key_of_choice(operator: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns everything on which the choice for a call depends."""
    dtype = x.dtype
    return (
        operator,
        backends.operators[operator].signature(x, *args, **kwargs),
        type(x),
        dtype,
        x.device,
        checks.autocast_dtype(x) if _is_any_autocast_enabled() else None,
        torch.backends.cuda.matmul.fp32_precision if dtype is torch.float32 and x.is_cuda else None,
        torch.get_num_threads(),
        checks.is_transformed(),
        getattr(forward_ad, "_current_level", 0),
    )


def may_be_kept(key: Any) -> bool:
    """Says whether a key may be kept; one with a tensor would keep that alive, and miss its new numbers."""
    try:
        hash(key)
    except TypeError:
        return False
    return not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(key))


def keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Keeps a value in the table in which it was missed, which may have been forgotten meanwhile."""
    if len(table) >= _MOST_CHOICES:
        table.clear()
    table[key] = value


class _Decision(NamedTuple):
    """A choice, and whether it holds for later calls of the kind."""

    choice: _Choice
    lasts: bool


def _choose(operator: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Decision:
    """Decides on a call: by verdict, which is proven if need be and possible, or else for PyTorch's own."""
    able = _able(operator, x, args, kwargs)
    default = next(name for name in backends.operators[operator].defaults if name in able)
    if len(able) == 1:
        return _decision(operator, default, default)
    if (reason := _why_not_for_kernels(x, args, kwargs)) is not None:
        _note_passed_over(operator, able, default, reason)
        return _decision(operator, default, default, lasts=False)
    store = verdicts.store_for(x.device)
    asked = question(operator, x, *args, **kwargs)
    verdict = store.get(asked)
    if verdict is None and _is_proving():
        return _decision(operator, able[0], able[0], lasts=False)
    if verdict is None or not _knows(verdict, able):
        lasting, passing = _why_not_provable(store), _why_not_provable_now(x)
        if lasting is None and passing is None:
            try:
                verdict = _prove(store, asked, able, operator, x, args, kwargs)
            except Warning:  # where warnings are errors
                raise
            except Exception as error:  # the call itself may be served all the same, or raises it again
                from . import proofs

                reason = f"could not be proven: {proofs.describe_error(error)}"
                _note_passed_over(operator, able, default, reason)
                return _decision(operator, default, default)
        elif verdict is None:
            _note_passed_over(operator, able, default, f"has no verdict, and {lasting or passing}")
            return _decision(operator, default, default, lasts=passing is None)
    elif verdict.is_unsure and _may_time_again(store, x) and store.times_again(asked):
        verdict = _time_again(store, asked, verdict, operator, x, args, kwargs)
    if torch.are_deterministic_algorithms_enabled() and not verdict.is_lasting:
        reason = "deterministic algorithms are demanded, but the verdict holds for this process only"
        _note_passed_over(operator, able, default, reason)
        return _decision(operator, default, default)
    _note(operator, verdict)
    chosen = [name if name in able else default for name in (verdict.chosen, verdict.chosen_in_graphs)]
    return _decision(operator, *chosen)


def _is_proving() -> bool:
    """Says whether a call is part of a composition that is being proven, whose parts wait for their turn."""
    from . import proofs

    return proofs.is_proving()


def _knows(verdict: verdicts.Verdict | None, able: list[str]) -> bool:
    """Says whether a verdict is of all backends that are able; a call before may have kept one away."""
    return verdict is not None and all(name in verdict.trials for name in able)


def _note_passed_over(operator: str, able: list[str], default: str, reason: str) -> None:
    for backend in able:
        if backend != default:
            backends.note_fallback(operator, backend, reason)


def _able(operator: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Lists the backends that can serve a call, and notes why others cannot."""
    able = []
    for backend in BACKENDS:
        if backend not in backends.implementations[operator]:
            continue
        reason = why_unsupported(operator, backend, x, *args, **kwargs)
        if reason is None:
            able.append(backend)
        else:
            backends.note_fallback(operator, backend, reason)
    return able


def _decision(operator: str, eager: str, in_graphs: str, *, lasts: bool = True) -> _Decision:
    served = _Served(eager, backends.implementations[operator][eager])
    other = (
        served if in_graphs == eager else _Served(in_graphs, backends.implementations[operator][in_graphs])
    )
    return _Decision(_Choice(served, other), lasts)


def question(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> str:
    """Returns the question that a verdict on such calls answers, as in the files of verdicts."""
    description = backends.operators[operator]
    signature = description.signature(x, *args, **kwargs)
    return _question(operator, x.dtype, x.device, signature[0], description.shape_class(*signature))


def _question(
    operator: str, dtype: torch.dtype, device: torch.device, gradient: bool, shape_class: str
) -> str:
    numbers = checks.dtype_name(dtype)
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        numbers += f" under autocast to {checks.dtype_name(torch.get_autocast_dtype(device.type))}"
    precision = torch.backends.cuda.matmul.fp32_precision
    if device.type == "cuda" and dtype == torch.float32 and precision not in ("ieee", "none"):
        numbers += f" multiplied in {precision}"
    return f"{operator}, {_direction(gradient)}, {numbers}, {shape_class}"


def _direction(gradient: bool) -> str:
    return "forward+backward" if gradient else "forward"


def _remembered_backend(
    operator: str, dtype: torch.dtype, device: torch.device, gradient: bool, shape_class: str
) -> str | None:
    """Returns the backend of a remembered verdict for graphs; None without one."""
    asked = _question(operator, dtype, device, gradient, shape_class)
    verdict = verdicts.store_for(device).get(asked)
    if verdict is not None:
        return verdict.chosen_in_graphs
    reason = "has no verdict, and nothing is proven while torch.compile traces"
    for backend in OURS:
        if why_unavailable(operator, backend, device.type) is None:
            backends.note_fallback(operator, backend, reason)
    return None


def _why_not_provable(store: verdicts.Store) -> str | None:
    """Says why nothing is proven at first use in this process; None if it is."""
    if not verdicts.proving_enabled():
        return "CVT_KERNELS_PROVE=0 forbids proving it at first use"
    # A verdict that cannot be remembered could be another one in the next run.
    if torch.are_deterministic_algorithms_enabled() and (reason := store.why_not_remembered()) is not None:
        return f"deterministic algorithms are demanded, but verdicts cannot be remembered: {reason}"
    return None


def _why_not_provable_now(x: Tensor) -> str | None:
    """Says why a call cannot be proven where it is made; None if it can."""
    if x.numel() == 0:
        return "nothing is proven on an empty tensor"
    if x.device.type not in ("cpu", "cuda"):
        return f"nothing is proven on {x.device.type} tensors"
    if machine.is_capturing(x):
        return "nothing is proven while a CUDA graph is captured"
    return None


def _why_not_for_kernels(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Says why a call is for PyTorch's own, whatever the verdict; None if it is not."""
    tensors = [t for t in pytree.tree_leaves((x, args, kwargs)) if isinstance(t, Tensor)]
    if not all(type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided for t in tensors):
        return "verdicts do not hold for subclasses of tensors"
    if checks.is_transformed() or checks.forward_mode_enabled():
        return "verdicts do not hold within function transforms and forward-mode differentiation"
    return None


def proof_of(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> proofs.Proof:
    """Returns the proof of all backends that can serve a call, to be run by ``proofs.prove`` or in parts."""
    from . import proofs  # is not needed where every verdict is known

    able = _able(operator, x, args, kwargs)
    description = backends.operators[operator]
    asked, gradient = question(operator, x, *args, **kwargs), description.signature(x, *args, **kwargs)[0]

    def images(factor: int) -> proofs.Call:
        return proofs.Call(*description.sample(factor, x, *args, **kwargs), gradient)

    with proofs.undisturbed(x.device):
        return proofs.Proof(
            question=asked,
            reference=backends.implementations[operator]["reference"].function,
            candidates={name: backends.implementations[operator][name].function for name in able},
            default=next(name for name in description.defaults if name in able),
            sample=images(64 if x.is_cuda else 1),
            timed=images(_ALL if x.is_cuda else 32),  # a GPU is busy with a whole call only
            exact=description.exact,
            unrounded=description.unrounded,
        )


_ALL = 2**40  # more than any call has


def _prove(
    store: verdicts.Store,
    asked: str,
    able: list[str],
    operator: str,
    x: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> verdicts.Verdict:
    """Proves a call, unless another process has done so meanwhile, and remembers the verdict."""
    from . import proofs

    with proofs.noticed(), store.proving(lambda: _knows(store.get(asked), able)):
        known = store.get(asked)
        if known is not None and _knows(known, able):
            return known
        verdict = proofs.prove(proof_of(operator, x, *args, **kwargs))
        store.remember({asked: verdict}, replace=known is not None)
    _warn_of_wrong_kernels(asked, verdict)
    return verdict


def _may_time_again(store: verdicts.Store, x: Tensor) -> bool:
    """Says whether a call may be timed again; not where the choice is to stay from run to run."""
    if _is_proving() or torch.are_deterministic_algorithms_enabled():
        return False
    return _why_not_provable(store) is None and _why_not_provable_now(x) is None


def _time_again(
    store: verdicts.Store,
    asked: str,
    verdict: verdicts.Verdict,
    operator: str,
    x: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> verdicts.Verdict:
    """Times a call again and remembers the verdict, unless another process proves; returns what holds."""
    from . import proofs

    with store.proving(waits=False) as has_turn:
        known = store.get(asked)
        if not has_turn or known != verdict:
            return known or verdict
        try:
            again = proofs.time_again(proof_of(operator, x, *args, **kwargs), verdict)
        except Warning:  # where warnings are errors
            raise
        except Exception:  # as where there is not enough memory
            return verdict
        store.remember({asked: again}, replace=True)
    return again


def _warn_of_wrong_kernels(asked: str, verdict: verdicts.Verdict) -> None:
    for backend in OURS:
        trial = verdict.trials.get(backend)
        if trial is None or trial.flaw is None or "OutOfResources" in trial.flaw:
            continue  # a GPU with less shared memory is no reason to worry
        if trial.is_lasting:
            message = (
                f"failed its check on this machine and is not used for calls of this kind ({asked}): "
                f"{trial.flaw}. {verdict.chosen} serves instead, so that results are right. Please report "
                "this line with the output of `cvt doctor`."
            )
        else:
            message = (
                f"could not be tried and is not used in this process for calls of this kind ({asked}): "
                f"{trial.flaw}. {verdict.chosen} serves instead. The next process tries again."
            )
        warnings.warn(
            f"cvt_kernels: the kernel of backend {backend!r} {message}",
            RuntimeWarning,
            stacklevel=verdicts.stacklevel_of_caller(),
        )


def _note(operator: str, verdict: verdicts.Verdict) -> None:
    """Notes why a verdict passed over the backends that it did not choose."""
    for backend, trial in verdict.trials.items():
        if backend != verdict.chosen:
            backends.note_fallback(operator, backend, trial.flaw or _why_slower(trial, verdict))


def _why_slower(trial: verdicts.Trial, verdict: verdicts.Verdict) -> str:
    chosen = verdict.trials.get(verdict.chosen)
    mine, best = trial.call_seconds, chosen and chosen.call_seconds
    if mine is None or best is None:
        return f"{verdict.chosen} serves such calls here"
    if mine <= best:
        return f"is hardly faster than {verdict.chosen} (measured here)"
    return f"takes {1e6 * mine:.0f} µs where {verdict.chosen} takes {1e6 * best:.0f} (measured here)"


def chosen_backends(operator: str, device_type: str, *, gradient: bool | None = None) -> dict[str, int]:
    """Returns the backends that serve an operator on a type of device, each with its number of verdicts.

    They come most frequent first. Where backends are requested, it is the first of them that may serve, with
    0; without verdicts nothing.

    Args:
        operator: Name of the operator.
        device_type: Such as ``"cpu"``.
        gradient: True for calls that want a gradient only, False for the others only, None for both.
    """
    if not backends.is_auto():
        known = backends.implementations[operator]
        concerned = any(name in known for name in (*OURS, *backends.requested_backends()))
        names = backends.requested_backends() if concerned else backends.operators[operator].defaults
        able = (name for name in names if _may_serve(operator, name, device_type, gradient))
        return dict.fromkeys(itertools.islice(able, 1), 0)
    asked_for = f"{operator}, " if gradient is None else f"{operator}, {_direction(gradient)}, "
    answers = verdicts.store_for(torch.device(device_type)).verdicts().items()
    counts = collections.Counter(verdict.chosen for asked, verdict in answers if asked.startswith(asked_for))
    return dict(counts.most_common())


def backend_without_verdict(operator: str, device_type: str, *, gradient: bool | None = None) -> str | None:
    """Returns the backend that ``auto`` takes on a type of device as long as there is no verdict.

    It is PyTorch's own where nothing is proven at first use or no other backend can serve.

    Args:
        operator: As of :func:`chosen_backends`, like the other arguments.
        device_type: As of :func:`chosen_backends`.
        gradient: As of :func:`chosen_backends`.

    Returns:
        Its name; None where the first call proves what serves.
    """
    known = backends.implementations[operator]
    able = [name for name in known if _may_serve(operator, name, device_type, gradient)]
    if len(able) > 1 and _why_not_provable(verdicts.store_for(torch.device(device_type))) is None:
        return None
    return next(name for name in backends.operators[operator].defaults if name in able)


def _may_serve(operator: str, backend: str, device_type: str, gradient: bool | None) -> bool:
    if why_unavailable(operator, backend, device_type) is not None:
        return False
    return not (gradient and backends.implementations[operator][backend].forward_only)


def may_be_ours(operator: str, device_type: str, *, gradient: bool = True) -> bool:
    """Says whether kernels of this project may serve calls of an operator on a type of device.

    Whether they want a gradient matters where torch.compile traces them.
    """
    if checks.is_counted():
        return False
    if backends.is_auto():
        if checks.is_exporting():
            return False
        if not gradient and torch.compiler.is_compiling() and _is_left_to_compiler(operator, device_type):
            return False
        return _auto_may_take_ours(operator, device_type)
    names = (name for name in backends.requested_backends() if name in OURS)
    return any(why_unavailable(operator, name, device_type) is None for name in names)


def _auto_may_take_ours(operator: str, device_type: str) -> bool:
    if all(why_unavailable(operator, name, device_type) is not None for name in OURS):
        return False
    if verdicts.proving_enabled():
        return True
    return any(name in OURS for name in chosen_backends(operator, device_type))


# A verdict does not change under a compiled graph; see the end of backends.py.
_is_left_to_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]
_remembered_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]
_auto_may_take_ours._dynamo_marked_constant = True  # type: ignore[attr-defined]
