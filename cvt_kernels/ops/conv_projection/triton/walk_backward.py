"""The backward kernels of the projection as walks: gradients of parameters, of convolutions and of the input.

For y = γ (conv(x) − mean) · rstd + β and the statistics of the batch, with n values per channel:
dconv = γ · rstd · (dy − Σdy / n − (conv(x) − mean) · rstd · Σdy·x̂ / n); with given statistics it is γ · rstd · dy.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .... import machine
from ...triton_launch import accumulator_dtype
from .common import Geometry
from .walk import (
    WalkPlan,
    add_row,
    column_masks,
    load_at,
    load_vector,
    load_weights,
    locate_walk,
    output_rows,
    output_size,
    rows_of,
    store_row,
    walk_start,
    walk_step,
    widen,
)

_SIZES = ("batch", "groups", "height", "width", "strips", "strip_rows", "col_blocks", "regions", "stride_b")

# Sums over the batch --------------------------------------------------------------------------------------


@triton.jit
def _zeros(COUNT: tl.constexpr, WALK: tl.constexpr):
    """Returns COUNT tiles [P, BC] of zeros as a tuple."""
    P: tl.constexpr = WALK.pairs
    BC: tl.constexpr = WALK.channels
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([P, BC], WALK.accumulator),)
    return tiles


@triton.jit
def _store_region(partial_ptr, plane, tiles, place, CHANNELS: tl.constexpr):
    """Writes the sums of tiles over their lanes to this region of (tiles, regions, C), ``plane`` elements apart."""
    partial_ptr += place.region.to(tl.int64) * CHANNELS
    for t in tl.static_range(len(tiles)):
        total = tl.sum(tiles[t], axis=0, keep_dims=True)
        tl.store(partial_ptr + t * plane + place.c, total, mask=place.c_mask)


@triton.jit
def _inverse_deviation(var_ptr, eps, place, WALK: tl.constexpr):
    """Returns 1 / √(var + ε), [P, BC]."""
    return 1.0 / tl.sqrt(load_vector(var_ptr, place, WALK) + eps)


@triton.jit
def _first_output(ptr, image, height, width, STRIDE: tl.constexpr, CLASS_TOKEN: tl.constexpr, CHANNELS: tl.constexpr):
    """Returns the pointer to an image's first output pixel in (B, Tᵢ, C), after the class token."""
    pixels = output_size(height, STRIDE) * output_size(width, STRIDE)
    return ptr + (image * (pixels + CLASS_TOKEN) + CLASS_TOKEN) * CHANNELS


@triton.jit
def _add_products(sums, convs, dys):
    """Returns the sums (Σdy, Σdy·(conv − mean)) with those of some outputs added."""
    sum_dy, sum_product = sums
    for n in tl.static_range(len(convs)):
        sum_dy += dys[n]
        sum_product = tl.fma(dys[n], convs[n], sum_product)
    return sum_dy, sum_product


@triton.jit(do_not_specialize=_SIZES)
def _conv_projection_walk_bwd_sums_kernel(
    x_ptr, w_ptrs, dy_ptrs, mean_ptrs, var_ptrs, epss, partial_ptr,
    batch, groups, height, width, strips, strip_rows, col_blocks, regions, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, CLASS_TOKEN: tl.constexpr, STRIDES: tl.constexpr,
    WALK: tl.constexpr,
):  # fmt: skip
    """Writes Σdy and Σdy·x̂ of every branch over a strip of some images: partial (branches, 2, regions, C)."""
    place = locate_walk(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, WALK)
    starts = ()
    taps = ()
    totals = ()
    for i in tl.static_range(len(STRIDES)):
        starts = starts + (-load_vector(mean_ptrs[i], place, WALK),)
        taps = taps + (load_weights(w_ptrs[i], place, WALK),)
        totals = totals + (_zeros(2, WALK),)
    for n in range(place.images):
        image = place.first_image + n * groups
        rows = rows_of(x_ptr + image * stride_b + CLASS_TOKEN * STEP, place, height, width, STEP, WALK)
        dys = ()
        for i in tl.static_range(len(STRIDES)):
            dy_ptr = _first_output(dy_ptrs[i], image, height, width, STRIDES[i], CLASS_TOKEN, CHANNELS)
            dys = dys + (output_rows(dy_ptr, place, height, width, STRIDES[i], False, CHANNELS, WALK),)
        sums, raw = walk_start(rows, place.first_row, starts, taps, STEP, STRIDES, WALK)
        for row in range(place.first_row, place.end_row, 2):
            upper, lower, sums, raw = walk_step(sums, raw, rows, row, starts, taps, STEP, STRIDES, WALK)
            added = ()
            for i in tl.static_range(len(STRIDES)):
                dy = widen(load_at(dys[i], row // STRIDES[i], True, CHANNELS, WALK), WALK)
                total = _add_products(totals[i], upper[i], dy)
                if STRIDES[i] == 1:
                    dy = widen(load_at(dys[i], row + 1, row + 1 < height, CHANNELS, WALK), WALK)
                    total = _add_products(total, lower[i], dy)
                added = added + (total,)
            totals = added
    plane = regions.to(tl.int64) * CHANNELS
    for i in tl.static_range(len(STRIDES)):
        rstd = _inverse_deviation(var_ptrs[i], epss[i], place, WALK)
        tiles = (totals[i][0], totals[i][1] * rstd)
        _store_region(partial_ptr + 2 * i * plane, plane, tiles, place, CHANNELS)


def walk_backward_sums(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], means: Sequence[Tensor],
    variances: Sequence[Tensor], dys: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Returns Σdy and Σdy·x̂ of every branch and region: (2 · branches, regions, C)."""
    plan = WalkPlan.of("walk_bwd_sums", x, geometry, (*weights, *dys))
    partial = x.new_empty(2 * len(weights), plan.regions, x.shape[2], dtype=accumulator_dtype(x))
    machine.launch(
        _conv_projection_walk_bwd_sums_kernel, (plan.programs,), on=x, options=plan.options,
        x_ptr=x, w_ptrs=tuple(weights), dy_ptrs=tuple(dys), mean_ptrs=tuple(means),
        var_ptrs=tuple(variances), epss=geometry.epss, partial_ptr=partial, regions=plan.regions,
        stride_b=x.stride(0), STEP=x.stride(1), **plan.arguments,
    )  # fmt: skip
    return partial
