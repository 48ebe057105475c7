"""Attention of few tokens and the linear layer behind it in one launch, with a residual.

out = residual + attention(q, k, v) · weightᵀ + bias. A program computes 64 columns of some tokens' results.
It attends head after head, each over all its keys at once, and adds what each head contributes to the layer.
With few tokens all programs run at once, so that this takes as long as computing attention once, and saves a
launch. A head's output is rounded as attention would write it, and never leaves the chip.

It also writes the statistics of the results that ``linear.gluon`` reads. ``out`` may be the residual: each
element is read and written by one program. No atomics; every sum has a fixed order.

Bytes per launch, in units of one B·T·C activation: q, k and v, the residual and the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import launching
from ..attention.triton.common import token_strides
from ..triton_launch import grid_dependency_synchronize, padded, product_types

#: Columns of a tile, and so of a part of the statistics.
COLUMNS = 64
_TILES = (16, 32)
#: The most keys and channels of a head: its scores stay in registers.
_MOST_KEYS, _MOST_HEAD_CHANNELS = 256, 64
_LOG2E = 1.4426950408889634


def tile_rows(queries: tuple[int, ...], keys: int, outputs: int, multiprocessors: int) -> int | None:
    """Returns the rows of a tile with which all programs run at once; None for other calls.

    ``queries`` are the sizes (B, Nq, h, D).
    """
    batch, tokens, _, head_dim = queries
    if keys > _MOST_KEYS or head_dim > _MOST_HEAD_CHANNELS:
        return None
    columns = -(-outputs // COLUMNS)
    for rows in _TILES:
        if batch * -(-tokens // rows) * columns <= multiprocessors:
            return rows
    return None


class Attending(NamedTuple):
    """The compile-time constants of the kernel."""

    # h, D and N
    heads: int
    head_dim: int
    outputs: int
    # D and Nkv padded to powers of two of at least 16
    block_d: int
    block_kv: int
    # Rows and columns of a tile
    block_m: int
    block_n: int
    operand: Any  # See :func:`product_types`


@triton.jit(do_not_specialize=["queries", "keys", "blocks", "rows"])
def _attention_add_kernel(
    q_ptr, k_ptr, v_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr, sums_ptr, strides, log2_scale,
    queries, keys, blocks, rows, SPEC: tl.constexpr,
):  # fmt: skip
    """Writes a tile of residual + attention(q, k, v) · weightᵀ + bias, and the statistics of its rows."""
    grid_dependency_synchronize()
    D: tl.constexpr = SPEC.head_dim
    N: tl.constexpr = SPEC.outputs
    BLOCK_M: tl.constexpr = SPEC.block_m
    BLOCK_N: tl.constexpr = SPEC.block_n
    PARTS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    column = tl.program_id(0) % PARTS
    place = tl.program_id(0) // PARTS
    image = place // blocks
    query = place % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    is_query = query < queries
    key = tl.arange(0, SPEC.block_kv)
    is_key = key < keys
    d = tl.arange(0, SPEC.block_d)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < N
    q_strides, k_strides, v_strides = strides
    q_ptrs = q_ptr + image * q_strides[0] + query[:, None] * q_strides[1] + d[None, :]
    k_ptrs = k_ptr + image * k_strides[0] + key[:, None] * k_strides[1] + d[None, :]
    v_ptrs = v_ptr + image * v_strides[0] + key[:, None] * v_strides[1] + d[None, :]
    w_ptrs = w_ptr + n[:, None] * (SPEC.heads * D) + d[None, :]
    is_channel = (d < D)[None, :]
    element = q_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for head in range(SPEC.heads):
        q = tl.load(q_ptrs + head * q_strides[2], mask=is_query[:, None] & is_channel, other=0.0)
        k = tl.load(k_ptrs + head * k_strides[2], mask=is_key[:, None] & is_channel, other=0.0)
        v = tl.load(v_ptrs + head * v_strides[2], mask=is_key[:, None] & is_channel, other=0.0)
        w = tl.load(w_ptrs + head * D, mask=is_output[:, None] & is_channel, other=0.0)
        scores = tl.dot(q.to(SPEC.operand), tl.trans(k.to(SPEC.operand))) * log2_scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        p = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
        total = tl.sum(p, axis=1)
        y = tl.dot(p.to(element).to(SPEC.operand), v.to(SPEC.operand)) * (1.0 / total)[:, None]
        acc = tl.dot(y.to(element).to(SPEC.operand), tl.trans(w.to(SPEC.operand)), acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    row = image * queries + query
    place_of = row[:, None] * N + n[None, :]
    inside = is_query[:, None] & is_output[None, :]
    acc += tl.load(residual_ptr + place_of, mask=inside, other=0.0).to(tl.float32)
    out = acc.to(element)
    tl.store(out_ptr + place_of, out, mask=inside)
    values = tl.where(inside, out.to(tl.float32), 0.0)  # as LayerNorm reads them
    sums = tl.sum(values, axis=1)
    count = tl.minimum(N - column * BLOCK_N, BLOCK_N).to(tl.float32)
    deviations = tl.where(inside, values - (sums / count)[:, None], 0.0)
    sums_ptr += column * rows + row
    tl.store(sums_ptr, sums, mask=is_query)
    tl.store(sums_ptr + PARTS * rows, tl.sum(deviations * deviations, axis=1), mask=is_query)


def attention_add(
    q: Tensor, k: Tensor, v: Tensor, scale: float, weight: Tensor, bias: Tensor | None, residual: Tensor,
    out: Tensor, block_m: int,
) -> Tensor:  # fmt: skip
    """Writes residual + attention(q, k, v) · weightᵀ + bias to ``out``; returns the statistics of its rows.

    These are (2, parts, rows) in float32, as ``linear.gluon.Statistics`` has them, of parts of ``COLUMNS``.
    q, k and v (B, N, h, D) have 16 bits and contiguous channels; the weight (N, h · D) and the residual
    (B · Nq, N) are contiguous. ``out`` is like the residual, perhaps the same. For ``block_m`` see
    :func:`tile_rows`.
    """
    (batch, queries, heads, head_dim), keys, outputs = q.shape, k.shape[1], out.shape[1]
    spec = Attending(
        heads=heads, head_dim=head_dim, outputs=outputs,
        block_d=padded(head_dim), block_kv=padded(keys),
        block_m=block_m, block_n=COLUMNS, operand=product_types(q.dtype)["operand"],
    )  # fmt: skip
    columns, blocks, rows = -(-outputs // COLUMNS), -(-queries // block_m), batch * queries
    sums = q.new_empty(2, columns, rows, dtype=torch.float32)
    launching.launch(
        _attention_add_kernel, (batch * blocks * columns,), on=q,
        options={"num_warps": 4, "num_stages": 2},
        q_ptr=q, k_ptr=k, v_ptr=v, w_ptr=weight, bias_ptr=bias, residual_ptr=residual, out_ptr=out,
        sums_ptr=sums, strides=(token_strides(q), token_strides(k), token_strides(v)),
        log2_scale=scale * _LOG2E, queries=queries, keys=keys, blocks=blocks, rows=rows, SPEC=spec,
    )  # fmt: skip
    return sums
