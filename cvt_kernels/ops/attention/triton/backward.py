"""The backward kernels of attention, which recompute the probabilities from q, k and ``stats``.

With δ = Σ_j p_j dp_j:

    dv = pᵀ dout    dp = dout vᵀ    ds = p ∘ (dp − δ)    dq = scale · ds k    dk = scale · dsᵀ q    dbias = ds

- all keys in one tile: one launch. A program owns one head of one image and goes over its queries; δ comes
  from p and dp, and ``out`` is not read.
- otherwise: dq, looping over keys (and δ = Σ_d out · dout), then dk and dv, looping over queries. A row of dq
  has one exponent for its sum, m + log2 Σ p; what that rounds off is a factor of the row at the end.
- dbias: a program owns a tile of the bias and goes over the images, heads and queries that share it, so
  nothing of size (B, h, Nq, Nkv) is written unless the bias has it.
- dtable, of a bias by position: a program owns one offset down and goes over the images and the pairs of a
  row of queries and a row of keys that lie so. It sums ds in a tile (queries across, keys across), whose
  diagonals are summed last. Chosen queries are found by ``slots``, the query that each token is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from .... import launching
from ....records import PositionBias
from ...triton_launch import accumulator_dtype, grid_dependency_synchronize
from .common import (
    LaunchArguments,
    Place,
    PositionSpec,
    biased_scores,
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
    q_ptr, k_ptr, v_ptr, bias_ptrs, out_ptr, dout_ptr, stats_ptr, delta_ptr, dq_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys, blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes dq and δ of one tile of queries, in a loop over the keys as in the forward."""
    grid_dependency_synchronize()
    BLOCK_D: tl.constexpr = SPEC.block_d
    place = locate(blocks, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, bias_ptrs, strides, log2_scale, queries, keys, SPEC)
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
    q_ptr, k_ptr, v_ptr, bias_ptrs, dout_ptr, stats_ptr, delta_ptr, dk_ptr, dv_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys, blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a tile of keys, looping over the queries; keys beyond the last are not stored."""
    grid_dependency_synchronize()
    BLOCK_D: tl.constexpr = SPEC.block_d
    place = locate(blocks, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, bias_ptrs, strides, log2_scale, queries, keys, SPEC)
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
    config = configuration_for("bwd_dkdv", dk, arguments["SPEC"])
    blocks = -(-keys // config.block_kv)
    launching.launch(
        _attention_bwd_dkdv_kernel, (batch * heads * blocks,), on=dk, options=config.options,
        **arguments, dk_ptr=dk, dv_ptr=dv, blocks=blocks, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
    )  # fmt: skip


# All three in one launch ----------------------------------------------------------------------------------


@triton.jit
def _attention_bwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptrs, dout_ptr, stats_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes dq, dk, dv and δ of one head whose keys are one tile, in a loop over the queries."""
    grid_dependency_synchronize()
    BLOCK_D: tl.constexpr = SPEC.block_d
    place = locate(1, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, bias_ptrs, strides, log2_scale, queries, keys, SPEC)
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
    q_ptr, k_ptr, v_ptr, bias_ptrs, dout_ptr, stats_ptr, delta_ptr, dbias_ptr,
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
        head = head_at(place, q_ptr, k_ptr, v_ptr, bias_ptrs, strides, log2_scale, queries, keys, SPEC)
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


# dtable ---------------------------------------------------------------------------------------------------


@triton.jit
def _table_rows(bias_ptrs, line, across, mask, SPEC: tl.constexpr):
    """Returns biases of one line of the table of all heads."""
    _, table_ptr, _ = bias_ptrs
    table_ptr += line * SPEC.position.table_width
    return tl.load(table_ptr + across, mask=mask, other=0.0).to(SPEC.accumulator)


@triton.jit(do_not_specialize=["splits", "images"])
def _attention_bwd_table_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptrs, dout_ptr, stats_ptr, delta_ptr, slots_ptr, dtiles_ptr,
    strides, dout_strides, scale, log2_scale, heads, queries, keys, splits, images,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Sums ds over one offset down and a split's images: part of dtiles (splits, h, offsets down, W, Wk)."""
    grid_dependency_synchronize()
    PLACES: tl.constexpr = SPEC.position
    STRIDE: tl.constexpr = PLACES.stride
    BLOCKS: tl.constexpr = (PLACES.width + BLOCK_Q - 1) // BLOCK_Q
    KEY_BLOCKS: tl.constexpr = (PLACES.key_width + BLOCK_KV - 1) // BLOCK_KV
    TOKENS: tl.constexpr = PLACES.class_tokens + PLACES.height * PLACES.width
    program = tl.program_id(0)
    column = program // KEY_BLOCKS % BLOCKS * BLOCK_Q + tl.arange(0, BLOCK_Q)
    key_column = program % KEY_BLOCKS * BLOCK_KV + tl.arange(0, BLOCK_KV)
    line = program // (KEY_BLOCKS * BLOCKS)  # of dtiles
    down = line % PLACES.table_height - STRIDE * (PLACES.key_height - 1)
    index = (line // PLACES.table_height % heads).to(tl.int64)
    split = line // PLACES.table_height // heads
    first_key_row = (tl.maximum(-down, 0) + STRIDE - 1) // STRIDE
    key_rows = tl.minimum((PLACES.height - 1 - down) // STRIDE + 1, PLACES.key_height)
    pairs = tl.maximum(key_rows - first_key_row, 0)
    share = tl.cdiv(images, splits)
    mask = (column < PLACES.width)[:, None] & (key_column < PLACES.key_width)[None, :]
    across = column[:, None] + STRIDE * (PLACES.key_width - 1 - key_column)[None, :]
    biases = _table_rows(bias_ptrs, line % (heads * PLACES.table_height), across, mask, SPEC)
    acc = tl.zeros([BLOCK_Q, BLOCK_KV], SPEC.accumulator)
    for part in range(tl.minimum(images - split * share, share) * pairs):
        image = (split * share + part // pairs).to(tl.int64)
        key_row = first_key_row + part % pairs
        place = Place(image, index, plane=image * heads + index, block=0)
        token = PLACES.class_tokens + (down + STRIDE * key_row) * PLACES.width + column
        row = tl.where(column < PLACES.width, token, queries)
        if PLACES.has_rows:
            is_token = column < PLACES.width
            row = tl.load(slots_ptr + image * TOKENS + token, mask=is_token, other=queries).to(tl.int32)
        key = PLACES.class_tokens + key_row * PLACES.key_width + key_column
        key = tl.where(key_column < PLACES.key_width, key, keys)
        head = head_at(place, q_ptr, k_ptr, v_ptr, bias_ptrs, strides, log2_scale, queries, keys, SPEC)
        q = _load_queries(head.q, row, SPEC)
        k = load_rows(head.k, key, True, SPEC)
        scores, factor = biased_scores(q, tl.trans(k), biases, row[:, None], key[None, :], head, SPEC)
        stats = _load_stats(stats_ptr + place.plane * 2 * queries, row, queries)
        p = _probabilities(scores, factor, stats, 1)
        v = load_rows(head.v, key, True, SPEC)
        dout = load_rows(strided_rows(dout_ptr, dout_strides, place, queries), row, True, SPEC)
        delta = tl.load(delta_ptr + place.plane * queries + row, mask=row < queries, other=0.0)
        acc += p * (dot(dout, tl.trans(v), SPEC) - delta[:, None])
    dtiles_ptr += line.to(tl.int64) * (PLACES.width * PLACES.key_width)
    tl.store(dtiles_ptr + column[:, None] * PLACES.key_width + key_column[None, :], acc, mask=mask)


def _launch_table(arguments: dict[str, Any], q: Tensor, position: PositionBias) -> Tensor:
    """Returns the gradient of the table of a bias by position."""
    batch, _, heads, _ = q.shape
    places = arguments["SPEC"].position
    config = configuration_for("bwd_table", q)
    block_q, block_kv = (
        min(padded(places.width), config.block_q),
        min(padded(places.key_width), config.block_kv),
    )
    warps = block_q // 16 if q.element_size() == 2 else block_q * block_kv // 256  # small tiles need few
    options = config.options | {"num_warps": min(config.num_warps, warps)}
    tiles = heads * places.table_height * -(-places.width // block_q) * -(-places.key_width // block_kv)
    enough = ENOUGH_BIAS_PROGRAMS * launching.chip(q.device).multiprocessors
    splits = min(-(-enough // tiles), batch)
    dtiles = q.new_empty(
        splits, heads, places.table_height, places.width, places.key_width, dtype=accumulator_dtype(q)
    )
    slots = q if position.rows is None else _slots(position.rows, places)
    launching.launch(
        _attention_bwd_table_kernel, (splits * tiles,), on=q, options=options,
        **arguments, slots_ptr=slots, dtiles_ptr=dtiles, splits=splits, images=batch,
        BLOCK_Q=block_q, BLOCK_KV=block_kv,
    )  # fmt: skip
    return _sum_diagonals(dtiles.sum(0), places).to(position.table.dtype)


def _slots(rows: Tensor, places: PositionSpec) -> Tensor:
    """Returns (B, T): the index of each token's query, or the number of queries where it is none."""
    batch, queries = rows.shape
    tokens = places.class_tokens + places.height * places.width
    slots = rows.new_full((batch, tokens + 1), queries)
    slots.scatter_(
        1, torch.where(rows < 0, tokens, rows), torch.arange(queries, device=rows.device).expand_as(rows)
    )
    return slots[:, :tokens].contiguous()


def _sum_diagonals(tiles: Tensor, places: PositionSpec) -> Tensor:
    """Sums tiles (…, W, Wk) along the diagonals of equal offset j − s·b: (…, W + s·(Wk − 1))."""
    reach = places.stride * (places.key_width - 1)
    tiles = F.pad(tiles, (0, 0, reach, reach))
    *others, row, column = tiles.stride()
    diagonals = tiles.as_strided(
        (*tiles.shape[:-2], places.table_width, places.key_width),
        (*others, row, places.stride * row + column),
    )
    return diagonals.sum(-1)


# All launches of a backward -------------------------------------------------------------------------------


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, stats: Tensor, dout: Tensor,
    scale: float, *, need_kv: bool = True, need_bias: bool = False,
    position: PositionBias | None = None, need_table: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns the gradients of q, k, v, the bias and the table of a bias by position, contiguous.

    A gradient that is not needed is None unless it comes for free.
    """
    dout = maybe_contiguous(dout)
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    arguments = LaunchArguments.of(q, k, v, bias, scale, position)._asdict()
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
    dtable = _launch_table(arguments, q, position) if need_table and position is not None else None
    return dq, dk, dv, dbias, dtable
