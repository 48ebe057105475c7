"""The backward kernels of the projection, which write the gradients of parameters, convolutions and input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
    configuration,
    conv_rows,
    load_channel,
    load_partial,
    load_pixels,
    load_taps,
    load_weight,
    locate_region,
    maybe_contiguous,
    packed,
    packed_above_3x3,
    store_pixels,
    tile_positions,
)
from .sliding import has_sliding_kernel
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


@triton.jit
def _bwd_sums_branch(
    x_ptr, w_ptr, dy_ptr, mean_ptr, var_ptr, eps, partial_ptr, plane, out_height, out_width, region,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes Σdy and Σdy·x̂ of one branch over a region, ``plane`` elements apart."""
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    COLS: tl.constexpr = BRANCH.columns
    R: tl.constexpr = BRANCH.rows
    P: tl.constexpr = TILE.pixels
    BC: tl.constexpr = TILE.channels
    start = -load_channel(mean_ptr, region, TILE)[None, :]
    rstd = 1.0 / tl.sqrt(load_channel(var_ptr, region, TILE) + eps)
    taps = load_taps(w_ptr, region, BRANCH, TILE)
    own = bounds_of(region, out_height, out_width)
    sum_dy = tl.zeros([P, BC], TILE.accumulator)
    sum_dy_xhat = tl.zeros([P, BC], TILE.accumulator)
    for row0 in range(own.first_row, own.end_row, P // COLS * R):
        for col0 in range(own.first_col, own.end_col, COLS):
            row, col = tile_positions(row0, col0, COLS, R, TILE)
            own_col = tl.where(col < own.end_col, col, -1)  # outside, hence 0
            accs = conv_rows(start, x_ptr, w_ptr, taps, row, col, region, BRANCH, TILE)
            for r in tl.static_range(R):
                dy = load_pixels(dy_ptr, row + r, own_col, region, own.end_row, out_width, region.channels)
                dy = dy.to(TILE.accumulator)
                sum_dy += dy
                sum_dy_xhat += dy * accs[r]
    tl.store(partial_ptr + region.c, tl.sum(sum_dy, axis=0), mask=region.c_mask)
    tl.store(partial_ptr + plane + region.c, tl.sum(sum_dy_xhat, axis=0) * rstd, mask=region.c_mask)


@triton.jit
def _conv_projection_bwd_sums_kernel(
    x_ptr, w_ptrs, dy_ptrs, mean_ptrs, var_ptrs, epss, partial_ptr, out_heights, out_widths,
    height, width, channels, regions, stride_b, stride_t, strips, col_blocks,
    CLASS_TOKEN: tl.constexpr, BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes Σdy and Σdy·x̂ of every branch over one region: partial (branches, 2, regions, C)."""
    grid_dependency_synchronize()
    region = locate_region(height, width, channels, stride_t, strips, col_blocks, BRANCHES, TILE)
    x_ptr += region.image * stride_b + CLASS_TOKEN * stride_t
    plane = tl.cast(regions, tl.int64) * channels
    partial_ptr += region.number.to(tl.int64) * channels
    for i in tl.static_range(len(BRANCHES)):
        tokens = out_heights[i] * out_widths[i] + CLASS_TOKEN
        _bwd_sums_branch(
            x_ptr, w_ptrs[i], dy_ptrs[i] + (region.image * tokens + CLASS_TOKEN) * channels,
            mean_ptrs[i], var_ptrs[i], epss[i], partial_ptr + 2 * i * plane, plane,
            out_heights[i], out_widths[i], region, BRANCHES, i, TILE,
        )  # fmt: skip


def backward_sums(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], means: Sequence[Tensor],
    variances: Sequence[Tensor], dys: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Returns Σdy = dβ and Σdy·x̂ = dγ of every branch: (branches, 2, C)."""
    x = maybe_contiguous(x)
    if has_sliding_kernel(geometry):
        partial = sliding_backward_sums(x, geometry, weights, means, variances, dys)
    else:
        tiling = RegionTiling.of("bwd_sums", x, geometry)
        partial = x.new_empty(2 * len(weights), tiling.regions, x.shape[2], dtype=accumulator_dtype(x))
        launching.launch(
            _conv_projection_bwd_sums_kernel, (tiling.programs,), on=x, options=tiling.config.options,
            x_ptr=x, w_ptrs=packed_above_3x3(weights, tiling.config), dy_ptrs=tuple(dys),
            mean_ptrs=tuple(means), var_ptrs=tuple(variances), epss=geometry.epss, partial_ptr=partial,
            regions=tiling.regions, stride_b=x.stride(0), stride_t=x.stride(1), **tiling.arguments,
        )  # fmt: skip
    return sum_regions(partial, [1] * len(partial), partial.dtype).view(-1, 2, x.shape[2])


# The convolutions -----------------------------------------------------------------------------------------


@triton.jit
def _bwd_conv_branch(
    x_ptr, w_ptr, dy_ptr, gamma_ptr, mean_ptr, var_ptr, eps, sums_ptr, dconv_ptr, partial_ptr, plane,
    inverse_count, tap_row, out_height, out_width, region,
    BATCH_STATS: tl.constexpr, BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes dconv of one branch over a region, and the region's share of the gradient of its weight."""
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    K: tl.constexpr = BRANCH.kernel_size
    STRIDE: tl.constexpr = BRANCH.stride
    PAD: tl.constexpr = BRANCH.padding
    DIL: tl.constexpr = BRANCH.dilation
    COLS: tl.constexpr = BRANCH.columns
    P: tl.constexpr = TILE.pixels
    BC: tl.constexpr = TILE.channels
    ROWS: tl.constexpr = K if K <= 3 else 1  # rows of taps whose gradient this program sums
    rstd = 1.0 / tl.sqrt(load_channel(var_ptr, region, TILE) + eps)
    scale = (load_channel(gamma_ptr, region, TILE) * rstd)[None, :]
    if BATCH_STATS:
        start = -load_channel(mean_ptr, region, TILE)[None, :]
        offset = (load_channel(sums_ptr, region, TILE) * inverse_count)[None, :]
        slope = (load_channel(sums_ptr + region.channels, region, TILE) * inverse_count * rstd)[None, :]
    own = bounds_of(region, out_height, out_width)
    dws = ()
    for _ in tl.static_range(ROWS * K):
        dws = dws + (tl.zeros([P, BC], TILE.accumulator),)
    for row0 in range(own.first_row, own.end_row, P // COLS):
        for col0 in range(own.first_col, own.end_col, COLS):
            row, col = tile_positions(row0, col0, COLS, 1, TILE)
            inside = (row < own.end_row) & (col < own.end_col)
            window = ()  # in the dtype of x, to take half the registers; shared by the convolution and dw
            for a in tl.static_range(ROWS):
                for b in tl.static_range(K):
                    in_row, in_col = row * STRIDE - PAD + (tap_row + a) * DIL, col * STRIDE - PAD + b * DIL
                    x = load_pixels(
                        x_ptr, in_row, in_col, region, region.height, region.width, region.stride_t
                    )
                    window = window + (x,)
            own_row = tl.where(inside, row, -1)  # outside, hence 0
            dconv = load_pixels(dy_ptr, own_row, col, region, own.end_row, out_width, region.channels)
            dconv = dconv.to(TILE.accumulator)
            if BATCH_STATS:
                if ROWS == K:
                    acc = tl.zeros([P, BC], TILE.accumulator) + start
                    for t in tl.static_range(K * K):
                        acc += window[t].to(TILE.accumulator) * load_weight(w_ptr, t, region, TILE)
                else:
                    acc = conv_rows(start, x_ptr, w_ptr, (), row, col, region, BRANCH, TILE)[0]
                dconv = dconv - offset - acc * slope
            dconv = tl.where(inside[:, None] & region.c_mask[None, :], dconv * scale, 0.0)
            store_pixels(dconv_ptr, dconv, row, col, inside & (tap_row == 0), region, out_width)
            updated = ()
            for t in tl.static_range(ROWS * K):
                updated = updated + (dws[t] + window[t].to(TILE.accumulator) * dconv,)
            dws = updated
    for t in tl.static_range(ROWS * K):
        dw_ptr = partial_ptr + (tap_row * K + t) * plane
        tl.store(dw_ptr + region.c, tl.sum(dws[t], axis=0), mask=region.c_mask)


@triton.jit
def _conv_projection_bwd_conv_kernel(
    x_ptr, w_ptrs, dy_ptrs, gamma_ptrs, mean_ptrs, var_ptrs, epss, sums_ptr, dconv_ptrs, partial_ptr,
    inverse_counts, out_heights, out_widths,
    height, width, channels, regions, stride_b, stride_t, strips, col_blocks,
    CLASS_TOKEN: tl.constexpr, BATCH_STATS: tl.constexpr, BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes dconv, the gradient of every branch's convolution, and the weights' gradients over one region.

    Above 3×3 the second axis of the grid is the row of taps, since more sums would not fit in registers; the
    partial sums are (taps of all branches, regions, C).
    """
    grid_dependency_synchronize()
    region = locate_region(height, width, channels, stride_t, strips, col_blocks, BRANCHES, TILE)
    tap_row = tl.program_id(1)
    x_ptr += region.image * stride_b + CLASS_TOKEN * stride_t
    plane = tl.cast(regions, tl.int64) * channels
    partial_ptr += region.number.to(tl.int64) * channels
    for i in tl.static_range(len(BRANCHES)):
        if tap_row < (1 if BRANCHES[i].kernel_size <= 3 else BRANCHES[i].kernel_size):
            spatial = out_heights[i] * out_widths[i]
            _bwd_conv_branch(
                x_ptr, w_ptrs[i],
                dy_ptrs[i] + (region.image * (spatial + CLASS_TOKEN) + CLASS_TOKEN) * channels,
                gamma_ptrs[i], mean_ptrs[i], var_ptrs[i], epss[i], sums_ptr + 2 * i * channels,
                dconv_ptrs[i] + region.image * spatial * channels, partial_ptr, plane, inverse_counts[i],
                tap_row, out_heights[i], out_widths[i], region, BATCH_STATS, BRANCHES, i, TILE,
            )  # fmt: skip
        partial_ptr += BRANCHES[i].kernel_size * BRANCHES[i].kernel_size * plane


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
    if has_sliding_kernel(geometry):
        partial = sliding_backward_conv(
            x, geometry, weights, gammas, means, variances, dys, sums, counts, dconvs
        )
    else:
        tiling = RegionTiling.of("bwd_conv", x, geometry)
        partial = x.new_empty(sum(taps), tiling.regions, channels, dtype=accumulator_dtype(x))
        tap_rows = max(1 if k <= 3 else k for k in geometry.kernel_sizes)
        launching.launch(
            _conv_projection_bwd_conv_kernel, (tiling.programs, tap_rows), on=x,
            options=tiling.config.options,
            x_ptr=x, w_ptrs=packed(weights, tiling.config), dy_ptrs=tuple(dys), gamma_ptrs=tuple(gammas),
            mean_ptrs=tuple(means), var_ptrs=tuple(variances), epss=geometry.epss,
            sums_ptr=x if sums is None else sums, dconv_ptrs=tuple(dconvs), partial_ptr=partial,
            inverse_counts=tuple(1.0 / n for n in counts), regions=tiling.regions, stride_b=x.stride(0),
            stride_t=x.stride(1), BATCH_STATS=sums is not None, **tiling.arguments,
        )  # fmt: skip
    return dconvs, sum_regions(partial, taps, weights[0].dtype)


def weights_of(total: Tensor, kernel_sizes: Sequence[int]) -> list[Tensor]:
    """Returns the gradients of weights (C, 1, k, k), as views of one tensor of all."""
    taps = [k * k for k in kernel_sizes]
    channels = total.shape[0] // sum(taps)
    parts = total.split([n * channels for n in taps])
    return [part.view(channels, 1, k, k) for part, k in zip(parts, kernel_sizes, strict=True)]


# The input ------------------------------------------------------------------------------------------------


@triton.jit
def _bwd_input_block(
    accs, dconv_ptr, w_ptr, block_row, block_col, out_height, out_width, region,
    ROW: tl.constexpr, COL: tl.constexpr, BLOCK: tl.constexpr,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds one branch's transposed convolution of dconv at pixels (ROW, COL…) of a block of BLOCK × BLOCK.

    The stride divides BLOCK, so the taps of each pixel are compile-time constants; a loaded dconv serves
    every pixel that it reaches.
    """
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    K: tl.constexpr = BRANCH.kernel_size
    STRIDE: tl.constexpr = BRANCH.stride
    PAD: tl.constexpr = BRANCH.padding
    DIL: tl.constexpr = BRANCH.dilation
    FIRST: tl.constexpr = (PAD - (K - 1) * DIL) // STRIDE
    END: tl.constexpr = (BLOCK - 1 + PAD) // STRIDE + 1
    STEP: tl.constexpr = BLOCK // STRIDE
    for j in tl.static_range(FIRST, END):
        ahead = ROW + PAD - j * STRIDE  # of the first tap's row
        if ahead >= 0 and ahead % DIL == 0 and ahead // DIL < K:
            for i in tl.static_range(FIRST, END):
                row, col = block_row * STEP + j, block_col * STEP + i
                dconv = load_pixels(dconv_ptr, row, col, region, out_height, out_width, region.channels)
                dconv = dconv.to(TILE.accumulator)
                updated = ()
                for n in tl.static_range(len(accs)):
                    acc = accs[n]
                    for b in tl.static_range(K):
                        if i * STRIDE - PAD + b * DIL == COL + n:
                            acc += dconv * load_weight(w_ptr, ahead // DIL * K + b, region, TILE)
                    updated = updated + (acc,)
                accs = updated
    return accs


@triton.jit
def _bwd_input_pixel(
    acc, dconv_ptr, w_ptr, row, col, out_height, out_width, region,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds the same at single pixels for any stride, testing which taps reach each pixel."""
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    K: tl.constexpr = BRANCH.kernel_size
    STRIDE: tl.constexpr = BRANCH.stride
    PAD: tl.constexpr = BRANCH.padding
    DIL: tl.constexpr = BRANCH.dilation
    for a in tl.static_range(K):
        y = row + PAD - a * DIL
        y = tl.where((y >= 0) & (y % STRIDE == 0), y // STRIDE, -1)
        for b in tl.static_range(K):
            x = col + PAD - b * DIL
            x = tl.where((x >= 0) & (x % STRIDE == 0), x // STRIDE, -1)
            dconv = load_pixels(dconv_ptr, y, x, region, out_height, out_width, region.channels)
            acc += dconv.to(TILE.accumulator) * load_weight(w_ptr, a * K + b, region, TILE)
    return acc


@triton.jit
def _bwd_input_tile(
    dconv_ptrs, w_ptrs, block_row, block_col, out_heights, out_widths, region,
    ROW: tl.constexpr, COL: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns a tuple: all branches summed at WIDTH pixels, from (ROW, COL) of a BLOCK × BLOCK block on."""
    P: tl.constexpr = TILE.pixels
    BC: tl.constexpr = TILE.channels
    accs = ()
    for _ in tl.static_range(WIDTH):
        accs = accs + (tl.zeros([P, BC], TILE.accumulator),)
    for i in tl.static_range(len(BRANCHES)):
        dconv_ptr = dconv_ptrs[i] + region.image * out_heights[i] * out_widths[i] * region.channels
        if BLOCK % BRANCHES[i].stride == 0:
            accs = _bwd_input_block(
                accs, dconv_ptr, w_ptrs[i], block_row, block_col, out_heights[i], out_widths[i], region,
                ROW, COL, BLOCK, BRANCHES, i, TILE,
            )  # fmt: skip
        else:
            accs = (
                _bwd_input_pixel(
                    accs[0], dconv_ptr, w_ptrs[i], block_row, block_col, out_heights[i], out_widths[i],
                    region, BRANCHES, i, TILE,
                ),
            )  # fmt: skip
    return accs


@triton.jit
def _conv_projection_bwd_input_kernel(
    dx_ptr, w_ptrs, dconv_ptrs, dy_ptrs, out_heights, out_widths,
    height, width, channels, strips, col_blocks,
    CLASS_TOKEN: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes the input's gradient over one region of the input grid, all branches summed in registers.

    A lane takes BLOCK × BLOCK pixels, WIDTH of a row at a time; BLOCK is 1 unless every stride divides it.
    """
    grid_dependency_synchronize()
    P: tl.constexpr = TILE.pixels
    BC: tl.constexpr = TILE.channels
    region = locate_region(height, width, channels, channels, strips, col_blocks, BRANCHES, TILE)
    dx_ptr += region.image * (height * width + CLASS_TOKEN) * channels
    if CLASS_TOKEN:
        mask = class_token_mask(region)
        total = tl.zeros([BC], TILE.accumulator)
        for i in tl.static_range(len(BRANCHES)):
            if BRANCHES[i].summands > 0:
                dy_ptr = dy_ptrs[i] + region.image * (out_heights[i] * out_widths[i] + 1) * channels
                total += tl.load(dy_ptr + region.c, mask=mask, other=0.0).to(TILE.accumulator)
        tl.store(dx_ptr + region.c, total.to(dx_ptr.dtype.element_ty), mask=mask)
        dx_ptr += channels
    own = bounds_of(region, tl.cdiv(height, BLOCK), tl.cdiv(width, BLOCK))  # in blocks
    for row0 in range(own.first_row, own.end_row, P // COLS):
        for col0 in range(own.first_col, own.end_col, COLS):
            block_row, block_col = tile_positions(row0, col0, COLS, 1, TILE)
            inside = (block_row < own.end_row) & (block_col < own.end_col)
            for pixel in tl.static_range(0, BLOCK * BLOCK, WIDTH):
                accs = _bwd_input_tile(
                    dconv_ptrs, w_ptrs, block_row, block_col, out_heights, out_widths, region,
                    pixel // BLOCK, pixel % BLOCK, BLOCK, WIDTH, BRANCHES, TILE,
                )  # fmt: skip
                for n in tl.static_range(WIDTH):
                    row, col = block_row * BLOCK + pixel // BLOCK, block_col * BLOCK + pixel % BLOCK + n
                    valid = inside & (row < height) & (col < width)
                    store_pixels(dx_ptr, accs[n], row, col, valid, region, width)


def backward_input(
    geometry: Geometry, weights: Sequence[Tensor], dconvs: Sequence[Tensor], dys: Sequence[Tensor]
) -> Tensor:
    """Returns the input's gradient (B, T, C), all branches summed, class token included."""
    batch, spatial, channels = dconvs[0].shape
    height, width = geometry.grid
    dx = dconvs[0].new_empty(batch, height * width + dys[0].shape[1] - spatial, channels)
    if has_sliding_kernel(geometry):
        sliding_backward_input(dx, geometry, weights, dconvs, dys)
        return dx
    tiling = RegionTiling.of("bwd_input", dx, geometry)
    block = 2 if all(stride in (1, 2) for stride in geometry.strides) else 1
    launching.launch(
        _conv_projection_bwd_input_kernel, (tiling.programs,), on=dx, options=tiling.config.options,
        dx_ptr=dx, w_ptrs=packed(weights, tiling.config), dconv_ptrs=tuple(dconvs), dy_ptrs=tuple(dys),
        COLS=tiling.columns(-(-width // block)), BLOCK=block, WIDTH=min(tiling.config.rows, block),
        **tiling.arguments,
    )  # fmt: skip
    return dx
