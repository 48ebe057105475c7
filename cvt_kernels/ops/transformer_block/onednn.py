"""Transformer blocks on a CPU with oneDNN's prepacked linear layers: inference only.

See ``onednn_layers``. Layers that read the same tokens are one product: K and V with a reduction, else Q, K
and V. A reduction is a linear layer of squares of tokens. Everything else uses this package's operators, each
with its own cache entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...backends import Record
from ...records import Linear, Reduction, TransformerBlock
from .. import onednn_layers as packed
from ..attention import attention
from ..conv_projection import conv_projection
from ..depthwise_conv_gelu import depthwise_conv_gelu
from ..layer_norm_gelu import layer_norm
from ..onednn_layers import ACTIVATIONS, packed_linear, packed_linear_add
from ..rows import gather_rows, scatter_rows
from .composed import with_scores
from .reduction import matrix_of, squares_of


def why_unsupported(call: Record) -> str | None:
    """Returns why these linear layers cannot serve a call, or None."""
    x, block = call.x, call.block
    if block.quantized_layers():
        return "has no quantized layers"
    weights = [layer.weight for layer in block.layers()]
    if isinstance(block.reduce, Reduction):
        weights.append(block.reduce.weight)
    return packed.why_unsupported(x, weights, block.tensors())


def transformer_block(call: Record) -> Any:
    """Computes ``cvt_kernels.transformer_block`` for checked arguments."""
    x, grid, block, rows, _, inplace = call
    norm1, norm2, heads = block.norm1, block.norm2, block.num_heads
    y = layer_norm(x, norm1.weight, norm1.bias, eps=norm1.eps)
    q, k, v = (part.unflatten(2, (heads, -1)) for part in _project(y, grid, block, rows))
    y = attention(q, k, v, scale=block.scale).flatten(2)
    stream = packed_linear_add(y, block.proj, x.contiguous() if rows is None else gather_rows(x, rows))
    y = layer_norm(stream, norm2.weight, norm2.bias, eps=norm2.eps)
    if block.mix is None:
        activation = ACTIVATIONS[block.approximate]
        hidden, factor = packed_linear(y, block.fc1, activation=activation), 1 / activation.factor
    else:
        hidden, factor = packed_linear(y, block.fc1), 1.0
        hidden = depthwise_conv_gelu(hidden, grid, *block.mix, approximate=block.approximate)
    y = packed_linear_add(hidden, block.fc2, stream, factor)
    out = y if rows is None else scatter_rows(x, rows, y, inplace=inplace)
    out = x.copy_(out) if inplace and out is not x else out
    return with_scores(out, q, k, call)


def _project(
    y: Tensor, grid: tuple[int, int], block: TransformerBlock, rows: Tensor | None
) -> Sequence[Tensor]:
    """Returns queries, keys and values."""
    of_q, *of_keys_and_values = block.linears
    if block.convs:
        projected = list(conv_projection(y, grid, block.convs, training=False))
        if rows is not None:
            projected[0] = gather_rows(projected[0], rows)
        return [packed_linear(tokens, each) for tokens, each in zip(projected, block.linears, strict=True)]
    if block.reduce is None and rows is None:
        return packed_linear(y, *block.linears).chunk(3, dim=2)
    kept = _reduce(y, grid, block.reduce) if isinstance(block.reduce, Reduction) else y
    queries = y if rows is None else gather_rows(y, rows)
    return packed_linear(queries, of_q), *packed_linear(kept, *of_keys_and_values).chunk(2, dim=2)


def _reduce(y: Tensor, grid: tuple[int, int], reduction: Reduction) -> Tensor:
    weight, bias, norm = reduction
    squares = squares_of(y, grid, weight.shape[-1])
    kept = packed_linear(squares, Linear(weight, bias), lay_out=matrix_of)
    return layer_norm(kept, norm.weight, norm.bias, eps=norm.eps)
