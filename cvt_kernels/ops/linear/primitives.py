"""Alternatives to ``F.linear`` on a CPU, by other PyTorch operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import modes
from ...backends import Record

_CHUNK = 1024  # rows converted at a time, which bounds the memory besides the result


def by_convolution(call: Record) -> Tensor:
    """Computes a linear layer as a 1×1 convolution on the channels-last view.

    In float32 a bias with a gradient is added apart: oneDNN's gradient of it, one sum over all rows, has 10
    to 40 times the error of PyTorch's.
    """
    x, weight, bias = call
    image = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)
    is_apart = modes.wants_gradient(bias) and (modes.autocast_dtype(x) or x.dtype) == torch.float32
    product = F.conv2d(image, weight[:, :, None, None], None if is_apart else bias)
    if is_apart:
        product.add_(bias[:, None, None])
    return product.permute(0, 2, 3, 1).reshape(*x.shape[:-1], weight.shape[0])


def by_float32(call: Record) -> Tensor:
    """Computes a linear layer of 16-bit tensors in float32."""
    x, weight, bias = call
    weight, bias = weight.float(), None if bias is None else bias.float()
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    for part, result in zip(rows.split(_CHUNK), out.split(_CHUNK), strict=True):
        result.copy_(F.linear(part.float(), weight, bias))
    return out.view(*x.shape[:-1], -1)


def why_convolution_unsupported(call: Record) -> str | None:
    """Returns why :func:`by_convolution` cannot serve a call, or None."""
    return "has no advantage in float64" if call.x.dtype == torch.float64 else None


def why_float32_unsupported(call: Record) -> str | None:
    """Returns why :func:`by_float32` cannot serve a call, or None."""
    if call.x.dtype not in (torch.bfloat16, torch.float16):
        return "serves 16-bit tensors only"
    if modes.wants_gradient(*call):
        return "has no gradients"
    return "autocast would convert the float32 numbers again" if modes.autocast_enabled(call.x) else None
