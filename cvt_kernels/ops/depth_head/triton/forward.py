"""The kernels of the depth head, their launches, and the backend's function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from .... import launch, launching
from ....backends import Record
from ....launch import formulas
from ....launch.records import Pixels
from ...linear.triton.common import padded
from ...triton_launch import contiguous, grid_dependency_synchronize, product_types, why_not_for_inference
from ...triton_tf32 import rounded
from .. import SCALE

#: The pixels of a row of the result that a program of ``depth_sums`` has.
_COLUMNS = 256
_SCALE = tl.constexpr(SCALE)

launch.register(Pixels, formulas.depth_head, "depth_head")


class DepthSpec(NamedTuple):
    """The compile-time constants of the kernel: ``SPEC`` in it.

    Attributes:
        channels: D.
        pixels: Columns of the map that a program has.
        chunk: Channels that are interpolated at once.
        operand, accumulator, precision: See :func:`product_types`.
    """

    channels: int
    pixels: int
    chunk: int
    operand: Any
    accumulator: Any
    precision: str


@triton.jit
def _phase_weights(phase):
    """Returns the weights of the pixel before, of the same and of the next for a phase."""
    before = tl.where(phase == 0, 0.375, tl.where(phase == 1, 0.1875, tl.where(phase == 2, 0.0625, 0.0)))
    after = tl.where(phase == 3, 0.375, tl.where(phase == 2, 0.1875, tl.where(phase == 1, 0.0625, 0.0)))
    return before, 1.0 - before - after, after


@triton.jit
def _row_weights(row, height):
    """Returns the row of the map that an upsampled row lies in, and the weights of its three neighbors.

    These are the row before, itself and the row after. All weights are 0 beyond the border.
    """
    inside = (row >= 0) & (row < height * _SCALE)
    row = tl.minimum(tl.maximum(row, 0), height * _SCALE - 1)
    before, same, after = _phase_weights(row % _SCALE)
    before, same = tl.where(inside, before, 0.0), tl.where(inside, same, 0.0)
    return row // _SCALE, before, same, tl.where(inside, after, 0.0)


@triton.jit
def _add_row(total, ptrs, weight, mask):
    """Adds the products of a row by its weight; a row of weight 0 is not read."""
    products = tl.load(ptrs, mask=mask & (weight != 0.0), other=0.0)
    return total + weight * products.to(tl.float32)


@triton.jit
def _add_column(total, blended, x, width, place, side):
    """Adds a column at a side of a pixel (0 before, 1 the same, 2 after) to a phase by its weight.

    ``place`` is where the tap is, in upsampled columns from the pixel's first one: −1 to 4.
    """
    # The tap's column (−1 before, 0 the same, 1 after), and the side from that column.
    of_tap = tl.where(place < 0, -1, tl.where(place > 3, 1, 0))
    beside = side - 1 - of_tap
    before, same, after = _phase_weights(place - of_tap * 4)
    outer = tl.where(beside == -1, before, tl.where(beside == 1, after, 0.0))
    weight = tl.where(beside == 0, same, outer)
    at = x + of_tap
    mask = (at >= 0) & (at < width) & (weight != 0.0)
    return total + tl.where(mask[:, None], weight * blended, 0.0)


@triton.jit(do_not_specialize=["height", "width", "tiles"])
def _depth_head_kernel(
    products_ptr, bias_ptr, last_ptr, sums_ptr, height, width, tiles, SPEC: tl.constexpr
):  # fmt: skip
    """Writes nine sums over the channels for a part of a row of the upsampled map."""
    grid_dependency_synchronize()
    M: tl.constexpr = SPEC.pixels
    CHUNK: tl.constexpr = SPEC.chunk
    D: tl.constexpr = SPEC.channels
    row = tl.program_id(0) // tiles
    image = (row // (height * _SCALE)).to(tl.int64)
    y = row % (height * _SCALE)
    x = tl.program_id(0) % tiles * M + tl.arange(0, M)
    inside = x < width
    length = width * (9 * D)
    products_ptr += image * height * length
    tap = tl.arange(0, 16)[None, :]
    sums = ()
    for _ in tl.static_range(4):
        sums = sums + (tl.zeros([M, 16], tl.float32),)
    # A pipeline of so many loads would not fit into shared memory.
    for first in tl.range(0, D, CHUNK, num_stages=1):
        d = first + tl.arange(0, CHUNK)
        mask = inside[:, None] & (d < D)[None, :]
        hidden = ()
        for _ in tl.static_range(4):
            hidden = hidden + (tl.zeros([M, CHUNK], tl.float32),)
        # Nine loads at a time: with more of them under way, registers spill.
        for step in tl.range(0, 9, num_stages=1):
            side, dx = step // 3, step % 3
            column = tl.minimum(tl.maximum(x + side - 1, 0), width - 1)
            ptrs = products_ptr + (column * (9 * D) + dx * D)[:, None] + d[None, :]
            blended = tl.zeros([M, CHUNK], tl.float32)
            for dy in tl.static_range(3):
                at, before, same, after = _row_weights(y + dy - 1, height)
                tap_ptrs = ptrs + dy * 3 * D
                blended = _add_row(blended, tap_ptrs + tl.maximum(at - 1, 0) * length, before, mask)
                blended = _add_row(blended, tap_ptrs + at * length, same, mask)
                blended = _add_row(blended, tap_ptrs + tl.minimum(at + 1, height - 1) * length, after, mask)
            new_hidden = ()
            for phase in tl.static_range(4):
                new_hidden = new_hidden + (
                    _add_column(hidden[phase], blended, x, width, phase + dx - 1, side),
                )
            hidden = new_hidden
        last = tl.load(last_ptr + d[:, None] * 9 + tap, mask=(d < D)[:, None] & (tap < 9), other=0.0)
        last = rounded(last.to(SPEC.operand), SPEC)
        new_sums = ()
        for phase in tl.static_range(4):
            values = hidden[phase]
            if bias_ptr is not None:
                values += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
            values = tl.where(values < 0.0, 0.0, values)  # NaN stays, as by PyTorch
            factor = rounded(values.to(products_ptr.dtype.element_ty).to(SPEC.operand), SPEC)
            product = tl.dot(
                factor, last, sums[phase], input_precision=SPEC.precision, out_dtype=SPEC.accumulator
            )
            new_sums = new_sums + (product,)
        sums = new_sums
    sums_ptr += row.to(tl.int64) * width * 36
    for phase in tl.static_range(4):
        ptrs = sums_ptr + (phase * 9 + tap) * width + x[:, None]
        tl.store(ptrs, sums[phase], mask=inside[:, None] & (tap < 9))


@triton.jit(do_not_specialize=["height", "width", "tiles"])
def _depth_sums_kernel(
    sums_ptr, bias_ptr, out_ptr, max_depth, height, width, tiles, COLUMNS: tl.constexpr
):  # fmt: skip
    """Writes the depths of a part of a row of the result."""
    grid_dependency_synchronize()
    row = tl.program_id(0) // tiles
    y = row % (height * _SCALE)
    x = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = x < width * _SCALE
    total = tl.zeros([COLUMNS], tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr).to(tl.float32)
    for dy in tl.static_range(3):
        is_row = (y + dy >= 1) & (y + dy <= height * _SCALE)
        row_ptr = sums_ptr + (row + dy - 1).to(tl.int64) * width * 36
        for dx in tl.static_range(3):
            place = x + dx - 1
            mask = inside & (place >= 0) & (place < width * _SCALE) & is_row
            offset = (place % _SCALE * 9 + (dy * 3 + dx)) * width + place // _SCALE
            total += tl.load(row_ptr + offset, mask=mask, other=0.0)
    depth = max_depth / (1.0 + tl.exp(-total))
    tl.store(out_ptr + row.to(tl.int64) * width * _SCALE + x, depth.to(out_ptr.dtype.element_ty), mask=inside)


def depth_forward(
    products: Tensor, bias: Tensor | None, last_weight: Tensor, last_bias: Tensor | None, max_depth: float
) -> Tensor:
    """Returns the depths (B, 4·H, 4·W) from the products (B, H, W, 9·D) of the map; all is contiguous."""
    batch, height, width, _ = products.shape
    channels = last_weight.shape[1]
    config: Pixels = launch.configuration(
        "depth_head", products.dtype, (channels,), batch * height * width, launching.chip(products.device)
    )
    tf32 = products.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    types = product_types(products.dtype, tf32=tf32)
    spec = DepthSpec(
        channels=channels,
        pixels=config.pixels,
        chunk=min(config.channels, padded(channels)),
        operand=types["operand"],
        accumulator=types["accumulator"],
        precision=types["precision"],
    )
    rows = batch * SCALE * height
    sums = products.new_empty(batch, SCALE * height, SCALE, 9, width, dtype=torch.float32)
    tiles = -(-width // config.pixels)
    launching.launch(
        _depth_head_kernel, (rows * tiles,), on=products, options=config.options,
        products_ptr=products, bias_ptr=bias, last_ptr=last_weight, sums_ptr=sums, height=height, width=width,
        tiles=tiles, SPEC=spec,
    )  # fmt: skip
    out = products.new_empty(batch, SCALE * height, SCALE * width)
    tiles = -(-SCALE * width // _COLUMNS)
    launching.launch(
        _depth_sums_kernel, (rows * tiles,), on=products, options={"num_warps": 4},
        sums_ptr=sums, bias_ptr=last_bias, out_ptr=out, max_depth=float(max_depth), height=height,
        width=width, tiles=tiles, COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x, weight = call.x, call.weight
    batch, inputs, height, width = x.shape
    if (reason := why_not_for_inference(call)) is not None:
        return reason
    if height * width * 9 * max(weight.shape[0], inputs) >= 2**31 or batch * height * width >= 2**29:
        return "the products of an image have 2³¹ elements or more, or all images 2²⁹ pixels or more"
    return None


def depth_head(call: Record) -> Tensor:
    """Computes ``cvt_kernels.depth_head`` for checked arguments."""
    x, weight, bias, last_weight, last_bias, max_depth = call
    taps = weight.permute(2, 3, 0, 1).reshape(-1, weight.shape[1])
    products = F.linear(x.permute(0, 2, 3, 1), taps).contiguous()
    return depth_forward(
        products, contiguous(bias), last_weight.contiguous(), contiguous(last_bias), max_depth
    )
