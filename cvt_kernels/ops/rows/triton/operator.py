"""Backend functions of the Triton kernels on rows."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....backends import Record
from ...triton_launch import contiguous
from .. import autograd
from .backward import layer_norm_backward
from .common import MAX_CHANNELS
from .forward import (
    gather_add_layer_norm_forward,
    gather_rows_forward,
    scatter_rows_forward,
    scatter_rows_inplace_forward,
)

# The kernels, whose inputs are contiguous but for x --------------------------------------------------------


def _rows_of(x: Tensor) -> Tensor:
    """Returns tokens whose channels are adjacent."""
    return x if x.stride(2) == 1 else x.contiguous()


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    return gather_rows_forward(_rows_of(x), rows.contiguous())


def _scatter(
    x: Tensor | None, rows: Tensor, values: Tensor | None, branch: Tensor | None, tokens: int
) -> Tensor:
    x = None if x is None else _rows_of(x)
    return scatter_rows_forward(x, rows.contiguous(), contiguous(values), contiguous(branch), tokens)


def _scatter_in_place(x: Tensor, rows: Tensor, values: Tensor, branch: Tensor | None) -> None:
    scatter_rows_inplace_forward(x, rows.contiguous(), values.contiguous(), contiguous(branch))


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
    args = _rows_of(x), rows.contiguous(), branch.contiguous(), contiguous(weight), contiguous(bias)
    h, y = gather_add_layer_norm_forward(*args, eps, dtype)
    return h, y, []


def _layer_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    statistics: list[Tensor],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    has_sums = weight is not None or bias is not None
    out, *sums = layer_norm_backward(dy.contiguous(), contiguous(dh), h, contiguous(weight), has_sums, eps)
    dweight, dbias = (
        None if vector is None else sums[0][i].to(vector.dtype) for i, vector in enumerate((weight, bias))
    )
    return out, dweight, dbias


autograd.KERNELS["triton"] = autograd.Kernels(
    gather=_gather,
    scatter=_scatter,
    scatter_=_scatter_in_place,
    gather_add_layer_norm=_gather_add_layer_norm,
    layer_norm_backward=_layer_norm_backward,
)


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x, rows = call.x, call.rows
    if rows.numel() == 0:
        return "the batch is empty"
    if x.is_cuda and x.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if x.shape[2] > MAX_CHANNELS:
        return f"tokens have {x.shape[2]} channels, more than {MAX_CHANNELS}"
    if max(x.stride(1) * x.shape[1], rows.shape[1] * x.shape[2]) >= 2**31 or rows.numel() >= 2**31 - 2**13:
        return "the tokens of one image have 2³¹ elements or more, or there are as many rows"
    return None


gather_rows = functools.partial(autograd.gather_rows, "triton")
gather_add_layer_norm = functools.partial(autograd.gather_add_layer_norm, "triton")
scatter_rows = functools.partial(autograd.scatter_rows, "triton")
