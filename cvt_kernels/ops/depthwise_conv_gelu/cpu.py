"""Depthwise 3×3 convolution of tokens with bias and GELU on a CPU by the compiled extension (csrc).

With u = conv(x) + bias, ``out = gelu(u)``: rows of tokens are read in place, each for three rows of outputs,
and stay in the cache in between; only ``out`` is written. Sums and GELU are in float32 (float64 for float64),
and rounded once.

Backward saves x and the parameters, and recomputes u. It goes down bands of rows of an image: a ring of
three rows holds ``du = dout · gelu'(u)``, whose convolution with the taps in reverse order is dx, and whose
products with x are the gradients of the taps. Neither u nor du goes through memory.

Sums over tokens are taken in a fixed order: the same bits every time, whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import machine, modes, reference
from ...backends import Record
from ..autograd import gradients_again

machine.load_extension()
_ops = torch.ops.cvt_kernels


class _DepthwiseConvGelu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, height: int, width: int, weight: Tensor, bias: Tensor | None, approximate: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.settings = height, width, approximate
        return _ops.depthwise_conv_gelu.default(x, height, width, weight, bias, approximate)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        height, width, approximate = ctx.settings
        if torch.is_grad_enabled():

            def formula(x: Tensor, *parameters: Any) -> Tensor:
                return reference.depthwise_conv_gelu(x, (height, width), *parameters, approximate=approximate)

            dx, *others = gradients_again(formula, (x, weight, bias), dout)
            return dx, None, None, *others, None
        dx, dweight, dbias = _ops.depthwise_conv_gelu_backward.default(
            dout, x, height, width, weight, bias, approximate
        )
        return dx, None, None, dweight, None if bias is None else dbias, None


torch.library.register_fake("cvt_kernels::depthwise_conv_gelu", lambda x, *_: x.new_empty(x.shape))


@torch.library.register_fake("cvt_kernels::depthwise_conv_gelu_backward")
def _(
    dout: Tensor, x: Tensor, height: int, width: int, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    dbias = x.new_empty(0, dtype=dtype) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


def depthwise_conv_gelu(call: Record) -> Tensor:
    """Computes ``cvt_kernels.depthwise_conv_gelu`` for checked arguments.

    ``x`` is read in place if its channels are contiguous; otherwise it is copied first. Under autocast it is
    computed in autocast's dtype, as convolutions are.
    """
    x, grid, weight, bias, approximate = call
    wants_gradient = modes.wants_gradient(x, weight, bias)
    if (dtype := modes.autocast_dtype(x)) is not None:
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    compute = _DepthwiseConvGelu.apply if wants_gradient else _ops.depthwise_conv_gelu.default
    return compute(x, *grid, weight, bias, approximate)
