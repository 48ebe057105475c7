"""Backend functions of the Triton kernels that round to 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....backends import Record
from ....launch import launching
from ....records import QuantizedRows
from ...triton_launch import contiguous
from .common import MAX_CHANNELS
from .rows import gelu_quantize_forward, layer_norm_quantize_forward, quantize_rows_forward

# The backend ----------------------------------------------------------------------------------------------


def why_rows_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot round the rows of a call, or None."""
    x, dtype = call.x, call.dtype
    if x.numel() == 0:
        return "the batch is empty"
    if x.dtype == torch.float64:
        return "float64 is not rounded, but for checks of accuracy, by the reference"
    if x.shape[-1] > MAX_CHANNELS:
        return f"rows of {x.shape[-1]} channels, more than {MAX_CHANNELS}, do not fit on the chip"
    if x.numel() // x.shape[-1] >= 2**31 - 2**10:
        return "there are 2³¹ rows or more"
    if dtype == torch.float8_e4m3fn and (capability := launching.chip(x.device).capability) < 89:
        return f"float8_e4m3fn needs compute capability 8.9, got {capability / 10}"
    return None


def quantize_rows(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.quantize_rows`` for checked arguments."""
    return _served(quantize_rows_forward, *call)


def layer_norm_quantize(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.layer_norm_quantize`` for checked arguments."""
    x, weight, bias, eps, shift, dtype = call
    weight, bias, shift = map(contiguous, (weight, bias, shift))
    return _served(layer_norm_quantize_forward, x, weight, bias, eps, shift, dtype)


def gelu_quantize(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.gelu_quantize`` for checked arguments."""
    x, bias, approximate, dtype = call
    return _served(gelu_quantize_forward, x, contiguous(bias), approximate, dtype)


def _served(forward: Any, x: Tensor, *others: Any) -> QuantizedRows:
    """Calls a launcher on the rows of x; reshapes the values like x."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    values, scales = forward(rows, *others)
    return QuantizedRows(values.view(x.shape), scales.view(*x.shape[:-1], 1))
