"""The declaration of an operator: a decorated function, from which its public form is generated.

The decorated function has the signature and the docstring, and computes the operator in plain PyTorch. The
public function of the same signature makes a key of a call: what its tensors are, its settings with their
types, and the state of the process. For a key that came before there is a plan, which serves the call at
once. The first call of a key checks its arguments, and leaves to ``dispatch`` which backend serves it.
"""

from __future__ import annotations

import collections
import functools
import inspect
import linecache
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import backends, checks, dispatch, machine

Function = TypeVar("Function", bound=Callable[..., Any])


class Declaration:
    """An operator as it was declared.

    Attributes:
        name: Its name.
        signature: The signature of the public function.
        record: The record of a call, a NamedTuple with the names of the parameters.
        check, instead, arguments: As :func:`operator` takes them.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        check: Callable[[Any], None],
        values: tuple[str, Callable[[Any], None]] | None,
        instead: Callable[[Any], Callable[..., Any] | None] | None,
        arguments: Callable[[Any], Any] | None,
        facts: dict[str, tuple[Any, ...]],
    ) -> None:
        self.name = name
        self.signature = inspect.signature(function)
        self.check, self.instead, self.arguments = check, instead, arguments
        self._reference = function
        self._passing_on = _passing_on(self.name, self.signature)
        parameters = self.signature.parameters.values()
        self._keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._count = len(parameters) - len(self._keywords)
        self.record = collections.namedtuple(f"{self.name}_call", self.signature.parameters)  # type: ignore[misc]
        self.public = self._generate(values, facts)

    def serve(self, *values: Any) -> Any:
        """Checks the arguments of a call, and serves it without a plan."""
        call = self.record(*values)
        if self.arguments is not None:
            call = self.arguments(call)
        if torch.jit.is_tracing():
            return dispatch.call_recorded(self.name, *self._positional(call), **self._settings(call))
        self.check(call)
        served = None if self.instead is None else self.instead(call)
        if served is not None:
            return served(*self._positional(call), **self._settings(call))
        return dispatch.call(self.name, *self._positional(call), **self._settings(call))

    def first(self, key: tuple[Any, ...] | None, *values: Any) -> Any:
        """Serves a call without a plan, and keeps one for calls of the same key if it has one."""
        table = backends.choices
        out = self.serve(*values)
        if key is not None and key[1] is not None and dispatch.may_be_kept(key):
            plan = self._plan(self.record(*values))
            if plan is not None:
                dispatch.keep(table, key, plan)
        return out

    def _positional(self, call: tuple[Any, ...]) -> tuple[Any, ...]:
        return call[: self._count]

    def _settings(self, call: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(self._keywords, call[self._count :], strict=True))

    def _plan(self, call: Any) -> Callable[..., Any] | None:
        """Returns what serves calls that are like one that has been served; None if nothing does."""
        served = None if self.instead is None else self.instead(call)
        if served is not None:
            return self._passing_on(served)
        found = dispatch.plan(self.name, *self._positional(call), **self._settings(call))
        if found is None:
            return None
        plan = self._passing_on(found.function) if found.run is None else self._taking_all(found.run)
        return self._checked(plan, found.why_unsupported) if checks.CHECKS_PLANS else plan

    def _checked(
        self, plan: Callable[..., Any], why_unsupported: Callable[..., str | None] | None
    ) -> Callable[..., Any]:
        """Returns a plan that raises where its backend refuses the call."""
        if why_unsupported is None:
            return plan
        ask = self._passing_on(why_unsupported)

        def checked(*values: Any) -> Any:
            reason = ask(*values)
            if reason is not None:
                raise AssertionError(f"{self.name}: a plan serves a call that its backend refuses: {reason}")
            return plan(*values)

        return checked

    def _taking_all(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of all parameters by position that calls one of some of them."""
        taken = inspect.signature(run).parameters
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken.values()):
            return run  # which takes the first ones, and leaves the others out
        return self._choosing(", ".join(taken))(run)

    @functools.cache  # noqa: B019 (declarations live as long as the process)
    def _choosing(self, taken: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        names = ", ".join(self.signature.parameters)
        source = f"def choose(function):\n    return lambda {names}: function({taken})\n"
        return _compiled(source, f"{self.name} choose", {})

    def _generate(
        self, values: tuple[str, Callable[[Any], None]] | None, facts: dict[str, tuple[Any, ...]]
    ) -> Callable[..., Any]:
        parameters = self.signature.parameters.values()
        names = ", ".join(self.signature.parameters)
        scope: dict[str, Any] = {
            "_name": self.name, "_first": self.first, "_serve": self.serve, "_token": _token,
            "_grad_enabled": torch.is_grad_enabled, "_compiling": torch.compiler.is_compiling,
            "_tracing": torch._C._get_tracing_state, "_backends": backends, "_NO_KEY": _NO_KEY,
        }  # fmt: skip
        hints = typing.get_type_hints(self._reference)
        parts = []
        for name in self.signature.parameters:
            if name in facts:
                scope[f"_facts_{name}"], *others = facts[name]
                parts.append(f"_facts_{name}({', '.join((name, 'grad', *others))})")
            else:
                parts.append(_facts_source(hints[name], name, scope))
        look = ""
        if values is not None:
            condition, scope["_check_values"] = values
            scope["_record"] = self.record
            look = f"    if {condition} is not None:\n        _check_values(_record({names}))\n"
        for parameter in parameters:
            scope[f"_default_{parameter.name}"] = parameter.default
        source = f"""\
def {self.name}({_head(self.signature)}):
    if _compiling() or _tracing() is not None:
        return _serve({names})
    try:
        grad = _grad_enabled()
        key = (_name, _token(grad, {next(iter(self.signature.parameters))}), {", ".join(parts)})
        plan = _backends.choices.get(key)
    except _NO_KEY:  # as of what is no tensor, or of a setting without a hash
        key = plan = None
    if plan is None:
        return _first(key, {names})
{look}    return plan({names})
"""
        return functools.wraps(self._reference)(_compiled(source, self.name, scope))


def operator(
    *,
    name: str | None = None,
    check: Callable[[Any], None],
    values: tuple[str, Callable[[Any], None]] | None = None,
    instead: Callable[[Any], Callable[..., Any] | None] | None = None,
    arguments: Callable[[Any], Any] | None = None,
    facts: dict[str, tuple[Any, ...]] | None = None,
) -> Callable[[Function], Function]:
    """Declares an operator by the function that it decorates, which computes it in plain PyTorch.

    What it takes are functions of the record of a call, a NamedTuple with the names of the parameters.

    Args:
        name: Its name; None for that of the function.
        check: Raises TypeError or ValueError for wrong arguments. What it depends on is part of a call's key.
        values: A parameter, and what is called where that is not None even if there is a plan: it checks
            values in tensors, which are no part of a key.
        instead: Returns a function of the operator's parameters that serves the call without a choice between
            backends; None where there is one. It is asked once for a key.
        arguments: Returns the record that the rest takes, as where any sequence may stand for a tuple; what
            it changes makes no key.
        facts: For parameters whose type does not tell it, a function that makes their part of a key, and the
            names of other parameters. It takes their value, whether gradients are enabled and the others'
            values, and raises TypeError for values of which nothing may be remembered.
    """

    def declare(function: Function) -> Function:
        declaration = Declaration(
            name or function.__name__, function, check, values, instead, arguments, facts or {}
        )
        declarations[declaration.name] = declaration
        backends.register(declaration.name, "reference", backends.Implementation(function))
        return typing.cast(Function, declaration.public)

    return declare


#: The operators that are declared, by name.
declarations: dict[str, Declaration] = {}


# The key of a call ----------------------------------------------------------------------------------------

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_threads = torch.get_num_threads
_modes = torch._C._len_torch_dispatch_stack


def _token(grad: bool, x: Tensor) -> tuple[Any, ...] | None:
    """Returns the state on which choices and plans depend; None where nothing is remembered.

    Args:
        grad: Whether gradients are enabled.
        x: The first argument of the call.
    """
    if machine.is_intercepting() or checks.is_transformed() or checks.forward_mode_enabled() or _modes():
        return None
    precision = None
    if (x.is_cuda or machine.INTERPRETING) and x.dtype is torch.float32:
        precision = torch.backends.cuda.matmul.fp32_precision
    if not _is_any_autocast_enabled():
        return backends.names_requested(), grad, _threads(), precision
    autocast = [
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]
    return backends.names_requested(), grad, _threads(), precision, *autocast


#: The errors of arguments that are not what they should be, while a key is made of them.
_NO_KEY = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_FACT = (
    "({0}.__class__, {0}.dtype, {0}.layout, {0}.device, {0}.shape, {0}.stride(), grad and {0}.requires_grad)"
)


def _facts_source(kind: Any, name: str, scope: dict[str, Any]) -> str:
    """Returns the expression for the part that a parameter of a type has of a key."""
    optional = typing.get_origin(kind) in (typing.Union, types.UnionType)
    if optional:
        kinds = [part for part in typing.get_args(kind) if part is not type(None)]
        if len(kinds) == 1 and _is_composite(kinds[0]):
            return f"(None if {name} is None else {_facts_source(kinds[0], name, scope)})"
    elif kind is Tensor:
        return _FACT.format(name)
    elif typing.get_origin(kind) is tuple:
        return f"{name}, {name}.__class__, *map(type, {name})"
    elif _is_composite(kind):
        scope[f"_facts_of_{kind.__name__}"] = facts_of(kind)
        return f"_facts_of_{kind.__name__}({name}, grad)"
    return f"{name}, {name}.__class__"


def _is_composite(kind: Any) -> bool:
    return kind is Tensor or (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"))


@functools.cache
def facts_of(kind: type, *left_out: str) -> Callable[[Any, bool], tuple[Any, ...]]:
    """Returns a function that makes the part of a key of a NamedTuple of tensors and settings.

    It raises TypeError for anything else.

    Args:
        kind: The NamedTuple.
        left_out: Fields that are no part of it.
    """
    scope: dict[str, Any] = {"_kind": kind}
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    hints = typing.get_type_hints(kind)
    parts = [_facts_source(hints[field], field, scope) for field in fields if field not in left_out]
    source = f"""\
def facts(x, grad):
    if x.__class__ is not _kind:
        raise TypeError
    {", ".join(fields)}, = x
    return ({", ".join(parts)},)
"""
    return _compiled(source, kind.__name__, scope)


# Generated functions --------------------------------------------------------------------------------------


def _compiled(source: str, name: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Compiles one function, so that tracebacks show its lines."""
    filename = f"<cvt_kernels {name}>"
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
    exec(compile(source, filename, "exec"), scope)
    return next(value for value in reversed(scope.values()) if isinstance(value, types.FunctionType))


def _head(signature: inspect.Signature) -> str:
    """Returns the parameters of a signature as source; defaults are called ``_default_`` and their name."""
    parts, after_star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not after_star:
            parts.append("*")
            after_star = True
        default = "" if parameter.default is parameter.empty else f"=_default_{parameter.name}"
        parts.append(parameter.name + default)
    return ", ".join(parts)


def _passing_on(
    name: str, signature: inspect.Signature
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what turns a function of a signature into one that takes all arguments by position."""
    given = [
        f"{each}={each}" if parameter.kind is parameter.KEYWORD_ONLY else each
        for each, parameter in signature.parameters.items()
    ]
    names = ", ".join(signature.parameters)
    source = f"def pass_on(function):\n    return lambda {names}: function({', '.join(given)})\n"
    return _compiled(source, f"{name} pass_on", {})


_of_tensor = f"def facts(t, grad):\n    return None if t is None else {_FACT.format('t')}\n"
#: Returns the part that a tensor or None has of a key; takes it, and whether gradients are enabled.
facts_of_tensor: Callable[[Tensor | None, bool], Any] = _compiled(_of_tensor, "tensor", {})
