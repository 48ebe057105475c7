"""PyTorch's own operators for 8-bit linear layers, each a backend of ``linear_int8``.

- ``int_mm``: ``torch._int_mm``, followed by separate operators.
- ``scaled_mm``: ``torch._scaled_mm``, the product of float8.

They are for NVIDIA GPUs. They take rows quantized by ``quantize_rows``, or quantize them with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import backends, checks, modes, reference
from ...backends import Record

_LEAST_ROWS = 17  # of torch._int_mm
_MULTIPLE = {"int_mm": 8, "scaled_mm": 16}  # of inputs and outputs
_LEAST_CAPABILITY = (8, 9)  # of GPUs with products of float8


def why_int_mm_unsupported(call: Record) -> str | None:
    """Returns why :func:`by_int_mm` cannot serve a call, or None."""
    x, weight = call.x, call.weight
    reason = _why_not_rounded(call, torch.int8)
    if reason is not None:
        return reason
    if not modes.is_known(x.numel() >= _LEAST_ROWS * weight.shape[1]):
        return f"serves {_LEAST_ROWS} rows or more"
    return _why_no_multiple(weight, _MULTIPLE["int_mm"])


def _why_not_rounded(call: Record, factors: torch.dtype) -> str | None:
    x, weight = call.x, call.weight
    if weight.dtype != factors:
        return f"multiplies {checks.dtype_name(factors)} only, not {checks.dtype_name(weight.dtype)}"
    if torch.float64 in (x.dtype, call.dtype):
        return "rounds, which is not for float64"
    return None if x.numel() and weight.numel() else "serves no empty tensors"


def _why_no_multiple(weight: Tensor, factor: int) -> str | None:
    if any(size % factor for size in weight.shape):
        return f"serves inputs and outputs in multiples of {factor}"
    return None


def by_int_mm(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear_int8`` by ``torch._int_mm``."""
    values, scales = _rows(call)
    product = torch._int_mm(values, call.weight.t()).float().mul_(scales).mul_(call.weight_scale)
    return _finished(product, call, call.bias)


def _rows(call: Record) -> tuple[Tensor, Tensor]:
    """Returns rows (rows, inputs) of 8-bit numbers, and their scales (rows, 1)."""
    x, x_scales = call.x, call.x_scales
    if x_scales is None:
        x, x_scales = _by_another("quantize_rows", x, dtype=call.weight.dtype)
    return x.reshape(-1, x.shape[-1]), x_scales.reshape(-1, 1)


def _by_another(operator: str, x: Tensor, **settings: Any) -> Any:
    """Calls another operator, or its reference if none of its backends is among the requested ones."""
    known = backends.implementations[operator]
    if backends.is_auto() or any(name in known for name in backends.requested_backends()):
        public: Any = backends.operators[operator]
        return public.public(x, **settings)
    return getattr(reference, operator)(x, **settings)


def _finished(product: Tensor, call: Record, bias: Tensor | None) -> Tensor:
    """Applies bias, GELU, residual and dtype to a product, in place where possible."""
    y = product if bias is None else product.add_(bias)
    y = y if call.approximate is None else _by_another("gelu", y, approximate=call.approximate)
    y = y.view(*call.x.shape[:-1], product.shape[-1])
    return (y if call.residual is None else y.add_(call.residual)).to(call.dtype)


def why_scaled_mm_unavailable(device_type: str) -> str | None:
    """Returns why no GPU here has products of float8, or None."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "there is no NVIDIA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < _LEAST_CAPABILITY:
        return (
            f"the GPU has compute capability {capability[0]}.{capability[1]}, and products of float8 need 8.9"
        )
    return None


def why_scaled_mm_unsupported(call: Record) -> str | None:
    """Returns why :func:`by_scaled_mm` cannot serve a call, or None."""
    reason = _why_not_rounded(call, torch.float8_e4m3fn)
    if reason is None and call.dtype != torch.bfloat16:
        reason = "has results of bfloat16 only"
    return reason or _why_no_multiple(call.weight, _MULTIPLE["scaled_mm"])


def by_scaled_mm(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear_int8`` by ``torch._scaled_mm`` with a scale per row and per output."""
    values, scales = _rows(call)
    added = None if call.bias is None else call.bias.to(torch.bfloat16)
    product = torch._scaled_mm(
        values, call.weight.t(), scales, call.weight_scale[None], bias=added, out_dtype=torch.bfloat16
    )
    return _finished(product, call, None)
