"""Quantized layers, in checkpoints and as modules.

Their tensors describe them: ``LAYER.qweight`` has 8-bit values and ``LAYER.weight_scale`` has a scale per
output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cvt_kernels.checks import dtype_name
from cvt_kernels.ops.linear_int8.modules import ConvInt8, LinearInt8, QuantizedLayer
from cvt_kernels.records import LIMITS

from .reading import is_plain

_OF_IMAGES = "stage0.patch_embed.proj"
_WEIGHT, _WEIGHT_SCALE = ".qweight", ".weight_scale"


def quantized_layers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the quantized layers."""
    return [name.removesuffix(_WEIGHT) for name in tensors if name.endswith(_WEIGHT)]


def why_damaged(tensors: Mapping[str, Tensor]) -> str | None:
    """Returns what is wrong with the quantized layers of a checkpoint, or None."""
    for layer in quantized_layers(tensors):
        weight, scale = tensors[layer + _WEIGHT], tensors.get(layer + _WEIGHT_SCALE)
        name, reason = layer + _WEIGHT, _why_no_weight(weight)
        if reason is None and scale is None:
            reason = f"is of {dtype_name(weight.dtype)}, but there is no {layer}{_WEIGHT_SCALE}"
        if reason is None and scale is not None:
            name, reason = layer + _WEIGHT_SCALE, _why_no_scale(scale, weight.shape[:1])
        if reason is not None:
            return f"{name}: {reason}"
    return None


def _why_no_weight(weight: Tensor) -> str | None:
    if weight.dtype not in LIMITS or weight.ndim < 2 or not is_plain(weight):
        got = f"got shape {tuple(weight.shape)} of {dtype_name(weight.dtype)}, {weight.layout}"
        return f"{got}, expected (outputs, inputs) of {' or '.join(map(dtype_name, LIMITS))}"
    limit = LIMITS[weight.dtype]
    within = bool((weight.float().abs() <= limit).all())
    return None if within else f"has a number that is not from -{limit:g} to {limit:g}"


def _why_no_scale(scale: Tensor, shape: torch.Size) -> str | None:
    if scale.dtype != torch.float32 or scale.shape != shape or not is_plain(scale):
        got = f"{tuple(scale.shape)} of {dtype_name(scale.dtype)}"
        return f"got {got}, expected {tuple(shape)} of float32"
    if not ((scale >= 0) & scale.isfinite()).all():
        return "has other scales, expected finite ones of at least 0"
    return None


def install_layers(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replaces the layers that are quantized in a checkpoint by quantized ones, still without weights.

    Layers that the model does not have at all are passed over; one that is neither a linear layer nor the
    embedding of a stage raises ValueError.
    """
    modules = dict(model.named_modules())
    for layer in quantized_layers(tensors):
        if layer not in modules:
            continue
        module, dtype = modules[layer], tensors[layer + _WEIGHT].dtype
        made = _quantized_like(module, dtype=dtype)
        if made is None or not layer.startswith("stage") or layer == _OF_IMAGES:
            raise ValueError(f"{layer}{_WEIGHT}: is of {dtype_name(dtype)}, where no layer has such")
        parent, _, name = layer.rpartition(".")
        setattr(modules[parent], name, made.train(module.training))


def _quantized_like(module: nn.Module, **settings: Any) -> QuantizedLayer | None:
    """Returns a quantized layer of the same sizes, or None if the module cannot be quantized."""
    if type(module) is nn.Linear:
        return LinearInt8(module.in_features, module.out_features, module.bias is not None, **settings)
    if type(module) is nn.Conv2d and module.groups == 1:
        settings |= {"stride": module.stride, "padding": module.padding, "dilation": module.dilation}
        kernel_size: Any = module.kernel_size
        channels = module.in_channels, module.out_channels
        return ConvInt8(*channels, kernel_size, bias=module.bias is not None, **settings)
    return None


def compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights in the compact form of a quantized model's file.

    Floating-point tensors of two or more dimensions are rounded to float16, if that changes it by
    no more than half a unit in the last place of its largest number. In float32 it would be a quarter of the
    file of a CvT-13.
    """
    return {name: _halved(tensor) if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}


def _halved(tensor: Tensor) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.float64) or not tensor.numel():
        return tensor
    half = tensor.half()
    error, largest = (half.to(tensor.dtype) - tensor).abs().max(), tensor.abs().max()
    return half if error <= largest * torch.finfo(torch.float16).eps / 2 else tensor
