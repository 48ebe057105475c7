"""The convolutional projection as models hold it: one module for each convolution and each BatchNorm."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...reference import ConvBatchNorm
from . import conv_projection


def project(x: Tensor, grid: tuple[int, int], branches: Sequence[Any]) -> tuple[Tensor, ...]:
    """Computes BatchNorm(convolution(x)) for every branch, each BatchNorm in the mode that it is in.

    Args:
        x: Tokens ``(B, T, C)``.
        grid: ``(H, W)`` of the spatial tokens.
        branches: The depthwise convolution and the BatchNorm of Q, of K and of V; or a list of such pairs,
            whose results are summed.

    Returns:
        One tensor ``(B, Tᵢ, C)`` per branch, see :func:`cvt_kernels.conv_projection`, which also raises.
    """
    pairs = [branch if isinstance(branch, list) else [branch] for branch in branches]
    convs = [tuple([ConvBatchNorm.from_modules(*pair) for pair in branch]) for branch in pairs]
    modes = [[bn.training for _, bn in branch] for branch in pairs]
    if len({mode for branch in modes for mode in branch}) == 1:
        whole = tuple([conv[0] if len(conv) == 1 else conv for conv in convs])
        return conv_projection(x, grid, whole, training=modes[0][0])
    # Somebody froze only some of them.
    return tuple(_sum(x, grid, *branch) for branch in zip(convs, modes, strict=True))


def _sum(x: Tensor, grid: tuple[int, int], convs: Sequence[ConvBatchNorm], modes: Sequence[bool]) -> Tensor:
    """Returns the sum of convolutions whose BatchNorms are in different modes, and the class token once."""
    first, *others = (
        conv_projection(x, grid, [conv], training=mode)[0] for conv, mode in zip(convs, modes, strict=True)
    )
    class_tokens = x.shape[1] - grid[0] * grid[1]
    spatial = functools.reduce(torch.add, (y[:, class_tokens:] for y in others), first[:, class_tokens:])
    return torch.cat([first[:, :class_tokens], spatial], dim=1)
