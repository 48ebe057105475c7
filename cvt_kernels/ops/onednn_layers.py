"""Linear layers on a CPU by PyTorch's oneDNN operators with prepacked weights: inference only.

PyTorch's public operators for linear layers repack the weights in every call, or do not pack them. The
internal ones that ``torch.compile`` calls for frozen weights take packed weights and fuse GELU or the
residual sum into the product. oneDNN has only ``swish(x) = x · sigmoid(x)``; QuickGELU is ``x · sigmoid(1.702
x) = swish(1.702 x) / 1.702``, with the factors folded into the packed weights.

MKL has packed products for float32 too (``torch.ops.mkl``). They are not used: a packed weight serves one
number of rows only, and nothing is fused into the product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import checks, modes
from ..records import AnyLinear
from .weight_cache import packed

_QUICK = 1.702  # of QuickGELU


class _Library(NamedTuple):
    """PyTorch's oneDNN operators, and two checks for 16-bit products on this CPU."""

    pack: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linear_add: Callable[..., Tensor]
    has_bfloat16: Callable[[], bool]
    has_float16: Callable[[], bool]


class Activation(NamedTuple):
    """The activation argument of the operators: a GELU, or none.

    Attributes:
        name: The function's name.
        algorithm: Its variant.
        factor: Factor on the weight and bias before it; the weight behind it is divided by it.
    """

    name: str
    algorithm: str = ""
    factor: float = 1.0


ACTIVATIONS = {
    "none": Activation("gelu", "none"),
    "tanh": Activation("gelu", "tanh"),
    "quick": Activation("swish", factor=_QUICK),
}


_IDENTITY = Activation("none")


@functools.cache
def _library() -> _Library | None:
    """Returns the operators, or None where this PyTorch has none."""
    found = torch.ops.mkldnn
    try:
        return _Library(
            pack=found._reorder_linear_weight.default,
            linear=found._linear_pointwise.default,
            linear_add=found._linear_pointwise.binary,
            has_bfloat16=found._is_mkldnn_bf16_supported.default,
            has_float16=found._is_mkldnn_fp16_supported.default,
        )
    except AttributeError:
        return None


def why_unavailable(device_type: str) -> str | None:
    """Returns why this PyTorch has no packed linear layers, or None."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    return "this PyTorch has no packed linear layers of oneDNN" if _library() is None else None


def why_unsupported(x: Tensor, weights: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> str | None:
    """Returns why these layers cannot serve tokens x, or None.

    Args:
        x: The tokens.
        weights: The weights that are packed.
        tensors: All tensors that the call reads.
    """
    library = _library()
    assert library is not None
    if torch.compiler.is_compiling():
        return "is not for torch.compile, which packs weights by itself"
    if modes.wants_gradient(*tensors, x):
        return "has no gradients"
    if modes.autocast_enabled(x):
        return "does not follow autocast"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"has no products of {checks.dtype_name(x.dtype)}"
    has_products = {torch.bfloat16: library.has_bfloat16, torch.float16: library.has_float16}.get(x.dtype)
    if has_products is not None and not has_products():
        return f"this CPU has no products of {checks.dtype_name(x.dtype)} for oneDNN"
    if x.numel() == 0:
        return "serves no empty batch"
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in (x, *weights)):
        return "packs plain tensors only"
    return None


def packed_linear(
    x: Tensor,
    *layers: AnyLinear,
    activation: Activation = _IDENTITY,
    lay_out: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Computes linear layers of the same tokens, outputs side by side, and an activation.

    Args:
        x: The tokens.
        layers: The layers, not quantized. The packed copy is kept with the first layer's weight.
        activation: The activation.
        lay_out: Turns a weight into a matrix ``(outputs, inputs)``; None where it is one.
    """
    library = _library()
    assert library is not None
    weight, bias = _weight(layers, activation.factor, lay_out), _bias(layers, activation.factor)
    return library.linear(x, weight, bias, activation.name, [], activation.algorithm)


def packed_linear_add(x: Tensor, layer: AnyLinear, residual: Tensor, factor: float = 1.0) -> Tensor:
    """Computes the sum of a residual and a linear layer, whose weight is multiplied by ``factor``."""
    library = _library()
    assert library is not None
    return library.linear_add(x, residual, _weight((layer,), factor), _bias((layer,), 1.0), "add")


def _weight(
    layers: Sequence[AnyLinear], factor: float, lay_out: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    first, *others = (layer.weight for layer in layers)
    key = "onednn weight", factor, len(layers), lay_out
    return packed(first, key, lambda: _pack((first, *others), factor, lay_out), others)


def _bias(layers: Sequence[AnyLinear], factor: float) -> Tensor | None:
    """Returns the biases of some layers side by side, multiplied by ``factor``."""
    biases = [layer.bias for layer in layers]
    if all(bias is None for bias in biases) or (len(biases) == 1 and factor == 1.0):
        return None if biases[0] is None else biases[0].contiguous()  # oneDNN's operators ignore its stride
    key = "onednn bias", factor, len(layers)
    return packed(layers[0].weight, key, lambda: _join_biases(layers, factor), biases)


@torch.inference_mode(False)
@torch.no_grad()
def _pack(weights: Sequence[Tensor], factor: float, lay_out: Callable[[Tensor], Tensor] | None) -> Tensor:
    library = _library()
    assert library is not None
    matrices = [weight.detach() if lay_out is None else lay_out(weight.detach()) for weight in weights]
    matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
    return library.pack(matrix if factor == 1.0 else _scaled(matrix, factor))


@torch.inference_mode(False)
@torch.no_grad()
def _join_biases(layers: Sequence[AnyLinear], factor: float) -> Tensor:
    zeros = (layer.weight.new_zeros(layer.weight.shape[0]) for layer in layers)
    biases = [zero if layer.bias is None else layer.bias for zero, layer in zip(zeros, layers, strict=True)]
    return _scaled(torch.cat(biases), factor)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return (tensor.float() * factor).to(tensor.dtype)
