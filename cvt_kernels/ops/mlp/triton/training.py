"""Autograd function of ``mlp_add``, by the kernels of linear layers.

The forward is ``linear_gelu``, which writes GELU's input and output, PyTorch's product of fc2, and
``linear_ends``. Of the hidden features, four times as many as x has, the backward keeps GELU's input. The
pass that applies GELU's derivative reads it anyway, and writes GELU again for the gradient of fc2's weight:
one tensor of hidden features less in memory, for one more that is written in the backward.

Saved, with e per element and M rows: x (M·C·e), GELU's input (M·hidden·e), and the weights in the dtype of
the products.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .... import modes, reference
from ....backends import Record
from ...autograd import gradients_again, refuse_again
from ...linear.triton.autograd import (
    dtype_of,
    matrices,
    rows_of,
    save,
    sum_dtype,
    why_not_training,
    zeros_for,
)
from ...linear.triton.backward import linear_ends, linear_starts
from ...linear.triton.forward import linear_gelu_forward
from ...triton_launch import contiguous


class _MlpAdd(torch.autograd.Function):
    """Autograd function of mlp_add: the fields of its record."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor,
        fc2_bias: Tensor | None, residual: Tensor, approximate: str, scale: Tensor | None, scales_sum: bool,
    ) -> Tensor:  # fmt: skip
        """Saves x and weights in the dtype of the products, GELU's input and the factors of images."""
        dtype = sum_dtype(x, residual)
        rows, fc1, narrow = matrices(x, fc1_weight, fc1_bias)
        hidden, pre = linear_gelu_forward(rows, fc1, narrow, approximate, True)
        fc2 = fc2_weight.to(hidden.dtype).contiguous()
        out = linear_ends(
            F.linear(hidden, fc2), contiguous(fc2_bias), rows_of(residual), scale, scales_sum, dtype
        )  # fmt: skip
        save(ctx, (x, rows), (fc1_weight, fc1), fc1_bias, (fc2_weight, fc2), fc2_bias, pre, scale)
        ctx.approximate, ctx.scales_sum = approximate, scales_sum
        return out.view(residual.shape)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients that are needed; autograd casts them."""
        x, fc1, fc1_bias, fc2, fc2_bias, pre, scale = ctx.saved_tensors
        need_x, need_fc1, need_fc1_bias, need_fc2, need_fc2_bias, need_residual, *_ = ctx.needs_input_grad
        settings: dict[str, Any] = {"scale": scale, "scales_sum": ctx.scales_sum}
        if torch.is_grad_enabled() and ctx.are_given:
            formula = functools.partial(reference.mlp_add, approximate=ctx.approximate, **settings)
            given = x, fc1, fc1_bias, fc2, fc2_bias, zeros_for(dout, need_residual)
            return *gradients_again(formula, given, dout), None, None, None
        end = linear_starts(rows_of(dout), fc2.dtype, dtype_of(fc2_bias, need_fc2_bias), **settings)
        start = linear_starts(
            end.product @ fc2, pre.dtype, dtype_of(fc1_bias, need_fc1_bias), pre=pre,
            approximate=ctx.approximate, activates=need_fc2,
        )  # fmt: skip
        dfc2 = None if start.activated is None else end.product.t() @ start.activated
        dx = (start.product @ fc1).view(dout.shape) if need_x else None
        dfc1 = start.product.t() @ rows_of(x) if need_fc1 else None
        dresidual = end.residual.view_as(dout) if need_residual else None
        gradients = dx, dfc1, start.bias, dfc2, end.bias, dresidual, None, None, None
        return refuse_again(gradients)


def why_unsupported(call: Record) -> str | None:
    """Returns why :func:`mlp_add` cannot serve a call, or None."""
    if not modes.wants_gradient(*call):
        return "is for gradients; the layers alone serve all else"
    if call.x.numel() == 0 or call.fc1_weight.numel() == 0:
        return "the batch is empty" if call.fc1_weight.numel() else "the weights are empty"
    if call.x.numel() // call.x.shape[-1] >= 2**31 - 2**10 or call.fc1_weight.numel() >= 2**31:
        return "there are 2³¹ rows, or as many elements of a weight, or more"
    return why_not_training(call)


def mlp_add(call: Record) -> Tensor:
    """Computes ``cvt_kernels.mlp_add`` for checked arguments; the products, in autocast's dtype."""
    return _MlpAdd.apply(*call._replace(scale=contiguous(call.scale)))
