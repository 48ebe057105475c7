"""Autograd helpers that the operators share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function

from .. import modes


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Applies ``torch.autograd.function.once_differentiable`` only with ``create_graph=True``.

    This saves its overhead, which small calls feel, everywhere else.
    """
    checked = function.once_differentiable(backward)

    @functools.wraps(backward)
    def choose(*args: Any) -> Any:
        return checked(*args) if torch.is_grad_enabled() else backward(*args)

    return choose


class _CastTogether(torch.autograd.Function):
    """Autograd function of casts of tensors of one dtype: (dtype, *tensors)."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Casts the tensors; saves nothing."""
        ctx.dtype = tensors[0].dtype
        ctx.set_materialize_grads(False)
        return tuple(_cast_all(tensors, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Casts the gradients that there are."""
        given = [each for each in gradients if each is not None]
        wide = iter(_cast_all(given, ctx.dtype))
        return None, *(None if each is None else next(wide) for each in gradients)


def _cast_all(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if not tensors:
        return []
    made = [torch.empty_like(each, dtype=dtype) for each in tensors]
    torch._foreach_copy_(made, list(tensors))
    return made


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Casts tensors of one dtype, and in the backward their gradients, by one launch for all on a GPU."""
    return _CastTogether.apply(dtype, *tensors)


def count_change(written: Tensor) -> None:
    """Bumps the version counter of a tensor that a kernel wrote to, so that autograd detects the change."""
    if not written.is_inference():  # whose changes are not counted
        torch.autograd.graph.increment_version(written)


def check_inplace(name: str, written: Tensor, *tensors: Tensor | None) -> None:
    """Raises ValueError where a call must not write its result into the tensor ``name``.

    Args:
        name: The argument's name.
        written: The tensor.
        tensors: All tensors of the call; any of them may require a gradient.
    """
    if modes.wants_gradient(*tensors):
        raise ValueError("inplace: got True where a gradient is wanted, expected False")
    if not written.is_contiguous():
        raise ValueError(f"{name}: is not contiguous, expected it to be with inplace=True")
