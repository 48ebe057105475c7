"""Quantized layers as ONNX's QuantizeLinear and DequantizeLinear nodes (QDQ), for ``cvt export``.

The int8 values lie between the two nodes, followed by a float32 product; runtimes may fuse this pattern into
integer products.
"""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cvt_kernels.checks import dtype_name
from cvt_kernels.ops.linear_int8.modules import QuantizedLayer
from cvt_kernels.records import LEAST, LIMITS

_LIMIT = LIMITS[torch.int8]


def with_nodes(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose int8 layers ``torch.onnx.export`` turns into nodes."""
    model = copy.deepcopy(model)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, QuantizedLayer):
            if layer.weight.dtype != torch.int8:
                dtype = dtype_name(layer.weight.dtype)
                raise ValueError(f"its layer {path} is of {dtype}, expected int8 for ONNX")
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _Nodes(layer))
    return model


class _Nodes(nn.Module):
    """A int8 layer whose product consists of nodes."""

    def __init__(self, layer: QuantizedLayer):
        super().__init__()
        self.layer = layer
        vars(layer)["product"] = functools.partial(_product, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _product(layer: QuantizedLayer, x: Tensor) -> Tensor:
    """Computes the product of a layer with rows (..., inputs)."""
    rows = x.flatten(0, -2)
    largest = rows.abs().amax(1)  # by -1 onnxruntime would not reduce an empty tensor
    scales = torch.where(largest < LEAST, 1.0, largest / _LIMIT)
    numbers = _node("QuantizeLinear", rows, scales, torch.int8)
    rows = _node("DequantizeLinear", numbers, scales, torch.float32)
    weight = _node("DequantizeLinear", layer.weight, layer.weight_scale, torch.float32)
    return F.linear(rows, weight, layer.bias).unflatten(0, x.shape[:-1])


def _node(name: str, x: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Stands for a node that returns ``dtype``, with a scale for each row."""
    inputs = x, scales, torch.zeros_like(scales, dtype=torch.int8)
    return torch.onnx.ops.symbolic(name, inputs, {"axis": 0}, dtype=dtype, shape=x.shape)
