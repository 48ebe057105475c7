"""Linear layers by the fastest of PyTorch's own primitives, which on a CPU is not always ``F.linear``.

On a CPU there are three ways to the same product, each a backend of the operator:

- ``reference``: ``F.linear``, that is MKL for float32 and oneDNN for 16 bits.
- ``convolution``: a 1×1 ``F.conv2d`` on the channels-last view, that is oneDNN for float32 too, which is much
  faster than MKL on AMD CPUs with AVX-512.
- ``float32``: 16 bits converted to float32 and back, which helps on a CPU without 16-bit products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import backends, checks, dispatch
from .registration import images_within, register_reference, size_class

_CHUNK = 1024  # rows that are converted at a time, which bounds the memory beside the result
_SAMPLE = 2**25  # products of two numbers


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes a linear layer, x · weightᵀ + bias.

    On a CPU it takes the fastest of PyTorch's primitives on this machine, by verdict; its results may differ
    from those of ``F.linear`` in the last bits. On a GPU and under ``torch.compile`` it is ``F.linear``.

    Args:
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)``.

    Returns:
        ``(..., outputs)``.

    Raises:
        RuntimeError: Shapes or dtypes that ``F.linear`` does not take.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    if _has_choice(x, weight, bias):
        return dispatch.call("linear", x, weight, bias)
    return F.linear(x, weight, bias)


def _has_choice(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or x.is_cuda or x.ndim == 0:
        return False
    # Subclasses, as of quantized weights, know themselves what a product is; so does F.linear what is wrong.
    if type(x) is not Tensor or type(weight) not in _PLAIN or weight.dtype != x.dtype or weight.ndim != 2:
        return False
    if weight.shape[1] != x.shape[-1] or not x.is_floating_point() or x.numel() == 0:
        return False
    return bias is None or (type(bias) in _PLAIN and bias.dtype == x.dtype and bias.shape == weight.shape[:1])


_PLAIN = (Tensor, nn.Parameter)


def _by_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    image = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)
    product = F.conv2d(image, weight[:, :, None, None], bias)
    return product.permute(0, 2, 3, 1).reshape(*x.shape[:-1], weight.shape[0])


def _by_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight, bias = weight.float(), None if bias is None else bias.float()
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    for part, result in zip(rows.split(_CHUNK), out.split(_CHUNK), strict=True):
        result.copy_(F.linear(part.float(), weight, bias))
    return out.view(*x.shape[:-1], -1)


def _why_convolution_unsupported(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    return "has no advantage in float64" if x.dtype == torch.float64 else None


def _why_float32_unsupported(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "serves 16-bit tensors only"
    if checks.wants_gradient(x, weight, bias):
        return "has no gradients"
    return "autocast would convert the float32 numbers again" if checks.autocast_enabled(x) else None


def _signature(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    return checks.wants_gradient(x, weight, bias), x.shape, weight.shape


def _shape_class(gradient: bool, shape: Sequence[int], weight_shape: Sequence[int]) -> str:
    outputs, inputs = weight_shape
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return f"{size_class(rows)} rows, {inputs} to {outputs} channels"


def _sample(factor: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, dict[str, Any]]:
    if x.ndim < 2:
        return (x, weight, bias), {}
    images = images_within(_SAMPLE * factor, x.shape[0], x.numel() * weight.shape[0])
    return (x[:images], weight, bias), {}


backends.register(
    "linear",
    "convolution",
    backends.Implementation(_by_convolution, devices=("cpu",), why_unsupported=_why_convolution_unsupported),
)
backends.register(
    "linear",
    "float32",
    backends.Implementation(
        _by_float32, devices=("cpu",), why_unsupported=_why_float32_unsupported, forward_only=True
    ),
)
register_reference("linear")
backends.describe("linear", backends.Operator(_signature, _shape_class, _sample))
