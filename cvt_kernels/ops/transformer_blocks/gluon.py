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

from typing import Any

from torch import Tensor

from ...backends import Record
from ...launch import launching
from ...records import Linear, TransformerBlock
from .. import weight_cache
from ..attention import attention
from ..autograd import count_change
from ..conv_linear.gluon import multiply
from ..conv_linear.stacked import branches_of, project, taps_of, why_not_projected
from ..conv_projection.triton.forward import NormOfRows
from ..layer_norm_gelu import layer_norm
from ..linear import gluon
from . import attention_add


def _finish(heads: list[Tensor], stream: Tensor, block: TransformerBlock, *, has_statistics: bool) -> Tensor:
    """Overwrites the stream (M, C) by all from attention to the end of a block.

    Returns:
        The statistics of the result for a next block, or the stream without ``has_statistics``.
    """
    written = _attend_and_project(heads, stream, block)
    fc1, bias, column_sums = _folded_fc1(block)
    fc2, fc2_bias = block.fc2[:2]
    hidden = stream.new_empty(stream.shape[0], fc1.shape[0])
    norm = gluon.FoldedNorm(written, column_sums, block.norm2.eps)
    gluon.product(stream, fc1, bias, hidden, approximate=block.approximate, norm=norm)
    statistics = gluon.product(
        hidden, gluon.aligned(fc2), fc2_bias, stream, residual=stream, has_statistics=has_statistics
    )
    return stream if statistics is None else statistics.sums


def _attend_and_project(heads: list[Tensor], stream: Tensor, block: TransformerBlock) -> gluon.Statistics:
    """Adds attention and the layer after it to the stream; returns the statistics of its rows.

    Of few tokens, both are one launch.
    """
    q, k, v = heads
    proj, bias = block.proj[:2]
    multiprocessors = launching.chip(stream.device).multiprocessors
    block_m = attention_add.tile_rows(q.shape, k.shape[1], len(proj), multiprocessors)
    if block_m is not None:
        scale = q.shape[3] ** -0.5 if block.scale is None else block.scale
        sums = attention_add.attention_add(q, k, v, scale, proj, bias, stream, stream, block_m)
        return gluon.Statistics(sums, attention_add.COLUMNS)
    y = attention(q, k, v, scale=block.scale).reshape(stream.shape[0], -1)
    written = gluon.product(
        gluon.aligned(y), gluon.aligned(proj), bias, stream, residual=stream, has_statistics=True
    )
    assert written is not None
    return written


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


def _project(
    x: Tensor, grid: tuple[int, int], block: TransformerBlock, sums: Tensor | None, width: int,
    taps: Tensor | None,
) -> Tensor:  # fmt: skip
    """Computes Q, K and V; x is normalized if it has neither statistics nor one launch."""
    norm, linears = None, weight_cache.packed_linears(block.linears)  # type: ignore[arg-type]
    if sums is not None or taps is not None:
        weight, bias, eps = block.norm1
        assert weight is not None
        assert bias is not None
        norm = NormOfRows(sums, width, weight, bias, eps)
    return project(multiply, x, grid, block.convs, *linears, norm, taps)


def transformer_blocks(call: Record) -> Tensor:
    """Computes ``cvt_kernels.transformer_blocks`` for checked arguments."""
    x, grid, blocks, inplace = call
    stream = x if inplace and x.data_ptr() % 16 == 0 else x.clone()
    rows, sums, width = stream.view(-1, x.shape[2]), None, 0
    for i, block in enumerate(blocks):
        weight, bias, eps = block.norm1
        tokens, taps = stream, taps_of(stream, grid, block.convs, block.linears)
        if sums is None and taps is None:
            tokens = layer_norm(stream, weight, bias, eps=eps)
        projected = branches_of(_project(tokens, grid, block, sums, width, taps), stream, grid, block.convs)
        heads = [each.unflatten(2, (block.num_heads, -1)) for each in projected]
        sums = _finish(heads, rows, block, has_statistics=i + 1 < len(blocks))
        width = _width(x, block)
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
