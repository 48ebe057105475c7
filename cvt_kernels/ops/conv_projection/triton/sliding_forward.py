"""The forward kernels of the projection as walks: the normalized outputs, and the statistics of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .... import launching
from ...triton_launch import accumulator_dtype
from .common import Geometry
from .sliding import (
    SIZES,
    SlidingPlan,
    column_limits,
    load_at,
    load_vector,
    load_weights,
    locate_strip,
    rows_of,
    sliding_start,
    sliding_step,
    store_row,
    units,
    widen,
)

# The outputs ----------------------------------------------------------------------------------------------


@triton.jit
def _folded(w_ptr, gamma_ptr, beta_ptr, mean_ptr, var_ptr, eps, place, LANES: tl.constexpr):
    """Returns the initial sum and the taps, with BatchNorm folded into them."""
    scale = load_vector(gamma_ptr, place, LANES) / tl.sqrt(load_vector(var_ptr, place, LANES) + eps)
    start = load_vector(beta_ptr, place, LANES) - load_vector(mean_ptr, place, LANES) * scale
    weights = load_weights(w_ptr, place, LANES)
    taps = ()
    for t in tl.static_range(9):
        taps = taps + (weights[t] * scale,)
    return start, taps


@triton.jit(do_not_specialize=SIZES)
def _conv_projection_sliding_fwd_kernel(
    x_ptr, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, y_ptrs, epss,
    batch, groups, height, width, strips, strip_rows, col_blocks, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, CLASS_TOKEN: tl.constexpr, STRIDES: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Writes every branch of a strip of some images, normalized by given statistics, and the class token."""
    place = locate_strip(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, LANES)
    starts = ()
    taps = ()
    for i in tl.static_range(len(STRIDES)):
        start, folded = _folded(
            w_ptrs[i], gamma_ptrs[i], beta_ptrs[i], mean_ptrs[i], var_ptrs[i], epss[i], place, LANES
        )
        starts = starts + (start,)
        taps = taps + (folded,)
    limits = column_limits(place.col, width, height, place.c_mask, 0, 2)
    # The class token is copied by the lanes at the first row and column.
    class_lane = place.unit + place.col
    class_mask = (place.first_row == 0) & (place.col == 0) & place.unit_mask
    half_height = (height + 1) // 2
    half_width = (width + 1) // 2
    for n in range(place.images):
        image = place.first_image + n * groups
        x = x_ptr + image * stride_b
        whole = (image * (height * width + CLASS_TOKEN)) * CHANNELS
        halved = (image * (half_height * half_width + CLASS_TOKEN)) * CHANNELS
        if CLASS_TOKEN:
            token = tl.load(units(x, LANES) + class_lane, mask=class_mask)
            for i in tl.static_range(len(STRIDES)):
                y = y_ptrs[i] + (whole if STRIDES[i] == 1 else halved)
                tl.store(units(y, LANES) + class_lane, token, mask=class_mask)
        rows = rows_of(x + CLASS_TOKEN * STEP, place, height, width, STEP, LANES)
        sums, raw = sliding_start(rows, place.first_row, starts, taps, STEP, STRIDES, LANES)
        for row in range(place.first_row, place.end_row, 2):
            upper, lower, sums, raw = sliding_step(sums, raw, rows, row, starts, taps, STEP, STRIDES, LANES)
            for i in tl.static_range(len(STRIDES)):
                y = y_ptrs[i] + CLASS_TOKEN * CHANNELS
                if STRIDES[i] == 1:
                    y += whole + row * width * CHANNELS
                    lane = place.col * CHANNELS + place.c
                    store_row(y, lane, upper[i], limits, row, CHANNELS)
                    store_row(y + width * CHANNELS, lane, lower[i], limits, row + 1, CHANNELS)
                else:
                    y += halved + row // 2 * half_width * CHANNELS
                    store_row(y, place.col // 2 * CHANNELS + place.c, upper[i], limits, row, CHANNELS)


def sliding_forward(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], gammas: Sequence[Tensor],
    betas: Sequence[Tensor], means: Sequence[Tensor], variances: Sequence[Tensor], outs: Sequence[Tensor],
) -> None:  # fmt: skip
    """Writes every branch (B, Tᵢ, C) to ``outs``, normalized by the given statistics (C,)."""
    plan = SlidingPlan.of("sliding_fwd", x, geometry, weights)
    launching.launch(
        _conv_projection_sliding_fwd_kernel, (plan.programs,), on=x, options=plan.options,
        x_ptr=x, w_ptrs=tuple(weights), gamma_ptrs=tuple(gammas), beta_ptrs=tuple(betas),
        mean_ptrs=tuple(means), var_ptrs=tuple(variances), y_ptrs=tuple(outs), epss=geometry.epss,
        stride_b=x.stride(0), STEP=x.stride(1), **plan.arguments,
    )  # fmt: skip


# Statistics of the batch ----------------------------------------------------------------------------------


# Moments are (mean, m2) of the outputs that a lane has seen of a branch, as Welford sums them: their mean and
# the sum of their squared deviations, [P, BC]. They are a plain tuple because Triton 3.6 takes no NamedTuple
# in a tuple.


@triton.jit
def _include(moments, values, masks, inverse):
    """Updates moments by a tuple of values: the first always, the others where their masks hold.

    ``inverse`` is 1 over the number of values then included.
    """
    mean, m2 = moments
    deviations = (values[0] - mean,)
    total = deviations[0]
    for n in tl.static_range(1, len(values)):
        deviations = deviations + (tl.where(masks[n - 1], values[n] - mean, 0.0),)
        total += deviations[n]
    mean = tl.fma(total, inverse, mean)
    for n in tl.static_range(len(values)):
        m2 = tl.fma(deviations[n], values[n] - mean, m2)
    return mean, m2


@triton.jit
def _store_moments(moments, count, partial_ptr, count_ptr, plane, place):
    """Merges the moments of all lanes, of ``count`` values [P, 1]; writes their number, mean and ``m2``."""
    mean, m2 = moments
    total = tl.sum(count)
    whole_mean = tl.sum(mean * count, axis=0, keep_dims=True) / tl.maximum(total, 1.0)
    deviation = mean - whole_mean
    # A lane beyond the last column has seen values that reach it from the last one; it must not count.
    m2 = tl.where(count > 0, m2, 0.0)
    whole_m2 = tl.sum(m2 + deviation * deviation * count, axis=0, keep_dims=True)
    tl.store(partial_ptr + place.c, whole_mean, mask=place.c_mask)
    tl.store(partial_ptr + plane + place.c, whole_m2, mask=place.c_mask)
    tl.store(count_ptr, total)


@triton.jit(do_not_specialize=SIZES)
def _conv_projection_sliding_stats_kernel(
    x_ptr, w_ptrs, partial_ptr, counts_ptr,
    batch, groups, height, width, strips, strip_rows, col_blocks, stride_b, regions,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, CLASS_TOKEN: tl.constexpr, STRIDES: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Writes mean and sum of squared deviations over one region: partial (branches, 2, regions, C).

    The number of outputs goes to counts (branches, regions).
    """
    place = locate_strip(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, LANES)
    P: tl.constexpr = LANES.pairs
    BC: tl.constexpr = LANES.channels
    zero = tl.zeros([P, BC], LANES.accumulator)
    x_ptr += CLASS_TOKEN * STEP
    rows = rows_of(x_ptr + place.first_image * stride_b, place, height, width, STEP, LANES)
    _, pixel, _, _ = widen(load_at(rows, place.first_row, STEP, LANES), LANES)
    starts = ()
    taps = ()
    moments = ()
    for i in tl.static_range(len(STRIDES)):
        weights = load_weights(w_ptrs[i], place, LANES)
        total = weights[0]
        for t in tl.static_range(1, 9):
            total += weights[t]
        starts = starts + (zero,)
        taps = taps + (weights,)
        # The mean begins at a constant image's mean: from 0, a large mean would round the rest away.
        moments = moments + ((pixel * total, zero),)
    first, second = column_limits(place.col, width, height, place.c_mask, 0, 2)
    height_of_strip = place.end_row - place.first_row
    half_of_strip = (height_of_strip + 1) // 2
    for n in range(place.images):
        x = x_ptr + (place.first_image + n * groups) * stride_b
        rows = rows_of(x, place, height, width, STEP, LANES)
        sums, raw = sliding_start(rows, place.first_row, starts, taps, STEP, STRIDES, LANES)
        for row in range(place.first_row, place.end_row, 2):
            upper, lower, sums, raw = sliding_step(sums, raw, rows, row, starts, taps, STEP, STRIDES, LANES)
            seen = n * height_of_strip + tl.minimum(row + 2, place.end_row) - place.first_row
            seen_pairs = n * half_of_strip + (row - place.first_row) // 2 + 1
            of_column = 1.0 / seen.to(LANES.accumulator)
            of_pair = 1.0 / seen_pairs.to(LANES.accumulator)
            of_lane = tl.where(second > 0, 0.5 * of_column, of_column)
            updated = ()
            for i in tl.static_range(len(STRIDES)):
                if STRIDES[i] == 1:
                    masks = (row < second, row + 1 < first, row + 1 < second)
                    updated = updated + (_include(moments[i], upper[i] + lower[i], masks, of_lane),)
                else:
                    inverse = tl.zeros_like(zero) + of_pair
                    updated = updated + (_include(moments[i], upper[i], (), inverse),)
            moments = updated
    plane = tl.cast(regions, tl.int64) * CHANNELS
    partial_ptr += place.region.to(tl.int64) * CHANNELS
    counts_ptr += place.region
    halves = (place.col < width).to(LANES.accumulator) * place.images
    wholes = halves + (place.col + 1 < width).to(LANES.accumulator) * place.images
    for i in tl.static_range(len(STRIDES)):
        count = wholes * height_of_strip if STRIDES[i] == 1 else halves * half_of_strip
        _store_moments(moments[i], count, partial_ptr + 2 * i * plane, counts_ptr + i * regions, plane, place)


def sliding_statistics(x: Tensor, geometry: Geometry, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns means and sums of squared deviations (branches, 2, regions, C), and their counts."""
    plan = SlidingPlan.of("sliding_stats", x, geometry, weights)
    partial = x.new_empty(len(weights), 2, plan.regions, x.shape[2], dtype=accumulator_dtype(x))
    counts = partial.new_empty(len(weights), plan.regions)
    launching.launch(
        _conv_projection_sliding_stats_kernel, (plan.programs,), on=x, options=plan.options,
        x_ptr=x, w_ptrs=tuple(weights), partial_ptr=partial, counts_ptr=counts, regions=plan.regions,
        stride_b=x.stride(0), STEP=x.stride(1), **plan.arguments,
    )  # fmt: skip
    return partial, counts
