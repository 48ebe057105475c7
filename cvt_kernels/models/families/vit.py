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
#: The arguments of most blocks.
_MASKED = ("hidden_states", "attention_mask", "kwargs")


def _heads(attention: Any, proj: Any) -> dict[str, Any]:
    """Returns the parts of attention but its linear layers of Q, K and V."""
    kind = attention.config._attn_implementation
    if kind != "sdpa":
        raise Unsupported(f"attention is that of transformers' {kind!r}, expected 'sdpa'")
    if attention.is_causal or type(attention.config).__name__ == "CLIPTextConfig":
        raise Unsupported("attention is causal")
    return {"attention_drop": attention, "proj": proj}


def _vit_block(self: Any) -> BlockParts:
    return _block(self, self.layernorm_before, self.layernorm_after, drop=self.dropout)


def _dinov2_block(self: Any) -> BlockParts:
    if hasattr(self.mlp, "gate_proj"):
        raise Unsupported("the MLP is a SwiGLU")
    scales = self.layer_scale1, self.layer_scale2
    return _block(self, self.norm1, self.norm2, drop_path=self.drop_path, layer_scales=scales)


def _block(
    self: Any, norm1: nn.LayerNorm, norm2: nn.LayerNorm, *, drop: Any = None, **others: Any
) -> BlockParts:
    """Returns the parts of a block with the attention of ViT and DINOv2."""
    attention, mlp = self.attention, self.mlp
    settings = {"drop_path": None, "num_heads": attention.num_attention_heads, "scale": attention.scaling}
    return BlockParts(
        **_heads(attention, attention.o_proj),
        **settings | others,
        norm1=norm1,
        linears=(attention.q_proj, attention.k_proj, attention.v_proj),
        norm2=norm2,
        fc1=mlp.fc1,
        activation=mlp.activation_fn,
        fc2=mlp.fc2,
        drops=(drop, None, drop),
    )


def _clip_block(self: Any) -> BlockParts:
    attention, mlp = self.self_attn, self.mlp
    return BlockParts(
        **_heads(attention, attention.out_proj),
        norm1=self.layer_norm1,
        linears=(attention.q_proj, attention.k_proj, attention.v_proj),
        num_heads=attention.num_heads,
        scale=attention.scale,
        norm2=self.layer_norm2,
        fc1=mlp.fc1,
        activation=mlp.activation_fn,
        fc2=mlp.fc2,
        drops=(None, None, None),
        drop_path=None,
    )


def _yolos_block(self: Any) -> BlockParts:
    attention, activation = self.attention.attention, self.intermediate.intermediate_act_fn
    return BlockParts(
        **_heads(attention, self.attention.output.dense),
        norm1=self.layernorm_before,
        linears=(attention.query, attention.key, attention.value),
        num_heads=attention.num_attention_heads,
        scale=attention.scaling,
        norm2=self.layernorm_after,
        fc1=self.intermediate.dense,
        activation=activation,
        fc2=self.output.dense,
        drops=(self.attention.output.dropout, None, self.output.dropout),
        drop_path=None,
    )


def _entry(
    name: str,
    parts: Callable[[Any], BlockParts],
    children: tuple[str, ...],
    layers: tuple[str, ...] = (),
    *,
    arguments: tuple[str, ...] = _MASKED,
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


_PROJECTIONS = tuple(f"attention.{letter}_proj" for letter in "qkvo")
_VIT = ("attention", "layernorm_before", "layernorm_after", "mlp", "dropout")
_DINOV2 = ("attention", "norm1", "norm2", "mlp", "drop_path", "layer_scale1", "layer_scale2")
_CLIP = ("self_attn", "layer_norm1", "layer_norm2", "mlp")
_YOLOS = ("attention", "layernorm_before", "layernorm_after", "intermediate", "output")
_YOLOS_LAYERS = (
    *(f"attention.attention.{word}" for word in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
)
_MLP = ("mlp.fc1", "mlp.fc2")

FAMILY = Family(
    models=("ViT and its relatives (of transformers 5)",),
    entries=(
        *(
            _entry(f"{model}Layer", _vit_block, _VIT, (*_PROJECTIONS, *_MLP))
            for model in ("ViT", "DeiT", "ViTMAE", "ViTMSN", "IJepa")
        ),
        *(
            _entry(f"{model}Layer", _dinov2_block, _DINOV2, (*_PROJECTIONS, *_MLP))
            for model in ("Dinov2", "Dinov2WithRegisters")
        ),
        *(
            _entry(
                f"{model}EncoderLayer",
                _clip_block,
                _CLIP,
                (*(f"self_attn.{word}_proj" for word in ("q", "k", "v", "out")), *_MLP),
            )
            for model in ("CLIP", "Siglip")
        ),
        *(
            _entry(
                f"{model}Layer", _yolos_block, _YOLOS, _YOLOS_LAYERS, arguments=("hidden_states", "kwargs")
            )
            for model in ("Yolos", "DPTViT")
        ),
        *(
            unserved_entry(HUGGING_FACE, name, reason)
            for name, reason in (
                ("BeitLayer", "its scores have a bias by position"),
                ("SwinLayer", "it attends in windows"),
                ("DINOv3ViTLayer", "its queries and keys are rotated by position (RoPE)"),
                ("InternVLVisionLayer", "its queries and keys may be normalized"),
            )
        ),
    ),
    classifiers=tuple(
        _classifier(f"{model}ForImageClassification", encoder)
        for model, encoder in (("ViT", "vit"), ("DeiT", "deit"), ("ViTMSN", "vit"))
    ),
)
