"""Operators that graphs of torch.compile call as one, with a function in Python behind each.

``torch.library.custom_op`` does the same, but its wrappers take the host three times as long at every call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_library = torch.library.Library("cvt_kernels", "FRAGMENT")


def launcher(
    name: str, shapes: Callable[..., Any] | None = None, *, mutates: Sequence[str] = ()
) -> Callable[[_Function], _Function]:
    """Returns a decorator of functions that launch kernels: graphs of torch.compile call an operator instead.

    Elsewhere the function is called directly, since an operator takes the host longer. Arguments come by
    position. There are no gradients. For the parameters see :func:`graph_operator`.
    """

    def register(function: _Function) -> _Function:
        operator = graph_operator(name, shapes, mutates=mutates)(function)
        run = _counting_changes(function, mutates) if mutates else function

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return operator(*args) if torch.compiler.is_compiling() else run(*args)

        return call  # type: ignore[return-value]

    return register


def graph_operator(
    name: str,
    shapes: Callable[..., Any] | None = None,
    *,
    mutates: Sequence[str] = (),
    schema: str | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator that registers a function as the operator ``cvt_kernels::name``, and returns that.

    The function returns new tensors, which share no memory. It has no gradients: where they are wanted, an
    autograd function calls it, which torch.compile traces.

    Args:
        name: The operator's name.
        shapes: Takes the same arguments; returns tensors like the results, without their numbers. The
            function may allocate its results by it. None if there are no results.
        mutates: The arguments that the function writes to: tensors, or lists of them. Autograd is told.
        schema: Arguments and results; by default by the function's annotations.
    """

    def register(function: Callable[..., Any]) -> Any:
        signature = schema or torch.library.infer_schema(inspect.unwrap(function), mutates_args=mutates)
        _library.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
        run = _counting_changes(function, mutates) if mutates else function
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cvt_kernels::{name}", shapes or (lambda *_: None), lib=_library)
        return getattr(torch.ops.cvt_kernels, name).default

    return register


def _counting_changes(function: Callable[..., Any], mutates: Sequence[str]) -> Callable[..., Any]:
    """Returns a function that bumps the version counters of what it writes to, for autograd's checks."""
    names = list(inspect.signature(function).parameters)
    places = [names.index(each) for each in mutates]

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        out = function(*args)
        for place in places:
            written = args[place]
            if isinstance(written, list):
                torch.autograd.graph.increment_version([each for each in written if not each.is_inference()])
            elif not written.is_inference():  # changes of inference tensors are not counted
                torch.autograd.graph.increment_version(written)
        return out

    return run
