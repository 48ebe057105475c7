"""Triton kernels of ``attention``: out = softmax(scale · q kᵀ + bias) v, for many queries over few keys.

After FlashAttention (Dao et al. 2022) and FlashAttention-2 (Dao 2023): a tile of queries meets one tile of keys
after the other, and neither scores nor probabilities leave the chip. What is different here is the shape: CvT has
784, 196 or 50 keys, where square tiles of 128 would compute up to 2.5 times what is asked.

Layout: q and out (B, Nq, h, D), k and v (B, Nkv, h, D), read with their strides as the linear layers leave them;
results are contiguous. The bias is read with strides of 0 where it broadcasts. D is padded to a power of two inside
the kernels (``BLOCK_D``), with zeros.

Keys are cut into tiles whose widths add up to little more than Nkv:

- forward, as many keys as registers allow (``keys_on_chip``): into powers of two, 196 ≤ 128 + 64 + 16 and 50 ≤ 64. All
  scores of a row exist at once, so the softmax is taken as it is written. K and V are loaded once per program, which
  walks over several tiles of queries.
- forward and dq beyond: whole tiles, unmasked, and a masked last one as narrow as fits: 784 = 12 · 64 + 16. The
  softmax is rescaled as larger scores turn up.

Softmax, in float32, works in powers of two: p = 2^(s · scale · log2 e − m), one FMA and one ``exp2``. The maximum m
enters every term of a row as the same number, so its rounding cancels, however large the scores. The forward saves
``lse``, log2 of the sum of the powers, as the pair (m, log2 Σ p): added up, scores of 10⁴ would leave it an error of
5·10⁻⁴. It is (+∞, 0) for a row that the bias excludes, whose probabilities are thus 0 in the backward too.

The backward computes the probabilities again from q, k and ``lse``. With δ = Σ_j p_j dp_j:

    dv = pᵀ dout     dp = dout vᵀ     ds = p ∘ (dp − δ)     dq = scale · ds k     dk = scale · dsᵀ q     dbias = ds

- all keys in one tile: one launch. A program owns one head of one image and walks over its queries; δ comes from
  p and dp, and ``out`` is not read.
- otherwise: dq, looping over keys (and δ = Σ_d out · dout), then dk and dv, looping over queries.
- dbias: a program owns a tile of the bias and walks over the images, heads and queries that share it, so nothing of
  size (B, h, Nq, Nkv) is written unless the bias has it. That costs the two products q kᵀ and dout vᵀ once more.

No atomics; every sum has a fixed order. Launches, in bytes (read + written once, as if what programs share came from
L2; e per element, N = Nq + Nkv and C = h·D):

- forward: 2·B·N·C·e + 8·B·h·Nq
- backward in one launch: B·(3·Nq + 4·Nkv)·C·e + 12·B·h·Nq; in two: B·(6·Nq + 6·Nkv)·C·e + 24·B·h·Nq
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .... import checks, machine

_LOG2E = tl.constexpr(1.4426950408889634)

# Kernels --------------------------------------------------------------------------------------------------
#
# ``strides`` holds (batch, token, head) of q, k, v and dout; ``bias_strides`` (batch, head, query, key). Offsets of an
# image's head are int64, those within it int32. ``scales`` is (scale, |scale| · log2 e), ``frame`` what _frame makes.


class Spec(NamedTuple):
    """What a kernel is compiled for besides its tiles.

    Attributes:
        head_dim: D.
        block_d: D padded to a power of two of at least 16.
        bias: Whether there is one.
        negative: Whether the scale is negative.
        element: Triton's dtype of q, k and v.
        operand: What is multiplied: ``element``, but float32 for bfloat16 in Triton's interpreter, whose product of
            bfloat16 is wrong.
        accumulator: float32, or float64 for float64.
        precision: ``input_precision`` of ``tl.dot``.
    """

    head_dim: int
    block_d: int
    bias: bool
    negative: bool
    element: Any
    operand: Any
    accumulator: Any
    precision: str


@triton.jit
def _locate(blocks, heads):
    """This program's image, head, both in one number, and block; blocks of one head are neighbours."""
    plane = tl.program_id(0) // blocks
    return (
        (plane // heads).to(tl.int64),
        (plane % heads).to(tl.int64),
        plane.to(tl.int64),
        tl.program_id(0) % blocks,
    )


@triton.jit
def _at_head(ptr, strides, batch, head):
    return ptr + batch * strides[0] + head * strides[2]


@triton.jit
def _frame(bias_ptr, bias_strides, batch, head, queries, keys, scales):
    """What the scores of one head need: its bias, the bias's query and key stride, Nq, Nkv, scale · log2 e."""
    bias_ptr += batch * bias_strides[0] + head * bias_strides[1]
    return bias_ptr, bias_strides[2], bias_strides[3], queries, keys, scales[1]


@triton.jit
def _load_rows(ptr, row, rows, stride, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """[rows, BLOCK_D] of one head's tokens; zeros beyond the last token and channel."""
    d = tl.arange(0, SPEC.block_d)
    ptrs = ptr + row[:, None] * stride + d[None, :]
    if SPEC.block_d > SPEC.head_dim:
        return tl.load(ptrs, mask=(row < rows)[:, None] & (d < SPEC.head_dim)[None, :], other=0.0)
    if MASKED:
        return tl.load(ptrs, mask=(row < rows)[:, None], other=0.0)
    return tl.load(ptrs)


@triton.jit
def _store_rows(ptr, row, rows, stride, values, SPEC: tl.constexpr):
    d = tl.arange(0, SPEC.block_d)
    mask = (row < rows)[:, None] & (d < SPEC.head_dim)[None, :]
    tl.store(ptr + row[:, None] * stride + d[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dot(a, b, SPEC: tl.constexpr):
    return tl.dot(
        a.to(SPEC.element).to(SPEC.operand), b.to(SPEC.element).to(SPEC.operand),
        input_precision=SPEC.precision, out_dtype=SPEC.accumulator,
    )  # fmt: skip


@triton.jit
def _scores(a, b, query, key, frame, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Scores a·b, and the factor that makes them powers of two; MASKED puts −∞ beyond the last key.

    Without a bias the factor, which is positive, is left to the FMA before ``exp2``; with one it is applied. ``query``
    and ``key`` are indices that broadcast to the tile, which is (queries, keys) or transposed.
    """
    bias_ptr, stride_q, stride_k, queries, keys, factor = frame
    scores = _dot(a, b, SPEC)
    if SPEC.negative:
        scores = -scores
    if SPEC.bias:
        offset = query * stride_q + key * stride_k
        bias = tl.load(bias_ptr + offset, mask=(query < queries) & (key < keys), other=0.0)
        scores = scores * factor + bias.to(SPEC.accumulator) * _LOG2E
        factor = 1.0
    if MASKED:
        scores = tl.where(key < keys, scores, float("-inf"))
    return scores, factor


@triton.jit
def _finite_maximum(m, SPEC: tl.constexpr):
    """What to subtract: 0 where the bias has excluded all keys so far, lest −∞ − −∞ be NaN."""
    if SPEC.bias:
        return tl.where(m == float("-inf"), 0.0, m)
    return m


@triton.jit
def _store_softmax(out_ptr, lse_ptr, row, queries, stride, m, total, acc, SPEC: tl.constexpr):
    """Normalised rows of the output and their ``lse``; zeros and (+∞, 0) where nothing was summed."""
    if SPEC.bias:
        excluded = total == 0.0
        m = tl.where(excluded, float("inf"), m)
        total = tl.where(excluded, 1.0, total)
    _store_rows(out_ptr, row, queries, stride, acc / total[:, None], SPEC)
    tl.store(lse_ptr + row, m, mask=row < queries)
    tl.store(lse_ptr + queries + row, tl.log2(total), mask=row < queries)


@triton.jit
def _load_tile(ptr, stride, keys, TILES: tl.constexpr, INDEX: tl.constexpr, SPEC: tl.constexpr):
    key = TILES[INDEX][0] + tl.arange(0, TILES[INDEX][1])
    return _load_rows(ptr, key, keys, stride, len(TILES) == INDEX + 1, SPEC)


@triton.jit
def _scores_of_tile(q, k, row, frame, TILES: tl.constexpr, INDEX: tl.constexpr, SPEC: tl.constexpr):
    key = TILES[INDEX][0] + tl.arange(0, TILES[INDEX][1])
    return _scores(q, tl.trans(k), row[:, None], key[None, :], frame, len(TILES) == INDEX + 1, SPEC)


@triton.jit
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_ptr, strides, bias_strides, scales, heads, queries, keys, blocks,
    rows, BLOCK_Q: tl.constexpr, TILES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """``rows`` queries of one head over all its keys, which stay on the chip; TILES is (first key, width) of each."""
    BLOCK_D: tl.constexpr = SPEC.block_d
    batch, head, plane, block = _locate(blocks, heads)
    q_ptr = _at_head(q_ptr, strides[0], batch, head)
    k_ptr = _at_head(k_ptr, strides[1], batch, head)
    v_ptr = _at_head(v_ptr, strides[2], batch, head)
    frame = _frame(bias_ptr, bias_strides, batch, head, queries, keys, scales)
    out_ptr += (batch * queries * heads + head) * SPEC.head_dim
    ks, vs = (), ()
    for i in tl.static_range(len(TILES)):
        ks = ks + (_load_tile(k_ptr, strides[1][1], keys, TILES, i, SPEC),)
        vs = vs + (_load_tile(v_ptr, strides[2][1], keys, TILES, i, SPEC),)
    for first in range(block * rows, tl.minimum(block * rows + rows, queries), BLOCK_Q):
        row = first + tl.arange(0, BLOCK_Q)
        q = _load_rows(q_ptr, row, queries, strides[0][1], True, SPEC)
        tiles = ()
        m = tl.full([BLOCK_Q], float("-inf"), SPEC.accumulator)
        for i in tl.static_range(len(TILES)):
            scores, factor = _scores_of_tile(q, ks[i], row, frame, TILES, i, SPEC)
            tiles = tiles + (scores,)
            m = tl.maximum(m, tl.max(scores, axis=1))
        m = _finite_maximum(m * factor, SPEC)
        total = tl.zeros([BLOCK_Q], SPEC.accumulator)
        acc = tl.zeros([BLOCK_Q, BLOCK_D], SPEC.accumulator)
        for i in tl.static_range(len(TILES)):
            p = tl.exp2(tiles[i] * factor - m[:, None])
            total += tl.sum(p, axis=1)
            acc += _dot(p, vs[i], SPEC)
        _store_softmax(
            out_ptr, lse_ptr + plane * 2 * queries, row, queries, heads * SPEC.head_dim, m, total, acc, SPEC
        )  # fmt: skip


@triton.jit
def _online_step(
    m, total, acc, q, k_ptr, v_ptr, strides, row, first, frame,
    BLOCK_KV: tl.constexpr, MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Takes one more tile of keys into the running maximum, sum and output."""
    key = first + tl.arange(0, BLOCK_KV)
    k = _load_rows(k_ptr, key, frame[4], strides[1][1], MASKED, SPEC)
    scores, factor = _scores(q, tl.trans(k), row[:, None], key[None, :], frame, MASKED, SPEC)
    new_m = tl.maximum(m, tl.max(scores, axis=1) * factor)
    safe_m = _finite_maximum(new_m, SPEC)
    p = tl.exp2(scores * factor - safe_m[:, None])
    shrink = tl.exp2(m - safe_m)
    v = _load_rows(v_ptr, key, frame[4], strides[2][1], MASKED, SPEC)
    return new_m, total * shrink + tl.sum(p, axis=1), acc * shrink[:, None] + _dot(p, v, SPEC)


@triton.jit
def _attention_fwd_loop_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_ptr, strides, bias_strides, scales, heads, queries, keys, blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """One tile of queries, in a loop over whole tiles of keys and a last one of width TAIL (0 for none).

    A last tile as wide as the others joins the loop, masked: apart, it would only be more code.
    """
    BLOCK_D: tl.constexpr = SPEC.block_d
    batch, head, plane, block = _locate(blocks, heads)
    q_ptr = _at_head(q_ptr, strides[0], batch, head)
    k_ptr = _at_head(k_ptr, strides[1], batch, head)
    v_ptr = _at_head(v_ptr, strides[2], batch, head)
    frame = _frame(bias_ptr, bias_strides, batch, head, queries, keys, scales)
    out_ptr += (batch * queries * heads + head) * SPEC.head_dim
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = _load_rows(q_ptr, row, queries, strides[0][1], True, SPEC)
    m = tl.full([BLOCK_Q], float("-inf"), SPEC.accumulator)
    total = tl.zeros([BLOCK_Q], SPEC.accumulator)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], SPEC.accumulator)
    MASKED: tl.constexpr = TAIL == BLOCK_KV
    whole = keys // BLOCK_KV * BLOCK_KV
    for first in range(0, keys if MASKED else whole, BLOCK_KV):
        m, total, acc = _online_step(
            m, total, acc, q, k_ptr, v_ptr, strides, row, first, frame, BLOCK_KV, MASKED, SPEC
        )
    if TAIL and not MASKED:
        m, total, acc = _online_step(
            m, total, acc, q, k_ptr, v_ptr, strides, row, whole, frame, TAIL, True, SPEC
        )
    _store_softmax(
        out_ptr, lse_ptr + plane * 2 * queries, row, queries, heads * SPEC.head_dim, m, total, acc, SPEC
    )  # fmt: skip


@triton.jit
def _load_lse(lse_ptr, row, queries):
    """Its two parts; (+∞, 0) beyond the last query, where the probabilities are thus 0."""
    m = tl.load(lse_ptr + row, mask=row < queries, other=float("inf"))
    return m, tl.load(lse_ptr + queries + row, mask=row < queries, other=0.0)


@triton.jit
def _dq_step(
    dq, q, dout, lse, delta, k_ptr, v_ptr, strides, row, first, frame,
    BLOCK_KV: tl.constexpr, MASKED: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    key = first + tl.arange(0, BLOCK_KV)
    k = _load_rows(k_ptr, key, frame[4], strides[1][1], MASKED, SPEC)
    v = _load_rows(v_ptr, key, frame[4], strides[2][1], MASKED, SPEC)
    scores, factor = _scores(q, tl.trans(k), row[:, None], key[None, :], frame, MASKED, SPEC)
    p = tl.exp2(scores * factor - lse[0][:, None] - lse[1][:, None])
    ds = p * (_dot(dout, tl.trans(v), SPEC) - delta[:, None])
    return dq + _dot(ds, k, SPEC)


@triton.jit
def _attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, strides, bias_strides,
    scales, heads, queries, keys, blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Gradient dq and δ of one tile of queries, in a loop over the keys as in the forward."""
    BLOCK_D: tl.constexpr = SPEC.block_d
    batch, head, plane, block = _locate(blocks, heads)
    q_ptr = _at_head(q_ptr, strides[0], batch, head)
    k_ptr = _at_head(k_ptr, strides[1], batch, head)
    v_ptr = _at_head(v_ptr, strides[2], batch, head)
    dout_ptr = _at_head(dout_ptr, strides[3], batch, head)
    frame = _frame(bias_ptr, bias_strides, batch, head, queries, keys, scales)
    start = (batch * queries * heads + head) * SPEC.head_dim  # in out and dq, which are contiguous
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dout = _load_rows(dout_ptr, row, queries, strides[3][1], True, SPEC)
    out = _load_rows(out_ptr + start, row, queries, heads * SPEC.head_dim, True, SPEC)
    delta = tl.sum(out.to(SPEC.accumulator) * dout.to(SPEC.accumulator), axis=1)
    tl.store(delta_ptr + plane * queries + row, delta, mask=row < queries)
    q = _load_rows(q_ptr, row, queries, strides[0][1], True, SPEC)
    lse = _load_lse(lse_ptr + plane * 2 * queries, row, queries)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], SPEC.accumulator)
    MASKED: tl.constexpr = TAIL == BLOCK_KV
    whole = keys // BLOCK_KV * BLOCK_KV
    for first in range(0, keys if MASKED else whole, BLOCK_KV):
        dq = _dq_step(
            dq, q, dout, lse, delta, k_ptr, v_ptr, strides, row, first, frame, BLOCK_KV, MASKED, SPEC
        )
    if TAIL and not MASKED:
        dq = _dq_step(dq, q, dout, lse, delta, k_ptr, v_ptr, strides, row, whole, frame, TAIL, True, SPEC)
    _store_rows(dq_ptr + start, row, queries, heads * SPEC.head_dim, dq * scales[0], SPEC)


@triton.jit
def _probabilities_transposed(k, q, lse, row, key, frame, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """pᵀ, [keys, queries]."""
    scores, factor = _scores(k, tl.trans(q), row[None, :], key[:, None], frame, MASKED, SPEC)
    return tl.exp2(scores * factor - lse[0][None, :] - lse[1][None, :])


@triton.jit
def _attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, strides, bias_strides,
    scales, heads, queries, keys, blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Gradients dk and dv of one tile of keys, in a loop over the queries. Keys beyond the last are not stored."""
    BLOCK_D: tl.constexpr = SPEC.block_d
    batch, head, plane, block = _locate(blocks, heads)
    q_ptr = _at_head(q_ptr, strides[0], batch, head)
    dout_ptr = _at_head(dout_ptr, strides[3], batch, head)
    frame = _frame(bias_ptr, bias_strides, batch, head, queries, keys, scales)
    lse_ptr += plane * 2 * queries
    delta_ptr += plane * queries
    key = block * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k = _load_rows(_at_head(k_ptr, strides[1], batch, head), key, keys, strides[1][1], True, SPEC)
    v = _load_rows(_at_head(v_ptr, strides[2], batch, head), key, keys, strides[2][1], True, SPEC)
    dk = tl.zeros([BLOCK_KV, BLOCK_D], SPEC.accumulator)
    dv = tl.zeros([BLOCK_KV, BLOCK_D], SPEC.accumulator)
    for first in range(0, queries, BLOCK_Q):
        row = first + tl.arange(0, BLOCK_Q)
        q = _load_rows(q_ptr, row, queries, strides[0][1], True, SPEC)
        lse = _load_lse(lse_ptr, row, queries)
        p = _probabilities_transposed(k, q, lse, row, key, frame, False, SPEC)
        dout = _load_rows(dout_ptr, row, queries, strides[3][1], True, SPEC)
        dv += _dot(p, dout, SPEC)
        delta = tl.load(delta_ptr + row, mask=row < queries, other=0.0)
        ds = p * (_dot(v, tl.trans(dout), SPEC) - delta[None, :])
        dk += _dot(ds, q, SPEC)
    start = (batch * keys * heads + head) * SPEC.head_dim
    _store_rows(dk_ptr + start, key, keys, heads * SPEC.head_dim, dk * scales[0], SPEC)
    _store_rows(dv_ptr + start, key, keys, heads * SPEC.head_dim, dv, SPEC)


@triton.jit
def _attention_bwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, strides, bias_strides,
    scales, heads, queries, keys, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv and δ of one head whose keys are one tile, in a loop over the queries."""
    BLOCK_D: tl.constexpr = SPEC.block_d
    batch, head, plane, _ = _locate(1, heads)
    q_ptr = _at_head(q_ptr, strides[0], batch, head)
    dout_ptr = _at_head(dout_ptr, strides[3], batch, head)
    frame = _frame(bias_ptr, bias_strides, batch, head, queries, keys, scales)
    lse_ptr += plane * 2 * queries
    delta_ptr += plane * queries
    dq_ptr += (batch * queries * heads + head) * SPEC.head_dim
    key = tl.arange(0, BLOCK_KV)
    k = _load_rows(_at_head(k_ptr, strides[1], batch, head), key, keys, strides[1][1], True, SPEC)
    v = _load_rows(_at_head(v_ptr, strides[2], batch, head), key, keys, strides[2][1], True, SPEC)
    dk = tl.zeros([BLOCK_KV, BLOCK_D], SPEC.accumulator)
    dv = tl.zeros([BLOCK_KV, BLOCK_D], SPEC.accumulator)
    for first in range(0, queries, BLOCK_Q):
        row = first + tl.arange(0, BLOCK_Q)
        q = _load_rows(q_ptr, row, queries, strides[0][1], True, SPEC)
        lse = _load_lse(lse_ptr, row, queries)
        p = _probabilities_transposed(k, q, lse, row, key, frame, True, SPEC)
        dout = _load_rows(dout_ptr, row, queries, strides[3][1], True, SPEC)
        dv += _dot(p, dout, SPEC)
        dp = _dot(v, tl.trans(dout), SPEC)
        delta = tl.sum(p * dp, axis=0)
        tl.store(delta_ptr + row, delta, mask=row < queries)
        ds = p * (dp - delta[None, :])
        dk += _dot(ds, q, SPEC)
        dq = _dot(tl.trans(ds), k, SPEC)
        _store_rows(dq_ptr, row, queries, heads * SPEC.head_dim, dq * scales[0], SPEC)
    start = (batch * keys * heads + head) * SPEC.head_dim
    _store_rows(dk_ptr + start, key, keys, heads * SPEC.head_dim, dk * scales[0], SPEC)
    _store_rows(dv_ptr + start, key, keys, heads * SPEC.head_dim, dv, SPEC)


@triton.jit
def _attention_bwd_bias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, dout_ptr, lse_ptr, delta_ptr, dbias_ptr, strides, bias_strides,
    scales, heads, queries, keys, bias_batch, bias_heads, bias_queries, shared, splits, query_blocks, key_blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, SUM_QUERIES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """One tile of the bias's gradient, summed over a part of what shares it.

    ``shared`` is (images, heads, query tiles) over which the bias broadcasts; dbias (splits, bias batch, bias heads,
    bias queries, Nkv).
    """
    index = tl.program_id(0)
    key = index % key_blocks * BLOCK_KV + tl.arange(0, BLOCK_KV)
    own_block = index // key_blocks % query_blocks
    plane = index // (key_blocks * query_blocks) % (bias_batch * bias_heads)
    split = index // (key_blocks * query_blocks * bias_batch * bias_heads)
    parts = shared[0] * shared[1] * shared[2]
    share = tl.cdiv(parts, splits)
    acc = tl.zeros([BLOCK_Q, BLOCK_KV], SPEC.accumulator)
    for part in range(split * share, tl.minimum(split * share + share, parts)):
        batch = (plane // bias_heads + part // (shared[1] * shared[2])).to(tl.int64)
        head = (plane % bias_heads + part // shared[2] % shared[1]).to(tl.int64)
        row = (own_block + part % shared[2]) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q = _load_rows(_at_head(q_ptr, strides[0], batch, head), row, queries, strides[0][1], True, SPEC)
        k = _load_rows(_at_head(k_ptr, strides[1], batch, head), key, keys, strides[1][1], True, SPEC)
        frame = _frame(bias_ptr, bias_strides, batch, head, queries, keys, scales)
        scores, factor = _scores(q, tl.trans(k), row[:, None], key[None, :], frame, False, SPEC)
        lse = _load_lse(lse_ptr + (batch * heads + head) * 2 * queries, row, queries)
        p = tl.exp2(scores * factor - lse[0][:, None] - lse[1][:, None])
        v = _load_rows(_at_head(v_ptr, strides[2], batch, head), key, keys, strides[2][1], True, SPEC)
        dout = _load_rows(
            _at_head(dout_ptr, strides[3], batch, head), row, queries, strides[3][1], True, SPEC
        )
        delta = tl.load(delta_ptr + (batch * heads + head) * queries + row, mask=row < queries, other=0.0)
        acc += p * (_dot(dout, tl.trans(v), SPEC) - delta[:, None])
    dbias_ptr += (split * bias_batch * bias_heads + plane).to(tl.int64) * bias_queries * keys
    if SUM_QUERIES:
        tl.store(dbias_ptr + key, tl.sum(acc, axis=0).to(dbias_ptr.dtype.element_ty), mask=key < keys)
    else:
        row = own_block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        mask = (row < queries)[:, None] & (key < keys)[None, :]
        tl.store(
            dbias_ptr + row[:, None] * keys + key[None, :], acc.to(dbias_ptr.dtype.element_ty), mask=mask
        )  # fmt: skip


# Launch configurations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel cuts its work.

    Attributes:
        block_q: Queries of a tile.
        block_kv: Keys of a tile; the widest one in the forward that holds all keys.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline of loads.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Triton's options of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# By generation, bytes per element and padded head dimension. "80" is every chip whose tensor cores take their operands
# from registers (sm_80, sm_86, sm_89, sm_120), "90" those that take them from shared memory (sm_90, sm_100): there, 64
# rows per 4 warps are one instruction, and registers are left for wider tiles. float32 products run without
# tensor cores unless TF32 is allowed, and hold their operands in registers: small tiles, many warps.
#
# Chosen by what the compiler makes of them. For CvT (D = 64) nothing spills on sm_80, sm_90 and sm_100
# (tests/test_aot.py). Elsewhere little does, and mostly with a bias or at D = 128. Where
# there was a choice, two programs or more fit on a multiprocessor. None has been timed on a GPU yet.
CONFIGS: dict[tuple[int, int, int], dict[str, LaunchConfig]] = {
    (80, 2, 64): {
        "fwd": LaunchConfig(64, 128, num_warps=4, num_stages=2),
        "fwd_loop": LaunchConfig(128, 64, num_warps=8, num_stages=3),
        "bwd": LaunchConfig(32, 64, num_warps=4, num_stages=2),
        "bwd_dq": LaunchConfig(64, 32, num_warps=4, num_stages=2),
        "bwd_dkdv": LaunchConfig(32, 64, num_warps=4, num_stages=2),
        "bwd_bias": LaunchConfig(32, 64, num_warps=4, num_stages=2),
    },
    (80, 2, 128): {
        "fwd": LaunchConfig(64, 64, num_warps=8, num_stages=2),
        "fwd_loop": LaunchConfig(32, 32, num_warps=4, num_stages=1),
        "bwd": LaunchConfig(32, 64, num_warps=8, num_stages=1),
        "bwd_dq": LaunchConfig(32, 32, num_warps=8, num_stages=1),
        "bwd_dkdv": LaunchConfig(32, 64, num_warps=8, num_stages=1),
        "bwd_bias": LaunchConfig(64, 32, num_warps=8, num_stages=1),
    },
    (90, 2, 64): {
        "fwd": LaunchConfig(64, 128, num_warps=4, num_stages=2),
        "fwd_loop": LaunchConfig(128, 64, num_warps=8, num_stages=3),
        "bwd": LaunchConfig(32, 64, num_warps=4, num_stages=2),
        "bwd_dq": LaunchConfig(128, 64, num_warps=8, num_stages=2),
        "bwd_dkdv": LaunchConfig(64, 64, num_warps=4, num_stages=2),
        "bwd_bias": LaunchConfig(64, 64, num_warps=8, num_stages=2),
    },
    (90, 2, 128): {
        "fwd": LaunchConfig(64, 64, num_warps=8, num_stages=2),
        "fwd_loop": LaunchConfig(64, 64, num_warps=8, num_stages=2),
        "bwd": LaunchConfig(32, 64, num_warps=8, num_stages=1),
        "bwd_dq": LaunchConfig(64, 64, num_warps=8, num_stages=1),
        "bwd_dkdv": LaunchConfig(64, 64, num_warps=8, num_stages=1),
        "bwd_bias": LaunchConfig(64, 64, num_warps=8, num_stages=1),
    },
}
_FLOAT32: dict[int, dict[str, LaunchConfig]] = {
    64: {
        "fwd": LaunchConfig(32, 64, num_warps=8, num_stages=1),
        "fwd_loop": LaunchConfig(32, 32, num_warps=8, num_stages=2),
        "bwd": LaunchConfig(16, 64, num_warps=8, num_stages=1),
        "bwd_dq": LaunchConfig(32, 32, num_warps=8, num_stages=2),
        "bwd_dkdv": LaunchConfig(32, 32, num_warps=8, num_stages=1),
        "bwd_bias": LaunchConfig(32, 32, num_warps=8, num_stages=1),
    },
    128: {
        "fwd": LaunchConfig(16, 64, num_warps=8, num_stages=1),
        "fwd_loop": LaunchConfig(16, 32, num_warps=8, num_stages=1),
        "bwd": LaunchConfig(16, 32, num_warps=8, num_stages=1),
        "bwd_dq": LaunchConfig(16, 32, num_warps=8, num_stages=1),
        "bwd_dkdv": LaunchConfig(32, 32, num_warps=8, num_stages=1),
        "bwd_bias": LaunchConfig(16, 32, num_warps=4, num_stages=1),
    },
}
CONFIGS |= {(generation, 4, d): kernels for generation in (80, 90) for d, kernels in _FLOAT32.items()}
CONFIGS |= {(100, *key): kernels for (generation, *key), kernels in list(CONFIGS.items()) if generation == 90}
# With 64 keys it takes 126 to 132 registers, where two programs need 128, or spills, depending on the tail.
CONFIGS[100, 2, 64] = CONFIGS[90, 2, 64] | {"fwd_loop": LaunchConfig(128, 32, num_warps=8, num_stages=3)}

_MAX_HEAD_DIM = 128
#: Programs of a forward beyond which one takes several tiles of queries, which saves loads of keys and values: some
#: waves of what a GPU of 132 multiprocessors holds, lest the last wave leave it idle.
_FWD_PROGRAMS = 2048
#: Programs of the bias's gradient up to which what shares the bias is split; each split writes its own sum.
_BIAS_PROGRAMS = 512


def configuration(kernel: str, head_dim: int, element_size: int, capability: int) -> LaunchConfig:
    """The configuration of a kernel on a chip of compute capability ``capability`` (90 for sm_90)."""
    generation = 80 if capability < 90 or capability >= 120 else min(capability // 10 * 10, 100)
    return CONFIGS[generation, min(element_size, 4), 64 if head_dim <= 64 else 128][kernel]


def keys_on_chip(head_dim: int, element_size: int, bias: bool) -> int:
    """The most keys whose scores the forward keeps in registers at once; more would spill."""
    if head_dim > 64 or element_size > 2:
        return 64
    return 128 if bias else 208


def key_tiles(keys: int, widest: int) -> tuple[tuple[int, int], ...]:
    """(First key, width) of tiles of powers of two from 16 to ``widest``; fewer than 16 keys are wasted."""
    tiles: list[tuple[int, int]] = []
    first = 0
    while first < keys:
        left = keys - first
        width = _padded(left)
        if width - left >= 16:
            width //= 2
        width = min(width, widest)
        tiles.append((first, width))
        first += width
    return tuple(tiles)


def _padded(size: int) -> int:
    """The smallest width of a tile that holds ``size``: ``tl.dot`` wants a power of two of at least 16."""
    return max(triton.next_power_of_2(size), 16)


def _tail(keys: int, block_kv: int, element_size: int) -> int:
    """Width of the last tile after as many whole ones as there are; 0 for none.

    In float32 as wide as the others, which makes it one of the loop: code of its own would double the registers.
    """
    if keys % block_kv == 0:
        return 0
    return _padded(keys % block_kv) if element_size == 2 else block_kv


# Launchers ------------------------------------------------------------------------------------------------


def _readable(x: Tensor) -> Tensor:
    """``x`` (B, N, h, D) itself if its last dimension is adjacent, whatever the other strides; else a copy."""
    return x if (x.stride(3) == 1 or x.shape[3] == 1) and _reach(x, 3) < 2**31 else x.contiguous()


def _readable_bias(bias: Tensor) -> Tensor:
    """``bias`` itself with whatever strides, unless a head's would not fit 32 bits."""
    return bias if _reach(bias, 2) < 2**31 else bias.contiguous()


def _reach(x: Tensor, dims: int) -> int:
    """Offset of the last element within the last ``dims`` dimensions."""
    return sum((n - 1) * stride for n, stride in zip(x.shape[-dims:], x.stride()[-dims:], strict=True))


_ELEMENTS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _spec(q: Tensor, bias: Tensor | None, scale: float) -> Spec:
    element = _ELEMENTS[q.dtype]
    upcast = machine.INTERPRETING and q.dtype == torch.bfloat16
    tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return Spec(
        head_dim=q.shape[3],
        block_d=_padded(q.shape[3]),
        bias=bias is not None,
        negative=scale < 0,
        element=element,
        operand=tl.float32 if upcast else element,
        accumulator=tl.float64 if q.dtype == torch.float64 else tl.float32,
        precision="tf32" if tf32 else "ieee",
    )


def _accumulator(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _scales(scale: float) -> tuple[float, float]:
    """The scale, and what turns scores into powers of two: never 0, which would turn a masked key's −∞ into NaN."""
    return scale, max(abs(scale) * _LOG2E.value, torch.finfo(torch.float32).tiny)


def _configure(kernel: str, q: Tensor) -> LaunchConfig:
    return configuration(kernel, q.shape[3], q.element_size(), machine.chip(q.device).capability)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, config: Any, **constants: Any) -> None:
    named = dict(zip(kernel.arg_names, args, strict=False))
    machine.launch(kernel, grid, args[0], config.options, **named, **constants)


class Call(NamedTuple):
    """What all launches of one call share, as they take it.

    Attributes:
        tensors: q, k, v and the bias, all readable; without a bias, anything.
        numbers: Strides, bias strides, scales, heads, Nq and Nkv.
        spec: SPEC of the kernels.
    """

    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]
    spec: Spec

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dout: Tensor | None = None
    ) -> Call:
        """Copies what is not readable, but for ``dout``, which has to be."""
        q, k, v = (_readable(t) for t in (q, k, v))
        batch, queries, heads, _ = q.shape
        keys = k.shape[1]
        strides = tuple(t.stride()[:3] for t in (q, k, v, dout) if t is not None)
        bias_strides = (0, 0, 0, 0)
        if bias is not None:
            bias = _readable_bias(bias)
            bias_strides = bias.expand(batch, heads, queries, keys).stride()
        numbers = strides, bias_strides, _scales(scale), heads, queries, keys
        return cls((q, k, v, q if bias is None else bias), numbers, _spec(q, bias, scale))


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The output (B, Nq, h, D) and ``lse`` (B, h, 2, Nq)."""
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(batch, heads, 2, queries, dtype=_accumulator(q))
    call = Call.of(q, k, v, bias, scale)
    on_chip = keys <= keys_on_chip(head_dim, q.element_size(), bias is not None)
    config = _configure("fwd" if on_chip else "fwd_loop", q)
    blocks = -(-queries // config.block_q)
    if on_chip:
        wanted = min(blocks, -(-_FWD_PROGRAMS // (batch * heads)))
        rows = -(-blocks // wanted) * config.block_q
        blocks = -(-queries // rows)
        _launch(
            _attention_fwd_kernel, (batch * heads * blocks,), *call.tensors, out, lse, *call.numbers, blocks, rows,
            BLOCK_Q=config.block_q, TILES=key_tiles(keys, config.block_kv), SPEC=call.spec, config=config,
        )  # fmt: skip
    else:
        _launch(
            _attention_fwd_loop_kernel, (batch * heads * blocks,), *call.tensors, out, lse, *call.numbers, blocks,
            BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv, TAIL=_tail(keys, config.block_kv, q.element_size()), SPEC=call.spec,
            config=config,
        )  # fmt: skip
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor, scale: float,
    *, need_kv: bool = True, need_bias: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of q, k, v and the bias, contiguous; None instead of one that is neither needed nor free."""
    dout = _readable(dout)
    call = Call.of(q, k, v, bias, scale, dout)
    batch, queries, heads, _ = q.shape
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    delta = lse.new_empty(batch, heads, queries)
    if k.shape[1] <= _configure("bwd", q).block_kv:
        _backward_at_once(call, dout, lse, delta, dq, dk, dv)
    else:
        _backward_queries(call, out, dout, lse, delta, dq)
        if need_kv:
            _backward_keys(call, dout, lse, delta, dk, dv)
        else:
            dk = dv = None
    dbias = _backward_bias(call, bias, dout, lse, delta) if need_bias and bias is not None else None
    return dq, dk, dv, dbias


def _backward_at_once(
    call: Call, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    batch, keys, heads, _ = dk.shape
    config = _configure("bwd", dq)
    _launch(
        _attention_bwd_kernel, (batch * heads,), *call.tensors, dout, lse, delta, dq, dk, dv, *call.numbers,
        BLOCK_Q=config.block_q, BLOCK_KV=_padded(keys), SPEC=call.spec, config=config,
    )  # fmt: skip


def _backward_queries(call: Call, out: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor) -> None:
    batch, queries, heads, _ = dq.shape
    config = _configure("bwd_dq", dq)
    blocks = -(-queries // config.block_q)
    _launch(
        _attention_bwd_dq_kernel, (batch * heads * blocks,), *call.tensors, out, dout, lse, delta, dq,
        *call.numbers, blocks, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv,
        TAIL=_tail(call.tensors[1].shape[1], config.block_kv, dq.element_size()), SPEC=call.spec, config=config,
    )  # fmt: skip


def _backward_keys(call: Call, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor) -> None:
    batch, keys, heads, _ = dk.shape
    config = _configure("bwd_dkdv", dk)
    blocks = -(-keys // config.block_kv)
    _launch(
        _attention_bwd_dkdv_kernel, (batch * heads * blocks,), *call.tensors, dout, lse, delta, dk, dv,
        *call.numbers, blocks, BLOCK_Q=config.block_q, BLOCK_KV=config.block_kv, SPEC=call.spec, config=config,
    )  # fmt: skip


def _backward_bias(call: Call, bias: Tensor, dout: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of the bias in its shape; what broadcasts is summed in a fixed order."""
    q, k = call.tensors[:2]
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    sizes = [1] * (4 - bias.ndim) + list(bias.shape)
    if sizes[3] < keys:  # it shifts all scores of a row alike, which the softmax does not notice
        return torch.zeros_like(bias, memory_format=torch.contiguous_format)
    config = _configure("bwd_bias", q)
    key_blocks, query_blocks = -(-keys // config.block_kv), -(-queries // config.block_q)
    own_query_blocks = 1 if sizes[2] < queries else query_blocks
    shared = (batch // sizes[0], heads // sizes[1], query_blocks // own_query_blocks)
    tiles = sizes[0] * sizes[1] * own_query_blocks * key_blocks
    splits = min(-(-_BIAS_PROGRAMS // tiles), shared[0] * shared[1] * shared[2])
    dbias = bias.new_empty(splits, *sizes, dtype=bias.dtype if splits == 1 else _accumulator(q))
    _launch(
        _attention_bwd_bias_kernel, (splits * tiles,), *call.tensors, dout, lse, delta, dbias, *call.numbers,
        *sizes[:3], shared, splits, own_query_blocks, key_blocks, BLOCK_Q=config.block_q,
        BLOCK_KV=config.block_kv, SUM_QUERIES=sizes[2] < queries, SPEC=call.spec, config=config,
    )  # fmt: skip
    return (dbias[0] if splits == 1 else dbias.sum(0).to(bias.dtype)).view(bias.shape)


# Autograd and torch.compile -------------------------------------------------------------------------------
#
# In eager mode the autograd function is called directly; a registered operator would cost more host time per call.
# Under torch.compile the same launchers run behind opaque operators.


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """Saves everything it was given, the output and ``lse``."""
        out, lse = forward(q, k, v, bias, scale)
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """See the head of this file."""
        _, need_k, need_v, need_bias, _ = ctx.needs_input_grad
        q, k, v, bias, out, lse = ctx.saved_tensors
        gradients = backward(
            q, k, v, bias, out, lse, dout, ctx.scale, need_kv=need_k or need_v, need_bias=need_bias
        )
        return *gradients, None


@torch.library.custom_op("cvt_kernels::attention", mutates_args=())
def _forward_op(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return forward(q, k, v, bias, scale)


@_forward_op.register_fake
def _(q, k, v, bias, scale):
    batch, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(batch, heads, 2, queries, dtype=_accumulator(q))


@torch.library.custom_op("cvt_kernels::attention_backward", mutates_args=())
def _backward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor, scale: float,
    need_bias: bool,
) -> list[Tensor]:  # fmt: skip
    gradients = backward(q, k, v, bias, out, lse, dout, scale, need_bias=need_bias)
    return [gradient for gradient in gradients if gradient is not None]


@_backward_op.register_fake
def _(q, k, v, bias, out, lse, dout, scale, need_bias):
    return [t.new_empty(t.shape) for t in (q, k, v, *([bias] if need_bias else []))]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, bias, *output)


def _backward_of_op(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    need_bias = ctx.needs_input_grad[3]
    gradients = _backward_op(*ctx.saved_tensors, dout, ctx.scale, need_bias)
    return *gradients, *([] if need_bias else [None]), None


_forward_op.register_autograd(_backward_of_op, setup_context=_setup_context)


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    if dropout_p > 0:
        return "dropout of the probabilities is not supported"
    if batch == 0:
        return "the batch is empty"
    if head_dim > _MAX_HEAD_DIM:
        return f"heads have {head_dim} channels, more than {_MAX_HEAD_DIM}"
    if q.is_cuda and q.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if max(queries, keys) * heads * head_dim >= 2**31:
        return "one image has 2³¹ elements or more"
    if bias is not None and queries * keys >= 2**31:
        return "one head's bias has 2³¹ elements or more"
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """As ``cvt_kernels.attention``, whose checks it relies on.

    q, k and v are read as they lie if their last dimension is adjacent, whatever the other strides; otherwise they are
    copied first. Under autocast it computes in autocast's dtype, as ``F.scaled_dot_product_attention`` does; the bias
    keeps its own.
    """
    if scale is None:
        scale = q.shape[3] ** -0.5
    if checks.autocast_enabled(q) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if torch.compiler.is_compiling():
        return _forward_op(q, k, v, bias, scale)[0]
    return _Attention.apply(q, k, v, bias, scale)
