"""The forward kernels of the projection, which write the statistics of a batch and the normalized outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .... import launching
from ...triton_launch import accumulator_dtype, grid_dependency_synchronize
from .common import (
    Geometry,
    RegionTiling,
    Tile,
    bounds_of,
    class_token_mask,
    class_tokens,
    configuration,
    conv_rows,
    load_channel,
    load_partial,
    load_taps,
    locate_region,
    maybe_contiguous,
    packed_above_3x3,
    store_pixels,
    tile_positions,
)
from .sliding import has_sliding_kernel
from .sliding_forward import sliding_forward, sliding_statistics

# The outputs ----------------------------------------------------------------------------------------------


@triton.jit
def _load_norm(
    w_ptr, gamma_ptr, beta_ptr, mean_ptr, var_ptr, eps, region,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns (start, taps, scale, β) of one branch; ``start`` is the initial value of its sums.

    With BatchNorm folded into the taps, results are bitwise equal to the sliding-row kernel's, so that a
    sum whose other summands are 0 equals what that computes.
    """
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    gamma = load_channel(gamma_ptr, region, TILE)
    scale = (gamma / tl.sqrt(load_channel(var_ptr, region, TILE) + eps))[None, :]
    beta = load_channel(beta_ptr, region, TILE)[None, :]
    mean = load_channel(mean_ptr, region, TILE)[None, :]
    taps = load_taps(w_ptr, region, BRANCH, TILE)
    # Subtracted first, in the accumulator: (β − mean · scale) would cancel where the mean is many deviations.
    start = -mean
    if BRANCH.folded:
        start = beta - mean * scale
        folded = ()
        for t in tl.static_range(len(taps)):
            folded = folded + (taps[t] * scale,)
        taps = folded
    return start, taps, scale, beta


@triton.jit
def _add_branch(
    totals, x_ptr, w_ptr, norm, row, col, region,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns ``totals``, empty or R tiles, plus γ (conv(x) − mean) / √(var + ε) + β of one branch."""
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    R: tl.constexpr = BRANCH.rows
    start, taps, scale, beta = norm
    accs = conv_rows(start, x_ptr, w_ptr, taps, row, col, region, BRANCH, TILE)
    added = ()
    for r in tl.static_range(R):
        value = accs[r]
        if not BRANCH.folded:
            value = value * scale + beta
        if len(totals) > 0:
            value = totals[r] + value
        added = added + (value,)
    return added


@triton.jit
def _fwd_output(
    x_ptr, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, y_ptr, epss, out_height, out_width, region,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes one output of a region: the sum of the normalized branches from INDEX on."""
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    COLS: tl.constexpr = BRANCH.columns
    R: tl.constexpr = BRANCH.rows
    P: tl.constexpr = TILE.pixels
    SUMMANDS: tl.constexpr = BRANCH.summands
    norms = ()
    for i in tl.static_range(SUMMANDS):
        norm = _load_norm(
            w_ptrs[INDEX + i], gamma_ptrs[INDEX + i], beta_ptrs[INDEX + i], mean_ptrs[INDEX + i],
            var_ptrs[INDEX + i], epss[INDEX + i], region, BRANCHES, INDEX + i, TILE,
        )  # fmt: skip
        norms = norms + (norm,)
    own = bounds_of(region, out_height, out_width)
    for row0 in range(own.first_row, own.end_row, P // COLS * R):
        for col0 in range(own.first_col, own.end_col, COLS):
            row, col = tile_positions(row0, col0, COLS, R, TILE)
            totals = ()
            for i in tl.static_range(SUMMANDS):
                totals = _add_branch(
                    totals, x_ptr, w_ptrs[INDEX + i], norms[i], row, col, region, BRANCHES, INDEX + i, TILE
                )
            for r in tl.static_range(R):
                valid = (row + r < own.end_row) & (col < own.end_col)
                store_pixels(y_ptr, totals[r], row + r, col, valid, region, out_width)


@triton.jit
def _conv_projection_fwd_kernel(
    x_ptr, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, y_ptrs, epss, out_heights, out_widths,
    height, width, channels, stride_b, stride_t, strips, col_blocks,
    CLASS_TOKEN: tl.constexpr, BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes every output of one region, normalized by the given statistics, and the class token."""
    grid_dependency_synchronize()
    region = locate_region(height, width, channels, stride_t, strips, col_blocks, BRANCHES, TILE)
    x_ptr += region.image * stride_b
    for i in tl.static_range(len(BRANCHES)):
        if BRANCHES[i].summands > 0:
            y_ptr = y_ptrs[i] + region.image * (out_heights[i] * out_widths[i] + CLASS_TOKEN) * channels
            if CLASS_TOKEN:
                mask = class_token_mask(region)
                tl.store(y_ptr + region.c, tl.load(x_ptr + region.c, mask=mask), mask=mask)
            _fwd_output(
                x_ptr + CLASS_TOKEN * stride_t, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs,
                y_ptr + CLASS_TOKEN * channels, epss, out_heights[i], out_widths[i], region,
                BRANCHES, i, TILE,
            )  # fmt: skip


def projection_forward(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], gammas: Sequence[Tensor],
    betas: Sequence[Tensor], means: Sequence[Tensor], variances: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Returns every output (B, Tᵢ, C), of convolutions normalized by the given statistics (C,)."""
    x = maybe_contiguous(x)
    outs = [x.new_empty(*shape) for shape in output_shapes(x, geometry)]
    if has_sliding_kernel(geometry):
        sliding_forward(x, geometry, weights, gammas, betas, means, variances, outs)
        return outs
    tiling = RegionTiling.of("fwd", x, geometry)
    launching.launch(
        _conv_projection_fwd_kernel, (tiling.programs,), on=x, options=tiling.config.options,
        x_ptr=x, w_ptrs=packed_above_3x3(weights, tiling.config), gamma_ptrs=tuple(gammas),
        beta_ptrs=tuple(betas), mean_ptrs=tuple(means), var_ptrs=tuple(variances),
        y_ptrs=tuple(geometry.of_each(outs)), epss=geometry.epss, stride_b=x.stride(0),
        stride_t=x.stride(1), **tiling.arguments,
    )  # fmt: skip
    return outs


def output_shapes(x: Tensor, geometry: Geometry) -> list[tuple[int, int, int]]:
    """Returns the shape (B, Tᵢ, C) of every output."""
    batch, _, channels = x.shape
    tokens = class_tokens(x, geometry)
    return [
        (batch, height * width + tokens, channels)
        for (height, width), length in zip(geometry.output_grids, geometry.lengths, strict=True)
        if length
    ]


# Statistics of the batch ----------------------------------------------------------------------------------


@triton.jit
def _stats_branch(
    x_ptr, w_ptr, mean_ptr, m2_ptr, count_ptr, out_height, out_width, region,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes Welford's sums per lane, then merges the lanes."""
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    COLS: tl.constexpr = BRANCH.columns
    R: tl.constexpr = BRANCH.rows
    P: tl.constexpr = TILE.pixels
    BC: tl.constexpr = TILE.channels
    taps = load_taps(w_ptr, region, BRANCH, TILE)
    own = bounds_of(region, out_height, out_width)
    start = tl.zeros([1, BC], TILE.accumulator)
    count = tl.zeros([P], TILE.accumulator)
    mean = tl.zeros([P, BC], TILE.accumulator)
    m2 = tl.zeros([P, BC], TILE.accumulator)
    for row0 in range(own.first_row, own.end_row, P // COLS * R):
        for col0 in range(own.first_col, own.end_col, COLS):
            row, col = tile_positions(row0, col0, COLS, R, TILE)
            accs = conv_rows(start, x_ptr, w_ptr, taps, row, col, region, BRANCH, TILE)
            for r in tl.static_range(R):
                valid = ((row + r < own.end_row) & (col < own.end_col)).to(TILE.accumulator)
                count += valid
                delta = accs[r] - mean
                mean += delta * (valid / tl.maximum(count, 1.0))[:, None]
                m2 += delta * (accs[r] - mean) * valid[:, None]
    total = tl.maximum(tl.sum(count, axis=0), 1.0)
    region_mean = tl.sum(mean * count[:, None], axis=0) / total
    deviation = mean - region_mean[None, :]
    tl.store(mean_ptr + region.c, region_mean, mask=region.c_mask)
    m2_sum = tl.sum(m2 + deviation * deviation * count[:, None], axis=0)
    tl.store(m2_ptr + region.c, m2_sum, mask=region.c_mask)
    tl.store(count_ptr, tl.sum(count, axis=0))


@triton.jit
def _conv_projection_stats_kernel(
    x_ptr, w_ptrs, partial_ptr, counts_ptr, out_heights, out_widths,
    height, width, channels, regions, stride_b, stride_t, strips, col_blocks,
    CLASS_TOKEN: tl.constexpr, BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes mean and sum of squared deviations over one region: partial (branches, 2, regions, C).

    The number of outputs goes to counts (branches, regions).
    """
    grid_dependency_synchronize()
    region = locate_region(height, width, channels, stride_t, strips, col_blocks, BRANCHES, TILE)
    x_ptr += region.image * stride_b + CLASS_TOKEN * stride_t
    plane = tl.cast(regions, tl.int64) * channels
    partial_ptr += region.number.to(tl.int64) * channels
    for i in tl.static_range(len(BRANCHES)):
        _stats_branch(
            x_ptr, w_ptrs[i], partial_ptr + 2 * i * plane, partial_ptr + (2 * i + 1) * plane,
            counts_ptr + i * regions + region.number, out_heights[i], out_widths[i], region,
            BRANCHES, i, TILE,
        )  # fmt: skip


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


class Running(NamedTuple):
    """The running statistics that the statistics of a batch update, of the branches that have such.

    Attributes:
        rows: Their branches.
        means, variances: (C,), contiguous.
        tracked: Their counts of batches.
        momenta: Negative for the average over all batches.
        corrections: n / (n − 1), which makes the variance unbiased.
    """

    rows: Sequence[int] = ()
    means: Sequence[Tensor] = ()
    variances: Sequence[Tensor] = ()
    tracked: Sequence[Tensor] = ()
    momenta: Sequence[float] = ()
    corrections: Sequence[float] = ()


def batch_statistics(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], running: Running
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns mean and biased variance (branches, C) of every branch's convolution, over batch and grid.

    It updates running statistics, whose momenta are not negative.
    """
    x = maybe_contiguous(x)
    if has_sliding_kernel(geometry):
        return _merged(*sliding_statistics(x, geometry, weights), running)
    tiling = RegionTiling.of("stats", x, geometry)
    partial = x.new_empty(len(weights), 2, tiling.regions, x.shape[2], dtype=accumulator_dtype(x))
    counts = partial.new_empty(len(weights), tiling.regions)
    launching.launch(
        _conv_projection_stats_kernel, (tiling.programs,), on=x, options=tiling.config.options,
        x_ptr=x, w_ptrs=packed_above_3x3(weights, tiling.config), partial_ptr=partial, counts_ptr=counts,
        regions=tiling.regions, stride_b=x.stride(0), stride_t=x.stride(1), **tiling.arguments,
    )  # fmt: skip
    return _merged(partial, counts, running)


def _merged(partial: Tensor, counts: Tensor, running: Running) -> tuple[Tensor, Tensor]:
    """Merges the regions' statistics and counts to mean and biased variance (branches, C)."""
    branches, _, regions, channels = partial.shape
    mean, variance = (partial.new_empty(branches, channels) for _ in range(2))
    config = configuration("merge_stats", partial)
    launching.launch(
        _merge_stats_kernel, (-(-channels // config.channels), branches), on=partial, options=config.options,
        partial_ptr=partial, counts_ptr=counts, mean_ptr=mean, var_ptr=variance, channels=channels,
        regions=regions, TILE=Tile.of(config, partial.dtype), **_arguments_of(running),
    )  # fmt: skip
    return mean, variance


# Running statistics ---------------------------------------------------------------------------------------


@triton.jit
def _lerp(ptr, value, weight, mask):
    """Interpolates the value at ``ptr`` towards ``value`` by ``weight``."""
    tl.store(ptr, _interpolated(ptr, value, weight, mask), mask=mask)


def _arguments_of(running: Running) -> dict[str, Any]:
    return {
        "running_mean_ptrs": tuple(running.means), "running_var_ptrs": tuple(running.variances),
        "tracked_ptrs": tuple(running.tracked), "momenta": tuple(running.momenta),
        "corrections": tuple(running.corrections), "ROWS": tuple(running.rows),
    }  # fmt: skip


@triton.jit
def _update_running_kernel(
    mean_ptr, var_ptr, running_mean_ptrs, running_var_ptrs, tracked_ptrs, momenta, corrections, channels,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sets running ← running + momentum · (batch − running) of one branch, and its count of batches.

    A negative momentum means the average over all batches. ROWS are the branches' rows in (branches, C)
    statistics. It must run with one warp: another might count the batch before this one has read the count.
    """
    grid_dependency_synchronize()
    BC: tl.constexpr = TILE.channels
    for i in tl.static_range(len(ROWS)):
        if tl.program_id(0) == i:
            count = tl.load(tracked_ptrs[i]) + 1
            momentum = tl.where(momenta[i] < 0, 1.0 / count.to(TILE.accumulator), momenta[i])
            for c0 in range(0, channels, BC):
                c = c0 + tl.arange(0, BC)
                batch_mean = tl.load(mean_ptr + ROWS[i] * channels + c, mask=c < channels)
                batch_var = tl.load(var_ptr + ROWS[i] * channels + c, mask=c < channels) * corrections[i]
                _lerp(running_mean_ptrs[i] + c, batch_mean, momentum, c < channels)
                _lerp(running_var_ptrs[i] + c, batch_var, momentum, c < channels)
            tl.store(tracked_ptrs[i], count)


def update_running_statistics(mean: Tensor, variance: Tensor, running: Running) -> None:
    """Updates running statistics by those of a batch (branches, C)."""
    config = configuration("update_running", mean)
    launching.launch(
        _update_running_kernel, (len(running[0]),), on=mean, options=config.options,
        mean_ptr=mean, var_ptr=variance, channels=mean.shape[1], TILE=Tile.of(config, mean.dtype),
        **_arguments_of(running),
    )  # fmt: skip
