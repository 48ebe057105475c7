"""Triton kernel of ``segmentation_head``.

It computes logits = classifier(relu(weight · x + bias + Σ resize(weightᵢ · mapᵢ))).

Layout: x (B, C, H, W) with any strides, logits (B, H·W, L), contiguous. cuBLAS multiplies every other map at
its own size, with a result (B, Hᵢ, Wᵢ, D) of the dtype of x. The kernel does all the rest: it reads x, the
products and the weights, and writes the logits only. No map of D channels at the size of x is in memory.

A program has a rectangle of pixels, so that the pixels which it reads from the products are neighbors too.
For a chunk of the D channels it adds four pixels of every product, by their bilinear weights, in float32;
tensor cores add the product of x and its weights. ReLU is applied in registers, and the result is a factor of
the classifier's product, whose sums stay in registers over all chunks. Programs side by side have up to 256
classes each, and each of them computes the sums before ReLU.

There are no gradients, and nothing is saved. Float64 is left to PyTorch, since pixels are interpolated in
float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ... import launch
from ...backends import Record
from ...launch import formulas, launching
from ...launch.records import Product
from ..linear.triton.common import part_width
from ..triton_launch import (
    grid_dependency_synchronize,
    padded,
    product_types,
    rounded,
    source,
    why_not_for_inference,
)

#: The most maps besides the first.
MOST_MAPS = 4
#: The most columns of a rectangle of pixels.
_COLUMNS = 16

launch.register(Product, formulas.segmentation_head, "segmentation_head")


class HeadSpec(NamedTuple):
    """The compile-time constants of the kernel: ``SPEC`` in it."""

    # C, D and L
    inputs: int
    channels: int
    classes: int
    maps: int  # How many maps are interpolated
    # Of a program's rectangle of pixels
    rows: int
    columns: int
    step: int  # Inputs of a step of the first map's product
    chunk: int  # Channels that are added up at once
    # Classes of a part of a program's logits, and parts
    width: int
    parts: int
    # See :func:`product_types`
    element: Any
    operand: Any
    accumulator: Any
    precision: str


@triton.jit
def _load_matrix(
    ptr, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Returns ROWS × COLUMNS of a matrix (HEIGHT, WIDTH) as a factor, with zeros beyond its end."""
    row = first_row + tl.arange(0, ROWS)[:, None]
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    ptrs = ptr + row * WIDTH + column
    if HEIGHT % ROWS == 0 and WIDTH % COLUMNS == 0:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=(row < HEIGHT) & (column < WIDTH), other=0.0)
    return rounded(tile.to(SPEC.operand), SPEC)


@triton.jit
def _load_pixels(x_ptr, offset, inside, first, channel_stride, SPEC: tl.constexpr):
    """Returns ``step`` inputs of the first map at its pixels, as a factor."""
    STEP: tl.constexpr = SPEC.step
    c = first + tl.arange(0, STEP)[None, :]
    mask = inside[:, None]
    if SPEC.inputs % STEP != 0:
        mask = mask & (c < SPEC.inputs)
    x = tl.load(x_ptr + offset[:, None] + c * channel_stride, mask=mask, other=0.0)
    return rounded(x.to(SPEC.operand), SPEC)


@triton.jit
def _load_source(map_ptr, pixel, d, mask, SPEC: tl.constexpr):
    """Returns channels ``d`` of pixels of an interpolated map."""
    return tl.load(map_ptr + (pixel * SPEC.channels)[:, None] + d, mask=mask, other=0.0).to(SPEC.accumulator)


@triton.jit(
    do_not_specialize=[
        "height", "width", "tiles_x", "tiles",
        "height0", "height1", "height2", "height3", "width0", "width1", "width2", "width3",
    ]
)  # fmt: skip
def _segmentation_head_kernel(
    x_ptr, w_ptr, bias_ptr, map_ptrs, classifier_ptr, classifier_bias_ptr, out_ptr,
    image_stride, channel_stride, row_stride, column_stride,
    height, width, tiles_x, tiles,
    height0, height1, height2, height3, width0, width1, width2, width3,
    ratio_y0, ratio_y1, ratio_y2, ratio_y3, ratio_x0, ratio_x1, ratio_x2, ratio_x3,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Writes some classes' logits of a rectangle of pixels; ``ratio_y0`` is height0 / height, and so on."""
    grid_dependency_synchronize()
    ROWS: tl.constexpr = SPEC.rows
    COLUMNS: tl.constexpr = SPEC.columns
    M: tl.constexpr = ROWS * COLUMNS
    MAPS: tl.constexpr = SPEC.maps
    STEP: tl.constexpr = SPEC.step
    CHUNK: tl.constexpr = SPEC.chunk
    C: tl.constexpr = SPEC.inputs
    D: tl.constexpr = SPEC.channels
    L: tl.constexpr = SPEC.classes
    WIDTH: tl.constexpr = SPEC.width
    PARTS: tl.constexpr = SPEC.parts
    image = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    first_class = tl.program_id(1) * (WIDTH * PARTS)
    place = tl.arange(0, M)
    y = tile // tiles_x * ROWS + place // COLUMNS
    x = tile % tiles_x * COLUMNS + place % COLUMNS
    inside = (y < height) & (x < width)
    x_ptr += image * image_stride
    offset = y * row_stride + x * column_stride
    heights = (height0, height1, height2, height3)
    widths = (width0, width1, width2, width3)
    ratios_y = (ratio_y0, ratio_y1, ratio_y2, ratio_y3)
    ratios_x = (ratio_x0, ratio_x1, ratio_x2, ratio_x3)
    pixels = _load_pixels(x_ptr, offset, inside, 0, channel_stride, SPEC)
    logits = ()
    for _ in tl.static_range(PARTS):
        logits = logits + (tl.zeros([M, WIDTH], SPEC.accumulator),)
    for first in range(0, D, CHUNK):
        d = first + tl.arange(0, CHUNK)[None, :]
        mask = inside[:, None]
        if D % CHUNK != 0:
            mask = mask & (d < D)
        total = tl.zeros([M, CHUNK], SPEC.accumulator)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + d, mask=d < D, other=0.0).to(SPEC.accumulator)
        for i in tl.static_range(MAPS):
            upper, lower, down = source(y, ratios_y[i], heights[i])
            left, right, across = source(x, ratios_x[i], widths[i])
            map_ptr = map_ptrs[i] + image * heights[i] * widths[i] * D
            upper *= widths[i]
            lower *= widths[i]
            up = 1.0 - down
            total += (up * (1.0 - across))[:, None] * _load_source(map_ptr, upper + left, d, mask, SPEC)
            total += (up * across)[:, None] * _load_source(map_ptr, upper + right, d, mask, SPEC)
            total += (down * (1.0 - across))[:, None] * _load_source(map_ptr, lower + left, d, mask, SPEC)
            total += (down * across)[:, None] * _load_source(map_ptr, lower + right, d, mask, SPEC)
        for step in tl.static_range((C + STEP - 1) // STEP):
            if step > 0:
                pixels_of_step = _load_pixels(x_ptr, offset, inside, step * STEP, channel_stride, SPEC)
            else:
                pixels_of_step = pixels
            weight = _load_matrix(w_ptr, first, step * STEP, CHUNK, STEP, D, C, SPEC)
            total = tl.dot(
                pixels_of_step, weight.T, total, input_precision=SPEC.precision, out_dtype=SPEC.accumulator
            )
        total = tl.where(total < 0.0, 0.0, total)  # NaN stays, as by PyTorch
        hidden = rounded(total.to(out_ptr.dtype.element_ty).to(SPEC.operand), SPEC)
        new_logits = ()
        for part in tl.static_range(PARTS):
            weight = _load_matrix(classifier_ptr, first_class + part * WIDTH, first, WIDTH, CHUNK, L, D, SPEC)
            product = tl.dot(
                hidden, weight.T, logits[part], input_precision=SPEC.precision, out_dtype=SPEC.accumulator
            )
            new_logits = new_logits + (product,)
        logits = new_logits
    out_ptrs = out_ptr + (image * height * width + y * width + x)[:, None] * L
    for part in tl.static_range(PARTS):
        n = first_class + part * WIDTH + tl.arange(0, WIDTH)[None, :]
        values = logits[part]
        if classifier_bias_ptr is not None:
            values += tl.load(classifier_bias_ptr + n, mask=n < L, other=0.0).to(SPEC.accumulator)
        tl.store(out_ptrs + n, values.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (n < L))


def _spec_of(config: Product, x: Tensor, maps: int, channels: int, classes: int) -> HeadSpec:
    inputs, width = x.shape[1], x.shape[3]
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    part = part_width(classes, config.width, config.parts)
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return HeadSpec(
        inputs=inputs, channels=channels, classes=classes, maps=maps, rows=config.block_m // columns,
        columns=columns, step=min(config.block_k, padded(inputs)),
        chunk=min(config.block_k, padded(channels)), width=part,
        parts=min(config.parts, -(-classes // part)), **product_types(x.dtype, tf32=tf32),
    )  # fmt: skip


def head_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, products: list[Tensor], classifier_weight: Tensor,
    classifier_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns the logits (B, H·W, L) of the first map x and the products (B, Hᵢ, Wᵢ, D) of the others.

    All but ``x`` are contiguous.
    """
    batch, _, height, width = x.shape
    classes, channels = classifier_weight.shape
    config: Product = launch.configuration(
        "segmentation_head", x.dtype, (channels, classes), batch * height * width, launching.chip(x.device)
    )
    spec = _spec_of(config, x, len(products), channels, classes)
    out = x.new_empty(batch, height * width, classes)
    tiles_x = -(-width // spec.columns)
    tiles = -(-height // spec.rows) * tiles_x
    sizes = [each.shape[1:3] for each in products] + [(1, 1)] * (MOST_MAPS - len(products))
    of_maps: dict[str, int | float] = {}
    for i, (map_height, map_width) in enumerate(sizes):
        of_maps |= {f"height{i}": map_height, f"width{i}": map_width}
        of_maps |= {f"ratio_y{i}": map_height / height, f"ratio_x{i}": map_width / width}
    names = "image_stride", "channel_stride", "row_stride", "column_stride"
    strides = dict(zip(names, x.stride(), strict=True))
    launching.launch(
        _segmentation_head_kernel, (batch * tiles, -(-classes // (spec.width * spec.parts))), on=x,
        options=config.options,
        x_ptr=x, w_ptr=weight, bias_ptr=bias, map_ptrs=tuple(products), classifier_ptr=classifier_weight,
        classifier_bias_ptr=classifier_bias, out_ptr=out, height=height, width=width, tiles_x=tiles_x,
        tiles=tiles, SPEC=spec, **of_maps, **strides,
    )  # fmt: skip
    return out


def why_unsupported(call: Record) -> str | None:
    """Returns why this kernel cannot serve a call, or None."""
    x, weight, others, classifier = call.x, call.weight, call.others, call.classifier_weight
    _, _, height, width = x.shape
    if (reason := why_not_for_inference(call)) is not None:
        return reason
    if len(others) > MOST_MAPS:
        return f"interpolates up to {MOST_MAPS} maps"
    channels = weight.shape[0]
    sizes = [image.shape[2] * image.shape[3] * channels for image, _ in others]
    reach = sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    if max(*sizes, reach, height * width, weight.numel(), classifier.numel()) >= 2**31:
        return "a map of one image, or the weights, have 2³¹ elements or more"
    return None


def segmentation_head(call: Record) -> Tensor:
    """Computes ``cvt_kernels.segmentation_head`` for checked arguments."""
    x, weight, bias, others, classifier_weight, classifier_bias = call
    products = [F.linear(image.permute(0, 2, 3, 1), other).contiguous() for image, other in others]
    biases = (None if vector is None else vector.contiguous() for vector in (bias, classifier_bias))
    of_x, of_classifier = biases
    return head_forward(x, weight.contiguous(), of_x, products, classifier_weight.contiguous(), of_classifier)
