"""Hugging Face's blocks, transformers/models/cvt/modeling_cvt.py: their fused forwards and table entries."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from ..ops.attention.modules import project_and_attend
from .entries import (
    BATCH_NORMS,
    BlockEntry,
    StageEntry,
    by_name,
    bypassed,
    map_and_class_token,
    tokens_of_map,
    why_convolutions_unsupported,
    why_dropout_active,
    why_norms_unsupported,
)
from .fused import (
    add_and_normalize_for,
    apply_linear,
    apply_linear_and_gelu,
    check_images,
    embed,
    gelu_variant,
    normalize_for_layers,
)
from .parts import BlockParts, StageParts

_WORDS = ("query", "key", "value")

# Fused forwards -------------------------------------------------------------------------------------------


def _embeddings(self: Any, pixel_values: Tensor) -> Tensor:
    check_images("pixel_values", pixel_values, self.projection)
    return embed(self.projection, self.normalization, pixel_values)


def _branches(self: Any) -> list[tuple[nn.Module, nn.Module]]:
    wrappers = [getattr(self, f"convolution_projection_{word}") for word in _WORDS]
    convolutions = [wrapper.convolution_projection for wrapper in wrappers]
    return [(c.convolution, c.normalization) for c in convolutions]


def _self_attention(self: Any, hidden_state: Tensor, height: int, width: int) -> Tensor:
    return project_and_attend(
        hidden_state,
        (height, width),
        _branches(self),
        [functools.partial(apply_linear, getattr(self, f"projection_{word}")) for word in _WORDS],
        num_heads=self.num_heads,
        scale=self.scale,
    )


def _intermediate(self: Any, hidden_state: Tensor) -> Tensor:
    return apply_linear_and_gelu(self.dense, hidden_state, approximate=gelu_variant(self.activation))


def _self_output(self: Any, hidden_state: Tensor, input_tensor: Tensor) -> Tensor:
    return self.dropout(apply_linear(self.dense, hidden_state))


def _output(self: Any, hidden_state: Tensor, input_tensor: Tensor) -> Tensor:
    return self.dropout(apply_linear(self.dense, hidden_state)) + input_tensor


def _layer(self: Any, hidden_state: Tensor, height: int, width: int) -> Tensor:
    branch = self.attention(normalize_for_layers(self.layernorm_before, hidden_state), height, width)
    branch = self.drop_path(branch)
    stream, y = add_and_normalize_for(self.intermediate, "dense", self.layernorm_after, branch, hidden_state)
    return self.drop_path(self.output(self.intermediate(y), stream))  # output adds the stream itself


# Table entries --------------------------------------------------------------------------------------------

UPSTREAM = "Hugging Face"

_ATTENTION_PARTS: dict[str, Any] = {"dropout": nn.Dropout}
for _word in _WORDS:
    _path = f"convolution_projection_{_word}"
    _ATTENTION_PARTS |= {
        _path: "CvtSelfAttentionProjection",
        f"{_path}.linear_projection": "CvtSelfAttentionLinearProjection",
        f"{_path}.convolution_projection": "CvtSelfAttentionConvProjection",
        f"{_path}.convolution_projection.convolution": nn.Conv2d,
        f"{_path}.convolution_projection.normalization": BATCH_NORMS,
    }

ENTRIES = by_name(
    BlockEntry(
        upstream=UPSTREAM,
        name="CvtConvEmbeddings",
        arguments=("pixel_values",),
        children=frozenset(("projection", "normalization")),
        layers=("projection",),
        forward=_embeddings,
        parts=bypassed({"normalization": nn.LayerNorm}),
        why_unsupported=lambda block: why_norms_unsupported(block.normalization),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="CvtLayer",
        arguments=("hidden_state", "height", "width"),
        children=frozenset(
            ("attention", "intermediate", "output", "drop_path", "layernorm_before", "layernorm_after")
        ),
        forward=_layer,
        parts=bypassed({"layernorm_before": nn.LayerNorm, "layernorm_after": nn.LayerNorm}),
        why_unsupported=lambda block: why_norms_unsupported(block.layernorm_before, block.layernorm_after),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="CvtSelfAttention",
        arguments=("hidden_state", "height", "width"),
        children=frozenset(
            f"{prefix}projection_{word}" for prefix in ("", "convolution_") for word in _WORDS
        ).union(("dropout",)),
        layers=tuple(f"projection_{word}" for word in _WORDS),
        forward=_self_attention,
        parts=bypassed(_ATTENTION_PARTS),
        why_unsupported=lambda block: why_convolutions_unsupported(_branches(block)),
        why_not_now=lambda block: why_dropout_active(block.dropout),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="CvtIntermediate",
        arguments=("hidden_state",),
        children=frozenset(("dense", "activation")),
        layers=("dense",),
        forward=_intermediate,
        parts=bypassed({"activation": nn.GELU}),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="CvtSelfOutput",
        arguments=("hidden_state", "input_tensor"),
        children=frozenset(("dense", "dropout")),
        layers=("dense",),
        forward=_self_output,
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="CvtOutput",
        arguments=("hidden_state", "input_tensor"),
        children=frozenset(("dense", "dropout")),
        layers=("dense",),
        forward=_output,
    ),
)


# Stages ---------------------------------------------------------------------------------------------------


def _embedding_parts(self: Any) -> tuple[nn.Conv2d, Tensor | None]:
    return self.embedding.convolution_embeddings.projection, getattr(self, "cls_token", None)


def _stage_parts(self: Any) -> StageParts:
    conv, class_token = _embedding_parts(self)
    return StageParts(
        conv=conv,
        batch_norm=None,
        norm=self.embedding.convolution_embeddings.normalization,
        class_token=class_token,
        blocks=[_block_parts(layer) for layer in self.layers],
    )


def _block_parts(self: Any) -> BlockParts:
    attention = self.attention.attention
    return BlockParts(
        norm1=self.layernorm_before,
        branches=_branches(attention),
        linears=[getattr(attention, f"projection_{word}") for word in _WORDS],
        num_heads=attention.num_heads,
        scale=attention.scale,
        proj=self.attention.output.dense,
        norm2=self.layernorm_after,
        fc1=self.intermediate.dense,
        approximate=gelu_variant(self.intermediate.activation),
        activation=self.intermediate.activation,
        fc2=self.output.dense,
    )


STAGE = StageEntry(
    block=BlockEntry(
        upstream=UPSTREAM,
        name="CvtStage",
        arguments=("hidden_state",),
        children=frozenset(("cls_token", "embedding", "layers")),
    ),
    classes=frozenset(ENTRIES)
    | {
        "CvtEmbeddings",
        "CvtAttention",
        "CvtDropPath",
        "CvtSelfAttentionProjection",
        "CvtSelfAttentionConvProjection",
        "CvtSelfAttentionLinearProjection",
    },
    parts=_stage_parts,
    embedding=_embedding_parts,
    result=map_and_class_token,
    tokens=tokens_of_map,
)


def recognize(module: nn.Module) -> BlockEntry | None:
    """Returns the entry of a module by the name of its class or of a base of it; None for others."""
    return next((ENTRIES[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in ENTRIES), None)
