"""Backend functions of the 8-bit Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .... import launching
from ....backends import Record
from ....records import QuantizedRows
from ...triton_launch import contiguous
from .common import MAX_CHANNELS, MAX_INPUTS
from .forward import linear_int8_forward
from .rows import gelu_quantize_forward, layer_norm_quantize_forward, quantize_rows_forward

# The backend ----------------------------------------------------------------------------------------------


def why_rows_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot round the rows of a call, or None."""
    return _why_not_rounded(call.x, call.dtype)


def _why_not_rounded(x: Tensor, dtype: torch.dtype) -> str | None:
    if x.numel() == 0:
        return "the batch is empty"
    if x.dtype == torch.float64:
        return "float64 is not rounded, but for checks of accuracy, by the reference"
    if x.shape[-1] > MAX_CHANNELS:
        return f"rows of {x.shape[-1]} channels, more than {MAX_CHANNELS}, do not fit on the chip"
    if x.numel() // x.shape[-1] >= 2**31 - 2**10:
        return "there are 2³¹ rows or more"
    return _why_dtype_unsupported(x, dtype)


def _why_dtype_unsupported(x: Tensor, dtype: torch.dtype) -> str | None:
    if dtype == torch.float8_e4m3fn and (capability := launching.chip(x.device).capability) < 89:
        return f"float8_e4m3fn needs compute capability 8.9, got {capability / 10}"
    return None


def why_linear_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call of ``linear_int8``, or None."""
    x, weight, _, _, x_scales, _, _, _, dtype = call
    if x.numel() == 0 or weight.numel() == 0:
        return "the batch is empty" if weight.numel() else "the weight is empty"
    if torch.float64 in (x.dtype, dtype):
        return "float64 is not rounded, but for checks of accuracy, by the reference"
    if weight.shape[1] > MAX_INPUTS:
        return f"sums of {weight.shape[1]} products, more than {MAX_INPUTS}, may not fit into 32 bits"
    if weight.numel() >= 2**31 or x.numel() // x.shape[-1] >= 2**31 - 2**10:
        return "there are 2³¹ rows, or as many elements of the weight, or more"
    if x_scales is None:
        return _why_not_rounded(x, weight.dtype)
    return _why_dtype_unsupported(x, weight.dtype)


def quantize_rows(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.quantize_rows`` for checked arguments."""
    x, scale, dtype = call
    return _served(quantize_rows_forward, x, scale, dtype)


def layer_norm_quantize(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.layer_norm_quantize`` for checked arguments."""
    x, weight, bias, eps, shift, scale, dtype = call
    weight, bias, shift = map(contiguous, (weight, bias, shift))
    return _served(layer_norm_quantize_forward, x, weight, bias, eps, shift, scale, dtype)


def gelu_quantize(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.gelu_quantize`` for checked arguments."""
    x, bias, approximate, scale, dtype = call
    return _served(gelu_quantize_forward, x, contiguous(bias), approximate, scale, dtype)


def _served(forward: Any, x: Tensor, *others: Any) -> QuantizedRows:
    """Calls a launcher on the rows of x; reshapes the values like x."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    values, scales = forward(rows, *others)
    return QuantizedRows(values.view(x.shape), scales.view(*x.shape[:-1], 1))


def linear_int8(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear_int8`` for checked arguments."""
    x, weight, weight_scale, bias, x_scales, input_scale, approximate, residual, dtype = call
    if x_scales is None:
        x, x_scales = _served(quantize_rows_forward, x, input_scale, weight.dtype)
    shape = (*x.shape[:-1], weight.shape[0])
    out = linear_int8_forward(
        x.reshape(-1, x.shape[-1]).contiguous(),
        x_scales.contiguous(),
        weight.contiguous(),
        weight_scale.contiguous(),
        contiguous(bias),
        approximate,
        contiguous(residual),
        dtype,
    )
    return out.view(shape)
