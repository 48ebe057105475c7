"""SegFormer of transformers. Before and after transformers 5 some classes differ."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..blocks import (
    HUGGING_FACE,
    BlockEntry,
    BlockParts,
    BypassedParts,
    Family,
    Kinds,
    Unsupported,
    parts_of_norm,
)
from ..forward import as_map, normalize, tokens_of
from ..heads import POINTWISE_LAYERS, decode, why_head_unsupported
from .pyramids import block_entry, common_parts, embeddings_entry, stage_entry


def _segformer_block(self: Any) -> BlockParts:
    """Returns the parts of a ``SegformerLayer`` of transformers 5."""
    attention, mlp = self.attention, self.mlp
    kind = attention.config._attn_implementation
    if kind != "sdpa":
        raise Unsupported(f"attention is that of transformers' {kind!r}, expected 'sdpa'")
    if attention.is_causal:
        raise Unsupported("attention is causal")
    reduction = attention.sequence_reduction if attention.sequence_reduction_ratio > 1 else None
    return BlockParts(
        norm1=self.layernorm_before,
        linears=(attention.q_proj, attention.k_proj, attention.v_proj),
        reduction=None if reduction is None else (reduction.sequence_reduction, reduction.layer_norm),
        num_heads=attention.num_attention_heads,
        scale=attention.scaling,
        head_dim=attention.head_dim,
        attention_drop=attention,
        proj=attention.o_proj,
        norm2=self.layernorm_after,
        fc1=mlp.fc1,
        mix=mlp.dwconv.dwconv,
        activation=mlp.activation_fn,
        fc2=mlp.fc2,
        drops=(self.hidden_dropout, mlp.dropout, mlp.dropout),
        drop_path=self.drop_path,
    )


def block_of_4(self: Any) -> BlockParts:
    """Returns the parts of a layer of SegFormer in transformers 4, or of GLPN."""
    attention, mlp = self.attention.self, self.mlp
    return BlockParts(
        **common_parts(self, attention, attention.dropout),
        reduction=(attention.sr, attention.layer_norm) if attention.sr_ratio > 1 else None,
        proj=self.attention.output.dense,
        mix=mlp.dwconv.dwconv,
        drops=(self.attention.output.dropout, mlp.dropout, mlp.dropout),
    )


def _stage(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    tokens, height, width = self.patch_embeddings(hidden_states)
    for block in self.blocks:
        tokens = block(tokens, height, width, **kwargs)
    tokens = normalize(self.layer_norm, tokens)
    # Upstream copies the map so that channels are first in memory, which callers of the model alone need.
    return as_map(tokens, (height, width)) if self.reshape else tokens


_MLP = "transformers.models.segformer.modeling_segformer.SegformerMLP"


def _head_entry(projections: str, *arguments: str) -> BlockEntry:
    """Returns the entry of the decode head whose linear layers are called ``projections``."""
    others = ("linear_fuse", "batch_norm", "activation", "dropout", "classifier")

    def parts(head: Any) -> BypassedParts:
        layers: Any = head._modules[projections]
        bypassed: list[tuple[Any, Kinds]] = [(layers, (nn.ModuleList,))]
        bypassed += [(getattr(head, name), (nn.Conv2d,)) for name in POINTWISE_LAYERS]
        for layer in layers:
            bypassed += [(layer, (_MLP,)), (layer.proj, (nn.Linear,))]
        return BypassedParts(bypassed, why_head_unsupported(head, layers))

    return BlockEntry(
        upstream=HUGGING_FACE,
        name="SegformerDecodeHead",
        arguments=("encoder_hidden_states", *arguments),
        children=frozenset((projections, *others)),
        forward=lambda self, states, **_: decode(self, self._modules[projections], states),
        parts=parts,
        variant=projections,
    )


_LAYER = block_entry(
    "SegformerLayer",
    _segformer_block,
    norms=("layernorm_before", "layernorm_after"),
    last_argument="kwargs",
    children=("hidden_dropout",),
    layers=(*(f"attention.{letter}_proj" for letter in "qkvo"), "mlp.fc1", "mlp.fc2"),
)
_STAGE = BlockEntry(
    upstream=HUGGING_FACE,
    name="SegformerStage",
    arguments=("hidden_states", "kwargs"),
    children=frozenset(("patch_embeddings", "blocks", "layer_norm")),
    forward=_stage,
    parts=lambda self: parts_of_norm(self.layer_norm),
)

FAMILY = Family(
    models=("SegFormer (of transformers)",),
    entries=(
        _LAYER,
        _STAGE,
        _head_entry("linear_projections", "kwargs"),
        _head_entry("linear_c"),
        embeddings_entry("SegformerOverlapPatchEmbeddings"),
        block_entry("SegformerLayer", block_of_4),
    ),
    stages=(
        stage_entry(
            "SegformerStage",
            _LAYER,
            lambda stage, tokens, grid: as_map(tokens, grid) if stage.reshape else tokens,
            embedding="patch_embeddings",
            last_argument="kwargs",
            tokens=lambda result: result if result.ndim == 3 else tokens_of(result),
        ),
    ),
)
