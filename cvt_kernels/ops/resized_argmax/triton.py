"""Triton kernels of ``resized_argmax``: argmax over the classes of logits that are resized bilinearly.

Layout: logits (B, K, h, w) with any strides, best with adjacent classes; the result (B, H, W), int64.

``pixel_classes`` finds the largest class of each pixel of the logits, or −1 where a logit is not finite. In
``resized_argmax`` a program has a rectangle of pixels of the result. A class that is the largest in all four
neighbors of a pixel is the largest in between, since bilinear weights are not negative. If that holds for all
its pixels, a program is done; else it interpolates the classes of its pixels in float32, some at a time, and
keeps the largest in registers. What a pixel gets does not depend on the others of its program.

Bytes per launch: the logits once and 4·B·h·w written; then 4·B·h·w, 8·B·H·W written, and of the logits what
lies around pixels whose neighbors differ. The resized logits, K numbers for each of B·H·W pixels, are never
in memory. Nothing is saved: there is no gradient. Float64 is left to PyTorch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import launch
from ...backends import Record
from ...launch import launching
from ...launch.records import Rows
from ..triton_launch import grid_dependency_synchronize, source

#: The most classes that are compared at once, and the most columns of a rectangle of pixels.
_CHUNK, _COLUMNS = 8, 16
_NONE = tl.constexpr(2**31 - 1)  # larger than every class

launch.register(Rows, lambda need: Rows(elements=512, num_warps=4), "resized_argmax")


class ArgmaxSpec(NamedTuple):
    """The compile-time constants of the kernels: ``SPEC`` in them."""

    classes: int  # K
    chunk: int  # Classes that are compared at once
    # Of a program's rectangle of pixels
    rows: int
    columns: int


@triton.jit
def _first_classes(PIXELS: tl.constexpr, SPEC: tl.constexpr):
    """Returns the largest numbers before any was compared, −∞, and their classes."""
    CHUNK: tl.constexpr = SPEC.chunk
    c = tl.arange(0, CHUNK)[None, :] + tl.zeros([PIXELS, CHUNK], tl.int32)
    return tl.full([PIXELS, CHUNK], float("-inf"), tl.float32), tl.where(c < SPEC.classes, c, _NONE)


@triton.jit
def _with_larger(best, at, value, first, SPEC: tl.constexpr):
    """Returns the largest numbers and their classes after classes ``first`` and on; NaN is the largest."""
    CHUNK: tl.constexpr = SPEC.chunk
    c = first + tl.arange(0, CHUNK)[None, :]
    is_larger = (value > best) | ((value != value) & (best == best))
    is_larger = is_larger & (c < SPEC.classes)
    return tl.where(is_larger, value, best), tl.where(is_larger, c, at)


@triton.jit
def _first_largest(best, at):
    """Returns the first class of the largest number of each pixel."""
    is_nan = best != best
    most = tl.max(tl.where(is_nan, float("-inf"), best), axis=1)[:, None]
    of_nan = tl.min(tl.where(is_nan, at, _NONE), axis=1)
    of_number = tl.min(tl.where(best == most, at, _NONE), axis=1)
    return tl.where(of_nan == _NONE, of_number, of_nan)


@triton.jit
def _load_logits(ptr, offset, first, class_stride, inside, SPEC: tl.constexpr):
    """Returns some classes of pixels, in float32; 0 beyond the last class."""
    CHUNK: tl.constexpr = SPEC.chunk
    c = first + tl.arange(0, CHUNK)[None, :]
    mask = inside[:, None] & (c < SPEC.classes)
    return tl.load(ptr + offset[:, None] + c * class_stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["pixels", "width"])
def _pixel_classes_kernel(
    x_ptr, out_ptr, image_stride, class_stride, row_stride, column_stride, pixels, width, SPEC: tl.constexpr
):  # fmt: skip
    """Writes the largest class of some pixels of an image, or −1."""
    grid_dependency_synchronize()
    CHUNK: tl.constexpr = SPEC.chunk
    CLASSES: tl.constexpr = SPEC.classes
    PIXELS: tl.constexpr = SPEC.rows * SPEC.columns
    image = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    inside = pixel < pixels
    offset = pixel // width * row_stride + pixel % width * column_stride
    x_ptr += image * image_stride
    best, at = _first_classes(PIXELS, SPEC)
    odd = tl.zeros([PIXELS, CHUNK], tl.int32)
    for first in range(0, CLASSES, CHUNK):
        value = _load_logits(x_ptr, offset, first, class_stride, inside, SPEC)
        best, at = _with_larger(best, at, value, first, SPEC)
        odd += tl.where(tl.abs(value) < float("inf"), 0, 1)
    result = tl.where(tl.max(odd, axis=1) > 0, -1, _first_largest(best, at))
    tl.store(out_ptr + image * pixels + pixel, result, mask=inside)


@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width", "tiles_x", "tiles"])
def _resized_argmax_kernel(
    x_ptr, largest_ptr, out_ptr,
    image_stride, class_stride, row_stride, column_stride,
    height, width, out_height, out_width, ratio_y, ratio_x, tiles_x, tiles,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Writes the classes of a rectangle of pixels; ``ratio_y`` is height / out_height, and so on."""
    grid_dependency_synchronize()
    CHUNK: tl.constexpr = SPEC.chunk
    CLASSES: tl.constexpr = SPEC.classes
    ROWS: tl.constexpr = SPEC.rows
    COLUMNS: tl.constexpr = SPEC.columns
    PIXELS: tl.constexpr = ROWS * COLUMNS
    image = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    place = tl.arange(0, PIXELS)
    y = tile // tiles_x * ROWS + place // COLUMNS
    x = tile % tiles_x * COLUMNS + place % COLUMNS
    inside = (y < out_height) & (x < out_width)
    upper, lower, down = source(y, ratio_y, height)
    left, right, across = source(x, ratio_x, width)
    largest_ptr += image * height * width
    first_class = tl.load(largest_ptr + upper * width + left, mask=inside, other=0)
    agree = first_class >= 0
    agree = agree & (first_class == tl.load(largest_ptr + upper * width + right, mask=inside, other=0))
    agree = agree & (first_class == tl.load(largest_ptr + lower * width + left, mask=inside, other=0))
    agree = agree & (first_class == tl.load(largest_ptr + lower * width + right, mask=inside, other=0))
    x_ptr += image * image_stride
    top, bottom = upper * row_stride, lower * row_stride
    left *= column_stride
    right *= column_stride
    weight, next_weight = (1.0 - across)[:, None], across[:, None]
    up, down = (1.0 - down)[:, None], down[:, None]
    # Pixels beyond the edge, whose neighbors are all 0, agree too.
    classes = tl.where(tl.min(agree.to(tl.int32), axis=0) > 0, 0, CLASSES)
    best, at = _first_classes(PIXELS, SPEC)
    for first in range(0, classes, CHUNK):
        above = up * _load_logits(x_ptr, top + left, first, class_stride, inside, SPEC)
        above += down * _load_logits(x_ptr, bottom + left, first, class_stride, inside, SPEC)
        beside = up * _load_logits(x_ptr, top + right, first, class_stride, inside, SPEC)
        beside += down * _load_logits(x_ptr, bottom + right, first, class_stride, inside, SPEC)
        best, at = _with_larger(best, at, weight * above + next_weight * beside, first, SPEC)
    result = tl.where(agree, first_class, _first_largest(best, at))
    tl.store(out_ptr + image * out_height * out_width + y * out_width + x, result.to(tl.int64), mask=inside)


def argmax_forward(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns the classes (B, H, W) of logits (B, K, h, w) that are resized to ``size``."""
    batch, classes, height, width = logits.shape
    out_height, out_width = size
    config: Rows = launch.configuration(
        "resized_argmax", logits.dtype, (classes,), batch * out_height * out_width,
        launching.chip(logits.device),
    )  # fmt: skip
    chunk = min(_CHUNK, triton.next_power_of_2(classes))
    pixels = max(1, config.elements // chunk)
    columns = min(_COLUMNS, pixels)
    spec = ArgmaxSpec(classes, chunk, pixels // columns, columns)
    names = "image_stride", "class_stride", "row_stride", "column_stride"
    strides = dict(zip(names, logits.stride(), strict=True))
    largest = torch.empty(batch, height, width, dtype=torch.int32, device=logits.device)
    launching.launch(
        _pixel_classes_kernel, (-(-height * width // pixels), batch), on=logits, options=config.options,
        x_ptr=logits, out_ptr=largest, pixels=height * width, width=width, SPEC=spec, **strides,
    )  # fmt: skip
    out = torch.empty(batch, *size, dtype=torch.int64, device=logits.device)
    tiles_x = -(-out_width // columns)
    tiles = -(-out_height // spec.rows) * tiles_x
    launching.launch(
        _resized_argmax_kernel, (batch * tiles,), on=logits, options=config.options,
        x_ptr=logits, largest_ptr=largest, out_ptr=out, height=height, width=width, out_height=out_height,
        out_width=out_width, ratio_y=height / out_height, ratio_x=width / out_width, tiles_x=tiles_x,
        tiles=tiles, SPEC=spec, **strides,
    )  # fmt: skip
    return out


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    logits, (height, width) = call.logits, call.size
    if torch.compiler.is_compiling():
        return "is not for torch.compile"
    if logits.shape[0] == 0:
        return "the batch is empty"
    if logits.dtype == torch.float64:
        return "serves float32, bfloat16 and float16"
    sizes = zip(logits.shape[1:], logits.stride()[1:], strict=True)
    if max(sum((size - 1) * stride for size, stride in sizes), height * width) >= 2**31 - 2**13:
        return "an image has 2³¹ logits or pixels or more"
    if logits.shape[0] >= 2**16:
        return "serves up to 65,535 images"
    return None


def resized_argmax(call: Record) -> Tensor:
    """Computes ``cvt_kernels.resized_argmax`` for checked arguments."""
    return argmax_forward(call.logits, call.size)
