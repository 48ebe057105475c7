"""The launches of the projection's forward: its outputs, and the statistics of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ....launch import launching
from ...graph_operators import launcher
from ...triton_launch import accumulator_dtype, grid_dependency_synchronize
from .common import Geometry, Tile, class_tokens, configuration, load_partial, maybe_contiguous
from .sliding_forward import sliding_forward, sliding_statistics

# The outputs ----------------------------------------------------------------------------------------------


def _empty_outputs(x: Tensor, grid: Sequence[int], strides: Sequence[int], *_: Any) -> list[Tensor]:
    geometry, (batch, _, channels) = Geometry.of(grid, strides), x.shape
    tokens = class_tokens(x, geometry)
    return [x.new_empty(batch, height * width + tokens, channels) for height, width in geometry.output_grids]


@launcher("conv_projection", _empty_outputs)
def projection_forward(
    x: Tensor, grid: list[int], strides: list[int], epss: list[float], weights: list[Tensor],
    gammas: list[Tensor], betas: list[Tensor], means: list[Tensor], variances: list[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Returns every output (B, Tᵢ, C), of convolutions normalized by the given statistics (C,)."""
    x, outs = maybe_contiguous(x), _empty_outputs(x, grid, strides)
    sliding_forward(x, Geometry.of(grid, strides), epss, weights, gammas, betas, means, variances, outs)
    return outs


# Statistics of the batch ----------------------------------------------------------------------------------


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

    Args:
        x, grid, strides, weights: As of :func:`projection_forward`.
        rows: The branches with running statistics, which it updates.
        running_means, running_vars: Theirs (C,), contiguous.
        tracked: Their counts of batches.
        momenta: Weights of the batch.
        corrections: n / (n − 1), which makes the variance unbiased.
    """
    parts = sliding_statistics(maybe_contiguous(x), Geometry.of(grid, strides), weights)
    return _merged(*parts, rows, running_means, running_vars, tracked, momenta, corrections)


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
