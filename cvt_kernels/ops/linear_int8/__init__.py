"""Linear layers with 8-bit weights and activations, and the quantization of activations.

``cpu`` has CPU kernels, ``triton`` GPU kernels that round, ``primitives`` PyTorch's own products. Inference
only: rounding has no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import checks, modes, reference
from ...backends import Implementation, Record
from ...declaration import extension_kernels, operator, triton_kernels
from ...records import LEAST, LIMITS, GeluVariant, QuantizedRows
from ..cost_classes import gelu_words, rows_of, sampled, size_class
from ..layer_norm_gelu import check_approximate, check_layer_norm, check_rows
from . import primitives

#: The most inputs of a linear layer whose sums of products fit into 32 bits.
MOST_INPUTS = 2**16


def _cost_class_of_rows(call: Record) -> str:
    x, given = call.x, call._asdict()
    words = f"{gelu_words(call.approximate)}, " if "approximate" in given else ""
    words += f"{size_class(rows_of(x.shape))} rows of {x.shape[-1]} channels"
    words += f" to {checks.dtype_name(call.dtype)}"
    return words + ("" if x.is_contiguous() else ", strided")


def _check_rounding(call: Any) -> None:
    x, given = call.x, call._asdict()
    check_rows(x)
    check_format(call.dtype)
    if "eps" in given:
        check_layer_norm(x, call.weight, call.bias, call.eps, call.shift)
    if "approximate" in given:
        check_approximate(call.approximate)
        checks.check_vector("bias", call.bias, x.shape[-1], x)
    _check_no_gradient(*checks.tensors_of(call))


_OF_ROWS: dict[str, Any] = {
    "backends": {
        "triton": triton_kernels("triton", "why_rows_unsupported"),
        "cpu": extension_kernels("cpu", "why_rows_unsupported"),
    },
    "cost_class": _cost_class_of_rows,
    "sample": sampled(2**18, "x"),
    "check": _check_rounding,
}


@operator(**_OF_ROWS)
def quantize_rows(x: Tensor, *, dtype: torch.dtype = torch.int8) -> QuantizedRows:
    """Rounds rows to 8-bit numbers: x ≈ values · scales, where a scale is the row's largest magnitude / 127.

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        dtype: ``torch.int8``, or ``torch.float8_e4m3fn`` with 448 in the place of 127.

    Returns:
        Values ``(..., C)``, rounded half to even, and scales ``(..., 1)`` in float32. Zeros have the scale 0;
        a row with NaN or an infinity has zeros and the scale NaN.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device, or ``x`` requires a gradient, which rounding does not have.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    limit, exact = LIMITS[dtype], x.dtype == torch.float64
    x = x if exact else x.float()
    largest = x.abs().amax(-1, keepdim=True)
    is_zero, finite = largest < LEAST, largest.isfinite()
    # What PyTorch makes of a number divided by a tensor is not rounded correctly.
    limits = torch.full_like(largest, limit)
    scales = (largest / limits).masked_fill(is_zero, 0.0).masked_fill(~finite, torch.nan)
    factor = (limits / largest).masked_fill(is_zero, 0.0)
    values = (x * factor).masked_fill(~finite, 0.0)
    if dtype == torch.int8 and not exact:
        values = values.round()
    values = values.clamp(-limit, limit)
    return QuantizedRows(values if exact else values.to(dtype), scales)


@operator(**_OF_ROWS)
def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    shift: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
) -> QuantizedRows:
    """Computes quantize_rows(layer_norm(x)) in one pass over x.

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        weight: LayerNorm's ``(C,)``, or None for 1.
        bias: LayerNorm's ``(C,)``, or None for 0.
        eps: Added to the variance.
        shift: As in :func:`cvt_kernels.layer_norm`.
        dtype: As in :func:`quantize_rows`.

    Returns:
        As :func:`quantize_rows`; LayerNorm is not rounded to the dtype of ``x`` in between.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device, ``eps`` not positive, or a gradient is wanted.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
    shifted = x if shift is None else (x + shift).to(x.dtype)
    return reference.quantize_rows(reference.layer_norm(shifted.to(wide), weight, bias, eps=eps), dtype=dtype)


@operator(**_OF_ROWS)
def gelu_quantize(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: GeluVariant = "none",
    dtype: torch.dtype = torch.int8,
) -> QuantizedRows:
    """Computes quantize_rows(gelu(x + bias)) in one pass over x.

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        bias: ``(C,)``, or None for 0.
        approximate: As in :func:`cvt_kernels.gelu`.
        dtype: As in :func:`quantize_rows`.

    Returns:
        As :func:`quantize_rows`; nothing is rounded to the dtype of ``x`` in between.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device, unknown ``approximate``, or a gradient is wanted.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide if bias is None else wide + bias
    return reference.quantize_rows(reference.gelu(wide, approximate=approximate), dtype=dtype)


def linear_int8(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: GeluVariant | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes a linear layer by products of 8-bit numbers: x · (weight · weight_scale[:, None])ᵀ + bias.

    Products of int8 are summed in 32-bit integers, exactly; scales, bias, GELU and residual are in float32.

    Args:
        x: ``(..., inputs)``, which is quantized first, or the result of :func:`quantize_rows`,
            :func:`layer_norm_quantize` or :func:`gelu_quantize`.
        weight: ``(outputs, inputs)``, int8 between -127 and 127, or float8_e4m3fn.
        weight_scale: ``(outputs,)``, float32.
        bias: ``(outputs,)``, or None for 0.
        approximate: A GELU that follows, as in :func:`cvt_kernels.gelu`; None for none.
        residual: ``(..., outputs)``, added at the end; None for 0. Except under autocast it has the dtype of
            the result.
        dtype: The dtype of the result; None for autocast's, or else ``x``'s or ``residual``'s, or float32.

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
        values, weight, weight_scale, bias, x_scales=x_scales,
        approximate=approximate, residual=residual, dtype=dtype,
    )  # fmt: skip


def _check_linear_int8(call: Any) -> None:
    x = call.x
    _check_input(x, call.x_scales, call.weight)
    check_weight(call.weight, call.weight_scale, x)
    also = torch.float32, call.dtype
    checks.check_vector("bias", call.bias, call.weight.shape[0], x, "(outputs,)", also)
    if call.approximate is not None:
        check_approximate(call.approximate)
    if call.residual is not None:
        _check_residual(call.residual, x, call.weight, call.dtype)
    _check_no_gradient(x, call.x_scales, call.weight_scale, call.bias, call.residual)


def _exact(call: Record) -> Tensor:
    """Computes the call in float64, but rounds the input in float32, as every implementation must.

    Compared with an unrounded input, an implementation that rounds differently would not look wrong.
    """
    x, x_scales = call.x, call.x_scales
    if x_scales is None:
        x, x_scales = reference.quantize_rows(x.float(), dtype=call.weight.dtype)
    call = call._replace(x=x, x_scales=x_scales.double())
    return reference.linear_int8(*call[:4], **dict(zip(call._fields[4:], call[4:], strict=True)))


def _unrounded(call: Record) -> Tensor:
    """Computes the call with the weight in floating point, and without rounding the input."""
    x, weight, weight_scale, bias, x_scales, approximate, residual, dtype = call
    rows = x if x_scales is None else x.to(x_scales.dtype) * x_scales
    wide = torch.promote_types(rows.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        y = F.linear(rows.to(wide), weight.to(wide) * weight_scale.to(wide)[:, None])
        y = y if bias is None else y + bias
        y = y if approximate is None else reference.gelu(y, approximate=approximate)
        y = y if residual is None else y + residual
    return y if wide == torch.float64 else y.to(dtype)


def _cost_class(call: Record) -> str:
    outputs, inputs = call.weight.shape
    words = "" if call.approximate is None else f"{gelu_words(call.approximate)}, "
    words += f"{size_class(rows_of(call.x.shape))} rows, {inputs} to {outputs} channels"
    words += f" by {checks.dtype_name(call.weight.dtype)}"
    words += "" if call.dtype is None else f" to {checks.dtype_name(call.dtype)}"
    words += ", without bias" if call.bias is None else ""
    return words + ("" if call.residual is None else ", added")


#: As many products of int8 are summed exactly in float32: 2^24 / 127², rounded down to a power of two.
_EXACT = 1024


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x · weightᵀ of 8-bit numbers in float32, rounded once."""
    with modes.without_autocast(x):
        parts = zip(x.split(_EXACT, -1), weight.split(_EXACT, -1), strict=True)
        sums = [F.linear(a.float(), b.float()) for a, b in parts]
    if len(sums) == 1:
        return sums[0]
    exact = torch.int32 if weight.dtype == torch.int8 else torch.float32
    return torch.stack([each.to(exact) for each in sums]).sum(0).float()


@operator(
    name="linear_int8",
    backends={
        "cpu": extension_kernels("cpu"),
        "int_mm": Implementation(
            primitives.by_int_mm, ("cuda",), why_unsupported=primitives.why_int_mm_unsupported
        ),
        "scaled_mm": Implementation(
            primitives.by_scaled_mm,
            ("cuda",),
            primitives.why_scaled_mm_unavailable,
            primitives.why_scaled_mm_unsupported,
        ),
    },
    cost_class=_cost_class,
    sample=sampled(2**25, "x", "x_scales", "residual", times=lambda call: call.weight.shape[0]),
    exact=_exact,
    unrounded=_unrounded,
    check=_check_linear_int8,
)
def _linear_int8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    x_scales: Tensor | None = None,
    approximate: GeluVariant | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes :func:`linear_int8` from values and their scales."""
    dtype = dtype or (x.dtype if x_scales is None else torch.float32)
    if x_scales is None:
        x, x_scales = reference.quantize_rows(x, dtype=weight.dtype)
    exact = x_scales.dtype == torch.float64
    y = F.linear(x.double(), weight.double()) if exact else _product(x, weight)
    y = y * x_scales * weight_scale.to(x_scales.dtype)
    if bias is not None:
        y = y + bias
    if approximate is not None:
        y = reference.gelu(y, approximate=approximate)
    if residual is not None:
        y = y + residual
    return y if exact else y.to(dtype)


def _dtype_of(x: Any, x_scales: Tensor | None, residual: Any) -> torch.dtype:
    """Returns the default dtype of a result."""
    if x_scales is None:
        checks.check_float_tensor("x", x, "(..., inputs), or what quantize_rows returns")
        return modes.autocast_dtype(x) or x.dtype
    if residual is not None:
        checks.check_float_tensor("residual", residual, "(..., outputs)")
        return residual.dtype
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# Checks ---------------------------------------------------------------------------------------------------


def check_format(dtype: torch.dtype) -> None:
    """Raises TypeError unless ``dtype`` is one of the 8-bit dtypes."""
    if not isinstance(dtype, torch.dtype) or dtype not in LIMITS:
        raise TypeError(f"dtype: got {checks.shown(dtype)}, expected torch.int8 or torch.float8_e4m3fn")


def check_scales(name: str, scales: Any, x: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raises TypeError or ValueError unless scales have a shape, float32 and the device of ``x``."""
    checks.check_dtype(name, scales, meaning, torch.float32)
    checks.check_shape(name, scales, shape, meaning)
    checks.check_device(name, scales, "x", x)


def _check_input(x: Any, x_scales: Any, weight: Any) -> None:
    """Checks the input of a linear layer, in floating point or quantized."""
    if x_scales is None:
        checks.check_float_tensor("x", x, "(..., inputs), or what quantize_rows returns")
    else:
        expected = getattr(weight, "dtype", None)
        if not isinstance(x, Tensor) or x.dtype not in (expected, torch.float64):
            got = f"dtype {checks.dtype_name(x.dtype)}" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"x: got values of {got}, expected {expected} as weight")
        name, shape = "scales of x", (*x.shape[:-1], 1)
        if x.dtype == torch.float64:  # nothing is rounded
            checks.check_float_tensor(name, x_scales, "(..., 1)")
            checks.check_shape(name, x_scales, shape, "(..., 1)")
        else:
            check_scales(name, x_scales, x, shape, "(..., 1)")
    if x.ndim == 0:
        raise ValueError("x: got a scalar, expected (..., inputs)")


def check_weight(weight: Tensor, weight_scale: Tensor, x: Tensor, name: str = "weight") -> None:
    """Raises TypeError or ValueError unless a weight of 8-bit numbers and its scales fit an input."""
    checks.check_dtype(name, weight, "(outputs, inputs)", *LIMITS)
    checks.check_rank(name, weight, 2, "(outputs, inputs)")
    checks.check_shape(name, weight, (weight.shape[0], x.shape[-1]), "(outputs, inputs)")
    if weight.shape[1] > MOST_INPUTS:
        raise ValueError(f"{name}: got {weight.shape[1]} inputs, expected at most {MOST_INPUTS}")
    checks.check_device(name, weight, "x", x)
    check_scales(f"{name}_scale", weight_scale, x, tuple(weight.shape[:1]), "(outputs,)")


def _check_residual(residual: Tensor, x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    checks.check_float_tensor("residual", residual, "(..., outputs)")
    checks.check_shape("residual", residual, (*x.shape[:-1], weight.shape[0]), "(..., outputs)")
    checks.check_device("residual", residual, "x", x)
    if residual.dtype != dtype and not modes.autocast_enabled(x):
        got, expected = checks.dtype_name(residual.dtype), checks.dtype_name(dtype)
        raise TypeError(f"residual: has dtype {got}, expected {expected} as the result")


def _check_no_gradient(*tensors: Tensor | None) -> None:
    if modes.wants_gradient(*tensors):
        raise ValueError("x: wants a gradient, expected none, since rounding has no useful one")
