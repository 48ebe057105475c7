"""Autograd functions of the operators on rows, on top of a backend's kernels.

Rows are unique, so the gradient of a gather is a scatter into zeros, and of a scatter a gather. Nothing is
summed, so results are bitwise deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import modes, reference
from ...backends import Record
from ..autograd import gradients_again


class Kernels(NamedTuple):
    """The kernels of a backend.

    Attributes:
        gather: (x, rows) → the rows.
        scatter: (x or None for zeros, rows, values or None for zeros, branch or None, number of tokens) → x
            with values + branch at the rows, of the dtype of x or, without it, of the values.
        scatter_: (x, rows, values, branch or None), in place.
        gather_add_layer_norm: (x, rows, branch, weight, bias, eps, dtype of the LayerNorm, whether a gradient
            is required) → h, its LayerNorm, and a list of other tensors for the backward.
        layer_norm_backward: (dy, dh or None, h, weight, bias, eps, that list) → gradients of h, weight, bias,
            the latter two None for an absent parameter.
    """

    gather: Callable[..., Tensor]
    scatter: Callable[..., Tensor]
    scatter_: Callable[..., None]
    gather_add_layer_norm: Callable[..., tuple[Tensor, Tensor, list[Tensor]]]
    layer_norm_backward: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]


#: The kernels by backend. Autograd functions take the backend's name, which is a constant for torch.compile.
KERNELS: dict[str, Kernels] = {}


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: str, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.backend, ctx.tokens = backend, x.shape[1]
        return KERNELS[backend].gather(x, rows)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            zeros = dout.new_zeros(len(dout), ctx.tokens, dout.shape[2])
            return None, reference.scatter_rows(zeros, rows, dout), None
        return None, KERNELS[ctx.backend].scatter(None, rows, dout, None, ctx.tokens), None


class _GatherAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: str,
        x: Tensor,
        rows: Tensor,
        branch: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        run = KERNELS[backend].gather_add_layer_norm
        h, y, statistics = run(x, rows, branch, weight, bias, eps, dtype, True)
        ctx.save_for_backward(rows, h, weight, bias, *statistics)
        ctx.backend, ctx.tokens, ctx.eps = backend, x.shape[1], eps
        ctx.dtypes = x.dtype, branch.dtype
        ctx.set_materialize_grads(False)  # often only one of the two outputs is used
        return h, y

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, h, weight, bias, *statistics = ctx.saved_tensors
        kernels = KERNELS[ctx.backend]
        dweight = dbias = None
        of_x, of_branch = ctx.dtypes
        if torch.is_grad_enabled() and not (dh is None and dy is None):

            def formula(h: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
                return h, reference.layer_norm(h, *parameters, eps=ctx.eps)

            dh, dweight, dbias = gradients_again(formula, (h, weight, bias), dh, dy)
            assert dh is not None
            zeros = dh.new_zeros(len(dh), ctx.tokens, dh.shape[2], dtype=of_x)
            dx = reference.scatter_rows(zeros, rows, dh.to(of_x))
            return None, dx, None, dh.to(of_branch), dweight, dbias, None, None
        if dy is not None:
            given = dy, dh, h, weight, bias, ctx.eps, statistics
            dh, dweight, dbias = kernels.layer_norm_backward(*given)
        if dh is None:
            return (None,) * 8
        dx = kernels.scatter(None, rows, dh.to(of_x), None, ctx.tokens) if ctx.needs_input_grad[1] else None
        return None, dx, None, dh.to(of_branch), dweight, dbias, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backend: str, x: Tensor, rows: Tensor, values: Tensor, branch: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.backend, ctx.tokens = backend, x.shape[1]
        ctx.dtypes = values.dtype, None if branch is None else branch.dtype
        return KERNELS[backend].scatter(x, rows, values, branch, x.shape[1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        kernels = KERNELS[ctx.backend]
        of_values, of_branch = ctx.dtypes
        if torch.is_grad_enabled():
            dvalues = reference.gather_rows(dout, rows)
            dx = reference.scatter_rows(dout, rows, torch.zeros_like(dvalues))
        else:
            dx = kernels.scatter(dout, rows, None, None, ctx.tokens) if ctx.needs_input_grad[1] else None
            dvalues = kernels.gather(dout, rows)
        dbranch = None if of_branch is None else dvalues.to(of_branch)
        return None, dx, None, dvalues.to(of_values), dbranch


# The functions of backends, without autograd's bookkeeping where no gradient is required ------------------


def gather_rows(backend: str, call: Record) -> Tensor:
    """Computes ``cvt_kernels.gather_rows`` by the kernels of a backend."""
    x, rows = call
    return _Gather.apply(backend, x, rows) if modes.wants_gradient(x) else KERNELS[backend].gather(x, rows)


def gather_add_layer_norm(backend: str, call: Record) -> tuple[Tensor, Tensor]:
    """Computes ``cvt_kernels.gather_add_layer_norm`` by the kernels of a backend."""
    x, rows, branch, weight, bias, eps, named = call
    dtype = _result_dtype(x, branch, named)
    if modes.wants_gradient(x, branch, weight, bias):
        return _GatherAddLayerNorm.apply(backend, x, rows, branch, weight, bias, eps, dtype)
    run = KERNELS[backend].gather_add_layer_norm
    h, y, _ = run(x, rows, branch, weight, bias, eps, dtype, False)
    return h, y


def scatter_rows(backend: str, call: Record) -> Tensor:
    """Computes ``cvt_kernels.scatter_rows`` by the kernels of a backend."""
    x, rows, values, branch, inplace = call
    if inplace:
        KERNELS[backend].scatter_(x, rows, values, branch)
        return x
    if modes.wants_gradient(x, values, branch):
        return _Scatter.apply(backend, x, rows, values, branch)
    return KERNELS[backend].scatter(x, rows, values, branch, x.shape[1])


def sum_dtype(x: Tensor, branch: Tensor) -> torch.dtype:
    """Returns the dtype of x + branch, as PyTorch promotes it."""
    return x.dtype if x.dtype == branch.dtype else torch.promote_types(x.dtype, branch.dtype)


def _result_dtype(x: Tensor, branch: Tensor, named: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the LayerNorm of x + branch.

    It is the caller's, except for float64; by default it is the dtype of ``F.layer_norm``.
    """
    stream = sum_dtype(x, branch)
    if stream == torch.float64:
        return stream
    if named is not None:
        return named
    return torch.float32 if x.is_cuda and torch.is_autocast_enabled("cuda") else stream
