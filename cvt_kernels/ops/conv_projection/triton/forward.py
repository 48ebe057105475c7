"""The kernels of the projection's forward, and their launches: its outputs, and the statistics of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import launching
from ...graph_operators import launcher
from ...triton_launch import accumulator_dtype, grid_dependency_synchronize
from .common import (
    Geometry,
    Parameters,
    Tile,
    class_tokens,
    configuration,
    load_partial,
    maybe_contiguous,
)
from .sliding import (
    SIZES,
    SlidingTiling,
    column_limits,
    load_at,
    load_scaled,
    load_vector,
    load_weights,
    locate_strip,
    rows_of,
    sliding_start,
    sliding_step,
    store_row,
    units,
    unpack,
    widen,
)

# The outputs ----------------------------------------------------------------------------------------------


@triton.jit
def _folded(w_ptr, gamma_ptr, beta_ptr, mean_ptr, var_ptr, eps, place, LANES: tl.constexpr):
    """Returns the initial sum and the taps, with BatchNorm folded into them."""
    scale = load_vector(gamma_ptr, place, LANES) / tl.sqrt(load_vector(var_ptr, place, LANES) + eps)
    start = load_vector(beta_ptr, place, LANES) - load_vector(mean_ptr, place, LANES) * scale
    return start, load_scaled(w_ptr, place, scale, LANES)


@triton.jit
def row_norm(ptr, row, mask, rows, eps, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Returns rstd and −mean · rstd of rows, from the statistics (2, parts, rows) of their parts."""
    PARTS: tl.constexpr = (CHANNELS + WIDTH - 1) // WIDTH
    LAST: tl.constexpr = CHANNELS - (PARTS - 1) * WIDTH  # columns of the last part
    ptr += row
    plane = tl.cast(rows, tl.int64)
    sums = ()
    mean = tl.zeros(row.shape, tl.float32)
    for part in tl.static_range(PARTS):
        sums = sums + (tl.load(ptr + part * plane, mask=mask, other=0.0),)
        mean += sums[part]
    mean *= 1.0 / CHANNELS
    squares = tl.zeros(row.shape, tl.float32)
    for part in tl.static_range(PARTS):
        count = WIDTH if part < PARTS - 1 else LAST
        deviation = sums[part] / count - mean
        squares += tl.load(ptr + (PARTS + part) * plane, mask=mask, other=0.0)
        squares += deviation * deviation * count
    rstd = tl.math.rsqrt(squares * (1.0 / CHANNELS) + eps)
    return rstd, -mean * rstd


@triton.jit
def _prepare_norm(
    statistics_ptr, scratch_ptr, first_token, place, height, width, strip_rows, col_blocks, rows, eps,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Writes what scales the pixels that the program reads of an image, then what is added to them.

    Each pixel is read by many lanes, of which each would else compute it. It returns pointers [P, 1] to the
    first of a lane's columns in the row above the strip.
    """
    COLUMNS: tl.constexpr = 2 * LANES.pairs + 2
    BLOCK: tl.constexpr = 32 * LANES.pairs
    window = (strip_rows + 3) * COLUMNS
    first_col = place.region % col_blocks * (2 * LANES.pairs)
    pixel = tl.arange(0, BLOCK)
    for first in range(0, (place.end_row - place.first_row + 3) * COLUMNS, BLOCK):
        row = place.first_row - 1 + (first + pixel) // COLUMNS
        col = first_col - 1 + (first + pixel) % COLUMNS
        mask = (row >= 0) & (row < height) & (col >= 0) & (col < width)
        scale, shift = row_norm(
            statistics_ptr, first_token + row * width + col, mask, rows, eps, WIDTH, CHANNELS
        )
        tl.store(scratch_ptr + first + pixel, scale, mask=first + pixel < window)
        tl.store(scratch_ptr + window + first + pixel, shift, mask=first + pixel < window)
    tl.debug_barrier()  # the lanes read what others have written
    return scratch_ptr + (place.col - first_col)


@triton.jit
def _load_unit_vector(ptr, place, LANES: tl.constexpr):
    """Returns a vector (C,) as two tiles [P, units]: the first and the second channel of each unit."""
    P: tl.constexpr = LANES.pairs
    BC: tl.constexpr = LANES.channels
    ptrs = tl.broadcast_to(units(ptr, LANES) + place.unit, (P, BC // 2))
    return unpack(tl.load(ptrs, mask=place.unit_mask, other=0), LANES)


@triton.jit(do_not_specialize=(*SIZES, "rows"))
def _conv_projection_sliding_fwd_kernel(
    x_ptr, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, y_ptrs, y_rows, epss,
    statistics_ptr, norm_weight_ptr, norm_bias_ptr, scratch_ptr, rows, norm_eps,
    batch, groups, height, width, strips, strip_rows, col_blocks, stride_b,
    NORM_WIDTH: tl.constexpr, STEP: tl.constexpr, CHANNELS: tl.constexpr, CLASS_TOKEN: tl.constexpr,
    STRIDES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Writes every branch of a strip of some images, normalized by given statistics, and the class token."""
    grid_dependency_synchronize()
    place = locate_strip(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, LANES)
    P: tl.constexpr = LANES.pairs
    BC: tl.constexpr = LANES.channels
    starts = ()
    taps = ()
    for i in tl.static_range(len(STRIDES)):
        start, folded = _folded(
            w_ptrs[i], gamma_ptrs[i], beta_ptrs[i], mean_ptrs[i], var_ptrs[i], epss[i], place, LANES
        )
        starts = starts + (start,)
        taps = taps + (folded,)
    if NORM_WIDTH > 0:
        low_weight, high_weight = _load_unit_vector(norm_weight_ptr, place, LANES)
        low_bias, high_bias = _load_unit_vector(norm_bias_ptr, place, LANES)
        window = (strip_rows + 3) * (2 * P + 2)
        scratch_ptr += tl.program_id(0).to(tl.int64) * (tl.cdiv(batch, groups) * 2 * window)
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
        norm = ()
        if NORM_WIDTH > 0:
            first_token = image * (height * width + CLASS_TOKEN) + CLASS_TOKEN
            scale_ptrs = _prepare_norm(
                statistics_ptr, scratch_ptr + n * (2 * window), first_token, place, height, width, strip_rows,
                col_blocks, rows, norm_eps, NORM_WIDTH, CHANNELS, LANES,
            )  # fmt: skip
            norm = (scale_ptrs, window, place.first_row, low_weight, high_weight, low_bias, high_bias)
        if CLASS_TOKEN:
            token = tl.load(units(x, LANES) + class_lane, mask=class_mask)
            if NORM_WIDTH > 0:
                here = tl.broadcast_to(first_token - 1, (P, BC // 2))
                scale, shift = row_norm(
                    statistics_ptr, here, class_mask, rows, norm_eps, NORM_WIDTH, CHANNELS
                )
                low, high = unpack(token, LANES)
                low = tl.fma(tl.fma(low, scale, shift), low_weight, low_bias)
                high = tl.fma(tl.fma(high, scale, shift), high_weight, high_bias)
                normed = tl.join(low, high).reshape([P, BC]).to(x_ptr.dtype.element_ty)
            for i in tl.static_range(len(STRIDES)):
                y = y_ptrs[i] + tl.cast(y_rows[i], tl.int64) * CHANNELS
                y += whole if STRIDES[i] == 1 else halved
                if NORM_WIDTH > 0:
                    mask = (place.first_row == 0) & (place.col == 0) & place.c_mask
                    tl.store(y + (place.c + place.col), normed, mask=mask)
                else:
                    tl.store(units(y, LANES) + class_lane, token, mask=class_mask)
        rows_of_image = rows_of(x + CLASS_TOKEN * STEP, place, height, width, STEP, LANES)
        sums, raw = sliding_start(rows_of_image, place.first_row, starts, taps, STEP, STRIDES, LANES, norm)
        for row in range(place.first_row, place.end_row, 2):
            upper, lower, sums, raw = sliding_step(
                sums, raw, rows_of_image, row, starts, taps, STEP, STRIDES, LANES, norm
            )
            for i in tl.static_range(len(STRIDES)):
                y = y_ptrs[i] + (tl.cast(y_rows[i], tl.int64) + CLASS_TOKEN) * CHANNELS
                if STRIDES[i] == 1:
                    y += whole + row * width * CHANNELS
                    lane = place.col * CHANNELS + place.c
                    store_row(y, lane, upper[i], limits, row, CHANNELS)
                    store_row(y + width * CHANNELS, lane, lower[i], limits, row + 1, CHANNELS)
                else:
                    y += halved + row // 2 * half_width * CHANNELS
                    store_row(y, place.col // 2 * CHANNELS + place.c, upper[i], limits, row, CHANNELS)


#: What a LayerNorm takes besides: with 128 registers, the projection that applies one spills.
_OF_NORM = {"registers": 160, "resident_warps": 12}


class NormOfRows(NamedTuple):
    """A LayerNorm of the tokens that the projection applies as it reads them."""

    # (2, parts, B · T) in float32: of each part of a token's channels the sum, then the sum of the squared
    # deviations from its mean. None for a kernel that computes them itself.
    sums: Tensor | None
    width: int  # Channels of a part; the last one may have fewer
    # (C,), of the dtype of the tokens
    weight: Tensor
    bias: Tensor
    eps: float  # Added to the variance


def sliding_forward(
    x: Tensor, geometry: Geometry, epss: Sequence[float], parameters: Parameters,
    outs: Sequence[Tensor], *, norm: NormOfRows | None = None, first_rows: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Writes every branch (B, Tᵢ, C) to ``outs``, normalized by the given statistics (C,).

    The geometry is one that :func:`why_not_sliding` accepts. ``norm`` is a LayerNorm of the tokens before the
    convolutions; x (B, T, C) has 16 bits and is contiguous then. ``first_rows`` are the tokens of ``outs``
    from which on they are written, if not from the first on.
    """
    config, read = configuration("sliding_fwd", x), [*parameters.weights]
    if norm is not None:
        config = replace(config, **_OF_NORM)
        read += [norm.weight, norm.bias]
    tiling = SlidingTiling.by(config, x, geometry, read)
    arguments, scratch, rows = tiling.arguments, None, x.shape[0] * x.shape[1]
    if norm is not None:
        images = -(-arguments["batch"] // arguments["groups"])
        pixels = (arguments["strip_rows"] + 3) * (2 * arguments["LANES"].pairs + 2)
        scratch = x.new_empty(tiling.programs * images * 2 * pixels, dtype=torch.float32)
    tiling.launch(
        _conv_projection_sliding_fwd_kernel, x, **parameters.pointers(), y_ptrs=tuple(outs),
        y_rows=tuple(first_rows or [0] * len(outs)), epss=tuple(epss),
        statistics_ptr=None if norm is None else norm.sums,
        norm_weight_ptr=None if norm is None else norm.weight,
        norm_bias_ptr=None if norm is None else norm.bias, scratch_ptr=scratch, rows=rows,
        norm_eps=0.0 if norm is None else norm.eps, NORM_WIDTH=0 if norm is None else norm.width,
    )  # fmt: skip


def _empty_outputs(x: Tensor, grid: Sequence[int], strides: Sequence[int], *_: Any) -> list[Tensor]:
    geometry, (batch, _, channels) = Geometry.of(grid, strides), x.shape
    tokens = class_tokens(x, geometry)
    return [x.new_empty(batch, height * width + tokens, channels) for height, width in geometry.output_grids]


@launcher("conv_projection", _empty_outputs)
def projection_forward(
    x: Tensor, grid: list[int], strides: list[int], epss: list[float], parameters: list[Tensor]
) -> list[Tensor]:
    """Returns every output (B, Tᵢ, C), of convolutions normalized by the given statistics (C,)."""
    x, outs = maybe_contiguous(x), _empty_outputs(x, grid, strides)
    sliding_forward(x, Geometry.of(grid, strides), epss, Parameters.divided(parameters), outs)
    return outs


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
    grid_dependency_synchronize()
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
        total = zero
        for t in tl.static_range(9):
            row, col = place.first_row + t // 3 - 1, place.col + t % 3 - 1
            is_inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
            total += tl.where(is_inside, weights[t], 0.0)
        starts = starts + (zero,)
        taps = taps + (weights,)
        # The mean begins at a constant image's first output: from 0, a large mean would round the rest away.
        moments = moments + ((pixel * total, zero),)
    first, second = column_limits(place.col, width, height, place.c_mask, 0, 2)
    height_of_strip = place.end_row - place.first_row
    half_of_strip = (height_of_strip + 1) // 2
    for n in range(place.images):
        x = x_ptr + (place.first_image + n * groups) * stride_b
        rows = rows_of(x, place, height, width, STEP, LANES)
        sums, raw = sliding_start(rows, place.first_row, starts, taps, STEP, STRIDES, LANES, ())
        for row in range(place.first_row, place.end_row, 2):
            upper, lower, sums, raw = sliding_step(
                sums, raw, rows, row, starts, taps, STEP, STRIDES, LANES, ()
            )
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


@triton.jit
def _interpolated(ptr, value, weight, mask):
    """Returns the value at ``ptr`` interpolated towards ``value`` by ``weight``, in the dtype there."""
    old = tl.load(ptr, mask=mask).to(value.dtype)
    return (old + weight * (value - old)).to(ptr.dtype.element_ty)


@triton.jit
def _update_running(mean_ptr, var_ptr, tracked_ptr, mean, variance, momentum, mask):
    """Updates running statistics of some channels; the first program counts the batch.

    Several threads read the same values, and one of them writes new ones after the barrier.
    """
    new_mean = _interpolated(mean_ptr, mean, momentum, mask)
    new_var = _interpolated(var_ptr, variance, momentum, mask)
    counts = tl.program_id(0) == 0
    batches = tl.load(tracked_ptr, mask=counts, other=0) + 1
    tl.debug_barrier()
    tl.store(mean_ptr, new_mean, mask=mask)
    tl.store(var_ptr, new_var, mask=mask)
    tl.store(tracked_ptr, batches, mask=counts)


@triton.jit(do_not_specialize=("regions",))
def _merge_stats_kernel(
    partial_ptr, counts_ptr, mean_ptr, var_ptr, running_mean_ptrs, running_var_ptrs, tracked_ptrs, momenta,
    corrections, channels, regions, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Merges (branches, 2, regions, C) and counts (branches, regions) to mean and variance (branches, C).

    The variance is biased. Each lane merges every P-th region by Chan's formula; then the lanes are merged.
    It updates the running statistics of the branches ROWS with their momenta.
    """
    grid_dependency_synchronize()
    P: tl.constexpr = TILE.pixels
    BC: tl.constexpr = TILE.channels
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    c_mask = c < channels
    branch = tl.program_id(1)
    plane = tl.cast(regions, tl.int64) * channels
    partial_ptr += 2 * branch * plane
    counts_ptr += branch * regions
    count = tl.zeros([P, BC], TILE.accumulator)
    mean = tl.zeros([P, BC], TILE.accumulator)
    m2 = tl.zeros([P, BC], TILE.accumulator)
    for first in range(0, regions, P):
        number = first + tl.arange(0, P)
        # Every lane loads its own copy of the count, which needs no exchange between them.
        counts_ptrs = tl.broadcast_to(counts_ptr + number[:, None], (P, BC))
        part_count = tl.load(counts_ptrs, mask=(number < regions)[:, None], other=0.0)
        count += part_count
        share = part_count / tl.maximum(count, 1.0)
        m2 += load_partial(partial_ptr + plane, number, c, c_mask, regions, channels)
        deviation = load_partial(partial_ptr, number, c, c_mask, regions, channels) - mean
        mean += deviation * share
        m2 += deviation * deviation * (count - part_count) * share
    total = tl.sum(count, axis=0)
    whole_mean = tl.sum(mean * (count / total[None, :]), axis=0)
    deviation = mean - whole_mean[None, :]
    tl.store(mean_ptr + branch * channels + c, whole_mean, mask=c_mask)
    variance = tl.sum(m2 + deviation * deviation * count, axis=0) / total
    tl.store(var_ptr + branch * channels + c, variance, mask=c_mask)
    for i in tl.static_range(len(ROWS)):
        if branch == ROWS[i]:
            _update_running(
                running_mean_ptrs[i] + c, running_var_ptrs[i] + c, tracked_ptrs[i], whole_mean,
                variance * corrections[i], momenta[i], c_mask,
            )  # fmt: skip


def _statistics_like(x: Tensor, grid: Any, strides: Sequence[int], *_: Any) -> tuple[Tensor, Tensor]:
    mean, variance = (x.new_empty(len(strides), x.shape[2], dtype=accumulator_dtype(x)) for _ in range(2))
    return mean, variance


@launcher(
    "conv_projection_statistics", _statistics_like, mutates=("running_means", "running_vars", "tracked")
)
def batch_statistics(
    x: Tensor, grid: list[int], strides: list[int], weights: list[Tensor], rows: list[int],
    running_means: list[Tensor], running_vars: list[Tensor], tracked: list[Tensor], momenta: list[float],
    corrections: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns mean and biased variance (branches, C) of every branch's convolution, over batch and grid.

    It updates the running statistics (C,), contiguous, of the branches ``rows``, by their momenta, and their
    counts of batches. ``corrections`` are n / (n − 1), which makes a variance unbiased.
    """
    x = maybe_contiguous(x)
    tiling = SlidingTiling.of("sliding_stats", x, Geometry.of(grid, strides), weights)
    partial = x.new_empty(len(weights), 2, tiling.regions, x.shape[2], dtype=accumulator_dtype(x))
    counts = partial.new_empty(len(weights), tiling.regions)
    tiling.launch(
        _conv_projection_sliding_stats_kernel, x, w_ptrs=tuple(weights), partial_ptr=partial,
        counts_ptr=counts, regions=tiling.regions,
    )  # fmt: skip
    return _merged(partial, counts, rows, running_means, running_vars, tracked, momenta, corrections)


def _merged(partial: Tensor, counts: Tensor, rows: Sequence[int], *running: Any) -> tuple[Tensor, Tensor]:
    """Merges the regions' statistics and counts, for the arguments of :func:`batch_statistics`."""
    means, variances, tracked, momenta, corrections = map(tuple, running)
    branches, _, regions, channels = partial.shape
    mean, variance = (partial.new_empty(branches, channels) for _ in range(2))
    config = configuration("merge_stats", partial)
    launching.launch(
        _merge_stats_kernel, (-(-channels // config.channels), branches), on=partial, options=config.options,
        partial_ptr=partial, counts_ptr=counts, mean_ptr=mean, var_ptr=variance,
        running_mean_ptrs=means, running_var_ptrs=variances, tracked_ptrs=tracked, momenta=momenta,
        corrections=corrections, channels=channels, regions=regions, ROWS=tuple(rows),
        TILE=Tile.of(config, partial.dtype),
    )  # fmt: skip
    return mean, variance
