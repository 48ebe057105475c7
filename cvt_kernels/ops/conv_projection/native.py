"""Depthwise convolution + BatchNorm of tokens on a CPU by the compiled extension (csrc): evaluation only.

All branches are made in one pass over x. With the running statistics,
``y = (conv(x) − mean) · γ / sqrt(variance + eps) + β``, in float32 (float64 for float64) until y is rounded.
The same bits every time, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import checks, machine
from ...reference import ConvBatchNorm

machine.load_extension()
_ops = torch.ops.cvt_kernels

_MAX_KERNEL = 16  # kMaxKernel in csrc/conv_projection/cpu_loops.h


# Shapes for torch.compile
@torch.library.register_fake("cvt_kernels::conv_projection_inference")
def _(
    x: Tensor, height: int, width: int, weights: list[Tensor], norms: list[Tensor | None],
    geometry: list[int], eps: list[float],
) -> list[Tensor]:  # fmt: skip
    class_tokens = x.shape[1] - height * width
    outs = []
    for i, weight in enumerate(weights):
        stride, padding, dilation = geometry[3 * i : 3 * i + 3]
        conv = ConvBatchNorm(
            weight=weight, bn_weight=None, bn_bias=None, running_mean=None, running_var=None,
            stride=stride, padding=padding, dilation=dilation,
        )  # fmt: skip
        rows, columns = conv.output_grid((height, width))
        outs.append(x.new_empty(x.shape[0], class_tokens + rows * columns, x.shape[2]))
    return outs


def why_unsupported(
    x: Tensor, grid: tuple[int, int], convs: Sequence[ConvBatchNorm], *, training: bool
) -> str | None:
    """Says why these kernels cannot serve a call; None if they can."""
    if training or any(conv.running_mean is None for conv in convs):
        return "normalizes by running statistics only, not by those of the batch"
    if checks.wants_gradient(x, *(t for conv in convs for t in (conv.weight, conv.bn_weight, conv.bn_bias))):
        return "has no gradients on a CPU; call it under torch.no_grad() for inference"
    kernel = max(conv.weight.shape[3] for conv in convs)
    if kernel > _MAX_KERNEL:
        return f"has kernels of up to {_MAX_KERNEL}×{_MAX_KERNEL}, not {kernel}×{kernel}"
    return None


def conv_projection(
    x: Tensor, grid: tuple[int, int], convs: Sequence[ConvBatchNorm], *, training: bool
) -> tuple[Tensor, ...]:
    """Computes ``cvt_kernels.conv_projection``, whose checks it relies on.

    ``x`` is read as it lies if its channels are adjacent, whatever the strides of its tokens and batch;
    otherwise it is copied first. Under autocast it is computed in autocast's dtype, as convolutions are.
    """
    weights = [conv.weight for conv in convs]
    if (dtype := checks.autocast_dtype(x)) is not None:
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
    norms = [
        tensor
        for conv in convs
        for tensor in (conv.bn_weight, conv.bn_bias, conv.running_mean, conv.running_var)
    ]
    geometry = [n for conv in convs for n in (conv.stride, conv.padding, conv.dilation)]
    eps = [conv.eps for conv in convs]
    return tuple(_ops.conv_projection_inference.default(x, *grid, weights, norms, geometry, eps))
