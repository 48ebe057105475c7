"""The decorator that declares an operator and makes its public function.

The decorated function has the signature and the docstring, and computes the operator in plain PyTorch. The
public function (:meth:`Declaration.call`) makes a key of each call: the facts of its tensors, its settings,
and the state of the process. The first call of a key checks its arguments, and ``choose`` chooses a
backend, whose function the dispatch cache keeps for later calls.
"""

from __future__ import annotations

import collections
import functools
import inspect
import numbers
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import backends, checks, choose, machine, reference
from .backends import Implementation, Record
from .launch import launching

_NOT_GIVEN = inspect.Parameter.empty
Function = TypeVar("Function", bound=Callable[..., Any])
_Backend = Callable[[Record], Any]
_Question = Callable[[Record], str | None]


@dataclass(eq=False)
class Declaration:
    """A declared operator. Its functions take the record of a call, a NamedTuple of the parameters.

    Attributes:
        name: Its name.
        function: The decorated function, which computes it in plain PyTorch.
        check: Raises TypeError or ValueError for wrong arguments. It depends on the key of a call only.
        cost_class: Returns the last part of a call's cache key, which names a class of calls that use the
            same kernels and cost about the same.
        sample: Takes a factor and a record; returns the record of a call on fewer images. With 1 they are
            enough for the check on a CPU, with 32 for the timing there.
        defaults: PyTorch's own backends in order of preference: the first able one serves without an entry.
            ``composed`` comes before them if other operators should serve then.
        exact: Takes a record in float64; returns the exact result for tuning. By default the reference.
        unrounded: Computes alternative results that are correct too, for implementations that do not round
            where the operator does.
        score: Takes a record and outputs that are no numbers, such as classes; returns numbers in their place
            whose errors the check compares.
        fused_by_compiler: Whether torch.compile fuses the operator with its neighbors on a CPU.
        check_numbers: A parameter, and a check of its numbers, which are not in the key. The check runs at
            every call where the parameter is not None.
        composition: Returns a function of the record that serves the call without a choice of a backend, or
            None. It is called once for a key.
        sequences: Parameters that become tuples, and what each is expected to be, for messages.
        key_also: Returns what choices depend on besides the facts of the arguments (:func:`facts_of`).
    """

    name: str
    function: Callable[..., Any]
    check: Callable[[Record], None]
    cost_class: Callable[[Record], str]
    sample: Callable[[int, Record], Record]
    defaults: tuple[str, ...] = ("reference",)
    exact: Callable[[Record], Any] | None = None
    unrounded: Callable[[Record], Any] | None = None
    score: Callable[[Record, list[Tensor]], list[Tensor]] | None = None
    fused_by_compiler: bool = False
    check_numbers: tuple[str, Callable[[Record], None]] | None = None
    composition: Callable[[Record], _Backend | None] | None = None
    sequences: Mapping[str, str] = field(default_factory=dict)
    key_also: Callable[[Record], Any] | None = None

    def __post_init__(self) -> None:
        self.package, self.signature = self.function.__module__, inspect.signature(self.function)
        parameters = [*self.signature.parameters.values()]
        self._positional = sum(each.kind is not each.KEYWORD_ONLY for each in parameters)
        # Keyword arguments without a default may come behind arguments with one; a NamedTuple's may not.
        given = [each.default for each in parameters]
        first = next((i for i, each in enumerate(given) if each is not _NOT_GIVEN), len(given))
        defaults = given[first:]
        self._needed = [i for i in range(first, len(given)) if given[i] is _NOT_GIVEN]
        self._record: Any = collections.namedtuple(  # type: ignore[misc]
            f"{self.name}_call", self.signature.parameters, defaults=defaults
        )
        self.reference = self.passing_on(self.function)
        self.public = _public(self, self.function)

    def bind(self, *args: Any, **kwargs: Any) -> Record:
        """Returns the record of a call with these arguments; raises TypeError as Python does."""
        if len(args) <= self._positional:
            try:
                call = self._record(*args, **kwargs)
            except TypeError:
                call = None
            # Most operators need none: every call comes here, so no generator is made for nothing.
            if call is not None and not (self._needed and any(call[i] is _NOT_GIVEN for i in self._needed)):
                return call
        reason = "got arguments that make no call"
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            reason = str(error)
        raise TypeError(f"{self.name}() {reason}")

    def passing_on(self, function: Callable[..., Any]) -> Callable[[Record], Any]:
        """Returns a function that takes a record and calls ``function`` with its arguments."""
        count, named = self._positional, [*self.signature.parameters][self._positional :]

        def pass_on(call: Record) -> Any:
            return function(*call[:count], **dict(zip(named, call[count:], strict=True)))

        return pass_on

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Serves a call with the arguments of the public function."""
        call = self.bind(*args, **kwargs)
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self._serve(call)[0]
        table = backends.dispatch_cache
        key, serve = self._known(call, table)
        if serve is None:
            out, serve = self._serve(call)
            if key is not None and serve is not None:
                backends.cache_dispatch(table, key, serve)
            return out
        if self.check_numbers is not None and getattr(call, self.check_numbers[0]) is not None:
            self.check_numbers[1](call)
        return serve(call)

    def _known(self, call: Record, table: dict[Any, _Backend]) -> tuple[Any, _Backend | None]:
        """Returns the key of a call, None for a call that must not be kept, and what serves it, if known."""
        grad = torch.is_grad_enabled()
        try:
            state = _state(grad, call[0])
            if state is None:
                return None, None
            also = None if self.key_also is None else self.key_also(call)
            key = self.name, state, also, *[facts_of(value, grad) for value in call]
            return key, table.get(key)
        except _NO_KEY:
            return None, None

    def bound(self, call: Record) -> Callable[[Any], Any] | None:
        """Returns a function that serves calls with other numbers in the first argument, or None.

        It is None if the backend cannot be bound. The caller must watch the parameters for changes.
        """
        if self.composition is not None and self.composition(call) is not None:
            return None
        bind = getattr(choose.choose(self.name, call).function, "bind", None)
        return None if bind is None else bind(call)

    def _serve(self, call: Record) -> tuple[Any, _Backend | None]:
        """Checks and serves a call; returns the result, and what serves later calls of its key, or None."""
        call = self._with_tuples(call)
        if torch.jit.is_tracing():
            with warnings.catch_warnings():
                # Settings such as the class token are rightly constants of the trace.
                warnings.simplefilter("ignore", torch.jit.TracerWarning)
                return choose.choose_recorded(self.name, call).function(call), None
        self.check(call)
        serve = None if self.composition is None else self.composition(call)
        if serve is not None:
            return serve(call), self._later(serve)
        chosen = choose.choose(self.name, call)
        return chosen.function(call), self._later(chosen.function, chosen.why_unsupported)

    def _with_tuples(self, call: Record) -> Record:
        """Returns the record with tuples in the place of other sequences."""
        for name, expected in self.sequences.items():
            given = getattr(call, name)
            if type(given) is not tuple:
                call = call._replace(**{name: checks.as_tuple(name, given, expected)})
        return call

    def _later(self, serve: _Backend, why_unsupported: _Question | None = None) -> _Backend:
        """Returns what serves later calls of a key: ``serve``, after what must be done for every call."""
        if not self.sequences and not checks.CHECKS_CACHED:
            return serve

        def later(call: Record) -> Any:
            call = self._with_tuples(call) if self.sequences else call
            reason = why_unsupported(call) if checks.CHECKS_CACHED and why_unsupported is not None else None
            if reason is not None:
                raise AssertionError(f"{self.name}: cached for a call that its backend refuses: {reason}")
            return serve(call)

        return later


def _public(declared: Declaration, function: Function) -> Function:
    """Returns the public function of an operator, which looks like the decorated one."""

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        return declared.call(*args, **kwargs)

    # Dynamo limits how often it compiles a code object, which all public functions would share.
    public.__code__ = public.__code__.replace(co_name=declared.name)  # type: ignore[attr-defined]
    return typing.cast(Function, public)


def operator(
    *,
    backends: Mapping[str, Implementation],
    name: str | None = None,
    composed: _Backend | None = None,
    **settings: Any,
) -> Callable[[Function], Function]:
    """Declares an operator; the decorated function computes it in plain PyTorch.

    Args:
        backends: Backend → implementation, besides the decorated function.
        name: The name of the operator, by default the function's.
        composed: A function of the record that calls other operators. It is a backend of its own on GPUs, and
            serves without a choice where none of our kernels may.
        **settings: Attributes of the :class:`Declaration`.
    """

    def declare(function: Function) -> Function:
        known, own = dict(backends), name or function.__name__
        if composed is not None:
            known["composed"] = Implementation(composed, ("cuda",))
            settings.setdefault("composition", _unless_ours(own, composed))
        declared = Declaration(own, function, **settings)
        setattr(reference, own, function)
        _register(declared, known)
        return typing.cast(Function, declared.public)

    return declare


def _unless_ours(name: str, composed: _Backend) -> Callable[[Record], _Backend | None]:
    def composition(call: Record) -> _Backend | None:
        x = call[0]
        return None if x.is_cuda or choose.may_be_ours(name, x.device.type) else composed

    return composition


def _register(declared: Declaration, given: Mapping[str, Implementation]) -> None:
    backends.declare(declared)
    for backend, each in given.items():
        if isinstance(each.function, str):
            module, why = f"{declared.package}.{each.function}", each.why_unsupported
            why = f"{module}:{why}" if isinstance(why, str) else why
            each = replace(each, function=f"{module}:{declared.name}", why_unsupported=why)
        backends.register(declared.name, backend, each)
    backends.register(declared.name, "reference", Implementation(declared.reference))


# The module of the operator's package that has them, such as ``"triton.autograd"``, is imported when a call
# first needs them: a function of the operator's name, and the question, unless that is given.
_Why = str | _Question | None


def triton_kernels(
    module: str, why_unsupported: _Why = "why_unsupported", *, is_partial: bool = False
) -> Implementation:
    """Returns an implementation in Triton, for NVIDIA GPUs."""
    return Implementation(module, ("cuda",), machine.why_triton_unavailable, why_unsupported, is_partial)


def gluon_kernels(module: str) -> Implementation:
    """Returns an implementation in Gluon, for sm_90."""
    return Implementation(module, ("cuda",), machine.why_gluon_unavailable, "why_unsupported")


def extension_kernels(
    module: str, why_unsupported: _Why = "why_unsupported", *, device_type: str = "cpu"
) -> Implementation:
    """Returns an implementation by the compiled extension, for a type of device."""
    return Implementation(module, (device_type,), machine.why_extension_unavailable, why_unsupported)


# The key of a call ----------------------------------------------------------------------------------------

#: The errors that wrong arguments cause while their key is made.
_NO_KEY = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_TENSORS = frozenset((Tensor, nn.Parameter))
_VALUES = frozenset((NoneType, bool, int, float, str, torch.dtype))
_SEQUENCES = tuple, list


def facts_of(value: Any, grad: bool) -> Any:
    """Returns what choices may depend on of an argument, which keeps neither tensors nor other objects.

    It is a tensor, a plain value, or a tuple or a list of these; ``grad`` is whether gradients are enabled.
    """
    kind = value.__class__
    if kind in _VALUES:
        return kind, value
    if kind in _TENSORS or isinstance(value, Tensor):
        wants_gradient = grad and value.requires_grad
        return kind, value.dtype, value.layout, value.device, value.shape, value.stride(), wants_gradient
    if isinstance(value, _SEQUENCES):
        return kind, *[facts_of(each, grad) for each in value]
    return (kind, value) if isinstance(value, str | numbers.Number) else kind


_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.maybe_current_level
_precision = torch._C._get_fp32_precision_getter  # ten times as fast as PyTorch's own attributes


def _state(grad: bool, x: Tensor) -> tuple[Any, ...] | None:
    """Returns the state that choices depend on, or None where the dispatch cache may not be used."""
    # Inlined from machine and checks, because it runs at every call.
    if launching.interception is not None or _transform() is not None or _modes():
        return None
    if getattr(forward_ad, "_current_level", 0) >= 0:
        return None
    precision = None
    if (x.is_cuda or machine.INTERPRETING) and x.dtype is torch.float32:
        precision = _precision("cuda", "matmul"), _precision("cuda", "conv")
    state = backends.names_requested(), grad, torch.get_num_threads(), precision
    if not _is_any_autocast_enabled():
        return state
    autocast = [
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]
    return *state, *autocast


def key_of_serving(x: Tensor) -> tuple[Any, ...] | None:
    """Returns a key for calls without gradients whose parameters do not change, or None."""
    state = _state(False, x)
    return None if state is None else (state, facts_of(x, False))
