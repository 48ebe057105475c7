"""ViT (DeiT and DINOv2 too) and PVT v2 of timm 1: served in evaluation on a CPU, and elsewhere timm's own.

Many projects have a ``Block`` of an ``Attention`` and an ``Mlp``, with arithmetic of its own. So timm's are
recognized by the modules that define them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from ..blocks import (
    GELU_VARIANTS,
    BlockEntry,
    BlockParts,
    Family,
    StageEntry,
    StageParts,
    Unsupported,
    unserved_entry,
)
from ..forward import as_map, tokens_of

_Entry = TypeVar("_Entry")
_VIT, _PVT_V2 = "timm.models.vision_transformer", "timm.models.pvt_v2"
#: The classes within blocks; some have moved since timm 1.0.
_CLASSES = frozenset(
    (
        *("timm.layers.attention.Attention", f"{_VIT}.Attention", f"{_PVT_V2}.Attention"),
        *("timm.layers.mlp.Mlp", f"{_PVT_V2}.MlpWithDepthwiseConv", *GELU_VARIANTS),
        *("timm.layers.layer_scale.LayerScale", f"{_VIT}.LayerScale"),
        *("timm.layers.drop.DropPath", "timm.layers.norm.LayerNorm"),
    )
)


def _parts(self: Any, linears: tuple[Any, ...], drops: tuple[Any, Any, Any], **others: Any) -> BlockParts:
    attn, mlp = self.attn, self.mlp
    return BlockParts(
        norm1=self.norm1,
        linears=linears,
        num_heads=attn.num_heads,
        head_dim=attn.head_dim,
        # timm's scaled_dot_product_attention is called without its scale.
        scale=attn.head_dim**-0.5 if attn.fused_attn else attn.scale,
        attention_drop=attn.attn_drop,
        proj=attn.proj,
        norm2=self.norm2,
        fc1=mlp.fc1,
        activation=mlp.act,
        fc2=mlp.fc2,
        drops=drops,
        drop_path=None,
        **others,
    )


def _vit_block(self: Any) -> BlockParts:
    attn, mlp = self.attn, self.mlp
    late = getattr(attn, "norm", None), getattr(attn, "gate", None), getattr(mlp, "norm", None)  # of 1.0.x
    idle = tuple(each for each in (attn.q_norm, attn.k_norm, *late) if each is not None)
    drops = attn.proj_drop, mlp.drop1, mlp.drop2
    return _parts(self, (attn.qkv,), drops, layer_scales=(self.ls1, self.ls2), idle=idle)


def _pvt_v2_block(self: Any) -> BlockParts:
    attn, mlp = self.attn, self.mlp
    if attn.pool is not None:
        raise Unsupported("its attention is linear")
    reduction = None if attn.sr is None else (attn.sr, attn.norm)
    drops = attn.proj_drop, mlp.drop, mlp.drop
    return _parts(self, (attn.q, attn.kv), drops, reduction=reduction, relu=mlp.relu, mix=mlp.dwconv)


def _pvt_v2_stage(self: Any) -> StageParts:
    conv, norm = self.downsample.proj, self.downsample.norm
    return StageParts(conv, None, norm, None, [_pvt_v2_block(each) for each in self.blocks], self.norm)


def _block(parts: Any, linears: tuple[str, ...], members: tuple[str, ...] = (), **others: Any) -> BlockEntry:
    """Returns the entry of a class of blocks, by its parts and what not both have in common."""
    return BlockEntry(
        upstream="timm",
        name="Block",
        parts=parts,
        children=frozenset(("norm1", "attn", "drop_path1", "norm2", "mlp", "drop_path2", *members)),
        classes=_CLASSES,
        layers=(*(f"attn.{name}" for name in (*linears, "proj")), "mlp.fc1", "mlp.fc2"),
        variant=next(iter(members), ""),
        is_layer=True,
        is_only_served=True,
        **others,
    )


_OPTIONAL = "attn_mask", "is_causal"
_BLOCKS = {
    f"{_VIT}.Block": _block(
        _vit_block, ("qkv",), ("ls1", "ls2"), arguments=("x",), may_take=_OPTIONAL, grid_arguments=0
    ),
    f"{_PVT_V2}.Block": _block(_pvt_v2_block, ("q", "kv"), arguments=("x", "feat_size"), grid_arguments=1),
    **{
        f"timm.models.{module}.{name}": unserved_entry("timm", name, reason)
        for module, name, reason in (
            ("vision_transformer", "ResPostBlock", "its LayerNorms come after attention and the MLP"),
            ("vision_transformer", "ParallelScalingBlock", "its attention and its MLP are parallel"),
            ("vision_transformer", "DiffParallelScalingBlock", "it has differential attention"),
            ("vision_transformer", "ParallelThingsBlock", "it has several parallel attentions and MLPs"),
            ("eva", "EvaBlock", "its queries and keys may be rotated by position (RoPE)"),
        )
    },
}
_STAGE = StageEntry(
    upstream="timm",
    name="PyramidVisionTransformerStage",
    parts=_pvt_v2_stage,
    arguments=("x",),
    children=frozenset(("downsample", "blocks", "norm")),
    is_only_served=True,
    classes=_CLASSES | {f"{_PVT_V2}.Block", f"{_PVT_V2}.OverlapPatchEmbed"},
    embedding=lambda stage: (stage.downsample.proj, None),
    result=lambda stage, tokens, grid: as_map(tokens, grid).contiguous(),
    tokens=tokens_of,
)

_STAGES = {f"{_PVT_V2}.{_STAGE.name}": _STAGE}


def _entry_of(module: nn.Module, entries: Mapping[str, _Entry]) -> _Entry | None:
    names = (f"{cls.__module__}.{cls.__name__}" for cls in type(module).__mro__)
    return next((entries[name] for name in names if name in entries), None)


FAMILY = Family(
    models=("ViT, DeiT and DINOv2 (of timm)", "PVT v2 (of timm)"),
    entries=tuple(_BLOCKS.values()),
    stages=(_STAGE,),
    recognize=lambda module, parent: _entry_of(module, _BLOCKS),
    # The first stage has no embedding, and its blocks are served one by one.
    recognize_stage=lambda module: _entry_of(module, _STAGES) if module._modules.get("downsample") else None,
)
