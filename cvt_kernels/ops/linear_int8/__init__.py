"""Linear layers of 8-bit numbers, and what makes such numbers of activations.

``native`` has kernels for CPUs, ``triton`` for GPUs, ``primitives`` PyTorch's own ways to the product.
Serving only: rounding has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import backends, checks, reference
from ...declaration import operator
from ...reference import LIMITS, GeluVariant, QuantizedRows
from ..layer_norm_gelu import check_approximate, check_layer_norm
from ..registration import images_within, register_native, register_triton, size_class
from . import primitives

#: The most inputs of a linear layer, of which the sums of products fit into 32 bits.
MOST_INPUTS = 2**16

_SAMPLE = 2**25  # products of two numbers


def _check_quantize_rows(call: Any) -> None:
    _check_rows(call.x, call.scale, call.dtype)
    _check_no_gradient(call.x)


def _check_scale(call: Any) -> None:
    check_scale("scale", call.scale, call.x)


@operator(check=_check_quantize_rows, values=("scale", _check_scale))
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
    return reference.quantize_rows(x, scale=scale, dtype=dtype)


def _check_layer_norm_quantize(call: Any) -> None:
    _check_rows(call.x, call.scale, call.dtype)
    check_layer_norm(call.x, call.weight, call.bias, call.eps, call.shift)
    _check_no_gradient(call.x, call.weight, call.bias, call.shift)


@operator(check=_check_layer_norm_quantize, values=("scale", _check_scale))
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
    settings: dict[str, Any] = {"eps": eps, "shift": shift, "scale": scale, "dtype": dtype}
    return reference.layer_norm_quantize(x, weight, bias, **settings)


def _check_gelu_quantize(call: Any) -> None:
    _check_rows(call.x, call.scale, call.dtype)
    check_approximate(call.approximate)
    if call.bias is not None:
        checks.check_tensor_like("bias", call.bias, call.x.shape[-1:], "(channels,)", call.x)
    _check_no_gradient(call.x, call.bias)


@operator(check=_check_gelu_quantize, values=("scale", _check_scale))
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
    return reference.gelu_quantize(x, bias, approximate=approximate, scale=scale, dtype=dtype)


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
        residual: ``(..., outputs)``, which is added at the end; None for 0. It has the dtype of the result,
            but under autocast.
        dtype: Of the result; None for that of autocast, or else of ``x``, or of ``residual``, or float32.

    Returns:
        ``(..., outputs)``. Rows whose scale is NaN are NaN.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device, unknown ``approximate``, or a gradient is wanted.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    values, x_scales = x if isinstance(x, QuantizedRows) else (x, None)
    if isinstance(x, QuantizedRows):
        checks.check_tensor("values of x", values, "(..., inputs)")
        checks.check_tensor("scales of x", x_scales, "(..., 1)")
    checks.check_float_dtype("dtype", torch.float32 if dtype is None else dtype)
    dtype = _dtype_of(values, x_scales, residual) if dtype is None else dtype
    return _linear_int8(
        values, weight, weight_scale, bias, x_scales=x_scales, input_scale=input_scale,
        approximate=approximate, residual=residual, dtype=dtype,
    )  # fmt: skip


def _check_linear_int8(call: Any) -> None:
    x = call.x
    _check_input(x, call.x_scales, call.weight, call.input_scale)
    check_weight(call.weight, call.weight_scale, x)
    if call.bias is not None:
        also = torch.float32, call.dtype
        checks.check_tensor_like("bias", call.bias, call.weight.shape[:1], "(outputs,)", x, also)
    if call.approximate is not None:
        check_approximate(call.approximate)
    if call.residual is not None:
        _check_residual(call.residual, x, call.weight, call.dtype)
    _check_no_gradient(x, call.x_scales, call.weight_scale, call.bias, call.residual)


def _check_input_scale(call: Any) -> None:
    check_scale("input_scale", call.input_scale, call.x)


@operator(name="linear_int8", check=_check_linear_int8, values=("input_scale", _check_input_scale))
def _linear_int8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    x_scales: Tensor | None,
    input_scale: Tensor | None,
    approximate: GeluVariant | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Computes :func:`linear_int8` of values and their scales, with the dtype of the result."""
    settings: dict[str, Any] = {"x_scales": x_scales, "input_scale": input_scale, "residual": residual}
    settings |= {"approximate": approximate, "dtype": dtype}
    return reference.linear_int8(x, weight, weight_scale, bias, **settings)


def _dtype_of(x: Any, x_scales: Tensor | None, residual: Any) -> torch.dtype:
    """Returns the dtype of a result for which none was named."""
    if x_scales is None:
        checks.check_float_tensor("x", x, "(..., inputs), or what quantize_rows returns")
        return checks.autocast_dtype(x) or x.dtype
    if residual is not None:
        checks.check_float_tensor("residual", residual, "(..., outputs)")
        return residual.dtype
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# Checks ---------------------------------------------------------------------------------------------------


def _check_rows(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> None:
    checks.check_float_tensor("x", x, "(..., channels)")
    if x.ndim == 0 or not x.shape[-1]:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (..., channels)")
    check_format(dtype)
    check_scale("scale", scale, x)


def check_format(dtype: torch.dtype) -> None:
    """Raises TypeError unless ``dtype`` is one of 8-bit numbers."""
    if not isinstance(dtype, torch.dtype) or dtype not in LIMITS:
        raise TypeError(f"dtype: got {checks.shown(dtype)}, expected torch.int8 or torch.float8_e4m3fn")


def check_scale(name: str, scale: Tensor | None, x: Tensor) -> None:
    """Raises TypeError or ValueError unless the scale of all rows of ``x`` is a positive scalar, or None.

    That it is positive is not asked of a GPU, which the host would have to wait for.
    """
    if scale is None:
        return
    _check_scales(name, scale, x, (), "of one scale")
    if type(scale) is Tensor and scale.device.type == "cpu" and not torch.compiler.is_compiling():
        value = scale.item()
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}: got {value}, expected a positive number")


def _check_scales(name: str, scales: Any, x: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    checks.check_dtype(name, scales, meaning, torch.float32)
    checks.check_shape(name, scales, shape, meaning)
    if scales.device != x.device:
        raise ValueError(f"{name}: is on {scales.device}, expected {x.device} as x")


def _check_input(x: Any, x_scales: Any, weight: Any, input_scale: Tensor | None) -> None:
    """Checks the input of a linear layer, in floating point or quantized."""
    if x_scales is None:
        checks.check_float_tensor("x", x, "(..., inputs), or what quantize_rows returns")
        check_scale("input_scale", input_scale, x)
    else:
        if input_scale is not None:
            raise ValueError("input_scale: got one for an x that is quantized already, expected None")
        _check_quantized("x", x, x_scales, weight)
    if x.ndim == 0:
        raise ValueError("x: got a scalar, expected (..., inputs)")


def _check_quantized(name: str, x: Any, scales: Any, weight: Any) -> None:
    """Checks rows against the weight that they are multiplied with; in float64 nothing is rounded."""
    expected = getattr(weight, "dtype", None)
    if not isinstance(x, Tensor) or x.dtype not in (expected, torch.float64):
        got = f"dtype {checks.dtype_name(x.dtype)}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: got values of {got}, expected {expected} as weight")
    if x.dtype == torch.float64:
        checks.check_float_tensor(f"scales of {name}", scales, "(..., 1)")
        checks.check_shape(f"scales of {name}", scales, (*x.shape[:-1], 1), "(..., 1)")
    else:
        _check_scales(f"scales of {name}", scales, x, (*x.shape[:-1], 1), "(..., 1)")


def check_weight(weight: Tensor, weight_scale: Tensor, x: Tensor, name: str = "weight") -> None:
    """Raises TypeError or ValueError unless a weight of 8-bit numbers and its scales fit an input."""
    checks.check_dtype(name, weight, "(outputs, inputs)", *LIMITS)
    checks.check_rank(name, weight, 2, "(outputs, inputs)")
    checks.check_shape(name, weight, (weight.shape[0], x.shape[-1]), "(outputs, inputs)")
    if weight.shape[1] > MOST_INPUTS:
        raise ValueError(f"{name}: got {weight.shape[1]} inputs, expected at most {MOST_INPUTS}")
    if weight.device != x.device:
        raise ValueError(f"{name}: is on {weight.device}, expected {x.device} as x")
    _check_scales(f"{name}_scale", weight_scale, x, tuple(weight.shape[:1]), "(outputs,)")


def _check_residual(residual: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    checks.check_float_tensor("residual", residual, "(..., outputs)")
    checks.check_shape("residual", residual, (*x.shape[:-1], weight.shape[0]), "(..., outputs)")
    if residual.device != x.device:
        raise ValueError(f"residual: is on {residual.device}, expected {x.device} as x")
    if residual.dtype != dtype and not checks.autocast_enabled(x):
        got, expected = checks.dtype_name(residual.dtype), checks.dtype_name(dtype)
        raise TypeError(f"residual: has dtype {got}, expected {expected} as the result")


def _check_no_gradient(*tensors: Tensor | None) -> None:
    if checks.wants_gradient(*tensors):
        raise ValueError("x: wants a gradient, expected none, since rounding has no useful one")


# Registration ---------------------------------------------------------------------------------------------


def _rows_signature(x: Tensor, *others: Tensor | None, **settings: Any) -> tuple[Any, ...]:
    given = tuple(tensor is not None for tensor in others)
    static = settings["scale"] is not None
    return (
        checks.wants_gradient(x, *others, settings.get("shift")),
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
    x_scales: Tensor | None = None,
    input_scale: Tensor | None = None,
    approximate: str | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:
    gradient = checks.wants_gradient(x, bias, residual)
    given = bias is not None, residual is not None
    return gradient, x.shape, weight.shape, weight.dtype, input_scale is not None, approximate, given, dtype


def _shape_class(
    gradient: bool,
    shape: Sequence[int],
    weight_shape: Sequence[int],
    weight_dtype: torch.dtype,
    static: bool,
    approximate: str | None,
    given: tuple[bool, bool],
    dtype: torch.dtype | None,
) -> str:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    words = "" if approximate is None else f"{'exact' if approximate == 'none' else approximate}, "
    words += f"{size_class(rows)} rows, {weight_shape[1]} to {weight_shape[0]} channels"
    words += f" by {checks.dtype_name(weight_dtype)}" + (f" to {checks.dtype_name(dtype)}" if dtype else "")
    words += ", one scale" if static else ""
    return words + ("" if given[0] else ", without bias") + (", added" if given[1] else "")


def _sample(factor: int, x: Tensor, weight: Tensor, *others: Tensor | None, **settings: Any) -> Any:
    images = images_within(_SAMPLE * factor, x.shape[0], x.numel() * weight.shape[0]) if x.ndim > 1 else None
    parts = {
        name: settings[name][:images] for name in ("x_scales", "residual") if settings.get(name) is not None
    }
    return (x[:images], weight, *others), {**settings, **parts}


def _exact(
    x: Tensor,
    weight: Tensor,
    *others: Any,
    x_scales: Tensor | None = None,
    input_scale: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """Computes the call in float64, but rounds the input in float32, as every implementation has to.

    Measured against an input that is not rounded, one that rounds otherwise would not look wrong.
    """
    if x_scales is None:
        scale = None if input_scale is None else input_scale.float()
        x, x_scales = reference.quantize_rows(x.float(), scale=scale, dtype=weight.dtype)
    return reference.linear_int8(x, weight, *others, x_scales=x_scales.double(), **settings)


def _unrounded(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    x_scales: Tensor | None = None,
    input_scale: Tensor | None = None,
    approximate: GeluVariant | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes the call with the weight in floating point, and without rounding the input."""
    rows = x if x_scales is None else x.to(x_scales.dtype) * x_scales
    if input_scale is not None and x_scales is None:  # larger numbers are limited all the same
        limit = LIMITS[weight.dtype] * input_scale.to(x.dtype)
        rows = torch.minimum(torch.maximum(rows, -limit), limit)
    wide = torch.promote_types(rows.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        y = F.linear(rows.to(wide), weight.to(wide) * weight_scale.to(wide)[:, None])
        y = y if bias is None else y + bias
        y = y if approximate is None else reference.gelu(y, approximate=approximate)
        y = y if residual is None else y + residual
    return y if wide == torch.float64 else y.to(dtype)


for _operator in ("quantize_rows", "layer_norm_quantize", "gelu_quantize"):
    register_triton(_operator, __name__, "why_rows_unsupported")
    register_native(_operator, __name__, why_unsupported="why_rows_unsupported")
    backends.describe(_operator, backends.Operator(_rows_signature, _rows_class, _rows_sample))
register_triton("linear_int8", __name__, "why_linear_unsupported")
register_native("linear_int8", __name__)
for _backend, _function, _devices, _why_unavailable, _why_unsupported in (
    (
        "int_mm",
        primitives.by_int_mm,
        ("cpu", "cuda"),
        primitives.why_int_mm_unavailable,
        primitives.why_int_mm_unsupported,
    ),
    (
        "onednn",
        primitives.by_onednn,
        ("cpu",),
        primitives.why_onednn_unavailable,
        primitives.why_onednn_unsupported,
    ),
    (
        "scaled_mm",
        primitives.by_scaled_mm,
        ("cuda",),
        primitives.why_scaled_mm_unavailable,
        primitives.why_scaled_mm_unsupported,
    ),
    ("dequantized", primitives.by_dequantized, None, None, primitives.why_dequantized_unsupported),
):
    _implementation = backends.Implementation(_function, _devices, _why_unavailable, _why_unsupported)
    backends.register("linear_int8", _backend, _implementation)
backends.describe(
    "linear_int8", backends.Operator(_signature, _shape_class, _sample, exact=_exact, unrounded=_unrounded)
)
