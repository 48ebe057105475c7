"""Merging of several convolutions and their BatchNorms into one, for evaluation and export."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import checks
from ...records import ConvBatchNorm
from . import check_settings

_LARGEST = 1024  # rows of a kernel
_HALF = 0.5  # as variance and as eps it makes a deviation of exactly 1 in every dtype


def merge_convolutions(convs: Sequence[ConvBatchNorm]) -> ConvBatchNorm:
    """Merges the summed convolutions of a ``conv_projection`` branch into one, for evaluation.

    Its kernel covers all of theirs, 9×9 for the hybrid mixing of CvT (3×3, and 5×5 of dilation 2). BatchNorm
    is folded into it in float64 and rounded once; only the shift remains.

    Args:
        convs: The convolutions, with running statistics, of one stride and with the same grid of outputs.

    Returns:
        One ConvBatchNorm of dilation 1 without ``bn_weight``, whose statistics normalize by exactly 1. So its
        weight and its ``bn_bias`` fit an ``nn.Conv2d(C, C, K, stride, padding, groups=C)``.

    Raises:
        TypeError: An element is no ConvBatchNorm.
        ValueError: No convolutions, one without running statistics, different channels, strides or grids, or
            a kernel of more than 1024 rows.
    """
    convs = checks.as_tuple("convs", convs, "a sequence of ConvBatchNorm")
    _check(convs)
    first, channels = convs[0], convs[0].weight.shape[0]
    padding = max(conv.padding for conv in convs)
    size = padding + 1 + max(conv.dilation * (conv.weight.shape[3] - 1) - conv.padding for conv in convs)
    if size > _LARGEST:
        raise ValueError(f"convs: need a kernel of {size}×{size} together, expected {_LARGEST} rows at most")
    weight = first.weight.new_zeros(channels, 1, size, size, dtype=torch.float64)
    shift = weight.new_zeros(channels)
    for conv in convs:
        mean, variance = (_double(each, channels, conv) for each in (conv.running_mean, conv.running_var))
        scale = _double(conv.bn_weight, channels, conv, absent=1.0) / (variance + conv.eps).sqrt()
        at = slice(padding - conv.padding, None, conv.dilation)
        taps = conv.weight.shape[3]
        place = weight[:, :, at, at][:, :, :taps, :taps]
        place += conv.weight.detach().double() * scale[:, None, None, None]
        shift += _double(conv.bn_bias, channels, conv) - mean * scale
    vector = first.running_mean
    assert vector is not None
    return ConvBatchNorm(
        weight=weight.to(first.weight.dtype), bn_weight=None, bn_bias=shift.to(vector.dtype),
        running_mean=torch.zeros_like(vector), running_var=torch.full_like(vector, _HALF), eps=_HALF,
        stride=first.stride, padding=padding, dilation=1,
    )  # fmt: skip


def _double(vector: Tensor | None, channels: int, conv: ConvBatchNorm, absent: float = 0.0) -> Tensor:
    if vector is None:
        return conv.weight.new_full((channels,), absent, dtype=torch.float64)
    return vector.detach().double()


def _check(convs: Sequence[ConvBatchNorm]) -> None:
    if not convs:
        raise ValueError("convs: got none, expected at least one convolution")
    for i, conv in enumerate(convs):
        check_settings(f"convs[{i}]", conv)
        if conv.running_mean is None or conv.running_var is None:
            raise ValueError(f"convs[{i}]: has no running statistics, so that it is no constant convolution")
        if conv.weight.shape[0] != convs[0].weight.shape[0]:
            raise ValueError(
                f"convs[{i}]: has {conv.weight.shape[0]} channels, expected {convs[0].weight.shape[0]} "
                "as convs[0]"
            )
        if conv.stride != convs[0].stride:
            raise ValueError(
                f"convs[{i}].stride: got {conv.stride}, expected {convs[0].stride} as convs[0] has it"
            )
        lost = _lost(conv)
        if lost != _lost(convs[0]):
            raise ValueError(
                f"convs[{i}]: its kernel takes {lost} rows and columns off the padded grid, that of convs[0] "
                f"{_lost(convs[0])}; their outputs have different grids"
            )


def _lost(conv: ConvBatchNorm) -> int:
    """Returns how much smaller than x the output is, before the stride."""
    return conv.dilation * (conv.weight.shape[3] - 1) - 2 * conv.padding
