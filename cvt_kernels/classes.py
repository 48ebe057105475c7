"""Classes that look like others and do their work otherwise, into which ``accelerate`` and ``graphed`` swap.

A module of such a class keeps its name, its parameters and its hooks. Its class has one more base class, the
original, and notes it in an attribute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

#: The attributes of classes that name the original: of a class with CUDA graphs, and of one that runs fused.
UNGRAPHED, UNFUSED = "_cvt_kernels_ungraphed", "_cvt_kernels_original"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def cached(function: _Function) -> _Function:
    """Remembers the results of a function whose arguments are classes."""
    return functools.cache(function)  # type: ignore[return-value]  # mypy takes classes for unhashable


def derived(original: Any, mark: str, **members: Any) -> Any:
    """Returns a subclass that looks the same, with members of its own, and notes the original as ``mark``."""
    for name in ("__module__", "__qualname__", "__doc__"):
        members[name] = getattr(original, name)
    return type(original.__name__, (original,), {**members, mark: original})


@cached
def ungraphed_class(cls: Any) -> Any:
    """Returns a class without CUDA graphs."""
    return _without(cls, UNGRAPHED)


@cached
def original_class(cls: Any) -> Any:
    """Returns a class without fused forwards and CUDA graphs."""
    return _without(cls, UNGRAPHED, UNFUSED)


def _without(cls: Any, *marks: str) -> Any:
    """Returns the original of a class, or the class on the originals of its bases (of ``fully_shard``)."""
    for mark in marks:
        if mark in vars(cls):
            return _without(vars(cls)[mark], *marks)
    bases = tuple(_without(base, *marks) for base in cls.__bases__)
    if bases == cls.__bases__:
        return cls
    members = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, members)


def is_graphed(module: nn.Module) -> bool:
    """Says whether the class of a module has CUDA graphs."""
    return ungraphed_class(type(module)) is not type(module)


def is_fused(module: nn.Module) -> bool:
    """Says whether the class of a module has a fused forward."""
    return original_class(type(module)) is not ungraphed_class(type(module))
