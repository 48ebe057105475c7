"""The launches of the projection's backward, and sums over regions."""

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
from .common import Geometry, Tile, configuration, load_partial, maybe_contiguous
from .sliding_backward import sliding_backward_conv, sliding_backward_input, sliding_backward_sums

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


# All gradients --------------------------------------------------------------------------------------------


def _gradients_like(
    x: Tensor, grid: Any, strides: Any, epss: Any, weights: Sequence[Tensor], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dweights = weights[0].new_empty(sum(weight.numel() for weight in weights))
    sums = x.new_empty(len(weights), 2, x.shape[2], dtype=accumulator_dtype(x))
    return x.new_empty(x.shape), dweights, sums


@launcher("conv_projection_backward", _gradients_like)
def projection_backward(
    x: Tensor, grid: list[int], strides: list[int], epss: list[float], weights: list[Tensor],
    gammas: list[Tensor], means: list[Tensor], variances: list[Tensor], dys: list[Tensor], batch_stats: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients, in three passes over the tokens.

    ``dys`` are those of the outputs, contiguous; ``batch_stats`` says whether the statistics are the batch's;
    the other arguments are those of the forward. There are three results: the gradient of x; of all weights
    in one tensor, see :func:`weights_of`; and of every branch Σdy = dβ and Σdy·x̂ = dγ, (branches, 2, C).
    """
    x, geometry = maybe_contiguous(x), Geometry.of(grid, strides)
    batch, _, channels = x.shape
    partial = sliding_backward_sums(x, geometry, epss, weights, means, variances, dys)
    sums = sum_regions(partial, [1] * len(partial), partial.dtype).view(-1, 2, channels)
    dconvs = [x.new_empty(batch, h * w, channels) for h, w in geometry.output_grids]
    partial = sliding_backward_conv(
        x, geometry, epss, weights, gammas, means, variances, dys, sums if batch_stats else None, dconvs
    )  # fmt: skip
    dweights = sum_regions(partial, [_TAPS] * len(weights), weights[0].dtype)
    dx = x.new_empty(x.shape)
    sliding_backward_input(dx, geometry, weights, dconvs, dys)
    return dx, dweights, sums


_TAPS = 9


def weights_of(total: Tensor, count: int) -> list[Tensor]:
    """Returns the gradients of ``count`` weights (C, 1, 3, 3), as views of one tensor of all."""
    return list(total.view(count, -1, 1, 3, 3).unbind())
