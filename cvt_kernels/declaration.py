"""The decorator that declares an operator and generates its public function.

The decorated function has the signature and the docstring, and computes the operator in plain PyTorch. The
public function makes a key of each call: the types, dtypes, shapes and strides of its tensors, its settings
with their types, and the state of the process. The first call of a key checks its arguments, and ``dispatch``
chooses a backend. A function in the dispatch cache serves later calls of the key at once.
"""

from __future__ import annotations

import collections
import functools
import inspect
import linecache
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import backends, checks, dispatch, launching, machine, modes, reference
from .backends import Implementation, Record

Function = TypeVar("Function", bound=Callable[..., Any])
#: A backend's function of a record, and its question; ``backends.lazy`` gives their paths in their place.
_Backend = Callable[[Record], Any]
_Question = Callable[[Record], str | None]


class Declaration(backends.Operator):
    """A declared operator.

    Attributes:
        signature: The signature of the public function.
        public: The public function.
        reference: The decorated function, as a function of the record.
        check, composition, arguments: See :func:`operator`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        check: Callable[[Record], None],
        check_numbers: tuple[str, Callable[[Record], None]] | None,
        composition: Callable[[Record], Callable[[Record], Any] | None] | None,
        arguments: Callable[[Record], Record] | None,
        key_parts: Mapping[str, tuple[Any, ...]],
        **described: Any,
    ) -> None:
        self.signature = inspect.signature(function)
        self.check, self.composition, self.arguments = check, composition, arguments
        self._reference = function
        self._record = collections.namedtuple(f"{name}_call", self.signature.parameters)  # type: ignore[misc]
        super().__init__(name, bind=self._generate_bind(name), package=function.__module__, **described)
        self.reference = self.passing_on(function)
        self.public = self._generate(check_numbers, key_parts)

    def passing_on(self, function: Callable[..., Any]) -> Callable[[Record], Any]:
        """Returns a function that takes a record and calls ``function`` with its arguments."""
        given = [
            f"{each}=call[{i}]" if parameter.kind is parameter.KEYWORD_ONLY else f"call[{i}]"
            for i, (each, parameter) in enumerate(self.signature.parameters.items())
        ]
        scope = {"_function": function}
        return _compiled(
            f"def pass_on(call):\n    return _function({', '.join(given)})\n", f"{self.name} reference", scope
        )

    def serve(self, *values: Any) -> Any:
        """Checks the arguments of a call, and serves it without the dispatch cache."""
        return self._serve(self._record(*values))[0]

    def first(self, key: tuple[Any, ...] | None, *values: Any) -> Any:
        """Serves a call that is not in the dispatch cache, and adds what serves later calls of its key."""
        table = backends.dispatch_cache
        out, choice = self._serve(self._record(*values))
        if key is not None and key[1] is not None and _may_be_kept(key):
            cached = self._cached(self._record(*values), choice)
            if cached is not None:
                backends.cache_dispatch(table, key, cached)
        return out

    def bound(self, call: Record) -> Callable[[Any], Any] | None:
        """Returns a function that serves calls with other numbers in the first argument, or None.

        It is None if the backend cannot be bound. The caller must watch the parameters for changes.
        """
        if self.composition is not None and self.composition(call) is not None:
            return None
        choice = dispatch.choose(self.name, call)
        bind = getattr(choice.eager.function, "bind", None)
        return bind(call) if choice.lasts and choice.in_graphs is choice.eager and bind is not None else None

    def _serve(self, call: Record) -> tuple[Any, dispatch.Choice | None]:
        """Checks and serves a call; returns the result and the choice, if one was made."""
        if self.arguments is not None:
            call = self.arguments(call)
        if torch.jit.is_tracing():
            with warnings.catch_warnings():
                # Settings such as the class token are rightly constants of the trace.
                warnings.simplefilter("ignore", torch.jit.TracerWarning)
                return dispatch.choose_recorded(self.name, call).eager.function(call), None
        self.check(call)
        served = None if self.composition is None else self.composition(call)
        if served is not None:
            return served(call), None
        choice = dispatch.choose(self.name, call)
        return choice.serving(call[0]).function(call), choice

    def _cached(self, call: Record, choice: dispatch.Choice | None) -> Callable[..., Any] | None:
        """Returns the function for later calls of a served call's key, or None."""
        arrange = self.arguments
        if arrange is not None and (arranged := arrange(call)) != call:
            cached_for_arranged = self._cached(arranged, choice)
            if cached_for_arranged is None:
                return None
            return lambda *values: cached_for_arranged(*arrange(self._record(*values)))
        if choice is None:
            served = None if self.composition is None else self.composition(call)
            return None if served is None else self._taking_values(served)
        if not choice.lasts or choice.in_graphs is not choice.eager:
            return None
        why_unsupported = choice.eager.why_unsupported
        cached = self._taking_values(choice.eager.function)
        if why_unsupported is None or not checks.CHECKS_CACHED:
            return cached

        def checked(*values: Any) -> Any:
            reason = why_unsupported(self._record(*values))
            if reason is not None:
                raise AssertionError(f"{self.name}: cached for a call that its backend refuses: {reason}")
            return cached(*values)

        return checked

    def _taking_values(self, function: Callable[[Record], Any]) -> Callable[..., Any]:
        """Returns a function of all arguments by position that calls ``function`` with their record."""
        names = ", ".join(self.signature.parameters)
        scope = {"_function": function, "_new": tuple.__new__, "_record": self._record}
        source = f"def cached({names}):\n    return _function(_new(_record, ({names},)))\n"
        return _compiled(source, f"{self.name} cached", scope)

    def _generate_bind(self, name: str) -> Callable[..., Record]:
        names = ", ".join(self.signature.parameters)
        scope = {"_record": self._record, **_defaults(self.signature)}
        source = f"def bind({_head(self.signature)}):\n    return _record({names})\n"
        return _compiled(source, f"{name} bind", scope)

    def _generate(
        self,
        check_numbers: tuple[str, Callable[[Record], None]] | None,
        key_parts: Mapping[str, tuple[Any, ...]],
    ) -> Callable[..., Any]:
        names = ", ".join(self.signature.parameters)
        scope: dict[str, Any] = {
            "_name": self.name, "_first": self.first, "_serve": self.serve, "_token": _token,
            "_grad_enabled": torch.is_grad_enabled, "_compiling": torch.compiler.is_compiling,
            "_tracing": torch._C._get_tracing_state, "_backends": backends, "_NO_KEY": _NO_KEY,
            **_defaults(self.signature),
        }  # fmt: skip
        hints = typing.get_type_hints(self._reference)
        parts = []
        for name in self.signature.parameters:
            if name in key_parts:
                scope[f"_key_of_argument_{name}"], *others = key_parts[name]
                parts.append(f"_key_of_argument_{name}({', '.join((name, 'grad', *others))})")
            else:
                parts.append(_key_source(hints[name], name, scope))
        look = ""
        if check_numbers is not None:
            condition, scope["_check_numbers"] = check_numbers
            scope["_record"] = self._record
            look = f"    if {condition} is not None:\n        _check_numbers(_record({names}))\n"
        source = f"""\
def {self.name}({_head(self.signature)}):
    if _compiling() or _tracing() is not None:
        return _serve({names})
    try:
        grad = _grad_enabled()
        key = (_name, _token(grad, {next(iter(self.signature.parameters))}), {", ".join(parts)})
        cached = _backends.dispatch_cache.get(key)
    except _NO_KEY:  # as of what is no tensor, or of a setting without a hash
        key = cached = None
    if cached is None:
        return _first(key, {names})
{look}    return cached({names})
"""
        return functools.wraps(self._reference)(_compiled(source, self.name, scope))


def operator(
    *,
    backends: Mapping[str, Implementation],
    cost_class: Callable[[Record], str],
    sample: Callable[[int, Record], Record],
    check: Callable[[Record], None],
    name: str | None = None,
    defaults: tuple[str, ...] = ("reference",),
    exact: Callable[[Record], Any] | None = None,
    unrounded: Callable[[Record], Any] | None = None,
    score: Callable[[Record, list[Tensor]], list[Tensor]] | None = None,
    fused_by_compiler: bool = False,
    check_numbers: tuple[str, Callable[[Record], None]] | None = None,
    composition: Callable[[Record], Callable[[Record], Any] | None] | None = None,
    arguments: Callable[[Record], Record] | None = None,
    key_parts: Mapping[str, tuple[Any, ...]] | None = None,
) -> Callable[[Function], Function]:
    """Declares an operator; the decorated function computes it in plain PyTorch.

    Functions take the record of a call, a NamedTuple with the names of the parameters. For ``cost_class``,
    ``sample``, ``defaults``, ``exact``, ``unrounded``, ``score`` and ``fused_by_compiler``, see
    :class:`backends.Operator`.

    - ``backends``: Backend → implementation, besides the decorated function.
    - ``check``: Raises TypeError or ValueError for wrong arguments. It depends on the key of a call only.
    - ``name``: The name of the operator, by default the function's.
    - ``check_numbers``: A parameter, and a check of its numbers, which are not in the key. The check runs at
      every call where the parameter is not None.
    - ``composition``: Returns a function of the record that serves the call without a choice of a backend, or
      None. It is called once for a key.
    - ``arguments``: Normalizes the record, for example a list to a tuple. The changes are not in the key.
    - ``key_parts``: Parameter → a function that makes its part of the key, and names of other parameters; for
      parameters whose annotation is not enough. The function takes the value, whether gradients are enabled,
      and the other parameters' values. It raises TypeError for values that must not be in a key.
    """

    def declare(function: Function) -> Function:
        declared = Declaration(
            name or function.__name__, function, check, check_numbers, composition, arguments,
            key_parts or {}, cost_class=cost_class, sample=sample, defaults=defaults, exact=exact,
            unrounded=unrounded, score=score, fused_by_compiler=fused_by_compiler,
        )  # fmt: skip
        setattr(reference, declared.name, function)
        _register(declared, backends)
        return typing.cast(Function, declared.public)

    return declare


def _register(declared: Declaration, given: Mapping[str, Implementation]) -> None:
    backends.declare(declared)
    for backend, each in given.items():
        backends.register(declared.name, backend, each)
    backends.register(declared.name, "reference", Implementation(declared.reference))


def triton_kernels(
    function: _Backend, why_unsupported: _Question, *, is_partial: bool = False
) -> Implementation:
    """Returns an implementation in Triton, for NVIDIA GPUs."""
    return Implementation(function, ("cuda",), machine.why_triton_unavailable, why_unsupported, is_partial)


def gluon_kernels(function: _Backend, why_unsupported: _Question) -> Implementation:
    """Returns an implementation in Gluon, for sm_90."""
    return Implementation(function, ("cuda",), machine.why_gluon_unavailable, why_unsupported)


def extension_kernels(
    function: _Backend, why_unsupported: _Question | None = None, *, device_type: str = "cpu"
) -> Implementation:
    """Returns an implementation by the compiled extension, for a type of device."""
    return Implementation(function, (device_type,), machine.why_extension_unavailable, why_unsupported)


def _may_be_kept(key: Any) -> bool:
    """Returns whether a key may be kept; a tensor in it would stay alive, and its changes would be missed."""
    try:
        hash(key)
    except TypeError:
        return False
    return not checks.tensors_of(key)


# The key of a call ----------------------------------------------------------------------------------------

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_threads = torch.get_num_threads
_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.maybe_current_level


def _token(grad: bool, x: Tensor) -> tuple[Any, ...] | None:
    """Returns the state that choices depend on, or None where the dispatch cache may not be used."""
    # Inlined from machine and checks, because it runs at every call.
    if launching.interception is not None or _transform() is not None or _modes():
        return None
    if getattr(forward_ad, "_current_level", 0) >= 0:
        return None
    precision = None
    if (x.is_cuda or machine.INTERPRETING) and x.dtype is torch.float32:
        precision = torch.backends.cuda.matmul.fp32_precision, modes.convolution_precision()
    if not _is_any_autocast_enabled():
        return backends.names_requested(), grad, _threads(), precision
    autocast = [
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]
    return backends.names_requested(), grad, _threads(), precision, *autocast


def key_of_serving(x: Tensor) -> tuple[Any, ...] | None:
    """Returns a key for calls without gradients whose parameters do not change, or None."""
    token = _token(False, x)
    return None if token is None else (token, key_of_tensor(x, False))


#: The errors that wrong arguments cause while their key is made.
_NO_KEY = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_TENSOR_KEY = (
    "({0}.__class__, {0}.dtype, {0}.layout, {0}.device, {0}.shape, {0}.stride(), grad and {0}.requires_grad)"
)


def _key_source(kind: Any, name: str, scope: dict[str, Any]) -> str:
    """Returns the source of the expression for a parameter's part of a key."""
    optional = typing.get_origin(kind) in (typing.Union, types.UnionType)
    if optional:
        kinds = [part for part in typing.get_args(kind) if part is not type(None)]
        if len(kinds) == 1 and _is_composite(kinds[0]):
            return f"(None if {name} is None else {_key_source(kinds[0], name, scope)})"
    elif kind is Tensor:
        return _TENSOR_KEY.format(name)
    elif typing.get_origin(kind) is tuple:
        return f"{name}, {name}.__class__, *map(type, {name})"
    elif _is_composite(kind):
        scope[f"_key_of_{kind.__name__}"] = key_of(kind)
        return f"_key_of_{kind.__name__}({name}, grad)"
    return f"{name}, {name}.__class__"


def _is_composite(kind: Any) -> bool:
    return kind is Tensor or (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"))


@functools.cache
def key_of(kind: type, *left_out: str) -> Callable[[Any, bool], tuple[Any, ...]]:
    """Returns a function that makes a NamedTuple's part of a key, without some fields.

    The function raises TypeError for values of other types.
    """
    scope: dict[str, Any] = {"_kind": kind}
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    hints = typing.get_type_hints(kind)
    parts = [_key_source(hints[field], field, scope) for field in fields if field not in left_out]
    source = f"""\
def key(x, grad):
    if x.__class__ is not _kind:
        raise TypeError
    {", ".join(fields)}, = x
    return ({", ".join(parts)},)
"""
    return _compiled(source, kind.__name__, scope)


# Generated functions --------------------------------------------------------------------------------------


def _compiled(source: str, name: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Compiles the source of one function; tracebacks show its lines."""
    filename = f"<cvt_kernels {name}>"
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
    exec(compile(source, filename, "exec"), scope)
    return next(value for value in reversed(scope.values()) if isinstance(value, types.FunctionType))


def _head(signature: inspect.Signature) -> str:
    """Returns the parameters of a signature as source, with defaults named ``_default_<parameter>``."""
    parts, after_star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not after_star:
            parts.append("*")
            after_star = True
        default = "" if parameter.default is parameter.empty else f"=_default_{parameter.name}"
        parts.append(parameter.name + default)
    return ", ".join(parts)


def _defaults(signature: inspect.Signature) -> dict[str, Any]:
    return {f"_default_{each.name}": each.default for each in signature.parameters.values()}


_of_tensor = f"def key(t, grad):\n    return None if t is None else {_TENSOR_KEY.format('t')}\n"
#: Returns the part of a key for a tensor or None; takes it, and whether gradients are enabled.
key_of_tensor: Callable[[Tensor | None, bool], Any] = _compiled(_of_tensor, "tensor", {})


def key_of_pairs(pairs: Any, grad: bool) -> tuple[Any, ...]:
    """Returns the part of a key for a tuple or a list of pairs of tensors, or of tensors and None.

    Raises:
        TypeError: It is neither.
    """
    if type(pairs) not in (tuple, list):
        raise TypeError
    return type(pairs), *[(type(each), *[key_of_tensor(t, grad) for t in each]) for each in pairs]
