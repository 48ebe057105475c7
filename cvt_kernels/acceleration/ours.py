"""The blocks of the model in ``cvt``, which call the operators as they are: they need no fused forward.

Their own forwards ask :func:`cvt_kernels.acceleration.matching.why_not_now`, and if there is a reason call
their modules one by one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .entries import (
    BATCH_NORMS,
    BlockEntry,
    StageEntry,
    by_name,
    bypassed,
    why_convolutions_unsupported,
    why_norms_unsupported,
)
from .parts import BlockParts, StageParts

#: The module that defines them. (Nothing here imports it.)
MODULE = "cvt.model"

UPSTREAM = "cvt"

_ATTENTION_PARTS: dict[str, Any] = {"attn_drop": nn.Dropout}
_DILATED_PARTS: dict[str, Any] = {}  # what hybrid mixing has besides
for _letter in "qkv":
    _path = f"conv_proj_{_letter}"
    _ATTENTION_PARTS |= {
        _path: f"{MODULE}.ConvProjection",
        f"{_path}.conv": nn.Conv2d,
        f"{_path}.bn": BATCH_NORMS,
    }
    _DILATED_PARTS |= {f"{_path}.dilated_conv": nn.Conv2d, f"{_path}.dilated_bn": BATCH_NORMS}


def _branches(attention: Any) -> list[tuple[Any, Any]]:
    children = attention._modules  # as attributes they would take far longer to find
    branches = [children[name]._modules for name in ("conv_proj_q", "conv_proj_k", "conv_proj_v")]
    return [(branch[f"{kind}conv"], branch[f"{kind}bn"]) for branch in branches for kind in _kinds(branch)]


def _kinds(branch: Any) -> list[str]:
    return ["", "dilated_"] if "dilated_conv" in branch else [""]


ENTRIES = by_name(
    BlockEntry(
        upstream=UPSTREAM,
        name="ConvEmbed",
        layers=("proj",),
        parts=bypassed({"norm": nn.LayerNorm}),
        why_unsupported=lambda block: why_norms_unsupported(block.norm),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="Block",
        parts=bypassed({"norm1": nn.LayerNorm, "norm2": nn.LayerNorm}),
        why_unsupported=lambda block: why_norms_unsupported(block.norm1, block.norm2),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="Attention",
        layers=("proj_q", "proj_k", "proj_v", "proj"),
        parts=bypassed(_ATTENTION_PARTS),
        why_unsupported=lambda block: why_convolutions_unsupported(_branches(block)),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="Mlp",
        layers=("fc1", "fc2"),
    ),
)

_HYBRID_ATTENTION = ENTRIES["Attention"]._replace(parts=bypassed(_ATTENTION_PARTS | _DILATED_PARTS))


def attention_entry(attention: nn.Module) -> BlockEntry:
    """Returns the entry of an attention, which lists the convolutions that it has."""
    branch = attention._modules["conv_proj_q"]  # as an attribute it would take far longer to find
    is_hybrid = branch is not None and "dilated_conv" in branch._modules
    return _HYBRID_ATTENTION if is_hybrid else ENTRIES["Attention"]


def _embedding_parts(self: Any) -> tuple[nn.Conv2d, Tensor | None]:
    return self.patch_embed.proj, self.cls_token


def _stage_parts(self: Any) -> StageParts:
    conv, class_token = _embedding_parts(self)
    batch_norm = self.patch_embed.bn
    return StageParts(
        conv=conv,
        batch_norm=batch_norm if isinstance(batch_norm, nn.BatchNorm2d) else None,
        norm=self.patch_embed.norm,
        class_token=class_token,
        blocks=[_block_parts(block) for block in self.blocks],
        token_keep_bounds=getattr(self, "token_keep_bounds", (0.0, 1.0)),
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
        approximate=self.mlp.approximate,
        fc2=self.mlp.fc2,
        layer_scales=(_layer_scale(self.ls1), _layer_scale(self.ls2)),
        token_keep=getattr(self, "token_keep", 1.0),
        pool=getattr(attn, "pool", "cls"),
    )


def _layer_scale(module: nn.Module) -> nn.Module | None:
    return module if hasattr(module, "gamma") else None


def _tokens_and_grid(tokens: Tensor, grid: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
    return tokens, grid


def _tokens(result: tuple[Tensor, tuple[int, int]]) -> Tensor:
    return result[0]


def _why_stage_unsupported(stage: Any) -> str | None:
    on_cpu = all(parameter.device.type == "cpu" for parameter in stage.parameters())
    for block in stage.blocks:
        if getattr(block, "token_keep", 1) != 1 and not on_cpu:
            return "drops tokens, which frozen stages do on a CPU only"
        attention = getattr(block, "attn", None)
        if getattr(attention, "position_bias", None) is not None:
            return "attention has a bias by position"
        if hasattr(getattr(attention, "conv_proj_q", None), "dilated_conv"):
            return "convolutions are summed"
    return None


STAGE = StageEntry(
    block=BlockEntry(
        upstream=UPSTREAM,
        name="Stage",
        arguments=("image",),
        children=frozenset(("cls_token", "patch_embed", "pos_drop", "blocks")),
        why_unsupported=_why_stage_unsupported,
    ),
    classes=frozenset(f"{MODULE}.{name}" for name in (*ENTRIES, "ConvProjection", "DropPath", "LayerScale")),
    parts=_stage_parts,
    embedding=_embedding_parts,
    result=_tokens_and_grid,
    tokens=_tokens,
)


def recognize(module: nn.Module) -> BlockEntry | None:
    """Returns the entry of a module whose class is one of ``cvt`` or derives from it; None for others."""
    cls = own_class(type(module))
    if cls is not None and cls.__name__ == "Attention":
        return attention_entry(module)
    return None if cls is None else ENTRIES.get(cls.__name__)


def own_class(cls: type) -> type | None:
    """Returns the class of ``cvt`` that ``cls`` is or derives from; None for other classes."""
    return next((base for base in cls.__mro__ if base.__module__ == MODULE), None)
