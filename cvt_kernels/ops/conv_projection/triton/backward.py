"""The kernels of the projection's backward, and their launches.

With y = γ x̂ + β, x̂ = (conv(x) − mean) · rstd and n values per channel, the gradient of the convolution is
dconv = γ · rstd · (dy − Σdy / n − x̂ · Σdy·x̂ / n) with the statistics of the batch, else γ · rstd · dy.

Gradients dy of outputs are (B, Tᵢ, C), class token first; dconv is (B, Hᵢ·Wᵢ, C).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import launching
from ...graph_operators import launcher
from ...triton_launch import accumulator_dtype, grid_dependency_synchronize
from .common import Geometry, Parameters, Tile, configuration, load_partial, maybe_contiguous
from .sliding import (
    MAX_BRANCHES,
    SIZES,
    SlidingTiling,
    add_row,
    column_limits,
    load_above,
    load_at,
    load_output_above,
    load_outputs,
    load_scaled,
    load_vector,
    load_weights,
    locate_strip,
    output_lanes,
    output_size,
    rows_of,
    sliding_step,
    start_sums,
    store_row,
    widen,
)

# Sums over regions ----------------------------------------------------------------------------------------


@triton.jit
def _sum_regions_kernel(
    partial_ptr, sum_ptr, channels, elements, SIZES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Sums a tensor (rows, regions, C) over regions; each group of n rows becomes (C, n), flat.

    A program sums some channels of a row. SIZES are the groups. A row has so many elements, regions · C:
    Triton compiles the same for any number of regions.
    """
    grid_dependency_synchronize()
    P: tl.constexpr = TILE.pixels
    BC: tl.constexpr = TILE.channels
    blocks = tl.cdiv(channels, BC)
    row = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    c_mask = c < channels
    partial_ptr += row.to(tl.int64) * elements
    regions = elements // channels
    sums = tl.zeros([P, BC], TILE.accumulator)
    for number in range(0, regions, P):
        number += tl.arange(0, P)
        sums += load_partial(partial_ptr, number, c, c_mask, regions, channels)
    place = c
    start = 0
    for i in tl.static_range(len(SIZES)):
        is_own = (row >= start) & (row < start + SIZES[i])
        place = tl.where(is_own, start * channels + c * SIZES[i] + row - start, place)
        start += SIZES[i]
    tl.store(sum_ptr + place, tl.sum(sums, axis=0).to(sum_ptr.dtype.element_ty), mask=c_mask)


def sum_regions(partial: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns (rows, regions, C) summed over regions in a fixed order: (C, n) per group of n rows, flat."""
    rows, regions, channels = partial.shape
    total = partial.new_empty(rows * channels, dtype=dtype)
    config = configuration("sum_regions", partial)
    launching.launch(
        _sum_regions_kernel, (-(-channels // config.channels) * rows,), on=partial, options=config.options,
        partial_ptr=partial, sum_ptr=total, channels=channels, elements=regions * channels,
        SIZES=tuple(sizes), TILE=Tile.of(config, partial.dtype),
    )  # fmt: skip
    return total


# Sums over the batch --------------------------------------------------------------------------------------


@triton.jit
def zeros(COUNT: tl.constexpr, LANES: tl.constexpr):
    """Returns COUNT tiles [P, BC] of zeros as a tuple."""
    P: tl.constexpr = LANES.pairs
    BC: tl.constexpr = LANES.channels
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros([P, BC], LANES.accumulator),)
    return tiles


@triton.jit
def channels_of(region, CHANNELS: tl.constexpr, LANES: tl.constexpr):
    """Recomputes this program's channels [1, BC]: there are no registers to keep them."""
    BC: tl.constexpr = LANES.channels
    BLOCKS: tl.constexpr = (CHANNELS + BC - 1) // BC
    return tl.program_id(0) * BC - region * (BLOCKS * BC) + tl.arange(0, BC)[None, :]


@triton.jit
def _first_output(
    ptr, image, height, width, STRIDE: tl.constexpr, CLASS_TOKEN: tl.constexpr, CHANNELS: tl.constexpr
):
    """Returns the pointer to an image's first output pixel in (B, Tᵢ, C), after the class token."""
    pixels = output_size(height, STRIDE) * output_size(width, STRIDE)
    return ptr + (image * (pixels + CLASS_TOKEN) + CLASS_TOKEN) * CHANNELS


@triton.jit
def _load_dys(dys, rows, row, width, STRIDES: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr):
    """Returns every branch's raw dys at ``row`` and ``row`` + 1 of the input, a tuple per row.

    A branch of stride 2 has only the first.
    """
    raws = ()
    for i in tl.static_range(len(STRIDES)):
        raw = ()
        for r in tl.static_range(3 - STRIDES[i]):
            raw = raw + (
                load_outputs(dys[i], row + r, width, rows.limits, STRIDES[i], False, CHANNELS, LANES),
            )
        raws = raws + (raw,)
    return raws


@triton.jit
def _add_products(sums, convs, dys):
    """Adds some outputs to the sums (Σdy, Σdy·(conv − mean))."""
    sum_dy, sum_product = sums
    for n in tl.static_range(len(convs)):
        sum_dy += dys[n]
        sum_product = tl.fma(dys[n], convs[n], sum_product)
    return sum_dy, sum_product


@triton.jit(do_not_specialize=SIZES)
def _conv_projection_sliding_bwd_sums_kernel(
    x_ptr, w_ptrs, dy_ptrs, mean_ptrs, var_ptrs, epss, partial_ptr,
    batch, groups, height, width, strips, strip_rows, col_blocks, regions, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, CLASS_TOKEN: tl.constexpr, STRIDES: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Writes Σdy and Σdy·x̂ of every branch over a strip of some images: partial (branches, 2, regions, C)."""
    grid_dependency_synchronize()
    place = locate_strip(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, LANES)
    starts = ()
    taps = ()
    totals = ()
    for i in tl.static_range(len(STRIDES)):
        starts = starts + (-load_vector(mean_ptrs[i], place, LANES),)
        taps = taps + (load_weights(w_ptrs[i], place, LANES),)
        totals = totals + (zeros(2, LANES),)
    for n in range(place.images):
        image = place.first_image + n * groups
        rows = rows_of(x_ptr + image * stride_b + CLASS_TOKEN * STEP, place, height, width, STEP, LANES)
        dys = ()
        for i in tl.static_range(len(STRIDES)):
            dy_ptr = _first_output(dy_ptrs[i], image, height, width, STRIDES[i], CLASS_TOKEN, CHANNELS)
            dys = dys + (output_lanes(dy_ptr, place, STRIDES[i], False, CHANNELS, LANES),)
        above = widen(load_above(rows, place.first_row, STEP, LANES), LANES)
        sums = start_sums(starts, above, taps, STRIDES)
        raw = load_at(rows, place.first_row, STEP, LANES)
        for row in range(place.first_row, place.end_row, 2):
            raw_dys = _load_dys(dys, rows, row, width, STRIDES, CHANNELS, LANES)
            upper, lower, sums, raw = sliding_step(
                sums, raw, rows, row, starts, taps, STEP, STRIDES, LANES, ()
            )
            added = ()
            for i in tl.static_range(len(STRIDES)):
                total = _add_products(totals[i], upper[i], widen(raw_dys[i][0], LANES))
                if STRIDES[i] == 1:
                    total = _add_products(total, lower[i], widen(raw_dys[i][1], LANES))
                added = added + (total,)
            totals = added
    plane = tl.cast(regions, tl.int64) * CHANNELS
    partial_ptr += place.region.to(tl.int64) * CHANNELS
    c = channels_of(place.region, CHANNELS, LANES)
    for i in tl.static_range(len(STRIDES)):
        sum_dy, sum_product = totals[i]
        var = tl.load(var_ptrs[i] + c, mask=c < CHANNELS, other=1.0).to(LANES.accumulator)
        sum_dy_xhat = tl.sum(sum_product, axis=0, keep_dims=True) / tl.sqrt(var + epss[i])
        first = partial_ptr + 2 * i * plane + c
        tl.store(first, tl.sum(sum_dy, axis=0, keep_dims=True), mask=c < CHANNELS)
        tl.store(first + plane, sum_dy_xhat, mask=c < CHANNELS)


def _sums(
    x: Tensor, geometry: Geometry, epss: Sequence[float], parameters: Parameters, dys: Sequence[Tensor]
) -> Tensor:
    """Returns Σdy and Σdy·x̂ of every branch and region: (2 · branches, regions, C)."""
    weights, _, _, means, variances = map(tuple, parameters)
    tiling = SlidingTiling.of("sliding_bwd_sums", x, geometry, (*weights, *dys))
    registers = tiling.options["maxnreg"]  # which the following would spill
    if len(weights) == MAX_BRANCHES and geometry.strides.count(1) != 1:
        registers = max(registers, 168)
    elif x.dtype == torch.float16:
        registers = max(registers, 136)
    tiling = tiling._replace(options=tiling.options | {"maxnreg": registers})
    partial = x.new_empty(2 * len(weights), tiling.regions, x.shape[2], dtype=accumulator_dtype(x))
    tiling.launch(
        _conv_projection_sliding_bwd_sums_kernel, x, w_ptrs=weights, dy_ptrs=tuple(dys),
        mean_ptrs=means, var_ptrs=variances, epss=tuple(epss), partial_ptr=partial, regions=tiling.regions,
    )  # fmt: skip
    return partial


# The convolutions -----------------------------------------------------------------------------------------


@triton.jit
def _affine(
    w_ptr, gamma_ptr, mean_ptr, var_ptr, eps, sums_ptr, inverse_count, place,
    CHANNELS: tl.constexpr, BATCH_STATS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Returns (scale, start, taps) such that dconv = scale · dy + start + convolution with these taps.

    With given statistics, start is 0 and there are no taps.
    """
    rstd = 1.0 / tl.sqrt(load_vector(var_ptr, place, LANES) + eps)
    scale = load_vector(gamma_ptr, place, LANES) * rstd
    (start,) = zeros(1, LANES)
    taps = ()
    if BATCH_STATS:
        slope = load_vector(sums_ptr + CHANNELS, place, LANES) * inverse_count * rstd * scale
        start = load_vector(mean_ptr, place, LANES) * slope
        start -= load_vector(sums_ptr, place, LANES) * inverse_count * scale
        taps = load_scaled(w_ptr, place, -slope, LANES)
    return scale, start, taps


@triton.jit
def _load_step(
    rows, dys, row, width,
    STEP: tl.constexpr, STRIDES: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Loads the step at ``row``: raw pixels at ``row`` + 1 and ``row`` + 2, and the raw dys."""
    next_raw = load_at(rows, row + 1, STEP, LANES)
    last_raw = load_at(rows, row + 2, STEP, LANES)
    return next_raw, last_raw, _load_dys(dys, rows, row, width, STRIDES, CHANNELS, LANES)


@triton.jit
def _gradients_of_outputs(window, raw_dys, limits, row, scale, start, taps, LANES: tl.constexpr):
    """Returns dconv of a lane's outputs of one row as a tuple, zeros where there are none.

    ``window`` are the three rows of four pixels around them, ``row`` is the row of the input that they belong
    to, ``limits`` are the input's; scale, start and taps are of :func:`_affine`.
    """
    dys = widen(raw_dys, LANES)
    sums = ()
    for n in tl.static_range(len(dys)):
        sums = sums + (tl.fma(dys[n], scale, start),)
    if len(taps) > 0:
        for a in tl.static_range(3):
            sums = add_row(sums, window[a], taps, a)
    dconvs = ()
    for n in tl.static_range(len(sums)):
        dconvs = dconvs + (tl.where(row < limits[n], sums[n], 0.0),)
    return dconvs


@triton.jit
def add_weight_gradients(dws, window, dconvs):
    """Adds some outputs to the 9 sums of a weight's gradient."""
    added = ()
    for t in tl.static_range(9):
        total = dws[t]
        for n in tl.static_range(len(dconvs)):
            total = tl.fma(window[t // 3][n + t % 3], dconvs[n], total)
        added = added + (total,)
    return added


@triton.jit
def store_weight_gradients(partial_ptr, plane, dws, c, CHANNELS: tl.constexpr, LANES: tl.constexpr):
    """Writes the sums of 9 tiles over their lanes, ``plane`` elements apart.

    Eight of them are one tile [P, BC, 8]: one reduction runs and compiles faster than eight.
    """
    P: tl.constexpr = LANES.pairs
    BC: tl.constexpr = LANES.channels
    even = tl.join(tl.join(dws[0], dws[4]), tl.join(dws[2], dws[6]))
    odd = tl.join(tl.join(dws[1], dws[5]), tl.join(dws[3], dws[7]))
    totals = tl.sum(tl.join(even, odd).reshape([P, BC, 8]), axis=0)
    lane = c.reshape([BC, 1]) + tl.arange(0, 8)[None, :] * plane
    tl.store(partial_ptr + lane, totals, mask=(c < CHANNELS).reshape([BC, 1]))
    last = tl.sum(dws[8], axis=0, keep_dims=True)
    tl.store(partial_ptr + 8 * plane + c, last, mask=c < CHANNELS)


@triton.jit(do_not_specialize=SIZES)
def _conv_projection_sliding_bwd_conv_kernel(
    x_ptr, w_ptrs, dy_ptrs, gamma_ptrs, mean_ptrs, var_ptrs, epss, sums_ptr, dconv_ptrs, partial_ptr,
    inverse_counts, batch, groups, height, width, strips, strip_rows, col_blocks, regions, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, CLASS_TOKEN: tl.constexpr, STRIDES: tl.constexpr,
    BATCH_STATS: tl.constexpr, AHEAD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Writes dconv of every branch over a strip of some images, and the share of its weight's gradient.

    The partial sums are (9 · branches, regions, C). They and the taps stay in registers, which leaves few
    warps to hide the latency of loads: with AHEAD, each step loads what the next one needs.
    """
    grid_dependency_synchronize()
    place = locate_strip(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, LANES)
    affine = ()
    dws = ()
    for i in tl.static_range(len(STRIDES)):
        affine = affine + (
            _affine(
                w_ptrs[i], gamma_ptrs[i], mean_ptrs[i], var_ptrs[i], epss[i], sums_ptr + 2 * i * CHANNELS,
                inverse_counts[i], place, CHANNELS, BATCH_STATS, LANES,
            ),
        )  # fmt: skip
        dws = dws + (zeros(9, LANES),)
    limits = column_limits(place.col, width, height, place.c_mask, 0, 2)
    for n in range(place.images):
        image = place.first_image + n * groups
        rows = rows_of(x_ptr + image * stride_b + CLASS_TOKEN * STEP, place, height, width, STEP, LANES)
        dys = ()
        outs = ()
        for i in tl.static_range(len(STRIDES)):
            dy_ptr = _first_output(dy_ptrs[i], image, height, width, STRIDES[i], CLASS_TOKEN, CHANNELS)
            dys = dys + (output_lanes(dy_ptr, place, STRIDES[i], False, CHANNELS, LANES),)
            out = _first_output(dconv_ptrs[i], image, height, width, STRIDES[i], 0, CHANNELS)
            outs = outs + (out + (place.col // STRIDES[i] * CHANNELS + place.c),)
        above = load_above(rows, place.first_row, STEP, LANES)
        raw = load_at(rows, place.first_row, STEP, LANES)
        if AHEAD:
            ahead = _load_step(rows, dys, place.first_row, width, STEP, STRIDES, CHANNELS, LANES)
        for row in range(place.first_row, place.end_row, 2):
            if AHEAD:
                next_raw, last_raw, raw_dys = ahead
                ahead = _load_step(rows, dys, row + 2, width, STEP, STRIDES, CHANNELS, LANES)
            else:
                next_raw, last_raw, raw_dys = _load_step(
                    rows, dys, row, width, STEP, STRIDES, CHANNELS, LANES
                )
            window = (widen(above, LANES), widen(raw, LANES), widen(next_raw, LANES), widen(last_raw, LANES))
            updated = ()
            for i in tl.static_range(len(STRIDES)):
                scale, start, taps = affine[i]
                own = dws[i]
                for r in tl.static_range(3 - STRIDES[i]):  # 2 rows of outputs, or 1 where the stride is 2
                    out_row = row // STRIDES[i] + r
                    rows_3 = (window[r], window[r + 1], window[r + 2])
                    dconvs = _gradients_of_outputs(
                        rows_3, raw_dys[i][r], limits, row + r, scale, start, taps, LANES
                    )
                    out_ptr = outs[i] + out_row * output_size(width, STRIDES[i]) * CHANNELS
                    store_row(out_ptr, 0, dconvs, limits, row + r, CHANNELS)
                    own = add_weight_gradients(own, rows_3, dconvs)
                updated = updated + (own,)
            dws = updated
            above = next_raw
            raw = last_raw
    plane = tl.cast(regions, tl.int64) * CHANNELS
    partial_ptr += place.region.to(tl.int64) * CHANNELS
    c = channels_of(place.region, CHANNELS, LANES)
    for i in tl.static_range(len(STRIDES)):
        store_weight_gradients(partial_ptr + 9 * i * plane, plane, dws[i], c, CHANNELS, LANES)


def _gradients_of_convolutions(
    x: Tensor, geometry: Geometry, epss: Sequence[float], parameters: Parameters, dys: Sequence[Tensor],
    sums: Tensor | None,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Returns every dconv, and the gradient of every tap by region, (9 · branches, regions, C).

    ``sums`` are Σdy and Σdy·x̂ (branches, 2, C) for batch statistics, else None.
    """
    batch, _, channels = x.shape
    weights, gammas, _, means, variances = map(tuple, parameters)
    dconvs = [x.new_empty(batch, h * w, channels) for h, w in geometry.output_grids]
    tiling = SlidingTiling.of("sliding_bwd_conv", x, geometry, (*weights, *dys))
    partial = x.new_empty(9 * len(dys), tiling.regions, channels, dtype=accumulator_dtype(x))
    tiling.launch(
        _conv_projection_sliding_bwd_conv_kernel, x, w_ptrs=weights, gamma_ptrs=gammas, mean_ptrs=means,
        var_ptrs=variances, dy_ptrs=tuple(dys), epss=tuple(epss), sums_ptr=x if sums is None else sums,
        dconv_ptrs=tuple(dconvs), partial_ptr=partial,
        inverse_counts=tuple(1.0 / (batch * h * w) for h, w in geometry.output_grids),
        regions=tiling.regions, BATCH_STATS=sums is not None,
        AHEAD=geometry.strides.count(1) < 2,  # more outputs in a step would spill
    )  # fmt: skip
    return dconvs, partial


# The input ------------------------------------------------------------------------------------------------


@triton.jit
def _reach_input_1(
    upper, lower, following, raw, dconvs, row, width, limits, taps,
    CHANNELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of a branch of stride 1 to the input's gradient at ``row`` and the next two rows.

    It is a convolution of dconv with the flipped taps. Returns the three sums (the last still lacks later
    rows) and the raw dconv at ``row`` + 2.
    """
    next_raw = load_outputs(dconvs, row + 1, width, limits, 1, True, CHANNELS, LANES)
    last_raw = load_outputs(dconvs, row + 2, width, limits, 1, True, CHANNELS, LANES)
    dconv = widen(raw, LANES)
    next_dconv = widen(next_raw, LANES)
    upper = add_row(add_row(upper, dconv, taps, 1), next_dconv, taps, 2)
    lower = add_row(add_row(lower, dconv, taps, 0), next_dconv, taps, 1)
    lower = add_row(lower, widen(last_raw, LANES), taps, 2)
    return upper, lower, add_row(following, next_dconv, taps, 0), last_raw


@triton.jit
def _reach_input_2(
    upper, lower, raw, dconvs, row, width, limits, taps,
    CHANNELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of a branch of stride 2 to the input's gradient at ``row`` and ``row`` + 1.

    An even row or column of the input is reached by one row or column of outputs, an odd one by two. The taps
    are flipped. Returns the two sums and the raw dconv at ``row`` + 2.
    """
    next_raw = load_outputs(dconvs, row + 2, width, limits, 2, True, CHANNELS, LANES)
    here, right = widen(raw, LANES)
    below_here, below_right = widen(next_raw, LANES)
    upper_right = tl.fma(right, taps[5], tl.fma(here, taps[3], upper[1]))
    lower_left = tl.fma(below_here, taps[7], tl.fma(here, taps[1], lower[0]))
    lower_right = tl.fma(right, taps[2], tl.fma(here, taps[0], lower[1]))
    lower_right = tl.fma(below_right, taps[8], tl.fma(below_here, taps[6], lower_right))
    return (tl.fma(here, taps[4], upper[0]), upper_right), (lower_left, lower_right), next_raw


@triton.jit
def _turned(taps):
    """Returns the 9 taps of a convolution flipped in both directions."""
    turned = ()
    for t in tl.static_range(9):
        turned = turned + (taps[8 - t],)
    return turned


@triton.jit
def _add_class_tokens(
    dx_ptr, dy_ptrs, image, height, width, place, STRIDES: tl.constexpr, CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Writes an image's gradient of the class token, in the program of its first strip and columns."""
    mask = (place.first_row == 0) & (place.col == 0) & place.c_mask
    lane = place.c + place.col  # only the lane at column 0 is stored
    (total,) = zeros(1, LANES)
    for i in tl.static_range(len(STRIDES)):
        dy_ptr = _first_output(dy_ptrs[i], image, height, width, STRIDES[i], 1, CHANNELS) - CHANNELS
        total += tl.load(dy_ptr + lane, mask=mask, other=0.0).to(LANES.accumulator)
    tl.store(dx_ptr + lane, total.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _conv_projection_sliding_bwd_input_kernel(
    dx_ptr, w_ptrs, dconv_ptrs, dy_ptrs, batch, groups, height, width, strips, strip_rows, col_blocks,
    CHANNELS: tl.constexpr, CLASS_TOKEN: tl.constexpr, STRIDES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Writes the input's gradient over a strip of some images, all branches summed in registers."""
    grid_dependency_synchronize()
    place = locate_strip(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, LANES)
    taps = ()
    for i in tl.static_range(len(STRIDES)):
        taps = taps + (_turned(load_weights(w_ptrs[i], place, LANES)),)
    limits = column_limits(place.col, width, height, place.c_mask, 0, 2)
    reached = column_limits(place.col, width, height, place.unit_mask, -1, 4)
    lane = place.col * CHANNELS + place.c
    for n in range(place.images):
        image = place.first_image + n * groups
        dx = dx_ptr + image * (height * width + CLASS_TOKEN) * CHANNELS
        if CLASS_TOKEN:
            _add_class_tokens(dx, dy_ptrs, image, height, width, place, STRIDES, CHANNELS, LANES)
            dx += CHANNELS
        dconvs = ()
        raws = ()
        sums = zeros(2, LANES)
        for i in tl.static_range(len(STRIDES)):
            dconv_ptr = _first_output(dconv_ptrs[i], image, height, width, STRIDES[i], 0, CHANNELS)
            lanes = output_lanes(dconv_ptr, place, STRIDES[i], True, CHANNELS, LANES)
            if STRIDES[i] == 1:
                above = load_output_above(lanes, place.first_row, width, height, reached, CHANNELS, LANES)
                sums = add_row(sums, widen(above, LANES), taps[i], 0)
            raw = load_outputs(
                lanes, place.first_row, width, reached, STRIDES[i], True, CHANNELS, LANES
            )  # fmt: skip
            dconvs = dconvs + (lanes,)
            raws = raws + (raw,)
        for row in range(place.first_row, place.end_row, 2):
            upper = sums
            lower = zeros(2, LANES)
            sums = zeros(2, LANES)
            next_raws = ()
            for i in tl.static_range(len(STRIDES)):
                if STRIDES[i] == 1:
                    upper, lower, sums, raw = _reach_input_1(
                        upper, lower, sums, raws[i], dconvs[i], row, width, reached, taps[i], CHANNELS, LANES
                    )
                else:
                    upper, lower, raw = _reach_input_2(
                        upper, lower, raws[i], dconvs[i], row, width, reached, taps[i], CHANNELS, LANES
                    )
                next_raws = next_raws + (raw,)
            raws = next_raws
            row_ptr = dx + lane + row * width * CHANNELS
            store_row(row_ptr, 0, upper, limits, row, CHANNELS)
            store_row(row_ptr + width * CHANNELS, 0, lower, limits, row + 1, CHANNELS)


def sliding_backward_input(
    dx: Tensor, geometry: Geometry, weights: Sequence[Tensor], dconvs: Sequence[Tensor], dys: Sequence[Tensor]
) -> None:
    """Writes the input's gradient ``dx`` (B, T, C), all branches summed, class token included."""
    tiling = SlidingTiling.of("sliding_bwd_input", dx, geometry, (*weights, *dconvs))
    launching.launch(
        _conv_projection_sliding_bwd_input_kernel, (tiling.programs,), on=dx, options=tiling.options,
        dx_ptr=dx, w_ptrs=tuple(weights), dconv_ptrs=tuple(dconvs), dy_ptrs=tuple(dys), **tiling.arguments,
    )  # fmt: skip


# All gradients --------------------------------------------------------------------------------------------


def _gradients_like(
    x: Tensor, grid: Any, strides: Sequence[int], epss: Any, parameters: Sequence[Tensor], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    branches = len(strides)
    dweights = parameters[0].new_empty(branches, *parameters[0].shape)
    sums = x.new_empty(branches, 2, x.shape[2], dtype=accumulator_dtype(x))
    return x.new_empty(x.shape), dweights, sums


@launcher("conv_projection_backward", _gradients_like)
def projection_backward(
    x: Tensor, grid: list[int], strides: list[int], epss: list[float], parameters: list[Tensor],
    dys: list[Tensor], batch_stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients, in three passes over the tokens.

    ``dys`` are those of the outputs, contiguous; ``batch_stats`` says whether the statistics are the batch's;
    the other arguments are those of the forward. There are three results: the gradient of x; of the weights,
    (branches, C, 1, 3, 3); and of every branch Σdy = dβ and Σdy·x̂ = dγ, (branches, 2, C).
    """
    x, geometry, given = maybe_contiguous(x), Geometry.of(grid, strides), Parameters.divided(parameters)
    weights, partial = given.weights, _sums(x, geometry, epss, given, dys)
    sums = sum_regions(partial, [1] * len(partial), partial.dtype).view(-1, 2, x.shape[2])
    dconvs, partial = _gradients_of_convolutions(x, geometry, epss, given, dys, sums if batch_stats else None)
    dweights = sum_regions(partial, [9] * len(weights), weights[0].dtype)
    dx = x.new_empty(x.shape)
    sliding_backward_input(dx, geometry, weights, dconvs, dys)
    return dx, dweights.view(len(weights), *weights[0].shape), sums
