"""Triton kernels of ``conv_projection``: y = BatchNorm(depthwise_conv(x)), all branches from one read of x.

Layout: x (B, T, C) and every yᵢ (B, Tᵢ, C), channels contiguous, spatial tokens row-major, class token first.

A program takes one image, one region of its grid (a strip of rows × a block of columns, cut in the same
proportion for every branch) and BC channels. It computes a branch in tiles of P pixels × BC channels; each
lane of P holds R consecutive output rows in registers, so that a loaded input row serves all of them. The
second and third branch are meant to find x in L1 or L2; the units below count on it, and no GPU has confirmed it.

Launches, in units of one B·T·C activation (read + written), for CvT's q (stride 1), k and v (stride 2):

- evaluation: x once, the outputs once: 1 + 1.5, in one launch.
- training: the statistics (x: 1), a merge of the partials, an update of the running statistics, then the evaluation
  kernel: 3.5 in all. The convolution is recomputed, not stored. Of a process group, each process merges the
  statistics of all between those launches.
- backward: Σdy and Σdy·x̂ (1 + 1.5), dconv and dw (2.5 + 1.5), dx (1.5 + 1); nothing is saved but x and the
  statistics.

Every sum over pixels is a partial sum per region, merged in a fixed order: no atomics, equal bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .... import checks, machine
from ....reference import ConvBatchNorm

# Launch configurations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel cuts its work.

    Attributes:
        pixels: P, pixels of a tile.
        channels: BC, channels of a tile; 8 of them are one 16-byte load in half precision.
        rows: R, outputs that a lane holds in registers: below one another (1 above 3×3); beside one another
            in bwd_input.
        region_rows: Rows of a region on the input grid.
        region_cols: Columns of a region on the input grid.
        num_warps: Warps of a program.
        registers: The most that a thread may take. Without a bound the assembler aims at an occupancy of its own
            choice and spills to reach it.
    """

    pixels: int
    channels: int
    rows: int
    region_rows: int
    region_cols: int
    num_warps: int
    registers: int = 255

    @property
    def options(self) -> dict[str, int]:
        """Triton's options of a launch."""
        return {"num_warps": self.num_warps, "maxnreg": self.registers}


# By compute capability and kernel, for 2-byte dtypes: with 4 warps a tile of 16 × 64 is one 16-byte vector per thread.
# 4-byte dtypes get half the channels, so that it stays one vector, and twice the rows in the same registers. A thread
# takes up to 255 registers, most for the weights of its channels, so a multiprocessor holds two programs; the regions of
# both fit in its L1: 2 · 18 · 34 pixels of 128 bytes in 192 KiB (sm_80) or 256 KiB (sm_90, sm_100), half as many rows in
# 128 KiB. Nothing spills (docs/kernels.md); nothing has been timed on a GPU yet.


def _configs(region_rows: int) -> dict[str, LaunchConfig]:
    base = LaunchConfig(pixels=16, channels=64, rows=2, region_rows=region_rows, region_cols=32, num_warps=4)
    return {
        **dict.fromkeys(("fwd", "stats", "bwd_sums"), base),
        **dict.fromkeys(("bwd_conv", "bwd_input"), replace(base, rows=1)),
    }


CONFIGS = {80: _configs(16), 86: _configs(8), 90: _configs(16), 100: _configs(16), 120: _configs(8)}
_MERGE = LaunchConfig(pixels=64, channels=16, rows=1, region_rows=0, region_cols=0, num_warps=4)
_UPDATE = LaunchConfig(pixels=1, channels=256, rows=1, region_rows=0, region_cols=0, num_warps=1)

# Kernels --------------------------------------------------------------------------------------------------
#
# BRANCH is (kernel size, stride, padding, dilation, columns per tile, rows per lane R); TILE is (P, BC, accumulator
# dtype). ``region`` bundles (strip, strips, column block, column blocks, c, c_mask, height, width, token stride,
# channels, offset of this block's packed weights). Packed weights are (channel blocks, taps of all branches, BC), which
# each branch enters at its first tap.


@triton.jit
def _locate(channels, strips, col_blocks, BC: tl.constexpr):
    """This program's channels and their block, region, image, strip and column block; channel blocks are neighbours."""
    channel_blocks = tl.cdiv(channels, BC)
    region = tl.program_id(0) // channel_blocks
    block = tl.program_id(0) % channel_blocks
    c = block * BC + tl.arange(0, BC)
    image = (region // (col_blocks * strips)).to(tl.int64)
    return c, c < channels, block, region, image, region // col_blocks % strips, region % col_blocks


@triton.jit
def _taps(BRANCHES: tl.constexpr):
    """Taps of all branches."""
    taps = 0
    for i in tl.static_range(len(BRANCHES)):
        taps += BRANCHES[i][0] * BRANCHES[i][0]
    return taps


@triton.jit
def _share(size, part, parts):
    """Where the part-th of ``parts`` equal shares of ``size`` begins and ends."""
    share = tl.cdiv(size, parts)
    return part * share, tl.minimum(part * share + share, size)


@triton.jit
def _load_weight(w_ptr, t, region, TILE: tl.constexpr):
    """[1, BC] of tap t, from packed weights: taps are a constant apart, so that one address serves them all."""
    return tl.load(w_ptr + region[10] + tl.arange(0, TILE[1]) + t * TILE[1]).to(TILE[2])[None, :]


@triton.jit
def _load_taps(w_ptr, region, BRANCH: tl.constexpr, TILE: tl.constexpr):
    """The K×K weights (C, 1, K, K) as a tuple of [1, BC]; none above 3×3, which would not fit in registers.

    One tile is loaded and turned in shared memory, once: a thread's channels lie K·K apart, and loading them one by
    one would take as many instructions as the pixels do.
    """
    K: tl.constexpr = BRANCH[0]
    BC: tl.constexpr = TILE[1]
    taps = ()
    if K <= 3:
        t = tl.arange(0, 16)
        offset = region[4][:, None] * (K * K) + t[None, :]
        tile = tl.load(w_ptr + offset, mask=region[5][:, None] & (t < K * K)[None, :], other=0.0)
        parts = (tl.reshape(tile, [BC, 2, 2, 2, 2]),)
        for _ in tl.static_range(4):
            low = ()
            high = ()
            for i in tl.static_range(len(parts)):
                even, odd = tl.split(parts[i])
                low = low + (even,)
                high = high + (odd,)
            parts = low + high
        for i in tl.static_range(K * K):
            taps = taps + (parts[i].to(TILE[2])[None, :],)
    return taps


@triton.jit
def _load_pixels(x_ptr, row, col, c, c_mask, height, width, stride_t):
    """[P, BC] pixels of a zero-padded map."""
    inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
    offset = (row * width + col) * stride_t
    return tl.load(x_ptr + offset[:, None] + c[None, :], mask=inside[:, None] & c_mask[None, :], other=0.0)


@triton.jit
def _conv_rows(start, x_ptr, w_ptr, taps, row, col, region, BRANCH: tl.constexpr, TILE: tl.constexpr):
    """``start`` [1, BC] plus the convolution at the R output rows from ``row`` on, as a tuple of [P, BC].

    Without ``taps`` it loads packed weights as it goes.
    """
    PAD: tl.constexpr = BRANCH[2]
    P: tl.constexpr = TILE[0]
    BC: tl.constexpr = TILE[1]
    K: tl.constexpr = BRANCH[0]
    STRIDE: tl.constexpr = BRANCH[1]
    DIL: tl.constexpr = BRANCH[3]
    R: tl.constexpr = BRANCH[5]
    c, c_mask = region[4], region[5]
    accs = ()
    for _ in tl.static_range(R):
        accs = accs + (tl.zeros([P, BC], TILE[2]) + start,)
    for j in tl.static_range((R - 1) * STRIDE + (K - 1) * DIL + 1):  # input rows, from the first tap's on
        for b in tl.static_range(K):
            x = _load_pixels(
                x_ptr, row * STRIDE - PAD + j, col * STRIDE - PAD + b * DIL,
                c, c_mask, region[6], region[7], region[8],
            ).to(TILE[2])  # fmt: skip
            updated = ()
            for r in tl.static_range(R):
                acc = accs[r]
                if j >= r * STRIDE and (j - r * STRIDE) % DIL == 0 and (j - r * STRIDE) // DIL < K:
                    if len(taps) > 0:
                        acc += x * taps[(j - r * STRIDE) // DIL * K + b]
                    else:
                        acc += x * _load_weight(w_ptr, (j - r * STRIDE) // DIL * K + b, region, TILE)
                updated = updated + (acc,)
            accs = updated
    return accs


@triton.jit
def _load_channel(ptr, c, c_mask, TILE: tl.constexpr):
    return tl.load(ptr + c, mask=c_mask, other=1.0).to(TILE[2])


@triton.jit
def _fwd_branch(
    x_ptr, w_ptr, gamma_ptr, beta_ptr, mean_ptr, var_ptr, y_ptr, eps, out_height, out_width, region,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    COLS: tl.constexpr = BRANCH[4]
    R: tl.constexpr = BRANCH[5]
    P: tl.constexpr = TILE[0]
    c, c_mask, channels = region[4], region[5], region[9]
    scale = (
        _load_channel(gamma_ptr, c, c_mask, TILE) / tl.sqrt(_load_channel(var_ptr, c, c_mask, TILE) + eps)
    )[None, :]
    beta = _load_channel(beta_ptr, c, c_mask, TILE)[None, :]
    # Subtracted first, in the accumulator: (β − mean · scale) would cancel where the mean is many deviations.
    start = -_load_channel(mean_ptr, c, c_mask, TILE)[None, :]
    taps = _load_taps(w_ptr, region, BRANCH, TILE)
    first_row, end_row = _share(out_height, region[0], region[1])
    first_col, end_col = _share(out_width, region[2], region[3])
    lane = tl.arange(0, P)
    for row0 in range(first_row, end_row, P // COLS * R):
        for col0 in range(first_col, end_col, COLS):
            row, col = row0 + lane // COLS * R, col0 + lane % COLS
            accs = _conv_rows(start, x_ptr, w_ptr, taps, row, col, region, BRANCH, TILE)
            for r in tl.static_range(R):
                y = accs[r] * scale + beta
                offset = ((row + r) * out_width + col) * channels
                mask = ((row + r < end_row) & (col < end_col))[:, None] & c_mask[None, :]
                tl.store(y_ptr + offset[:, None] + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _conv_projection_fwd_kernel(
    x_ptr, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, y_ptrs, epss, out_heights, out_widths,
    height, width, channels, stride_b, stride_t, strips, col_blocks,
    CLASS_TOKEN: tl.constexpr, BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Every branch of one region, normalised by the given statistics, and the class token."""
    c, c_mask, block, _, image, strip, col_block = _locate(channels, strips, col_blocks, TILE[1])
    packed = block * _taps(BRANCHES) * TILE[1]
    region = (strip, strips, col_block, col_blocks, c, c_mask, height, width, stride_t, channels, packed)
    x_ptr += image * stride_b
    for i in tl.static_range(len(BRANCHES)):
        y_ptr = y_ptrs[i] + image * (out_heights[i] * out_widths[i] + CLASS_TOKEN) * channels
        if CLASS_TOKEN:
            first = c_mask & (strip == 0) & (col_block == 0)
            tl.store(y_ptr + c, tl.load(x_ptr + c, mask=first), mask=first)
        _fwd_branch(
            x_ptr + CLASS_TOKEN * stride_t, w_ptrs[i], gamma_ptrs[i], beta_ptrs[i], mean_ptrs[i], var_ptrs[i],
            y_ptr + CLASS_TOKEN * channels, epss[i], out_heights[i], out_widths[i], region,
            BRANCHES, i, TILE,
        )  # fmt: skip


@triton.jit
def _stats_branch(
    x_ptr, w_ptr, mean_ptr, m2_ptr, out_height, out_width, region,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Welford per lane, then one merge over the lanes."""
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    COLS: tl.constexpr = BRANCH[4]
    R: tl.constexpr = BRANCH[5]
    P: tl.constexpr = TILE[0]
    BC: tl.constexpr = TILE[1]
    c, c_mask = region[4], region[5]
    taps = _load_taps(w_ptr, region, BRANCH, TILE)
    first_row, end_row = _share(out_height, region[0], region[1])
    first_col, end_col = _share(out_width, region[2], region[3])
    lane = tl.arange(0, P)
    start = tl.zeros([1, BC], TILE[2])
    count = tl.zeros([P], TILE[2])
    mean = tl.zeros([P, BC], TILE[2])
    m2 = tl.zeros([P, BC], TILE[2])
    for row0 in range(first_row, end_row, P // COLS * R):
        for col0 in range(first_col, end_col, COLS):
            row, col = row0 + lane // COLS * R, col0 + lane % COLS
            accs = _conv_rows(start, x_ptr, w_ptr, taps, row, col, region, BRANCH, TILE)
            for r in tl.static_range(R):
                valid = ((row + r < end_row) & (col < end_col)).to(TILE[2])
                count += valid
                delta = accs[r] - mean
                mean += delta * (valid / tl.maximum(count, 1.0))[:, None]
                m2 += delta * (accs[r] - mean) * valid[:, None]
    total = tl.maximum(tl.sum(count, axis=0), 1.0)
    region_mean = tl.sum(mean * count[:, None], axis=0) / total
    deviation = mean - region_mean[None, :]
    tl.store(mean_ptr + c, region_mean, mask=c_mask)
    tl.store(m2_ptr + c, tl.sum(m2 + deviation * deviation * count[:, None], axis=0), mask=c_mask)


@triton.jit
def _conv_projection_stats_kernel(
    x_ptr, w_ptrs, partial_ptr, out_heights, out_widths,
    height, width, channels, regions, stride_b, stride_t, strips, col_blocks,
    CLASS_TOKEN: tl.constexpr, BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations over one region: partial (branches, 2, regions, C)."""
    c, c_mask, block, index, image, strip, col_block = _locate(channels, strips, col_blocks, TILE[1])
    packed = block * _taps(BRANCHES) * TILE[1]
    region = (strip, strips, col_block, col_blocks, c, c_mask, height, width, stride_t, channels, packed)
    x_ptr += image * stride_b + CLASS_TOKEN * stride_t
    plane = regions.to(tl.int64) * channels
    partial_ptr += index.to(tl.int64) * channels
    for i in tl.static_range(len(BRANCHES)):
        _stats_branch(
            x_ptr, w_ptrs[i], partial_ptr + 2 * i * plane, partial_ptr + (2 * i + 1) * plane,
            out_heights[i], out_widths[i], region, BRANCHES, i, TILE,
        )  # fmt: skip


@triton.jit
def _merge_stats_kernel(
    partial_ptr, mean_ptr, var_ptr, out_heights, out_widths, channels, regions, strips, col_blocks,
    BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(branches, 2, regions, C) to mean and biased variance (branches, C); the mean first."""
    P: tl.constexpr = TILE[0]
    BC: tl.constexpr = TILE[1]
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    c_mask = c < channels
    branch = tl.program_id(1)
    out_height, out_width = out_heights[0], out_widths[0]
    for i in tl.static_range(1, len(BRANCHES)):
        out_height = tl.where(branch == i, out_heights[i], out_height)
        out_width = tl.where(branch == i, out_widths[i], out_width)
    images = regions // (strips * col_blocks)
    total = (images * out_height).to(TILE[2]) * out_width.to(TILE[2])
    plane = regions.to(tl.int64) * channels
    mean_part_ptr = partial_ptr + 2 * branch * plane
    mean = tl.zeros([BC], TILE[2])
    for first in range(0, regions, P):
        index = first + tl.arange(0, P)
        count = _region_size(index, regions, out_height, out_width, strips, col_blocks).to(TILE[2])
        part = _load_partial(mean_part_ptr, index, c, c_mask, regions, channels)
        mean += tl.sum(part * (count / total)[:, None], axis=0)
    m2 = tl.zeros([BC], TILE[2])
    for first in range(0, regions, P):
        index = first + tl.arange(0, P)
        count = _region_size(index, regions, out_height, out_width, strips, col_blocks).to(TILE[2])
        deviation = _load_partial(mean_part_ptr, index, c, c_mask, regions, channels) - mean[None, :]
        part = _load_partial(mean_part_ptr + plane, index, c, c_mask, regions, channels)
        m2 += tl.sum(part + deviation * deviation * count[:, None], axis=0)
    tl.store(mean_ptr + branch * channels + c, mean, mask=c_mask)
    tl.store(var_ptr + branch * channels + c, m2 / total, mask=c_mask)


@triton.jit
def _update_running_kernel(
    mean_ptr, var_ptr, running_mean_ptrs, running_var_ptrs, tracked_ptrs, momenta, corrections, channels,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sets running ← running + momentum · (batch − running) of one branch, and its count of batches.

    A momentum below 0 means the average over all batches. ROWS are the branches' rows in (branches, C) statistics.
    Launched with one warp: another might count the batch before this one has read the count.
    """
    BC: tl.constexpr = TILE[1]
    for i in tl.static_range(len(ROWS)):
        if tl.program_id(0) == i:
            count = tl.load(tracked_ptrs[i]) + 1
            momentum = tl.where(momenta[i] < 0, 1.0 / count.to(TILE[2]), momenta[i])
            for c0 in range(0, channels, BC):
                c = c0 + tl.arange(0, BC)
                batch_mean = tl.load(mean_ptr + ROWS[i] * channels + c, mask=c < channels)
                batch_var = tl.load(var_ptr + ROWS[i] * channels + c, mask=c < channels) * corrections[i]
                _lerp(running_mean_ptrs[i] + c, batch_mean, momentum, c < channels)
                _lerp(running_var_ptrs[i] + c, batch_var, momentum, c < channels)
            tl.store(tracked_ptrs[i], count)


@triton.jit
def _lerp(ptr, value, weight, mask):
    old = tl.load(ptr, mask=mask).to(value.dtype)
    tl.store(ptr, (old + weight * (value - old)).to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _region_size(index, regions, out_height, out_width, strips, col_blocks):
    """Output pixels of each region; 0 beyond the last."""
    first_row, end_row = _share(out_height, index // col_blocks % strips, strips)
    first_col, end_col = _share(out_width, index % col_blocks, col_blocks)
    size = tl.maximum(end_row - first_row, 0) * tl.maximum(end_col - first_col, 0)
    return tl.where(index < regions, size, 0)


@triton.jit
def _load_partial(ptr, index, c, c_mask, regions, channels):
    offset = index.to(tl.int64) * channels
    return tl.load(
        ptr + offset[:, None] + c[None, :], mask=(index < regions)[:, None] & c_mask[None, :], other=0.0
    )


@triton.jit
def _sum_regions_kernel(partial_ptr, sum_ptr, channels, regions, GROUPS: tl.constexpr, TILE: tl.constexpr):
    """(rows, regions, C) to the sums over regions; a group of n rows becomes (C, n), one after the other."""
    P: tl.constexpr = TILE[0]
    BC: tl.constexpr = TILE[1]
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    c_mask = c < channels
    row = tl.program_id(1)
    partial_ptr += row.to(tl.int64) * regions * channels
    total = tl.zeros([BC], TILE[2])
    for first in range(0, regions, P):
        index = first + tl.arange(0, P)
        total += tl.sum(_load_partial(partial_ptr, index, c, c_mask, regions, channels), axis=0)
    place = c
    for i in tl.static_range(len(GROUPS)):
        own = (row >= GROUPS[i][0]) & (row < GROUPS[i][0] + GROUPS[i][1])
        place = tl.where(own, GROUPS[i][0] * channels + c * GROUPS[i][1] + row - GROUPS[i][0], place)
    tl.store(sum_ptr + place, total.to(sum_ptr.dtype.element_ty), mask=c_mask)


@triton.jit
def _bwd_sums_branch(
    x_ptr, w_ptr, dy_ptr, mean_ptr, var_ptr, eps, partial_ptr, plane, out_height, out_width, region,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    COLS: tl.constexpr = BRANCH[4]
    R: tl.constexpr = BRANCH[5]
    P: tl.constexpr = TILE[0]
    BC: tl.constexpr = TILE[1]
    c, c_mask, channels = region[4], region[5], region[9]
    start = -_load_channel(mean_ptr, c, c_mask, TILE)[None, :]
    rstd = 1.0 / tl.sqrt(_load_channel(var_ptr, c, c_mask, TILE) + eps)
    taps = _load_taps(w_ptr, region, BRANCH, TILE)
    first_row, end_row = _share(out_height, region[0], region[1])
    first_col, end_col = _share(out_width, region[2], region[3])
    lane = tl.arange(0, P)
    sum_dy = tl.zeros([P, BC], TILE[2])
    sum_dy_xhat = tl.zeros([P, BC], TILE[2])
    for row0 in range(first_row, end_row, P // COLS * R):
        for col0 in range(first_col, end_col, COLS):
            row, col = row0 + lane // COLS * R, col0 + lane % COLS
            own_col = tl.where(col < end_col, col, -1)  # outside, hence 0
            accs = _conv_rows(start, x_ptr, w_ptr, taps, row, col, region, BRANCH, TILE)
            for r in tl.static_range(R):
                dy = _load_pixels(dy_ptr, row + r, own_col, c, c_mask, end_row, out_width, channels).to(
                    TILE[2]
                )
                sum_dy += dy
                sum_dy_xhat += dy * accs[r]
    tl.store(partial_ptr + c, tl.sum(sum_dy, axis=0), mask=c_mask)
    tl.store(partial_ptr + plane + c, tl.sum(sum_dy_xhat, axis=0) * rstd, mask=c_mask)


@triton.jit
def _conv_projection_bwd_sums_kernel(
    x_ptr, w_ptrs, dy_ptrs, mean_ptrs, var_ptrs, epss, partial_ptr, out_heights, out_widths,
    height, width, channels, regions, stride_b, stride_t, strips, col_blocks,
    CLASS_TOKEN: tl.constexpr, BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Σdy and Σdy·x̂ of every branch over one region: partial (branches, 2, regions, C)."""
    c, c_mask, block, index, image, strip, col_block = _locate(channels, strips, col_blocks, TILE[1])
    packed = block * _taps(BRANCHES) * TILE[1]
    region = (strip, strips, col_block, col_blocks, c, c_mask, height, width, stride_t, channels, packed)
    x_ptr += image * stride_b + CLASS_TOKEN * stride_t
    plane = regions.to(tl.int64) * channels
    partial_ptr += index.to(tl.int64) * channels
    for i in tl.static_range(len(BRANCHES)):
        dy_ptr = (
            dy_ptrs[i] + (image * (out_heights[i] * out_widths[i] + CLASS_TOKEN) + CLASS_TOKEN) * channels
        )
        _bwd_sums_branch(
            x_ptr, w_ptrs[i], dy_ptr, mean_ptrs[i], var_ptrs[i], epss[i], partial_ptr + 2 * i * plane, plane,
            out_heights[i], out_widths[i], region, BRANCHES, i, TILE,
        )  # fmt: skip


@triton.jit
def _bwd_conv_branch(
    x_ptr, w_ptr, dy_ptr, gamma_ptr, mean_ptr, var_ptr, eps, sums_ptr, dconv_ptr, partial_ptr, plane,
    inverse_count, tap_row, out_height, out_width, region,
    BATCH_STATS: tl.constexpr, BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    PAD: tl.constexpr = BRANCH[2]
    COLS: tl.constexpr = BRANCH[4]
    P: tl.constexpr = TILE[0]
    BC: tl.constexpr = TILE[1]
    K: tl.constexpr = BRANCH[0]
    STRIDE: tl.constexpr = BRANCH[1]
    DIL: tl.constexpr = BRANCH[3]
    ROWS: tl.constexpr = K if K <= 3 else 1  # rows of taps whose gradient this program sums
    c, c_mask, channels = region[4], region[5], region[9]
    rstd = 1.0 / tl.sqrt(_load_channel(var_ptr, c, c_mask, TILE) + eps)
    scale = (_load_channel(gamma_ptr, c, c_mask, TILE) * rstd)[None, :]
    if BATCH_STATS:
        start = -_load_channel(mean_ptr, c, c_mask, TILE)[None, :]
        offset = (_load_channel(sums_ptr, c, c_mask, TILE) * inverse_count)[None, :]
        slope = (_load_channel(sums_ptr + channels, c, c_mask, TILE) * inverse_count * rstd)[None, :]
    first_row, end_row = _share(out_height, region[0], region[1])
    first_col, end_col = _share(out_width, region[2], region[3])
    lane = tl.arange(0, P)
    dws = ()
    for _ in tl.static_range(ROWS * K):
        dws = dws + (tl.zeros([P, BC], TILE[2]),)
    for row0 in range(first_row, end_row, P // COLS):
        for col0 in range(first_col, end_col, COLS):
            row, col = row0 + lane // COLS, col0 + lane % COLS
            inside = (row < end_row) & (col < end_col)
            window = ()  # in the dtype of x, to take half the registers; shared by the convolution and dw
            for a in tl.static_range(ROWS):
                for b in tl.static_range(K):
                    in_row, in_col = row * STRIDE - PAD + (tap_row + a) * DIL, col * STRIDE - PAD + b * DIL
                    window = window + (
                        _load_pixels(x_ptr, in_row, in_col, c, c_mask, region[6], region[7], region[8]),
                    )
            own_row = tl.where(inside, row, -1)  # outside, hence 0
            dconv = _load_pixels(dy_ptr, own_row, col, c, c_mask, end_row, out_width, channels).to(TILE[2])
            if BATCH_STATS:
                if ROWS == K:
                    acc = tl.zeros([P, BC], TILE[2]) + start
                    for t in tl.static_range(K * K):
                        acc += window[t].to(TILE[2]) * _load_weight(w_ptr, t, region, TILE)
                else:
                    acc = _conv_rows(start, x_ptr, w_ptr, (), row, col, region, BRANCH, TILE)[0]
                dconv = dconv - offset - acc * slope
            valid = inside[:, None] & c_mask[None, :]
            dconv = tl.where(valid, dconv * scale, 0.0)
            place = (row * out_width + col) * channels
            tl.store(
                dconv_ptr + place[:, None] + c[None, :], dconv.to(dconv_ptr.dtype.element_ty),
                mask=valid & (tap_row == 0),
            )  # fmt: skip
            updated = ()
            for t in tl.static_range(ROWS * K):
                updated = updated + (dws[t] + window[t].to(TILE[2]) * dconv,)
            dws = updated
    for t in tl.static_range(ROWS * K):
        tl.store(partial_ptr + (tap_row * K + t) * plane + c, tl.sum(dws[t], axis=0), mask=c_mask)


@triton.jit
def _conv_projection_bwd_conv_kernel(
    x_ptr, w_ptrs, dy_ptrs, gamma_ptrs, mean_ptrs, var_ptrs, epss, sums_ptr, dconv_ptrs, partial_ptr,
    inverse_counts, out_heights, out_widths, height, width, channels, regions, stride_b, stride_t, strips, col_blocks,
    CLASS_TOKEN: tl.constexpr, BATCH_STATS: tl.constexpr, BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of every branch's convolution over one region: of its output, dconv, and its weight.

    Above 3×3 the second axis of the grid is the row of taps, since more sums would not fit in registers; the
    partial sums are (taps of all branches, regions, C).
    """
    c, c_mask, block, index, image, strip, col_block = _locate(channels, strips, col_blocks, TILE[1])
    packed = block * _taps(BRANCHES) * TILE[1]
    region = (strip, strips, col_block, col_blocks, c, c_mask, height, width, stride_t, channels, packed)
    tap_row = tl.program_id(1)
    x_ptr += image * stride_b + CLASS_TOKEN * stride_t
    plane = regions.to(tl.int64) * channels
    partial_ptr += index.to(tl.int64) * channels
    for i in tl.static_range(len(BRANCHES)):
        if tap_row < (1 if BRANCHES[i][0] <= 3 else BRANCHES[i][0]):
            spatial = out_heights[i] * out_widths[i]
            _bwd_conv_branch(
                x_ptr, w_ptrs[i], dy_ptrs[i] + (image * (spatial + CLASS_TOKEN) + CLASS_TOKEN) * channels,
                gamma_ptrs[i], mean_ptrs[i], var_ptrs[i], epss[i], sums_ptr + 2 * i * channels,
                dconv_ptrs[i] + image * spatial * channels, partial_ptr, plane, inverse_counts[i], tap_row,
                out_heights[i], out_widths[i], region, BATCH_STATS, BRANCHES, i, TILE,
            )  # fmt: skip
        partial_ptr += BRANCHES[i][0] * BRANCHES[i][0] * plane


@triton.jit
def _bwd_input_block(
    accs, dconv_ptr, w_ptr, block_row, block_col, out_height, out_width, region,
    ROW: tl.constexpr, COL: tl.constexpr, BLOCK: tl.constexpr,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds one branch's transposed convolution of dconv at pixels (ROW, COL…) of a block of BLOCK × BLOCK.

    The stride divides BLOCK, so that the taps of each pixel are known now; a loaded dconv serves all that it reaches.
    """
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    K: tl.constexpr = BRANCH[0]
    STRIDE: tl.constexpr = BRANCH[1]
    PAD: tl.constexpr = BRANCH[2]
    DIL: tl.constexpr = BRANCH[3]
    FIRST: tl.constexpr = (PAD - (K - 1) * DIL) // STRIDE
    END: tl.constexpr = (BLOCK - 1 + PAD) // STRIDE + 1
    STEP: tl.constexpr = BLOCK // STRIDE
    for j in tl.static_range(FIRST, END):
        for i in tl.static_range(FIRST, END):
            dconv = _load_pixels(
                dconv_ptr, block_row * STEP + j, block_col * STEP + i, region[4], region[5],
                out_height, out_width, region[9],
            ).to(TILE[2])  # fmt: skip
            updated = ()
            for n in tl.static_range(len(accs)):
                acc = accs[n]
                for t in tl.static_range(K * K):
                    if j * STRIDE - PAD + t // K * DIL == ROW and i * STRIDE - PAD + t % K * DIL == COL + n:
                        acc += dconv * _load_weight(w_ptr, t, region, TILE)
                updated = updated + (acc,)
            accs = updated
    return accs


@triton.jit
def _bwd_input_pixel(
    acc, dconv_ptr, w_ptr, row, col, out_height, out_width, region,
    BRANCHES: tl.constexpr, INDEX: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The same at single pixels and for any stride: each asks which taps reach it."""
    BRANCH: tl.constexpr = BRANCHES[INDEX]
    K: tl.constexpr = BRANCH[0]
    STRIDE: tl.constexpr = BRANCH[1]
    PAD: tl.constexpr = BRANCH[2]
    DIL: tl.constexpr = BRANCH[3]
    for a in tl.static_range(K):
        y = row + PAD - a * DIL
        y = tl.where((y >= 0) & (y % STRIDE == 0), y // STRIDE, -1)
        for b in tl.static_range(K):
            x = col + PAD - b * DIL
            x = tl.where((x >= 0) & (x % STRIDE == 0), x // STRIDE, -1)
            dconv = _load_pixels(dconv_ptr, y, x, region[4], region[5], out_height, out_width, region[9])
            acc += dconv.to(TILE[2]) * _load_weight(w_ptr, a * K + b, region, TILE)
    return acc


@triton.jit
def _bwd_input_tile(
    dconv_ptrs, w_ptrs, image, block_row, block_col, out_heights, out_widths, region,
    ROW: tl.constexpr, COL: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    BRANCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """All branches at WIDTH pixels from (ROW, COL) on of a block of BLOCK × BLOCK: a tuple of [P, BC]."""
    P: tl.constexpr = TILE[0]
    BC: tl.constexpr = TILE[1]
    accs = ()
    for _ in tl.static_range(WIDTH):
        accs = accs + (tl.zeros([P, BC], TILE[2]),)
    for i in tl.static_range(len(BRANCHES)):
        dconv_ptr = dconv_ptrs[i] + image * out_heights[i] * out_widths[i] * region[9]
        if BLOCK % BRANCHES[i][1] == 0:
            accs = _bwd_input_block(
                accs, dconv_ptr, w_ptrs[i], block_row, block_col, out_heights[i], out_widths[i], region, ROW, COL, BLOCK,
                BRANCHES, i, TILE,
            )  # fmt: skip
        else:
            accs = (
                _bwd_input_pixel(
                    accs[0], dconv_ptr, w_ptrs[i], block_row, block_col, out_heights[i], out_widths[i], region,
                    BRANCHES, i, TILE,
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
    """The input's gradient over one region of the input grid, all branches summed in registers.

    A lane takes BLOCK × BLOCK pixels, WIDTH of a row at a time; BLOCK is 1 unless every stride divides it.
    """
    P: tl.constexpr = TILE[0]
    BC: tl.constexpr = TILE[1]
    c, c_mask, block, _, image, strip, col_block = _locate(channels, strips, col_blocks, BC)
    packed = block * _taps(BRANCHES) * TILE[1]
    region = (strip, strips, col_block, col_blocks, c, c_mask, height, width, channels, channels, packed)
    dx_ptr += image * (height * width + CLASS_TOKEN) * channels
    if CLASS_TOKEN:
        first = c_mask & (strip == 0) & (col_block == 0)
        total = tl.zeros([BC], TILE[2])
        for i in tl.static_range(len(BRANCHES)):
            dy_ptr = dy_ptrs[i] + image * (out_heights[i] * out_widths[i] + 1) * channels
            total += tl.load(dy_ptr + c, mask=first, other=0.0).to(TILE[2])
        tl.store(dx_ptr + c, total.to(dx_ptr.dtype.element_ty), mask=first)
        dx_ptr += channels
    first_row, end_row = _share(tl.cdiv(height, BLOCK), strip, strips)  # in blocks
    first_col, end_col = _share(tl.cdiv(width, BLOCK), col_block, col_blocks)
    lane = tl.arange(0, P)
    for row0 in range(first_row, end_row, P // COLS):
        for col0 in range(first_col, end_col, COLS):
            block_row, block_col = row0 + lane // COLS, col0 + lane % COLS
            inside = (block_row < end_row) & (block_col < end_col)
            for pixel in tl.static_range(0, BLOCK * BLOCK, WIDTH):
                accs = _bwd_input_tile(
                    dconv_ptrs, w_ptrs, image, block_row, block_col, out_heights, out_widths, region,
                    pixel // BLOCK, pixel % BLOCK, BLOCK, WIDTH, BRANCHES, TILE,
                )  # fmt: skip
                for n in tl.static_range(WIDTH):
                    row, col = block_row * BLOCK + pixel // BLOCK, block_col * BLOCK + pixel % BLOCK + n
                    offset = (row * width + col) * channels
                    mask = (inside & (row < height) & (col < width))[:, None] & c_mask[None, :]
                    tl.store(
                        dx_ptr + offset[:, None] + c[None, :], accs[n].to(dx_ptr.dtype.element_ty), mask=mask
                    )


# Launchers ------------------------------------------------------------------------------------------------


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, config: Any, **constants: Any) -> None:
    named = dict(zip(kernel.arg_names, args, strict=False))
    machine.launch(kernel, grid, args[0], config.options, **named, **constants)


class Geometry(NamedTuple):
    """Everything about a call but its tensors; hashable.

    Attributes:
        grid: (H, W) of the input.
        kernel_sizes, strides, paddings, dilations, epss: One per branch.
    """

    grid: tuple[int, int]
    kernel_sizes: tuple[int, ...]
    strides: tuple[int, ...]
    paddings: tuple[int, ...]
    dilations: tuple[int, ...]
    epss: tuple[float, ...]

    @classmethod
    def of(cls, grid: tuple[int, int], convs: Sequence[ConvBatchNorm]) -> Geometry:
        """The geometry of a public call."""
        columns = zip(
            *((c.weight.shape[3], c.stride, c.padding, c.dilation, c.eps) for c in convs), strict=True
        )
        return cls(grid, *map(tuple, columns))

    @property
    def output_grids(self) -> list[tuple[int, int]]:
        """(Hᵢ, Wᵢ) of every branch."""
        height, width = self.grid
        lost = [
            d * (k - 1) + 1 - 2 * p
            for k, p, d in zip(self.kernel_sizes, self.paddings, self.dilations, strict=True)
        ]
        return [
            ((height - n) // s + 1, (width - n) // s + 1) for n, s in zip(lost, self.strides, strict=True)
        ]


def _config(kernel: str, capability: int) -> LaunchConfig:
    """That of the newest listed chip that is no newer than this one, or of the oldest."""
    known = [listed for listed in CONFIGS if listed <= capability]
    return CONFIGS[max(known, default=min(CONFIGS))][kernel]


class Plan(NamedTuple):
    """A launch: its configuration, and how many regions it cuts each image into."""

    config: LaunchConfig
    strips: int
    col_blocks: int
    channel_blocks: int
    regions: int

    @classmethod
    def make(cls, kernel: str, x: Tensor, grid: tuple[int, int]) -> Plan:
        """The plan of a kernel for tokens like ``x`` (B, T, C) on ``grid``.

        Regions shrink until every multiprocessor has two programs, which small batches would not give otherwise.
        """
        batch, _, channels = x.shape
        chip = machine.chip(x.device)
        config = _config(kernel, chip.capability)
        size = min(x.element_size(), 4)  # float64 is for the interpreter
        config = replace(config, channels=config.channels * 2 // size, rows=config.rows * size // 2)
        channel_blocks = -(-channels // config.channels)
        col_blocks = -(-grid[1] // config.region_cols)
        region_rows = config.region_rows
        while (
            region_rows > 2 * config.rows
            and batch * channel_blocks * col_blocks * -(-grid[0] // region_rows) < 2 * chip.multiprocessors
        ):
            region_rows //= 2
        strips = -(-grid[0] // region_rows)
        return cls(config, strips, col_blocks, channel_blocks, batch * strips * col_blocks)

    @property
    def programs(self) -> int:
        """Size of the first axis of the launch."""
        return self.regions * self.channel_blocks

    def branches(self, geometry: Geometry) -> tuple[tuple[int, ...], ...]:
        """BRANCHES of the kernels."""
        return tuple(
            (k, s, p, d, self.columns(width), self.config.rows if k <= 3 else 1)
            for k, s, p, d, (_, width) in zip(*geometry[1:5], geometry.output_grids, strict=True)
        )

    def columns(self, width: int) -> int:
        """Columns of a tile on a grid of this width, a power of 2."""
        return min(self.config.pixels, triton.next_power_of_2(-(-width // self.col_blocks)))


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _tile(config: LaunchConfig, x: Tensor) -> tuple[int, int, Any]:
    return config.pixels, config.channels, tl.float64 if x.dtype == torch.float64 else tl.float32


def _sizes(geometry: Geometry) -> tuple[tuple[int, ...], tuple[int, ...]]:
    heights, widths = zip(*geometry.output_grids, strict=True)
    return heights, widths


def _class_tokens(x: Tensor, geometry: Geometry) -> int:
    return x.shape[1] - geometry.grid[0] * geometry.grid[1]


def _readable(x: Tensor) -> Tensor:
    """``x`` itself if its channels are adjacent (any token and batch stride), else a contiguous copy."""
    return x if x.stride(2) == 1 and x.stride(1) * x.shape[1] < 2**31 else x.contiguous()


def _pack(weights: Sequence[Tensor], config: LaunchConfig) -> list[Tensor]:
    """Every (C, 1, k, k) within one (channel blocks, taps of all branches, BC), from its first tap on."""
    padding = -weights[0].shape[0] % config.channels
    blocks = [F.pad(w.flatten(1), (0, 0, 0, padding)) if padding else w.flatten(1) for w in weights]
    packed = torch.cat(
        [w.unflatten(0, (-1, config.channels)).transpose(1, 2) for w in blocks], dim=1
    ).flatten()
    taps = [w[0].numel() for w in weights]
    return [packed[sum(taps[:i]) * config.channels :] for i in range(len(taps))]


def _pack_large(weights: Sequence[Tensor], config: LaunchConfig) -> tuple[Tensor, ...]:
    """Packed where a kernel does not turn them itself."""
    if all(weight.shape[3] <= 3 for weight in weights):
        return tuple(weights)
    packed = _pack(weights, config)
    return tuple(w if w.shape[3] <= 3 else p for w, p in zip(weights, packed, strict=True))


def forward(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], gammas: Sequence[Tensor], betas: Sequence[Tensor],
    means: Sequence[Tensor], variances: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Every branch, normalised by the given statistics."""
    x = _readable(x)
    batch, _, channels = x.shape
    class_tokens = _class_tokens(x, geometry)
    outs = [x.new_empty(batch, h * w + class_tokens, channels) for h, w in geometry.output_grids]
    plan = Plan.make("fwd", x, geometry.grid)
    _launch(
        _conv_projection_fwd_kernel, (plan.programs,),
        x, _pack_large(weights, plan.config), tuple(gammas), tuple(betas), tuple(means), tuple(variances),
        tuple(outs), geometry.epss, *_sizes(geometry), *geometry.grid, channels, x.stride(0), x.stride(1),
        plan.strips, plan.col_blocks, CLASS_TOKEN=class_tokens,
        BRANCHES=plan.branches(geometry), TILE=_tile(plan.config, x),
        config=plan.config,
    )  # fmt: skip
    return outs


def statistics(x: Tensor, geometry: Geometry, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every branch's convolution over batch and grid: (branches, C) each."""
    x = _readable(x)
    channels = x.shape[2]
    class_tokens = _class_tokens(x, geometry)
    plan = Plan.make("stats", x, geometry.grid)
    partial = x.new_empty(len(weights), 2, plan.regions, channels, dtype=_accumulator(x))
    mean, variance = (partial.new_empty(len(weights), channels) for _ in range(2))
    branches = plan.branches(geometry)
    _launch(
        _conv_projection_stats_kernel, (plan.programs,),
        x, _pack_large(weights, plan.config), partial, *_sizes(geometry), *geometry.grid, channels, plan.regions,
        x.stride(0), x.stride(1), plan.strips, plan.col_blocks, CLASS_TOKEN=class_tokens, BRANCHES=branches,
        TILE=_tile(plan.config, x), config=plan.config,
    )  # fmt: skip
    _launch(
        _merge_stats_kernel, (-(-channels // _MERGE.channels), len(weights)),
        partial, mean, variance, *_sizes(geometry), channels, plan.regions, plan.strips, plan.col_blocks,
        BRANCHES=branches, TILE=_tile(_MERGE, x), config=_MERGE,
    )  # fmt: skip
    return mean, variance


def update_running(
    mean: Tensor, variance: Tensor, rows: Sequence[int], running_means: Sequence[Tensor],
    running_vars: Sequence[Tensor], tracked: Sequence[Tensor], momenta: Sequence[float], corrections: Sequence[float],
) -> None:  # fmt: skip
    """Updates running statistics as ``F.batch_norm`` does.

    Args:
        mean, variance: Of the batch, (branches, C).
        rows: Which branch each of the following belongs to.
        momenta: Below 0 for the average over all batches.
        corrections: n / (n − 1), which makes the variance unbiased.
    """
    _launch(
        _update_running_kernel, (len(rows),),
        mean, variance, tuple(running_means), tuple(running_vars), tuple(tracked), tuple(momenta),
        tuple(corrections), mean.shape[1], ROWS=tuple(rows), TILE=_tile(_UPDATE, mean), config=_UPDATE,
    )  # fmt: skip


def _sum_regions(partial: Tensor, groups: Sequence[int], dtype: torch.dtype) -> Tensor:
    """(rows, regions, C) to its sums over regions in a fixed order: for each group of n rows (C, n), flat."""
    rows, regions, channels = partial.shape
    total = partial.new_empty(rows * channels, dtype=dtype)
    starts = [sum(groups[:i]) for i in range(len(groups))]
    _launch(
        _sum_regions_kernel, (-(-channels // _MERGE.channels), rows),
        partial, total, channels, regions, GROUPS=tuple(zip(starts, groups, strict=True)),
        TILE=_tile(_MERGE, partial), config=_MERGE,
    )  # fmt: skip
    return total


def backward_sums(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], means: Sequence[Tensor], variances: Sequence[Tensor],
    dys: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Σdy = dβ and Σdy·x̂ = dγ of every branch: (branches, 2, C)."""
    x = _readable(x)
    channels = x.shape[2]
    plan = Plan.make("bwd_sums", x, geometry.grid)
    partial = x.new_empty(2 * len(weights), plan.regions, channels, dtype=_accumulator(x))
    _launch(
        _conv_projection_bwd_sums_kernel, (plan.programs,),
        x, _pack_large(weights, plan.config), tuple(dys), tuple(means), tuple(variances), geometry.epss, partial,
        *_sizes(geometry), *geometry.grid, channels, plan.regions, x.stride(0), x.stride(1),
        plan.strips, plan.col_blocks, CLASS_TOKEN=_class_tokens(x, geometry),
        BRANCHES=plan.branches(geometry), TILE=_tile(plan.config, x),
        config=plan.config,
    )  # fmt: skip
    return _sum_regions(partial, [1] * len(partial), partial.dtype).view(-1, 2, channels)


def backward_conv(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], gammas: Sequence[Tensor], means: Sequence[Tensor],
    variances: Sequence[Tensor], dys: Sequence[Tensor], sums: Tensor | None, counts: Sequence[float],
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Gradients of the convolutions' outputs (B, Hᵢ·Wᵢ, C) and weights (C, 1, k, k).

    Args:
        sums: What :func:`backward_sums` returned, if the statistics were those of the batch; else None.
        counts: Values per channel over which the statistics were taken.
    """
    x = _readable(x)
    batch, _, channels = x.shape
    plan = Plan.make("bwd_conv", x, geometry.grid)
    dconvs = [x.new_empty(batch, h * w, channels) for h, w in geometry.output_grids]
    taps = [k * k for k in geometry.kernel_sizes]
    partial = x.new_empty(sum(taps), plan.regions, channels, dtype=_accumulator(x))
    tap_rows = max(1 if k <= 3 else k for k in geometry.kernel_sizes)
    _launch(
        _conv_projection_bwd_conv_kernel, (plan.programs, tap_rows),
        x, tuple(_pack(weights, plan.config)), tuple(dys), tuple(gammas), tuple(means), tuple(variances), geometry.epss,
        x if sums is None else sums, tuple(dconvs), partial, tuple(1.0 / n for n in counts),
        *_sizes(geometry), *geometry.grid, channels, plan.regions, x.stride(0), x.stride(1),
        plan.strips, plan.col_blocks, CLASS_TOKEN=_class_tokens(x, geometry), BATCH_STATS=sums is not None,
        BRANCHES=plan.branches(geometry), TILE=_tile(plan.config, x),
        config=plan.config,
    )  # fmt: skip
    dweights = _sum_regions(partial, taps, weights[0].dtype).split([n * channels for n in taps])
    return dconvs, [dw.view(channels, 1, k, k) for dw, k in zip(dweights, geometry.kernel_sizes, strict=True)]


def backward_input(
    geometry: Geometry, weights: Sequence[Tensor], dconvs: Sequence[Tensor], dys: Sequence[Tensor]
) -> Tensor:
    """The input's gradient (B, T, C), all branches summed, class token included."""
    batch, _, channels = dconvs[0].shape
    height, width = geometry.grid
    heights, widths = _sizes(geometry)
    class_tokens = dys[0].shape[1] - heights[0] * widths[0]
    dx = dconvs[0].new_empty(batch, height * width + class_tokens, channels)
    plan = Plan.make("bwd_input", dx, geometry.grid)
    block = 2 if all(stride in (1, 2) for stride in geometry.strides) else 1
    _launch(
        _conv_projection_bwd_input_kernel, (plan.programs,),
        dx, tuple(_pack(weights, plan.config)), tuple(dconvs), tuple(dys), heights, widths, height, width, channels,
        plan.strips, plan.col_blocks, CLASS_TOKEN=class_tokens, COLS=plan.columns(-(-width // block)), BLOCK=block,
        WIDTH=min(plan.config.rows, block),
        BRANCHES=plan.branches(geometry), TILE=_tile(plan.config, dx),
        config=plan.config,
    )  # fmt: skip
    return dx


# Autograd and torch.compile -------------------------------------------------------------------------------
#
# In eager mode the autograd function is called directly; a registered operator would cost more host time per call.
# Under torch.compile the same launchers run behind opaque operators.


def _gradients(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], gammas: Sequence[Tensor], means: Sequence[Tensor],
    variances: Sequence[Tensor], dys: Sequence[Tensor], batch_stats: bool, synchronised: _Synchronised | None = None,
) -> list[Tensor]:  # fmt: skip
    """[dx, *dweights, *dgammas, *dbetas]; those of the parameters are this process's share."""
    dys = [dy.contiguous() for dy in dys]
    sums = backward_sums(x, geometry, weights, means, variances, dys)
    all_sums, counts = sums, [float(n) for n in _counts(x.shape[0], geometry)]
    if batch_stats and synchronised is not None:
        all_sums, counts = synchronised.mean_of(sums), [1.0] * len(weights)
    dconvs, dweights = backward_conv(
        x, geometry, weights, gammas, means, variances, dys, all_sums if batch_stats else None, counts
    )
    dx = backward_input(geometry, weights, dconvs, dys)
    dgammas = [total.to(gamma.dtype) for total, gamma in zip(sums[:, 1].unbind(), gammas, strict=True)]
    dbetas = [total.to(gamma.dtype) for total, gamma in zip(sums[:, 0].unbind(), gammas, strict=True)]
    return [dx, *dweights, *dgammas, *dbetas]


def _counts(batch: int, geometry: Geometry) -> list[int]:
    return [batch * height * width for height, width in geometry.output_grids]


class _Synchronised(NamedTuple):
    """A batch spread over the processes of a group: how many values per channel it has, (branches,)."""

    group: Any
    counts: Tensor

    @classmethod
    def merge(
        cls, mean: Tensor, variance: Tensor, counts: list[int], group: Any
    ) -> tuple[Any, Tensor, Tensor]:
        """(this, mean, variance) of the whole batch, equal in every process, from those of each share."""
        local = torch.cat([mean, variance, mean.new_tensor(counts)[:, None]], dim=1)
        shares = local.new_empty(dist.get_world_size(group), *local.shape)
        dist.all_gather(list(shares.unbind()), local, group)
        means, variances, count = shares.split([mean.shape[1], mean.shape[1], 1], dim=2)
        total = count.sum(dim=0)
        mean = (means * count).sum(dim=0) / total
        variance = ((variances + (means - mean) ** 2) * count).sum(dim=0) / total
        return cls(group, total[:, 0]), mean, variance

    def mean_of(self, sums: Tensor) -> Tensor:
        """Sums (branches, 2, C) of this process to the mean over the whole batch."""
        total = sums.clone()
        dist.all_reduce(total, group=self.group)
        return total / self.counts[:, None, None]


class _ConvProjection(torch.autograd.Function):
    """forward(x, geometry, batch_stats, synchronised, *weights, *gammas, *betas, *means, *variances)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, geometry: Geometry, batch_stats: bool, synchronised: _Synchronised | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Saves x, the parameters and the statistics."""
        weights, gammas, betas, means, variances = _groups(tensors, 5)
        ctx.settings = geometry, batch_stats, synchronised
        ctx.save_for_backward(x, *weights, *gammas, *means, *variances)
        return tuple(forward(x, geometry, weights, gammas, betas, means, variances))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        """Three passes; see the head of this file."""
        x, *tensors = ctx.saved_tensors
        weights, gammas, means, variances = _groups(tensors, 4)
        geometry, batch_stats, synchronised = ctx.settings
        dx, *dparameters = _gradients(
            x, geometry, weights, gammas, means, variances, dys, batch_stats, synchronised
        )
        return dx, None, None, None, *dparameters, *[None] * (2 * len(weights))


def _groups(tensors: Sequence[Any], count: int) -> list[Sequence[Any]]:
    size = len(tensors) // count
    return [tensors[i * size : (i + 1) * size] for i in range(count)]


def _pack_geometry(geometry: Geometry) -> list[int]:
    return [*geometry.grid, *(n for column in geometry[1:5] for n in column)]


def _unpack_geometry(numbers: Sequence[int], epss: Sequence[float]) -> Geometry:
    kernel_sizes, strides, paddings, dilations = (tuple(column) for column in _groups(numbers[2:], 4))
    return Geometry((numbers[0], numbers[1]), kernel_sizes, strides, paddings, dilations, tuple(epss))


@torch.library.custom_op("cvt_kernels::conv_projection", mutates_args=())
def _forward_op(
    x: Tensor, weights: list[Tensor], gammas: list[Tensor], betas: list[Tensor], means: list[Tensor],
    variances: list[Tensor], geometry: list[int], epss: list[float], batch_stats: bool,
) -> list[Tensor]:  # fmt: skip
    return forward(x, _unpack_geometry(geometry, epss), weights, gammas, betas, means, variances)


@_forward_op.register_fake
def _(x, weights, gammas, betas, means, variances, geometry, epss, batch_stats):
    unpacked = _unpack_geometry(geometry, epss)
    return [
        x.new_empty(x.shape[0], h * w + _class_tokens(x, unpacked), x.shape[2])
        for h, w in unpacked.output_grids
    ]


@torch.library.custom_op("cvt_kernels::conv_projection_backward", mutates_args=())
def _backward_op(
    x: Tensor, weights: list[Tensor], gammas: list[Tensor], means: list[Tensor], variances: list[Tensor],
    dys: list[Tensor], geometry: list[int], epss: list[float], batch_stats: bool,
) -> list[Tensor]:  # fmt: skip
    dx, *shared = _gradients(
        x, _unpack_geometry(geometry, epss), weights, gammas, means, variances, dys, batch_stats
    )
    return [dx, *(gradient.clone() for gradient in shared)]  # an operator's outputs may not share storage


@_backward_op.register_fake
def _(x, weights, gammas, means, variances, dys, geometry, epss, batch_stats):
    return [x.new_empty(x.shape), *(t.new_empty(t.shape) for t in (*weights, *gammas, *gammas))]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, gammas, _, means, variances, geometry, epss, batch_stats = inputs
    ctx.save_for_backward(x, *weights, *gammas, *means, *variances)
    ctx.constants = geometry, epss, batch_stats


def _backward_of_op(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    x, *tensors = ctx.saved_tensors
    weights, gammas, means, variances = (list(group) for group in _groups(tensors, 4))
    dx, *dparameters = _backward_op(x, weights, gammas, means, variances, list(dys), *ctx.constants)
    none = [None] * len(weights)
    return dx, *map(list, _groups(dparameters, 3)), none, none, None, None, None


_forward_op.register_autograd(_backward_of_op, setup_context=_setup_context)


@torch.library.custom_op("cvt_kernels::conv_projection_statistics", mutates_args=())
def _statistics_op(x: Tensor, weights: list[Tensor], geometry: list[int], epss: list[float]) -> list[Tensor]:
    return list(statistics(x, _unpack_geometry(geometry, epss), weights))


@_statistics_op.register_fake
def _(x, weights, geometry, epss):
    return [x.new_empty(len(weights), x.shape[2], dtype=_accumulator(x)) for _ in range(2)]


_update_op = torch.library.custom_op(
    "cvt_kernels::update_running_statistics",
    update_running,
    mutates_args=("running_means", "running_vars", "tracked"),
)

# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(
    x: Tensor, grid: tuple[int, int], convs: Sequence[ConvBatchNorm], *, training: bool
) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    if x.numel() == 0:
        return "the batch is empty"
    if x.shape[1] * x.shape[2] >= 2**31:
        return "one image has 2³¹ elements or more"
    if not training:
        mixed = len({conv.running_mean is None for conv in convs}) > 1
        return "some branches have running statistics and some have none" if mixed else None
    buffers = [id(conv.running_mean) for conv in convs if conv.running_mean is not None]
    if len(buffers) > len(set(buffers)):
        return "two branches share their running statistics"
    if any(conv.process_group is not convs[0].process_group for conv in convs):
        return "the branches synchronise over different process groups"
    if convs[0].process_group is not None and torch.compiler.is_compiling():
        return "torch.compile does not trace the exchange between processes"
    return None


def conv_projection(
    x: Tensor, grid: tuple[int, int], convs: Sequence[ConvBatchNorm], *, training: bool
) -> tuple[Tensor, ...]:
    """As ``cvt_kernels.conv_projection``, whose checks it relies on.

    ``x`` is read as it lies if its channels are adjacent, whatever the strides of its tokens and batch; otherwise it
    is copied first. Under autocast it is computed in autocast's dtype, as a convolution would be.
    """
    geometry = Geometry.of(grid, convs)
    weights = [conv.weight for conv in convs]
    if checks.autocast_enabled(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
    gammas = [conv.bn_weight if conv.bn_weight is not None else x.new_ones(x.shape[2]) for conv in convs]
    betas = [conv.bn_bias if conv.bn_bias is not None else x.new_zeros(x.shape[2]) for conv in convs]
    batch_stats, synchronised = training or convs[0].running_mean is None, None
    if batch_stats:
        with torch.no_grad():
            means, variances, synchronised = _batch_statistics(x, geometry, weights, convs, training)
    else:
        means, variances = [conv.running_mean for conv in convs], [conv.running_var for conv in convs]
    if torch.compiler.is_compiling():
        constants = _pack_geometry(geometry), list(geometry.epss)
        return tuple(_forward_op(x, weights, gammas, betas, means, variances, *constants, batch_stats))
    return _ConvProjection.apply(
        x, geometry, batch_stats, synchronised, *weights, *gammas, *betas, *means, *variances
    )


def _batch_statistics(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], convs: Sequence[ConvBatchNorm], training: bool
) -> tuple[list[Tensor], list[Tensor], _Synchronised | None]:
    """(means, variances, how they were synchronised); in training the running statistics are updated too."""
    compiling = torch.compiler.is_compiling()
    if compiling:
        mean, variance = _statistics_op(x, list(weights), _pack_geometry(geometry), list(geometry.epss))
    else:
        mean, variance = statistics(x, geometry, weights)
    counts, synchronised = _counts(x.shape[0], geometry), None
    corrections, unbiased = [n / max(n - 1, 1) for n in counts], variance
    if training and convs[0].process_group is not None:
        synchronised, mean, variance = _Synchronised.merge(mean, variance, counts, convs[0].process_group)
        total = synchronised.counts[:, None]
        corrections, unbiased = [1.0] * len(convs), variance * (total / (total - 1))
    rows = [i for i, conv in enumerate(convs) if conv.running_mean is not None] if training else []
    if rows:
        tracking = [convs[i] for i in rows]
        running_means, running_vars = zip(
            *((conv.running_mean, conv.running_var) for conv in tracking), strict=True
        )
        (_update_op if compiling else update_running)(
            mean, unbiased, rows, list(running_means), list(running_vars), [_tracked(conv) for conv in tracking],
            [_momentum(conv) for conv in tracking], [corrections[i] for i in rows],
        )  # fmt: skip
        if not compiling:  # the operator tells autograd by itself
            torch.autograd.graph.increment_version((*running_means, *running_vars))
    return list(mean.unbind()), list(variance.unbind()), synchronised


def _tracked(conv: ConvBatchNorm) -> Tensor:
    if conv.num_batches_tracked is not None:
        return conv.num_batches_tracked
    return torch.zeros((), dtype=torch.int64, device=conv.weight.device)


def _momentum(conv: ConvBatchNorm) -> float:
    if conv.momentum is None:
        return -1.0 if conv.num_batches_tracked is not None else 0.0
    return float(conv.momentum)
