"""The blocks of SegFormer, GLPN, PVT and PVT v2 of transformers, in models/ of these names.

Before and after transformers 5 classes of SegFormer differ. GLPN has copies of the older ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .cvt import HUGGING_FACE
from .decode_head import POINTWISE_LAYERS, decode, why_head_unsupported
from .entries import BlockEntry, named, recognize_by_name
from .fused import as_map, embed_tokens, normalize
from .parts import GELU_VARIANTS, BlockParts, BypassedParts, Kinds, Unsupported, gelu_variant, parts_of_norm

# Blocks ---------------------------------------------------------------------------------------------------


def _segformer_block(self: Any) -> BlockParts:
    """Returns the parts of a ``SegformerLayer`` of transformers 5.

    Raises:
        Unsupported: Attention is another implementation's.
    """
    attention, mlp = self.attention, self.mlp
    kind = attention.config._attn_implementation
    if kind not in ("sdpa", "cvt_kernels"):
        raise Unsupported(f"attention is that of transformers' {kind!r}, expected 'sdpa'")
    reduction = attention.sequence_reduction if attention.sequence_reduction_ratio > 1 else None
    return BlockParts(
        norm1=self.layernorm_before,
        linears=(attention.q_proj, attention.k_proj, attention.v_proj),
        reduction=None if reduction is None else (reduction.sequence_reduction, reduction.layer_norm),
        num_heads=attention.num_attention_heads,
        scale=attention.scaling,
        attention_drop=attention,
        proj=attention.o_proj,
        norm2=self.layernorm_after,
        fc1=mlp.fc1,
        mix=mlp.dwconv.dwconv,
        activation=mlp.activation_fn,
        approximate=gelu_variant(mlp.activation_fn),
        fc2=mlp.fc2,
        drops=(self.hidden_dropout, mlp.dropout, mlp.dropout),
        drop_path=self.drop_path,
    )


def _block_of_4(self: Any) -> BlockParts:
    """Returns the parts of a layer of SegFormer in transformers 4, or of GLPN."""
    attention, mlp = self.attention.self, self.mlp
    return BlockParts(
        **_common(self, attention, attention.dropout),
        reduction=(attention.sr, attention.layer_norm) if attention.sr_ratio > 1 else None,
        proj=self.attention.output.dense,
        mix=mlp.dwconv.dwconv,
        drops=(self.attention.output.dropout, mlp.dropout, mlp.dropout),
    )


def _pvt_block(self: Any) -> BlockParts:
    attention, mlp = self.attention.self, self.mlp
    reduces = attention.sequences_reduction_ratio > 1
    return BlockParts(
        **_common(self, attention, attention.dropout),
        reduction=(attention.sequence_reduction, attention.layer_norm) if reduces else None,
        proj=self.attention.output.dense,
        drops=(self.attention.output.dropout, mlp.dropout, mlp.dropout),
    )


def _pvt_v2_block(self: Any) -> BlockParts:
    attention, mlp = self.attention, self.mlp
    pooling = reduction = None
    if attention.linear_attention:
        pooling = attention.pool, attention.spatial_reduction, attention.layer_norm, attention.act
    elif attention.spatial_reduction_ratio > 1:
        reduction = attention.spatial_reduction, attention.layer_norm
    return BlockParts(
        **_common(self, attention, attention.attn_drop),
        reduction=reduction,
        pooling=pooling,
        proj=attention.proj,
        relu=mlp.relu,
        mix=mlp.dwconv.dwconv,
        drops=(attention.proj_drop, mlp.dropout, mlp.dropout),
    )


def _common(self: Any, attention: Any, attention_drop: nn.Module) -> dict[str, Any]:
    """Returns the parts that have the same names in all but SegFormer's blocks of transformers 5."""
    mlp = self.mlp
    return {
        "norm1": self.layer_norm_1,
        "linears": (attention.query, attention.key, attention.value),
        "num_heads": attention.num_attention_heads,
        "scale": attention.attention_head_size**-0.5,
        "attention_drop": attention_drop,
        "norm2": self.layer_norm_2,
        "fc1": mlp.dense1,
        "activation": mlp.intermediate_act_fn,
        "approximate": gelu_variant(mlp.intermediate_act_fn),
        "fc2": mlp.dense2,
        "drop_path": self.drop_path,
    }


#: The ends of the names of classes within a block.
_ENDS = (
    *("Attention", "EfficientSelfAttention", "SelfAttention", "SelfOutput", "SequenceReduction"),
    *("ConvFeedForwardNetwork", "FFN", "MixFFN", "MixMLP", "DWConv", "DepthWiseConv", "DropPath"),
)


def _block_entry(
    name: str,
    parts: Callable[[Any], BlockParts],
    *,
    norms: tuple[str, str] = ("layer_norm_1", "layer_norm_2"),
    last_argument: str = "output_attentions",
    children: tuple[str, ...] = (),
) -> BlockEntry:
    """Returns the entry of a class of blocks.

    Args:
        name: Name of the class.
        parts: Returns the modules of a block.
        norms: Names of the LayerNorms.
        last_argument: Name of the argument after those that all have.
        children: Names of the submodules that not all have.
    """
    beginning = name.removesuffix("Layer").removesuffix("Block")
    return BlockEntry(
        upstream=HUGGING_FACE,
        name=name,
        arguments=("hidden_states", "height", "width", last_argument),
        children=frozenset(("attention", "drop_path", "mlp", *norms, *children)),
        classes=frozenset(("GlpnDropPath", *GELU_VARIANTS, *(f"{beginning}{end}" for end in _ENDS))),
        parts=parts,
        variant=norms[0],
        is_layer=True,
    )


# Embeddings -----------------------------------------------------------------------------------------------


def _embeddings_entry(name: str) -> BlockEntry:
    """Returns the entry of a class of overlapping patch embeddings."""
    return BlockEntry(
        upstream=HUGGING_FACE,
        name=name,
        arguments=("pixel_values",),
        children=frozenset(("proj", "layer_norm")),
        forward=lambda self, pixel_values: embed_tokens(self.proj, self.layer_norm, pixel_values),
        parts=lambda self: parts_of_norm(self.layer_norm),
    )


def _pvt_embeddings(self: Any, pixel_values: Tensor) -> Any:
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


# SegFormer's stage and head -------------------------------------------------------------------------------


def _stage(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    tokens, height, width = self.patch_embeddings(hidden_states)
    for block in self.blocks:
        tokens = block(tokens, height, width, **kwargs)
    tokens = normalize(self.layer_norm, tokens)
    # Upstream copies the map so that channels are first in memory, which nothing after it needs.
    return as_map(tokens, (height, width)) if self.reshape else tokens


def _head_entry(projections: str, *arguments: str) -> BlockEntry:
    """Returns the entry of the decode head whose linear layers are called ``projections``."""
    others = ("linear_fuse", "batch_norm", "activation", "dropout", "classifier")

    def parts(head: Any) -> BypassedParts:
        layers: Any = head._modules[projections]
        bypassed: list[tuple[Any, Kinds]] = [(layers, (nn.ModuleList,))]
        bypassed += [(getattr(head, name), (nn.Conv2d,)) for name in POINTWISE_LAYERS]
        for layer in layers:
            bypassed += [(layer, ("SegformerMLP",)), (layer.proj, (nn.Linear,))]
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


# Recognition ----------------------------------------------------------------------------------------------

_NAMED = named(
    _block_entry(
        "SegformerLayer",
        _segformer_block,
        norms=("layernorm_before", "layernorm_after"),
        last_argument="kwargs",
        children=("hidden_dropout",),
    ),
    BlockEntry(
        upstream=HUGGING_FACE,
        name="SegformerStage",
        arguments=("hidden_states", "kwargs"),
        children=frozenset(("patch_embeddings", "blocks", "layer_norm")),
        forward=_stage,
        parts=lambda self: parts_of_norm(self.layer_norm),
    ),
    _head_entry("linear_projections", "kwargs"),
    _head_entry("linear_c"),
    _embeddings_entry("SegformerOverlapPatchEmbeddings"),
    _block_entry("SegformerLayer", _block_of_4),
    _embeddings_entry("GLPNOverlapPatchEmbeddings"),
    _block_entry("GLPNLayer", _block_of_4),
    BlockEntry(
        upstream=HUGGING_FACE,
        name="PvtPatchEmbeddings",
        arguments=("pixel_values",),
        children=frozenset(("position_embeddings", "cls_token", "projection", "layer_norm", "dropout")),
        forward=_pvt_embeddings,
        parts=lambda self: parts_of_norm(self.layer_norm),
    ),
    _block_entry("PvtLayer", _pvt_block),
    _embeddings_entry("PvtV2OverlapPatchEmbeddings"),
    _block_entry("PvtV2BlockLayer", _pvt_v2_block),
)
#: Every entry.
ENTRIES = tuple(entry for variants in _NAMED.values() for entry in variants)


def recognize(module: nn.Module) -> BlockEntry | None:
    """Returns the entry of a module by the name of its class or of a base of it; None for others."""
    return recognize_by_name(module, _NAMED)
