"""ViT and its relatives in transformers 5: image encoders in whose blocks all tokens ask all tokens.

A block is served as one operator, in evaluation on a CPU. Elsewhere it is upstream's own: most of its time
goes to linear layers, which PyTorch computes as fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..blocks import GELU_VARIANTS, HUGGING_FACE, BlockEntry, BlockParts, Family, Unsupported, unserved_entry
from ..class_token import ClassifierEntry

#: The ends of the names of classes within a block.
_ENDS = (
    *("Attention", "SelfAttention", "SelfOutput", "Intermediate", "Output"),
    *("MLP", "DropPath", "LayerScale"),
)


def _parts(
    self: Any,
    attention: Any,
    layers: tuple[str, ...],
    norms: tuple[nn.LayerNorm, nn.LayerNorm],
    activation: nn.Module,
    *drops: nn.Module,
    **others: Any,
) -> BlockParts:
    """Returns the parts of a block, by the paths of its linear layers, and others than most have.

    ``drops`` are the dropout after attention and after the MLP.
    """
    kind = attention.config._attn_implementation
    if kind != "sdpa":
        raise Unsupported(f"attention is that of transformers' {kind!r}, expected 'sdpa'")
    if attention.is_causal or type(attention.config).__name__ == "CLIPTextConfig":
        raise Unsupported("attention is causal")
    *linears, proj, fc1, fc2 = map(self.get_submodule, layers)
    norm1, norm2 = norms
    after_attention, after_mlp = drops or (None, None)
    if "num_heads" not in others:
        others |= {"num_heads": attention.num_attention_heads, "scale": attention.scaling}
    return BlockParts(
        norm1=norm1,
        linears=linears,
        head_dim=getattr(attention, "head_dim", getattr(attention, "attention_head_size", None)),
        proj=proj,
        norm2=norm2,
        fc1=fc1,
        activation=activation,
        fc2=fc2,
        attention_drop=attention,
        drops=(after_attention, None, after_mlp),
        **{"drop_path": None} | others,
    )


_MLP = ("mlp.fc1", "mlp.fc2")
_LAYERS = (*(f"attention.{letter}_proj" for letter in "qkvo"), *_MLP)
_CLIP_LAYERS = (*(f"self_attn.{word}_proj" for word in ("q", "k", "v", "out")), *_MLP)
_YOLOS_LAYERS = (
    *(f"attention.attention.{word}" for word in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
)


def _vit_block(self: Any) -> BlockParts:
    norms, activation = (self.layernorm_before, self.layernorm_after), self.mlp.activation_fn
    return _parts(self, self.attention, _LAYERS, norms, activation, self.dropout, self.dropout)


def _dinov2_block(self: Any) -> BlockParts:
    if hasattr(self.mlp, "gate_proj"):
        raise Unsupported("the MLP is a SwiGLU")
    norms, activation = (self.norm1, self.norm2), self.mlp.activation_fn
    others = {"drop_path": self.drop_path, "layer_scales": (self.layer_scale1, self.layer_scale2)}
    return _parts(self, self.attention, _LAYERS, norms, activation, **others)


def _clip_block(self: Any) -> BlockParts:
    attention, norms = self.self_attn, (self.layer_norm1, self.layer_norm2)
    heads = {"num_heads": attention.num_heads, "scale": attention.scale}
    return _parts(self, attention, _CLIP_LAYERS, norms, self.mlp.activation_fn, **heads)


def _yolos_block(self: Any) -> BlockParts:
    norms, activation = (self.layernorm_before, self.layernorm_after), self.intermediate.intermediate_act_fn
    drops = self.attention.output.dropout, self.output.dropout
    return _parts(self, self.attention.attention, _YOLOS_LAYERS, norms, activation, *drops)


def _entry(
    name: str,
    parts: Callable[[Any], BlockParts],
    children: tuple[str, ...],
    layers: tuple[str, ...],
    *,
    arguments: tuple[str, ...] = ("hidden_states", "attention_mask", "kwargs"),
) -> BlockEntry:
    beginnings = name.removesuffix("Layer").removesuffix("Encoder"), name.removesuffix("ViTLayer")
    return BlockEntry(
        upstream=HUGGING_FACE,
        name=name,
        arguments=arguments,
        children=frozenset(children),
        classes=frozenset((*GELU_VARIANTS, *(f"{each}{end}" for each in beginnings for end in _ENDS))),
        layers=layers,
        parts=parts,
        is_layer=True,
        is_only_served=True,
        grid_arguments=0,
    )


def _classifier(name: str, encoder: str) -> ClassifierEntry:
    """Returns the entry of a classifier that reads the class token of an encoder's last layer alone."""

    def last_layer(self: Any) -> nn.Module:
        return next(reversed(self._modules[encoder].layers))

    def reads_class_token(self: Any, call: dict[str, Any]) -> bool:
        recorded = self.config.output_hidden_states or self.config.output_attentions
        others = (value for name, value in call.items() if name not in ("labels", "interpolate_pos_encoding"))
        return not recorded and all(value is None or value is False for value in others)

    return ClassifierEntry(
        upstream=HUGGING_FACE,
        name=name,
        arguments=("pixel_values", "labels", "interpolate_pos_encoding"),
        path=(encoder, f"{encoder}.layernorm"),
        last_stage=last_layer,
        blocks=None,
        reads_class_token=reads_class_token,
    )


_VIT = ("attention", "layernorm_before", "layernorm_after", "mlp", "dropout")
_DINOV2 = ("attention", "norm1", "norm2", "mlp", "drop_path", "layer_scale1", "layer_scale2")
_CLIP = ("self_attn", "layer_norm1", "layer_norm2", "mlp")
_YOLOS = ("attention", "layernorm_before", "layernorm_after", "intermediate", "output")
_UNSERVED = {
    "BeitLayer": "its scores have a bias by position",
    "SwinLayer": "it attends in windows",
    "DINOv3ViTLayer": "its queries and keys are rotated by position (RoPE)",
    "InternVLVisionLayer": "its queries and keys may be normalized",
}

FAMILY = Family(
    models=("ViT and its relatives (of transformers 5)",),
    entries=(
        *(
            _entry(f"{model}Layer", _vit_block, _VIT, _LAYERS)
            for model in ("ViT", "DeiT", "ViTMAE", "ViTMSN", "IJepa")
        ),
        *(
            _entry(f"{model}Layer", _dinov2_block, _DINOV2, _LAYERS)
            for model in ("Dinov2", "Dinov2WithRegisters")
        ),
        *(_entry(f"{model}EncoderLayer", _clip_block, _CLIP, _CLIP_LAYERS) for model in ("CLIP", "Siglip")),
        *(
            _entry(
                f"{model}Layer", _yolos_block, _YOLOS, _YOLOS_LAYERS, arguments=("hidden_states", "kwargs")
            )
            for model in ("Yolos", "DPTViT")
        ),
        *(unserved_entry(HUGGING_FACE, name, reason) for name, reason in _UNSERVED.items()),
    ),
    classifiers=tuple(
        _classifier(f"{model}ForImageClassification", encoder)
        for model, encoder in (("ViT", "vit"), ("DeiT", "deit"), ("ViTMSN", "vit"))
    ),
)
