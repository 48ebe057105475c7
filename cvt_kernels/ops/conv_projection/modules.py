"""The convolutional projection as models hold it: one module for each convolution and each BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...reference import ConvBatchNorm
from . import conv_projection


def project(
    x: Tensor, grid: tuple[int, int], branches: Sequence[tuple[nn.Conv2d, nn.BatchNorm2d | nn.SyncBatchNorm]]
) -> tuple[Tensor, ...]:
    """Computes BatchNorm(convolution(x)) for every branch, each BatchNorm in the mode that it is in.

    Args:
        x: Tokens ``(B, T, C)``.
        grid: ``(H, W)`` of the spatial tokens.
        branches: The depthwise convolution and the BatchNorm of Q, of K and of V.

    Returns:
        One tensor ``(B, Tᵢ, C)`` per branch, see :func:`cvt_kernels.conv_projection`, which also raises.
    """
    convs = [ConvBatchNorm.from_modules(conv, bn) for conv, bn in branches]
    modes = [bn.training for _, bn in branches]
    if len(set(modes)) == 1:
        return conv_projection(x, grid, convs, training=modes[0])
    # Somebody froze only some of the three.
    return tuple(
        conv_projection(x, grid, [conv], training=mode)[0] for conv, mode in zip(convs, modes, strict=True)
    )
