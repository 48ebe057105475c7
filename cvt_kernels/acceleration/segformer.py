"""SegFormer's blocks, transformers/models/segformer/modeling_segformer.py, in transformers 4 and 5."""

from __future__ import annotations

from typing import Any

from .fused import gelu_variant
from .pyramid import PyramidParts


def parts(layer: Any) -> PyramidParts:
    """Returns the parts of a ``SegformerLayer``, of transformers 4 or 5."""
    return parts_of_4(layer) if "layer_norm_1" in layer._modules else _parts_of_5(layer)


def _parts_of_5(layer: Any) -> PyramidParts:
    attention, mlp = layer.attention, layer.mlp
    reduction = attention._modules.get("sequence_reduction")
    return PyramidParts(
        norm1=layer.layernorm_before,
        linears=(attention.q_proj, attention.k_proj, attention.v_proj),
        reduction=None if reduction is None else (reduction.sequence_reduction, reduction.layer_norm),
        num_heads=attention.num_attention_heads,
        scale=attention.scaling,
        proj=attention.o_proj,
        norm2=layer.layernorm_after,
        fc1=mlp.fc1,
        conv=mlp.dwconv.dwconv,
        activation=mlp.activation_fn,
        approximate=gelu_variant(mlp.activation_fn),
        fc2=mlp.fc2,
    )


def parts_of_4(layer: Any) -> PyramidParts:
    """Returns the parts of a layer of SegFormer in transformers 4, or of GLPN."""
    attention, mlp = layer.attention.self, layer.mlp
    reduces = attention.sr_ratio > 1
    return PyramidParts(
        norm1=layer.layer_norm_1,
        linears=(attention.query, attention.key, attention.value),
        reduction=(attention.sr, attention.layer_norm) if reduces else None,
        num_heads=attention.num_attention_heads,
        scale=attention.attention_head_size**-0.5,
        proj=layer.attention.output.dense,
        norm2=layer.layer_norm_2,
        fc1=mlp.dense1,
        conv=mlp.dwconv.dwconv,
        activation=mlp.intermediate_act_fn,
        approximate=gelu_variant(mlp.intermediate_act_fn),
        fc2=mlp.dense2,
    )
