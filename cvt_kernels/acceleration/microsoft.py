"""Microsoft's blocks, lib/models/cls_cvt.py: their fused forwards and table entries."""

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
from .ours import own_class
from .parts import BlockParts, StageParts

# Fused forwards -------------------------------------------------------------------------------------------


def _embedding(self: Any, x: Tensor) -> Tensor:
    check_images("x", x, self.proj)
    return embed(self.proj, self.norm, x)


def _branches(self: Any) -> list[tuple[nn.Module, nn.Module]]:
    sequences = [self.conv_proj_q, self.conv_proj_k, self.conv_proj_v]
    return [(sequence.conv, sequence.bn) for sequence in sequences]


def _attention(self: Any, x: Tensor, h: int, w: int) -> Tensor:
    y = project_and_attend(
        x,
        (h, w),
        _branches(self),
        [functools.partial(apply_linear, linear) for linear in (self.proj_q, self.proj_k, self.proj_v)],
        num_heads=self.num_heads,
        scale=self.scale,
    )
    return self.proj_drop(apply_linear(self.proj, y))


def _mlp(self: Any, x: Tensor) -> Tensor:
    hidden = apply_linear_and_gelu(self.fc1, x, approximate=gelu_variant(self.act))
    return self.drop(apply_linear(self.fc2, self.drop(hidden)))


def _block(self: Any, x: Tensor, h: int, w: int) -> Tensor:
    branch = self.drop_path(self.attn(normalize_for_layers(self.norm1, x), h, w))
    stream, y = add_and_normalize_for(self.mlp, "fc1", self.norm2, branch, x)
    return stream + self.drop_path(self.mlp(y))


# Table entries --------------------------------------------------------------------------------------------

UPSTREAM = "Microsoft"

_LAYER_NORMS = (nn.LayerNorm, "LayerNorm")

_ATTENTION_PARTS: dict[str, Any] = {"attn_drop": nn.Dropout}
for _letter in "qkv":
    _path = f"conv_proj_{_letter}"
    _ATTENTION_PARTS |= {
        _path: nn.Sequential,
        f"{_path}.conv": nn.Conv2d,
        f"{_path}.bn": BATCH_NORMS,
        f"{_path}.2": "Rearrange",
    }


def _why_rearranges_unsupported(block: Any) -> str | None:
    for sequence in (block.conv_proj_q, block.conv_proj_k, block.conv_proj_v):
        if len(sequence) != 3:
            return f"a projection has {len(sequence)} steps; expected convolution, BatchNorm and Rearrange"
        pattern = getattr(sequence[2], "pattern", "b c h w -> b (h w) c")
        if pattern != "b c h w -> b (h w) c":
            return f"a projection rearranges by {pattern!r}"
    return None


ENTRIES = by_name(
    BlockEntry(
        upstream=UPSTREAM,
        name="ConvEmbed",
        arguments=("x",),
        children=frozenset(("proj", "norm")),
        layers=("proj",),
        forward=_embedding,
        parts=bypassed({"norm": _LAYER_NORMS}),
        why_unsupported=lambda block: why_norms_unsupported(block.norm),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="Block",
        arguments=("x", "h", "w"),
        children=frozenset(("norm1", "attn", "drop_path", "norm2", "mlp")),
        forward=_block,
        parts=bypassed({"norm1": _LAYER_NORMS, "norm2": _LAYER_NORMS}),
        why_unsupported=lambda block: why_norms_unsupported(block.norm1, block.norm2),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="Attention",
        arguments=("x", "h", "w"),
        children=frozenset(f"{prefix}proj_{letter}" for prefix in ("", "conv_") for letter in "qkv").union(
            ("attn_drop", "proj", "proj_drop")
        ),
        layers=("proj_q", "proj_k", "proj_v", "proj"),
        forward=_attention,
        parts=bypassed(_ATTENTION_PARTS),
        why_unsupported=lambda block: (
            _why_rearranges_unsupported(block) or why_convolutions_unsupported(_branches(block))
        ),
        why_not_now=lambda block: why_dropout_active(block.attn_drop),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="Mlp",
        arguments=("x",),
        children=frozenset(("fc1", "act", "fc2", "drop")),
        layers=("fc1", "fc2"),
        forward=_mlp,
        parts=bypassed({"act": (nn.GELU, "QuickGELU")}),
    ),
)

# Stages ---------------------------------------------------------------------------------------------------


def _embedding_parts(self: Any) -> tuple[nn.Conv2d, Tensor | None]:
    return self.patch_embed.proj, self.cls_token


def _stage_parts(self: Any) -> StageParts:
    conv, class_token = _embedding_parts(self)
    return StageParts(
        conv=conv,
        batch_norm=None,
        norm=self.patch_embed.norm,
        class_token=class_token,
        blocks=[_block_parts(block) for block in self.blocks],
    )


def _block_parts(self: Any) -> BlockParts:
    attn = self.attn
    return BlockParts(
        norm1=self.norm1,
        branches=_branches(attn),
        linears=[attn.proj_q, attn.proj_k, attn.proj_v],
        num_heads=attn.num_heads,
        scale=attn.scale,
        proj=attn.proj,
        norm2=self.norm2,
        fc1=self.mlp.fc1,
        approximate=gelu_variant(self.mlp.act),
        activation=self.mlp.act,
        fc2=self.mlp.fc2,
    )


STAGE = StageEntry(
    block=BlockEntry(
        upstream=UPSTREAM,
        name="VisionTransformer",
        arguments=("x",),
        children=frozenset(("cls_token", "patch_embed", "pos_drop", "blocks")),
    ),
    classes=frozenset(ENTRIES) | {"DropPath", "LayerNorm", "QuickGELU", "Rearrange"},
    parts=_stage_parts,
    embedding=_embedding_parts,
    result=map_and_class_token,
    tokens=tokens_of_map,
)

# Recognition ----------------------------------------------------------------------------------------------


def recognize(module: nn.Module, parent: nn.Module | None) -> BlockEntry | None:
    """Returns the entry of a module, by the names of its classes and what it consists of; None for others.

    Microsoft's names are those of half of all transformers: an ``Attention`` must have convolutional
    projections, a ``Block`` such an attention, and the other two must be in their places beside it.
    """
    names = [cls.__name__ for cls in type(module).__mro__]
    if "Attention" in names and _is_attention(module):
        return ENTRIES["Attention"]
    if "Block" in names and _is_block(module):
        return ENTRIES["Block"]
    if "Mlp" in names and _is_block(parent):
        return ENTRIES["Mlp"]
    if "ConvEmbed" in names and parent is not None and is_stage(parent):
        return ENTRIES["ConvEmbed"]
    return None


def is_stage(module: nn.Module) -> bool:
    """Says whether a module, whose class has the right name, is a stage of a CvT."""
    blocks = module._modules.get("blocks")
    return blocks is not None and any(map(_is_block, blocks.children()))


def _is_attention(module: nn.Module) -> bool:
    linears = {"proj", "proj_q", "proj_k", "proj_v"}
    # A projection without a convolution is None.
    attributes = ("conv_proj_q", "conv_proj_k", "conv_proj_v", "num_heads", "scale")
    return (
        linears <= set(module._modules)
        and all(hasattr(module, name) for name in attributes)
        and own_class(type(module)) is None
    )


def _is_block(module: nn.Module | None) -> bool:
    attn = module._modules.get("attn") if module is not None else None
    return attn is not None and _is_attention(attn)
