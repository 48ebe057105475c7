"""Blocks of CvT on sm_90 in six launches each, of few tokens in four, none of them for LayerNorm.

    projection       normalizes the tokens as it reads them, for Q, K and V
    Q, K and V       one product
    attention
    proj             adds to the tokens in place, and writes their statistics
    fc1              with LayerNorm folded in, then GELU
    fc2              adds to the tokens in place, and writes their statistics for the next block

Statistics are the sums of each part of a token's channels and of their squared deviations from its mean; see
``linear.gluon``. LayerNorm's weight is part of a copy of fc1's, its bias of fc1's bias. Only the first block
needs a launch for its first LayerNorm, since nobody has written statistics for it.

Of few tokens, the projection and its product are one launch (``conv_linear.few_rows``), which also computes
the first LayerNorm of the first block, and so are attention and proj (``attention_add``).

Bytes, in units of one B·T·C activation: 2.5 of the projection, 3 of Q, K and V, 3 of attention, 3 of proj, 5
of fc1, 6 of fc2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ... import launching
from ...backends import Record
from ...records import Linear, TransformerBlock
from .. import weight_cache
from ..attention import attention
from ..autograd import count_change
from ..conv_linear.gluon import multiply
from ..conv_linear.stacked import (
    Projection,
    branches_of,
    packed_linears,
    project,
    taps_of,
    why_not_projected,
)
from ..conv_projection.triton.sliding_forward import NormOfRows
from ..layer_norm_gelu import layer_norm
from ..linear import gluon
from . import attention_add

# The second half of a block ---------------------------------------------------------------------------------


class SecondHalf(NamedTuple):
    """The launches from the result of attention to the end of a block.

    Attributes:
        y: (M, channels of all heads), the result of attention; or queries, keys and values (B, N, h, D), of
            few tokens, which one launch attends and projects.
        scale: Of the scores.
        stream: (M, C), the tokens, which are overwritten.
        proj_weight, proj_bias: The linear layer after attention.
        fc1_weight, fc1_bias, column_sums: The first layer of the MLP, with LayerNorm folded into it.
        fc2_weight, fc2_bias: The second layer of the MLP.
        eps: LayerNorm's.
        approximate: GELU's variant.
        has_statistics: Whether the statistics of the result are written, for a next block.
    """

    y: Tensor | tuple[Tensor, Tensor, Tensor]
    scale: float
    stream: Tensor
    proj_weight: Tensor
    proj_bias: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor
    column_sums: Tensor
    fc2_weight: Tensor
    fc2_bias: Tensor | None
    eps: float
    approximate: str
    has_statistics: bool


def finish(call: SecondHalf) -> Tensor:
    """Overwrites the stream; returns its statistics, or itself without them."""
    stream, fc2 = call.stream, gluon.aligned(call.fc2_weight)
    hidden = stream.new_empty(stream.shape[0], call.fc1_weight.shape[0])
    norm = gluon.FoldedNorm(_project_attended(call), call.column_sums, call.eps)
    gluon.product(stream, call.fc1_weight, call.fc1_bias, hidden, approximate=call.approximate, norm=norm)
    statistics = gluon.product(
        hidden, fc2, call.fc2_bias, stream, residual=stream, has_statistics=call.has_statistics
    )
    return stream if statistics is None else statistics.sums


def _project_attended(call: SecondHalf) -> gluon.Statistics:
    """Adds the layer after attention to the stream; returns the statistics of its rows."""
    proj, bias, stream = call.proj_weight, call.proj_bias, call.stream
    if isinstance(call.y, Tensor):
        y, proj = gluon.aligned(call.y), gluon.aligned(proj)
        written = gluon.product(y, proj, bias, stream, residual=stream, has_statistics=True)
        assert written is not None
        return written
    q, k, v = call.y
    block_m = attention_add.tile_rows(q.shape, k.shape[1], len(proj), _multiprocessors(stream))
    assert block_m is not None
    sums = attention_add.attention_add(q, k, v, call.scale, proj, bias, stream, stream, block_m)
    return gluon.Statistics(sums, attention_add.COLUMNS)


def _multiprocessors(x: Tensor) -> int:
    return launching.chip(x.device).multiprocessors


def _folded_fc1(block: TransformerBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weight, bias and column sums of fc1 with LayerNorm folded in, kept until one changes."""
    weight, bias = block.fc1[:2]
    gamma, beta, _ = block.norm2

    def fold() -> tuple[Tensor, Tensor, Tensor]:
        exact = weight.double()
        folded = weight.clone() if gamma is None else (exact * gamma).to(weight.dtype)
        # They are the sums of the weight as it is rounded: a large mean then cancels.
        column_sums = folded.double().sum(1).float()
        shift = exact.new_zeros(weight.shape[0]) if beta is None else exact @ beta.double()
        return folded, (shift if bias is None else shift + bias).float(), column_sums

    return weight_cache.packed(weight, "fc1 with LayerNorm", fold, others=[bias, gamma, beta])


# The blocks -------------------------------------------------------------------------------------------------


def _taps_of(x: Tensor, grid: tuple[int, int], block: TransformerBlock) -> Tensor | None:
    """Returns the taps with which one launch projects x; None for two launches."""
    return taps_of(x, grid, block.convs, block.linears)  # type: ignore[arg-type]


def _projection(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    sums: Tensor | None,
    width: int,
    taps: Tensor | None,
) -> Projection:
    """Returns the launches of Q, K and V; x is normalized if it has neither statistics nor one launch."""
    norm, linears = None, packed_linears(block.linears)  # type: ignore[arg-type]
    if sums is not None or taps is not None:
        weight, bias, eps = block.norm1
        assert weight is not None
        assert bias is not None
        norm = NormOfRows(sums, width, weight, bias, eps)
    return Projection(x, grid, block.convs, *linears, norm, taps)


def _heads_of(
    out: Tensor, x: Tensor, grid: tuple[int, int], block: TransformerBlock
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries, keys and values (B, N, h, D), parts of what the projection has returned."""
    q, k, v = branches_of(out, x, grid, block.convs)
    return _by_head(q, block), _by_head(k, block), _by_head(v, block)


def _by_head(tokens: Tensor, block: TransformerBlock) -> Tensor:
    return tokens.unflatten(2, (block.num_heads, -1))


def _attends_in_one(heads: tuple[Tensor, Tensor, Tensor], block: TransformerBlock) -> bool:
    """Returns whether attention and the layer behind it are one launch."""
    q, k, _ = heads
    outputs, multiprocessors = block.proj.weight.shape[0], _multiprocessors(q)
    return attention_add.tile_rows(q.shape, k.shape[1], outputs, multiprocessors) is not None


def _second_half(
    y: Tensor | tuple[Tensor, Tensor, Tensor], stream: Tensor, block: TransformerBlock, has_statistics: bool
) -> SecondHalf:
    heads, outputs = block.num_heads, block.linears[0].weight.shape[0]
    scale = (outputs // heads) ** -0.5 if block.scale is None else block.scale
    return SecondHalf(
        y, scale, stream, *block.proj[:2], *_folded_fc1(block), *block.fc2[:2],
        eps=block.norm2.eps, approximate=block.approximate, has_statistics=has_statistics,
    )  # fmt: skip


def transformer_blocks(call: Record) -> Tensor:
    """Computes ``cvt_kernels.transformer_blocks`` for checked arguments."""
    x, grid, blocks, inplace = call
    stream = x if inplace and x.data_ptr() % 16 == 0 else x.clone()
    rows, sums, width = stream.view(-1, x.shape[2]), None, 0
    for i, block in enumerate(blocks):
        weight, bias, eps = block.norm1
        tokens, taps = stream, _taps_of(stream, grid, block)
        if sums is None and taps is None:
            tokens = layer_norm(stream, weight, bias, eps=eps)
        out = project(multiply, _projection(tokens, grid, block, sums, width, taps))
        y: Any = _heads_of(out, stream, grid, block)
        if not _attends_in_one(y, block):
            y = attention(*y, scale=block.scale).reshape(rows.shape[0], -1)
        is_last = i + 1 == len(blocks)
        sums, width = finish(_second_half(y, rows, block, not is_last)), _width(x, block)
    if not inplace:
        return stream
    if stream is not x:
        return x.copy_(stream)
    count_change(x)
    return x


def _width(x: Tensor, block: TransformerBlock) -> int:
    """Returns the channels of a part of the statistics that the second layer of a block's MLP writes."""
    outputs, inputs = block.fc2.weight.shape
    return gluon.part_width(x.numel() // outputs, outputs, inputs, x.device)


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x, grid, blocks, _ = call
    reason = weight_cache.why_unpackable(x, *(t for block in blocks for t in block.tensors()))
    if reason is None and not x.is_contiguous():
        reason = "the tokens are not contiguous"
    if reason is None and x.numel() >= 2**34:
        reason = "there are 2³⁴ elements or more, whose statistics may be 2³¹"
    whys = (why_not_served(x, grid, block) for block in blocks)
    return reason or next((why for why in whys if why is not None), None)


def why_not_served(x: Tensor, grid: tuple[int, int], block: TransformerBlock) -> str | None:
    """Returns why these kernels cannot compute a block of tokens like x (B, T, C), or None."""
    if not block.convs or block.mix is not None:
        return "a block is not one of CvT's"
    if not all(isinstance(layer, Linear) for layer in block.layers()):
        return "a linear layer is quantized"
    if block.norm1.weight is None or block.norm1.bias is None:
        return "the first LayerNorm of a block has no weight or no bias"
    whys = (gluon.why_not_multiplied(x, layer.weight) for layer in (block.proj, block.fc1, block.fc2))
    linears: Any = block.linears
    return why_not_projected(x, grid, block.convs, linears) or next(filter(None, whys), None)
