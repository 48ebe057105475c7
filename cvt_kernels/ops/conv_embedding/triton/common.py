"""The parts that the embedding's Triton kernels share: constants, LayerNorm of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launch
from ....launch import formulas, launching
from ....launch.records import Rows

#: The most channels of a token: a row is held in the registers of a program.
MAX_CHANNELS = 4096

#: By bytes per element, the most channels of the embedding in one kernel: nothing spills with windows of
#: 7 × 7 × 3 values.
MOST_EMBEDDED = {2: 128, 4: 64}

launch.register(Rows, formulas.embed, "conv_embedding_embed")
launch.register(Rows, formulas.normalize, "conv_embedding_normalize")

#: The kernels' arguments for what else they read: bias, gamma, beta, class token and positions.
Vectors = dict[str, Tensor | None]


def has_class_token(vectors: Vectors) -> bool:
    """Returns whether a token precedes those of every image."""
    return vectors["class_token_ptr"] is not None


def configuration(kernel: str, channels: int, x: Tensor) -> Rows:
    """Returns the configuration of a kernel, ``embed`` or ``normalize``, for tensors like ``x``."""
    name, rows, chip = f"conv_embedding_{kernel}", x.numel() // x.shape[1], launching.chip(x.device)
    found: Rows = launch.configuration(name, x.dtype, (channels,), rows, chip)
    return found


class Parts(NamedTuple):
    """The split of a token's channels into parts, since Triton's tiles have powers of two."""

    channels: int  # C
    width: int  # Channels of a part, a power of two
    count: int  # Parts of a token; only where ``count · width`` is more than C, the last has empty channels
    accumulator: Any  # Triton's dtype of sums

    @classmethod
    def of(cls, channels: int, x: Tensor, *, least: int, most: int) -> Parts:
        """Returns the parts for tensors like ``x``, each of ``least`` to ``most`` channels.

        Three or five parts without empty channels beat one part with many; more parts do not.
        """
        width = min(channels & -channels, most)
        if width < least or channels > 7 * width:
            width = max(least, min(triton.next_power_of_2(channels), most))
        accumulator = tl.float64 if x.dtype == torch.float64 else tl.float32
        return cls(channels, width, -(-channels // width), accumulator)


@triton.jit
def channels_of(part, PARTS: tl.constexpr):
    """Returns the channels of a part, [width]."""
    return part * PARTS.width + tl.arange(0, PARTS.width)


@triton.jit
def within(part, mask, PARTS: tl.constexpr):
    """Returns a mask of rows, [..., 1], for the channels of a part."""
    if (part + 1) * PARTS.width > PARTS.channels:
        mask = mask & (channels_of(part, PARTS) < PARTS.channels)
    return mask


@triton.jit
def load_vector(ptr, zeros, PARTS: tl.constexpr):
    """Returns the parts of a vector (C,), each ``zeros`` + [width], with zeros beyond C; () for None.

    The shape of ``zeros``, [..., 1], gives each of some threads its own copy, which needs no exchange.
    """
    COUNT: tl.constexpr = PARTS.count
    parts = ()
    if ptr is not None:
        for i in tl.static_range(COUNT):
            c = zeros + channels_of(i, PARTS)
            parts = parts + (tl.load(ptr + c, mask=c < PARTS.channels, other=0.0).to(PARTS.accumulator),)
    return parts


@triton.jit
def layer_norm(xs, bias, gamma, beta, eps, PARTS: tl.constexpr):
    """Returns the parts of γ (x + bias − mean) / √(variance + ε) + β, for parts ``xs`` of rows, [..., width].

    ``bias``, ``gamma`` and ``beta`` are parts of vectors, or () for 0, 1 and 0.
    """
    COUNT: tl.constexpr = PARTS.count
    shifted = ()
    for i in tl.static_range(COUNT):
        x = xs[i]
        if len(bias) > 0:
            x += bias[i]
        shifted = shifted + (x,)
    total = shifted[0]
    for i in tl.static_range(1, COUNT):  # the parts first, so that lanes are added up once
        total += shifted[i]
    total = tl.sum(total, axis=-1, keep_dims=True)
    mean = total * (1.0 / PARTS.channels)
    # Without this the mean of equal numbers may be another one.
    mean += tl.fma(-mean, PARTS.channels * 1.0, total) * (1.0 / PARTS.channels)
    deviations = ()
    for i in tl.static_range(COUNT):
        deviation = shifted[i] - mean
        if (i + 1) * PARTS.width > PARTS.channels:
            deviation = tl.where(channels_of(i, PARTS) < PARTS.channels, deviation, 0.0)
        deviations = deviations + (deviation,)
    squares = deviations[0] * deviations[0]
    for i in tl.static_range(1, COUNT):
        squares += deviations[i] * deviations[i]
    variance = tl.sum(squares, axis=-1, keep_dims=True) * (1.0 / PARTS.channels)
    scale = 1.0 / tl.sqrt(variance + eps)
    ys = ()
    for i in tl.static_range(COUNT):
        y = deviations[i] * scale
        if len(gamma) > 0:
            y *= gamma[i]
        if len(beta) > 0:
            y += beta[i]
        ys = ys + (y,)
    return ys


@triton.jit
def add_position(y, positions_ptr, offsets, mask, PARTS: tl.constexpr):
    """Returns the sum of ``y`` and positions at ``offsets``; ``y`` itself without positions."""
    if positions_ptr is not None:
        y += tl.load(positions_ptr + offsets, mask=mask, other=0.0).to(PARTS.accumulator)
    return y


@triton.jit
def store_class_token(out_ptr, class_token_ptr, positions_ptr, PARTS: tl.constexpr):
    """Stores the class token (C,), with the first of the positions, at ``out_ptr``."""
    COUNT: tl.constexpr = PARTS.count
    for i in tl.static_range(COUNT):
        c = channels_of(i, PARTS)
        mask = c < PARTS.channels
        token = tl.load(class_token_ptr + c, mask=mask, other=0.0).to(PARTS.accumulator)
        token = add_position(token, positions_ptr, c, mask, PARTS)
        tl.store(out_ptr + c, token.to(out_ptr.dtype.element_ty), mask=mask)
