"""Transformer blocks on a CPU with oneDNN's linear layers, whose weights are packed once: inference only.

See ``packed_linear``. Everything else is done by this package's operators, each by its own verdict.
"""

from __future__ import annotations

from typing import Any

from ...backends import Record
from ...reference import attended_keys
from .. import packed_linear as packed
from ..attention import attention
from ..conv_projection import conv_projection
from ..layer_norm_gelu import layer_norm
from ..packed_linear import ACTIVATIONS, packed_linear, packed_linear_add
from ..rows import gather_rows, scatter_rows


def why_unsupported(call: Record) -> str | None:
    """Says why these linear layers cannot serve a call; None if they can."""
    x, block = call.x, call.block
    if block.quantized_layers():
        return "has no quantized layers"
    return packed.why_unsupported(x, [layer.weight for layer in block.layers()], block.tensors())


def transformer_block(call: Record) -> Any:
    """Computes ``cvt_kernels.transformer_block``, whose checks it relies on."""
    x, grid, block, rows, scores, inplace = call
    norm1, norm2, heads = block.norm1, block.norm2, block.num_heads
    activation = ACTIVATIONS[block.approximate]
    y = layer_norm(x, norm1.weight, norm1.bias, eps=norm1.eps)
    projected = list(conv_projection(y, grid, block.convs, training=False))
    if rows is not None:
        projected[0] = gather_rows(projected[0], rows)
    q, k, v = (
        packed_linear(tokens, each).unflatten(2, (heads, -1))
        for tokens, each in zip(projected, block.linears, strict=True)
    )
    y = attention(q, k, v, scale=block.scale).flatten(2)
    stream = packed_linear_add(y, block.proj, x.contiguous() if rows is None else gather_rows(x, rows))
    y = layer_norm(stream, norm2.weight, norm2.bias, eps=norm2.eps)
    y = packed_linear(y, block.fc1, activation=activation)
    y = packed_linear_add(y, block.fc2, stream, 1 / activation.factor)
    out = y if rows is None else scatter_rows(x, rows, y, inplace=inplace)
    out = x.copy_(out) if inplace and out is not x else out
    if scores is None:
        return out
    class_tokens = x.shape[1] - grid[0] * grid[1]
    return out, attended_keys(q, k, scale=block.scale, pool=scores, class_tokens=class_tokens, rows=rows)
