"""The forward kernel of ``depthwise_conv_gelu`` and its launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ....launch import launching
from ...conv_projection.triton.common import maybe_contiguous
from ...conv_projection.triton.sliding import (
    SIZES,
    add_row,
    column_limits,
    load_above,
    load_at,
    load_vector,
    load_weights,
    locate_strip,
    rows_of,
    store_row,
    widen,
)
from ...graph_operators import launcher
from ...triton_gelu import activate_half
from ...triton_launch import grid_dependency_synchronize
from .common import ConvGeluTiling


@triton.jit
def load_halved(w_ptr, bias_ptr, place, LANES: tl.constexpr, SPEC: tl.constexpr):
    """Returns half the bias, the initial sum, and half of each tap."""
    P: tl.constexpr = LANES.pairs
    BC: tl.constexpr = LANES.channels
    start = tl.zeros([P, BC], LANES.accumulator)
    if SPEC.has_bias:
        start = load_vector(bias_ptr, place, LANES) * 0.5
    weights = load_weights(w_ptr, place, LANES)
    taps = ()
    for t in tl.static_range(9):
        taps = taps + (weights[t] * 0.5,)
    return start, taps


@triton.jit
def _activated(halves, SPEC: tl.constexpr):
    """Returns gelu(2 · h) for each tile h."""
    APPROXIMATE: tl.constexpr = SPEC.approximate
    tiles = ()
    for n in tl.static_range(len(halves)):
        tiles = tiles + (activate_half(halves[n], APPROXIMATE, SPEC.is_half, SPEC.hardware),)
    return tiles


@triton.jit
def _begin(start, taps, above, here):
    """Returns the sums of two rows of outputs, begun by the rows of pixels ``above`` and ``here``."""
    upper = add_row(add_row((start, start), above, taps, 0), here, taps, 1)
    return upper, add_row((start, start), here, taps, 0)


@triton.jit(do_not_specialize=SIZES)
def _depthwise_conv_gelu_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr,
    batch, groups, height, width, strips, strip_rows, col_blocks, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of a strip of some images."""
    grid_dependency_synchronize()
    place = locate_strip(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, LANES)
    start, taps = load_halved(w_ptr, bias_ptr, place, LANES, SPEC)
    limits = column_limits(place.col, width, height, place.c_mask, 0, 2)
    lane = place.col * CHANNELS + place.c
    for n in range(place.images):
        image = place.first_image + n * groups
        rows = rows_of(x_ptr + image * stride_b, place, height, width, STEP, LANES)
        y = y_ptr + image * (height * width) * CHANNELS
        above = widen(load_above(rows, place.first_row, STEP, LANES), LANES)
        here = widen(load_at(rows, place.first_row, STEP, LANES), LANES)
        upper, lower = _begin(start, taps, above, here)
        for row in range(place.first_row, place.end_row, 2):
            below_raw = load_at(rows, row + 1, STEP, LANES)
            last_raw = load_at(rows, row + 2, STEP, LANES)
            below = widen(below_raw, LANES)
            last = widen(last_raw, LANES)
            upper = _activated(add_row(upper, below, taps, 2), SPEC)
            lower = _activated(add_row(add_row(lower, below, taps, 1), last, taps, 2), SPEC)
            y_row = y + row * width * CHANNELS
            store_row(y_row, lane, upper, limits, row, CHANNELS)
            store_row(y_row + width * CHANNELS, lane, lower, limits, row + 1, CHANNELS)
            upper, lower = _begin(start, taps, below, last)


def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@launcher("triton_depthwise_conv_gelu", _like)
def conv_gelu_forward(
    x: Tensor, grid: list[int], weight: Tensor, bias: Tensor | None, approximate: str
) -> Tensor:
    """Returns y for tokens ``x`` and contiguous parameters of the same dtype."""
    x = maybe_contiguous(x)
    tiling = ConvGeluTiling.of("fwd", x, grid, approximate, (weight,), has_bias=bias is not None)
    y = x.new_empty(x.shape)
    launching.launch(
        _depthwise_conv_gelu_fwd_kernel, (tiling.sliding.programs,), on=x, options=tiling.sliding.options,
        x_ptr=x, w_ptr=weight, bias_ptr=weight if bias is None else bias, y_ptr=y, **tiling.others,
    )  # fmt: skip
    return y
