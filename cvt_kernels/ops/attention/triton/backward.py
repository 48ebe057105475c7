"""The backward kernels of attention, which recompute the probabilities from q, k and ``stats``.

With δ = Σ_j p_j dp_j:

    dv = pᵀ dout    dp = dout vᵀ    ds = p ∘ (dp − δ)    dq = scale · ds k    dk = scale · dsᵀ q

- all keys in one tile: one launch. A program owns one head of one image and goes over its queries; δ comes
  from p and dp, and ``out`` is not read.
- otherwise: dq, looping over keys (and δ = Σ_d out · dout), then dk and dv, looping over queries. A row of dq
  has one exponent for its sum, m + log2 Σ p; what that rounds off is a factor of the row at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....launch import launching
from ...graph_operators import launcher
from ...triton_launch import grid_dependency_synchronize, padded
from .common import (
    configuration_for,
    contiguous_rows,
    dot,
    head_at,
    launch_arguments,
    load_rows,
    locate,
    maybe_contiguous,
    scores_of,
    store_rows,
    strided_rows,
    tail_width,
    token_strides,
)
from .forward import divided

# Probabilities, again -------------------------------------------------------------------------------------


class SoftmaxStats(NamedTuple):
    """The maximum of some rows of scores, and the reciprocal of the sum of the powers."""

    maximum: tl.tensor
    reciprocal: tl.tensor


@triton.jit
def _load_stats(stats_ptr, row, queries):
    """Returns the SoftmaxStats of rows; rows beyond the last query get probabilities of 0."""
    return SoftmaxStats(
        maximum=tl.load(stats_ptr + tl.minimum(row, queries - 1)),
        reciprocal=tl.load(stats_ptr + queries + row, mask=row < queries, other=0.0),
    )


@triton.jit
def _load_queries(rows, row, SPEC: tl.constexpr):
    """Returns the queries ``row``, and the last one again beyond it: zeros would give 0 · ∞ = NaN."""
    return load_rows(rows, tl.minimum(row, rows.count - 1), False, SPEC)


# dq -------------------------------------------------------------------------------------------------------


@triton.jit
def _shift_and_rest(stats):
    """Returns m + log2 Σ of rows, where p = 2^(s − shift), and the factor that corrects its rounding."""
    log2_sum = -tl.log2(tl.where(stats.reciprocal > 0, stats.reciprocal, 1.0))  # 0 beyond the last query
    shift = stats.maximum + log2_sum
    return shift, tl.exp2(shift - stats.maximum - log2_sum)


@triton.jit
def _dq_step(
    dq, q, dout, shift, delta, first, head,
    BLOCK_KV: tl.constexpr, MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Takes one more tile of keys into dq."""
    key = first + tl.arange(0, BLOCK_KV)
    k = load_rows(head.k, key, MASKED, SPEC)
    v = load_rows(head.v, key, MASKED, SPEC)
    scores = scores_of(q, tl.trans(k), key[None, :], head, MASKED, SPEC)
    p = tl.exp2(scores * head.log2_scale - shift[:, None])
    ds = p * (dot(dout, tl.trans(v), SPEC) - delta[:, None])
    return dq + dot(ds, k, SPEC)


@triton.jit(do_not_specialize=["blocks"])
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, stats_ptr, delta_ptr, dq_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys, blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes dq and δ of one tile of queries, in a loop over the keys as in the forward."""
    grid_dependency_synchronize()
    BLOCK_D: tl.constexpr = SPEC.block_d
    place = locate(blocks, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, strides, log2_scale, queries, keys, SPEC)
    row = place.block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dout = load_rows(strided_rows(dout_ptr, dout_strides, place, queries), row, True, SPEC)
    out = load_rows(contiguous_rows(out_ptr, place, queries, heads, SPEC), row, True, SPEC)
    delta = tl.sum(out.to(SPEC.accumulator) * dout.to(SPEC.accumulator), axis=1)
    tl.store(delta_ptr + place.plane * queries + row, delta, mask=row < queries)
    q = load_rows(head.q, row, True, SPEC)
    shift, rest = _shift_and_rest(_load_stats(stats_ptr + place.plane * 2 * queries, row, queries))
    dq = tl.zeros([BLOCK_Q, BLOCK_D], SPEC.accumulator)
    MASKED: tl.constexpr = TAIL == BLOCK_KV
    whole = keys // BLOCK_KV * BLOCK_KV
    if TAIL and not MASKED:
        dq = _dq_step(dq, q, dout, shift, delta, whole, head, TAIL, True, SPEC)
    for first in range(0, keys if MASKED else whole, BLOCK_KV):
        dq = _dq_step(dq, q, dout, shift, delta, first, head, BLOCK_KV, MASKED, SPEC)
    dq_rows = contiguous_rows(dq_ptr, place, queries, heads, SPEC)
    store_rows(dq_rows, row, dq * (rest * scale)[:, None], SPEC)


# dk and dv ------------------------------------------------------------------------------------------------


@triton.jit
def _dv_step(dv, k, key, row, head, dout_rows, stats_ptr, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Takes one more tile of queries into dv; returns their q, dout and pᵀ, [keys, queries], besides."""
    q = _load_queries(head.q, row, SPEC)
    stats = _load_stats(stats_ptr, row, head.q.count)
    scores = scores_of(k, tl.trans(q), key[:, None], head, MASKED, SPEC)
    p = tl.exp2(scores * head.log2_scale - stats.maximum[None, :]) * stats.reciprocal[None, :]
    dout = load_rows(dout_rows, row, True, SPEC)
    return dv + dot(p, dout, SPEC), q, dout, p


@triton.jit
def _store_dk_and_dv(dk_ptr, dv_ptr, place, key, keys, heads, dk, dv, scale, SPEC: tl.constexpr):
    dk_rows = contiguous_rows(dk_ptr, place, keys, heads, SPEC)
    store_rows(dk_rows, key, dk * scale, SPEC)
    dv_rows = contiguous_rows(dv_ptr, place, keys, heads, SPEC)
    store_rows(dv_rows, key, dv, SPEC)


@triton.jit(do_not_specialize=["blocks"])
def _attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, delta_ptr, dk_ptr, dv_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys, blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a tile of keys, looping over the queries; keys beyond the last are not stored."""
    grid_dependency_synchronize()
    BLOCK_D: tl.constexpr = SPEC.block_d
    place = locate(blocks, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, strides, log2_scale, queries, keys, SPEC)
    dout_rows = strided_rows(dout_ptr, dout_strides, place, queries)
    stats_ptr += place.plane * 2 * queries
    delta_ptr += place.plane * queries
    key = place.block * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k = load_rows(head.k, key, True, SPEC)
    v = load_rows(head.v, key, True, SPEC)
    dk = tl.zeros([BLOCK_KV, BLOCK_D], SPEC.accumulator)
    dv = tl.zeros([BLOCK_KV, BLOCK_D], SPEC.accumulator)
    tl.assume(queries > 0)
    for first in range(0, queries, BLOCK_Q):
        row = first + tl.arange(0, BLOCK_Q)
        dv, q, dout, p = _dv_step(dv, k, key, row, head, dout_rows, stats_ptr, False, SPEC)
        delta = tl.load(delta_ptr + row, mask=row < queries, other=0.0)
        ds = p * (dot(v, tl.trans(dout), SPEC) - delta[None, :])
        dk += dot(ds, q, SPEC)
    _store_dk_and_dv(dk_ptr, dv_ptr, place, key, keys, heads, dk, dv, scale, SPEC)


# All three in one launch ----------------------------------------------------------------------------------


@triton.jit
def _attention_bwd_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes dq, dk, dv and δ of one head whose keys are one tile, in a loop over the queries."""
    grid_dependency_synchronize()
    BLOCK_D: tl.constexpr = SPEC.block_d
    place = locate(1, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, strides, log2_scale, queries, keys, SPEC)
    dout_rows = strided_rows(dout_ptr, dout_strides, place, queries)
    dq_rows = contiguous_rows(dq_ptr, place, queries, heads, SPEC)
    stats_ptr += place.plane * 2 * queries
    delta_ptr += place.plane * queries
    key = tl.arange(0, BLOCK_KV)
    k = load_rows(head.k, key, True, SPEC)
    v = load_rows(head.v, key, True, SPEC)
    dk = tl.zeros([BLOCK_KV, BLOCK_D], SPEC.accumulator)
    dv = tl.zeros([BLOCK_KV, BLOCK_D], SPEC.accumulator)
    if SPEC.element.primitive_bitwidth == 16:  # in float32 it would cost registers
        tl.assume(queries > 0)
    for first in range(0, queries, BLOCK_Q):
        row = first + tl.arange(0, BLOCK_Q)
        dv, q, dout, p = _dv_step(dv, k, key, row, head, dout_rows, stats_ptr, True, SPEC)
        dp = dot(v, tl.trans(dout), SPEC)
        delta = tl.sum(p * dp, axis=0)
        tl.store(delta_ptr + row, delta, mask=row < queries)
        ds = p * (dp - delta[None, :])
        dk += dot(ds, q, SPEC)
        store_rows(dq_rows, row, dot(tl.trans(ds), k, SPEC) * scale, SPEC)
    _store_dk_and_dv(dk_ptr, dv_ptr, place, key, keys, heads, dk, dv, scale, SPEC)


# All launches of a backward -------------------------------------------------------------------------------


def _gradients_like(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (each.new_empty(each.shape) for each in (q, k, v))
    return dq, dk, dv


@launcher("attention_backward", _gradients_like)
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, dout: Tensor, scale: float, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, contiguous, for the arguments and results of the forward."""
    results = dq, dk, dv = _gradients_like(q, k, v)
    q, k, v, dq, dk, dv, dout = (divided(each, heads) for each in (q, k, v, dq, dk, dv, dout))
    dout = maybe_contiguous(dout)
    batch, queries = q.shape[:2]
    arguments = launch_arguments(q, k, v, scale)
    arguments |= {"dout_ptr": dout, "dout_strides": token_strides(dout)}
    arguments |= {"stats_ptr": stats, "delta_ptr": stats.new_empty(batch, heads, queries)}
    config, keys = configuration_for("bwd", q), k.shape[1]
    if keys <= config.block_kv:
        launching.launch(
            _attention_bwd_kernel, (batch * heads,), on=dq, options=config.options, **arguments, dq_ptr=dq,
            dk_ptr=dk, dv_ptr=dv, BLOCK_Q=config.block_q, BLOCK_KV=padded(keys),
        )  # fmt: skip
        return results
    config = configuration_for("bwd_dq", dq)
    blocks = -(-queries // config.block_q)
    launching.launch(
        _attention_bwd_dq_kernel, (batch * heads * blocks,), on=dq, options=config.options, **arguments,
        out_ptr=out, dq_ptr=dq, blocks=blocks, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
        TAIL=tail_width(keys, config.block_kv, dq.element_size()),
    )  # fmt: skip
    config = configuration_for("bwd_dkdv", dk)
    blocks = -(-keys // config.block_kv)
    launching.launch(
        _attention_bwd_dkdv_kernel, (batch * heads * blocks,), on=dk, options=config.options, **arguments,
        dk_ptr=dk, dv_ptr=dv, blocks=blocks, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
    )  # fmt: skip
    return results
