"""The forward kernels of attention, which write the output and, where gradients are needed, ``stats``.

Keys are cut into tiles whose widths add up to little more than Nkv, and the softmax is rescaled as larger
scores turn up:

- as many keys as fit on the chip (``keys_on_chip``): into powers of two, 196 ≤ 128 + 64 + 16 and 50 ≤ 64. K
  and V are loaded once per program, which goes over several tiles of queries.
- beyond: a masked tile for the last keys, as narrow as fits, and whole ones, unmasked: 784 = 16 + 12 · 64.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import launching
from ...graph_operators import launcher
from ...triton_launch import accumulator_dtype, grid_dependency_synchronize, padded
from .common import (
    configuration_for,
    contiguous_rows,
    dot,
    head_at,
    launch_arguments,
    load_rows,
    locate,
    rows_from,
    scores_of,
    store_rows,
    tail_width,
)

# Tiles of keys --------------------------------------------------------------------------------------------

#: Programs per multiprocessor beyond which one takes several tiles of queries, which saves loads of keys and
#: values: two waves and more, of three to six programs each.
ENOUGH_PROGRAMS = 8


class KeyTiles(NamedTuple):
    """The tiles that hold all keys: the first key of each, and its width."""

    firsts: tuple[int, ...]
    widths: tuple[int, ...]


def keys_on_chip(head_dim: int, element_size: int) -> int:
    """Returns the most keys that the forward keeps on the chip."""
    return 64 if head_dim > 64 or element_size > 2 else 208


def key_tiles(keys: int, widest: int) -> KeyTiles:
    """Returns tiles for all keys, powers of two from 16 to ``widest``; they waste fewer than 16 keys."""
    widths: list[int] = []
    left = keys
    while left > 0:
        width = padded(left)
        if width - left >= 16:
            width //= 2
        widths.append(min(width, widest))
        left -= widths[-1]
    return KeyTiles(firsts=tuple(accumulate(widths[:-1], initial=0)), widths=tuple(widths))


# Softmax --------------------------------------------------------------------------------------------------

#: The least maximum of a row, float32's: while all scores are −∞, −∞ − −∞ would be NaN.
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _empty_softmax(BLOCK_Q: tl.constexpr, SPEC: tl.constexpr):
    """Returns the maximum, sum and output of rows that have met no key yet."""
    BLOCK_D: tl.constexpr = SPEC.block_d
    maximum = tl.full([BLOCK_Q], _LOWEST, SPEC.accumulator)
    total = tl.zeros([BLOCK_Q], SPEC.accumulator)
    return maximum, total, tl.zeros([BLOCK_Q, BLOCK_D], SPEC.accumulator)


@triton.jit
def _take_tile(maximum, total, acc, scores, factor, v, IS_FIRST: tl.constexpr, SPEC: tl.constexpr):
    """Takes a tile's scores, as ``scores_of`` returns them, and values into the maximum, sum and output."""
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * factor)
    p = tl.exp2(scores * factor - new_maximum[:, None])
    if IS_FIRST:
        return new_maximum, tl.sum(p, axis=1), dot(p, v, SPEC)
    shrink = tl.exp2(maximum - new_maximum)
    return new_maximum, total * shrink + tl.sum(p, axis=1), acc * shrink[:, None] + dot(p, v, SPEC)


@triton.jit
def _store_softmax(out, stats_ptr, row, maximum, total, acc, STORE_STATS: tl.constexpr, SPEC: tl.constexpr):
    """Stores normalized rows and, if asked, their ``stats``."""
    reciprocal = 1.0 / total
    store_rows(out, row, acc * reciprocal[:, None], SPEC)
    if STORE_STATS:
        tl.store(stats_ptr + row, maximum, mask=row < out.count)
        tl.store(stats_ptr + out.count + row, reciprocal, mask=row < out.count)


# Keys on the chip -----------------------------------------------------------------------------------------


@triton.jit
def _keys_of_tile(TILES: tl.constexpr, INDEX: tl.constexpr):
    return TILES.firsts[INDEX] + tl.arange(0, TILES.widths[INDEX])


@triton.jit
def _load_tile(rows, TILES: tl.constexpr, INDEX: tl.constexpr, SPEC: tl.constexpr):
    return load_rows(rows, _keys_of_tile(TILES, INDEX), len(TILES.widths) == INDEX + 1, SPEC)


@triton.jit
def _scores_of_tile(q, k, head, TILES: tl.constexpr, INDEX: tl.constexpr, SPEC: tl.constexpr):
    """Returns scores as ``scores_of``; only the last 16 keys of the last tile may be beyond the last key."""
    key = _keys_of_tile(TILES, INDEX)
    scores = scores_of(q, tl.trans(k), key[None, :], head, False, SPEC)
    if len(TILES.widths) == INDEX + 1:
        is_certain = tl.arange(0, TILES.widths[INDEX]) < TILES.widths[INDEX] - 16  # known to the compiler
        scores = tl.where((is_certain | (key < head.k.count))[None, :], scores, float("-inf"))
    return scores


@triton.jit(do_not_specialize=["blocks", "rows"])
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr,
    strides, scale, log2_scale, heads, queries, keys, blocks, rows,
    BLOCK_Q: tl.constexpr, TILES: tl.constexpr, STORE_STATS: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes ``rows`` queries of one head over all its keys, KeyTiles that stay on the chip."""
    grid_dependency_synchronize()
    place = locate(blocks, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, strides, log2_scale, queries, keys, SPEC)
    out = contiguous_rows(out_ptr, place, queries, heads, SPEC)
    stats_ptr += place.plane * 2 * queries
    ks, vs = (), ()
    for i in tl.static_range(len(TILES.widths)):
        ks = ks + (_load_tile(head.k, TILES, i, SPEC),)
        vs = vs + (_load_tile(head.v, TILES, i, SPEC),)
    start = place.block * rows
    for first in range(start, tl.minimum(start + rows, queries), BLOCK_Q):
        q = load_rows(rows_from(head.q, first), tl.arange(0, BLOCK_Q), True, SPEC)
        row = first + tl.arange(0, BLOCK_Q)
        maximum, total, acc = _empty_softmax(BLOCK_Q, SPEC)
        for i in tl.static_range(len(TILES.widths)):
            scores = _scores_of_tile(q, ks[i], head, TILES, i, SPEC)
            maximum, total, acc = _take_tile(maximum, total, acc, scores, log2_scale, vs[i], i == 0, SPEC)
        _store_softmax(out, stats_ptr, row, maximum, total, acc, STORE_STATS, SPEC)


# Keys in a loop -------------------------------------------------------------------------------------------


@triton.jit
def _loop_step(
    maximum, total, acc, q, first, head,
    WIDTH: tl.constexpr, MASKED: tl.constexpr, IS_FIRST: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Loads the tile of keys that begins at ``first`` and takes it into the maximum, sum and output."""
    key = first + tl.arange(0, WIDTH)
    k = load_rows(head.k, key, MASKED, SPEC)
    scores = scores_of(q, tl.trans(k), key[None, :], head, MASKED, SPEC)
    v = load_rows(head.v, key, MASKED, SPEC)
    return _take_tile(maximum, total, acc, scores, head.log2_scale, v, IS_FIRST, SPEC)


@triton.jit(do_not_specialize=["blocks"])
def _attention_fwd_loop_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stats_ptr,
    strides, scale, log2_scale, heads, queries, keys, blocks,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL: tl.constexpr, STORE_STATS: tl.constexpr,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Computes one tile of queries over the last keys, of width TAIL (0: none), then whole tiles in a loop.

    A last tile as wide as the others joins the loop, masked.
    """
    grid_dependency_synchronize()
    place = locate(blocks, heads)
    head = head_at(place, q_ptr, k_ptr, v_ptr, strides, log2_scale, queries, keys, SPEC)
    row = place.block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q = load_rows(head.q, row, True, SPEC)
    maximum, total, acc = _empty_softmax(BLOCK_Q, SPEC)
    MASKED: tl.constexpr = TAIL == BLOCK_KV
    whole = keys // BLOCK_KV * BLOCK_KV
    if TAIL and not MASKED:
        maximum, total, acc = _loop_step(maximum, total, acc, q, whole, head, TAIL, True, True, SPEC)
    for first in range(0, keys if MASKED else whole, BLOCK_KV):
        maximum, total, acc = _loop_step(maximum, total, acc, q, first, head, BLOCK_KV, MASKED, False, SPEC)
    out = contiguous_rows(out_ptr, place, queries, heads, SPEC)
    stats_ptr += place.plane * 2 * queries
    _store_softmax(out, stats_ptr, row, maximum, total, acc, STORE_STATS, SPEC)


# The launch of a forward ----------------------------------------------------------------------------------
#
# Where a graph has convolutions, Inductor lays out what has four dimensions and is saved for the backward as
# images with channels last, by a copy. So tokens are (B, T, heads · D), and statistics (B · heads, 2, T).


def merged(tensor: Tensor) -> Tensor:
    """Returns (B, T, heads, D) as (B, T, heads · D), unless that would be a copy."""
    _, _, heads, dim = tensor.shape
    return tensor.flatten(2) if heads == 1 or tensor.stride(2) == dim * tensor.stride(3) else tensor


def divided(tensor: Tensor, heads: int) -> Tensor:
    """Returns what :func:`merged` took."""
    return tensor if tensor.ndim == 4 else tensor.unflatten(2, (heads, -1))


def _results_like(
    q: Tensor, k: Any, v: Any, scale: float, heads: int, need_stats: bool
) -> tuple[Tensor, Tensor]:
    batch, queries = q.shape[:2]
    shape = (batch * heads, 2, queries) if need_stats else (0,)
    channels = q.shape[2] if q.ndim == 3 else heads * q.shape[3]
    return q.new_empty(batch, queries, channels), q.new_empty(shape, dtype=accumulator_dtype(q))


@launcher("attention", _results_like)
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, heads: int, need_stats: bool
) -> tuple[Tensor, Tensor]:
    """Returns the output (B, Nq, heads · D) and ``stats`` (B · heads, 2, Nq), empty if not needed.

    q, k and v are as :func:`merged` returns them; the scale is not negative.
    """
    out, stats = _results_like(q, k, v, scale, heads, need_stats)
    q, k, v = (divided(each, heads) for each in (q, k, v))
    arguments = launch_arguments(q, k, v, scale)
    (batch, queries, _, head_dim), keys, size = q.shape, k.shape[1], q.element_size()
    kernel: Any = _attention_fwd_loop_kernel
    if keys <= keys_on_chip(head_dim, size):
        kernel, config = _attention_fwd_kernel, configuration_for("fwd", q)
        tiles = -(-queries // config.block_q)
        enough = ENOUGH_PROGRAMS * launching.chip(q.device).multiprocessors
        rows = -(-tiles // min(tiles, -(-enough // (batch * heads)))) * config.block_q
        blocks = -(-queries // rows)
        settings = {"rows": rows, "TILES": key_tiles(keys, config.block_kv)}
    else:
        config = configuration_for("fwd_loop", q)
        blocks = -(-queries // config.block_q)
        settings = {"BLOCK_KV": config.block_kv, "TAIL": tail_width(keys, config.block_kv, size)}
    launching.launch(
        kernel, (batch * heads * blocks,), on=q, options=config.options, **arguments, out_ptr=out,
        stats_ptr=stats if need_stats else out, STORE_STATS=need_stats, blocks=blocks,
        BLOCK_Q=config.block_q, **settings,
    )  # fmt: skip
    return out, stats
