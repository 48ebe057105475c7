"""Linear layers of 8-bit numbers, and what makes such numbers of activations.

``native`` has kernels for CPUs, ``triton`` for GPUs, ``primitives`` PyTorch's own ways to the product.
Serving only: rounding has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import backends, checks, dispatch
from ...reference import LIMITS, GeluVariant, QuantizedRows
from ..layer_norm_gelu import check_approximate, check_layer_norm
from ..registration import images_within, register_reference, size_class

#: The most inputs of a linear layer, of which the sums of products fit into 32 bits.
MOST_INPUTS = 2**16

_SAMPLE = 2**25  # products of two numbers


def quantize_rows(
    x: Tensor, *, scale: Tensor | None = None, dtype: torch.dtype = torch.int8
) -> QuantizedRows:
    """Rounds rows to 8-bit numbers: x ≈ values · scales.

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        scale: The scale of all rows, a positive float32 scalar tensor; None for that of each row, its largest
            absolute value / 127.
        dtype: ``torch.int8``, or ``torch.float8_e4m3fn`` with 448 in the place of 127.

    Returns:
        Values ``(..., C)``, rounded half to even, and scales ``(..., 1)`` in float32. Zeros have the scale 0;
        a row with NaN or an infinity has zeros and the scale NaN.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device, or ``x`` wants a gradient, which rounding has not.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    _check_rows(x, scale, dtype)
    return QuantizedRows(*dispatch.call("quantize_rows", x, scale=scale, dtype=dtype))


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
) -> QuantizedRows:
    """Computes quantize_rows(layer_norm(x)) in one pass over x.

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        weight: LayerNorm's ``(C,)``, or None for 1.
        bias: LayerNorm's ``(C,)``, or None for 0.
        eps: Added to the variance.
        shift: As in :func:`cvt_kernels.layer_norm`.
        scale: As in :func:`quantize_rows`, like ``dtype``.
        dtype: See there.

    Returns:
        As :func:`quantize_rows`; LayerNorm is not rounded to the dtype of ``x`` in between.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device, ``eps`` not positive, or a gradient is wanted.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    _check_rows(x, scale, dtype)
    check_layer_norm(x, weight, bias, eps, shift)
    _check_no_gradient(x, weight, bias, shift)
    args = {"eps": eps, "shift": shift, "scale": scale, "dtype": dtype}
    return QuantizedRows(*dispatch.call("layer_norm_quantize", x, weight, bias, **args))


def gelu_quantize(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: GeluVariant = "none",
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
) -> QuantizedRows:
    """Computes quantize_rows(gelu(x + bias)) in one pass over x.

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        bias: ``(C,)``, or None for 0.
        approximate: As in :func:`cvt_kernels.gelu`.
        scale: As in :func:`quantize_rows`, like ``dtype``.
        dtype: See there.

    Returns:
        As :func:`quantize_rows`; nothing is rounded to the dtype of ``x`` in between.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device, unknown ``approximate``, or a gradient is wanted.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    _check_rows(x, scale, dtype)
    check_approximate(approximate)
    _check_vector("bias", bias, x)
    _check_no_gradient(x, bias)
    args = {"approximate": approximate, "scale": scale, "dtype": dtype}
    return QuantizedRows(*dispatch.call("gelu_quantize", x, bias, **args))


def linear_int8(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    input_scale: Tensor | None = None,
    approximate: GeluVariant | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes a linear layer by products of 8-bit numbers: x · (weight · weight_scale[:, None])ᵀ + bias.

    Products of int8 are summed in 32-bit integers, exactly; scales, bias and what follows are in float32.

    Args:
        x: ``(..., inputs)``, which is quantized first, or what :func:`quantize_rows` and the like have made
            of it.
        weight: ``(outputs, inputs)``, int8 between -127 and 127, or float8_e4m3fn.
        weight_scale: ``(outputs,)``, float32.
        bias: ``(outputs,)``, or None for 0.
        input_scale: The scale of all rows, for an ``x`` that is quantized here, as in :func:`quantize_rows`.
        approximate: A GELU that follows, as in :func:`cvt_kernels.gelu`; None for none.
        residual: ``(..., outputs)``, which is added at the end; None for 0.
        dtype: Of the result; None for that of autocast, or else of ``x``, or of ``residual``, or float32.

    Returns:
        ``(..., outputs)``. Rows whose scale is NaN are NaN.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device, unknown ``approximate``, or a gradient is wanted.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    x_scales = None
    if isinstance(x, QuantizedRows):
        x, x_scales = x
    if dtype is None:
        dtype = _dtype_of(x, x_scales, residual)
    settings: dict[str, Any] = {"approximate": approximate, "residual": residual, "dtype": dtype}
    _check_no_gradient(x, bias, residual)
    return dispatch.call(
        "linear_int8", x, weight, weight_scale, bias, x_scales=x_scales, input_scale=input_scale, **settings
    )


def _dtype_of(x: Tensor, x_scales: Tensor | None, residual: Tensor | None) -> torch.dtype:
    if x_scales is None:
        return checks.autocast_dtype(x) or x.dtype
    return torch.float32 if residual is None else residual.dtype


# Checks ---------------------------------------------------------------------------------------------------


def _check_rows(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> None:
    checks.check_float_tensor("x", x, "(..., channels)")
    if x.ndim == 0:
        raise ValueError("x: got a scalar, expected (..., channels)")
    if dtype not in LIMITS:
        raise TypeError(f"dtype: got {dtype!r}, expected torch.int8 or torch.float8_e4m3fn")
    _check_no_gradient(x)


def _check_vector(name: str, vector: Tensor | None, x: Tensor) -> None:
    if vector is not None:
        checks.check_float_tensor(name, vector, "(channels,)")
        checks.check_shape(name, vector, x.shape[-1:], "(channels,)")
        checks.check_like(name, vector, "x", x)


def _check_no_gradient(*tensors: Tensor | None) -> None:
    if checks.wants_gradient(*tensors):
        raise ValueError("x: wants a gradient, expected none, since rounding has no useful one")


# Registration ---------------------------------------------------------------------------------------------


def _rows_signature(x: Tensor, *others: Tensor | None, **settings: Any) -> tuple[Any, ...]:
    given = tuple(tensor is not None for tensor in others)
    static = settings["scale"] is not None
    return (
        False,
        x.shape,
        x.is_contiguous(),
        given,
        static,
        settings["dtype"],
        settings.get("approximate", ""),
    )


def _rows_class(
    gradient: bool,
    shape: Sequence[int],
    contiguous: bool,
    given: Sequence[bool],
    static: bool,
    dtype: torch.dtype,
    approximate: str,
) -> str:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    words = f"{'exact' if approximate == 'none' else approximate}, " if approximate else ""
    words += f"{size_class(rows)} rows of {shape[-1]} channels to {checks.dtype_name(dtype)}"
    return words + (", one scale" if static else "") + ("" if contiguous else ", strided")


def _rows_sample(factor: int, x: Tensor, *others: Tensor | None, **settings: Any) -> Any:
    images = images_within(2**18 * factor, x.shape[0], x.numel()) if x.ndim > 1 else None
    return (x[:images], *others), settings


def _signature(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    x_scales: Tensor | None,
    input_scale: Tensor | None,
    approximate: str | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    given = bias is not None, residual is not None
    return False, x.shape, weight.shape, weight.dtype, input_scale is not None, approximate, given, dtype


def _shape_class(
    gradient: bool,
    shape: Sequence[int],
    weight_shape: Sequence[int],
    weight_dtype: torch.dtype,
    static: bool,
    approximate: str | None,
    given: tuple[bool, bool],
    dtype: torch.dtype,
) -> str:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    words = "" if approximate is None else f"{'exact' if approximate == 'none' else approximate}, "
    words += f"{size_class(rows)} rows, {weight_shape[1]} to {weight_shape[0]} channels"
    words += f" by {checks.dtype_name(weight_dtype)} to {checks.dtype_name(dtype)}"
    words += ", one scale" if static else ""
    return words + ("" if given[0] else ", without bias") + (", added" if given[1] else "")


def _sample(factor: int, x: Tensor, weight: Tensor, *others: Tensor | None, **settings: Any) -> Any:
    images = images_within(_SAMPLE * factor, x.shape[0], x.numel() * weight.shape[0]) if x.ndim > 1 else None
    parts = {name: settings[name][:images] for name in ("x_scales", "residual") if settings[name] is not None}
    return (x[:images], weight, *others), {**settings, **parts}


for _operator in ("quantize_rows", "layer_norm_quantize", "gelu_quantize"):
    register_reference(_operator)
    backends.describe(_operator, backends.Operator(_rows_signature, _rows_class, _rows_sample))
register_reference("linear_int8")
backends.describe("linear_int8", backends.Operator(_signature, _shape_class, _sample))
