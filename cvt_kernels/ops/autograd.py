"""Autograd helpers that the operators share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import modes
from .graph_operators import launcher

_Item = TypeVar("_Item")


#: What to type where a call has no second derivatives.
_WAY_OUT = 'compute the call within `with cvt_kernels.use_backend("reference"):`'


def gradients_again(
    formula: Callable[..., Any], tensors: Sequence[Tensor | None], *douts: Tensor | None
) -> list[Tensor | None]:
    """Returns gradients that can be differentiated again, for a backward under ``create_graph=True``.

    ``formula`` computes the results, whose gradients are ``douts``, by PyTorch's operators from the tensors:
    saved arguments, or results that the others follow from. A tensor that requires no gradient gets None.
    """
    # Aliases, since one of the tensors may be computed from another.
    given = [None if each is None else each.view_as(each) for each in tensors]
    first = next(each for each in given if each is not None)
    with modes.without_autocast(first):
        results = formula(*given)
    pairs = zip(results if isinstance(results, tuple) else (results,), douts, strict=True)
    used = [(out, dout.to(out.dtype)) for out, dout in pairs if dout is not None and out.requires_grad]
    wanted = [each for each in given if each is not None and each.requires_grad]
    outs, gradients = zip(*used, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, gradients, create_graph=True, allow_unused=True))
    return [next(found) if each is not None and each.requires_grad else None for each in given]


def once_differentiable(way_out: str = _WAY_OUT) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator of backwards without derivatives, whose error says what to do instead."""

    def mark(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def choose(*args: Any) -> Any:
            with torch.no_grad():
                gradients = backward(*args)
            return refuse_again(gradients, way_out)

        return choose

    return mark


def refuse_again(gradients: Sequence[Tensor | None], way_out: str = _WAY_OUT) -> tuple[Tensor | None, ...]:
    """Returns gradients that raise RuntimeError where somebody differentiates them.

    PyTorch's own ``once_differentiable`` takes them for constants where those of the results are constants.
    """
    if not torch.is_grad_enabled():
        return tuple(gradients)
    message = f"cvt_kernels: second derivatives were asked of a kernel that has none; {way_out}"
    given = [each.detach().requires_grad_() for each in gradients if each is not None]
    refused: Any = torch._C._functions.DelayedError(message.encode(), len(given))
    made = refused(*given)
    rest = iter(made if isinstance(made, tuple) else (made,))
    return tuple([None if each is None else next(rest) for each in gradients])


class _CastTogether(torch.autograd.Function):
    """Autograd function of casts of tensors of one dtype: (dtype, counts, *tensors)."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, counts: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Casts the tensors; saves nothing."""
        ctx.dtype, ctx.rows = tensors[0].dtype, _rows_of(tensors, counts)
        ctx.set_materialize_grads(False)
        return tuple(_cast(list(tensors), dtype, list(counts)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Casts the gradients that there are."""
        parts = [
            part
            for gradient, rows in zip(gradients, ctx.rows, strict=True)
            for part in ([None] * len(rows) if gradient is None else _split(gradient, rows))
        ]
        given = [part for part in parts if part is not None]
        again = torch.is_grad_enabled()
        made = iter([part.to(ctx.dtype) for part in given] if again else _cast_apart(given, ctx.dtype))
        return None, None, *[None if part is None else next(made) for part in parts]


def _empty_groups(tensors: Sequence[Tensor], dtype: torch.dtype, counts: Sequence[int]) -> list[Tensor]:
    """Returns the tensors of :func:`_cast` before they are filled."""
    return [
        torch.empty_like(group[0], dtype=dtype)
        if len(group) == 1
        else group[0].new_empty((sum(len(each) for each in group), *group[0].shape[1:]), dtype=dtype)
        for group in _grouped(tensors, counts)
    ]


@launcher("cast_together", _empty_groups)
def _cast(tensors: list[Tensor], dtype: torch.dtype, counts: list[int]) -> list[Tensor]:
    """Returns the tensors of each group below one another, in a dtype."""
    made = _empty_groups(tensors, dtype, counts)
    rows = _rows_of(tensors, counts)
    _cast_all(tensors, [part for out, each in zip(made, rows, strict=True) for part in _split(out, each)])
    return made


def _rows_of(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[int]]:
    return [[len(each) for each in group] for group in _grouped(tensors, counts)]


def _empty_like(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(each, dtype=dtype) for each in tensors]


@launcher("cast_apart", _empty_like)
def _cast_apart(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the tensors in a dtype."""
    made = _empty_like(tensors, dtype)
    _cast_all(tensors, made)
    return made


def _cast_all(tensors: Sequence[Tensor], made: Sequence[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(list(made), list(tensors))


def _grouped(items: Sequence[_Item], counts: Sequence[int]) -> list[Sequence[_Item]]:
    """Returns the first items, then the next ones, and so on, as many as ``counts`` says."""
    ends = list(itertools.accumulate(counts))
    return [items[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _split(tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    return [tensor] if len(rows) == 1 else list(tensor.split(list(rows)))


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Casts tensors of one dtype, and in the backward their gradients, by one launch for all on a GPU.

    The first so many tensors as ``counts`` says become one, below one another, then the next, and so on.
    """
    return _CastTogether.apply(dtype, counts, *tensors)


def count_change(written: Tensor) -> None:
    """Bumps the version counter of a tensor that a kernel wrote to, so that autograd detects the change."""
    if not written.is_inference():  # whose changes are not counted
        torch.autograd.graph.increment_version(written)


def check_inplace(name: str, written: Tensor, *tensors: Tensor | None) -> None:
    """Raises ValueError where a call of some tensors must not write into the one ``name``."""
    if modes.wants_gradient(*tensors):
        raise ValueError("inplace: got True where a gradient is wanted, expected False")
    if not written.is_contiguous():
        raise ValueError(f"{name}: is not contiguous, expected it to be with inplace=True")
