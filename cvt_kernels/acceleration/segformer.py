"""SegFormer's blocks, transformers/models/segformer/modeling_segformer.py: their fused forwards and entries.

Before and after transformers 5 classes of one name differ. GLPN has copies of the older ones.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

from torch import Tensor, nn

from .decode_head import POINTWISE_LAYERS, decode, why_head_not_now, why_head_unsupported
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
    gelu_variant,
    normalize,
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

# Fused forwards of transformers 5 -------------------------------------------------------------------------


def _reduction(self: Any, hidden_states: Tensor, height: int, width: int) -> Any:
    if min(height, width) < self.sequence_reduction.kernel_size[0]:
        return NotImplemented  # upstream has an error for it
    return reduce(self.sequence_reduction, self.layer_norm, hidden_states, (height, width))


def _attention(
    self: Any,
    hidden_states: Tensor,
    height: int,
    width: int,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    # Every layer gets all that the model was called with; hidden states are recorded elsewhere.
    meant = (value for name, value in kwargs.items() if name != "output_hidden_states")
    if attention_mask is not None or any(value is not None and value is not False for value in meant):
        return NotImplemented
    kept = hidden_states
    if self.sequence_reduction_ratio > 1:
        kept = self.sequence_reduction(hidden_states, height, width)
    linears = self.q_proj, self.k_proj, self.v_proj
    heads = {"num_heads": self.num_attention_heads, "scale": self.scaling}
    return apply_linear(self.o_proj, attend(hidden_states, kept, linears, **heads)), None


def _mix_mlp(self: Any, hidden_states: Tensor, height: int, width: int) -> Tensor:
    hidden = apply_linear(self.fc1, hidden_states)
    hidden = convolve_and_activate(self.dwconv.dwconv, self.activation_fn, hidden, height, width)
    return self.dropout(apply_linear(self.fc2, drop(self.dropout, hidden)))


def _layer(self: Any, hidden_states: Tensor, height: int, width: int, **kwargs: Any) -> Tensor:
    y = normalize_for_layers(self.layernorm_before, hidden_states)
    branch, _ = self.attention(y, height, width, **kwargs)
    branch = self.drop_path(self.hidden_dropout(branch))
    stream, y = add_and_normalize(self.layernorm_after, branch, hidden_states)
    return self.drop_path(self.mlp(y, height, width)) + stream


def _stage(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    tokens, height, width = self.patch_embeddings(hidden_states)
    for block in self.blocks:
        tokens = block(tokens, height, width, **kwargs)
    tokens = normalize(self.layer_norm, tokens)
    # Upstream copies the map so that channels are first in memory, which nothing after it needs.
    return as_map(tokens, (height, width)) if self.reshape else tokens


# Fused forwards before it, also of GLPN -------------------------------------------------------------------


def _embeddings(self: Any, pixel_values: Tensor) -> tuple[Tensor, int, int]:
    return embed_tokens(self.proj, self.layer_norm, pixel_values)


def _efficient_self_attention(
    self: Any, hidden_states: Tensor, height: int, width: int, output_attentions: bool = False
) -> Any:
    if output_attentions or min(height, width) < self.sr_ratio:
        return NotImplemented
    kept = hidden_states
    if self.sr_ratio > 1:
        kept = reduce(self.sr, self.layer_norm, hidden_states, (height, width))
    linears = self.query, self.key, self.value
    heads = {"num_heads": self.num_attention_heads, "scale": self.attention_head_size**-0.5}
    return (attend(hidden_states, kept, linears, **heads),)


def _self_output(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    return self.dropout(apply_linear(self.dense, hidden_states))


def _mix_ffn(self: Any, hidden_states: Tensor, height: int, width: int) -> Tensor:
    hidden = apply_linear(self.dense1, hidden_states)
    hidden = convolve_and_activate(self.dwconv.dwconv, self.intermediate_act_fn, hidden, height, width)
    return self.dropout(apply_linear(self.dense2, drop(self.dropout, hidden)))


def _layer_of_4(
    self: Any, hidden_states: Tensor, height: int, width: int, output_attentions: bool = False
) -> tuple[Tensor, ...]:
    y = normalize_for_layers(self.layer_norm_1, hidden_states)
    branch, *attentions = self.attention(y, height, width, output_attentions=output_attentions)
    stream, y = add_and_normalize(self.layer_norm_2, self.drop_path(branch), hidden_states)
    return (stream + self.drop_path(self.mlp(y, height, width)), *attentions)


# Table entries --------------------------------------------------------------------------------------------


def embeddings_entry(name: str) -> BlockEntry:
    """Returns the entry of a class of overlapping patch embeddings."""
    return BlockEntry(
        upstream=UPSTREAM,
        name=name,
        arguments=("pixel_values",),
        children=frozenset(("proj", "layer_norm")),
        forward=_embeddings,
        parts=bypassed({"layer_norm": nn.LayerNorm}),
        why_unsupported=lambda block: why_norms_unsupported(block.layer_norm),
    )


def layer_entry(
    name: str,
    forward: Callable[..., Any],
    *,
    norms: tuple[str, str] = ("layer_norm_1", "layer_norm_2"),
    last_argument: str = "output_attentions",
    children: tuple[str, ...] = (),
) -> BlockEntry:
    """Returns the entry of a class of layers.

    Args:
        name: Name of the class.
        forward: Its fused forward.
        norms: Names of the LayerNorms.
        last_argument: Name of the argument after those that all have.
        children: Names of the submodules that not all have.
    """
    return BlockEntry(
        upstream=UPSTREAM,
        name=name,
        arguments=("hidden_states", "height", "width", last_argument),
        children=frozenset(("attention", "drop_path", "mlp", *norms, *children)),
        forward=forward,
        parts=bypassed(dict.fromkeys(norms, nn.LayerNorm)),
        why_unsupported=lambda block: why_norms_unsupported(*(block._modules[norm] for norm in norms)),
        variant=norms[0],
    )


def _entries_of_4(prefix: str) -> tuple[BlockEntry, ...]:
    """Returns the entries of the classes that SegFormer had before transformers 5, and GLPN has.

    Args:
        prefix: What the names of the classes begin with.
    """
    return (
        embeddings_entry(f"{prefix}OverlapPatchEmbeddings"),
        layer_entry(f"{prefix}Layer", _layer_of_4),
        BlockEntry(
            upstream=UPSTREAM,
            name=f"{prefix}EfficientSelfAttention",
            arguments=("hidden_states", "height", "width", "output_attentions"),
            children=frozenset(("query", "key", "value", "dropout", "sr", "layer_norm")),
            forward=_efficient_self_attention,
            parts=bypassed(
                {
                    "dropout": nn.Dropout,
                    "sr": (nn.Conv2d, NoneType),
                    "layer_norm": (nn.LayerNorm, NoneType),
                }
            ),
            why_unsupported=lambda block: (
                why_reduction_unsupported(block.sr, block.layer_norm) if block.sr_ratio > 1 else None
            ),
            why_not_now=lambda block: why_dropout_active(block.dropout),
        ),
        BlockEntry(
            upstream=UPSTREAM,
            name=f"{prefix}SelfOutput",
            arguments=("hidden_states", "input_tensor"),
            children=frozenset(("dense", "dropout")),
            forward=_self_output,
        ),
        BlockEntry(
            upstream=UPSTREAM,
            name=f"{prefix}MixFFN",
            arguments=("hidden_states", "height", "width"),
            children=frozenset(("dense1", "dwconv", "intermediate_act_fn", "dense2", "dropout")),
            forward=_mix_ffn,
            parts=bypassed(
                {
                    "dwconv": (f"{prefix}DWConv", f"{prefix}DepthWiseConv"),
                    "dwconv.dwconv": nn.Conv2d,
                    "intermediate_act_fn": GELUS,
                }
            ),
            why_unsupported=lambda block: (
                why_convolution_unsupported(block.dwconv.dwconv)
                or why_gelu_replaced(block.intermediate_act_fn)
            ),
        ),
    )


def _why_attention_not_now(block: Any) -> str | None:
    kind = block.config._attn_implementation
    if kind not in ("sdpa", "cvt_kernels"):
        return f"attention is that of transformers' {kind!r}, expected 'sdpa'"
    if block.training and block.attention_dropout > 0:
        return f"dropout of attention probabilities is active (p = {block.attention_dropout:g}, training)"
    return None


def _head_entry(projections: str, *arguments: str) -> BlockEntry:
    """Returns the entry of the decode head whose linear layers are called ``projections``."""
    others = ("linear_fuse", "batch_norm", "activation", "dropout", "classifier")
    return BlockEntry(
        upstream=UPSTREAM,
        name="SegformerDecodeHead",
        arguments=("encoder_hidden_states", *arguments),
        children=frozenset((projections, *others)),
        forward=lambda self, states, **_: decode(self, self._modules[projections], states),
        parts=bypassed(dict.fromkeys(POINTWISE_LAYERS, nn.Conv2d)),
        why_unsupported=lambda head: why_head_unsupported(head, head._modules[projections]),
        why_not_now=lambda head: why_head_not_now(head._modules[projections]),
        variant=projections,
    )


_ENTRIES_OF_5 = (
    layer_entry(
        "SegformerLayer",
        _layer,
        norms=("layernorm_before", "layernorm_after"),
        last_argument="kwargs",
        children=("hidden_dropout",),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="SegformerStage",
        arguments=("hidden_states", "kwargs"),
        children=frozenset(("patch_embeddings", "blocks", "layer_norm")),
        forward=_stage,
        parts=bypassed({"layer_norm": nn.LayerNorm}),
        why_unsupported=lambda block: why_norms_unsupported(block.layer_norm),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="SegformerAttention",
        arguments=("hidden_states", "height", "width", "attention_mask", "kwargs"),
        children=frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "sequence_reduction")),
        forward=_attention,
        why_not_now=_why_attention_not_now,
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="SegformerSequenceReduction",
        arguments=("hidden_states", "height", "width"),
        children=frozenset(("sequence_reduction", "layer_norm")),
        forward=_reduction,
        parts=bypassed({"sequence_reduction": nn.Conv2d, "layer_norm": nn.LayerNorm}),
        why_unsupported=lambda block: why_reduction_unsupported(block.sequence_reduction, block.layer_norm),
    ),
    BlockEntry(
        upstream=UPSTREAM,
        name="SegformerMixMLP",
        arguments=("hidden_states", "height", "width"),
        children=frozenset(("fc1", "dwconv", "activation_fn", "fc2", "dropout")),
        forward=_mix_mlp,
        parts=bypassed(
            {"dwconv": "SegformerDepthWiseConv", "dwconv.dwconv": nn.Conv2d, "activation_fn": GELUS}
        ),
        why_unsupported=lambda block: (
            why_convolution_unsupported(block.dwconv.dwconv) or why_gelu_replaced(block.activation_fn)
        ),
    ),
    _head_entry("linear_projections", "kwargs"),
)

ENTRIES = variants_by_name(
    *_ENTRIES_OF_5, *_entries_of_4("Segformer"), _head_entry("linear_c"), *_entries_of_4("GLPN")
)


def recognize(module: nn.Module) -> BlockEntry | None:
    """Returns the entry of a module by the name of its class or of a base of it; None for others."""
    entry = recognize_variant(module, ENTRIES)
    # Before transformers 5 the class of this name only calls two others.
    is_wrapper = entry is not None and entry.name == "SegformerAttention" and "self" in module._modules
    return None if is_wrapper else entry


# Parts of a layer -----------------------------------------------------------------------------------------


def parts(layer: Any) -> BlockParts:
    """Returns the parts of a ``SegformerLayer``, of transformers 4 or 5, or of a ``GLPNLayer``."""
    return _parts_of_4(layer) if "layer_norm_1" in layer._modules else _parts_of_5(layer)


def _parts_of_5(layer: Any) -> BlockParts:
    attention, mlp = layer.attention, layer.mlp
    reduction = attention.sequence_reduction if attention.sequence_reduction_ratio > 1 else None
    return BlockParts(
        norm1=layer.layernorm_before,
        linears=(attention.q_proj, attention.k_proj, attention.v_proj),
        reduction=None if reduction is None else (reduction.sequence_reduction, reduction.layer_norm),
        num_heads=attention.num_attention_heads,
        scale=attention.scaling,
        proj=attention.o_proj,
        norm2=layer.layernorm_after,
        fc1=mlp.fc1,
        mix=mlp.dwconv.dwconv,
        activation=mlp.activation_fn,
        approximate=gelu_variant(mlp.activation_fn),
        fc2=mlp.fc2,
    )


def _parts_of_4(layer: Any) -> BlockParts:
    """Returns the parts of a layer of SegFormer in transformers 4, or of GLPN."""
    attention, mlp = layer.attention.self, layer.mlp
    reduces = attention.sr_ratio > 1
    return BlockParts(
        norm1=layer.layer_norm_1,
        linears=(attention.query, attention.key, attention.value),
        reduction=(attention.sr, attention.layer_norm) if reduces else None,
        num_heads=attention.num_attention_heads,
        scale=attention.attention_head_size**-0.5,
        proj=layer.attention.output.dense,
        norm2=layer.layer_norm_2,
        fc1=mlp.dense1,
        mix=mlp.dwconv.dwconv,
        activation=mlp.intermediate_act_fn,
        approximate=gelu_variant(mlp.intermediate_act_fn),
        fc2=mlp.dense2,
    )
