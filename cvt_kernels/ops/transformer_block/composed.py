"""A transformer block composed of other operators of this package, each with its own cache entry.

Without convolutional projections and gradients, linear layers that read the same tokens are one product, of
weights that are packed side by side: K and V behind a reduction, else Q, K and V. The reduction and the first
of these are ``reduction_linear``. So a block of SegFormer or PVT v2 is eight launches of kernels on a GPU,
seven without a reduction: LayerNorm, Q, the reduction with K and V, attention, the layer behind it with
residual and LayerNorm, and the MLP's two layers with the convolution between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import modes
from ...backends import Record
from ...records import AnyLinear, Linear, QuantizedLinear, Reduction, TransformerBlock
from ...reference import attended_keys
from .. import weight_cache
from ..attention import attention
from ..conv_linear import conv_linear
from ..conv_projection import conv_projection
from ..depthwise_conv_gelu import depthwise_conv_gelu
from ..layer_norm_gelu import layer_norm
from ..linear import linear, linear_add, linear_add_layer_norm, linear_gelu
from ..linear_int8 import layer_norm_quantize, linear_int8
from ..reduction_linear import reduction_linear
from ..rows import gather_rows, scatter_rows
from .reduction import reduce_tokens


def transformer_block(call: Record) -> Any:
    """Computes ``cvt_kernels.transformer_block`` for checked arguments."""
    x, grid, block, rows, _, inplace = call
    y = layer_norm(x, block.norm1.weight, block.norm1.bias, eps=block.norm1.eps)
    q, k, v = (tokens.unflatten(2, (block.num_heads, -1)) for tokens in _project(y, grid, block, rows))
    y = attention(q, k, v, scale=block.scale).flatten(2)
    if rows is None:
        out = _finish(y, x, grid, block, inplace)
        out = x.copy_(out) if inplace and out is not x else out
    else:
        gathered = gather_rows(x, rows)
        may_replace = modes.may_change(gathered, *block.tensors())
        out = scatter_rows(x, rows, _finish(y, gathered, grid, block, may_replace), inplace=inplace)
    return with_scores(out, q, k, call)


def with_scores(out: Tensor, q: Tensor, k: Tensor, call: Record) -> Any:
    """Returns the result of a call: x after the block, with the scores if requested."""
    x, grid, block, rows, scores, _ = call
    if scores is None:
        return out
    class_tokens = x.shape[1] - grid[0] * grid[1]
    return out, attended_keys(q, k, scale=block.scale, pool=scores, class_tokens=class_tokens, rows=rows)


def _project(
    y: Tensor, grid: tuple[int, int], block: TransformerBlock, rows: Tensor | None
) -> Sequence[Tensor]:
    """Returns queries, keys and values."""
    plain = [layer for layer in block.linears if isinstance(layer, Linear)]
    if block.convs and rows is None and len(plain) == len(block.linears):
        return conv_linear(y, grid, block.convs, plain)
    is_packable = weight_cache.why_unpackable(y, *block.tensors()) is None
    if not block.convs and len(plain) == len(block.linears) and is_packable:
        return _project_packed(y, grid, block, plain, rows)
    queries, *kept = _tokens_to_project(y, grid, block)
    queries = queries if rows is None else gather_rows(queries, rows)
    return [_apply(tokens, layer) for tokens, layer in zip((queries, *kept), block.linears, strict=True)]


def _project_packed(
    y: Tensor, grid: tuple[int, int], block: TransformerBlock, layers: Sequence[Linear], rows: Tensor | None
) -> Sequence[Tensor]:
    """Returns queries, keys and values by packed weights."""
    if block.reduce is None and rows is None:
        return linear(y, *_side_by_side(layers)).chunk(3, dim=2)
    queries = linear(y if rows is None else gather_rows(y, rows), *layers[0])
    if isinstance(block.reduce, Reduction):
        made = _reduce(y, grid, block.reduce, layers[1:])
    else:
        made = linear(y, *_side_by_side(layers[1:]))
    return queries, *made.chunk(2, dim=2)


def _side_by_side(layers: Sequence[Linear]) -> Linear:
    """Returns layers of the same tokens as one, packed."""

    @torch.inference_mode(False)  # copies made in inference mode could not be used outside it
    @torch.no_grad()
    def pack() -> Linear:
        weight = torch.cat([layer.weight for layer in layers])
        if all(layer.bias is None for layer in layers):
            return Linear(weight)
        return Linear(weight, torch.cat([_bias_of(layer) for layer in layers]))

    first, *others = (tensor for layer in layers for tensor in layer)
    assert first is not None
    return weight_cache.packed(first, f"{len(layers)} layers side by side", pack, others)


def _bias_of(layer: Linear) -> Tensor:
    return layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias


def _reduce(y: Tensor, grid: tuple[int, int], reduction: Reduction, layers: Sequence[Linear]) -> Tensor:
    """Returns layers of reduced tokens side by side, by a weight packed with channels last."""
    weight, bias, norm = reduction

    @torch.inference_mode(False)
    @torch.no_grad()
    def pack() -> Tensor:
        return weight.clone(memory_format=torch.channels_last)

    packed = weight_cache.packed(weight, "channels last", pack)
    vectors = bias, norm.weight, norm.bias
    (made,) = reduction_linear(y, grid, packed, *vectors, [_side_by_side(layers)], eps=norm.eps)
    return made


def _tokens_to_project(y: Tensor, grid: tuple[int, int], block: TransformerBlock) -> Sequence[Tensor]:
    """Returns the tokens from which Q, K and V are projected; for Q, all tokens."""
    if isinstance(block.reduce, Reduction):
        kept = reduce_tokens(y, grid, block.reduce)
        return y, kept, kept
    return conv_projection(y, grid, block.convs, training=False) if block.convs else (y, y, y)


def _finish(y: Tensor, x: Tensor, grid: tuple[int, int], block: TransformerBlock, inplace: bool) -> Tensor:
    """Returns x after the block, from the result of attention."""
    stream, hidden = _add_and_hide(y, x, grid, block, inplace)
    # PyTorch lays out a sum as its first summand.
    may_replace = stream.is_contiguous() and modes.may_change(stream, hidden, *block.fc2)
    return _add(hidden, block.fc2, stream, inplace=may_replace)


def _add_and_hide(
    y: Tensor, x: Tensor, grid: tuple[int, int], block: TransformerBlock, inplace: bool
) -> tuple[Tensor, Tensor]:
    """Returns the stream, x + proj(y), and the hidden channels of the MLP after their GELU."""
    norm, proj, fc1, approximate = block.norm2, block.proj, block.fc1, block.approximate
    if isinstance(fc1, QuantizedLinear):
        stream = _add(y, proj, x, inplace)
        weight, scale, bias = fc1
        rows = layer_norm_quantize(stream, norm.weight, norm.bias, eps=norm.eps, dtype=weight.dtype)
        activation = None if block.mix is not None else approximate
        hidden = linear_int8(rows, weight, scale, bias, approximate=activation, dtype=stream.dtype)
    else:
        if isinstance(proj, Linear):
            stream, y = linear_add_layer_norm(
                y, *proj, x, norm.weight, norm.bias, eps=norm.eps, inplace=inplace
            )
        else:
            stream = _add(y, proj, x, inplace)
            y = layer_norm(stream, norm.weight, norm.bias, eps=norm.eps)
        if block.mix is None:
            return stream, linear_gelu(y, *fc1, approximate=approximate)
        hidden = linear(y, *fc1)
    if block.mix is not None:
        hidden = depthwise_conv_gelu(hidden, grid, *block.mix, approximate=approximate)
    return stream, hidden


def _apply(x: Tensor, layer: AnyLinear) -> Tensor:
    return linear(x, *layer) if isinstance(layer, Linear) else linear_int8(x, **layer._asdict())


def _add(y: Tensor, layer: AnyLinear, stream: Tensor, inplace: bool) -> Tensor:
    """Returns the sum of the stream and a linear layer; a float layer may write it in place."""
    if isinstance(layer, Linear):
        return linear_add(y, *layer, stream, inplace=inplace)
    dtype = torch.promote_types(stream.dtype, modes.autocast_dtype(stream) or stream.dtype)
    return linear_int8(y, **layer._asdict(), residual=stream, dtype=dtype)
