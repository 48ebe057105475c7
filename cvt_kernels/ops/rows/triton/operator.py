"""Custom operators for torch.compile and backend functions of the Triton kernels on rows.

In eager mode the launchers are called directly; a registered operator would cost more host time per call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....backends import Record
from ...autograd import count_change
from ...graph_operators import graph_operator
from ...planned_launches import planned
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

# The operators of torch.compile ---------------------------------------------------------------------------

_gather_op = graph_operator(
    "triton_gather_rows",
    schema="(Tensor x, Tensor rows) -> Tensor",
)(gather_rows_forward)
_gather_add_layer_norm_op = graph_operator(
    "triton_gather_add_layer_norm",
    schema="(Tensor x, Tensor rows, Tensor branch, Tensor? weight, Tensor? bias, float eps, "
    "ScalarType dtype) -> (Tensor, Tensor)",
)(gather_add_layer_norm_forward)
_scatter_op = graph_operator(
    "triton_scatter_rows",
    schema="(Tensor? x, Tensor rows, Tensor? values, Tensor? branch, SymInt tokens) -> Tensor",
)(scatter_rows_forward)
_scatter_inplace_op = graph_operator(
    "triton_scatter_rows_",
    mutates=("x",),
    schema="(Tensor(a!) x, Tensor rows, Tensor values, Tensor? branch) -> ()",
)(scatter_rows_inplace_forward)


@graph_operator("triton_rows_layer_norm_backward")
def _layer_norm_backward_op(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> list[Tensor]:
    out, *gradients = layer_norm_backward(dy, dh, h, weight, bias, eps)
    # In float32 they are halves of one tensor; outputs of an operator must not share storage.
    return [out, *(gradient.clone() for gradient in gradients if gradient is not None)]


@torch.library.register_fake("cvt_kernels::triton_gather_rows")
def _(x, rows):
    return x.new_empty(*rows.shape, x.shape[2])


@torch.library.register_fake("cvt_kernels::triton_gather_add_layer_norm")
def _(x, rows, branch, weight, bias, eps, dtype):
    h = torch.empty_like(branch, dtype=autograd.sum_dtype(x, branch))
    return h, torch.empty_like(branch, dtype=dtype)


@torch.library.register_fake("cvt_kernels::triton_scatter_rows")
def _(x, rows, values, branch, tokens):
    like = values if x is None else x
    return like.new_empty(rows.shape[0], tokens, like.shape[2])


@torch.library.register_fake("cvt_kernels::triton_rows_layer_norm_backward")
def _(dy, dh, h, weight, bias, eps):
    return [torch.empty_like(given) for given in (h, weight, bias) if given is not None]


# The kernels, whose inputs are contiguous but for x --------------------------------------------------------


def _rows_of(x: Tensor) -> Tensor:
    """Returns tokens whose channels are adjacent."""
    return x if x.stride(2) == 1 else x.contiguous()


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    run = _gather_op if torch.compiler.is_compiling() else gather_rows_forward
    return run(_rows_of(x), rows.contiguous())


def _scatter(
    x: Tensor | None, rows: Tensor, values: Tensor | None, branch: Tensor | None, tokens: int
) -> Tensor:
    run = _scatter_op if torch.compiler.is_compiling() else scatter_rows_forward
    x = None if x is None else _rows_of(x)
    return run(x, rows.contiguous(), contiguous(values), contiguous(branch), tokens)


def _scatter_in_place(x: Tensor, rows: Tensor, values: Tensor, branch: Tensor | None) -> None:
    args = x, rows.contiguous(), values.contiguous(), contiguous(branch)
    if torch.compiler.is_compiling():
        _scatter_inplace_op(*args)
        return
    scatter_rows_inplace_forward(*args)
    count_change(x)


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
    run = _gather_add_layer_norm_op if torch.compiler.is_compiling() else gather_add_layer_norm_forward
    args = _rows_of(x), rows.contiguous(), branch.contiguous(), contiguous(weight), contiguous(bias)
    h, y = run(*args, eps, dtype)
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
    args = dy.contiguous(), contiguous(dh), h, contiguous(weight), contiguous(bias), eps
    if not torch.compiler.is_compiling():
        return layer_norm_backward(*args)
    out, *gradients = _layer_norm_backward_op(*args)
    dweight = None if weight is None else gradients.pop(0)
    return out, dweight, None if bias is None else gradients.pop(0)


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


gather_rows = planned(functools.partial(autograd.gather_rows, "triton"))
gather_add_layer_norm = planned(functools.partial(autograd.gather_add_layer_norm, "triton"))
scatter_rows = planned(functools.partial(autograd.scatter_rows, "triton"))
