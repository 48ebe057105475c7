"""LayerNorm over the last dimension and GELU, fused with the sums that CvT does right before them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from ... import backends, checks, reference
from ...declaration import operator
from ...reference import GeluVariant, Norm
from ..registration import images_within, register_native, size_class

#: Names of the GELU variants; see :func:`gelu`.
GELU_VARIANTS = get_args(GeluVariant)

_MAX_CUDA_CHANNELS = 8192
_MAX_CUDA_ROWS = 2**30
_SAMPLE = 2**18  # elements


def _why_unsupported(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> str | None:
    if not x.is_cuda:
        return None
    if x.dtype == torch.float64:
        return "has no CUDA kernels for float64"
    if operator not in ("gelu", "bias_gelu"):
        if x.shape[-1] > _MAX_CUDA_CHANNELS:
            return f"has CUDA kernels for up to {_MAX_CUDA_CHANNELS} channels, not {x.shape[-1]}"
        if x.numel() > _MAX_CUDA_ROWS * x.shape[-1]:
            return f"has CUDA kernels for up to {_MAX_CUDA_ROWS} rows"
    return None


def _signature(
    x: Tensor,
    *tensors: Tensor | None,
    eps: float = 0.0,
    approximate: str = "identity",
    dtype: torch.dtype | None = None,
    shift: Tensor | None = None,
) -> tuple[Any, ...]:
    bare = len(tensors) > 1 and (tensors[-1] is None or tensors[-2] is None)
    named = dtype if x.is_cuda or dtype != x.dtype else None  # a CPU's operators give that of x by themselves
    gradient = checks.wants_gradient(x, *tensors, shift)
    return gradient, x.shape, x.is_contiguous(), approximate, bare, named, shift is not None


def _shape_class(
    gradient: bool,
    shape: Sequence[int],
    contiguous: bool,
    approximate: str,
    bare: bool,
    named: torch.dtype | None,
    shifted: bool,
) -> str:
    channels = shape[-1] if shape else 1
    words = {"identity": "", "none": "exact, "}.get(approximate, f"{approximate}, ")
    words += f"{size_class(math.prod(shape))} elements, {channels} channels"
    words += ", without weight or bias" if bare else ""
    words += "" if named is None else f", to {checks.dtype_name(named)}"
    words += ", shifted" if shifted else ""
    return words + ("" if contiguous else ", strided")


def _sample(factor: int, x: Tensor, *tensors: Tensor | None, **settings: Any) -> tuple[Any, dict[str, Any]]:
    if x.ndim < 2:
        return (x, *tensors), settings
    rows = images_within(_SAMPLE * factor, x.shape[0], x.numel())
    parts = [t[:rows] if t is not None and t.shape == x.shape else t for t in (x, *tensors)]
    return tuple(parts), settings


for _operator in ("layer_norm", "add_layer_norm", "gelu", "bias_gelu", "layer_norm_gelu"):
    register_native(
        _operator,
        __name__,
        devices=("cpu", "cuda"),
        why_unsupported=functools.partial(_why_unsupported, _operator),
    )
    backends.describe(_operator, backends.Operator(_signature, _shape_class, _sample))


def _check_layer_norm(call: Any) -> None:
    check_layer_norm(call.x, call.weight, call.bias, call.eps, call.shift)
    if call.dtype is not None:
        checks.check_float_dtype("dtype", call.dtype)


@operator(check=_check_layer_norm)
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """Computes LayerNorm over the last dimension (Ba et al. 2016).

    The result is (x − mean) / sqrt(variance + eps) · weight + bias, with x + shift in the place of x if there
    is a shift.

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        weight: ``(C,)``, or None for 1.
        bias: ``(C,)``, or None for 0.
        eps: Added to the (biased) variance.
        dtype: The dtype to which the result is rounded, unless ``x`` is float64; None for that of ``x``, or
            under autocast that of ``F.layer_norm``, which is float32 on a GPU. A layer that computes in
            autocast's dtype reads fewer bytes if it is named here.
        shift: ``(C,)``, added to ``x`` before; float32 or of the dtype of ``x``. It is where a bias goes that
            the layer before has left out.

    Returns:
        The shape of ``x``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, or ``eps`` not positive.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    return reference.layer_norm(x, weight, bias, eps=eps, dtype=dtype, shift=shift)


def _check_add_layer_norm(call: Any) -> None:
    check_layer_norm(call.x, call.weight, call.bias, call.eps)
    checks.check_float_tensor("residual", call.residual, "of the shape of x")
    checks.check_shape("residual", call.residual, tuple(call.x.shape), "as x")
    checks.check_like("residual", call.residual, "x", call.x)
    if call.dtype is not None:
        checks.check_float_dtype("dtype", call.dtype)


@operator(check=_check_add_layer_norm)
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes h = x + residual and layer_norm(h).

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        residual: The shape and dtype of ``x``.
        weight: ``(C,)``, or None for 1.
        bias: ``(C,)``, or None for 0.
        eps: Added to the (biased) variance.
        dtype: As in :func:`layer_norm`, for the LayerNorm. The sum keeps its dtype.

    Returns:
        The sum and its LayerNorm, each of the shape of ``x``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, or ``eps`` not positive.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    return reference.add_layer_norm(x, residual, weight, bias, eps=eps, dtype=dtype)


def _check_gelu(call: Any) -> None:
    checks.check_float_tensor("x", call.x, "of any shape")
    check_approximate(call.approximate)


@operator(check=_check_gelu)
def gelu(x: Tensor, *, approximate: GeluVariant = "none") -> Tensor:
    """Computes GELU (Hendrycks and Gimpel 2016), exactly or approximated.

    Args:
        x: Any shape; float16, bfloat16, float32 or float64.
        approximate: ``"none"``: x · Φ(x) by erf. ``"tanh"``: PyTorch's tanh approximation. ``"quick"``:
            x · sigmoid(1.702 · x), Microsoft's ``QuickGELU``, with which the published CvTs were trained.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: Unknown ``approximate``.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    return reference.gelu(x, approximate=approximate)


def _check_bias_gelu(call: Any) -> None:
    _check_last_dim(call.x)
    checks.check_tensor_like("bias", call.bias, call.x.shape[-1:], "(channels,)", call.x)
    check_approximate(call.approximate)


@operator(check=_check_bias_gelu)
def bias_gelu(x: Tensor, bias: Tensor, *, approximate: GeluVariant = "none") -> Tensor:
    """Computes gelu(x + bias).

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        bias: ``(C,)``.
        approximate: As in :func:`gelu`.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, or unknown ``approximate``.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    return reference.bias_gelu(x, bias, approximate=approximate)


def _check_layer_norm_gelu(call: Any) -> None:
    check_layer_norm(call.x, call.weight, call.bias, call.eps)
    check_approximate(call.approximate)


@operator(check=_check_layer_norm_gelu)
def layer_norm_gelu(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    approximate: GeluVariant = "none",
) -> Tensor:
    """Computes gelu(layer_norm(x)).

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        weight: ``(C,)``, or None for 1.
        bias: ``(C,)``, or None for 0.
        eps: Added to the (biased) variance.
        approximate: As in :func:`gelu`.

    Returns:
        The shape of ``x``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, ``eps`` not positive, or unknown ``approximate``.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    return reference.layer_norm_gelu(x, weight, bias, eps=eps, approximate=approximate)


def check_layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shift: Tensor | None = None,
    prefix: str = "",
) -> None:
    """Raises TypeError or ValueError for wrong arguments of a LayerNorm; ``prefix`` is for the message."""
    _check_last_dim(x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            checks.check_tensor_like(prefix + name, tensor, x.shape[-1:], "(channels,)", x)
    checks.check_positive("eps", eps)
    if shift is not None:
        checks.check_tensor_like("shift", shift, x.shape[-1:], "(channels,)", x, (torch.float32,))


def check_norm(name: str, norm: Norm, x: Tensor) -> None:
    """Raises TypeError or ValueError for wrong parameters of a LayerNorm of tokens x (B, T, C)."""
    for field in ("weight", "bias"):
        vector = getattr(norm, field)
        if vector is not None:
            checks.check_tensor_like(f"{name}.{field}", vector, (x.shape[2],), "(channels,)", x)
    checks.check_positive(f"{name}.eps", norm.eps)


def _check_last_dim(x: Tensor) -> None:
    checks.check_float_tensor("x", x, "(..., channels)")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (..., channels)")


def check_approximate(approximate: str) -> None:
    """Raises ValueError unless ``approximate`` names a GELU."""
    if not isinstance(approximate, str) or approximate not in GELU_VARIANTS:
        checks.check_choice("approximate", approximate, GELU_VARIANTS)
