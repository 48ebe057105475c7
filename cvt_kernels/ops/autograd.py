"""What the operators share that deals with autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function


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
