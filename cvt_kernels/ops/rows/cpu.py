"""Rows of tokens by the compiled extension (csrc), on CPUs.

A row is read once and written once: ``scatter_rows`` takes each token from x or from the values, by the
inverse of the index. x may have any strides if its channels are contiguous; other inputs that are not
contiguous are copied first, and results are contiguous. Indices out of range raise an error.

Rows are unique, so the gradient of a gather is a scatter into zeros, and of a scatter a gather. Nothing is
summed, so results are bitwise deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import machine, modes, reference
from ...backends import Record
from ..autograd import count_change

machine.load_extension()
_ops = torch.ops.cvt_kernels

torch.library.register_fake("cvt_kernels::gather_rows", lambda x, rows: x.new_empty(*rows.shape, x.shape[2]))
torch.library.register_fake("cvt_kernels::scatter_rows_", lambda *_: None)


@torch.library.register_fake("cvt_kernels::scatter_rows")
def _(x: Tensor | None, rows: Tensor, values: Tensor | None, tokens: int) -> Tensor:
    like = values if x is None else x
    assert like is not None
    return like.new_empty(rows.shape[0], tokens, like.shape[2])


def _scatter(
    x: Tensor | None, rows: Tensor, values: Tensor | None, branch: Tensor | None, tokens: int
) -> Tensor:
    summed = values if values is None or branch is None else values + branch
    summed = summed if summed is None or x is None else summed.to(x.dtype)
    return _ops.scatter_rows.default(x, rows, summed, tokens)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.tokens = x.shape[1]
        return _ops.gather_rows.default(x, rows)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            zeros = dout.new_zeros(len(dout), ctx.tokens, dout.shape[2])
            return reference.scatter_rows(zeros, rows, dout), None
        return _scatter(None, rows, dout, None, ctx.tokens), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, values: Tensor, branch: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.tokens = x.shape[1]
        ctx.dtypes = values.dtype, None if branch is None else branch.dtype
        return _scatter(x, rows, values, branch, x.shape[1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        of_values, of_branch = ctx.dtypes
        if torch.is_grad_enabled():
            dvalues = reference.gather_rows(dout, rows)
            dx = reference.scatter_rows(dout, rows, torch.zeros_like(dvalues))
        else:
            dx = _scatter(dout, rows, None, None, ctx.tokens) if ctx.needs_input_grad[0] else None
            dvalues = _ops.gather_rows.default(dout, rows)
        dbranch = None if of_branch is None else dvalues.to(of_branch)
        return dx, None, dvalues.to(of_values), dbranch


def gather_rows(call: Record) -> Tensor:
    """Computes ``cvt_kernels.gather_rows``."""
    x, rows = call
    return _Gather.apply(x, rows) if modes.wants_gradient(x) else _ops.gather_rows.default(x, rows)


def scatter_rows(call: Record) -> Tensor:
    """Computes ``cvt_kernels.scatter_rows``."""
    x, rows, values, branch, inplace = call
    if inplace:
        _ops.scatter_rows_.default(x, rows, (values if branch is None else values + branch).to(x.dtype))
        if not torch.compiler.is_compiling():
            count_change(x)
        return x
    if modes.wants_gradient(x, values, branch):
        return _Scatter.apply(x, rows, values, branch)
    return _scatter(x, rows, values, branch, x.shape[1])
