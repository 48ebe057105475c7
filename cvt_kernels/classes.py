"""Derived classes that ``accelerate`` and ``graphed`` swap for the classes of modules.

A derived class has the name of the original, its base class, and refers to it by an attribute. The module
keeps its parameters and its hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

#: The attributes that refer to the original of a class with CUDA graphs, and of a class with a fused forward.
UNGRAPHED, UNFUSED = "_cvt_kernels_ungraphed", "_cvt_kernels_original"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def cached(function: _Function) -> _Function:
    """Caches the results of a function whose arguments are classes."""
    return functools.cache(function)  # type: ignore[return-value]  # mypy takes classes for unhashable


def derived(original: Any, mark: str, **members: Any) -> Any:
    """Returns a subclass of the same name with other members; its attribute ``mark`` is the original."""
    for name in ("__module__", "__qualname__", "__doc__"):
        members[name] = getattr(original, name)
    return type(original.__name__, (original,), {**members, mark: original})


@cached
def ungraphed_class(cls: Any) -> Any:
    """Returns the original of a class with CUDA graphs."""
    return _without(cls, UNGRAPHED)


@cached
def original_class(cls: Any) -> Any:
    """Returns the original of a class with CUDA graphs or a fused forward."""
    return _without(cls, UNGRAPHED, UNFUSED)


def _without(cls: Any, *marks: str) -> Any:
    """Returns the original of a class; a class with derived bases (``fully_shard``) is rebuilt on theirs."""
    for mark in marks:
        if mark in vars(cls):
            return _without(vars(cls)[mark], *marks)
    bases = tuple(_without(base, *marks) for base in cls.__bases__)
    if bases == cls.__bases__:
        return cls
    members = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, members)


def is_graphed(module: nn.Module) -> bool:
    """Returns whether a module's class has CUDA graphs."""
    return ungraphed_class(type(module)) is not type(module)


def is_fused(module: nn.Module) -> bool:
    """Returns whether a module's class has a fused forward."""
    return original_class(type(module)) is not ungraphed_class(type(module))
