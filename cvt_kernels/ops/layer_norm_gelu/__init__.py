"""LayerNorm over the last dimension and GELU, fused with the sums right before them in CvT."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import checks, modes, reference
from ...backends import Record
from ...declaration import extension_kernels, operator
from ...records import GeluVariant, Norm
from ..cost_classes import gelu_words, sampled, size_class

#: Names of the GELU variants; see :func:`gelu`.
GELU_VARIANTS = get_args(GeluVariant)

#: Limits of the CUDA kernels.
_MAX_CHANNELS, _MAX_ROWS = 8192, 2**30


def _why_gelu_unsupported(call: Record) -> str | None:
    return "has no kernels for float64" if call[0].dtype == torch.float64 else None


def _why_norm_unsupported(call: Record) -> str | None:
    x = call[0]
    if x.dtype != torch.float64:
        if x.shape[-1] > _MAX_CHANNELS:
            return f"has kernels for up to {_MAX_CHANNELS} channels, not {x.shape[-1]}"
        if x.numel() > _MAX_ROWS * x.shape[-1]:
            return f"has kernels for up to {_MAX_ROWS} rows"
    return _why_gelu_unsupported(call)


def _cost_class(call: Record) -> str:
    x, given = call[0], call._asdict()
    words = f"{gelu_words(given['approximate'])}, " if "approximate" in given else ""
    words += f"{size_class(x.numel())} elements, {x.shape[-1] if x.ndim else 1} channels"
    is_bare = "weight" in given and (call.weight is None or call.bias is None)
    words += ", without weight or bias" if is_bare else ""
    words += ", without bias" if "weight" not in given and "bias" in given and call.bias is None else ""
    dtype = given.get("dtype")
    if dtype is not None and (x.is_cuda or dtype != x.dtype):  # on a CPU it is the dtype of x by default
        words += f", to {checks.dtype_name(dtype)}"
    words += "" if given.get("shift") is None else ", shifted"
    words += ", of no sum" if "residual" in given and call.residual is None else ""
    return words + ("" if x.is_contiguous() else ", strided")


def _check(call: Any) -> None:
    """Raises TypeError or ValueError for wrong arguments of an operator with a LayerNorm."""
    given = call._asdict()
    check_layer_norm(call.x, call.weight, call.bias, call.eps, given.get("shift"))
    if given.get("residual") is not None:
        checks.check_tensor_like("residual", call.residual, tuple(call.x.shape), "as x", call.x)
    if given.get("dtype") is not None:
        checks.check_float_dtype("dtype", call.dtype)
    if "approximate" in given:
        check_approximate(call.approximate)


_CPU = extension_kernels("extension", None)
_CUDA = extension_kernels("extension", _why_norm_unsupported, device_type="cuda")
_CUDA_GELU = extension_kernels("extension", _why_gelu_unsupported, device_type="cuda")
_OF_ALL: dict[str, Any] = {
    "backends": {"cuda": _CUDA, "cpu": _CPU},
    "cost_class": _cost_class,
    "sample": sampled(2**18, "x", "residual"),
    "fused_by_compiler": True,
    "check": _check,
}


@operator(**_OF_ALL)
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

    The result is (x − mean) / sqrt(variance + eps) · weight + bias, of x + shift if there is a shift.

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        weight: ``(C,)``, or None for 1.
        bias: ``(C,)``, or None for 0.
        eps: Added to the (biased) variance.
        dtype: The dtype of the result, unless ``x`` is float64; None for the dtype of ``x``, or under
            autocast of ``F.layer_norm``, which is float32 on a GPU. Autocast's dtype saves bytes where the
            next layer computes in it.
        shift: ``(C,)``, added to ``x`` first, such as a bias that the layer before has left out; float32 or
            of the dtype of ``x``.

    Returns:
        The shape of ``x``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, or ``eps`` not positive.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    if shift is not None:
        x = (x + shift).to(x.dtype)
    shape = (modes.plain_size(x.shape[-1]),)
    if _are_wider(x, weight, bias):
        weight, bias = (None if t is None else t.float() for t in (weight, bias))
        out = F.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)
    else:
        out = F.layer_norm(x, shape, weight, bias, eps)
    return out if dtype is None or x.dtype == torch.float64 else out.to(dtype)


def _are_wider(x: Tensor, *parameters: Tensor | None) -> bool:
    """Returns whether parameters are float32 and x is not: F.layer_norm takes that on a CPU only."""
    if x.dtype not in (torch.bfloat16, torch.float16) or modes.autocast_enabled(x):
        return False
    return any(p is not None and p.dtype == torch.float32 for p in parameters)


@operator(**_OF_ALL)
def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes h = x + residual and layer_norm(h).

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        residual: The shape and dtype of ``x``; None for h = x. The backward then adds the gradients of both
            results in its kernel, where two uses of ``x`` would take another pass.
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
    h = x if residual is None else x + residual
    return h, reference.layer_norm(h, weight, bias, eps=eps, dtype=dtype)


def _check_gelu(call: Any) -> None:
    checks.check_float_tensor("x", call.x, "of any shape")
    check_approximate(call.approximate)
    if call.bias is not None:
        check_rows(call.x)
        checks.check_tensor_like("bias", call.bias, call.x.shape[-1:], "(channels,)", call.x)


@operator(**_OF_ALL | {"check": _check_gelu, "backends": {"cuda": _CUDA_GELU, "cpu": _CPU}})
def gelu(x: Tensor, bias: Tensor | None = None, *, approximate: GeluVariant = "none") -> Tensor:
    """Computes GELU (Hendrycks and Gimpel 2016) of x + bias, exactly or approximated.

    Args:
        x: Any shape, ``(..., C)`` with a bias; float16, bfloat16, float32 or float64.
        bias: ``(C,)``, or None for 0.
        approximate: ``"none"``: x · Φ(x) by erf. ``"tanh"``: PyTorch's tanh approximation. ``"quick"``:
            x · sigmoid(1.702 · x), Microsoft's ``QuickGELU``, with which the published CvTs were trained.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, or unknown ``approximate``.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    x = x if bias is None else x + bias
    if approximate == "quick":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate=approximate)


@operator(**_OF_ALL)
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
    return reference.gelu(reference.layer_norm(x, weight, bias, eps=eps), approximate=approximate)


def check_layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    shift: Tensor | None = None,
    prefix: str = "",
) -> None:
    """Raises TypeError or ValueError for wrong arguments of a LayerNorm; ``prefix`` begins their names."""
    check_rows(x)
    for name, vector in (("weight", weight), ("bias", bias)):
        checks.check_vector(prefix + name, vector, x.shape[-1], x)
    checks.check_positive("eps", eps)
    checks.check_vector("shift", shift, x.shape[-1], x, also=(torch.float32,))


def check_norm(name: str, norm: Norm, x: Tensor) -> None:
    """Raises TypeError or ValueError for wrong parameters of a LayerNorm of tokens x (B, T, C)."""
    for field in ("weight", "bias"):
        checks.check_vector(f"{name}.{field}", getattr(norm, field), x.shape[2], x)
    checks.check_positive(f"{name}.eps", norm.eps)


def check_rows(x: Tensor) -> None:
    """Raises TypeError or ValueError unless x has rows of channels."""
    checks.check_float_tensor("x", x, "(..., channels)")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (..., channels)")


def check_approximate(approximate: str) -> None:
    """Raises ValueError unless ``approximate`` names a GELU."""
    if not isinstance(approximate, str) or approximate not in GELU_VARIANTS:
        checks.check_choice("approximate", approximate, GELU_VARIANTS)
