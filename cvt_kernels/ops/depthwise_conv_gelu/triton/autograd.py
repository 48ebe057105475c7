"""Autograd function and backend functions of ``depthwise_conv_gelu``'s Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .... import modes, reference
from ....backends import Record
from ...autograd import gradients_again
from .backward import conv_gelu_backward, parameters_of
from .forward import conv_gelu_forward


class _DepthwiseConvGelu(torch.autograd.Function):
    """Autograd function of (x, grid, weight, bias, approximate)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grid: tuple[int, int], weight: Tensor, bias: Tensor | None, approximate: str
    ) -> Tensor:
        """Saves x and the parameters."""
        ctx.save_for_backward(x, weight, bias)
        ctx.settings = grid, approximate
        return conv_gelu_forward(x, list(grid), weight, bias, approximate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of x and the parameters."""
        x, weight, bias = ctx.saved_tensors
        grid, approximate = ctx.settings
        if torch.is_grad_enabled():

            def formula(x: Tensor, *parameters: Any) -> Tensor:
                return reference.depthwise_conv_gelu(x, grid, *parameters, approximate=approximate)

            dx, *others = gradients_again(formula, (x, weight, bias), dy)
            return dx, None, *others, None
        dx, sums = conv_gelu_backward(dy, x, list(grid), weight, bias, approximate)
        return dx, None, *parameters_of(sums, x.shape[2]), None


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x = call.x
    if x.numel() == 0:
        return "the batch is empty"
    if x.is_cuda and x.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if x.shape[1] * x.shape[2] >= 2**31:
        return "one image has 2³¹ elements or more"
    return None


def depthwise_conv_gelu(call: Record) -> Tensor:
    """Computes ``cvt_kernels.depthwise_conv_gelu`` for checked arguments.

    ``x`` is read in place if its channels are contiguous; otherwise it is copied first. Under autocast it
    computes in autocast's dtype, as a convolution does.
    """
    x, grid, weight, bias, approximate = call
    dtype = modes.autocast_dtype(x) or x.dtype
    x, weight = x.to(dtype), weight.to(dtype).contiguous()
    bias = None if bias is None else bias.to(dtype).contiguous()
    if modes.wants_gradient(x, weight, bias):  # an autograd function takes the host long
        return _DepthwiseConvGelu.apply(x, grid, weight, bias, approximate)
    return conv_gelu_forward(x, list(grid), weight, bias, approximate)
