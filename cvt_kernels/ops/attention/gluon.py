"""The gradients of keys and values on sm_90, in Gluon, for heads of 64 channels in 16 bits.

A program has 128 keys of a head and goes over its queries, 64 at a time. One warp loads their q and dout by
TMA into a ring of buffers. Two consumers of four warps have 64 keys each, and the sums of dk and dv in
registers:

    loader      │ q, dout of tile 0 │ of tile 1 │ of tile 2 │ …
    consumer 0  │ s, dp │ p │ dv │ ds │ dk │ s, dp │ …            keys 0 to 63
    consumer 1  │    s, dp │ p │ dv │ ds │ dk │ s, dp │ …         keys 64 to 127

A consumer starts both products that need no probabilities, s = k qᵀ and dp = v doutᵀ, before it waits for the
first of them. So dp is multiplied while p is computed, and dv while ds is. After dk of a tile it waits for
all, since the assembler serializes products that are under way from one turn of the loop to the next. What
one consumer leaves of the tensor cores is for the other.

The last tile of queries ends with the last query, so that none is loaded from another image: those that it
shares with the tile before get probabilities of 0, by a maximum of ∞. Keys beyond the last one are whatever
lies there; their gradients are not stored.

Bytes per launch as in ``triton``. No atomics; every sum has a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ... import launching
from ..triton_launch import grid_dependency_synchronize
from .triton.common import configuration_for

_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.9 renamed it

#: Channels of a head, keys of a consumer, queries of a tile: 64 numbers are 128 bytes, the widest swizzle.
_WIDTH = 64
_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class StreamSpec(NamedTuple):
    """The compile-time constants of the kernel.

    Attributes:
        width: Keys of a consumer, queries of a tile and channels of a head.
        stages: Buffers of the ring.
        is_negative: Whether the scale is negative.
    """

    width: int
    stages: int
    is_negative: bool


# Kernel ---------------------------------------------------------------------------------------------------


@gluon.jit
def _first_of_tile(tile, queries, SPEC: gl.constexpr):
    """Returns the first query of a tile; the last tile ends with the last query."""
    return gl.minimum(tile * SPEC.width, queries - SPEC.width)


@gluon.jit
def _load_tiles(
    q, k, v, dout, place, queries, keys, k_tiles, v_tiles, q_ring, dout_ring, ready, full, empty,
    SPEC: gl.constexpr,
):  # fmt: skip
    """Loads the program's keys and values, and each tile of queries as soon as its buffers are empty."""
    image, head, block = place
    column = head * SPEC.width
    mbarrier.expect(ready.index(0), 4 * SPEC.width * SPEC.width * 2)
    for consumer in gl.static_range(2):
        key = image * keys + (2 * block + consumer) * SPEC.width
        _load_box(k, [key, column], ready.index(0), k_tiles.index(consumer))
        _load_box(v, [key, column], ready.index(0), v_tiles.index(consumer))
    stage = 0
    phase = 1  # all buffers are empty
    for tile in range(gl.cdiv(queries, SPEC.width)):
        row = image * queries + _first_of_tile(tile, queries, SPEC)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), 2 * SPEC.width * SPEC.width * 2)
        _load_box(q, [row, column], full.index(stage), q_ring.index(stage))
        _load_box(dout, [row, column], full.index(stage), dout_ring.index(stage))
        stage += 1
        if stage == SPEC.stages:
            stage = 0
            phase ^= 1


@gluon.jit
def _store_keys(ptr, values, first, keys, token_stride, MMA: gl.constexpr, SPEC: gl.constexpr):
    """Writes gradients of the keys from ``first`` on, each a token apart."""
    key = first + gl.arange(0, SPEC.width, layout=gl.SliceLayout(1, MMA))
    channel = gl.arange(0, SPEC.width, layout=gl.SliceLayout(0, MMA))
    ptrs = ptr + key.expand_dims(1) * token_stride + channel.expand_dims(0)
    gl.store(ptrs, values.to(ptr.dtype.element_ty), mask=(key < keys).expand_dims(1))


@gluon.jit
def _consume(
    INDEX: gl.constexpr, stats_ptr, delta_ptr, dk_ptr, dv_ptr, scale, factor, place, heads, queries, keys,
    k_tiles, v_tiles, q_ring, dout_ring, ready, full, empty, SPEC: gl.constexpr,
):  # fmt: skip
    """Computes dk and dv of one half of the program's keys."""
    WIDTH: gl.constexpr = SPEC.width
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SPEC.width, 16]
    )
    QUERY: gl.constexpr = gl.SliceLayout(0, MMA)
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    image, head, block = place
    first_key = (2 * block + INDEX) * SPEC.width
    tiles = gl.cdiv(queries, SPEC.width)
    if first_key >= keys:  # the other consumer has the last keys
        for tile in range(tiles):
            mbarrier.wait(full.index(tile % SPEC.stages), (tile // SPEC.stages) & 1)
            mbarrier.arrive(empty.index(tile % SPEC.stages), count=1)
    else:
        plane = (image * heads + head).to(gl.int64)
        stats_ptr += plane * 2 * queries
        delta_ptr += plane * queries
        zeros = gl.zeros([WIDTH, WIDTH], gl.float32, MMA)
        dk = zeros
        dv = zeros
        k = k_tiles.index(INDEX)
        v = v_tiles.index(INDEX)
        mbarrier.wait(ready.index(0), 0)
        for tile in range(tiles):
            stage = tile % SPEC.stages
            query = _first_of_tile(tile, queries, SPEC) + gl.arange(0, SPEC.width, layout=QUERY)
            is_own = query >= tile * SPEC.width
            maximum = gl.load(stats_ptr + query, mask=is_own, other=float("inf"))
            reciprocal = gl.load(stats_ptr + queries + query, mask=is_own, other=0.0)
            delta = gl.load(delta_ptr + query)
            q = q_ring.index(stage)
            dout = dout_ring.index(stage)
            mbarrier.wait(full.index(stage), (tile // SPEC.stages) & 1)
            scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            p = gl.exp2(scores * factor - maximum.expand_dims(0)) * reciprocal.expand_dims(0)
            dv = warpgroup_mma(gl.convert_layout(p.to(q.dtype), FACTOR), dout, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = p * (dp - delta.expand_dims(0))
            dk = warpgroup_mma(gl.convert_layout(ds.to(q.dtype), FACTOR), q, dk, is_async=True)
            dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
            mbarrier.arrive(empty.index(stage), count=1)
        first_token = (image.to(gl.int64) * keys * heads + head) * SPEC.width
        _store_keys(dk_ptr + first_token, dk * scale, first_key, keys, heads * SPEC.width, MMA, SPEC)
        _store_keys(dv_ptr + first_token, dv, first_key, keys, heads * SPEC.width, MMA, SPEC)


@gluon.jit
def _consume_even(
    stats_ptr, delta_ptr, dk_ptr, dv_ptr, scale, factor, place, heads, queries, keys,
    k_tiles, v_tiles, q_ring, dout_ring, ready, full, empty, SPEC: gl.constexpr,
):  # fmt: skip
    _consume(
        0, stats_ptr, delta_ptr, dk_ptr, dv_ptr, scale, factor, place, heads, queries, keys,
        k_tiles, v_tiles, q_ring, dout_ring, ready, full, empty, SPEC,
    )  # fmt: skip


@gluon.jit
def _consume_odd(
    stats_ptr, delta_ptr, dk_ptr, dv_ptr, scale, factor, place, heads, queries, keys,
    k_tiles, v_tiles, q_ring, dout_ring, ready, full, empty, SPEC: gl.constexpr,
):  # fmt: skip
    _consume(
        1, stats_ptr, delta_ptr, dk_ptr, dv_ptr, scale, factor, place, heads, queries, keys,
        k_tiles, v_tiles, q_ring, dout_ring, ready, full, empty, SPEC,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["heads", "keys", "blocks"])
def _attention_bwd_dkdv_streamed_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, stats_ptr, delta_ptr, dk_ptr, dv_ptr, scale, log2_scale,
    heads, queries, keys, blocks, SPEC: gl.constexpr,
):  # fmt: skip
    """Computes dk and dv of 128 keys; q, k, v, dout are descriptors of (tokens of all images, h · 64)."""
    SHAPE: gl.constexpr = [SPEC.stages, SPEC.width, SPEC.width]
    HALVES: gl.constexpr = [2, SPEC.width, SPEC.width]
    k_tiles = gl.allocate_shared_memory(k_ptr.dtype, HALVES, k_ptr.layout)
    v_tiles = gl.allocate_shared_memory(v_ptr.dtype, HALVES, v_ptr.layout)
    q_ring = gl.allocate_shared_memory(q_ptr.dtype, SHAPE, q_ptr.layout)
    dout_ring = gl.allocate_shared_memory(dout_ptr.dtype, SHAPE, dout_ptr.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SPEC.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SPEC.stages, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    STAGES: gl.constexpr = SPEC.stages
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    grid_dependency_synchronize()
    plane = gl.program_id(0) // blocks
    place = (plane // heads, plane % heads, gl.program_id(0) % blocks)
    factor = -log2_scale if SPEC.is_negative else log2_scale
    gl.warp_specialize(
        [
            (_consume_even, (
                stats_ptr, delta_ptr, dk_ptr, dv_ptr, scale, factor, place, heads, queries, keys,
                k_tiles, v_tiles, q_ring, dout_ring, ready, full, empty, SPEC,
            )),
            (_consume_odd, (
                stats_ptr, delta_ptr, dk_ptr, dv_ptr, scale, factor, place, heads, queries, keys,
                k_tiles, v_tiles, q_ring, dout_ring, ready, full, empty, SPEC,
            )),
            (_load_tiles, (
                q_ptr, k_ptr, v_ptr, dout_ptr, place, queries, keys,
                k_tiles, v_tiles, q_ring, dout_ring, ready, full, empty, SPEC,
            )),
        ],
        [4, 1],
        [232, 40],  # registers of a thread of the second consumer and of the loader; the first takes the rest
    )  # fmt: skip


# Launch ---------------------------------------------------------------------------------------------------


def _rows_of(tokens: Tensor) -> TensorDescriptor | None:
    """Returns tokens (B, N, h, 64) as rows of h · 64 channels, of all images, or None where they are not."""
    batch, count, heads, width = tokens.shape
    image, row, head, channel = tokens.stride()
    are_rows = (batch == 1 or image == count * row) and (heads == 1 or head == width) and channel == 1
    if not are_rows or row < heads * width or batch * count >= 2**31 - 2 * _WIDTH:
        return None
    if row % 8 or tokens.data_ptr() % 16:  # TMA wants rows at multiples of 16 bytes
        return None
    return TensorDescriptor(tokens, [batch * count, heads * width], [row, 1], [_WIDTH, _WIDTH], _SWIZZLED)


def launch_streamed(arguments: dict[str, Any], dk: Tensor, dv: Tensor) -> bool:
    """Computes dk and dv, if the kernel is configured for the GPU and takes the call.

    It takes at least 64 queries, heads of 64 channels in 16 bits, whose tokens are rows of all images, and no
    bias.

    Args:
        arguments: The launch arguments of the backward.
        dk: The gradient to write, (B, Nkv, h, D), contiguous.
        dv: Likewise.

    Returns:
        Whether it did.
    """
    spec, queries = arguments["SPEC"], arguments["queries"]
    config: Any = configuration_for("bwd_dkdv_streamed", dk)
    takes = spec.head_dim == _WIDTH and not spec.has_bias and spec.position is None and queries >= _WIDTH
    if config.stages == 0 or not takes:
        return False
    described = {name: _rows_of(arguments[name]) for name in ("q_ptr", "k_ptr", "v_ptr", "dout_ptr")}
    if None in described.values():
        return False
    batch, keys, heads, _ = dk.shape
    blocks = -(-keys // (2 * _WIDTH))
    shared = ("stats_ptr", "delta_ptr", "scale", "log2_scale", "heads", "queries", "keys")
    launching.launch(
        _attention_bwd_dkdv_streamed_kernel, (batch * heads * blocks,), on=dk, options={"num_warps": 4},
        **described, **{name: arguments[name] for name in shared}, dk_ptr=dk, dv_ptr=dv, blocks=blocks,
        SPEC=StreamSpec(_WIDTH, config.stages, spec.is_negative),
    )  # fmt: skip
    return True
