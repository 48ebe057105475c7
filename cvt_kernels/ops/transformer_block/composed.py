"""The forward of a block as it is served, composed of other operators of this package.

It serves the operator, and CvT's blocks within a stage on a GPU (``models/stages.py``), whose residual stream
may contain the biases of later layers in advance. Without convolutional projections and gradients, linear
layers that read the same tokens are one product, of weights that are packed side by side: K and V behind a
reduction, else Q, K and V. The reduction and the first of these are ``reduction_linear``. So a block of
SegFormer or PVT v2 is eight launches of kernels on a GPU, seven without a reduction: LayerNorm, Q, the
reduction with K and V, attention, the layer behind it with residual and LayerNorm, and the MLP's two layers
with the convolution between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import modes
from ...backends import Record
from ...records import (
    AnyLinear,
    ConvBatchNorm,
    GeluVariant,
    Linear,
    QuantizedLinear,
    QuantizedRows,
    Reduction,
    TransformerBlock,
)
from ...reference import attended_keys
from .. import weight_cache
from ..attention import attention
from ..conv_linear import conv_linear
from ..conv_projection import conv_projection
from ..depthwise_conv_gelu import depthwise_conv_gelu
from ..layer_norm_gelu import layer_norm
from ..linear import linear, linear_add, linear_add_layer_norm, linear_gelu
from ..linear_int8 import gelu_quantize, layer_norm_quantize, linear_int8
from ..mlp import layer_norm_mlp
from ..reduction_linear import reduction_linear
from ..rows import gather_rows, scatter_rows


def transformer_block(call: Record) -> Any:
    """Computes ``cvt_kernels.transformer_block`` for checked arguments."""
    x, grid, block, rows, _, inplace = call
    q, k, v = _heads(block, _project(_normalize(x, block), grid, block, rows))
    y = attention(q, k, v, scale=block.scale).flatten(2)
    if rows is None:
        out = _finish(y, x, grid, block, inplace=inplace)
        out = x.copy_(out) if inplace and out is not x else out
    else:
        gathered = gather_rows(x, rows)
        may_replace = modes.may_change(gathered, *block.tensors())
        out = scatter_rows(x, rows, _finish(y, gathered, grid, block, inplace=may_replace), inplace=inplace)
    if call.scores is None:
        return out
    class_tokens, pool = x.shape[1] - grid[0] * grid[1], call.scores
    return out, attended_keys(q, k, scale=block.scale, pool=pool, class_tokens=class_tokens, rows=rows)


def compute_within_stage(
    stream: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    shifts: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    class_token_only: bool = False,
    mlp_is_one: bool = False,
) -> Tensor:
    """Computes a block of CvT on a stream that nobody reads again, without gradients.

    The stream (B, T, C) is overwritten where products accumulate into it. ``block`` lacks the biases that the
    stream has in advance, and ``shifts`` (C,) are what the two LayerNorms add to it. With
    ``class_token_only`` nobody reads other tokens of the result, which are then views of their image's class
    token; with ``mlp_is_one`` LayerNorm and MLP are one operator.
    """
    y = _normalize(stream, block, shifts[0])
    projected: Sequence[Tensor]
    if class_token_only:  # which has no convolution
        queries = _apply(y[:, 0], block.linears[0])[:, None]
        projected = [queries, *_project_by(block.convs[1:], block.linears[1:], y, grid)]
        kept = stream[:, :1].contiguous()
    else:
        projected, kept = _project(y, grid, block, None), stream
    q, k, v = _heads(block, projected)
    y = attention(q, k, v, scale=block.scale).flatten(2)
    out = _finish(y, kept, grid, block, shifts[1], inplace=True, mlp_is_one=mlp_is_one)
    return out.expand_as(stream) if class_token_only else out


def _normalize(x: Tensor, block: TransformerBlock, shift: Tensor | None = None) -> Tensor:
    norm = block.norm1
    return layer_norm(x, norm.weight, norm.bias, eps=norm.eps, shift=shift)


def _heads(block: TransformerBlock, projected: Sequence[Tensor]) -> list[Tensor]:
    return [tokens.unflatten(2, (block.num_heads, -1)) for tokens in projected]


def _project(
    y: Tensor, grid: tuple[int, int], block: TransformerBlock, rows: Tensor | None
) -> Sequence[Tensor]:
    """Returns queries, keys and values."""
    if block.convs and rows is None:
        return _project_by(block.convs, block.linears, y, grid)
    plain = [layer for layer in block.linears if isinstance(layer, Linear)]
    is_packable = weight_cache.why_unpackable(y, *block.tensors()) is None
    if not block.convs and len(plain) == len(block.linears) and is_packable:
        return _project_packed(y, grid, block, plain, rows)
    queries, *kept = _tokens_to_project(y, grid, block)
    queries = queries if rows is None else gather_rows(queries, rows)
    return [_apply(tokens, layer) for tokens, layer in zip((queries, *kept), block.linears, strict=True)]


def _project_by(
    convs: Sequence[ConvBatchNorm], linears: Sequence[AnyLinear], y: Tensor, grid: tuple[int, int]
) -> Sequence[Tensor]:
    """Returns tokens behind convolutions, each by its linear layer."""
    plain = [layer for layer in linears if isinstance(layer, Linear)]
    if len(plain) == len(linears):
        return conv_linear(y, grid, convs, plain)
    projected = conv_projection(y, grid, convs, training=False)
    return [_apply(tokens, layer) for tokens, layer in zip(projected, linears, strict=True)]


def _project_packed(
    y: Tensor, grid: tuple[int, int], block: TransformerBlock, layers: Sequence[Linear], rows: Tensor | None
) -> Sequence[Tensor]:
    """Returns queries, keys and values by packed weights."""
    if block.reduce is None and rows is None:
        return linear(y, *weight_cache.packed_linears(layers)).chunk(3, dim=2)
    queries = linear(y if rows is None else gather_rows(y, rows), *layers[0])
    if isinstance(block.reduce, Reduction):
        made = _reduce(y, grid, block.reduce, layers[1:])
    else:
        made = linear(y, *weight_cache.packed_linears(layers[1:]))
    return queries, *made.chunk(2, dim=2)


def _reduce(y: Tensor, grid: tuple[int, int], reduction: Reduction, layers: Sequence[Linear]) -> Tensor:
    """Returns layers of reduced tokens side by side, by a weight packed with channels last."""
    weight, bias, norm = reduction

    def pack() -> Tensor:
        return weight.clone(memory_format=torch.channels_last)

    packed = weight_cache.packed(weight, "channels last", pack)
    vectors = bias, norm.weight, norm.bias
    (made,) = reduction_linear(y, grid, packed, *vectors, [weight_cache.packed_linears(layers)], eps=norm.eps)
    return made


def _tokens_to_project(y: Tensor, grid: tuple[int, int], block: TransformerBlock) -> Sequence[Tensor]:
    """Returns the tokens from which Q, K and V are projected; for Q, all tokens."""
    if isinstance(block.reduce, Reduction):
        kept = reduce_tokens(y, grid, block.reduce)
        return y, kept, kept
    return conv_projection(y, grid, block.convs, training=False) if block.convs else (y, y, y)


def reduce_tokens(x: Tensor, grid: tuple[int, int], reduction: Reduction) -> Tensor:
    """Reduces tokens (B, H·W, C) to (B, H'·W', C)."""
    weight, bias, norm = reduction
    kept = linear(squares_of(x, grid, weight.shape[-1]), matrix_of(weight), bias)
    return layer_norm(kept, norm.weight, norm.bias, eps=norm.eps)


def squares_of(x: Tensor, grid: tuple[int, int], ratio: int) -> Tensor:
    """Returns the squares of ratio × ratio tokens of x (B, H·W, C) as rows (B, H'·W', ratio² · C)."""
    image = x.unflatten(1, grid)
    if modes.is_known(grid[0] % ratio == 0) and modes.is_known(grid[1] % ratio == 0):
        squares = image.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio)).transpose(2, 3)
    else:  # without the last rows and columns, which a slice of symbolic sizes would compare
        squares = image.unfold(1, ratio, ratio).unfold(2, ratio, ratio).movedim(3, 5)
    return squares.flatten(3).flatten(1, 2)


def matrix_of(weight: Tensor) -> Tensor:
    """Returns the weight (outputs, C, ratio, ratio) of a reduction as (outputs, ratio² · C)."""
    return weight.permute(0, 2, 3, 1).flatten(1)


def _finish(
    y: Tensor,
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    shift: Tensor | None = None,
    *,
    inplace: bool,
    mlp_is_one: bool = False,
) -> Tensor:
    """Returns x after the block, from the result of attention."""
    fc2, approximate, weight = block.fc2, block.approximate, block.norm2.weight
    if mlp_is_one:
        stream, layers = _add(y, block.proj, x, inplace), (*block.fc1, *fc2)
        settings: Any = {"eps": block.norm2.eps, "approximate": approximate, "shift": shift}
        return layer_norm_mlp(stream, weight, block.norm2.bias, *layers, **settings)
    stream, rows = _add_and_normalize(y, x, block, shift, inplace)
    rounds_after_gelu = block.mix is None and isinstance(fc2, QuantizedLinear)
    is_last = block.mix is None and not rounds_after_gelu
    hidden: Any = _hide(rows, block.fc1, approximate if is_last else None, stream.dtype)
    if block.mix is not None:
        hidden = depthwise_conv_gelu(hidden, grid, *block.mix, approximate=approximate)
    elif rounds_after_gelu:
        hidden = gelu_quantize(hidden, approximate=approximate, dtype=fc2.weight.dtype)
    # PyTorch lays out a sum as its first summand.
    may_replace = (
        isinstance(fc2, Linear) and stream.is_contiguous() and modes.may_change(stream, hidden, *fc2)
    )
    return _add(hidden, fc2, stream, inplace=may_replace)


def _add_and_normalize(
    y: Tensor, x: Tensor, block: TransformerBlock, shift: Tensor | None, inplace: bool
) -> tuple[Tensor, Tensor | QuantizedRows]:
    """Returns the stream, x + proj(y), and its LayerNorm for the MLP, rounded if that rounds."""
    (weight, bias, eps), proj = block.norm2, block.proj
    if isinstance(block.fc1, Linear) and isinstance(proj, Linear):
        return linear_add_layer_norm(y, *proj, x, weight, bias, eps=eps, shift=shift, inplace=inplace)
    stream = _add(y, proj, x, inplace)
    if isinstance(block.fc1, Linear):
        return stream, layer_norm(stream, weight, bias, eps=eps, shift=shift)
    dtype = block.fc1.weight.dtype
    return stream, layer_norm_quantize(stream, weight, bias, eps=eps, shift=shift, dtype=dtype)


def _hide(
    rows: Tensor | QuantizedRows, fc1: AnyLinear, approximate: GeluVariant | None, dtype: torch.dtype
) -> Tensor:
    """Returns the hidden channels of the MLP, after their GELU if it is given."""
    if isinstance(fc1, QuantizedLinear):
        return linear_int8(rows, *fc1, approximate=approximate, dtype=dtype)
    assert isinstance(rows, Tensor)
    return linear(rows, *fc1) if approximate is None else linear_gelu(rows, *fc1, approximate=approximate)


def _apply(x: Tensor, layer: AnyLinear) -> Tensor:
    return linear(x, *layer) if isinstance(layer, Linear) else linear_int8(x, **layer._asdict())


def _add(y: Tensor | QuantizedRows, layer: AnyLinear, stream: Tensor, inplace: bool) -> Tensor:
    """Returns the sum of the stream and a linear layer; a float layer may write it in place."""
    if isinstance(layer, Linear):
        assert isinstance(y, Tensor)
        return linear_add(y, *layer, stream, inplace=inplace)
    dtype = torch.promote_types(stream.dtype, modes.autocast_dtype(stream) or stream.dtype)
    return linear_int8(y, **layer._asdict(), residual=stream, dtype=dtype)
