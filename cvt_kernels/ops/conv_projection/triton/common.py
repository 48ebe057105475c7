"""The parts that the projection's Triton kernels share: tilings, device functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from .... import launch, launching, records
from ....launch import formulas
from ....launch.records import Pixels, Regions, Sliding

for _kernel in ("fwd", "stats", "bwd_sums", "bwd_conv", "bwd_input"):
    _sliding = formulas.sliding_bwd_conv if _kernel == "bwd_conv" else formulas.sliding
    launch.register(Sliding, _sliding, f"conv_projection_sliding_{_kernel}")
    launch.register(Regions, formulas.region, f"conv_projection_{_kernel}")
launch.register(Pixels, formulas.merge_stats, "conv_projection_merge_stats")
launch.register(Pixels, formulas.sum_regions, "conv_projection_sum_regions")
launch.register(
    Pixels, lambda need: [Pixels(pixels=1, channels=256, num_warps=1)], "conv_projection_update_running"
)


def configuration(kernel: str, x: Tensor) -> Any:
    """Returns the configuration of a kernel for tokens or partial sums like x (…, C), on its device."""
    rows = x.numel() // max(x.shape[-1], 1)
    chip = launching.chip(x.device)
    return launch.configuration(f"conv_projection_{kernel}", x.dtype, (x.shape[-1],), rows, chip)


# Geometry and tilings --------------------------------------------------------------------------------


class Geometry(NamedTuple):
    """The geometry of a call: everything but its tensors. Hashable.

    Attributes:
        grid: (H, W) of the input.
        kernel_sizes, strides, paddings, dilations, epss: One per convolution.
        summands: Per convolution, the number of convolutions summed to its output, 0 if it is not the first
            of them, as in ``records.flattened``. If empty, each convolution is an output.
    """

    grid: tuple[int, int]
    kernel_sizes: tuple[int, ...]
    strides: tuple[int, ...]
    paddings: tuple[int, ...]
    dilations: tuple[int, ...]
    epss: tuple[float, ...]
    summands: tuple[int, ...] = ()

    @classmethod
    def of(cls, grid: tuple[int, int], branches: Sequence[records.Branch]) -> Geometry:
        """Returns the geometry of a public call."""
        convs, summands = records.flattened(branches)
        kernel_sizes, strides, paddings, dilations, epss = zip(
            *((c.weight.shape[3], c.stride, c.padding, c.dilation, c.eps) for c in convs), strict=True
        )
        return cls(grid, kernel_sizes, strides, paddings, dilations, epss, summands)

    @property
    def lengths(self) -> tuple[int, ...]:
        """``summands``, with their default filled in."""
        return self.summands or (1,) * len(self.strides)

    @property
    def convolutions(self) -> list[tuple[int, int, int, int]]:
        """Kernel size, stride, padding and dilation of every convolution."""
        return list(zip(self.kernel_sizes, self.strides, self.paddings, self.dilations, strict=True))

    def of_each(self, outputs: Sequence[Any]) -> list[Any]:
        """Returns the element of each convolution's output, from a sequence with one element per output."""
        lengths = [length for length in self.lengths if length]
        return [own for own, length in zip(outputs, lengths, strict=True) for _ in range(length)]

    @property
    def output_grids(self) -> list[tuple[int, int]]:
        """(Hᵢ, Wᵢ) of every convolution."""
        height, width = self.grid
        lost = [
            d * (k - 1) + 1 - 2 * p
            for k, p, d in zip(self.kernel_sizes, self.paddings, self.dilations, strict=True)
        ]
        return [
            ((height - n) // s + 1, (width - n) // s + 1) for n, s in zip(lost, self.strides, strict=True)
        ]


@dataclass(frozen=True)
class Branch:
    """The constants of one convolution: ``BRANCHES[i]`` in the kernels.

    It is a dataclass because Triton forgets the field names of NamedTuples within a tuple. Functions of one
    branch take BRANCHES and its INDEX because Triton 3.6 does not take ``BRANCHES[i]`` as an argument.

    Attributes:
        kernel_size, stride, padding, dilation: The convolution's.
        columns: Columns of a tile on the output grid.
        rows: R, outputs in a column that a lane holds.
        summands: The number of branches, from this one on, summed to its output; 0 if it is not the first.
        folded: Whether BatchNorm is folded into the taps before they are summed up, as in ``sliding``.
    """

    kernel_size: int
    stride: int
    padding: int
    dilation: int
    columns: int
    rows: int
    summands: int
    folded: bool


class Tile(NamedTuple):
    """The constants of a tile: ``TILE`` in the kernels.

    Attributes:
        pixels: P.
        channels: BC.
        accumulator: Triton's dtype of sums.
    """

    pixels: int
    channels: int
    accumulator: Any

    @classmethod
    def of(cls, config: Pixels, dtype: torch.dtype) -> Tile:
        """Returns the tile of a configuration, for activations or sums of a dtype."""
        accumulator = tl.float64 if dtype == torch.float64 else tl.float32
        return cls(config.pixels, config.channels, accumulator)


class RegionTiling(NamedTuple):
    """The tiling of a launch over regions, the parts of an image that one program computes for some channels.

    Attributes:
        config: The configuration for the dtype of the tokens.
        programs: Size of the first axis of the launch.
        regions: Regions of all images.
        arguments: The arguments shared by all such kernels: sizes and constants.
    """

    config: Regions
    programs: int
    regions: int
    arguments: dict[str, Any]

    @classmethod
    def of(cls, kernel: str, x: Tensor, geometry: Geometry) -> RegionTiling:
        """Returns the tiling of a kernel for tokens like ``x`` (B, T, C)."""
        chip = launching.chip(x.device)
        config = configuration(kernel, x)
        return _tiling(config, x.shape, x.dtype, geometry, chip)

    def columns(self, width: int) -> int:
        """Returns the columns of a tile on a grid of this width, a power of 2."""
        return _tile_columns(self.config, self.arguments["col_blocks"], width)


@functools.lru_cache(maxsize=1024)
def _tiling(
    config: Regions, shape: torch.Size, dtype: torch.dtype, geometry: Geometry, chip: launching.Chip
) -> RegionTiling:
    """Returns a tiling; for small batches, regions shrink until every multiprocessor has two programs."""
    batch, tokens, channels = shape
    height, width = geometry.grid
    size = min(dtype.itemsize, 4)  # float64 is for the interpreter
    config = replace(config, channels=config.channels * 2 // size, rows=config.rows * size // 2)
    if max(geometry.lengths) > 1:  # twice the taps and norms: half the channels for each thread, to fit
        config = replace(config, num_warps=2 * config.num_warps)
    channel_blocks = -(-channels // config.channels)
    col_blocks = -(-width // config.region_cols)
    region_rows = config.region_rows
    while (
        region_rows > 2 * config.rows
        and batch * channel_blocks * col_blocks * -(-height // region_rows) < 2 * chip.multiprocessors
    ):
        region_rows //= 2
    strips = -(-height // region_rows)
    regions = batch * strips * col_blocks
    out_heights, out_widths = zip(*geometry.output_grids, strict=True)
    arguments = {
        "out_heights": out_heights,
        "out_widths": out_widths,
        "height": height,
        "width": width,
        "channels": channels,
        "CLASS_TOKEN": tokens - height * width,
        "strips": strips,
        "col_blocks": col_blocks,
        "BRANCHES": _branches(config, col_blocks, geometry),
        "TILE": Tile.of(config, dtype),
    }
    return RegionTiling(config, regions * channel_blocks, regions, arguments)


def _branches(config: Regions, col_blocks: int, geometry: Geometry) -> tuple[Branch, ...]:
    branches: list[Branch] = []
    for i, convolution in enumerate(geometry.convolutions):
        first = max(n for n in range(i + 1) if geometry.lengths[n])
        together = slice(first, first + geometry.lengths[first])  # the tiles of one output are the same
        branches.append(
            Branch(
                *convolution,
                columns=_tile_columns(config, col_blocks, geometry.output_grids[i][1]),
                rows=config.rows if max(geometry.kernel_sizes[together]) <= 3 else 1,
                summands=geometry.lengths[i],
                folded=is_of_sliding_kernel(*convolution) and geometry.lengths[first] > 1,
            )
        )
    return tuple(branches)


def is_of_sliding_kernel(kernel_size: int, stride: int, padding: int, dilation: int) -> bool:
    """Returns whether sliding-row kernels compute such a convolution."""
    return (kernel_size, padding, dilation) == (3, 1, 1) and stride in (1, 2)


def _tile_columns(config: Regions, col_blocks: int, width: int) -> int:
    return min(config.pixels, triton.next_power_of_2(-(-width // col_blocks)))


# Tensors --------------------------------------------------------------------------------------------------


def class_tokens(x: Tensor, geometry: Geometry) -> int:
    """Returns how many class tokens ``x`` (B, T, C) has: 0 or 1."""
    return x.shape[1] - geometry.grid[0] * geometry.grid[1]


def maybe_contiguous(x: Tensor) -> Tensor:
    """Returns ``x`` itself if its channels are contiguous and offsets fit 32 bits, else a copy."""
    return x if x.stride(2) == 1 and x.stride(1) * x.shape[1] < 2**31 else x.contiguous()


def packed(weights: Sequence[Tensor], config: Pixels) -> tuple[Tensor, ...]:
    """Returns each (C, 1, k, k) as a view of (channel blocks, taps of all branches, BC) at its first tap."""
    padding = -weights[0].shape[0] % config.channels
    blocks = [F.pad(w.flatten(1), (0, 0, 0, padding)) if padding else w.flatten(1) for w in weights]
    together = torch.cat(
        [w.unflatten(0, (-1, config.channels)).transpose(1, 2) for w in blocks], dim=1
    ).flatten()
    taps = [w[0].numel() for w in weights]
    return tuple(together[sum(taps[:i]) * config.channels :] for i in range(len(taps)))


def packed_above_3x3(weights: Sequence[Tensor], config: Pixels) -> tuple[Tensor, ...]:
    """Returns the weights, packed for kernels above 3×3."""
    if all(weight.shape[3] <= 3 for weight in weights):
        return tuple(weights)
    return tuple(w if w.shape[3] <= 3 else p for w, p in zip(weights, packed(weights, config), strict=True))


# Device functions -----------------------------------------------------------------------------------------
#
# Weights of a tap and what a convolution starts with are [1, BC], pixels [P, BC]. Packed weights are (channel
# blocks, taps of all branches, BC), which each branch enters at its first tap.


class Region(NamedTuple):
    """The region of a program, built by :func:`locate_region`.

    Attributes:
        image: Its image, an int64.
        number: Its index among the regions of all images.
        strip, strips: Its strip of rows, and the number of strips.
        col_block, col_blocks: Its block of columns, and the number of blocks.
        c, c_mask: Its channels [BC] and their mask.
        channels: Channels of a token.
        height, width: The input grid.
        stride_t: Elements from one token of the input to the next.
        first_weight: Offset of its channels in packed weights.
    """

    image: Any
    number: Any
    strip: Any
    strips: Any
    col_block: Any
    col_blocks: Any
    c: Any
    c_mask: Any
    channels: Any
    height: Any
    width: Any
    stride_t: Any
    first_weight: Any


class Bounds(NamedTuple):
    """The rows and columns of a grid that belong to a region."""

    first_row: Any
    end_row: Any
    first_col: Any
    end_col: Any


@triton.jit
def locate_region(
    height, width, channels, stride_t, strips, col_blocks, BRANCHES: tl.constexpr, TILE: tl.constexpr
):
    """Returns this program's :class:`Region`; channel blocks are neighbors."""
    BC: tl.constexpr = TILE.channels
    channel_blocks = tl.cdiv(channels, BC)
    number = tl.program_id(0) // channel_blocks
    block = tl.program_id(0) % channel_blocks
    c = block * BC + tl.arange(0, BC)
    image = (number // (col_blocks * strips)).to(tl.int64)
    return Region(
        image=image,
        number=number,
        strip=number // col_blocks % strips,
        strips=strips,
        col_block=number % col_blocks,
        col_blocks=col_blocks,
        c=c,
        c_mask=c < channels,
        channels=channels,
        height=height,
        width=width,
        stride_t=stride_t,
        first_weight=block * _taps(BRANCHES) * BC,
    )


@triton.jit
def _taps(BRANCHES: tl.constexpr):
    """Returns the number of taps of all branches."""
    taps = 0
    for i in tl.static_range(len(BRANCHES)):
        taps += BRANCHES[i].kernel_size * BRANCHES[i].kernel_size
    return taps


@triton.jit
def share(size, part, parts):
    """Returns where the part-th of ``parts`` equal shares of ``size`` begins and ends."""
    length = tl.cdiv(size, parts)
    return part * length, tl.minimum(part * length + length, size)


@triton.jit
def bounds_of(region, height, width):
    """Returns the :class:`Bounds` of a region on a grid."""
    first_row, end_row = share(height, region.strip, region.strips)
    first_col, end_col = share(width, region.col_block, region.col_blocks)
    return Bounds(first_row=first_row, end_row=end_row, first_col=first_col, end_col=end_col)


@triton.jit
def tile_positions(first_row, first_col, COLS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Returns row [P] and column [P] of the first of the ROWS pixels that each lane of a tile has."""
    lane = tl.arange(0, TILE.pixels)
    return first_row + lane // COLS * ROWS, first_col + lane % COLS


@triton.jit
def class_token_mask(region):
    """Returns the mask of class-token channels [BC] that this program writes: its own in the first region."""
    return region.c_mask & (region.strip == 0) & (region.col_block == 0)


@triton.jit
def load_channel(ptr, region, TILE: tl.constexpr):
    """Returns one value per channel [BC]."""
    return tl.load(ptr + region.c, mask=region.c_mask, other=1.0).to(TILE.accumulator)


@triton.jit
def load_weight(w_ptr, t, region, TILE: tl.constexpr):
    """Returns tap t of packed weights; taps are a constant apart, so that one address serves them all."""
    BC: tl.constexpr = TILE.channels
    weight = tl.load(w_ptr + region.first_weight + tl.arange(0, BC) + t * BC)
    return weight.to(TILE.accumulator)[None, :]


@triton.jit
def load_taps(w_ptr, region, BRANCH: tl.constexpr, TILE: tl.constexpr):
    """Returns the K×K weights (C, 1, K, K) as a tuple, empty above 3×3, which would not fit in registers.

    One tile is loaded and transposed in shared memory, once: a thread's channels lie K·K apart, and loading
    them one by one would take as many instructions as the pixels do.
    """
    K: tl.constexpr = BRANCH.kernel_size
    BC: tl.constexpr = TILE.channels
    taps = ()
    if K <= 3:
        t = tl.arange(0, 16)
        offset = region.c[:, None] * (K * K) + t[None, :]
        tile = tl.load(w_ptr + offset, mask=region.c_mask[:, None] & (t < K * K)[None, :], other=0.0)
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
            taps = taps + (parts[i].to(TILE.accumulator)[None, :],)
    return taps


@triton.jit
def load_pixels(ptr, row, col, region, height, width, stride_t):
    """Returns pixels of a zero-padded map, in its dtype."""
    inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
    offset = (row * width + col) * stride_t
    mask = inside[:, None] & region.c_mask[None, :]
    return tl.load(ptr + offset[:, None] + region.c[None, :], mask=mask, other=0.0)


@triton.jit
def store_pixels(ptr, pixels, row, col, valid, region, width):
    """Writes the ``valid`` [P] pixels of a map (height, width, channels)."""
    offset = (row * width + col) * region.channels
    mask = valid[:, None] & region.c_mask[None, :]
    tl.store(ptr + offset[:, None] + region.c[None, :], pixels.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def conv_rows(start, x_ptr, w_ptr, taps, row, col, region, BRANCH: tl.constexpr, TILE: tl.constexpr):
    """Returns ``start`` plus the convolution at the R output rows from ``row`` on, as a tuple.

    Without ``taps`` it loads packed weights as it goes.
    """
    K: tl.constexpr = BRANCH.kernel_size
    STRIDE: tl.constexpr = BRANCH.stride
    PAD: tl.constexpr = BRANCH.padding
    DIL: tl.constexpr = BRANCH.dilation
    R: tl.constexpr = BRANCH.rows
    P: tl.constexpr = TILE.pixels
    BC: tl.constexpr = TILE.channels
    accs = ()
    for _ in tl.static_range(R):
        accs = accs + (tl.zeros([P, BC], TILE.accumulator) + start,)
    for j in tl.static_range((R - 1) * STRIDE + (K - 1) * DIL + 1):  # input rows, from the first tap's on
        if R > 1 or j % DIL == 0:  # else no tap is there
            for b in tl.static_range(K):
                x = load_pixels(
                    x_ptr, row * STRIDE - PAD + j, col * STRIDE - PAD + b * DIL,
                    region, region.height, region.width, region.stride_t,
                ).to(TILE.accumulator)  # fmt: skip
                updated = ()
                for r in tl.static_range(R):
                    acc = accs[r]
                    if j >= r * STRIDE and (j - r * STRIDE) % DIL == 0 and (j - r * STRIDE) // DIL < K:
                        if len(taps) > 0:
                            tap = taps[(j - r * STRIDE) // DIL * K + b]
                        else:
                            tap = load_weight(w_ptr, (j - r * STRIDE) // DIL * K + b, region, TILE)
                        acc = tl.fma(x, tap, acc)  # rounded once, as in the sliding-row kernel
                    updated = updated + (acc,)
                accs = updated
    return accs


@triton.jit
def load_partial(ptr, number, c, c_mask, regions, channels):
    """Returns the partial sums of some regions, from (regions, C); 0 beyond the last."""
    offset = number.to(tl.int64) * channels
    mask = (number < regions)[:, None] & c_mask[None, :]
    return tl.load(ptr + offset[:, None] + c[None, :], mask=mask, other=0.0)
