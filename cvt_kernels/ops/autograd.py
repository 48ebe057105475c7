"""Autograd helpers that the operators share."""

from __future__ import annotations

import functools
import itertools
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
    """Autograd function of casts of tensors of one dtype: (dtype, counts, *tensors)."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, counts: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Casts the tensors; saves nothing."""
        groups = _grouped(tensors, counts)
        ctx.dtype, ctx.rows = tensors[0].dtype, [[len(each) for each in group] for group in groups]
        ctx.set_materialize_grads(False)
        made = [
            torch.empty_like(group[0], dtype=dtype)
            if len(group) == 1
            else group[0].new_empty((sum(rows), *group[0].shape[1:]), dtype=dtype)
            for group, rows in zip(groups, ctx.rows, strict=True)
        ]
        parts = [part for out, rows in zip(made, ctx.rows, strict=True) for part in _split(out, rows)]
        _cast_all(tensors, parts)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Casts the gradients that there are."""
        parts: list[Tensor | None] = []
        for gradient, rows in zip(gradients, ctx.rows, strict=True):
            parts += [None] * len(rows) if gradient is None else _split(gradient, rows)
        given = [each for each in parts if each is not None]
        wide = [torch.empty_like(each, dtype=ctx.dtype) for each in given]
        _cast_all(given, wide)
        made = iter(wide)
        return None, None, *(None if each is None else next(made) for each in parts)


def _cast_all(tensors: Sequence[Tensor], made: Sequence[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(list(made), list(tensors))


def _grouped(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Sequence[Tensor]]:
    """Returns the first tensors, then the next ones, and so on, as many as ``counts`` says."""
    ends = list(itertools.accumulate(counts))
    return [tensors[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _split(tensor: Tensor, rows: list[int]) -> list[Tensor]:
    return [tensor] if len(rows) == 1 else list(tensor.split(rows))


def cast_together(
    tensors: Sequence[Tensor], dtype: torch.dtype, counts: Sequence[int] | None = None
) -> tuple[Tensor, ...]:
    """Casts tensors of one dtype, and in the backward their gradients, by one launch for all on a GPU.

    With ``counts``, the first so many tensors become one, below one another, then the next, and so on.
    """
    counts = (1,) * len(tensors) if counts is None else tuple(counts)
    return _CastTogether.apply(dtype, counts, *tensors)


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
