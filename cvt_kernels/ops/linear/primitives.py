"""Alternatives to ``F.linear`` on a CPU, by other PyTorch operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import modes
from ...backends import Record

_CHUNK = 1024  # rows converted at a time, which bounds the memory besides the result


def by_convolution(call: Record) -> Tensor:
    """Computes a linear layer as a 1×1 convolution on the channels-last view."""
    x, weight, bias = call
    image = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)
    product = F.conv2d(image, weight[:, :, None, None], bias)
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
