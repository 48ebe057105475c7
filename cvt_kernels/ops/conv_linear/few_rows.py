"""``conv_linear`` of few tokens in 16 bits in one launch, with LayerNorm of the tokens before it if asked.

A program computes a tile of results of one branch: it convolves its tokens, 64 or 128 channels at a time, and
multiplies these by its columns of the branch's weight. So each token is convolved once for every 64 results.
With few tokens all programs run at once, on multiprocessors that were idle; it saves a launch and the way of
the convolved tokens through memory. LayerNorm's statistics come from the kernel that has written the tokens,
or from the tokens themselves. The results are written by branch, as ``stacked`` says.

No atomics; every sum has a fixed order. Bytes per launch: the tokens, their results and the weights once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...launch import launching
from ...records import ConvBatchNorm
from .. import weight_cache
from ..conv_projection.triton.common import Geometry, class_tokens
from ..conv_projection.triton.forward import NormOfRows, row_norm
from ..triton_launch import grid_dependency_synchronize, padded, product_types

#: Rows of which each group of rows begins at a multiple; no tile of a product has more.
GROUP_ROWS = 128
_COLUMNS = 64
_TILES = (16, 32, 64)
#: The most elements of tokens that a program convolves. By its instructions (2,900 of 256 threads for half as
#: many, with LayerNorm) that takes 5 to 6 µs of an H200, where for one image the projection alone takes 6.
_MOST_ELEMENTS = 32 * 384


def tile_rows(x: Tensor, geometry: Geometry, outputs: int) -> int | None:
    """Returns the rows of a tile with which all programs run at once; None for other calls.

    Tokens that are not contiguous are among these, which would be copied.
    """
    if x.dtype not in (torch.float16, torch.bfloat16) or not x.is_contiguous():
        return None
    columns, multiprocessors = -(-outputs // _COLUMNS), launching.chip(x.device).multiprocessors
    tokens = [height * width + class_tokens(x, geometry) for height, width in geometry.output_grids]
    for rows in _TILES:
        programs = columns * sum(-(-x.shape[0] * each // rows) for each in tokens)
        if programs <= multiprocessors:
            return rows if rows * x.shape[2] <= _MOST_ELEMENTS else None
    return None


def packed_taps(convs: Sequence[ConvBatchNorm]) -> Tensor:
    """Returns the nine taps and the shift of every branch, (branches, 10, C) in float32.

    BatchNorm is folded into them. They are kept until a parameter changes.
    """

    def pack() -> Tensor:
        return torch.stack([_folded(conv) for conv in convs])

    parameters, key = [t for conv in convs for t in conv[:5]], ("taps", *(conv.eps for conv in convs))
    return weight_cache.packed(convs[0].weight, key, pack, others=parameters[1:])


def _folded(conv: ConvBatchNorm) -> Tensor:
    weight, gamma, beta, mean, variance = (None if t is None else t.double() for t in conv[:5])
    assert weight is not None
    assert mean is not None
    assert variance is not None
    scale = (variance + conv.eps).rsqrt()
    scale = scale if gamma is None else scale * gamma
    shift = -mean * scale if beta is None else beta - mean * scale
    return torch.cat([weight.flatten(1).t() * scale, shift[None]]).float()


class Few(NamedTuple):
    """The compile-time constants of the kernel."""

    # C and N
    channels: int
    outputs: int
    # Rows and columns of a tile, and channels of a step
    block_m: int
    block_n: int
    block_k: int
    class_token: int  # 1 with a class token, else 0
    normalizes: bool  # Whether LayerNorm comes before the convolutions
    norm_width: int  # Channels of a part of its statistics; 0 where it is computed from the tokens
    group_rows: int  # Rows of which each branch begins at a multiple
    operand: Any  # See :func:`product_types`


@triton.jit
def _load_tokens(x_ptr, token, mask, first, FEW: tl.constexpr):
    """Returns channels of tokens, from the ``first`` on, [block_m, block_k] in float32; zeros for none."""
    c = first + tl.arange(0, FEW.block_k)
    inside = mask[:, None]
    if FEW.channels % FEW.block_k != 0:
        inside = inside & (c < FEW.channels)[None, :]
    return tl.load(x_ptr + token[:, None] * FEW.channels + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_channels(ptr, first, FEW: tl.constexpr):
    """Returns the channels of a vector (C,) from the ``first`` on, [1, block_k], in float32."""
    c = first + tl.arange(0, FEW.block_k)
    if FEW.channels % FEW.block_k == 0:
        vector = tl.load(ptr + c)
    else:
        vector = tl.load(ptr + c, mask=c < FEW.channels, other=0.0)
    return vector.to(tl.float32)[None, :]


@triton.jit
def _norm_of_tokens(x_ptr, token, mask, eps, FEW: tl.constexpr):
    """Returns rstd and −mean · rstd of tokens."""
    C: tl.constexpr = FEW.channels
    M: tl.constexpr = FEW.block_m
    BLOCK_K: tl.constexpr = FEW.block_k
    STEPS: tl.constexpr = (C + BLOCK_K - 1) // BLOCK_K
    steps = ()
    total = tl.zeros([M], tl.float32)
    for i in tl.static_range(STEPS):  # unrolled, so that one token's loads hide another's
        steps = steps + (_load_tokens(x_ptr, token, mask, i * BLOCK_K, FEW),)
        total += tl.sum(steps[i], axis=1)
    mean = total * (1.0 / C)
    squares = tl.zeros([M], tl.float32)
    for i in tl.static_range(STEPS):
        deviations = steps[i] - mean[:, None]
        if C % BLOCK_K != 0:
            deviations = tl.where((i * BLOCK_K + tl.arange(0, BLOCK_K) < C)[None, :], deviations, 0.0)
        squares += tl.sum(deviations * deviations, axis=1)
    rstd = tl.math.rsqrt(squares * (1.0 / C) + eps)
    return rstd, -mean * rstd


@triton.jit(do_not_specialize=["rows", "batch", "height", "width"])
def _conv_linear_few_kernel(
    x_ptr, taps_ptr, w_ptr, bias_ptr, out_ptr, statistics_ptr, norm_weight_ptr, norm_bias_ptr, norm_eps,
    rows, batch, height, width, STRIDES: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Writes a tile of one branch's results."""
    grid_dependency_synchronize()
    C: tl.constexpr = FEW.channels
    N: tl.constexpr = FEW.outputs
    M: tl.constexpr = FEW.block_m
    BLOCK_N: tl.constexpr = FEW.block_n
    CLASS_TOKEN: tl.constexpr = FEW.class_token
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    BLOCK_K: tl.constexpr = FEW.block_k
    tile = tl.program_id(0) // COLUMNS
    branch = tile * 0
    stride = branch
    first_tile = branch
    first_row = branch
    next_tile = branch
    next_row = branch
    for i in tl.static_range(len(STRIDES)):
        is_reached = tile >= next_tile
        branch = tl.where(is_reached, i, branch)
        stride = tl.where(is_reached, STRIDES[i], stride)
        first_tile = tl.where(is_reached, next_tile, first_tile)
        first_row = tl.where(is_reached, next_row, first_row)
        own = batch * (((height - 1) // STRIDES[i] + 1) * ((width - 1) // STRIDES[i] + 1) + CLASS_TOKEN)
        next_tile += (own + M - 1) // M
        next_row = (next_row + own + FEW.group_rows - 1) // FEW.group_rows * FEW.group_rows
    out_width = (width - 1) // stride + 1
    tokens = ((height - 1) // stride + 1) * out_width + CLASS_TOKEN
    row = (tile - first_tile) * M + tl.arange(0, M)
    is_inside = row < batch * tokens
    pixel = row % tokens - CLASS_TOKEN
    is_class = pixel < 0
    first_token = row // tokens * (height * width + CLASS_TOKEN)
    n = tl.program_id(0) % COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    token = ()
    mask = ()
    scale = ()
    shift = ()
    for tap in tl.static_range(9):
        y = pixel // out_width * stride + (tap // 3 - 1)
        x = pixel % out_width * stride + (tap % 3 - 1)
        here = first_token + CLASS_TOKEN + y * width + x
        is_read = is_inside & (y >= 0) & (y < height) & (x >= 0) & (x < width) & (pixel >= 0)
        if tap == 4 and CLASS_TOKEN:  # which goes through the linear layer only
            here = tl.where(is_class, first_token, here)
            is_read = is_inside
        token = token + (here,)
        mask = mask + (is_read,)
        if FEW.normalizes:
            if FEW.norm_width > 0:
                factor, summand = row_norm(statistics_ptr, here, is_read, rows, norm_eps, FEW.norm_width, C)
            else:
                factor, summand = _norm_of_tokens(x_ptr, here, is_read, norm_eps, FEW)
            scale = scale + (factor,)
            shift = shift + (summand,)
    taps_ptr += branch * (10 * C)
    w_ptrs = w_ptr + (branch * N + n)[:, None] * C
    acc = tl.zeros([M, BLOCK_N], tl.float32)
    for first in range(0, C, BLOCK_K):
        c = first + tl.arange(0, BLOCK_K)
        product_weight = tl.load(w_ptrs + c[None, :], mask=(n < N)[:, None] & (c < C)[None, :], other=0.0)
        sums = tl.where(is_class[:, None], 0.0, _load_channels(taps_ptr + 9 * C, first, FEW))
        if FEW.normalizes:
            gamma = _load_channels(norm_weight_ptr, first, FEW)
            beta = _load_channels(norm_bias_ptr, first, FEW)
        for tap in tl.static_range(9):
            values = _load_tokens(x_ptr, token[tap], mask[tap], first, FEW)
            if FEW.normalizes:
                values = (values * scale[tap][:, None] + shift[tap][:, None]) * gamma + beta
                values = tl.where(mask[tap][:, None], values, 0.0)
            weight = _load_channels(taps_ptr + tap * C, first, FEW)
            if tap == 4 and CLASS_TOKEN:
                weight = tl.where(is_class[:, None], 1.0, weight)
            sums += values * weight
        convolved = sums.to(x_ptr.dtype.element_ty).to(FEW.operand)
        acc = tl.dot(convolved, tl.trans(product_weight.to(FEW.operand)), acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + branch * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + (first_row + row)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=is_inside[:, None] & (n < N)[None, :])


def project_few(
    x: Tensor, geometry: Geometry, taps: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor,
    block_m: int, norm: NormOfRows | None = None,
) -> None:  # fmt: skip
    """Writes the results of all branches to ``out`` (rows, N), as ``stacked.branches_of`` finds them.

    Tokens x (B, T, C), of 16 bits, and the weights below one another, (branches · N, C), are contiguous. See
    :func:`packed_taps`, and for ``block_m`` :func:`tile_rows`; ``norm`` is a LayerNorm of the tokens before.
    """
    batch, tokens, channels = x.shape
    grids, outputs, height, width = geometry.output_grids, out.shape[1], *geometry.grid
    own = [batch * (h * w + class_tokens(x, geometry)) for h, w in grids]
    tiles = sum(-(-each // block_m) for each in own)
    few = Few(
        channels=channels, outputs=outputs, block_m=block_m, block_n=_COLUMNS,
        block_k=min(128 if block_m == 16 else 64, padded(channels)),
        class_token=class_tokens(x, geometry), normalizes=norm is not None,
        norm_width=0 if norm is None or norm.sums is None else norm.width, group_rows=GROUP_ROWS,
        operand=product_types(x.dtype)["operand"],
    )  # fmt: skip
    launching.launch(
        _conv_linear_few_kernel, (tiles * -(-outputs // _COLUMNS),), on=x,
        options={"num_warps": 8, "num_stages": 2, "maxnreg": 255},
        x_ptr=x, taps_ptr=taps, w_ptr=weight, bias_ptr=bias, out_ptr=out,
        statistics_ptr=None if norm is None else norm.sums,
        norm_weight_ptr=None if norm is None else norm.weight,
        norm_bias_ptr=None if norm is None else norm.bias, norm_eps=0.0 if norm is None else norm.eps,
        rows=batch * tokens, batch=batch, height=height, width=width, STRIDES=geometry.strides, FEW=few,
    )  # fmt: skip
