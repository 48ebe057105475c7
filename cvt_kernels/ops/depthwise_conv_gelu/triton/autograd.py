"""Autograd function, custom operators and backend functions of ``depthwise_conv_gelu``'s Triton kernels.

In eager mode the autograd function is called directly; a registered operator would cost more host time per
call. Under torch.compile the same launchers run behind opaque operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .... import modes, reference
from ....backends import Record
from ...autograd import gradients_again
from ...conv_projection.triton.common import maybe_contiguous
from ...graph_operators import graph_operator
from .backward import conv_gelu_backward, parameters_of
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
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of the parameters and, where needed, of x."""
        x, weight, bias = ctx.saved_tensors
        grid, approximate = ctx.settings
        if torch.is_grad_enabled():

            def formula(x: Tensor, *parameters: Any) -> Tensor:
                return reference.depthwise_conv_gelu(x, grid, *parameters, approximate=approximate)

            dx, *others = gradients_again(formula, (x, weight, bias), dy)
            return dx, None, *others, None
        dx, sums = conv_gelu_backward(
            dy.contiguous(), x, grid, weight, bias, approximate, needs_dx=ctx.needs_input_grad[0]
        )
        return dx, None, *parameters_of(sums, x.shape[2]), None


# The operators of torch.compile ---------------------------------------------------------------------------


def _like(x, grid, weight, bias, approximate):
    return x.new_empty(x.shape)


@graph_operator("triton_depthwise_conv_gelu", _like)
def _forward_op(x: Tensor, grid: list[int], weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    height, width = grid
    return conv_gelu_forward(maybe_contiguous(x), (height, width), weight, bias, approximate)


def _gradient_shapes(dy, x, grid, weight, bias, approximate, needs_dx):
    dx = [x.new_empty(x.shape)] if needs_dx else []
    return [*dx, x.new_empty(x.shape[2] * (9 if bias is None else 10))]


@graph_operator("triton_depthwise_conv_gelu_backward", _gradient_shapes)
def _backward_op(
    dy: Tensor, x: Tensor, grid: list[int], weight: Tensor, bias: Tensor | None, approximate: str,
    needs_dx: bool,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of x, if needed, and of weight and bias as one: outputs may not share memory."""
    height, width = grid
    given = dy.contiguous(), maybe_contiguous(x), (height, width), weight, bias, approximate
    dx, sums = conv_gelu_backward(*given, needs_dx=needs_dx)
    return [sums] if dx is None else [dx, sums]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, grid, weight, bias, approximate = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.settings = grid, approximate


def _backward_of_op(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    grid, approximate = ctx.settings
    needs_dx = ctx.needs_input_grad[0]
    *dx, sums = _backward_op(dy, x, grid, weight, bias, approximate, needs_dx)
    return dx[0] if needs_dx else None, None, *parameters_of(sums, weight.shape[0]), None


torch.library.register_autograd(
    "cvt_kernels::triton_depthwise_conv_gelu", _backward_of_op, setup_context=_setup_context
)


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
    if torch.compiler.is_compiling():
        return _forward_op(x, list(grid), weight, bias, approximate)
    x = maybe_contiguous(x)
    if modes.wants_gradient(x, weight, bias):  # an autograd function takes the host long
        return _DepthwiseConvGelu.apply(x, grid, weight, bias, approximate)
    return conv_gelu_forward(x, grid, weight, bias, approximate)
