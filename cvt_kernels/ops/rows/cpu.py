"""Rows of tokens by the compiled extension (csrc), on CPUs.

A row is read once and written once: ``gather_add_layer_norm`` normalizes it while it is in the cache, and
``scatter_rows`` takes each token from x or from the values, by the inverse of the index. x may have any
strides if its channels are contiguous; other inputs that are not contiguous are copied first, and results are
contiguous. Indices out of range raise an error. The backward of LayerNorm is ``layer_norm``'s.

Rows are unique, so the gradient of a gather is a scatter into zeros, and of a scatter a gather. Nothing is
summed, so results are bitwise deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import machine, modes, reference
from ...backends import Record
from ..autograd import count_change, gradients_again
from ..layer_norm_gelu import extension as _layer_norm_gelu  # noqa: F401 (has the shapes of its backward)

machine.load_extension()
_ops = torch.ops.cvt_kernels


# Shapes for torch.compile, which traces through the functions of autograd ----------------------------------


@torch.library.register_fake("cvt_kernels::gather_rows")
def _(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(*rows.shape, x.shape[2])


@torch.library.register_fake("cvt_kernels::gather_add_layer_norm")
def _(
    x: Tensor, rows: Tensor, branch: Tensor, weight: Any, bias: Any, eps: float, with_statistics: bool
) -> tuple[Tensor, ...]:
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    count = rows.shape[0] * rows.shape[1] if with_statistics else 0
    made = [x.new_empty(branch.shape) for _ in range(2)]
    return *made, *[x.new_empty(count, dtype=accumulator) for _ in range(2)]


@torch.library.register_fake("cvt_kernels::scatter_rows")
def _(x: Tensor | None, rows: Tensor, values: Tensor | None, branch: Tensor | None, tokens: int) -> Tensor:
    like = values if x is None else x
    assert like is not None
    return like.new_empty(rows.shape[0], tokens, like.shape[2])


@torch.library.register_fake("cvt_kernels::scatter_rows_")
def _(x: Tensor, rows: Tensor, values: Tensor, branch: Tensor | None) -> None:
    return None


# The kernels, with one dtype per call ---------------------------------------------------------------------


def _scatter(
    x: Tensor | None, rows: Tensor, values: Tensor | None, branch: Tensor | None, tokens: int
) -> Tensor:
    return _ops.scatter_rows.default(x, rows, *_of_dtype(x, values, branch), tokens)


def _scatter_in_place(x: Tensor, rows: Tensor, values: Tensor, branch: Tensor | None) -> None:
    values_of_dtype, branch = _of_dtype(x, values, branch)
    _ops.scatter_rows_.default(x, rows, values_of_dtype, branch)
    if not torch.compiler.is_compiling():
        count_change(x)


def _of_dtype(
    x: Tensor | None, values: Tensor | None, branch: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns values and branch in the dtype of x, already summed if dtypes differ."""
    if x is None or values is None:
        return values, branch
    if branch is not None and not values.dtype == branch.dtype == x.dtype:
        values, branch = values + branch, None
    return values.to(x.dtype), branch


def _gather_add_layer_norm(
    x: Tensor,
    rows: Tensor,
    branch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    stream = _sum_dtype(x, branch)
    args = x.to(stream), rows, branch.to(stream), _vector(weight, stream), _vector(bias, stream)
    h, y, *statistics = _ops.gather_add_layer_norm.default(*args, eps, with_gradient)
    return h, y.to(dtype), statistics


def _vector(given: Tensor | None, stream: torch.dtype) -> Tensor | None:
    accumulator = torch.float64 if stream == torch.float64 else torch.float32
    return None if given is None else given.to(accumulator).contiguous()


def _layer_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    statistics: list[Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    mean, rstd = (statistic.view(h.shape[:2]) for statistic in statistics)
    dh, _, dweight, dbias = _ops.layer_norm_backward.default(
        dy.to(h.dtype), dh, h, mean, rstd, weight, bias, "identity", False
    )
    return dh, None if weight is None else dweight, None if bias is None else dbias


# Autograd -------------------------------------------------------------------------------------------------


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


class _GatherAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        branch: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        h, y, statistics = _gather_add_layer_norm(x, rows, branch, weight, bias, eps, dtype, True)
        ctx.save_for_backward(rows, h, weight, bias, *statistics)
        ctx.tokens, ctx.eps = x.shape[1], eps
        ctx.dtypes = x.dtype, branch.dtype
        ctx.set_materialize_grads(False)  # often only one of the two outputs is used
        return h, y

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, h, weight, bias, *statistics = ctx.saved_tensors
        dweight = dbias = None
        of_x, of_branch = ctx.dtypes
        if torch.is_grad_enabled() and not (dh is None and dy is None):

            def formula(h: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
                return h, reference.layer_norm(h, *parameters, eps=ctx.eps)

            dh, dweight, dbias = gradients_again(formula, (h, weight, bias), dh, dy)
            assert dh is not None
            zeros = dh.new_zeros(len(dh), ctx.tokens, dh.shape[2], dtype=of_x)
            dx = reference.scatter_rows(zeros, rows, dh.to(of_x))
            return dx, None, dh.to(of_branch), dweight, dbias, None, None
        if dy is not None:
            dh, dweight, dbias = _layer_norm_backward(dy, dh, h, weight, bias, ctx.eps, statistics)
        if dh is None:
            return (None,) * 7
        dx = _scatter(None, rows, dh.to(of_x), None, ctx.tokens) if ctx.needs_input_grad[0] else None
        return dx, None, dh.to(of_branch), dweight, dbias, None, None


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


# The backend: without autograd's bookkeeping where no gradient is required ---------------------------------


def gather_rows(call: Record) -> Tensor:
    """Computes ``cvt_kernels.gather_rows``."""
    x, rows = call
    return _Gather.apply(x, rows) if modes.wants_gradient(x) else _ops.gather_rows.default(x, rows)


def gather_add_layer_norm(call: Record) -> tuple[Tensor, Tensor]:
    """Computes ``cvt_kernels.gather_add_layer_norm``."""
    x, rows, branch, weight, bias, eps, named = call
    dtype = _result_dtype(x, branch, named)
    if modes.wants_gradient(x, branch, weight, bias):
        return _GatherAddLayerNorm.apply(x, rows, branch, weight, bias, eps, dtype)
    h, y, _ = _gather_add_layer_norm(x, rows, branch, weight, bias, eps, dtype, False)
    return h, y


def scatter_rows(call: Record) -> Tensor:
    """Computes ``cvt_kernels.scatter_rows``."""
    x, rows, values, branch, inplace = call
    if inplace:
        _scatter_in_place(x, rows, values, branch)
        return x
    if modes.wants_gradient(x, values, branch):
        return _Scatter.apply(x, rows, values, branch)
    return _scatter(x, rows, values, branch, x.shape[1])


def _sum_dtype(x: Tensor, branch: Tensor) -> torch.dtype:
    """Returns the dtype of x + branch, as PyTorch promotes it."""
    return x.dtype if x.dtype == branch.dtype else torch.promote_types(x.dtype, branch.dtype)


def _result_dtype(x: Tensor, branch: Tensor, named: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the LayerNorm of x + branch.

    It is the caller's, except for float64; by default it is the dtype of ``F.layer_norm``.
    """
    stream = _sum_dtype(x, branch)
    return stream if named is None or stream == torch.float64 else named
