"""The matrix product of sm_90, in Gluon: out = epilogue(x · weightᵀ), in 16 bits.

A program is persistent and has three partitions. One warp loads tiles of x and of the weight by TMA into a
ring of buffers. Two consumers of four warps take the program's tiles in turns ("ping-pong"): while one
multiplies, the other applies the epilogue to its tile and stores it, so that the tensor cores do not wait
for epilogues. A consumer passes the turn on when its last product has been issued.

    loader      │ x, weight of tile 0 │ of tile 1 │ of tile 2 │ …
    consumer 0  │      products of 0      │ epilogue, store │  products of 2  │ …
    consumer 1  │                         │  products of 1  │ epilogue, store │ …

Tile i of a program belongs to consumer i % 2, and the loader loads exactly the tiles that there are.

Epilogues, each chosen at compile time, in this order:

- LayerNorm of x, folded (``norm``): rstd · (acc − mean · column_sums) + bias, where the weight has
  LayerNorm's weight in it, ``column_sums`` are the sums of its rows, and the bias has LayerNorm's in it. Mean
  and rstd come from the statistics that the product before has written for each row and column tile.
- bias, GELU
- residual: fetched by TMA into the consumer's output buffer while the other one multiplies; ``out`` may be
  the residual itself, since each element is read and written by one consumer
- statistics of the results (``sums``): per row and column tile, their sum, and the sum of their squared
  deviations from the mean of the tile. Unlike sums of squares, these do not cancel where the mean of a row is
  large. They are of the rounded results, as LayerNorm reads them.

Groups: the rows of x may be several matrices, each from a multiple of 128 rows on and with a weight and a
bias of its own, such as those of Q, K and V. One launch then computes all products.

Bytes per launch, with e per element: (M·K + M·N)·e, and M·N·e for the residual; the weight, N·K·e, stays in
L2. No atomics; the order of every sum is fixed, so results do not depend on the number of programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ... import modes
from ...backends import Record
from ...launch import launching
from ..graph_operators import launcher
from ..triton_gelu import ERF_CUBIC, ERF_LINEAR, ERF_QUINTIC, LARGEST_SQUARE, TANH_CUBIC, TANH_LINEAR
from ..triton_launch import grid_dependency_synchronize
from .triton.autograd import matrices, sum_dtype

_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.9 renamed both
_store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Tiles ----------------------------------------------------------------------------------------------------

_BLOCK_K = 64  # one row of a tile is 128 bytes, the widest swizzle


class Tile(NamedTuple):
    """A tile of results, with the time that it takes."""

    # Its size
    rows: int
    columns: int
    stages: int  # Buffers of the ring, each a step of 64 inputs
    # Microseconds of a program's tile, and of each of its steps, as fitted to 60 sizes on an H200
    # (tests/cvt_kernels/ops/linear/products_h200.json). They choose between tiles, no more.
    fixed: float
    per_step: float


TILES = (
    Tile(128, 128, 4, fixed=1.34, per_step=0.330),
    Tile(64, 128, 6, fixed=0.81, per_step=0.180),
    Tile(128, 64, 4, fixed=0.69, per_step=0.240),
    Tile(64, 64, 6, fixed=0.30, per_step=0.153),
)


def tile_for(rows: int, outputs: int, inputs: int, multiprocessors: int) -> Tile:
    """Returns the tile with which a product takes the least time: tiles of a program, one after the other."""

    def microseconds(tile: Tile) -> float:
        tiles = -(-rows // tile.rows) * -(-outputs // tile.columns)
        return -(-tiles // multiprocessors) * (tile.fixed + -(-inputs // _BLOCK_K) * tile.per_step)

    return min(TILES, key=microseconds)


def part_width(rows: int, outputs: int, inputs: int, device: torch.device) -> int:
    """Returns the columns of a part of the statistics that a product writes: those of its tile."""
    return tile_for(rows, outputs, inputs, launching.chip(device).multiprocessors).columns


# Kernel ---------------------------------------------------------------------------------------------------


class ProductSpec(NamedTuple):
    """The compile-time constants of the kernel."""

    # K and N
    inputs: int
    outputs: int
    # Rows, columns and inputs of a tile
    block_m: int
    block_n: int
    block_k: int
    stages: int  # Buffers of the ring
    approximate: int  # GELU's variant: 1 for erf, 2 for tanh, 3 for quick; 0 without GELU
    # Whether there are these
    has_bias: bool
    has_residual: bool
    has_sums: bool
    is_grouped: bool  # Whether the rows of x are several matrices
    # Columns of a part of the statistics that LayerNorm is computed from; 0 without LayerNorm
    norm_width: int
    eps: float  # LayerNorm's
    is_bfloat16: bool  # Whether the elements are bfloat16, else float16


_VARIANTS = {None: 0, "none": 1, "tanh": 2, "quick": 3}


@gluon.jit
def _gelu_of_half(h, SPEC: gl.constexpr):
    """Returns gelu(2 · h), as ``triton_gelu.activate_half`` does in 16 bits."""
    if SPEC.approximate == 1:
        square = gl.minimum(h * h, LARGEST_SQUARE)
        u = h * (ERF_LINEAR + square * (ERF_CUBIC + square * ERF_QUINTIC))
    elif SPEC.approximate == 2:
        u = h * (TANH_LINEAR + TANH_CUBIC * (h * h))
    else:
        u = h * 1.702
    tanh = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=gl.float32, is_pure=True, pack=1
    )
    return h + h * tanh


@gluon.jit
def _widened(x, SPEC: gl.constexpr):
    """Returns x in float32: two bfloat16 by two instructions, where Triton's cast takes three for one."""
    if SPEC.is_bfloat16:
        bits = gl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.b32 t, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
            "=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2,
        )  # fmt: skip
        wide = bits.to(gl.float32, bitcast=True)
    else:
        wide = x.to(gl.float32)
    return wide


@gluon.jit
def _rounded(y, SPEC: gl.constexpr):
    """Returns y in 16 bits, and that in float32; Triton would convert bfloat16 one element at a time."""
    if SPEC.is_bfloat16:
        out, bits = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xffff0000;",
            "=&r,=r,=r,f,f", [y], dtype=(gl.bfloat16, gl.int32), is_pure=True, pack=2,
        )  # fmt: skip
        wide = bits.to(gl.float32, bitcast=True)
    else:
        out = y.to(gl.float16)
        wide = out.to(gl.float32)
    return out, wide


@gluon.jit
def _place_of(tile, second, third, SPEC: gl.constexpr):
    """Returns row and column of a tile, and the first row of its group in the weight."""
    COLUMNS: gl.constexpr = (SPEC.outputs + SPEC.block_n - 1) // SPEC.block_n
    row = tile // COLUMNS * SPEC.block_m
    first = 0
    if SPEC.is_grouped:
        first = gl.where(row >= second, SPEC.outputs, 0) + gl.where(row >= third, SPEC.outputs, 0)
    return row, tile % COLUMNS * SPEC.block_n, first


@gluon.jit
def _load_columns(ptr, column, LAYOUT: gl.constexpr, SPEC: gl.constexpr):
    """Returns the elements of a vector (N,) for the columns of a tile, in float32."""
    columns = column + gl.arange(0, SPEC.block_n, layout=LAYOUT)
    if SPEC.outputs % SPEC.block_n == 0:
        vector = gl.load(ptr + columns)
    else:
        vector = gl.load(ptr + columns, mask=columns < SPEC.outputs, other=0.0)
    return vector.to(gl.float32)


@gluon.jit
def _load_norm(ptr, row, rows, LAYOUT: gl.constexpr, SPEC: gl.constexpr):
    """Returns −mean and rstd of the rows of a tile, from their statistics (2, parts, M)."""
    WIDTH: gl.constexpr = SPEC.norm_width
    PARTS: gl.constexpr = (SPEC.inputs + SPEC.norm_width - 1) // SPEC.norm_width
    LAST: gl.constexpr = SPEC.inputs - (PARTS - 1) * WIDTH  # columns of the last part
    BLOCK_M: gl.constexpr = SPEC.block_m
    row_of_tile = row + gl.arange(0, SPEC.block_m, layout=LAYOUT)
    is_inside = row_of_tile < rows
    sums = ()
    mean = gl.zeros([BLOCK_M], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        loaded = gl.load(ptr + part * rows + row_of_tile, mask=is_inside, other=0.0)
        sums = sums + (loaded,)  # noqa: RUF005 (Triton unpacks no tuples)
        mean += loaded
    mean = mean * (1.0 / SPEC.inputs)
    squares = gl.zeros([BLOCK_M], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        count = WIDTH if part < PARTS - 1 else LAST
        deviation = sums[part] / count - mean
        squares += gl.load(ptr + (PARTS + part) * rows + row_of_tile, mask=is_inside, other=0.0)
        squares += deviation * deviation * count
    return -mean, gl.rsqrt(squares * (1.0 / SPEC.inputs) + SPEC.eps)


@gluon.jit
def _store_statistics(ptr, values, tile, row, column, rows, ROW: gl.constexpr, COLUMN: gl.constexpr,
                      SPEC: gl.constexpr):  # fmt: skip
    """Writes the sums of a tile's rows, and the sums of squared deviations from the means of these."""
    COLUMNS: gl.constexpr = (SPEC.outputs + SPEC.block_n - 1) // SPEC.block_n
    total = gl.sum(values, axis=1)  # zeros beyond the last column
    if SPEC.outputs % SPEC.block_n == 0:
        deviations = values - (total * (1.0 / SPEC.block_n)).expand_dims(1)
    else:
        count = gl.minimum(SPEC.outputs - column, SPEC.block_n).to(gl.float32)
        columns = column + gl.arange(0, SPEC.block_n, layout=COLUMN)
        deviations = values - (total * (1.0 / count)).expand_dims(1)
        deviations = gl.where((columns < SPEC.outputs).expand_dims(0), deviations, 0.0)
    row_of_tile = row + gl.arange(0, SPEC.block_m, layout=ROW)
    ptr += tile % COLUMNS * rows + row_of_tile
    gl.store(ptr, total, mask=row_of_tile < rows)
    gl.store(ptr + COLUMNS * rows, gl.sum(deviations * deviations, axis=1), mask=row_of_tile < rows)


@gluon.jit
def _load_tiles(x, weight, second, third, tiles, x_ring, weight_ring, full, empty, SPEC: gl.constexpr):
    """Loads the steps of all tiles of the program, each as soon as its buffers are empty."""
    stage = 0
    phase = 1  # all buffers are empty
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, first = _place_of(tile, second, third, SPEC)
        for k in range(0, SPEC.inputs, SPEC.block_k):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), (SPEC.block_m + SPEC.block_n) * SPEC.block_k * 2)
            _load_box(x, [row, k], full.index(stage), x_ring.index(stage))
            _load_box(weight, [first + column, k], full.index(stage), weight_ring.index(stage))
            stage += 1
            if stage == SPEC.stages:
                stage = 0
                phase ^= 1


@gluon.jit
def _consume_tiles(
    FIRST: gl.constexpr, out, residual, bias_ptr, column_sums_ptr, statistics_ptr, sums_ptr,
    rows, second, third, tiles, x_ring, weight_ring, buffer, full, empty, turns, arrived, SPEC: gl.constexpr,
):  # fmt: skip
    """Computes every other tile of the program, from its tile FIRST on."""
    BLOCK_M: gl.constexpr = SPEC.block_m
    BLOCK_N: gl.constexpr = SPEC.block_n
    STEPS: gl.constexpr = (SPEC.inputs + SPEC.block_k - 1) // SPEC.block_k
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SPEC.block_n, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    HALF: gl.constexpr = 0.5 if SPEC.approximate > 0 else 1.0  # GELU takes half of its input
    count = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    parity = 0
    for i in range(FIRST, count, 2):
        tile = gl.program_id(0) + i * gl.num_programs(0)
        row, column, first = _place_of(tile, second, third, SPEC)
        # While the other consumer multiplies, the epilogue's inputs are loaded.
        if SPEC.has_residual:
            tma.store_wait(pendings=0)  # the buffer still holds the results before
            mbarrier.expect(arrived.index(FIRST), SPEC.block_m * SPEC.block_n * 2)
            _load_box(residual, [row, column], arrived.index(FIRST), buffer)
        if SPEC.has_bias:
            bias = _load_columns(bias_ptr + first, column, COLUMN, SPEC) * HALF
        if SPEC.norm_width > 0:
            column_sums = _load_columns(column_sums_ptr, column, COLUMN, SPEC)
            shift, scale = _load_norm(statistics_ptr, row, rows, ROW, SPEC)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA)
        mbarrier.wait(turns.index(FIRST), parity)
        for k in range(STEPS):
            step = i * STEPS + k
            stage = step % SPEC.stages
            mbarrier.wait(full.index(stage), (step // SPEC.stages) & 1)
            weights = weight_ring.index(stage).permute((1, 0))
            acc = warpgroup_mma(x_ring.index(stage), weights, acc, is_async=True, use_acc=k > 0)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the product of the step before has read its buffers
            mbarrier.arrive(empty.index((step + SPEC.stages - 1) % SPEC.stages), count=1, pred=k > 0)
        mbarrier.arrive(turns.index(1 - FIRST), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((i * STEPS + STEPS - 1) % SPEC.stages), count=1)

        if SPEC.norm_width > 0:
            acc = (acc + shift.expand_dims(1) * column_sums.expand_dims(0)) * (scale * HALF).expand_dims(1)
        else:
            acc = acc * HALF
        if SPEC.has_bias:
            acc = acc + bias.expand_dims(0)
        if SPEC.approximate > 0:
            acc = _gelu_of_half(acc, SPEC)
        if SPEC.has_residual:
            mbarrier.wait(arrived.index(FIRST), parity)
            acc = acc + _widened(buffer.load(MMA), SPEC)
        else:
            tma.store_wait(pendings=0)
        results, values = _rounded(acc, SPEC)
        buffer.store(results)
        fence_async_shared()
        _store_box(out, [row, column], buffer)
        if SPEC.has_sums:
            _store_statistics(sums_ptr, values, tile, row, column, rows, ROW, COLUMN, SPEC)
        parity ^= 1
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["rows", "second", "third", "tiles"])
def _pingpong_product_kernel(
    x, weight, out, residual, bias_ptr, column_sums_ptr, statistics_ptr, sums_ptr,
    rows, second, third, tiles, SPEC: gl.constexpr,
):  # fmt: skip
    """Computes tiles of epilogue(x · weightᵀ)."""
    x_ring = gl.allocate_shared_memory(x.dtype, [SPEC.stages, SPEC.block_m, SPEC.block_k], x.layout)
    weight_ring = gl.allocate_shared_memory(
        weight.dtype, [SPEC.stages, SPEC.block_n, SPEC.block_k], weight.layout
    )
    even_buffer = gl.allocate_shared_memory(out.dtype, [SPEC.block_m, SPEC.block_n], out.layout)
    odd_buffer = gl.allocate_shared_memory(out.dtype, [SPEC.block_m, SPEC.block_n], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [SPEC.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SPEC.stages, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = SPEC.stages
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), count=1)
        mbarrier.init(arrived.index(consumer), count=1)
    mbarrier.arrive(turns.index(0), count=1)
    grid_dependency_synchronize()
    gl.warp_specialize(
        [
            (_consume_tiles, (
                0, out, residual, bias_ptr, column_sums_ptr, statistics_ptr, sums_ptr, rows, second, third,
                tiles, x_ring, weight_ring, even_buffer, full, empty, turns, arrived, SPEC,
            )),
            (_consume_tiles, (
                1, out, residual, bias_ptr, column_sums_ptr, statistics_ptr, sums_ptr, rows, second, third,
                tiles, x_ring, weight_ring, odd_buffer, full, empty, turns, arrived, SPEC,
            )),
            (_load_tiles, (x, weight, second, third, tiles, x_ring, weight_ring, full, empty, SPEC)),
        ],
        [4, 1],
        [232, 40],  # registers of a thread of the second consumer and of the loader; the first takes the rest
    )  # fmt: skip


# Launch ---------------------------------------------------------------------------------------------------


class FoldedNorm(NamedTuple):
    """The inputs of a LayerNorm of x that is folded into a product."""

    statistics: Statistics  # Of x, as the product before has written them
    column_sums: Tensor  # (N,), the sums of the rows of the weight, in float32
    eps: float  # Added to the variance


class Statistics(NamedTuple):
    """Statistics of the rows of a matrix (M, N), by parts of its columns."""

    # (2, parts, M) in float32: the sums of each part, then those of the squared deviations from its mean
    sums: Tensor
    width: int  # Columns of a part; the last one may have fewer


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *,
    approximate: str | None = None, residual: Tensor | None = None, norm: FoldedNorm | None = None,
    has_statistics: bool = False, groups: tuple[int, ...] = (),
) -> Statistics | None:  # fmt: skip
    """Writes epilogue(x · weightᵀ) to ``out`` (M, N), for x (M, K) and the weight (N, K), all contiguous.

    The matrices are all bfloat16 or all float16, a bias (N,) of any floating-point dtype. ``out`` may be the
    residual (M, N). ``groups`` are the rows where the second and the third group begin, multiples of 128, the
    rows of the largest tile: then the weight is (groups · N, K) and the bias (groups · N,), and there is
    neither residual nor norm. With ``has_statistics`` it returns the statistics of ``out``.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    multiprocessors = launching.chip(x.device).multiprocessors
    tile = tile_for(rows, outputs, inputs, multiprocessors)
    columns = -(-outputs // tile.columns)
    tiles = -(-rows // tile.rows) * columns
    spec = ProductSpec(
        inputs=inputs, outputs=outputs, block_m=tile.rows, block_n=tile.columns, block_k=_BLOCK_K,
        stages=tile.stages, approximate=_VARIANTS[approximate], has_bias=bias is not None,
        has_residual=residual is not None, has_sums=has_statistics, is_grouped=bool(groups),
        norm_width=0 if norm is None else norm.statistics.width, eps=0.0 if norm is None else norm.eps,
        is_bfloat16=x.dtype == torch.bfloat16,
    )  # fmt: skip
    second, third = (*groups, rows, rows)[:2]
    sums = x.new_empty(2, columns, rows, dtype=torch.float32) if has_statistics else None
    unused = weight  # for pointers that the kernel does not read
    launching.launch(
        _pingpong_product_kernel, (min(tiles, multiprocessors),), on=x, options={"num_warps": 4},
        x=_described(x, tile.rows, _BLOCK_K), weight=_described(weight, tile.columns, _BLOCK_K),
        out=_described(out, tile.rows, tile.columns),
        residual=_described(out if residual is None else residual, tile.rows, tile.columns),
        bias_ptr=unused if bias is None else bias,
        column_sums_ptr=unused if norm is None else norm.column_sums,
        statistics_ptr=unused if norm is None else norm.statistics.sums,
        sums_ptr=unused if sums is None else sums,
        rows=rows, second=second, third=third, tiles=tiles, SPEC=spec,
    )  # fmt: skip
    return None if sums is None else Statistics(sums, tile.columns)


def aligned(matrix: Tensor) -> Tensor:
    """Returns a tensor that begins at a multiple of 16 bytes, as TMA wants: itself or a copy."""
    return matrix if matrix.data_ptr() % 16 == 0 else matrix.clone()


_SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _SWIZZLED)


_FEWEST_OUTPUTS = 32  # a tile has 64 columns at least


def why_unsupported(call: Record) -> str | None:
    """Returns why the kernel cannot serve a call of ``linear_gelu`` or ``linear_add``, or None."""
    x, weight, residual = call.x, call.weight, call._asdict().get("residual")
    reason = why_not_multiplied(x, weight)
    if reason is not None:
        return reason
    if call._asdict().get("scale") is not None:
        return "takes no factors of images"
    dtype = modes.autocast_dtype(x) or x.dtype
    if residual is not None and sum_dtype(x, residual) != dtype:
        return f"the sum is {str(sum_dtype(x, residual)).removeprefix('torch.')}"
    return "has no gradients" if modes.wants_gradient(*call) else None


def why_not_multiplied(x: Tensor, weight: Tensor, groups: int = 1) -> str | None:
    """Returns why the kernel cannot multiply as many rows as x has by weights (N, K), or None."""
    if launching.chip(x.device).capability != 90:
        return "it multiplies with instructions of compute capability 9.0 only"
    if x.numel() == 0 or weight.numel() == 0:
        return "the batch is empty" if weight.numel() else "the weight is empty"
    dtype = modes.autocast_dtype(x) or x.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    outputs, inputs = weight.shape
    if inputs % 8 or outputs % 8:
        return "rows do not begin at multiples of 16 bytes"
    if outputs < _FEWEST_OUTPUTS:
        return f"there are fewer than {_FEWEST_OUTPUTS} outputs"
    rows = x.numel() // x.shape[-1]
    if groups * (rows + 128) >= 2**31 - 2**10 or groups * weight.numel() >= 2**31:
        return "there are 2³¹ rows, or as many elements of the weight, or more"
    return None


def _allocated(x: Tensor, weight: Tensor, *_) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@launcher("pingpong_product", _allocated)
def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, approximate: str | None
) -> Tensor:
    """Returns the product of matrices with its epilogue."""
    out = _allocated(x, weight)
    residual = None if residual is None else aligned(residual)
    product(aligned(x), aligned(weight), bias, out, approximate=approximate, residual=residual)
    return out


@launcher("pingpong_product_", mutates=("residual",))
def _add_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """Adds the product of matrices to the residual (M, N)."""
    if residual.data_ptr() % 16:
        residual.copy_(_product(x, weight, bias, residual, None))
    else:
        product(aligned(x), aligned(weight), bias, residual, residual=residual)


def linear_gelu(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear_gelu`` for checked arguments; under autocast, in its dtype."""
    x, weight, bias, approximate = call
    out = _product(*matrices(x, weight, bias), None, approximate)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_add(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear_add`` for checked arguments; the product, in autocast's dtype."""
    x, weight, bias, residual, inplace, *_ = call
    operands = matrices(x, weight, bias)
    rows = residual.contiguous().view(operands[0].shape[0], -1)
    if not inplace:
        return _product(*operands, rows, None).view(residual.shape)
    _add_product(*operands, rows)
    return residual
