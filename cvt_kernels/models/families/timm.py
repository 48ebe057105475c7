"""ViT (DeiT and DINOv2 too) and PVT v2 of timm 1, whose blocks and stages are served on a CPU.

Many projects have a ``Block`` of an ``Attention`` and an ``Mlp`` with arithmetic of its own, so timm's are
recognized by their modules too. Elsewhere than in evaluation on a CPU they are timm's own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...classes import original_class
from ..blocks import (
    GELU_VARIANTS,
    BlockEntry,
    BlockParts,
    Family,
    StageEntry,
    StageParts,
    Unsupported,
    gelu_variant,
    is_named,
    unserved_entry,
    why_another_class,
)
from ..forward import as_map, tokens_of

_VIT, _PVT_V2 = "timm.models.vision_transformer", "timm.models.pvt_v2"
#: The classes within blocks. Some have moved in the course of timm 1.
_CLASSES = frozenset(
    (
        *("timm.layers.attention.Attention", f"{_VIT}.Attention", "timm.layers.mlp.Mlp"),
        *("timm.layers.layer_scale.LayerScale", f"{_VIT}.LayerScale"),
        *("timm.layers.drop.DropPath", "timm.layers.norm.LayerNorm", *GELU_VARIANTS),
        *(f"{_PVT_V2}.{name}" for name in ("Attention", "MlpWithDepthwiseConv")),
    )
)


def _block(self: Any, linears: tuple[Any, ...], drops: tuple[Any, Any, Any], **others: Any) -> BlockParts:
    attn, mlp = self.attn, self.mlp
    return BlockParts(
        norm1=self.norm1,
        linears=linears,
        num_heads=attn.num_heads,
        scale=attn.head_dim**-0.5 if attn.fused_attn else attn.scale,
        attention_drop=attn.attn_drop,
        proj=attn.proj,
        norm2=self.norm2,
        fc1=mlp.fc1,
        activation=mlp.act,
        approximate=gelu_variant(mlp.act),
        fc2=mlp.fc2,
        drops=drops,
        drop_path=None,
        **others,
    )


#: What some blocks have besides, in others an identity, or none in older versions.
_BESIDES = {
    "attn.q_norm": "its queries are normalized",
    "attn.k_norm": "its keys are normalized",
    "attn.norm": "its heads are normalized",
    "attn.gate": "its attention is gated",
    "mlp.norm": "the hidden channels of its MLP are normalized",
}


def _vit_block(self: Any) -> BlockParts:
    for name in ("attn", "mlp"):
        if not is_named(original_class(type(module := self._modules[name])), _CLASSES):
            raise Unsupported(f"{name} {why_another_class(module, name.capitalize())}")
    for path, reason in _BESIDES.items():
        holder, name = path.split(".")
        if type(self._modules[holder]._modules.get(name)) not in (type(None), nn.Identity):
            raise Unsupported(reason)
    drops = self.attn.proj_drop, self.mlp.drop1, self.mlp.drop2
    return _block(self, (self.attn.qkv,), drops, layer_scales=(self.ls1, self.ls2))


def _pvt_v2_block(self: Any) -> BlockParts:
    attn, mlp = self.attn, self.mlp
    if attn.pool is not None:
        raise Unsupported("its attention is linear")
    reduction = None if attn.sr is None else (attn.sr, attn.norm)
    drops = attn.proj_drop, mlp.drop, mlp.drop
    return _block(self, (attn.q, attn.kv), drops, reduction=reduction, relu=mlp.relu, mix=mlp.dwconv)


def _pvt_v2_stage(self: Any) -> StageParts:
    conv, _ = _pvt_v2_stem(self)
    return StageParts(
        conv, None, self.downsample.norm, None, [_pvt_v2_block(each) for each in self.blocks], self.norm
    )


def _pvt_v2_stem(self: Any) -> tuple[nn.Conv2d, None]:
    return self.downsample.proj, None


_CHILDREN = frozenset(("norm1", "attn", "drop_path1", "norm2", "mlp", "drop_path2"))
_COMMON: dict[str, Any] = {"classes": _CLASSES, "is_layer": True, "is_only_served": True}
_ENTRIES = {
    f"{_VIT}.Block": BlockEntry(
        upstream="timm",
        name="Block",
        parts=_vit_block,
        arguments=("x",),
        children=_CHILDREN | {"ls1", "ls2"},
        layers=("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"),
        variant="ls1",
        may_take=("attn_mask", "is_causal"),
        grid_arguments=0,
        **_COMMON,
    ),
    f"{_PVT_V2}.Block": BlockEntry(
        upstream="timm",
        name="Block",
        parts=_pvt_v2_block,
        arguments=("x", "feat_size"),
        children=_CHILDREN,
        layers=("attn.q", "attn.kv", "attn.proj", "mlp.fc1", "mlp.fc2"),
        grid_arguments=1,
        **_COMMON,
    ),
    **{
        f"{module}.{name}": unserved_entry("timm", name, reason)
        for module, name, reason in (
            (_VIT, "ResPostBlock", "its LayerNorms come after attention and the MLP"),
            (_VIT, "ParallelScalingBlock", "its attention and its MLP read the same tokens"),
            (_VIT, "DiffParallelScalingBlock", "its attention is a difference of two"),
            (_VIT, "ParallelThingsBlock", "it has several attentions and MLPs side by side"),
            ("timm.models.eva", "EvaBlock", "its queries and keys may be rotated by their places (RoPE)"),
        )
    },
}
_STAGE = StageEntry(
    block=BlockEntry(
        upstream="timm",
        name="PyramidVisionTransformerStage",
        parts=_pvt_v2_stage,
        arguments=("x",),
        children=frozenset(("downsample", "blocks", "norm")),
        is_only_served=True,
    ),
    classes=_CLASSES | {f"{_PVT_V2}.Block", f"{_PVT_V2}.OverlapPatchEmbed"},
    parts=_pvt_v2_stage,
    embedding=_pvt_v2_stem,
    result=lambda stage, tokens, grid: as_map(tokens, grid).contiguous(),
    tokens=tokens_of,
)


def _names(module: nn.Module) -> list[str]:
    return [f"{cls.__module__}.{cls.__name__}" for cls in type(module).__mro__]


def _recognize_stage(module: nn.Module) -> StageEntry | None:
    """Returns the entry of a stage with an embedding, which the first one lacks."""
    is_stage = f"{_PVT_V2}.{_STAGE.block.name}" in _names(module)
    return _STAGE if is_stage and module._modules.get("downsample") is not None else None


FAMILY = Family(
    models=("ViT, DeiT and DINOv2 (of timm)", "PVT v2 (of timm)"),
    entries=tuple(_ENTRIES.values()),
    stages=(_STAGE,),
    recognize=lambda module, parent: next(filter(None, map(_ENTRIES.get, _names(module))), None),
    recognize_stage=_recognize_stage,
)
