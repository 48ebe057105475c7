"""The forward kernel of ``depthwise_conv_gelu`` and its launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .... import machine
from ...conv_projection.triton.walk import (
    column_limits,
    load_vector,
    load_weights,
    locate_walk,
    rows_of,
    store_row,
    walk_start,
    walk_step,
)
from ...triton_gelu import activate_half
from .common import ConvPlan

SIZES = ("batch", "groups", "height", "width", "strips", "strip_rows", "col_blocks", "stride_b", "regions")


@triton.jit
def load_halved(w_ptr, bias_ptr, place, WALK: tl.constexpr, SPEC: tl.constexpr):
    """Returns half the bias, with which a sum starts, and half of each tap."""
    if SPEC.has_bias:
        start = load_vector(bias_ptr, place, WALK) * 0.5
    else:
        start = tl.zeros([WALK.pairs, WALK.channels], WALK.accumulator)
    weights = load_weights(w_ptr, place, WALK)
    taps = ()
    for t in tl.static_range(9):
        taps = taps + (weights[t] * 0.5,)
    return start, taps


@triton.jit
def _activated(halves, SPEC: tl.constexpr):
    """Returns GELU of twice some tiles."""
    tiles = ()
    for n in tl.static_range(len(halves)):
        tiles = tiles + (activate_half(halves[n], SPEC.approximate, SPEC.is_half, SPEC.hardware),)
    return tiles


@triton.jit(do_not_specialize=SIZES)
def _depthwise_conv_gelu_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr,
    batch, groups, height, width, strips, strip_rows, col_blocks, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, STRIDES: tl.constexpr, WALK: tl.constexpr,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of a strip of some images."""
    place = locate_walk(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, WALK)
    start, taps = load_halved(w_ptr, bias_ptr, place, WALK, SPEC)
    limits = column_limits(place.col, width, height, place.c_mask, 0, 2)
    lane = place.col * CHANNELS + place.c
    for n in range(place.images):
        image = place.first_image + n * groups
        rows = rows_of(x_ptr + image * stride_b, place, height, width, STEP, WALK)
        y = y_ptr + image * (height * width) * CHANNELS
        sums, raw = walk_start(rows, place.first_row, (start,), (taps,), STEP, STRIDES, WALK)
        for row in range(place.first_row, place.end_row, 2):
            upper, lower, sums, raw = walk_step(sums, raw, rows, row, (start,), (taps,), STEP, STRIDES, WALK)
            y_row = y + row * width * CHANNELS
            store_row(y_row, lane, _activated(upper[0], SPEC), limits, row, CHANNELS)
            store_row(y_row + width * CHANNELS, lane, _activated(lower[0], SPEC), limits, row + 1, CHANNELS)


def conv_gelu_forward(
    x: Tensor, grid: tuple[int, int], weight: Tensor, bias: Tensor | None, approximate: str
) -> Tensor:
    """Returns y for tokens ``x`` whose channels are adjacent, and contiguous parameters of their dtype."""
    plan = ConvPlan.of("fwd", x, grid, weight, approximate, has_bias=bias is not None)
    y = x.new_empty(x.shape)
    machine.launch(
        _depthwise_conv_gelu_fwd_kernel, (plan.walk.programs,), on=x, options=plan.walk.options,
        x_ptr=x, w_ptr=weight, bias_ptr=weight if bias is None else bias, y_ptr=y, **plan.others,
    )  # fmt: skip
    return y


def planned_forward(
    x: Tensor, grid: tuple[int, int], weight: Tensor, bias: Tensor | None, approximate: str
) -> machine.PlannedLaunch:
    """Returns the launch of :func:`conv_gelu_forward` for tensors like these, which takes x, w, bias and y."""
    plan = ConvPlan.of("fwd", x, grid, weight, approximate, has_bias=bias is not None)
    return machine.PlannedLaunch(
        _depthwise_conv_gelu_fwd_kernel, (plan.walk.programs,), plan.walk.options, plan.others
    )
