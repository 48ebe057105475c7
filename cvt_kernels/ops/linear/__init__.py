"""Linear layers, alone and fused with the next operations of a transformer block.

:func:`linear` has three ways of PyTorch as backends, since ``F.linear`` is not always the fastest on a CPU:

- ``reference``: ``F.linear``: MKL for float32, oneDNN for 16 bits.
- ``convolution``: a 1×1 ``F.conv2d`` on the channels-last view: oneDNN for float32 too, which is much faster
  than MKL on AMD CPUs with AVX-512.
- ``float32``: 16 bits converted to float32 and back, for CPUs without 16-bit products.

On a GPU, ``triton`` serves calls whose bias needs a gradient: the products are PyTorch's there too. The other
operators have fused kernels on a GPU. Elsewhere they run the separate operators one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import checks, choose, modes, reference
from ...backends import Implementation, Record
from ...declaration import gluon_kernels, operator, triton_kernels
from ...records import GeluVariant
from ..autograd import check_inplace
from ..cost_classes import gelu_words, rows_of, sampled, size_class
from ..layer_norm_gelu import add_layer_norm, check_approximate, check_layer_norm, gelu, layer_norm
from . import primitives


def _check_plain(call: Any) -> None:
    """Checks the arguments of calls that run ``F.linear`` directly."""
    if torch.compiler.is_compiling() or _has_choice(*call):
        return
    shapes = "(..., inputs)", "(outputs, inputs)", "(outputs,)"
    for name, tensor, shape in zip(call._fields, call, shapes, strict=True):
        if tensor is not None and type(tensor) in _PLAIN:
            checks.check_tensor(name, tensor, shape)
            if type(call.x) in _PLAIN:
                checks.check_device(name, tensor, "x", call.x)


def _without_choice(call: Any) -> Callable[..., Tensor] | None:
    if torch.compiler.is_compiling():
        return lambda call: F.linear(*call)
    return None if _has_choice(*call) else _plain_linear


def _plain_linear(call: Record) -> Tensor:
    x, weight, bias = call
    try:
        return F.linear(x, weight, bias)
    except (RuntimeError, TypeError):
        check_linear(x, weight, bias)  # whose messages have the names of this function
        raise


def _cost_class_of_linear(call: Record) -> str:
    words = _cost_class(call)
    return words + (", a bias in training" if call.x.is_cuda and modes.wants_gradient(call.bias) else "")


def _cost_class(call: Record) -> str:
    outputs, inputs = call.weight.shape
    return f"{size_class(rows_of(call.x.shape))} rows, {inputs} to {outputs} channels"


def _cost_class_of_fused(call: Record) -> str:
    given = call._asdict()
    words = f"{gelu_words(call.approximate)}, " if "approximate" in given else ""
    words += _cost_class(call)
    words += ", without bias" if call.bias is None else ""
    words += ", in place" if given.get("inplace") else ""
    words += "" if given.get("scale") is None else ", scaled by image"
    words += ", with the sum" if given.get("scales_sum") else ""
    return words + ("" if call.x.is_contiguous() else ", strided")


_sample = sampled(
    2**25, "x", "residual", "scale", times=lambda call: call.weight.shape[0], written="residual"
)  # products of two numbers


@operator(
    backends={
        "convolution": Implementation(
            primitives.by_convolution, ("cpu",), why_unsupported=primitives.why_convolution_unsupported
        ),
        "float32": Implementation(
            primitives.by_float32, ("cpu",), why_unsupported=primitives.why_float32_unsupported
        ),
        "triton": triton_kernels("triton.autograd", "why_linear_unsupported", is_partial=True),
    },
    cost_class=_cost_class_of_linear,
    sample=_sample,
    check=_check_plain,
    composition=_without_choice,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes a linear layer, x · weightᵀ + bias.

    On a CPU it uses the fastest of PyTorch's primitives for the instruction set; results may differ from
    ``F.linear`` in the last bits. On a GPU and under ``torch.compile`` it is ``F.linear``; on a GPU, the
    gradient of the bias has a kernel.

    Args:
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)``.

    Returns:
        ``(..., outputs)``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    return F.linear(x, weight, bias)


def _has_choice(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    # Tensor subclasses implement F.linear themselves, and wrong arguments are left to F.linear's errors.
    if type(x) is not Tensor or any(type(each) not in _PLAIN for each in (weight, bias) if each is not None):
        return False
    if x.is_cuda and not (modes.wants_gradient(bias) and choose.may_be_ours("linear", "cuda")):
        return False
    try:
        check_linear(x, weight, bias)
    except (TypeError, ValueError):
        return False
    is_mixed = not x.is_cuda and weight.dtype != x.dtype
    return x.numel() > 0 and not is_mixed and (bias is None or bias.dtype == weight.dtype)


_PLAIN = (Tensor, nn.Parameter)


# The composition of other operators -----------------------------------------------------------------------


def _compose_gelu(call: Record) -> Tensor:
    """Computes ``linear_gelu``; a fused GELU adds the bias, which else is free in a matrix product."""
    x, weight, bias, approximate = call
    gradient = modes.wants_gradient(x, weight, bias)
    if bias is None or not choose.may_be_ours("gelu", x.device.type, gradient=gradient):
        return gelu(linear(x, weight, bias), approximate=approximate)
    product = linear(x, weight)
    if bias.dtype != product.dtype:  # autocast casts the product to half precision, but not the bias
        bias = bias.to(product.dtype)
    return gelu(product, bias, approximate=approximate)


def _compose_add(call: Record) -> Tensor:
    x, weight, bias, residual, inplace, scale, scales_sum = call
    if scale is not None:
        return _scaled_sum(linear(x, weight, bias), residual, scale, scales_sum)
    if not inplace:
        return residual + linear(x, weight, bias)
    differ = residual.dtype != x.dtype or weight.dtype != x.dtype
    if bias is not None or differ or modes.autocast_enabled(x) or modes.is_counted():
        return residual.add_(linear(x, weight, bias))
    rows = residual.view(-1, residual.shape[-1])
    rows.addmm_(x.reshape(-1, x.shape[-1]), weight.t())  # the sum is part of the product
    return residual


def _scaled_sum(branch: Tensor, residual: Tensor, scale: Tensor, scales_sum: bool) -> Tensor:
    """Returns the sum with the factors of images, in the dtype of a sum without them."""
    factors = scale.view(-1, *(1,) * (residual.ndim - 1))
    out = (residual + branch) * factors if scales_sum else residual + branch * factors
    return out.to(torch.promote_types(residual.dtype, branch.dtype))


def _compose_add_layer_norm(call: Record) -> tuple[Tensor, Tensor]:
    x, weight, bias, residual, norm_weight, norm_bias, eps, shift, inplace = call
    if inplace or shift is not None:
        h = linear_add(x, weight, bias, residual, inplace=inplace)
        return h, layer_norm(h, norm_weight, norm_bias, eps=eps, shift=shift)
    return add_layer_norm(linear(x, weight, bias), residual, norm_weight, norm_bias, eps=eps)


# Operators with what follows a product -------------------------------------------------------------------


def _check_fused(call: Any) -> None:
    x, weight, bias, given = call.x, call.weight, call.bias, call._asdict()
    check_linear(x, weight, bias)
    if "approximate" in given:
        check_approximate(call.approximate)
    if "residual" in given:
        shape = *x.shape[:-1], weight.shape[0]
        checks.check_tensor_like("residual", call.residual, shape, "(..., outputs)", x)
        checks.check_flag("inplace", call.inplace)
        if call.inplace:
            check_inplace("residual", call.residual, x, weight, bias, call.residual)
    if "scale" in given:
        check_factors(call.scale, call.scales_sum, x)
        if call.inplace and call.scale is not None:
            raise ValueError("scale: got factors of images with inplace=True, expected None")
    if "eps" in given:
        norm = call.norm_weight, call.norm_bias, call.eps, call.shift
        check_layer_norm(call.residual, *norm, prefix="norm_")


_OF_FUSED: dict[str, Any] = {"cost_class": _cost_class_of_fused, "sample": _sample, "check": _check_fused}


@operator(
    backends={"gluon": gluon_kernels("gluon"), "triton": triton_kernels("triton.autograd")},
    composed=_compose_gelu,
    **_OF_FUSED,
)
def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: GeluVariant = "none"
) -> Tensor:
    """Computes gelu(x · weightᵀ + bias), the first half of a transformer's MLP.

    Args:
        x: ``(..., inputs)``; float16, bfloat16, float32 or float64.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)``, or None for 0.
        approximate: As in :func:`cvt_kernels.gelu`.

    Returns:
        ``(..., outputs)``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, or unknown ``approximate``.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    return reference.gelu(F.linear(x, weight, bias), approximate=approximate)


def check_factors(scale: Tensor | None, scales_sum: bool, x: Tensor) -> None:
    """Raises TypeError or ValueError for wrong factors of images, as :func:`linear_add` takes them."""
    checks.check_flag("scales_sum", scales_sum)
    if scale is None:
        return
    if x.ndim < 2:
        raise ValueError("scale: got factors of images for a single row, expected None")
    checks.check_tensor_like("scale", scale, x.shape[:1], "(images,)", x, (torch.float32,))
    if scale.requires_grad:
        raise ValueError("scale: requires a gradient, expected a constant")


@operator(
    backends={"gluon": gluon_kernels("gluon"), "triton": triton_kernels("triton.autograd")},
    composed=_compose_add,
    **_OF_FUSED,
)
def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    inplace: bool = False,
    scale: Tensor | None = None,
    scales_sum: bool = False,
) -> Tensor:
    """Computes residual + x · weightᵀ + bias, a linear layer that ends a residual branch.

    With ``scale``, whose numbers are 0 or 1 / (1 − p) for stochastic depth (Huang et al. 2016), the branch of
    each image is multiplied by its factor, or the whole sum.

    Args:
        x: ``(..., inputs)``; float16, bfloat16, float32 or float64.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)``, or None for 0.
        residual: ``(..., outputs)``, of the dtype of ``x``.
        inplace: Whether the result overwrites ``residual``. Autograd does not track it.
        scale: ``(B,)``, a factor of each image, that is, of all with the same first index; float32 or of the
            dtype of ``x``, without a gradient. None for 1.
        scales_sum: Whether ``scale`` is a factor of the residual too.

    Returns:
        ``(..., outputs)``; ``residual`` itself if ``inplace``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, ``inplace`` where a gradient is required, ``scale`` is given or
            ``residual`` is not contiguous, or a ``scale`` that requires a gradient.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    product = F.linear(x, weight, bias)
    if scale is not None:
        return _scaled_sum(product, residual, scale, scales_sum)
    return residual.add_(product) if inplace else residual + product


@operator(
    backends={"triton": triton_kernels("triton.autograd")}, composed=_compose_add_layer_norm, **_OF_FUSED
)
def linear_add_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    shift: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes h = residual + x · weightᵀ + bias and layer_norm(h + shift).

    Args:
        x: As in :func:`linear_add`, like ``weight``, ``bias``, ``residual`` and ``inplace``.
        weight: See there.
        bias: See there.
        residual: See there.
        norm_weight: LayerNorm's ``(outputs,)``, or None for 1.
        norm_bias: LayerNorm's ``(outputs,)``, or None for 0.
        eps: Added to the variance.
        shift: As in :func:`cvt_kernels.layer_norm`.
        inplace: See there; ``h`` overwrites ``residual``.

    Returns:
        ``h``, which is ``residual`` itself if ``inplace``, and its LayerNorm, both ``(..., outputs)``.

    Raises:
        TypeError: As :func:`linear_add`.
        ValueError: As :func:`linear_add`, or ``eps`` not positive.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    h = reference.linear_add(x, weight, bias, residual, inplace=inplace)
    return h, reference.layer_norm(h, norm_weight, norm_bias, eps=eps, shift=shift)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, name: str = "") -> None:
    """Raises TypeError or ValueError for wrong arguments of a linear layer, called ``name`` in messages."""
    weight_name, bias_name = (f"{name}_weight", f"{name}_bias") if name else ("weight", "bias")
    checks.check_float_tensor("x", x, "(..., inputs)")
    if x.ndim == 0:
        raise ValueError("x: got a scalar, expected (..., inputs)")
    checks.check_dimensions(weight_name, weight, 2, "(outputs, inputs)")
    checks.check_shape(weight_name, weight, (weight.shape[0], x.shape[-1]), "(outputs, inputs)")
    checks.check_like(weight_name, weight, "x", x)
    checks.check_vector(bias_name, bias, weight.shape[0], x, "(outputs,)")
