"""The forward kernels of the projection as walks: the normalized outputs, and the statistics of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .... import machine
from .common import Geometry
from .walk import (
    WalkPlan,
    column_masks,
    load_vector,
    load_weights,
    locate_walk,
    rows_of,
    store_row,
    walk_start,
    walk_step,
)

_SIZES = ("batch", "groups", "height", "width", "strips", "strip_rows", "col_blocks", "stride_b")

# The outputs ----------------------------------------------------------------------------------------------


@triton.jit
def _folded(w_ptr, gamma_ptr, beta_ptr, mean_ptr, var_ptr, eps, place, WALK: tl.constexpr):
    """Returns what a sum starts with, and the taps, with BatchNorm folded into them."""
    scale = load_vector(gamma_ptr, place, WALK) / tl.sqrt(load_vector(var_ptr, place, WALK) + eps)
    start = load_vector(beta_ptr, place, WALK) - load_vector(mean_ptr, place, WALK) * scale
    weights = load_weights(w_ptr, place, WALK)
    taps = ()
    for t in tl.static_range(9):
        taps = taps + (weights[t] * scale,)
    return start, taps


@triton.jit
def copy_class_token(x_ptr, y_ptr, place, WALK: tl.constexpr):
    """Copies the class token of an image, in the walk of its first strip and columns."""
    mask = (place.first_row == 0) & (place.col == 0) & place.c_mask
    lane = place.c + place.col  # of which only the lane at column 0 counts
    tl.store(y_ptr + lane, tl.load(x_ptr + lane, mask=mask), mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def _conv_projection_walk_fwd_kernel(
    x_ptr, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, y_ptrs, epss,
    batch, groups, height, width, strips, strip_rows, col_blocks, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, CLASS_TOKEN: tl.constexpr, STRIDES: tl.constexpr,
    WALK: tl.constexpr,
):  # fmt: skip
    """Writes every branch of a strip of some images, normalized by the given statistics, and the class token."""
    place = locate_walk(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, WALK)
    starts = ()
    taps = ()
    for i in tl.static_range(len(STRIDES)):
        start, folded = _folded(
            w_ptrs[i], gamma_ptrs[i], beta_ptrs[i], mean_ptrs[i], var_ptrs[i], epss[i], place, WALK
        )
        starts = starts + (start,)
        taps = taps + (folded,)
    masks = column_masks(place.col, width, place.c_mask, 0, 2)
    half_height = (height + 1) // 2
    half_width = (width + 1) // 2
    for n in range(place.images):
        image = place.first_image + n * groups
        x = x_ptr + image * stride_b
        whole = (image * (height * width + CLASS_TOKEN)) * CHANNELS
        halved = (image * (half_height * half_width + CLASS_TOKEN)) * CHANNELS
        if CLASS_TOKEN:
            for i in tl.static_range(len(STRIDES)):
                copy_class_token(x, y_ptrs[i] + (whole if STRIDES[i] == 1 else halved), place, WALK)
        rows = rows_of(x + CLASS_TOKEN * STEP, place, height, width, STEP, WALK)
        sums, raw = walk_start(rows, place.first_row, starts, taps, STEP, STRIDES, WALK)
        for row in range(place.first_row, place.end_row, 2):
            upper, lower, sums, raw = walk_step(sums, raw, rows, row, starts, taps, STEP, STRIDES, WALK)
            for i in tl.static_range(len(STRIDES)):
                y = y_ptrs[i] + CLASS_TOKEN * CHANNELS
                if STRIDES[i] == 1:
                    y += whole + row * width * CHANNELS
                    lane = place.col * CHANNELS + place.c
                    store_row(y, lane, upper[i], masks, True, CHANNELS)
                    store_row(y + width * CHANNELS, lane, lower[i], masks, row + 1 < height, CHANNELS)
                else:
                    y += halved + row // 2 * half_width * CHANNELS
                    store_row(y, place.col // 2 * CHANNELS + place.c, upper[i], masks, True, CHANNELS)


def walk_forward(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], gammas: Sequence[Tensor],
    betas: Sequence[Tensor], means: Sequence[Tensor], variances: Sequence[Tensor], outs: Sequence[Tensor],
) -> None:  # fmt: skip
    """Writes every branch (B, Tᵢ, C) to ``outs``, normalized by the given statistics (C,)."""
    plan = WalkPlan.of("walk_fwd", x, geometry, weights)
    machine.launch(
        _conv_projection_walk_fwd_kernel, (plan.programs,), on=x, options=plan.options,
        x_ptr=x, w_ptrs=tuple(weights), gamma_ptrs=tuple(gammas), beta_ptrs=tuple(betas),
        mean_ptrs=tuple(means), var_ptrs=tuple(variances), y_ptrs=tuple(outs), epss=geometry.epss,
        stride_b=x.stride(0), STEP=x.stride(1), **plan.arguments,
    )  # fmt: skip
