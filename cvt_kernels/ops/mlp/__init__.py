"""The MLP of a transformer block with its residual sum.

:func:`layer_norm_mlp` is for serving: LayerNorm too, in one GPU kernel where it fits. :func:`mlp_add` is for
training: of the hidden features it keeps GELU's input only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import checks, reference
from ...backends import Record
from ...declaration import operator, triton_kernels
from ...records import GeluVariant
from ..cost_classes import gelu_words, rows_of, sampled, size_class
from ..layer_norm_gelu import check_approximate, check_layer_norm, layer_norm
from ..linear import check_factors, check_linear, linear_add, linear_gelu


def _check(call: Any) -> None:
    given = call._asdict()
    if "eps" in given:
        check_layer_norm(call.x, call.norm_weight, call.norm_bias, call.eps, call.shift, prefix="norm_")
    check_linear(call.x, call.fc1_weight, call.fc1_bias, name="fc1")
    x, channels, hidden = call.x, call.x.shape[-1], call.fc1_weight.shape[0]
    checks.check_tensor_like("fc2_weight", call.fc2_weight, (channels, hidden), "(channels, hidden)", x)
    checks.check_vector("fc2_bias", call.fc2_bias, channels, x)
    check_approximate(call.approximate)
    if "residual" in given:
        checks.check_tensor_like("residual", call.residual, x.shape, "of x", x)
        check_factors(call.scale, call.scales_sum, x)


def _compose(call: Record) -> Tensor:
    x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, eps, approximate, shift = call
    y = layer_norm(x, norm_weight, norm_bias, eps=eps, shift=shift)
    return linear_add(linear_gelu(y, fc1_weight, fc1_bias, approximate=approximate), fc2_weight, fc2_bias, x)


def _cost_class(call: Record) -> str:
    x, hidden = call.x, call.fc1_weight.shape[0]
    words = gelu_words(call.approximate)
    words += f", {size_class(rows_of(x.shape))} rows of {x.shape[-1]} channels, {hidden} hidden"
    return words + ("" if x.is_contiguous() else ", strided")


@operator(
    backends={"triton": triton_kernels("triton.forward")},
    cost_class=_cost_class,
    sample=sampled(2**18, "x"),
    check=_check,
    composed=_compose,
)
def layer_norm_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    eps: float = 1e-5,
    approximate: GeluVariant = "none",
    shift: Tensor | None = None,
) -> Tensor:
    """Computes x + fc2(gelu(fc1(layer_norm(x + shift)))), the second half of a pre-norm transformer block.

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        norm_weight: LayerNorm's ``(C,)``, or None for 1.
        norm_bias: LayerNorm's ``(C,)``, or None for 0.
        fc1_weight: ``(hidden, C)``.
        fc1_bias: ``(hidden,)``, or None for 0.
        fc2_weight: ``(C, hidden)``.
        fc2_bias: ``(C,)``, or None for 0.
        eps: Added to the variance.
        approximate: As in :func:`cvt_kernels.gelu`.
        shift: As in :func:`cvt_kernels.layer_norm`; it is not part of the sum.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, ``eps`` not positive, or unknown ``approximate``.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    y = reference.layer_norm(x, norm_weight, norm_bias, eps=eps, shift=shift)
    hidden = reference.linear_gelu(y, fc1_weight, fc1_bias, approximate=approximate)
    return reference.linear_add(hidden, fc2_weight, fc2_bias, x)


def _compose_sum(call: Record) -> Tensor:
    x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, residual, approximate, scale, scales_sum = call
    hidden = linear_gelu(x, fc1_weight, fc1_bias, approximate=approximate)
    return linear_add(hidden, fc2_weight, fc2_bias, residual, scale=scale, scales_sum=scales_sum)


def _cost_class_of_sum(call: Record) -> str:
    words = _cost_class(call)
    words += "" if call.scale is None else ", scaled by image"
    return words + (", with the sum" if call.scales_sum else "")


@operator(
    backends={"triton": triton_kernels("triton.training", is_partial=True)},
    cost_class=_cost_class_of_sum,
    sample=sampled(2**25, "x", "residual", "scale", times=lambda call: call.fc1_weight.shape[0]),
    check=_check,
    composed=_compose_sum,
)
def mlp_add(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    residual: Tensor,
    *,
    approximate: GeluVariant = "none",
    scale: Tensor | None = None,
    scales_sum: bool = False,
) -> Tensor:
    """Computes residual + fc2(gelu(fc1(x))), the MLP of a transformer block after its LayerNorm.

    It is :func:`cvt_kernels.linear_gelu` and :func:`cvt_kernels.linear_add`. For gradients, a GPU keeps
    GELU's input of the hidden features, and computes GELU again in the backward.

    Args:
        x: ``(..., C)``; float16, bfloat16, float32 or float64.
        fc1_weight: ``(hidden, C)``.
        fc1_bias: ``(hidden,)``, or None for 0.
        fc2_weight: ``(C, hidden)``.
        fc2_bias: ``(C,)``, or None for 0.
        residual: ``(..., C)``, of the dtype of ``x``.
        approximate: As in :func:`cvt_kernels.gelu`.
        scale: As in :func:`cvt_kernels.linear_add`, a factor of each image.
        scales_sum: See there.

    Returns:
        ``(..., C)``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, unknown ``approximate``, or a ``scale`` that requires a gradient.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    hidden = reference.linear_gelu(x, fc1_weight, fc1_bias, approximate=approximate)
    return reference.linear_add(hidden, fc2_weight, fc2_bias, residual, scale=scale, scales_sum=scales_sum)
