"""The fused kernels: a tile of the product, then GELU, residual or LayerNorm, then the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launch
from ....launch import launching
from ...graph_operators import launcher
from ...triton_gelu import activate
from ...triton_launch import grid_dependency_synchronize
from .common import (
    LinearTiling,
    add_products,
    halves,
    load_columns,
    origin_of,
    store_part,
    sums_with_residual,
    zero_sums,
)

# Linear and GELU ------------------------------------------------------------------------------------------


@triton.jit
def _store_gelu(
    sums, bias_ptr, out, pre, first_row, first_column, rows, APPROXIMATE: tl.constexpr, SPEC: tl.constexpr
):  # fmt: skip
    """Adds the bias to a part's sums, and stores its GELU and, if there is ``pre``, the sums themselves."""
    WIDTH: tl.constexpr = SPEC.store_width
    sums += load_columns(bias_ptr, first_column + tl.arange(0, WIDTH), SPEC)
    if pre is not None:
        store_part(pre, first_row, first_column, rows, sums, SPEC)
    activated = activate(sums, APPROXIMATE, SPEC.is_half, SPEC.hardware_tanh)
    store_part(out, first_row, first_column, rows, activated, SPEC)


@triton.jit
def _gelu_tile(x, weight, bias_ptr, out, pre, tile, rows, APPROXIMATE: tl.constexpr, SPEC: tl.constexpr):
    first_row, first_column = origin_of(tile, SPEC)
    sums = add_products(zero_sums(SPEC), x, weight, first_row, first_column, rows, SPEC)
    if SPEC.store_width < SPEC.width:
        left, right = halves(sums[0])
        _store_gelu(left, bias_ptr, out, pre, first_row, first_column, rows, APPROXIMATE, SPEC)
        first_column += SPEC.store_width
        _store_gelu(right, bias_ptr, out, pre, first_row, first_column, rows, APPROXIMATE, SPEC)
    else:
        _store_gelu(sums[0], bias_ptr, out, pre, first_row, first_column, rows, APPROXIMATE, SPEC)


@triton.jit(do_not_specialize=["rows", "tiles", "programs"])
def _linear_gelu_kernel(
    x, weight, bias_ptr, out, pre, rows, tiles, programs, APPROXIMATE: tl.constexpr, SPEC: tl.constexpr
):  # fmt: skip
    """Computes tiles of gelu(x · weightᵀ + bias) and, if there is ``pre``, of GELU's input."""
    grid_dependency_synchronize()
    if SPEC.is_persistent:
        for tile in tl.range(
            tl.program_id(0), tiles, programs, flatten=not SPEC.specialized, warp_specialize=SPEC.specialized
        ):
            _gelu_tile(x, weight, bias_ptr, out, pre, tile, rows, APPROXIMATE, SPEC)
    else:
        _gelu_tile(x, weight, bias_ptr, out, pre, tl.program_id(0), rows, APPROXIMATE, SPEC)


def _gelu_like(
    x: Tensor, weight: Tensor, bias: Any, approximate: str, need_pre: bool
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0])
    return out, torch.empty_like(out) if need_pre else x.new_empty(0)


@launcher("linear_gelu", _gelu_like)
def linear_gelu_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, need_pre: bool
) -> tuple[Tensor, Tensor]:
    """Returns gelu(x · weightᵀ + bias) for contiguous x (M, K), and GELU's input, empty if not needed."""
    out, pre = _gelu_like(x, weight, bias, approximate, need_pre)
    tiling = LinearTiling.of("linear_gelu", x, weight, (out, pre) if need_pre else (out,))
    tiling.launch(
        _linear_gelu_kernel, x, weight, bias_ptr=bias, out=tiling.result(out),
        pre=tiling.result(pre) if need_pre else None, tiles=tiling.tiles, programs=tiling.programs,
        APPROXIMATE=approximate,
    )  # fmt: skip
    return out, pre


# Linear and residual --------------------------------------------------------------------------------------


@triton.jit
def _add_tile(x, weight, bias_ptr, residual_ptr, out, tile, rows, SPEC: tl.constexpr):
    WIDTH: tl.constexpr = SPEC.width
    PARTS: tl.constexpr = SPEC.parts
    first_row, first_column = origin_of(tile, SPEC)
    sums = sums_with_residual(x, weight, bias_ptr, residual_ptr, first_row, first_column, rows, SPEC)
    for part in tl.static_range(PARTS):
        store_part(out, first_row, first_column + part * WIDTH, rows, sums[part], SPEC)


@triton.jit(do_not_specialize=["rows", "tiles", "programs"])
def _linear_add_kernel(
    x, weight, bias_ptr, residual_ptr, out, rows, tiles, programs, SPEC: tl.constexpr
):  # fmt: skip
    """Computes tiles of residual + x · weightᵀ + bias; ``out`` may be the residual."""
    grid_dependency_synchronize()
    if SPEC.is_persistent:
        for tile in tl.range(
            tl.program_id(0), tiles, programs, flatten=not SPEC.specialized, warp_specialize=SPEC.specialized
        ):
            _add_tile(x, weight, bias_ptr, residual_ptr, out, tile, rows, SPEC)
    else:
        _add_tile(x, weight, bias_ptr, residual_ptr, out, tl.program_id(0), rows, SPEC)


@launcher("linear_add", mutates=("out",))
def linear_add_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> None:
    """Writes residual + x · weightᵀ + bias to ``out``, which holds the residual if there is no other.

    All are contiguous.
    """
    residual = out if residual is None else residual
    out = out.view(x.shape[0], -1)
    tiling = LinearTiling.of("linear_add", x, weight, (out,))
    tiling.launch(
        _linear_add_kernel, x, weight, bias_ptr=bias, residual_ptr=residual, out=tiling.result(out),
        tiles=tiling.tiles, programs=tiling.programs,
    )  # fmt: skip


# Several linear layers -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "second", "third"])
def _grouped_linear_kernel(x, weight, bias_ptr, out, rows, second, third, SPEC: tl.constexpr):
    """Computes a tile of x · weightᵀ + bias, by the weight and the bias of the group of its rows."""
    grid_dependency_synchronize()
    WIDTH: tl.constexpr = SPEC.width
    PARTS: tl.constexpr = SPEC.parts
    first_row, first_column = origin_of(tl.program_id(0), SPEC)
    group = (first_row >= second).to(tl.int32) + (first_row >= third).to(tl.int32)
    first_output = first_column
    if SPEC.has_descriptors:
        first_output += group * SPEC.outputs
    else:
        weight += group * tl.full([], SPEC.outputs * SPEC.inputs, tl.int64)
    sums = add_products(zero_sums(SPEC), x, weight, first_row, first_output, rows, SPEC)
    for part in tl.static_range(PARTS):
        column = first_column + part * WIDTH
        values = sums[part]
        if bias_ptr is not None:
            values += load_columns(bias_ptr + group * SPEC.outputs, column + tl.arange(0, WIDTH), SPEC)
        store_part(out, first_row, column, rows, values, SPEC)


def grouped_linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, groups: tuple[int, ...]
) -> None:
    """Writes the product of groups of the rows of x (M, K), each by its own weight, to ``out`` (M, N).

    The weights (groups · N, K) and the biases lie below one another. ``groups`` are the rows where the second
    and the third group begin, if any, multiples of 128. All tensors are contiguous.
    """
    rows, outputs, chip = x.shape[0], out.shape[1], launching.chip(x.device)
    config = launch.configuration("linear_add", x.dtype, (x.shape[1], outputs), rows, chip)
    config = replace(config, block_m=min(config.block_m, 128), programs=0)
    tiling = LinearTiling.by(config, x, weight[:outputs], (out,))
    second, third = (*groups, rows, rows)[:2]
    tiling.launch(
        _grouped_linear_kernel, x, weight, bias_ptr=bias, out=tiling.result(out), second=second, third=third
    )  # fmt: skip


# Linear, residual and LayerNorm ---------------------------------------------------------------------------


@triton.jit
def _add_layer_norm_tile(
    x, weight, bias_ptr, residual_ptr, shift_ptr, norm_weight_ptr, norm_bias_ptr, h, y,
    tile, rows, eps, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes whole rows. The statistics are computed from the unrounded sums, in two passes."""
    BLOCK_M: tl.constexpr = SPEC.block_m
    WIDTH: tl.constexpr = SPEC.width
    PARTS: tl.constexpr = SPEC.parts
    first_row, first_column = origin_of(tile, SPEC)
    sums = sums_with_residual(x, weight, bias_ptr, residual_ptr, first_row, first_column, rows, SPEC)
    values = ()
    total = tl.zeros([BLOCK_M], SPEC.accumulator)
    for part in tl.static_range(PARTS):
        column = part * WIDTH + tl.arange(0, WIDTH)
        value = sums[part]
        store_part(h, first_row, part * WIDTH, rows, value, SPEC)
        if shift_ptr is not None:
            value += load_columns(shift_ptr, column, SPEC)
        total += tl.sum(value, axis=1)  # zeros beyond the last column
        values = values + (value,)
    mean = (total * (1.0 / SPEC.outputs))[:, None]
    squares = tl.zeros([BLOCK_M], SPEC.accumulator)
    for part in tl.static_range(PARTS):
        difference = values[part] - mean
        if SPEC.outputs % WIDTH != 0:
            column = part * WIDTH + tl.arange(0, WIDTH)[None, :]
            difference = tl.where(column < SPEC.outputs, difference, 0.0)
        squares += tl.sum(difference * difference, axis=1)
    rstd = tl.math.rsqrt(squares * (1.0 / SPEC.outputs) + eps)[:, None]
    for part in tl.static_range(PARTS):
        column = part * WIDTH + tl.arange(0, WIDTH)
        value = (values[part] - mean) * rstd
        if norm_weight_ptr is not None:
            value *= load_columns(norm_weight_ptr, column, SPEC)
        if norm_bias_ptr is not None:
            value += load_columns(norm_bias_ptr, column, SPEC)
        store_part(y, first_row, part * WIDTH, rows, value, SPEC)


@triton.jit(do_not_specialize=["rows", "tiles", "programs"])
def _linear_add_layer_norm_kernel(
    x, weight, bias_ptr, residual_ptr, shift_ptr, norm_weight_ptr, norm_bias_ptr, h, y,
    rows, tiles, programs, eps, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes rows of h = residual + x · weightᵀ + bias, perhaps in place, and of its LayerNorm y."""
    grid_dependency_synchronize()
    if SPEC.is_persistent:
        for tile in tl.range(
            tl.program_id(0), tiles, programs, flatten=not SPEC.specialized, warp_specialize=SPEC.specialized
        ):
            _add_layer_norm_tile(
                x, weight, bias_ptr, residual_ptr, shift_ptr, norm_weight_ptr, norm_bias_ptr, h, y,
                tile, rows, eps, SPEC,
            )  # fmt: skip
    else:
        _add_layer_norm_tile(
            x, weight, bias_ptr, residual_ptr, shift_ptr, norm_weight_ptr, norm_bias_ptr, h, y,
            tl.program_id(0), rows, eps, SPEC,
        )  # fmt: skip


@launcher("linear_add_layer_norm", mutates=("h", "y"))
def linear_add_layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, shift: Tensor | None, eps: float, h: Tensor, y: Tensor,
) -> None:  # fmt: skip
    """Writes h as :func:`linear_add_forward` writes its ``out``, and the LayerNorm y of h + shift."""
    residual = h if residual is None else residual
    h, y = h.view(x.shape[0], -1), y.view(x.shape[0], -1)
    tiling = LinearTiling.of("linear_add_layer_norm", x, weight, (h, y))
    tiling.launch(
        _linear_add_layer_norm_kernel, x, weight, bias_ptr=bias, residual_ptr=residual, shift_ptr=shift,
        norm_weight_ptr=norm_weight, norm_bias_ptr=norm_bias, h=tiling.result(h), y=tiling.result(y),
        tiles=tiling.tiles, programs=tiling.programs, eps=eps,
    )  # fmt: skip
