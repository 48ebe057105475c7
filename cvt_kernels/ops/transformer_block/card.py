"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

from typing import Any

import torch

from ...records import DepthwiseConv, Linear, Norm, Reduction, TransformerBlock
from .. import cards
from ..conv_projection.card import conv_batch_norm

#: Of examples.
BLOCK = cards.MAP | {"kernel": 3, "heads": 2, "head_dim": 8, "hidden": 33}
PYRAMID = cards.MAP | {"reduce": "squares", "ratio": 2, "heads": 2, "head_dim": 8, "hidden": 33}
CHOICES = cards.FORWARD | cards.GRID | cards.NORM | {
    # Large ones would make chance of what 16 bits round between its parts.
    "parameters": ("normal", "zeros", "tiny"),
    "gradient": ("none", "all"), "upstream": ("contiguous",), "channels": cards.WIDE, "heads": (1, 2, 3, 4),
    "head_dim": (*cards.SIZES, 64, 65, 128), "hidden": cards.WIDEST, "scale": (None, 0.1, 0.0, -1.0),
    "approximate": cards.VARIANTS, "inplace": cards.BOTH, "kernel": (1, 3, 5), "stride": (1, 2, 3),
    "class_token": cards.BOTH, "mixed": cards.BOTH, **cards.ABSENT,
    "quantized_layers": ("none", "all", "0", "1", "2", "3", "4", "5"),
    "reduce": ("convolutions", "squares", "nothing"), "ratio": (1, 2, 3, 4, 8), "mixes": cards.BOTH,
}  # fmt: skip


def make_block(m: Any) -> Any:
    """Makes the arguments of a call with one block."""
    has_convs, whole = m.reduce == "convolutions", m.mixes or m.reduce == "squares"
    class_token = 0 if whole else m.class_token
    width, tokens = m.heads * m.head_dim, m.height * m.width + class_token
    c, layers = m.channels, []
    m.statistics = "running"
    shapes = ((width, c),) * 3 + ((c, width), (m.hidden, c), (c, m.hidden))
    for i, shape in enumerate(shapes):
        if m.quantized_layers in ("all", str(i)):
            m.gradient = "none"
            layers.append(m.quantized(*shape, torch.int8))
        else:
            layers.append(m.linear(*shape))
    norm1, norm2, reduce, mix = m.norm(c), m.norm(c), _reduce(m), None
    if m.mixes:
        mix = DepthwiseConv(m.parameter(m.hidden, 1, 3, 3, scale=1 / 3), m.optional(m.hidden))
    *linears, proj, fc1, fc2 = layers
    block = TransformerBlock(
        norm1, reduce, tuple(linears), m.heads, m.scale, proj, norm2, fc1, m.approximate, fc2, mix
    )
    for tensor in block.tensors():
        if tensor is not None and m.gradient == "none":
            tensor.requires_grad_(False)
    settings: dict[str, Any] = {"inplace": m.inplace}
    scores = None if m.scores == "none" or (m.scores == "cls" and not class_token) else m.scores
    if m.dtype == torch.bfloat16 or m.autocast or not has_convs:
        scores = None  # they are made of a single query that is rounded: chance would decide
    if m.count and not m.mixes:
        settings["rows"] = m.index(
            m.batch, tokens, min(m.count, tokens), ascending=True, first=scores == "cls"
        )
    if scores is not None:
        settings["scores"] = scores
    return (m.activation(m.batch, tokens, c), (m.height, m.width), block), settings


def _reduce(m: Any) -> Any:
    """Returns what makes the tokens of queries, keys and values of a block."""
    c, k = m.channels, m.kernel
    if m.reduce == "convolutions":
        return tuple(m.conv(c, k, stride, k // 2) for stride in (1, m.stride, m.stride))
    if m.reduce == "nothing":
        return None
    ratio = min(m.ratio, m.height, m.width)
    weight = m.parameter(c, c, ratio, ratio, scale=c**-0.5 / ratio)
    return Reduction(weight, m.optional(c), m.norm(c))


def block_of(step: cards.Step) -> TransformerBlock:
    """Returns a block of a CvT's stage."""
    c = step.channels
    convs = tuple(conv_batch_norm(step, stride) for stride in (1, 2, 2))
    return _block(step, convs, c, 4 * c, c // 64, c**-0.5, "quick", None)


def _pyramid_block_of(step: cards.Step, c: int) -> TransformerBlock:
    """Returns a block of ``c`` channels of a pyramid's stage, with a Mix-FFN."""
    reduction, hidden, heads, reduce = step.stage.embedding, step.channels, step.stage.heads, None
    if reduction is not None:
        ratio = reduction.stride
        reduce = Reduction(step.tensor(c, c, ratio, ratio), step.tensor(c), _norm(step, c))
    depthwise = DepthwiseConv(step.tensor(hidden, 1, 3, 3), step.tensor(hidden))
    return _block(step, reduce, c, hidden, heads, None, "none", depthwise)


def _block(
    step: cards.Step, reduce: Any, c: int, hidden: int, heads: int, scale: float | None, approximate: Any,
    depthwise: DepthwiseConv | None,
) -> TransformerBlock:  # fmt: skip
    def layer(inputs: int, outputs: int) -> Linear:
        return Linear(step.tensor(outputs, inputs), step.tensor(outputs))

    return TransformerBlock(
        _norm(step, c), reduce, (layer(c, c), layer(c, c), layer(c, c)), heads, scale, layer(c, c),
        _norm(step, c), layer(c, hidden), approximate, layer(hidden, c), depthwise,
    )  # fmt: skip


def _norm(step: cards.Step, channels: int) -> Norm:
    return Norm(step.tensor(channels), step.tensor(channels), 1e-5)


def _block_stage(step: cards.Step) -> None:
    """Runs a block of CvT."""
    step.call("transformer_block", step.x(), step.stage.grid, block_of(step))


def _pyramid_block_stage(step: cards.Step) -> None:
    """Runs a block of SegFormer or PVT v2."""
    reduction = step.stage.embedding
    c = step.channels // 4 if reduction is None else reduction.in_channels
    block = _pyramid_block_of(step, c)
    step.call("transformer_block", step.tensor(step.batch, step.tokens, c), step.stage.grid, block)


CARDS = {
    "transformer_block": cards.Card(
        call=make_block,
        choices=CHOICES | {"count": (0, 1, 2, 3, 5, 9, 17), "scores": ("none", "cls", "avg")},
        examples={
            "usual": BLOCK | {"class_token": True, "stride": 2},
            "odd": BLOCK | cards.ODD_MAP | {"heads": 1, "head_dim": 7},
            "empty": BLOCK | {"batch": 0},
            "many": BLOCK | cards.MANY_PIXELS,
            "tiny": BLOCK | cards.TINY_MAP | {"head_dim": 2, "hidden": 4},
            "bare": BLOCK | {"bare": True, "approximate": "quick"},
            "rows": BLOCK | {"class_token": True, "count": 9, "scores": "cls"},
            "SegFormer": PYRAMID | {"mixes": True},
            "PVT": PYRAMID,
            "inplace=True": BLOCK | {"inplace": True},
        },
        without_gradients=("cpu",),
        normalizes=True,
        stages={
            "transformer_block": cards.Launches(_block_stage),
            "pyramid_block": cards.Launches(_pyramid_block_stage, of_pyramids=True),
        },
        found=(
            "layout=transposed channels=2 class_token=True quantized_layers=4 seed=0",
            "values=infinite batch=2 gradient=all channels=2 seed=0",
            "dtype=bfloat16 values=nan_row channels=16 inplace=True count=1 seed=0",
            "dtype=bfloat16 values=tiny parameters=zeros inplace=True seed=0",
            "values=minus_infinite threads=3 width=7 stride=2 quantized_layers=0 seed=0",
            "dtype=float16 autocast=True bare=True quantized_layers=3 reduce=squares seed=0",
        ),
    )
}
