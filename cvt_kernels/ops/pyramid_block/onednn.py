"""Blocks of SegFormer and PVT on a CPU with oneDNN's linear layers, packed once: inference only.

See ``packed_linear``. Layers that read the same tokens are one product: K and V, with Q where nothing makes
fewer tokens for these. A reduction is a linear layer of squares of tokens. Everything else is done by this
package's operators, each by its own verdict.
"""

from __future__ import annotations

from torch import Tensor

from ...backends import Record
from ...records import Linear, PyramidBlock, Reduction
from .. import packed_linear as packed
from ..attention import attention
from ..depthwise_conv_gelu import depthwise_conv_gelu
from ..layer_norm_gelu import layer_norm
from ..packed_linear import ACTIVATIONS, packed_linear, packed_linear_add
from .squares import matrix_of, squares_of


def why_unsupported(call: Record) -> str | None:
    """Says why these linear layers cannot serve a call; None if they can."""
    x, block = call.x, call.block
    layers = (*block.linears, block.proj, block.fc1, block.fc2)
    weights = [layer.weight for layer in layers]
    if block.reduction is not None:
        weights.append(block.reduction.weight)
    return packed.why_unsupported(x, weights, block.tensors())


def pyramid_block(call: Record) -> Tensor:
    """Computes ``cvt_kernels.pyramid_block``, whose checks it relies on."""
    x, grid, block, inplace = call
    y = layer_norm(x, *block.norm1[:2], eps=block.norm1.eps)
    q, k, v = (part.unflatten(2, (block.num_heads, -1)) for part in _project(y, grid, block))
    y = attention(q, k, v, scale=block.scale).flatten(2)
    stream = packed_linear_add(y, block.proj, x.contiguous())
    y = layer_norm(stream, *block.norm2[:2], eps=block.norm2.eps)
    factor = 1.0
    if block.conv is None:
        activation = ACTIVATIONS[block.approximate]
        hidden, factor = packed_linear(y, block.fc1, activation=activation), 1 / activation.factor
    else:
        hidden = packed_linear(y, block.fc1)
        hidden = depthwise_conv_gelu(hidden, grid, *block.conv, approximate=block.approximate)
    out = packed_linear_add(hidden, block.fc2, stream, factor)
    return x.copy_(out) if inplace else out


def _project(y: Tensor, grid: tuple[int, int], block: PyramidBlock) -> tuple[Tensor, ...]:
    """Returns queries, keys and values."""
    if block.reduction is None:
        return packed_linear(y, *block.linears).chunk(3, dim=2)
    q, *keys_and_values = block.linears
    kept = _reduce(y, grid, block.reduction)
    return packed_linear(y, q), *packed_linear(kept, *keys_and_values).chunk(2, dim=2)


def _reduce(y: Tensor, grid: tuple[int, int], reduction: Reduction) -> Tensor:
    weight, bias, norm = reduction
    squares = squares_of(y, grid, weight.shape[-1])
    kept = packed_linear(squares, Linear(weight, bias), lay_out=matrix_of)
    return layer_norm(kept, *norm[:2], eps=norm.eps)
