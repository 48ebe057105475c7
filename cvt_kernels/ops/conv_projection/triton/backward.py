"""The projection's backward: the gradients of parameters, convolutions and input, and sums over regions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launching
from ...triton_launch import grid_dependency_synchronize
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


# Sums over the batch --------------------------------------------------------------------------------------


def backward_sums(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], means: Sequence[Tensor],
    variances: Sequence[Tensor], dys: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Returns Σdy = dβ and Σdy·x̂ = dγ of every branch: (branches, 2, C)."""
    x = maybe_contiguous(x)
    partial = sliding_backward_sums(x, geometry, weights, means, variances, dys)
    return sum_regions(partial, [1] * len(partial), partial.dtype).view(-1, 2, x.shape[2])


# The convolutions -----------------------------------------------------------------------------------------


def backward_conv(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], gammas: Sequence[Tensor],
    means: Sequence[Tensor], variances: Sequence[Tensor], dys: Sequence[Tensor], sums: Tensor | None,
    counts: Sequence[float],
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Returns the gradients of the convolutions' outputs (B, Hᵢ·Wᵢ, C), and of all weights in one tensor.

    :func:`weights_of` gives the weights' own.

    Args:
        sums: The result of :func:`backward_sums` for batch statistics, else None.
        counts: Values per channel in the statistics.
    """
    x = maybe_contiguous(x)
    batch, _, channels = x.shape
    dconvs = [x.new_empty(batch, h * w, channels) for h, w in geometry.output_grids]
    taps = [k * k for k in geometry.kernel_sizes]
    partial = sliding_backward_conv(x, geometry, weights, gammas, means, variances, dys, sums, counts, dconvs)
    return dconvs, sum_regions(partial, taps, weights[0].dtype)


def weights_of(total: Tensor, kernel_sizes: Sequence[int]) -> list[Tensor]:
    """Returns the gradients of weights (C, 1, k, k), as views of one tensor of all."""
    taps = [k * k for k in kernel_sizes]
    channels = total.shape[0] // sum(taps)
    parts = total.split([n * channels for n in taps])
    return [part.view(channels, 1, k, k) for part, k in zip(parts, kernel_sizes, strict=True)]


# The input ------------------------------------------------------------------------------------------------


def backward_input(
    geometry: Geometry, weights: Sequence[Tensor], dconvs: Sequence[Tensor], dys: Sequence[Tensor]
) -> Tensor:
    """Returns the input's gradient (B, T, C), all branches summed, class token included."""
    batch, spatial, channels = dconvs[0].shape
    height, width = geometry.grid
    dx = dconvs[0].new_empty(batch, height * width + dys[0].shape[1] - spatial, channels)
    sliding_backward_input(dx, geometry, weights, dconvs, dys)
    return dx
