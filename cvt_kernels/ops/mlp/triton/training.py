"""Autograd function of ``mlp_add``, by the kernels of linear layers.

The forward is ``linear_gelu``, which writes GELU's input and output, PyTorch's product of fc2, and
``linear_ends``. Of the hidden features, four times as many as x has, the backward keeps GELU's input. The
pass that applies GELU's derivative reads it anyway, and writes GELU again for the gradient of fc2's weight:
one tensor of hidden features less in memory, for one more that is written in the backward.

Saved, with e per element and M rows: x (M·C·e), GELU's input (M·hidden·e), and the weights in the dtype of
the products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .... import modes
from ....backends import Record
from ...autograd import once_differentiable
from ...linear.triton.autograd import activate, matrices, rows_of, sum_dtype, why_not_training
from ...linear.triton.backward import linear_ends, linear_starts
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
        hidden, pre = activate(rows, fc1, narrow, approximate)
        fc2 = fc2_weight.to(hidden.dtype).contiguous()
        out = linear_ends(
            F.linear(hidden, fc2), contiguous(fc2_bias), rows_of(residual), scale, scales_sum, dtype
        )  # fmt: skip
        ctx.save_for_backward(rows, fc1, fc2, pre, scale)
        ctx.approximate, ctx.scales_sum = approximate, scales_sum
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (fc1_bias, fc2_bias)]
        return out.view(residual.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients that are needed; autograd casts them."""
        rows, fc1, fc2, pre, scale = ctx.saved_tensors
        need_x, need_fc1, need_fc1_bias, need_fc2, need_fc2_bias, need_residual, *_ = ctx.needs_input_grad
        fc1_bias, fc2_bias = ctx.bias_dtypes
        end = linear_starts(
            rows_of(dout), fc2.dtype, fc2_bias if need_fc2_bias else None, scale=scale,
            scales_sum=ctx.scales_sum,
        )  # fmt: skip
        start = linear_starts(
            end.product @ fc2, pre.dtype, fc1_bias if need_fc1_bias else None, pre=pre,
            approximate=ctx.approximate, activates=need_fc2,
        )  # fmt: skip
        dfc2 = None if start.activated is None else end.product.t() @ start.activated
        dx = (start.product @ fc1).view(dout.shape) if need_x else None
        dfc1 = start.product.t() @ rows if need_fc1 else None
        dresidual = end.residual.view_as(dout) if need_residual else None
        return dx, dfc1, start.bias, dfc2, end.bias, dresidual, None, None, None


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
