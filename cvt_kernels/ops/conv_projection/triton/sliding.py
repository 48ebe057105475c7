"""Device functions and tilings of the sliding-row kernels, which read each row of an image once.

A program goes down a strip of image rows, two at a time. A lane has two adjacent columns and, of 16-bit
elements, two adjacent channels, which are one access of 4 bytes. It loads four pixels of a row (two are its
own, two are the halo), converts them once and adds them to every output that they reach, in all branches:
the weights of all branches stay in registers, and so does the sum of the output row that the next two rows
complete.

They serve branches with 3×3 kernels, padding 1, dilation 1 and stride 1 or 2.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import launching
from ....launch.records import Sliding
from ....records import Branch, ConvBatchNorm, flattened
from ...triton_launch import ELEMENTS
from .common import Geometry, configuration

# Tilings ---------------------------------------------------------------------------------------------

#: Integers of the kernels that are not specialized: they change with the batch and the image.
SIZES = ("batch", "groups", "height", "width", "strips", "strip_rows", "col_blocks", "stride_b", "regions")
#: Branches whose weights fit in registers together.
MAX_BRANCHES = 3


class Lanes(NamedTuple):
    """The compile-time constants of a program's lanes: ``LANES`` in the kernels."""

    pairs: int  # P, pairs of columns of a program; one warp has each
    channels: int  # BC, channels of a program
    is_packed: bool  # Whether two channels are read and written as one 32-bit word
    element: Any  # Triton's dtype of the activations
    accumulator: Any  # Triton's dtype of sums
    # Alignment of every token's address in bytes, up to 16. Above 4, a lane with several units reads them at
    # once.
    alignment: int


class SlidingTiling(NamedTuple):
    """The tiling of a sliding-row kernel."""

    options: dict[str, int]  # Triton's options of the launch
    programs: int  # Size of the first axis of the launch
    regions: int  # Parts of the batch with their own partial sums: strip, block of columns, group of images
    arguments: dict[str, Any]  # The arguments shared by all such kernels: sizes and constants

    @classmethod
    def of(cls, kernel: str, x: Tensor, geometry: Geometry, others: Sequence[Tensor]) -> SlidingTiling:
        """Returns the tiling of a kernel, such as ``sliding_fwd``, for tokens x (B, T, C) or their gradient.

        ``others`` are the other tensors that are read or written two channels at a time.
        """
        return cls.by(configuration(kernel, x), x, geometry, others)

    @classmethod
    def by(cls, config: Sliding, x: Tensor, geometry: Geometry, others: Sequence[Tensor]) -> SlidingTiling:
        """Returns the tiling for a configuration and the arguments of :meth:`of`."""
        alignment = alignment_of(x, others)
        return _tiling(config, x.shape, x.dtype, alignment, geometry, launching.chip(x.device))

    def launch(self, kernel: Any, x: Tensor, **given: Any) -> None:
        """Launches a kernel that reads tokens ``x``, with these arguments besides the shared ones."""
        launching.launch(
            kernel, (self.programs,), on=x, options=self.options, x_ptr=x, stride_b=x.stride(0),
            STEP=x.stride(1), **given, **self.arguments,
        )  # fmt: skip


def alignment_of(x: Tensor, others: Sequence[Tensor]) -> int:
    """Returns the common alignment in bytes, up to 16, of all tokens and the other tensors."""
    strides = (stride * x.element_size() for stride in (x.shape[2], x.stride(0), x.stride(1)))
    return math.gcd(16, *strides, *(tensor.data_ptr() for tensor in (x, *others)))


def why_not_sliding(branches: Sequence[Branch]) -> str | None:
    """Returns why sliding-row kernels cannot serve the branches of a call, or None."""
    if any(type(conv) is not ConvBatchNorm for conv in branches):
        return "a branch is a sum of convolutions"
    if len(branches) <= MAX_BRANCHES and all(
        (conv.weight.shape[3], conv.padding, conv.dilation) == (3, 1, 1) and conv.stride in (1, 2)
        for conv in flattened(branches)[0]
    ):
        return None
    return f"serves at most {MAX_BRANCHES} convolutions of 3×3 with padding 1 and stride 1 or 2"


@functools.lru_cache(maxsize=1024)
def _tiling(
    config: Sliding, shape: torch.Size, dtype: torch.dtype, alignment: int, geometry: Geometry,
    chip: launching.Chip,
) -> SlidingTiling:  # fmt: skip
    batch, tokens, channels = shape
    height, width = geometry.grid
    block = config.channels if dtype.itemsize == 2 else config.channels // 2
    channel_blocks = -(-channels // block)
    pairs = _pairs(-(-width // 2), config.pairs)
    col_blocks = -(-width // (2 * pairs))
    resident = chip.multiprocessors * max(1, config.resident_warps // pairs)
    row_pairs, images = _strip_length(batch, channel_blocks * col_blocks, -(-height // 2), resident)
    strips = -(-height // (2 * row_pairs))
    groups = -(-batch // images)
    regions = groups * strips * col_blocks
    lanes = Lanes(
        pairs=pairs, channels=block, is_packed=dtype.itemsize == 2 and alignment % 4 == 0,
        element=ELEMENTS[dtype], accumulator=tl.float64 if dtype == torch.float64 else tl.float32,
        alignment=alignment,
    )  # fmt: skip
    arguments = {
        "batch": batch,
        "groups": groups,
        "height": height,
        "width": width,
        "strips": strips,
        "strip_rows": 2 * row_pairs,
        "col_blocks": col_blocks,
        "CHANNELS": channels,
        "CLASS_TOKEN": tokens - height * width,
        "STRIDES": geometry.strides,
        "LANES": lanes,
    }
    options = {"num_warps": pairs, "maxnreg": config.registers}
    return SlidingTiling(options, regions * channel_blocks, regions, arguments)


def _strip_length(batch: int, blocks: int, row_pairs: int, resident: int) -> tuple[int, int]:
    """Returns the pairs of rows of a strip, and the images of a program, of which ``resident`` run at once.

    Long ways share the loading of the weights, short ones leave no multiprocessor idle in the last round of
    programs. In units of one pair of rows, the weights take about 2, and the start of a strip 1/2.
    """

    def rounds_of_work(lengths: tuple[int, int]) -> float:
        length, images = lengths
        programs = -(-batch // images) * blocks * -(-row_pairs // length)
        return -(-programs // resident) * (2 + images * (0.5 + length))

    lengths = sorted({-(-row_pairs // strips) for strips in range(1, row_pairs + 1)})
    return min(itertools.product(lengths, range(1, min(batch, 8) + 1)), key=rounds_of_work)


def _pairs(needed: int, most: int) -> int:
    """Returns the power of two up to ``most`` whose multiple covers ``needed`` with the least waste."""
    candidates = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return min(reversed(candidates), key=lambda pairs: -(-needed // pairs) * pairs)


# Places and rows ------------------------------------------------------------------------------------------
#
# A unit is what a lane reads at once: two packed channels, or one. Tiles are [P, BC], raw tiles [P, units].


class SlidingPlace(NamedTuple):
    """A program's share of the work, built by :func:`locate_strip`."""

    region: Any  # Its index among the parts with their own partial sums
    first_image: Any  # Its first image, an int64; the next ones are ``groups`` apart
    images: Any  # Its number of images
    # Its rows of the input; ``first_row`` is even
    first_row: Any
    end_row: Any
    col: Any  # The first column [P, 1] of each pair, even
    # Its channels [1, BC] and their mask
    c: Any
    c_mask: Any
    # Its units [1, units] and their mask
    unit: Any
    unit_mask: Any


@triton.jit
def locate_strip(
    batch, groups, height, strips, strip_rows, col_blocks, CHANNELS: tl.constexpr, LANES: tl.constexpr
):
    """Returns this program's :class:`SlidingPlace`; channel blocks are neighbors, then column blocks."""
    BC: tl.constexpr = LANES.channels
    SIZE: tl.constexpr = 2 if LANES.is_packed else 1
    BLOCKS: tl.constexpr = (CHANNELS + BC - 1) // BC
    block = tl.program_id(0) % BLOCKS
    region = tl.program_id(0) // BLOCKS
    first_image = region // (col_blocks * strips)
    first_row = region // col_blocks % strips * strip_rows
    c = block * BC + tl.arange(0, BC)[None, :]
    unit = block * (BC // SIZE) + tl.arange(0, BC // SIZE)[None, :]
    return SlidingPlace(
        region=region,
        first_image=first_image.to(tl.int64),
        images=tl.cdiv(batch - first_image, groups),
        first_row=first_row,
        end_row=tl.minimum(first_row + strip_rows, height),
        col=(region % col_blocks * LANES.pairs + tl.arange(0, LANES.pairs)[:, None]) * 2,
        c=c,
        c_mask=c < CHANNELS,
        unit=unit,
        unit_mask=unit < CHANNELS // SIZE,
    )


@triton.jit
def units(ptr, LANES: tl.constexpr):
    """Casts a pointer to channels to a pointer to units."""
    ALIGNMENT: tl.constexpr = LANES.alignment
    if LANES.is_packed:
        ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        if ALIGNMENT > 4:
            ptr = tl.multiple_of(ptr, ALIGNMENT)
    return ptr


@triton.jit
def column_limits(col, width, height, mask, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Returns the row limits of COUNT columns from ``col`` + FIRST on, a tuple: ``height``, or 0 outside.

    One comparison with a row then masks the elements.
    """
    limits = ()
    for n in tl.static_range(FIRST, FIRST + COUNT):
        limits = limits + (tl.where((col + n >= 0) & (col + n < width) & mask, height, 0),)
    return limits


@triton.jit
def load_row(row_ptr, lane, limits, row, STEP: tl.constexpr):
    """Returns the raw tiles of adjacent columns of a row as a tuple, zeros where there are none.

    ``row_ptr`` points to the first of these columns, STEP apart, for the lane at offset 0.
    """
    raw = ()
    for n in tl.static_range(len(limits)):
        raw = raw + (tl.load(row_ptr + n * STEP + lane, mask=row < limits[n], other=0),)
    return raw


@triton.jit
def widen(raw, LANES: tl.constexpr):
    """Returns raw tiles [P, units] as tiles [P, BC] of the accumulator's dtype."""
    tiles = ()
    for n in tl.static_range(len(raw)):
        if LANES.is_packed:
            low, high = unpack(raw[n], LANES)
            tiles = tiles + (tl.join(low, high).reshape([LANES.pairs, LANES.channels]),)
        else:
            tiles = tiles + (raw[n].to(LANES.accumulator),)
    return tiles


@triton.jit
def unpack(raw, LANES: tl.constexpr):
    """Returns the two channels of packed units; bfloat16 is the upper half of a float32."""
    if LANES.element == tl.bfloat16:
        low = (raw << 16).to(tl.float32, bitcast=True)
        high = (raw & -65536).to(tl.float32, bitcast=True)
    else:
        low = (raw & 65535).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (raw >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def store_row(row_ptr, lane, tiles, limits, row, STEP: tl.constexpr):
    """Writes tiles [P, BC] to adjacent columns of a row, STEP apart."""
    for n in tl.static_range(len(tiles)):
        tl.store(row_ptr + n * STEP + lane, tiles[n].to(row_ptr.dtype.element_ty), mask=row < limits[n])


@triton.jit
def load_vector(ptr, place, LANES: tl.constexpr):
    """Returns one value per channel (C,), [P, BC]."""
    ptrs = tl.broadcast_to(ptr + place.c, (LANES.pairs, LANES.channels))  # each lane loads what it needs
    return tl.load(ptrs, mask=place.c_mask, other=1.0).to(LANES.accumulator)


@triton.jit
def load_weights(w_ptr, place, LANES: tl.constexpr):
    """Returns the taps of weights (C, 1, 3, 3) as a tuple of 9 tiles [P, BC].

    The 18 taps of two packed channels are 9 units.
    """
    P: tl.constexpr = LANES.pairs
    BC: tl.constexpr = LANES.channels
    taps = ()
    if LANES.is_packed:
        halves = ()
        for t in tl.static_range(9):
            ptrs = tl.broadcast_to(units(w_ptr, LANES) + place.unit * 9 + t, (P, BC // 2))
            low, high = unpack(tl.load(ptrs, mask=place.unit_mask, other=0), LANES)
            halves = halves + (low, high)
        for t in tl.static_range(9):
            taps = taps + (tl.join(halves[t], halves[9 + t]).reshape([P, BC]),)
    else:
        for t in tl.static_range(9):
            ptrs = tl.broadcast_to(w_ptr + place.c * 9 + t, (P, BC))
            taps = taps + (tl.load(ptrs, mask=place.c_mask, other=0.0).to(LANES.accumulator),)
    return taps


@triton.jit
def load_scaled(w_ptr, place, factor, LANES: tl.constexpr):
    """Returns the taps of weights, times a factor."""
    weights = load_weights(w_ptr, place, LANES)
    taps = ()
    for t in tl.static_range(9):
        taps = taps + (weights[t] * factor,)
    return taps


# The steps down a strip -----------------------------------------------------------------------------------


class SlidingRows(NamedTuple):
    """The rows of one image that a program reads."""

    ptr: Any  # Address of the unit at row 0 and column −1, never loaded from
    stride: Any  # Units from one row to the next
    lane: Any  # The offset of each lane's first column and unit [P, units]
    limits: Any  # The :func:`column_limits` of a lane's columns −1 to 2
    height: Any  # Rows of the image


@triton.jit
def rows_of(x_ptr, place, height, width, STEP: tl.constexpr, LANES: tl.constexpr):
    """Returns the :class:`SlidingRows` of an image with its first pixel at ``x_ptr``, tokens STEP apart."""
    ALIGNMENT: tl.constexpr = LANES.alignment
    DISTANCE: tl.constexpr = STEP // 2 if LANES.is_packed else STEP
    return SlidingRows(
        ptr=tl.multiple_of(units(x_ptr, LANES) - DISTANCE, ALIGNMENT),
        stride=width * DISTANCE,
        lane=place.col * DISTANCE + place.unit,
        limits=column_limits(place.col, width, height, place.unit_mask, -1, 4),
        height=height,
    )


@triton.jit
def load_at(rows, row, STEP: tl.constexpr, LANES: tl.constexpr):
    """Returns the four raw pixels of each lane in a row from 0 on, zeros beyond the last row."""
    DISTANCE: tl.constexpr = STEP // 2 if LANES.is_packed else STEP
    return load_row(rows.ptr + row * rows.stride, rows.lane, rows.limits, row, DISTANCE)


@triton.jit
def load_above(rows, row, STEP: tl.constexpr, LANES: tl.constexpr):
    """Returns the four raw pixels of each lane in the row before, zeros at the first row."""
    DISTANCE: tl.constexpr = STEP // 2 if LANES.is_packed else STEP
    row_ptr = rows.ptr + (row - 1) * rows.stride
    return load_row(row_ptr, rows.lane, rows.limits, row_above(row, rows.height), DISTANCE)


@triton.jit
def row_above(row, height):
    """Returns the row before, to compare with limits: at the first row, one beyond the last."""
    return tl.where(row > 0, row - 1, height)


@triton.jit
def add_row(sums, pixels, taps, ROW: tl.constexpr):
    """Adds a row of four pixels to the sums of one or two adjacent outputs, by the taps of row ROW."""
    added = ()
    for n in tl.static_range(len(sums)):
        total = sums[n]
        for b in tl.static_range(3):
            total = tl.fma(pixels[n + b], taps[3 * ROW + b], total)
        added = added + (total,)
    return added


@triton.jit
def start_sums(starts, pixels, taps, STRIDES: tl.constexpr):
    """Returns every branch's sums of the output row after a row of pixels: ``starts`` plus the row's share.

    A branch of stride 1 has two outputs in a lane's columns, one of stride 2 has one.
    """
    sums = ()
    for i in tl.static_range(len(STRIDES)):
        first = (starts[i], starts[i]) if STRIDES[i] == 1 else (starts[i],)
        sums = sums + (add_row(first, pixels, taps[i], 0),)
    return sums


@triton.jit
def pixels_of(raw, rows, row, norm, LANES: tl.constexpr):
    """Returns the raw pixels of a row as tiles [P, BC], after LayerNorm if there is a ``norm``.

    A norm, which packed units have, is a plain tuple: pointers [P, 1] to what scales the pixels of each
    lane in the row before ``first_row``, from column −1 on; how far behind it is what is added to them;
    ``first_row``; LayerNorm's weight and bias of the two channels of a unit, four tiles [P, units].
    """
    if len(norm) > 0:
        P: tl.constexpr = LANES.pairs
        BC: tl.constexpr = LANES.channels
        scale_ptrs, window, first_row, low_weight, high_weight, low_bias, high_bias = norm
        scale_ptrs += (row - first_row + 1) * (2 * P + 2)
        tiles = ()
        for n in tl.static_range(len(raw)):
            ptrs = tl.broadcast_to(scale_ptrs + n, (P, BC // 2))  # each lane loads what it needs
            scale = tl.load(ptrs)
            shift = tl.load(ptrs + window)
            inside = (row >= 0) & (row < rows.limits[n])
            low, high = unpack(raw[n], LANES)
            low = tl.fma(tl.fma(low, scale, shift), low_weight, low_bias)
            high = tl.fma(tl.fma(high, scale, shift), high_weight, high_bias)
            low, high = tl.where(inside, low, 0.0), tl.where(inside, high, 0.0)
            tiles = tiles + (tl.join(low, high).reshape([P, BC]),)
    else:
        tiles = widen(raw, LANES)
    return tiles


@triton.jit
def sliding_start(
    rows, row, starts, taps, STEP: tl.constexpr, STRIDES: tl.constexpr, LANES: tl.constexpr, norm
):
    """Returns the sums of the outputs at ``row``, begun by the row before, and the raw pixels of ``row``."""
    above = pixels_of(load_above(rows, row, STEP, LANES), rows, row - 1, norm, LANES)
    return start_sums(starts, above, taps, STRIDES), load_at(rows, row, STEP, LANES)


@triton.jit
def sliding_step(
    sums, raw, rows, row, starts, taps, STEP: tl.constexpr, STRIDES: tl.constexpr, LANES: tl.constexpr,
    norm,
):  # fmt: skip
    """Advances by two rows, from an even one on.

    Args:
        sums: Sums of the outputs at ``row``, begun by the row before.
        raw: The raw pixels of ``row``, of the image ``rows``.
        starts, taps: Initial sums and weights of every branch.
        norm: See :func:`pixels_of`.

    Returns:
        The outputs at ``row``, of every branch; the outputs at ``row`` + 1, empty where the stride is 2; the
        sums and the raw pixels of ``row`` + 2.
    """
    next_raw = load_at(rows, row + 1, STEP, LANES)
    last_raw = load_at(rows, row + 2, STEP, LANES)
    pixels = pixels_of(raw, rows, row, norm, LANES)
    next_pixels = pixels_of(next_raw, rows, row + 1, norm, LANES)
    upper = ()
    lower = ()
    for i in tl.static_range(len(STRIDES)):
        total = add_row(sums[i], pixels, taps[i], 1)
        upper = upper + (add_row(total, next_pixels, taps[i], 2),)
        if STRIDES[i] == 1:
            total = add_row((starts[i], starts[i]), pixels, taps[i], 0)
            total = add_row(total, next_pixels, taps[i], 1)
            last_pixels = pixels_of(last_raw, rows, row + 2, norm, LANES)
            lower = lower + (add_row(total, last_pixels, taps[i], 2),)
        else:
            lower = lower + ((),)
    return upper, lower, start_sums(starts, next_pixels, taps, STRIDES), last_raw


# The maps of a branch -------------------------------------------------------------------------------------
#
# Output (r, c) of a branch of stride 2 lies at (2r, 2c) of the input, in the upper left pixel of a lane's
# pair of rows and columns, so the limits of the input's columns hold for its outputs too.


@triton.jit
def output_size(size, STRIDE: tl.constexpr):
    """Returns the output's number of rows or columns for the input's."""
    if STRIDE == 2:
        size = (size + 1) // 2
    return size


@triton.jit
def output_lanes(
    ptr, place, STRIDE: tl.constexpr, HALO: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr
):
    """Returns pointers [P, units] to row 0 of a branch's map (Hᵢ, Wᵢ, C) of one image, from ``ptr`` on.

    A lane has the columns of its outputs: two, or one for stride 2. HALO adds the outputs that its input
    columns also reach: one on both sides, or one after for stride 2. The pointers are to the first column.
    """
    DISTANCE: tl.constexpr = CHANNELS // 2 if LANES.is_packed else CHANNELS
    ptr = units(ptr, LANES)
    if HALO and STRIDE == 1:
        ptr -= DISTANCE
    return ptr + (place.col // STRIDE * DISTANCE + place.unit)


@triton.jit
def load_outputs(
    lanes, row, width, limits, STRIDE: tl.constexpr, HALO: tl.constexpr, CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Returns the raw tiles of the outputs of a row of the input as a tuple, zeros where there are none.

    ``limits`` are the input's limits at a lane's columns −1 to 2.
    """
    if STRIDE == 1:
        if not HALO:
            limits = (limits[1], limits[2])
    elif HALO:
        limits = (limits[1], limits[3])
    else:
        limits = (limits[1],)
    DISTANCE: tl.constexpr = CHANNELS // 2 if LANES.is_packed else CHANNELS
    row_ptr = lanes + row // STRIDE * (output_size(width, STRIDE) * DISTANCE)
    return load_row(row_ptr, 0, limits, row, DISTANCE)


@triton.jit
def load_output_above(lanes, row, width, height, limits, CHANNELS: tl.constexpr, LANES: tl.constexpr):
    """Returns the raw tiles of the row before in a map of stride 1 with its halo, zeros at the first row."""
    DISTANCE: tl.constexpr = CHANNELS // 2 if LANES.is_packed else CHANNELS
    return load_row(lanes + (row - 1) * (width * DISTANCE), 0, limits, row_above(row, height), DISTANCE)
