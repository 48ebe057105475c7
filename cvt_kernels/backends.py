"""The registry of backends, and the choice of the one that serves a call.

A package in ``ops/`` describes its operator with :func:`describe`, names the implementations by module path
with :func:`register`, and serves its public function with :func:`call`. Under ``auto`` the choice is a
verdict: proven and measured on this machine at the first call of its kind (``proofs``), remembered on disk
(``verdicts``), and kept in a table by the exact arguments, where later calls find it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import checks, machine, verdicts

if TYPE_CHECKING:
    from . import proofs

#: Every backend. ``native`` is csrc (CPU or CUDA); from ``sdpa`` on, they are PyTorch's own.
BACKENDS = ("triton", "native", "sdpa", "convolution", "float32", "reference")
#: The backends that are kernels of this project.
OURS = ("triton", "native")

#: Every operator of the registry.
OPERATORS = (
    "conv_projection",
    "attention",
    "layer_norm",
    "add_layer_norm",
    "gelu",
    "bias_gelu",
    "layer_norm_gelu",
    "linear",
)


class BackendUnavailable(RuntimeError):  # noqa: N818 (the public name; it says what happened)
    """An explicitly requested backend cannot serve a call.

    Attributes:
        operator: Name of the operator.
        backend: Name of the backend.
        reason: Why it cannot.
    """

    def __init__(self, operator: str, backend: str, reason: str):
        super().__init__(f"{operator}: backend {backend!r} is unavailable: {reason}")
        self.operator, self.backend, self.reason = operator, backend, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.operator, self.backend, self.reason)


@dataclass(eq=False)
class Implementation:
    """One operator on one backend.

    Attributes:
        function: Takes the arguments of the public function: itself, or its path ``"package.module:name"``,
            which is imported when a call first asks for this backend on a device that it serves.
        devices: Device types that it serves; None for every one.
        why_unavailable: Given a device type, says why this machine cannot run it there at all, or None if it
            can. It is asked once, at the first call.
        why_unsupported: Given the arguments of one call, says why it cannot serve that call, or None if it
            can; itself, or its path.
        forward_only: Whether it has no gradients; ``why_unsupported`` refuses the calls that want one.
    """

    function: Any
    devices: tuple[str, ...] | None = None
    why_unavailable: Callable[[str], str | None] | None = None
    why_unsupported: Any = None
    forward_only: bool = False

    def load(self) -> Implementation:
        """Puts the functions in the place of their paths; returns this object."""
        if isinstance(self.function, str):
            self.function = _imported(self.function)
        if isinstance(self.why_unsupported, str):
            self.why_unsupported = _imported(self.why_unsupported)
        return self


class Operator(NamedTuple):
    """The parts of an operator's calls on which a verdict depends.

    Attributes:
        signature: Given the arguments of a call, returns what tells it from others, hashable: first whether a
            gradient is wanted, then shapes and settings. It is taken at every call.
        shape_class: Given a signature, returns words for all calls that share a verdict: those with the same
            kernels and about the same economics.
        sample: Given a factor and a call's arguments, returns arguments of fewer images: with the factor 1 as
            few as suffice to check it, with 8 more than a CPU's caches hold.
        defaults: PyTorch's own backends, of which the first that can serves where there is no verdict.
    """

    signature: Callable[..., tuple[Any, ...]]
    shape_class: Callable[..., str]
    sample: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    defaults: tuple[str, ...] = ("reference",)


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_AUTO = ("auto",)
_operators: dict[str, Operator] = {}
_implementations: dict[str, dict[str, Implementation]] = {operator: {} for operator in OPERATORS}
_requested = tuple((os.environ.get("CVT_KERNELS_BACKEND") or "auto").replace(" ", "").split(","))
_fallbacks: dict[tuple[str, str], str] = {}


def describe(operator: str, description: Operator) -> None:
    """Makes known what an operator's verdicts depend on."""
    _operators[operator] = description


def register(operator: str, backend: str, implementation: Implementation) -> None:
    """Makes ``backend`` known for ``operator``, replacing what was registered before.

    Raises:
        ValueError: The operator or the backend is unknown.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator: got {operator!r}, expected one of {', '.join(OPERATORS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    _implementations[operator][backend] = implementation
    forget()


def registered(operator: str, backend: str) -> Implementation:
    """Returns the implementation of ``operator`` on ``backend``; KeyError if there is none."""
    return _implementations[operator][backend]


@contextlib.contextmanager
def replaced(replace: Callable[[str, str, Implementation], Implementation]) -> Iterator[None]:
    """Replaces every implementation by ``replace(operator, backend, implementation)`` within a block.

    Implementations that are registered within the block are forgotten at its end. Tools that count, label or
    time calls need this; like the registry, it applies to the whole process.
    """
    global _implementations
    previous = _implementations
    _implementations = {
        operator: {backend: replace(operator, backend, each) for backend, each in known.items()}
        for operator, known in previous.items()
    }
    forget()
    try:
        yield
    finally:
        _implementations = previous
        forget()


class use_backend:  # noqa: N801 (lower case as torch.no_grad)
    """Chooses the backends of every later call in this process, in all threads.

    It takes effect at once; as a context manager it restores the previous choice on exit::

        use_backend("reference")                    # from now on
        with use_backend("triton", "native"): ...   # only here: Triton's kernel, else csrc's

    ``"auto"``, the default, takes the fastest backend that has been proven on this machine. Names are an
    order of preference; a call that none of them can serve raises :class:`BackendUnavailable`. The
    environment variable ``CVT_KERNELS_BACKEND`` (names between commas), read at import, sets the choice that
    a process starts with. An operator that has no kernels of this project, ``linear``, ignores a request
    that names none of its backends.

    Raises:
        ValueError: A name is unknown, none is given, or ``"auto"`` is not alone.
    """

    def __init__(self, *names: str):
        global _requested
        _check_backends(names, "backend")
        self._names, self._previous = names, _requested
        _requested = names

    def __enter__(self) -> use_backend:
        global _requested
        _requested = self._names  # again, for an object that is entered more than once
        return self

    def __exit__(self, *exception: object) -> None:
        global _requested
        _requested = self._previous


def _check_backends(names: tuple[str, ...], argument: str) -> None:
    if names == _AUTO:
        return
    for name in names or ("",):
        if name not in BACKENDS:
            alone = " (auto stands alone)" if name == "auto" else ""
            expected = ", ".join(BACKENDS)
            raise ValueError(f"{argument}: got {name!r}, expected auto or some of {expected}{alone}")


def requested_backends() -> tuple[str, ...]:
    """Returns the backends chosen by :class:`use_backend` or ``CVT_KERNELS_BACKEND``, or ``("auto",)``.

    Raises:
        ValueError: The environment variable holds an unknown name.
    """
    _check_backends(_requested, "CVT_KERNELS_BACKEND")
    return _requested


def fallbacks() -> dict[tuple[str, str], str]:
    """Returns (operator, backend) → why it was last passed over by ``auto``, or could not serve a call."""
    return dict(_fallbacks)


# Calls ----------------------------------------------------------------------------------------------------


def call(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves ``operator(x, ...)`` with the requested backends, or under ``auto`` by verdict.

    Raises:
        BackendUnavailable: None of the requested backends can serve the call.
    """
    if _requested != _AUTO:
        return _call_requested(operator, x, *args, **kwargs)
    if torch.compiler.is_compiling():
        return _call_traced(operator, x, *args, **kwargs)
    choice = _choice(operator, x, args, kwargs)
    served = choice.eager
    if choice.in_graphs is not served and machine.is_capturing(x):
        served = choice.in_graphs
    why_unsupported = served.implementation.why_unsupported
    if why_unsupported is not None and (reason := why_unsupported(x, *args, **kwargs)) is not None:
        _fallbacks[operator, served.backend] = reason
        return _first_able(operator, _operators[operator].defaults, x, *args, **kwargs)
    return served.implementation.function(x, *args, **kwargs)


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
    if _requested != _AUTO or torch.compiler.is_compiling():
        return call(operator, x, *args, **kwargs)
    agreed = _agreed.setdefault(group, {})
    gradient = _operators[operator].signature(x, *args, **kwargs)[0]
    key = operator, shared, x.dtype, x.device, gradient, checks.autocast_dtype(x)
    if key not in agreed:
        if machine.is_capturing(x):
            return _first_able(operator, _operators[operator].defaults, x, *args, **kwargs)
        proposal = BACKENDS.index(_choice(operator, x, args, kwargs).eager.backend)
        extremes = torch.tensor([proposal, -proposal], device=x.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
        highest, lowest = extremes[0].item(), -extremes[1].item()
        defaults = _operators[operator].defaults
        agreed[key] = (BACKENDS[proposal], *defaults) if highest == lowest else defaults
    return _first_able(operator, agreed[key], x, *args, **kwargs)


def _call_requested(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    requested = requested_backends()
    known = _implementations[operator]
    # Who asks for kernels of ours does not mean the operators that have none.
    if not any(name in known for name in (*OURS, *requested)):
        requested = _operators[operator].defaults
    return _first_able(operator, requested, x, *args, **kwargs)


def _call_traced(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves a call that torch.compile or torch.export traces; the verdict is a constant of the trace."""
    description = _operators[operator]
    if torch.compiler.is_exporting():  # for whatever machine, and for sizes that may not be asked for
        return _first_able(operator, description.defaults, x, *args, **kwargs)
    signature = description.signature(x, *args, **kwargs)
    shape_class = description.shape_class(*signature)
    backend = _remembered_backend(operator, x.dtype, x.device, signature[0], shape_class)
    names = description.defaults if backend is None else (backend, *description.defaults)
    return _first_able(operator, names, x, *args, **kwargs)


def _first_able(operator: str, names: tuple[str, ...], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves a call with the first of some backends that can."""
    for backend in names:
        reason = why_unsupported(operator, backend, x, *args, **kwargs)
        if reason is None:
            return _implementations[operator][backend].function(x, *args, **kwargs)
        _fallbacks[operator, backend] = reason
    raise BackendUnavailable(operator, backend, _fallbacks[operator, backend])


def why_unsupported(operator: str, backend: str, x: Tensor, *args: Any, **kwargs: Any) -> str | None:
    """Says why a backend cannot serve a call; None if it can."""
    reason = why_unavailable(operator, backend, x.device.type)
    if reason is None:
        ask = _implementations[operator][backend].why_unsupported
        reason = None if ask is None else ask(x, *args, **kwargs)
    return reason


def why_unavailable(operator: str, backend: str, device_type: str) -> str | None:
    """Says why ``backend`` cannot run ``operator`` on a type of device here; None if it can."""
    implementation = _implementations[operator].get(backend)
    if implementation is None:
        return "not implemented in this version"
    reason = _machine_lacks(operator, backend, device_type)
    if reason is not None:
        return reason
    # With TRITON_INTERPRET=1 Triton's kernels run on the CPU, far too slowly for anyone who did not ask.
    interpreted = machine.INTERPRETING and backend == "triton" in _requested and device_type == "cpu"
    if implementation.devices is not None and device_type not in implementation.devices and not interpreted:
        return f"serves {' and '.join(implementation.devices)} tensors, not {device_type}"
    return None


def _machine_lacks(operator: str, backend: str, device_type: str) -> str | None:
    return _ask_why_unavailable(operator, backend, device_type)


@functools.cache
def _ask_why_unavailable(operator: str, backend: str, device_type: str) -> str | None:
    """Asks the machine, and imports the functions if it can run them."""
    implementation = _implementations[operator][backend]
    ask, devices = implementation.why_unavailable, implementation.devices
    reason = None if ask is None else ask(device_type)
    if reason is None and (devices is None or device_type in devices or machine.INTERPRETING):
        implementation.load()
    return reason


# Verdicts -------------------------------------------------------------------------------------------------


class _Served(NamedTuple):
    """A backend and its implementation of an operator."""

    backend: str
    implementation: Implementation


class _Choice(NamedTuple):
    """The backends that serve calls of one kind, outside of CUDA graphs and in them."""

    eager: _Served
    in_graphs: _Served


_choices: dict[Any, _Choice] = {}
_level_of_transforms = torch._C._functorch.maybe_current_level  # None outside of torch.func
_MOST_CHOICES = 10_000  # ever new shapes must not fill the memory
#: By process group, whose end it does not delay.
_agreed: MutableMapping[Any, dict[Any, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def forget() -> None:
    """Forgets the choices of this process, so that verdicts and the machine are asked again."""
    _choices.clear()
    _agreed.clear()
    _ask_why_unavailable.cache_clear()


def _choice(operator: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Choice:
    device_type = "cuda" if x.is_cuda else "cpu"  # x.device.type makes a new string every time
    key = (
        operator,
        _operators[operator].signature(x, *args, **kwargs),
        type(x),
        x.dtype,
        x.device,
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None,
        torch.get_num_threads(),
        _level_of_transforms(),
        checks.forward_mode_enabled(),
    )
    try:
        choice = _choices.get(key)
    except TypeError:  # symbolic sizes have no hash
        return _choose(operator, x, args, kwargs).choice
    if choice is None:
        choice, lasts = _choose(operator, x, args, kwargs)
        if lasts:
            if len(_choices) >= _MOST_CHOICES:
                _choices.clear()
            _choices[key] = choice
    return choice


class _Decision(NamedTuple):
    """A choice, and whether it holds for later calls of the kind."""

    choice: _Choice
    lasts: bool


def _choose(operator: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Decision:
    """Decides on a call: by verdict, which is proven if need be and possible, or else for PyTorch's own."""
    able = _able(operator, x, args, kwargs)
    default = next(name for name in _operators[operator].defaults if name in able)
    if len(able) == 1:
        return _decision(operator, default, default)
    if (reason := _why_not_for_kernels(x, args, kwargs)) is not None:
        _note_passed_over(operator, able, default, reason)
        return _decision(operator, default, default, lasts=False)
    store = verdicts.store_for(x.device)
    asked = question(operator, x, *args, **kwargs)
    verdict = _complete(store.get(asked), able)
    if verdict is None:
        lasting, passing = _why_not_provable(store), _why_not_provable_now(x)
        if lasting is not None or passing is not None:
            _note_passed_over(operator, able, default, f"has no verdict, and {lasting or passing}")
            return _decision(operator, default, default, lasts=passing is None)
        try:
            verdict = _prove(store, asked, able, operator, x, args, kwargs)
        except Warning:  # where warnings are errors
            raise
        except Exception as error:  # the call itself may be served all the same, or raises it again
            from . import proofs

            reason = f"could not be proven: {proofs.describe_error(error)}"
            _note_passed_over(operator, able, default, reason)
            return _decision(operator, default, default)
    _note(operator, verdict)
    chosen = [name if name in able else default for name in (verdict.chosen, verdict.chosen_in_graphs)]
    return _decision(operator, *chosen)


def _complete(verdict: verdicts.Verdict | None, able: list[str]) -> verdicts.Verdict | None:
    """Returns a verdict if it knows all backends that are able; a call before may have kept one away."""
    return verdict if verdict is not None and all(name in verdict.trials for name in able) else None


def _note_passed_over(operator: str, able: list[str], default: str, reason: str) -> None:
    for backend in able:
        if backend != default:
            _fallbacks[operator, backend] = reason


def _able(operator: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Lists the backends that can serve a call, and notes why others cannot."""
    able = []
    for backend in BACKENDS:
        if backend not in _implementations[operator]:
            continue
        reason = why_unsupported(operator, backend, x, *args, **kwargs)
        if reason is None:
            able.append(backend)
        else:
            _fallbacks[operator, backend] = reason
    return able


def _decision(operator: str, eager: str, in_graphs: str, *, lasts: bool = True) -> _Decision:
    served = _Served(eager, _implementations[operator][eager])
    other = served if in_graphs == eager else _Served(in_graphs, _implementations[operator][in_graphs])
    return _Decision(_Choice(served, other), lasts)


def question(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> str:
    """Returns the question that a verdict on such calls answers, as in the files of verdicts."""
    description = _operators[operator]
    signature = description.signature(x, *args, **kwargs)
    return _question(operator, x.dtype, x.device, signature[0], description.shape_class(*signature))


def _question(
    operator: str, dtype: torch.dtype, device: torch.device, gradient: bool, shape_class: str
) -> str:
    numbers = checks.dtype_name(dtype)
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        numbers += f" under autocast to {checks.dtype_name(torch.get_autocast_dtype(device.type))}"
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
    for backend in OURS:
        if backend in _implementations[operator] and why_unavailable(operator, backend, device.type) is None:
            _fallbacks[operator, backend] = "has no verdict, and nothing is proven while torch.compile traces"
    return None


def _why_not_provable(store: verdicts.Store) -> str | None:
    """Says why nothing is proven at first use in this process; None if it is."""
    if not verdicts.proving_enabled():
        return "CVT_KERNELS_PROVE=0 forbids to prove it at first use"
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
    if _level_of_transforms() is not None or checks.forward_mode_enabled():
        return "verdicts do not hold within function transforms and forward-mode differentiation"
    return None


def proof_of(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> proofs.Proof:
    """Returns the proof of all backends that can serve a call, to be run by ``proofs.prove`` or in parts."""
    from . import proofs  # is not needed where every verdict is known

    able = _able(operator, x, args, kwargs)
    description = _operators[operator]
    asked, gradient = question(operator, x, *args, **kwargs), description.signature(x, *args, **kwargs)[0]

    def images(factor: int) -> proofs.Call:
        return proofs.Call(*description.sample(factor, x, *args, **kwargs), gradient)

    with proofs.undisturbed(x.device):
        return proofs.Proof(
            question=asked,
            reference=_implementations[operator]["reference"].function,
            candidates={name: _implementations[operator][name].function for name in able},
            default=next(name for name in description.defaults if name in able),
            sample=images(64 if x.is_cuda else 1),
            timed=images(_ALL if x.is_cuda else 8),  # a GPU is busy with a whole call only
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

    with store.proving():
        verdict = _complete(store.get(asked), able)
        if verdict is not None:
            return verdict
        verdict = proofs.prove(proof_of(operator, x, *args, **kwargs))
        store.remember({asked: verdict}, replace=True)
    _warn_of_wrong_kernels(asked, verdict)
    return verdict


def _warn_of_wrong_kernels(asked: str, verdict: verdicts.Verdict) -> None:
    for backend in OURS:
        trial = verdict.trials.get(backend)
        if trial is not None and trial.flaw is not None:
            warnings.warn(
                f"{asked}: the kernel of backend {backend!r} is not used on this machine, it is at fault "
                f"({trial.flaw}); {verdict.chosen} serves instead. Please report this line with the "
                "output of `cvt doctor`.",
                RuntimeWarning,
                stacklevel=2,
            )


def _note(operator: str, verdict: verdicts.Verdict) -> None:
    """Notes why a verdict passed over the backends that it did not choose."""
    for backend, trial in verdict.trials.items():
        if backend != verdict.chosen:
            _fallbacks[operator, backend] = trial.flaw or _why_slower(trial, verdict)


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
    if _requested != _AUTO:
        known = _implementations[operator]
        concerned = any(name in known for name in (*OURS, *_requested))
        names = _requested if concerned else _operators[operator].defaults
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
    able = [name for name in _implementations[operator] if _may_serve(operator, name, device_type, gradient)]
    if len(able) > 1 and _why_not_provable(verdicts.store_for(torch.device(device_type))) is None:
        return None
    return next(name for name in _operators[operator].defaults if name in able)


def _may_serve(operator: str, backend: str, device_type: str, gradient: bool | None) -> bool:
    if why_unavailable(operator, backend, device_type) is not None:
        return False
    return not (gradient and _implementations[operator][backend].forward_only)


def may_be_ours(operator: str, device_type: str) -> bool:
    """Says whether kernels of this project may serve an operator on a type of device."""
    if _requested == _AUTO:
        return not torch.compiler.is_exporting() and _auto_may_take_ours(operator, device_type)
    names = (name for name in _requested if name in OURS)
    return any(why_unavailable(operator, name, device_type) is None for name in names)


def _auto_may_take_ours(operator: str, device_type: str) -> bool:
    if all(why_unavailable(operator, name, device_type) is not None for name in OURS):
        return False
    if verdicts.proving_enabled():
        return True
    return any(name in OURS for name in chosen_backends(operator, device_type))


# A verdict, and what is installed, do not change under a compiled graph. This is what
# torch.compiler.assume_constant_result does; to call it would import torch._dynamo, and with it Triton, and
# double the time of our import.
_machine_lacks._dynamo_marked_constant = True  # type: ignore[attr-defined]
_remembered_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]
_auto_may_take_ours._dynamo_marked_constant = True  # type: ignore[attr-defined]
