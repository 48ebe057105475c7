"""Rows of tokens by the compiled extension (csrc), on CPUs.

A row is read once and written once: ``gather_add_layer_norm`` normalizes it while it is in the cache, and
``scatter_rows`` takes each token from x or from the values, by the inverse of the index. x may have any
strides if its channels are contiguous; other inputs that are not contiguous are copied first, and results are
contiguous. Indices out of range raise an error. The backward of LayerNorm is ``layer_norm``'s.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ... import machine
from ..autograd import count_change
from ..layer_norm_gelu import extension as _layer_norm_gelu  # noqa: F401 (has the shapes of its backward)
from . import autograd

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
    stream = autograd.sum_dtype(x, branch)
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


autograd.KERNELS["cpu"] = autograd.Kernels(
    gather=_ops.gather_rows.default,
    scatter=_scatter,
    scatter_=_scatter_in_place,
    gather_add_layer_norm=_gather_add_layer_norm,
    layer_norm_backward=_layer_norm_backward,
)


# The backend: the public functions of the same names, for checked arguments -------------------------------

gather_rows = functools.partial(autograd.gather_rows, "cpu")
gather_add_layer_norm = functools.partial(autograd.gather_add_layer_norm, "cpu")
scatter_rows = functools.partial(autograd.scatter_rows, "cpu")
