"""Entries of SegFormer, GLPN, PVT and PVT v2 (all in models/ of transformers): the common parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..blocks import (
    GELU_VARIANTS,
    HUGGING_FACE,
    BlockEntry,
    BlockParts,
    BypassedParts,
    StageEntry,
    StageParts,
    parts_of_norm,
)
from ..forward import embed_tokens


def common_parts(self: Any, attention: Any, attention_drop: nn.Module) -> dict[str, Any]:
    """Returns the parts that have the same names in all but SegFormer's blocks of transformers 5."""
    mlp = self.mlp
    return {
        "norm1": self.layer_norm_1,
        "linears": (attention.query, attention.key, attention.value),
        "num_heads": attention.num_attention_heads,
        "scale": attention.attention_head_size**-0.5,
        "head_dim": attention.attention_head_size,
        "attention_drop": attention_drop,
        "norm2": self.layer_norm_2,
        "fc1": mlp.dense1,
        "activation": mlp.intermediate_act_fn,
        "fc2": mlp.dense2,
        "drop_path": self.drop_path,
    }


#: The ends of the names of classes within a block.
_ENDS = (
    *("Attention", "EfficientSelfAttention", "SelfAttention", "SelfOutput", "SequenceReduction"),
    *("ConvFeedForwardNetwork", "FFN", "MixFFN", "MixMLP", "DWConv", "DepthWiseConv", "DropPath"),
)
#: The paths of the linear layers in all blocks but SegFormer's of transformers 5 and PVT v2's.
_LAYERS = (
    *("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    *("mlp.dense1", "mlp.dense2"),
)


def block_entry(
    name: str,
    parts: Callable[[Any], BlockParts],
    *,
    norms: tuple[str, str] = ("layer_norm_1", "layer_norm_2"),
    last_argument: str = "output_attentions",
    children: tuple[str, ...] = (),
    layers: tuple[str, ...] = _LAYERS,
) -> BlockEntry:
    """Returns the entry of a class of blocks, by its name, its parts and what not all have in common."""
    beginning = name.removesuffix("Layer").removesuffix("Block")
    return BlockEntry(
        upstream=HUGGING_FACE,
        name=name,
        arguments=("hidden_states", "height", "width", last_argument),
        children=frozenset(("attention", "drop_path", "mlp", *norms, *children)),
        classes=frozenset(("GlpnDropPath", *GELU_VARIANTS, *(f"{beginning}{end}" for end in _ENDS))),
        layers=layers,
        parts=parts,
        variant=norms[0],
        is_layer=True,
    )


def embeddings_entry(name: str) -> BlockEntry:
    """Returns the entry of a class of overlapping patch embeddings."""
    return BlockEntry(
        upstream=HUGGING_FACE,
        name=name,
        arguments=("pixel_values",),
        children=frozenset(("proj", "layer_norm")),
        layers=("proj",),
        forward=lambda self, pixel_values: embed_tokens(self.proj, self.layer_norm, pixel_values),
        parts=lambda self: parts_of_norm(self.layer_norm),
    )


def stage_entry(
    name: str,
    block: BlockEntry,
    result: Callable[[Any, Tensor, tuple[int, int]], Any],
    *,
    embedding: str,
    last_argument: str,
    tokens: Callable[[Any], Tensor],
    others: Callable[[Any], tuple[Any, ...]] = lambda grid: (),
) -> StageEntry:
    """Returns the entry of a class of stages, by the entry of its layers, and what differs."""

    def parts_of_stage(self: Any) -> StageParts:
        conv, _ = stem(self)
        norm = self._modules[embedding].layer_norm
        blocks = [block.parts(each) for each in self.blocks]
        return StageParts(conv, None, norm, None, blocks, self.layer_norm)

    def stem(self: Any) -> tuple[nn.Conv2d, None]:
        return self._modules[embedding].proj, None

    children = frozenset((embedding, "blocks", "layer_norm"))
    embeddings = f"{block.name.removesuffix('Layer').removesuffix('Block')}OverlapPatchEmbeddings"
    return StageEntry(
        upstream=HUGGING_FACE,
        name=name,
        parts=parts_of_stage,
        arguments=("hidden_states", last_argument),
        children=children,
        variant="blocks",
        classes=block.classes | {block.name, embeddings},
        embedding=stem,
        result=result,
        tokens=tokens,
        others=others,
    )


def encoder_entry(
    name: str, forward: Callable[..., Any], parts: Callable[[Any], BypassedParts], *children: str
) -> BlockEntry:
    """Returns the entry of a class of encoders, by its forward, the LayerNorms in it and its submodules."""
    return BlockEntry(
        upstream=HUGGING_FACE,
        name=name,
        arguments=("pixel_values", "output_attentions", "output_hidden_states", "return_dict"),
        children=frozenset(children),
        forward=forward,
        parts=parts,
    )
