"""Convolutional projection by a model's own modules, one for each convolution and each BatchNorm."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...records import Branch, ConvBatchNorm, trains
from . import conv_projection


def project(x: Tensor, grid: tuple[int, int], branches: Sequence[Any]) -> tuple[Tensor, ...]:
    """Computes BatchNorm(convolution(x)) for every branch, each BatchNorm in its own mode.

    A branch is a pair of the depthwise convolution and the BatchNorm (of Q, of K or of V), or a list of such
    pairs, whose results are summed. For x, the grid and the results see :func:`cvt_kernels.conv_projection`.
    """
    modes = {trains(bn) for branch in branches for _, bn in _pairs(branch)}
    if len(modes) == 1:
        convs = tuple([branch_of(branch) for branch in branches])
        return conv_projection(x, grid, convs, training=modes.pop())
    # Only some of the BatchNorms are frozen.
    return tuple(_sum(x, grid, _pairs(branch)) for branch in branches)


def _pairs(branch: Any) -> Sequence[Any]:
    return branch if isinstance(branch, list) else (branch,)


def branch_of(branch: Any) -> Branch:
    """Returns the live tensors of a convolution and its BatchNorm, or of a list of such pairs."""
    if isinstance(branch, list) and len(branch) != 1:
        return tuple([ConvBatchNorm.from_modules(*pair) for pair in branch])
    return ConvBatchNorm.from_modules(*(branch[0] if isinstance(branch, list) else branch))


def _sum(x: Tensor, grid: tuple[int, int], pairs: Sequence[Any]) -> Tensor:
    """Returns the sum of convolutions whose BatchNorms are in different modes, and the class token once."""
    first, *others = (
        conv_projection(x, grid, (ConvBatchNorm.from_modules(conv, bn),), training=trains(bn))[0]
        for conv, bn in pairs
    )
    class_tokens = x.shape[1] - grid[0] * grid[1]
    spatial = functools.reduce(torch.add, (y[:, class_tokens:] for y in others), first[:, class_tokens:])
    return torch.cat([first[:, :class_tokens], spatial], dim=1)
