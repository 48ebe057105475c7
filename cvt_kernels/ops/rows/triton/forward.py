"""The kernels that gather and scatter rows of tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launching
from ...conv_embedding.triton.common import channels_of, layer_norm, load_vector
from ...graph_operators import launcher
from ...triton_launch import grid_dependency_synchronize
from ..autograd import sum_dtype
from .common import RowSpec

#: Tokens, or rows of an index, that a program which inverts it takes at once.
CHUNK = 512

# Device functions -----------------------------------------------------------------------------------------


@triton.jit
def rows_of_tile(tile, SPEC: tl.constexpr):
    """Returns the rows of a tile, [REPEATS, ROWS, 1]."""
    row = tl.arange(0, SPEC.repeats)[:, None, None] * SPEC.rows + tl.arange(0, SPEC.rows)[None, :, None]
    return tile * (SPEC.repeats * SPEC.rows) + row


@triton.jit
def within(mask, part, SPEC: tl.constexpr):
    """Returns a mask of rows, [REPEATS, ROWS, 1], for the channels of a part; the last may have too many."""
    PARTS: tl.constexpr = SPEC.parts
    if (part + 1) * PARTS.width > PARTS.channels:
        mask = mask & (channels_of(part, PARTS)[None, None, :] < PARTS.channels)
    return mask


@triton.jit
def load_rows(ptr, offset, mask, SPEC: tl.constexpr):
    """Returns the parts of rows that begin at some offsets, in the accumulator's type; zeros where masked."""
    PARTS: tl.constexpr = SPEC.parts
    COUNT: tl.constexpr = PARTS.count
    xs = ()
    for part in tl.static_range(COUNT):
        c = channels_of(part, PARTS)[None, None, :]
        x = tl.load(ptr + (offset + c), mask=within(mask, part, SPEC), other=0.0)
        xs = xs + (x.to(PARTS.accumulator),)
    return xs


@triton.jit
def store_rows(ptr, offset, mask, xs, SPEC: tl.constexpr):
    """Stores the parts of rows that begin at some offsets."""
    PARTS: tl.constexpr = SPEC.parts
    COUNT: tl.constexpr = PARTS.count
    for part in tl.static_range(COUNT):
        c = channels_of(part, PARTS)[None, None, :]
        tl.store(ptr + (offset + c), xs[part].to(ptr.dtype.element_ty), mask=within(mask, part, SPEC))


@triton.jit
def added(xs, ys, SPEC: tl.constexpr):
    """Returns the sums of the parts of rows."""
    COUNT: tl.constexpr = SPEC.parts.count
    sums = ()
    for part in tl.static_range(COUNT):
        sums = sums + (xs[part] + ys[part],)
    return sums


@triton.jit
def chosen(mask, xs, ys, SPEC: tl.constexpr):
    """Returns the parts ``xs`` of the rows in a mask, and ``ys`` of the others."""
    COUNT: tl.constexpr = SPEC.parts.count
    zs = ()
    for part in tl.static_range(COUNT):
        zs = zs + (tl.where(mask, xs[part], ys[part]),)
    return zs


@triton.jit
def rounded(xs, ptr, SPEC: tl.constexpr):
    """Returns the parts of rows as ``ptr`` holds them, in the accumulator's type."""
    COUNT: tl.constexpr = SPEC.parts.count
    ys = ()
    for part in tl.static_range(COUNT):
        ys = ys + (xs[part].to(ptr.dtype.element_ty).to(SPEC.parts.accumulator),)
    return ys


@triton.jit
def vector_of(ptr, SPEC: tl.constexpr):
    """Returns the parts of a vector (C,), loaded by each row's threads; () for None."""
    PARTS: tl.constexpr = SPEC.parts
    ROWS: tl.constexpr = SPEC.rows
    return load_vector(ptr, tl.zeros([1, ROWS, 1], tl.int32), PARTS)


@triton.jit
def _tokens_at(rows_ptr, row, tokens, count):
    """Returns the tokens of some rows of an image, and their mask."""
    token = tl.load(rows_ptr + row, mask=row < count, other=-1)
    return token.to(tl.int32), (token >= 0) & (token < tokens)


# Kernels and launchers ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens", "count", "tiles"])
def _gather_rows_kernel(
    x_ptr, rows_ptr, out_ptr, image_stride, token_stride, tokens, count, tiles, SPEC: tl.constexpr
):  # fmt: skip
    """Writes a tile of the rows of an image."""
    grid_dependency_synchronize()
    C: tl.constexpr = SPEC.parts.channels
    image = (tl.program_id(0) // tiles).to(tl.int64)
    row = rows_of_tile(tl.program_id(0) % tiles, SPEC)
    token, is_token = _tokens_at(rows_ptr + image * count, row, tokens, count)
    xs = load_rows(x_ptr + image * image_stride, token * token_stride, is_token, SPEC)
    store_rows(out_ptr + image * count * C, row * C, row < count, xs, SPEC)


def _gathered(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty(*rows.shape, x.shape[2])


@launcher("triton_gather_rows", _gathered)
def gather_rows_forward(x: Tensor, rows: Tensor) -> Tensor:
    """Returns the rows (B, K, C) of x (B, T, C), with contiguous channels, at contiguous ``rows``."""
    out = _gathered(x, rows)
    batch, count, _ = out.shape
    tokens = x.shape[1]
    spec, config = RowSpec.of("gather", x)
    tiles = spec.tiles(count)
    launching.launch(
        _gather_rows_kernel, (batch * tiles,), on=x, options=config.options,
        x_ptr=x, rows_ptr=rows, out_ptr=out, image_stride=x.stride(0), token_stride=x.stride(1),
        tokens=tokens, count=count, tiles=tiles, SPEC=spec,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens", "count", "tiles"])
def _gather_add_layer_norm_kernel(
    x_ptr, rows_ptr, branch_ptr, gamma_ptr, beta_ptr, h_ptr, y_ptr, eps, image_stride, token_stride, tokens,
    count, tiles, SPEC: tl.constexpr,
):  # fmt: skip
    """Writes a tile of the rows of an image, added to the branch, and their LayerNorm."""
    grid_dependency_synchronize()
    PARTS: tl.constexpr = SPEC.parts
    C: tl.constexpr = PARTS.channels
    image = (tl.program_id(0) // tiles).to(tl.int64)
    row = rows_of_tile(tl.program_id(0) % tiles, SPEC)
    token, is_token = _tokens_at(rows_ptr + image * count, row, tokens, count)
    first, mask = image * count * C, row < count
    xs = load_rows(x_ptr + image * image_stride, token * token_stride, is_token, SPEC)
    hs = added(xs, load_rows(branch_ptr + first, row * C, mask, SPEC), SPEC)
    store_rows(h_ptr + first, row * C, mask, hs, SPEC)
    gamma, beta = vector_of(gamma_ptr, SPEC), vector_of(beta_ptr, SPEC)
    ys = layer_norm(rounded(hs, h_ptr, SPEC), (), gamma, beta, eps, PARTS)
    store_rows(y_ptr + first, row * C, mask, ys, SPEC)


def _normalized(
    x: Tensor, rows: Tensor, branch: Tensor, weight: Any, bias: Any, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(branch, dtype=sum_dtype(x, branch)), torch.empty_like(branch, dtype=dtype)


@launcher("triton_gather_add_layer_norm", _normalized)
def gather_add_layer_norm_forward(
    x: Tensor, rows: Tensor, branch: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns h (B, K, C) and its LayerNorm in ``dtype``; x is as above, the others are contiguous."""
    batch, tokens, _ = x.shape
    count = rows.shape[1]
    h, y = _normalized(x, rows, branch, weight, bias, eps, dtype)
    spec, config = RowSpec.of("normalize", h)
    tiles = spec.tiles(count)
    launching.launch(
        _gather_add_layer_norm_kernel, (batch * tiles,), on=x, options=config.options,
        x_ptr=x, rows_ptr=rows, branch_ptr=branch, gamma_ptr=weight, beta_ptr=bias, h_ptr=h, y_ptr=y, eps=eps,
        image_stride=x.stride(0), token_stride=x.stride(1), tokens=tokens, count=count, tiles=tiles,
        SPEC=spec,
    )  # fmt: skip
    return h, y


@triton.jit(do_not_specialize=["tokens", "count"])
def _scatter_rows_places_kernel(rows_ptr, places_ptr, tokens, count, CHUNK: tl.constexpr):
    """Writes the place of each token of an image in its index, −1 for tokens not in it."""
    grid_dependency_synchronize()
    image = tl.program_id(0).to(tl.int64)
    rows_ptr += image * count
    places_ptr += image * tokens
    for first in range(0, tokens, CHUNK):
        token = first + tl.arange(0, CHUNK)
        tl.store(places_ptr + token, tl.full([CHUNK], -1, tl.int32), mask=token < tokens)
    tl.debug_barrier()  # other threads write to the same tokens
    for first in range(0, count, CHUNK):
        row = first + tl.arange(0, CHUNK)
        token, is_token = _tokens_at(rows_ptr, row, tokens, count)
        tl.store(places_ptr + token, row, mask=is_token)


@triton.jit(do_not_specialize=["tokens", "count", "tiles"])
def _scatter_rows_kernel(
    x_ptr, places_ptr, values_ptr, branch_ptr, out_ptr, image_stride, token_stride, tokens, count, tiles,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Writes a tile of an image's tokens: from the values, or zeros, where indexed, else from x."""
    grid_dependency_synchronize()
    C: tl.constexpr = SPEC.parts.channels
    image = (tl.program_id(0) // tiles).to(tl.int64)
    token = rows_of_tile(tl.program_id(0) % tiles, SPEC)
    is_token = token < tokens
    place = tl.load(places_ptr + image * tokens + token, mask=is_token, other=-1)
    is_written = place >= 0
    first = image * count * C
    if values_ptr is not None:
        ys = load_rows(values_ptr + first, place * C, is_written, SPEC)
        if branch_ptr is not None:
            ys = added(ys, load_rows(branch_ptr + first, place * C, is_written, SPEC), SPEC)
        if x_ptr is not None:
            xs = load_rows(x_ptr + image * image_stride, token * token_stride, is_token & (place < 0), SPEC)
            ys = chosen(is_written, ys, xs, SPEC)
    else:
        ys = load_rows(x_ptr + image * image_stride, token * token_stride, is_token & (place < 0), SPEC)
    store_rows(out_ptr + image * tokens * C, token * C, is_token, ys, SPEC)


def _scattered(x: Tensor | None, rows: Tensor, values: Tensor | None, branch: Any, tokens: int) -> Tensor:
    like = values if x is None else x
    assert like is not None
    return like.new_empty(rows.shape[0], tokens, like.shape[2])


@launcher("triton_scatter_rows", _scattered)
def scatter_rows_forward(
    x: Tensor | None, rows: Tensor, values: Tensor | None, branch: Tensor | None, tokens: int
) -> Tensor:
    """Returns x (B, T, C), or zeros, with values + branch (B, K, C), or zeros, at the rows.

    x is as above, the others are contiguous; x or values are given.
    """
    batch, count = rows.shape
    out = _scattered(x, rows, values, branch, tokens)
    spec, config = RowSpec.of("scatter", out)
    tiles = spec.tiles(tokens)
    image_stride, token_stride = (0, 0) if x is None else x.stride()[:2]
    places = rows.new_empty(batch, tokens, dtype=torch.int32)
    launching.launch(
        _scatter_rows_places_kernel, (batch,), on=rows, options=config.options,
        rows_ptr=rows, places_ptr=places, tokens=tokens, count=count, CHUNK=CHUNK,
    )  # fmt: skip
    launching.launch(
        _scatter_rows_kernel, (batch * tiles,), on=rows, options=config.options,
        x_ptr=x, places_ptr=places, values_ptr=values, branch_ptr=branch, out_ptr=out,
        image_stride=image_stride, token_stride=token_stride, tokens=tokens, count=count, tiles=tiles,
        SPEC=spec,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens", "count", "tiles"])
def _scatter_rows_inplace_kernel(
    x_ptr, rows_ptr, values_ptr, branch_ptr, tokens, count, tiles, SPEC: tl.constexpr
):  # fmt: skip
    """Writes a tile of the rows of an image to x, contiguous."""
    grid_dependency_synchronize()
    C: tl.constexpr = SPEC.parts.channels
    image = (tl.program_id(0) // tiles).to(tl.int64)
    row = rows_of_tile(tl.program_id(0) % tiles, SPEC)
    token, is_token = _tokens_at(rows_ptr + image * count, row, tokens, count)
    first = image * count * C
    ys = load_rows(values_ptr + first, row * C, is_token, SPEC)
    if branch_ptr is not None:
        ys = added(ys, load_rows(branch_ptr + first, row * C, is_token, SPEC), SPEC)
    store_rows(x_ptr + image * tokens * C, token * C, is_token, ys, SPEC)


@launcher("triton_scatter_rows_", mutates=("x",))
def scatter_rows_inplace_forward(x: Tensor, rows: Tensor, values: Tensor, branch: Tensor | None) -> None:
    """Writes values + branch (B, K, C) to the rows of x (B, T, C); all are contiguous."""
    batch, tokens, _ = x.shape
    count = rows.shape[1]
    spec, config = RowSpec.of("scatter", x)
    tiles = spec.tiles(count)
    launching.launch(
        _scatter_rows_inplace_kernel, (batch * tiles,), on=x, options=config.options,
        x_ptr=x, rows_ptr=rows, values_ptr=values, branch_ptr=branch, tokens=tokens, count=count, tiles=tiles,
        SPEC=spec,
    )  # fmt: skip
