"""The backward kernels of attention, which recompute the probabilities from q, k and ``stats``.

With δ = Σ_j p_j dp_j:

    dv = pᵀ dout    dp = dout vᵀ    ds = p ∘ (dp − δ)    dq = scale · ds k    dk = scale · dsᵀ q    dbias = ds

- all keys in one tile: one launch. A program owns one head of one image and goes over its queries; δ comes
  from p and dp, and ``out`` is not read.
- otherwise: dq, looping over keys (and δ = Σ_d out · dout), then dk and dv, looping over queries. A row of dq
  has one exponent for its sum, m + log2 Σ p; what that rounds off is a factor of the row at the end.
- dbias: a program owns a tile of the bias and goes over the images, heads and queries that share it, so
  nothing of size (B, h, Nq, Nkv) is written unless the bias has it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launching
from ...triton_launch import accumulator_dtype, grid_dependency_synchronize
from .common import (
    LaunchArguments,
    Place,
    configuration_for,
    contiguous_rows,
    dot,
    head_at,
    load_rows,
    locate,
    maybe_contiguous,
    padded,
    scores_of,
    store_rows,
    strided_rows,
    tail_width,
    token_strides,
)

#: Programs per multiprocessor of the bias's gradient, up to which what shares the bias is split; each split
#: writes its own sum.
ENOUGH_BIAS_PROGRAMS = 4

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


@triton.jit
def _probabilities(scores, factor, stats, AXIS: tl.constexpr):
    """Returns the probabilities of a tile of ``scores_of``, in which keys lie along AXIS."""
    maximum, reciprocal = tl.expand_dims(stats.maximum, AXIS), tl.expand_dims(stats.reciprocal, AXIS)
    return tl.exp2(scores * factor - maximum) * reciprocal


# dq -------------------------------------------------------------------------------------------------------


@triton.jit
def _shift_and_rest(stats, SPEC: tl.constexpr):
    """Returns m + log2 Σ of rows, where p = 2^(s − shift), and the factor that corrects its rounding."""
    log2_sum = -tl.log2(tl.where(stats.reciprocal > 0, stats.reciprocal, 1.0))  # 0 beyond the last query
    maximum = stats.maximum
    if SPEC.has_bias:
        maximum = tl.where(stats.maximum == float("inf"), 0.0, maximum)
    shift = maximum + log2_sum
    rest = tl.exp2(shift - maximum - log2_sum)
    if SPEC.has_bias:
        shift = tl.where(stats.maximum == float("inf"), float("inf"), shift)
    return shift, rest


@triton.jit
def _dq_step(
    dq, q, dout, shift, delta, row, first, head,
    BLOCK_KV: tl.constexpr, MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Takes one more tile of keys into dq."""
    key = first + tl.arange(0, BLOCK_KV)
    k = load_rows(head.k, key, MASKED, SPEC)
    v = load_rows(head.v, key, MASKED, SPEC)
    scores, factor = scores_of(q, tl.trans(k), row[:, None], key[None, :], head, MASKED, SPEC)
    p = tl.exp2(scores * factor - shift[:, None])
    ds = p * (dot(dout, tl.trans(v), SPEC) - delta[:, None])
    return dq + dot(ds, k, SPEC)


@triton.jit(do_not_specialize=["blocks"])
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, dout_ptr, stats_ptr, delta_ptr, dq_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys, blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes dq and δ of one tile of queries, in a loop over the keys as in the forward."""
    grid_dependency_synchronize()
    BLOCK_D: tl.constexpr = SPEC.block_d
    place = locate(blocks, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, bias_ptr, strides, log2_scale, queries, keys, SPEC)
    row = place.block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dout = load_rows(strided_rows(dout_ptr, dout_strides, place, queries), row, True, SPEC)
    out = load_rows(contiguous_rows(out_ptr, place, queries, heads, SPEC), row, True, SPEC)
    delta = tl.sum(out.to(SPEC.accumulator) * dout.to(SPEC.accumulator), axis=1)
    tl.store(delta_ptr + place.plane * queries + row, delta, mask=row < queries)
    q = load_rows(head.q, row, True, SPEC)
    shift, rest = _shift_and_rest(_load_stats(stats_ptr + place.plane * 2 * queries, row, queries), SPEC)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], SPEC.accumulator)
    MASKED: tl.constexpr = TAIL == BLOCK_KV
    whole = keys // BLOCK_KV * BLOCK_KV
    if TAIL and not MASKED:
        dq = _dq_step(dq, q, dout, shift, delta, row, whole, head, TAIL, True, SPEC)
    for first in range(0, keys if MASKED else whole, BLOCK_KV):
        dq = _dq_step(dq, q, dout, shift, delta, row, first, head, BLOCK_KV, MASKED, SPEC)
    dq_rows = contiguous_rows(dq_ptr, place, queries, heads, SPEC)
    store_rows(dq_rows, row, dq * (rest * scale)[:, None], SPEC)


def _launch_dq(arguments: dict[str, Any], out: Tensor, dq: Tensor) -> None:
    batch, queries, heads, _ = dq.shape
    config = configuration_for("bwd_dq", dq)
    blocks = -(-queries // config.block_q)
    launching.launch(
        _attention_bwd_dq_kernel, (batch * heads * blocks,), on=dq, options=config.options,
        **arguments, out_ptr=out, dq_ptr=dq, blocks=blocks, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
        TAIL=tail_width(arguments["keys"], config.block_kv, dq.element_size()),
    )  # fmt: skip


# dk and dv ------------------------------------------------------------------------------------------------


@triton.jit
def _dv_step(dv, k, key, row, head, dout_rows, stats_ptr, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Takes one more tile of queries into dv; returns their q, dout and pᵀ, [keys, queries], besides."""
    q = _load_queries(head.q, row, SPEC)
    stats = _load_stats(stats_ptr, row, head.q.count)
    scores, factor = scores_of(k, tl.trans(q), row[None, :], key[:, None], head, MASKED, SPEC)
    p = _probabilities(scores, factor, stats, 0)
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
    q_ptr, k_ptr, v_ptr, bias_ptr, dout_ptr, stats_ptr, delta_ptr, dk_ptr, dv_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys, blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a tile of keys, looping over the queries; keys beyond the last are not stored."""
    grid_dependency_synchronize()
    BLOCK_D: tl.constexpr = SPEC.block_d
    place = locate(blocks, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, bias_ptr, strides, log2_scale, queries, keys, SPEC)
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


def _launch_dkdv(arguments: dict[str, Any], dk: Tensor, dv: Tensor) -> None:
    batch, keys, heads, _ = dk.shape
    config = configuration_for("bwd_dkdv", dk)
    blocks = -(-keys // config.block_kv)
    launching.launch(
        _attention_bwd_dkdv_kernel, (batch * heads * blocks,), on=dk, options=config.options,
        **arguments, dk_ptr=dk, dv_ptr=dv, blocks=blocks, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
    )  # fmt: skip


# All three in one launch ----------------------------------------------------------------------------------


@triton.jit
def _attention_bwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, dout_ptr, stats_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes dq, dk, dv and δ of one head whose keys are one tile, in a loop over the queries."""
    grid_dependency_synchronize()
    BLOCK_D: tl.constexpr = SPEC.block_d
    place = locate(1, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, bias_ptr, strides, log2_scale, queries, keys, SPEC)
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


def _launch_at_once(arguments: dict[str, Any], dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    batch, keys, heads, _ = dk.shape
    config = configuration_for("bwd", dq)
    launching.launch(
        _attention_bwd_kernel, (batch * heads,), on=dq, options=config.options,
        **arguments, dq_ptr=dq, dk_ptr=dk, dv_ptr=dv, BLOCK_Q=config.block_q, BLOCK_KV=padded(keys),
    )  # fmt: skip


# dbias ----------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "splits", "query_blocks", "key_blocks", "bias_images", "bias_heads", "bias_queries",
        "shared_images", "shared_heads", "shared_blocks",
    ]
)  # fmt: skip
def _attention_bwd_bias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, dout_ptr, stats_ptr, delta_ptr, dbias_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys, splits, query_blocks, key_blocks,
    bias_images, bias_heads, bias_queries, shared_images, shared_heads, shared_blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SUM_QUERIES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes one tile of the bias's gradient, summed over one split of the scores that share it.

    dbias is (splits, bias_images, bias_heads, bias_queries, Nkv), in query_blocks × key_blocks tiles. Each is
    shared by shared_images images, shared_heads heads and shared_blocks blocks of queries, which the splits
    divide among them.
    """
    grid_dependency_synchronize()
    program = tl.program_id(0)
    key = program % key_blocks * BLOCK_KV + tl.arange(0, BLOCK_KV)
    own_block = program // key_blocks % query_blocks
    bias_plane = program // (key_blocks * query_blocks) % (bias_images * bias_heads)
    split = program // (key_blocks * query_blocks * bias_images * bias_heads)
    parts = shared_images * shared_heads * shared_blocks
    share = tl.cdiv(parts, splits)
    acc = tl.zeros([BLOCK_Q, BLOCK_KV], SPEC.accumulator)
    for part in range(split * share, tl.minimum(split * share + share, parts)):
        image = (bias_plane // bias_heads + part // (shared_heads * shared_blocks)).to(tl.int64)
        index = (bias_plane % bias_heads + part // shared_blocks % shared_heads).to(tl.int64)
        place = Place(image, index, plane=image * heads + index, block=own_block + part % shared_blocks)
        row = place.block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        head = head_at(place, q_ptr, k_ptr, v_ptr, bias_ptr, strides, log2_scale, queries, keys, SPEC)
        q = _load_queries(head.q, row, SPEC)
        k = load_rows(head.k, key, True, SPEC)
        scores, factor = scores_of(q, tl.trans(k), row[:, None], key[None, :], head, False, SPEC)
        stats = _load_stats(stats_ptr + place.plane * 2 * queries, row, queries)
        p = _probabilities(scores, factor, stats, 1)
        v = load_rows(head.v, key, True, SPEC)
        dout = load_rows(strided_rows(dout_ptr, dout_strides, place, queries), row, True, SPEC)
        delta = tl.load(delta_ptr + place.plane * queries + row, mask=row < queries, other=0.0)
        acc += p * (dot(dout, tl.trans(v), SPEC) - delta[:, None])
    dbias_ptr += (split * bias_images * bias_heads + bias_plane).to(tl.int64) * bias_queries * keys
    if SUM_QUERIES:
        tl.store(dbias_ptr + key, tl.sum(acc, axis=0).to(dbias_ptr.dtype.element_ty), mask=key < keys)
    else:
        row = own_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        mask = (row < queries)[:, None] & (key < keys)[None, :]
        ptrs = dbias_ptr + row[:, None] * keys + key[None, :]
        tl.store(ptrs, acc.to(dbias_ptr.dtype.element_ty), mask=mask)


def _launch_bias(arguments: dict[str, Any], q: Tensor, keys: int, bias: Tensor) -> Tensor:
    """Returns the gradient of the bias in its shape, summed over broadcast dimensions in a fixed order."""
    batch, queries, heads, _ = q.shape
    bias_images, bias_heads, bias_queries, bias_keys = [1] * (4 - bias.ndim) + list(bias.shape)
    if bias_keys < keys:  # it shifts all scores of a row alike, which the softmax does not notice
        return torch.zeros_like(bias, memory_format=torch.contiguous_format)
    config = configuration_for("bwd_bias", q)
    key_blocks, all_query_blocks = -(-keys // config.block_kv), -(-queries // config.block_q)
    query_blocks = 1 if bias_queries < queries else all_query_blocks
    shared_images, shared_heads = batch // bias_images, heads // bias_heads
    shared_blocks = all_query_blocks // query_blocks
    tiles = bias_images * bias_heads * query_blocks * key_blocks
    enough = ENOUGH_BIAS_PROGRAMS * launching.chip(q.device).multiprocessors
    splits = min(-(-enough // tiles), shared_images * shared_heads * shared_blocks)
    dtype = bias.dtype if splits == 1 else accumulator_dtype(q)
    dbias = bias.new_empty(splits, bias_images, bias_heads, bias_queries, bias_keys, dtype=dtype)
    launching.launch(
        _attention_bwd_bias_kernel, (splits * tiles,), on=q, options=config.options,
        **arguments, dbias_ptr=dbias, splits=splits, query_blocks=query_blocks, key_blocks=key_blocks,
        bias_images=bias_images, bias_heads=bias_heads, bias_queries=bias_queries,
        shared_images=shared_images, shared_heads=shared_heads, shared_blocks=shared_blocks,
        BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv, SUM_QUERIES=bias_queries < queries,
    )  # fmt: skip
    return (dbias.squeeze(0) if splits == 1 else dbias.sum(0).to(bias.dtype)).view(bias.shape)


# All launches of a backward -------------------------------------------------------------------------------


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, stats: Tensor, dout: Tensor,
    scale: float, *, need_kv: bool = True, need_bias: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns the gradients of q, k, v and the bias, contiguous.

    A gradient that is not needed is None unless it comes for free.
    """
    dout = maybe_contiguous(dout)
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    arguments = LaunchArguments.of(q, k, v, bias, scale)._asdict()
    arguments |= {"dout_ptr": dout, "dout_strides": token_strides(dout)}
    arguments |= {"stats_ptr": stats, "delta_ptr": stats.new_empty(batch, heads, queries)}
    if keys <= configuration_for("bwd", q).block_kv:
        _launch_at_once(arguments, dq, dk, dv)
    else:
        _launch_dq(arguments, out, dq)
        if need_kv:
            _launch_dkdv(arguments, dk, dv)
        else:
            dk = dv = None
    dbias = _launch_bias(arguments, q, keys, bias) if need_bias and bias is not None else None
    return dq, dk, dv, dbias
