"""The kernel of the product, fused with scales, bias, GELU and residual."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launching
from ...graph_operators import launcher
from ...linear.triton.common import (
    LinearTiling,
    add_products,
    halves,
    load_columns,
    load_part,
    origin_of,
    store_part,
    zero_sums,
)
from ...triton_gelu import activate
from ...triton_launch import grid_dependency_synchronize
from .common import configuration_for


@triton.jit
def _store_finished(
    sums, row_scales, weight_scale_ptr, bias_ptr, residual_ptr, out, first_row, first_column, rows,
    APPROXIMATE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Stores sums · row_scales · weight_scale + bias, perhaps its GELU, perhaps plus a residual."""
    column = first_column + tl.arange(0, SPEC.store_width)
    values = sums.to(tl.float32) * row_scales * load_columns(weight_scale_ptr, column, SPEC)
    if bias_ptr is not None:
        values += load_columns(bias_ptr, column, SPEC)
    if APPROXIMATE is not None:
        values = activate(values, APPROXIMATE, SPEC.is_half, SPEC.hardware_tanh)
    if residual_ptr is not None:
        values += load_part(residual_ptr, first_row, first_column, rows, SPEC)
    store_part(out, first_row, first_column, rows, values, SPEC)


@triton.jit
def _tile(
    x, weight, x_scales_ptr, weight_scale_ptr, bias_ptr, residual_ptr, out, tile, rows,
    APPROXIMATE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = SPEC.width
    PARTS: tl.constexpr = SPEC.parts
    first_row, first_column = origin_of(tile, SPEC)
    sums = add_products(zero_sums(SPEC), x, weight, first_row, first_column, rows, SPEC)
    row = tl.arange(0, SPEC.block_m)[:, None]
    x_scales_ptr += first_row * tl.full([], 1, tl.int64)
    row_scales = tl.load(x_scales_ptr + row, mask=row < rows - first_row, other=0.0)
    for part in tl.static_range(PARTS):
        if SPEC.store_width < WIDTH:
            left, right = halves(sums[part])
            _store_finished(
                left, row_scales, weight_scale_ptr, bias_ptr, residual_ptr, out, first_row, first_column,
                rows, APPROXIMATE, SPEC,
            )  # fmt: skip
            _store_finished(
                right, row_scales, weight_scale_ptr, bias_ptr, residual_ptr, out, first_row,
                first_column + SPEC.store_width, rows, APPROXIMATE, SPEC,
            )  # fmt: skip
        else:
            _store_finished(
                sums[part], row_scales, weight_scale_ptr, bias_ptr, residual_ptr, out, first_row,
                first_column + part * WIDTH, rows, APPROXIMATE, SPEC,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "tiles", "programs"])
def _linear_int8_kernel(
    x, weight, x_scales_ptr, weight_scale_ptr, bias_ptr, residual_ptr, out, rows, tiles, programs,
    APPROXIMATE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes tiles of (x · weightᵀ) · x_scales · weight_scale + bias, with what follows it."""
    grid_dependency_synchronize()
    if SPEC.is_persistent:
        for tile in tl.range(
            tl.program_id(0), tiles, programs, flatten=not SPEC.specialized, warp_specialize=SPEC.specialized
        ):
            _tile(
                x, weight, x_scales_ptr, weight_scale_ptr, bias_ptr, residual_ptr, out, tile, rows,
                APPROXIMATE, SPEC,
            )  # fmt: skip
    else:
        _tile(
            x, weight, x_scales_ptr, weight_scale_ptr, bias_ptr, residual_ptr, out, tl.program_id(0), rows,
            APPROXIMATE, SPEC,
        )  # fmt: skip


def _allocated(x: Tensor, x_scales: Any, weight: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=others[-1])


@launcher("triton_linear_int8", _allocated)
def linear_int8_forward(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
    approximate: str | None, residual: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns the layer's result for contiguous values x (M, K) with their scales (M, 1)."""
    out = _allocated(x, x_scales, weight, dtype)
    tiling = LinearTiling.by(configuration_for(x, out, residual), x, weight, (out,))
    launching.launch(
        _linear_int8_kernel, (tiling.programs,), on=x, options=tiling.options,
        x=tiling.rows(x), weight=tiling.weight(weight), x_scales_ptr=x_scales, weight_scale_ptr=weight_scale,
        bias_ptr=bias, residual_ptr=residual, out=tiling.result(out),
        rows=x.shape[0], tiles=tiling.tiles, programs=tiling.programs, APPROXIMATE=approximate,
        SPEC=tiling.spec,
    )  # fmt: skip
    return out
