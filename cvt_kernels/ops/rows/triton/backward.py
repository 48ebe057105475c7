"""The kernel of the gradients of the LayerNorm behind gathered rows."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .... import launching
from ...conv_embedding.triton.common import channels_of
from ...graph_operators import launcher
from ...triton_launch import accumulator_dtype, grid_dependency_synchronize
from .common import RowSpec
from .forward import added, load_rows, rows_of_tile, store_rows, vector_of


@triton.jit
def _mean(xs, SPEC: tl.constexpr):
    """Returns the mean of each row of some parts."""
    COUNT: tl.constexpr = SPEC.parts.count
    total = xs[0]
    for part in tl.static_range(1, COUNT):
        total += xs[part]
    return tl.sum(total, axis=-1, keep_dims=True) * (1.0 / SPEC.parts.channels)


@triton.jit
def _product(xs, ys, SPEC: tl.constexpr):
    """Returns the products of parts of rows, with a vector or with each other."""
    COUNT: tl.constexpr = SPEC.parts.count
    products = ()
    for part in tl.static_range(COUNT):
        products = products + (xs[part] * ys[part],)
    return products


@triton.jit
def _normalized(hs, eps, SPEC: tl.constexpr):
    """Returns the parts of rows of mean 0 and variance 1, zeros beyond C, and 1 / √(variance + ε)."""
    PARTS: tl.constexpr = SPEC.parts
    COUNT: tl.constexpr = PARTS.count
    mean = _mean(hs, SPEC)
    deviations = ()
    for part in tl.static_range(COUNT):
        deviation = hs[part] - mean
        if (part + 1) * PARTS.width > PARTS.channels:
            inside = channels_of(part, PARTS)[None, None, :] < PARTS.channels
            deviation = tl.where(inside, deviation, 0.0)
        deviations = deviations + (deviation,)
    scale = 1.0 / tl.sqrt(_mean(_product(deviations, deviations, SPEC), SPEC) + eps)
    ns = ()
    for part in tl.static_range(COUNT):
        ns = ns + (deviations[part] * scale,)
    return ns, scale


@triton.jit(do_not_specialize=["rows", "tiles"])
def _gather_add_layer_norm_backward_kernel(
    dy_ptr, dh_ptr, h_ptr, gamma_ptr, out_ptr, sums_ptr, eps, rows, tiles, SPEC: tl.constexpr
):  # fmt: skip
    """Writes the gradient of h (M, C) for some tiles, and the sums of dy · x̂ and of dy over them."""
    grid_dependency_synchronize()
    PARTS: tl.constexpr = SPEC.parts
    COUNT: tl.constexpr = PARTS.count
    C: tl.constexpr = PARTS.channels
    ROWS: tl.constexpr = SPEC.rows
    WIDTH: tl.constexpr = PARTS.width
    gamma = vector_of(gamma_ptr, SPEC)
    dgamma, dbeta = (), ()
    for _ in tl.static_range(COUNT):
        dgamma = dgamma + (tl.zeros([1, ROWS, WIDTH], PARTS.accumulator),)
        dbeta = dbeta + (tl.zeros([1, ROWS, WIDTH], PARTS.accumulator),)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = rows_of_tile(tile, SPEC)
        offset, mask = row.to(tl.int64) * C, row < rows
        ns, scale = _normalized(load_rows(h_ptr, offset, mask, SPEC), eps, SPEC)
        gs = load_rows(dy_ptr, offset, mask, SPEC)
        if sums_ptr is not None:
            weighted, sums, more = _product(gs, ns, SPEC), (), ()
            for part in tl.static_range(COUNT):
                sums = sums + (dgamma[part] + tl.sum(weighted[part], axis=0, keep_dims=True),)
                more = more + (dbeta[part] + tl.sum(gs[part], axis=0, keep_dims=True),)
            dgamma, dbeta = sums, more
        if gamma_ptr is not None:
            gs = _product(gs, gamma, SPEC)
        mean, mean_n = _mean(gs, SPEC), _mean(_product(gs, ns, SPEC), SPEC)
        dhs = ()
        for part in tl.static_range(COUNT):
            dhs = dhs + ((gs[part] - mean - ns[part] * mean_n) * scale,)
        if dh_ptr is not None:
            dhs = added(dhs, load_rows(dh_ptr, offset, mask, SPEC), SPEC)
        store_rows(out_ptr, offset, mask, dhs, SPEC)
    if sums_ptr is not None:
        sums_ptr += tl.program_id(0) * (2 * C)
        for part in tl.static_range(COUNT):
            c = channels_of(part, PARTS)
            tl.store(sums_ptr + c, tl.sum(tl.sum(dgamma[part], axis=0), axis=0), mask=c < C)
            tl.store(sums_ptr + C + c, tl.sum(tl.sum(dbeta[part], axis=0), axis=0), mask=c < C)


def _gradients(
    dy: Tensor, dh: Any, h: Tensor, weight: Tensor | None, has_sums: bool, eps: float
) -> list[Tensor]:
    sums = [h.new_empty(2, h.shape[2], dtype=accumulator_dtype(h))] if has_sums else []
    return [h.new_empty(h.shape), *sums]


@launcher("triton_rows_layer_norm_backward", _gradients)
def layer_norm_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, has_sums: bool, eps: float
) -> list[Tensor]:
    """Returns the gradient of h (B, K, C), to which dh is added, and of weight and bias with ``has_sums``.

    Those are one tensor (2, C) in the dtype of sums. All tensors are contiguous.
    """
    channels = h.shape[-1]
    rows = h.numel() // channels
    out = h.new_empty(h.shape)
    spec, config = RowSpec.of("backward", h)
    tiles = spec.tiles(rows)
    programs = min(tiles, config.resident_programs * launching.chip(h.device).multiprocessors)
    sums = h.new_empty(programs, 2, channels, dtype=accumulator_dtype(h)) if has_sums else None
    launching.launch(
        _gather_add_layer_norm_backward_kernel, (programs,), on=h, options=config.options,
        dy_ptr=dy, dh_ptr=dh, h_ptr=h, gamma_ptr=weight, out_ptr=out, sums_ptr=sums, eps=eps, rows=rows,
        tiles=tiles, SPEC=spec,
    )  # fmt: skip
    return [out] if sums is None else [out, sums.sum(0)]
