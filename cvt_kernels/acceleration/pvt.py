"""The blocks of PVT and PVT v2, transformers/models/pvt/modeling_pvt.py and pvt_v2/modeling_pvt_v2.py."""

from __future__ import annotations

from typing import Any

from .fused import gelu_variant
from .pyramid import PyramidParts


def parts(layer: Any) -> PyramidParts:
    """Returns the parts of a ``PvtLayer``."""
    attention, mlp = layer.attention.self, layer.mlp
    reduces = attention.sequences_reduction_ratio > 1
    return PyramidParts(
        norm1=layer.layer_norm_1,
        linears=(attention.query, attention.key, attention.value),
        reduction=(attention.sequence_reduction, attention.layer_norm) if reduces else None,
        num_heads=attention.num_attention_heads,
        scale=attention.attention_head_size**-0.5,
        proj=layer.attention.output.dense,
        norm2=layer.layer_norm_2,
        fc1=mlp.dense1,
        conv=None,
        activation=mlp.intermediate_act_fn,
        approximate=gelu_variant(mlp.intermediate_act_fn),
        fc2=mlp.dense2,
    )


def parts_of_v2(layer: Any) -> PyramidParts | None:
    """Returns the parts of a ``PvtV2BlockLayer``; None for linear attention, which is another block."""
    attention, mlp = layer.attention, layer.mlp
    if attention.linear_attention:
        return None
    reduces = attention.spatial_reduction_ratio > 1
    return PyramidParts(
        norm1=layer.layer_norm_1,
        linears=(attention.query, attention.key, attention.value),
        reduction=(attention.spatial_reduction, attention.layer_norm) if reduces else None,
        num_heads=attention.num_attention_heads,
        scale=attention.attention_head_size**-0.5,
        proj=attention.proj,
        norm2=layer.layer_norm_2,
        fc1=mlp.dense1,
        conv=mlp.dwconv.dwconv,
        activation=mlp.intermediate_act_fn,
        approximate=gelu_variant(mlp.intermediate_act_fn),
        fc2=mlp.dense2,
    )
