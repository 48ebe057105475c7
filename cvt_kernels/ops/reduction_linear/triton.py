"""The kernel that computes a reduction of tokens, its LayerNorm and linear layers of the result at once.

SegFormer and PVT reduce the tokens of keys and values: a convolution of windows side by side, LayerNorm, and
the layers of K and of V. A program has whole reduced tokens in registers, as in
``conv_embedding/triton/patches``. It rounds them, and multiplies them by all weights of the layers. The
reduced tokens, the inputs of these products, are never in memory, and a launch reads x once and writes keys
and values once. Nothing is saved; no gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import launch, modes
from ...backends import Record
from ...launch import formulas, launching
from ...launch.records import Product
from ..conv_embedding.triton.common import channels_of
from ..conv_embedding.triton.patches import configured, has_channels_last, normalized_windows, why_no_tiles
from ..graph_operators import launcher
from ..triton_launch import grid_dependency_synchronize, padded, product_types

launch.register(Product, formulas.windows_in_registers, "reduction_linear")

#: The most columns of a product.
_MOST_COLUMNS = 64


class Layers(NamedTuple):
    """The compile-time constants of the linear layers: ``LAYERS`` in the kernel."""

    out_features: tuple[int, ...]  # Of each layer
    width: int  # Columns of a product
    element: Any  # Triton's dtype of tokens


@triton.jit
def _multiply(
    ys, w_ptr, bias_ptr, out_ptr, row, rows, OUTPUTS: tl.constexpr, LAYERS: tl.constexpr,
    GATHER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes a layer of the parts ``ys`` of tokens."""
    C: tl.constexpr = PARTS.channels
    COUNT: tl.constexpr = PARTS.count
    M: tl.constexpr = GATHER.block_m
    WIDTH: tl.constexpr = LAYERS.width
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * OUTPUTS
    for first in range(0, OUTPUTS, WIDTH):
        o = first + tl.arange(0, WIDTH)
        acc = tl.zeros([M, WIDTH], PARTS.accumulator)
        for part in tl.static_range(COUNT):
            c = channels_of(part, PARTS)
            mask = (o < OUTPUTS)[:, None] & (c < C)[None, :]
            weight = tl.load(w_ptr + o[:, None] * C + c[None, :], mask=mask, other=0.0)
            acc = tl.dot(ys[part], weight.to(GATHER.operand).T, acc, out_dtype=PARTS.accumulator)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + o, mask=o < OUTPUTS, other=0.0).to(PARTS.accumulator)[None, :]
        mask = (row < rows)[:, None] & (o < OUTPUTS)[None, :]
        tl.store(out_ptrs + o[None, :], acc.to(LAYERS.element), mask=mask)


@triton.jit(do_not_specialize=["rows", "tokens", "out_width"])
def _reduction_linear_kernel(
    image_ptr, w_ptr, bias_ptr, gamma_ptr, beta_ptr, linear_ptrs, linear_bias_ptrs, out_ptrs, eps,
    rows, tokens, out_width, image_stride, row_stride,
    GATHER: tl.constexpr, PARTS: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """Writes block_m tokens of each layer's result."""
    grid_dependency_synchronize()
    COUNT: tl.constexpr = PARTS.count
    M: tl.constexpr = GATHER.block_m
    row = tl.program_id(0) * M + tl.arange(0, M)
    ys = normalized_windows(
        image_ptr, w_ptr, bias_ptr, gamma_ptr, beta_ptr, eps, row, rows, tokens, out_width,
        image_stride, row_stride, GATHER, PARTS,
    )  # fmt: skip
    factors = ()
    for part in tl.static_range(COUNT):  # rounded as LayerNorm's result is
        factors = factors + (ys[part].to(LAYERS.element).to(GATHER.operand),)
    for i in tl.static_range(len(LAYERS.out_features)):
        _multiply(
            factors, linear_ptrs[i], linear_bias_ptrs[i], out_ptrs[i], row, rows, LAYERS.out_features[i],
            LAYERS, GATHER, PARTS,
        )  # fmt: skip


def _empty(
    x: Tensor, grid: list[int], weight: Tensor, bias: Any, norm_weight: Any, norm_bias: Any,
    linears: list[Tensor], biases: Any, eps: float,
) -> list[Tensor]:  # fmt: skip
    ratio = weight.shape[3]
    tokens = grid[0] // ratio * (grid[1] // ratio)
    return [x.new_empty(x.shape[0], tokens, each.shape[0]) for each in linears]


@launcher("reduction_linear", _empty)
def _reduce(
    x: Tensor, grid: list[int], weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, linears: list[Tensor], biases: list[Tensor | None], eps: float,
) -> list[Tensor]:  # fmt: skip
    """Returns each layer's result, (B, H'·W', outputs)."""
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = x.contiguous()
    if not has_channels_last(weight):
        weight = weight.contiguous()
    _, inputs, ratio, _ = weight.shape
    out_width = grid[1] // ratio
    tokens = grid[0] // ratio * out_width
    rows = x.shape[0] * tokens
    config, constants = configured("reduction_linear", x, weight, rows)
    outputs = tuple([each.shape[0] for each in linears])
    width = min(_MOST_COLUMNS, padded(max(outputs)))
    outs = [x.new_empty(x.shape[0], tokens, each) for each in outputs]
    launching.launch(
        _reduction_linear_kernel, (-(-rows // config.block_m),), on=x, options=config.options,
        image_ptr=x, w_ptr=weight, bias_ptr=bias, gamma_ptr=norm_weight, beta_ptr=norm_bias,
        linear_ptrs=tuple([each.contiguous() for each in linears]), linear_bias_ptrs=tuple(biases),
        out_ptrs=tuple(outs), eps=eps, rows=rows, tokens=tokens, out_width=out_width,
        image_stride=x.stride(0), row_stride=grid[1] * inputs, **constants,
        LAYERS=Layers(outputs, width, product_types(x.dtype)["element"]),
    )  # fmt: skip
    return outs


def why_unsupported(call: Record) -> str | None:
    """Returns why this kernel cannot serve a call, or None."""
    x, grid, weight, bias, norm_weight, norm_bias, linears, _ = call
    if modes.wants_gradient(x, weight, bias, norm_weight, norm_bias, *(t for each in linears for t in each)):
        return "gradients are not computed"
    if modes.autocast_enabled(x):
        return "under autocast LayerNorm has another dtype than the layers"
    if x.shape[0] == 0 or any(each.shape[0] == 0 for each, _ in linears):
        return "the batch or an output is empty"
    if x.is_cuda and x.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if max(each.numel() for each, _ in linears) >= 2**31:
        return "there are too many weights for 32-bit offsets"
    ratio = weight.shape[3]
    return why_no_tiles(x, weight, x.shape[0] * (grid[0] // ratio) * (grid[1] // ratio))


def reduction_linear(call: Record) -> tuple[Tensor, ...]:
    """Computes ``cvt_kernels.reduction_linear`` for checked arguments."""
    x, grid, weight, bias, norm_weight, norm_bias, linears, eps = call
    vectors = [bias, norm_weight, norm_bias, *(bias for _, bias in linears)]
    bias, norm_weight, norm_bias, *biases = (None if v is None else v.contiguous() for v in vectors)
    layers = [weight for weight, _ in linears]
    return tuple(_reduce(x, list(grid), weight, bias, norm_weight, norm_bias, layers, biases, eps))
