"""The blocks of PVT and PVT v2, transformers/models/pvt/ and pvt_v2/: their fused forwards and entries."""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.linear import linear
from .entries import (
    BlockEntry,
    bypassed,
    recognize_variant,
    variants_by_name,
    why_dropout_active,
    why_norms_unsupported,
)
from .fused import (
    add_and_normalize,
    apply_linear,
    apply_linear_and_gelu,
    gelu_variant,
    normalize_and_gelu,
    normalize_for_layers,
    why_gelu_replaced,
)
from .huggingface import UPSTREAM
from .parts import BlockParts
from .pyramid import (
    GELUS,
    as_map,
    attend,
    convolve_and_activate,
    drop,
    embed_tokens,
    reduce,
    why_convolution_unsupported,
    why_reduction_unsupported,
)
from .segformer import embeddings_entry, layer_entry

# Fused forwards of PVT ------------------------------------------------------------------------------------


def _embeddings(self: Any, pixel_values: Tensor) -> Any:
    if pixel_values.ndim == 4 and pixel_values.shape[1] != self.num_channels:
        return NotImplemented  # upstream has an error for it
    tokens, height, width = embed_tokens(self.projection, self.layer_norm, pixel_values)
    positions, first = self.position_embeddings, None
    if self.cls_token is not None:
        tokens = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)
        first, positions = positions[:, :1], positions[:, 1:]
    positions = self.interpolate_pos_encoding(positions, height, width)
    positions = positions if first is None else torch.cat((first, positions), dim=1)
    return self.dropout(tokens + positions), height, width


def _attention(
    self: Any, hidden_states: Tensor, height: int, width: int, output_attentions: bool = False
) -> Any:
    ratio = self.sequences_reduction_ratio
    if output_attentions or min(height, width) < ratio:
        return NotImplemented
    kept = hidden_states
    if ratio > 1:
        kept = reduce(self.sequence_reduction, self.layer_norm, hidden_states, (height, width))
    return (_attend(self, hidden_states, kept),)


def _attend(self: Any, x: Tensor, kept: Tensor) -> Tensor:
    heads = {"num_heads": self.num_attention_heads, "scale": self.attention_head_size**-0.5}
    return attend(x, kept, (self.query, self.key, self.value), **heads)


def _self_output(self: Any, hidden_states: Tensor) -> Tensor:
    return self.dropout(apply_linear(self.dense, hidden_states))


def _feed_forward(self: Any, hidden_states: Tensor) -> Tensor:
    approximate = gelu_variant(self.intermediate_act_fn)
    hidden = apply_linear_and_gelu(self.dense1, hidden_states, approximate=approximate)
    return self.dropout(apply_linear(self.dense2, self.dropout(hidden)))


def _layer(
    self: Any, hidden_states: Tensor, height: int, width: int, output_attentions: bool = False
) -> tuple[Tensor, ...]:
    stream, y, attentions = _attend_and_normalize(self, hidden_states, height, width, output_attentions)
    return (stream + self.drop_path(self.mlp(y)), *attentions)


def _attend_and_normalize(
    self: Any, x: Tensor, height: int, width: int, output_attentions: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Computes the first half of a layer: the residual stream, its LayerNorm, and attentions if wanted."""
    branch, *attentions = self.attention(
        hidden_states=normalize_for_layers(self.layer_norm_1, x),
        height=height,
        width=width,
        output_attentions=output_attentions,
    )
    return (*add_and_normalize(self.layer_norm_2, self.drop_path(branch), x), attentions)


# Fused forwards of PVT v2 ---------------------------------------------------------------------------------


def _attention_of_v2(
    self: Any, hidden_states: Tensor, height: int, width: int, output_attentions: bool = False
) -> Any:
    ratio = 1 if self.linear_attention else self.spatial_reduction_ratio
    if output_attentions or min(height, width) < ratio:
        return NotImplemented
    kept = hidden_states
    if self.linear_attention:
        kept = _pooled(self, hidden_states, height, width)
    elif ratio > 1:
        kept = reduce(self.spatial_reduction, self.layer_norm, hidden_states, (height, width))
    return (self.proj_drop(apply_linear(self.proj, _attend(self, hidden_states, kept))),)


def _pooled(self: Any, x: Tensor, height: int, width: int) -> Tensor:
    """Returns the tokens of keys and values in linear attention, 7×7 of them."""
    pooled = self.pool(as_map(x, (height, width)))
    conv = self.spatial_reduction
    tokens = linear(pooled.permute(0, 2, 3, 1).flatten(1, 2), conv.weight.flatten(1), conv.bias)
    return normalize_and_gelu(self.layer_norm, tokens, approximate=gelu_variant(self.act))


def _feed_forward_of_v2(self: Any, hidden_states: Tensor, height: int, width: int) -> Tensor:
    hidden = self.relu(apply_linear(self.dense1, hidden_states))
    hidden = convolve_and_activate(self.dwconv.dwconv, self.intermediate_act_fn, hidden, height, width)
    return self.dropout(apply_linear(self.dense2, drop(self.dropout, hidden)))


def _layer_of_v2(
    self: Any, hidden_states: Tensor, height: int, width: int, output_attentions: bool = False
) -> tuple[Tensor, ...]:
    stream, y, attentions = _attend_and_normalize(self, hidden_states, height, width, output_attentions)
    return (stream + self.drop_path(self.mlp(y, height, width)), *attentions)


# Table entries --------------------------------------------------------------------------------------------


_OPTIONAL_CONVOLUTION, _OPTIONAL_NORM = (nn.Conv2d, NoneType), (nn.LayerNorm, NoneType)
_ATTENTION_ARGUMENTS = "hidden_states", "height", "width", "output_attentions"


def _why_attention_unsupported(block: Any) -> str | None:
    if block.sequences_reduction_ratio > 1:
        return why_reduction_unsupported(block.sequence_reduction, block.layer_norm)
    return None


def _why_attention_of_v2_unsupported(block: Any) -> str | None:
    if not block.linear_attention:
        reduces = block.spatial_reduction_ratio > 1
        return why_reduction_unsupported(block.spatial_reduction, block.layer_norm) if reduces else None
    conv = block.spatial_reduction
    if (conv.kernel_size, conv.stride, conv.padding, conv.groups) != ((1, 1), (1, 1), (0, 0), 1):
        return "the convolution after pooling is not one of 1×1"
    return why_norms_unsupported(block.layer_norm)


ENTRIES = variants_by_name(
    BlockEntry(
        upstream=UPSTREAM,
        name="PvtPatchEmbeddings",
        arguments=("pixel_values",),
        children=frozenset(("position_embeddings", "cls_token", "projection", "layer_norm", "dropout")),
        forward=_embeddings,
        parts=bypassed({"layer_norm": nn.LayerNorm}),
        why_unsupported=lambda block: why_norms_unsupported(block.layer_norm),
    ),
    layer_entry("PvtLayer", _layer),
    BlockEntry(
        upstream=UPSTREAM,
        name="PvtEfficientSelfAttention",
        arguments=_ATTENTION_ARGUMENTS,
        children=frozenset(("query", "key", "value", "dropout", "sequence_reduction", "layer_norm")),
        forward=_attention,
        parts=bypassed(
            {
                "dropout": nn.Dropout,
                "sequence_reduction": _OPTIONAL_CONVOLUTION,
                "layer_norm": _OPTIONAL_NORM,
            }
        ),
        why_unsupported=_why_attention_unsupported,
        why_not_now=lambda block: why_dropout_active(block.dropout),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="PvtSelfOutput",
        arguments=("hidden_states",),
        children=frozenset(("dense", "dropout")),
        forward=_self_output,
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="PvtFFN",
        arguments=("hidden_states",),
        children=frozenset(("dense1", "intermediate_act_fn", "dense2", "dropout")),
        forward=_feed_forward,
        parts=bypassed({"intermediate_act_fn": GELUS}),
        why_unsupported=lambda block: why_gelu_replaced(block.intermediate_act_fn),
    ),
    embeddings_entry("PvtV2OverlapPatchEmbeddings"),
    layer_entry("PvtV2BlockLayer", _layer_of_v2),
    BlockEntry(
        upstream=UPSTREAM,
        name="PvtV2SelfAttention",
        arguments=_ATTENTION_ARGUMENTS,
        children=frozenset(("query", "key", "value", "attn_drop", "proj", "proj_drop")).union(
            ("pool", "spatial_reduction", "layer_norm", "act")
        ),
        forward=_attention_of_v2,
        parts=bypassed(
            {
                "attn_drop": nn.Dropout,
                "spatial_reduction": _OPTIONAL_CONVOLUTION,
                "layer_norm": _OPTIONAL_NORM,
                "act": (nn.GELU, NoneType),
            }
        ),
        why_unsupported=_why_attention_of_v2_unsupported,
        why_not_now=lambda block: why_dropout_active(block.attn_drop),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="PvtV2ConvFeedForwardNetwork",
        arguments=("hidden_states", "height", "width"),
        children=frozenset(("dense1", "relu", "dwconv", "intermediate_act_fn", "dense2", "dropout")),
        forward=_feed_forward_of_v2,
        parts=bypassed(
            {"dwconv": "PvtV2DepthWiseConv", "dwconv.dwconv": nn.Conv2d, "intermediate_act_fn": GELUS}
        ),
        why_unsupported=lambda block: (
            why_convolution_unsupported(block.dwconv.dwconv) or why_gelu_replaced(block.intermediate_act_fn)
        ),
    ),
)


def recognize(module: nn.Module) -> BlockEntry | None:
    """Returns the entry of a module by the name of its class or of a base of it; None for others."""
    return recognize_variant(module, ENTRIES)


# Parts of a layer -----------------------------------------------------------------------------------------


def parts(layer: Any) -> BlockParts:
    """Returns the parts of a ``PvtLayer``."""
    attention, mlp = layer.attention.self, layer.mlp
    reduces = attention.sequences_reduction_ratio > 1
    return BlockParts(
        norm1=layer.layer_norm_1,
        linears=(attention.query, attention.key, attention.value),
        reduction=(attention.sequence_reduction, attention.layer_norm) if reduces else None,
        num_heads=attention.num_attention_heads,
        scale=attention.attention_head_size**-0.5,
        proj=layer.attention.output.dense,
        norm2=layer.layer_norm_2,
        fc1=mlp.dense1,
        mix=None,
        activation=mlp.intermediate_act_fn,
        approximate=gelu_variant(mlp.intermediate_act_fn),
        fc2=mlp.dense2,
    )


def parts_of_v2(layer: Any) -> BlockParts | None:
    """Returns the parts of a ``PvtV2BlockLayer``; None for linear attention, which is another block."""
    attention, mlp = layer.attention, layer.mlp
    if attention.linear_attention:
        return None
    reduces = attention.spatial_reduction_ratio > 1
    return BlockParts(
        norm1=layer.layer_norm_1,
        linears=(attention.query, attention.key, attention.value),
        reduction=(attention.spatial_reduction, attention.layer_norm) if reduces else None,
        num_heads=attention.num_attention_heads,
        scale=attention.attention_head_size**-0.5,
        proj=attention.proj,
        norm2=layer.layer_norm_2,
        fc1=mlp.dense1,
        mix=mlp.dwconv.dwconv,
        activation=mlp.intermediate_act_fn,
        approximate=gelu_variant(mlp.intermediate_act_fn),
        fc2=mlp.dense2,
    )
