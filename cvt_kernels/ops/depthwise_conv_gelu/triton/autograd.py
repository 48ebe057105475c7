"""Autograd function, custom operators and backend functions of ``depthwise_conv_gelu``'s Triton kernels.

In eager mode the autograd function is called directly; a registered operator would cost more host time per
call. Under torch.compile the same launchers run behind opaque operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .... import modes
from ....backends import Record
from ...autograd import once_differentiable
from ...conv_projection.triton.common import maybe_contiguous
from ...planned_launches import planned
from .backward import conv_gelu_backward
from .forward import conv_gelu_forward

# Autograd -------------------------------------------------------------------------------------------------


class _DepthwiseConvGelu(torch.autograd.Function):
    """Autograd function of (x, grid, weight, bias, approximate)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grid: tuple[int, int], weight: Tensor, bias: Tensor | None, approximate: str
    ) -> Tensor:
        """Saves x and the parameters."""
        ctx.save_for_backward(x, weight, bias)
        ctx.settings = grid, approximate
        return conv_gelu_forward(x, grid, weight, bias, approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of the parameters and, where needed, of x."""
        x, weight, bias = ctx.saved_tensors
        grid, approximate = ctx.settings
        dx, dweight, dbias = conv_gelu_backward(
            dy.contiguous(), x, grid, weight, bias, approximate, needs_dx=ctx.needs_input_grad[0]
        )
        return dx, None, dweight, dbias, None


# The operators of torch.compile ---------------------------------------------------------------------------


@torch.library.custom_op("cvt_kernels::triton_depthwise_conv_gelu", mutates_args=())
def _forward_op(x: Tensor, grid: list[int], weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    height, width = grid
    return conv_gelu_forward(maybe_contiguous(x), (height, width), weight, bias, approximate)


@_forward_op.register_fake
def _(x, grid, weight, bias, approximate):
    return x.new_empty(x.shape)


@torch.library.custom_op("cvt_kernels::triton_depthwise_conv_gelu_backward", mutates_args=())
def _backward_op(
    dy: Tensor, x: Tensor, grid: list[int], weight: Tensor, bias: Tensor | None, approximate: str,
    needs_dx: bool,
) -> list[Tensor]:  # fmt: skip
    height, width = grid
    dx, dweight, dbias = conv_gelu_backward(
        dy.contiguous(), maybe_contiguous(x), (height, width), weight, bias, approximate, needs_dx=needs_dx
    )
    # An operator's outputs may not share storage.
    return [*([] if dx is None else [dx]), dweight.clone(), *([] if dbias is None else [dbias.clone()])]


@_backward_op.register_fake
def _(dy, x, grid, weight, bias, approximate, needs_dx):
    given = [x] * needs_dx + [weight] + ([] if bias is None else [bias])
    return [tensor.new_empty(tensor.shape) for tensor in given]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, grid, weight, bias, approximate = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.settings = grid, approximate


def _backward_of_op(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    grid, approximate = ctx.settings
    needs_dx = ctx.needs_input_grad[0]
    gradients = _backward_op(dy, x, grid, weight, bias, approximate, needs_dx)
    dx = gradients.pop(0) if needs_dx else None
    return dx, None, gradients[0], None if bias is None else gradients[1], None


_forward_op.register_autograd(_backward_of_op, setup_context=_setup_context)


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


@planned
def depthwise_conv_gelu(call: Record) -> Tensor:
    """Computes ``cvt_kernels.depthwise_conv_gelu`` for checked arguments.

    ``x`` is read in place if its channels are contiguous; otherwise it is copied first. Under autocast it
    computes in autocast's dtype, as a convolution does.
    """
    x, grid, weight, bias, approximate = call
    dtype = modes.autocast_dtype(x) or x.dtype
    x, weight = x.to(dtype), weight.to(dtype).contiguous()
    bias = None if bias is None else bias.to(dtype).contiguous()
    if torch.compiler.is_compiling():
        return _forward_op(x, list(grid), weight, bias, approximate)
    x = maybe_contiguous(x)
    if modes.wants_gradient(x, weight, bias):  # an autograd function takes the host long
        return _DepthwiseConvGelu.apply(x, grid, weight, bias, approximate)
    return conv_gelu_forward(x, grid, weight, bias, approximate)
