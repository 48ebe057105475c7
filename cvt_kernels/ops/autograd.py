"""Autograd helpers that the operators share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function

from .. import modes


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Applies PyTorch's decorator of the name only where a graph of the gradients is asked for.

    Elsewhere its cost, which small calls feel, is saved.
    """
    checked = function.once_differentiable(backward)

    @functools.wraps(backward)
    def choose(*args: Any) -> Any:
        return checked(*args) if torch.is_grad_enabled() else backward(*args)

    return choose


def count_change(written: Tensor) -> None:
    """Counts a change that PyTorch does not see, so that a graph that has saved the tensor notices."""
    if not written.is_inference():  # whose changes are not counted
        torch.autograd.graph.increment_version(written)


def check_inplace(name: str, written: Tensor, *tensors: Tensor | None) -> None:
    """Raises ValueError where a result must not take the place of the tensor ``name`` of a call.

    Args:
        name: The name.
        written: The tensor.
        tensors: All tensors of the call, of which one may want a gradient.
    """
    if modes.wants_gradient(*tensors):
        raise ValueError("inplace: got True where a gradient is wanted, expected False")
    if not written.is_contiguous():
        raise ValueError(f"{name}: is not contiguous, expected it to be with inplace=True")
