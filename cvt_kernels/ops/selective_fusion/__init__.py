"""Selective fusion in a depth model's decoder: features, and those of the stage before at half the size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import checks
from ...backends import Record, lazy
from ...declaration import operator, triton_kernels
from ...records import NormalizedConv
from ..cost_classes import sampled, size_class

if TYPE_CHECKING:
    from . import triton as _triton
else:
    (_triton,) = lazy(__name__, "triton")

_MAP, _HALF = "(batch, channels, height, width)", "(batch, channels, height / 2, width / 2)"
_WEIGHT, _LAST = "(outputs, inputs, 3, 3)", "(2, channels, 3, 3)"


def _check(call: Any) -> None:
    x = call.x
    checks.check_float_tensor("x", x, _MAP)
    checks.check_rank("x", x, 4, _MAP)
    batch, channels, height, width = x.shape
    if 0 in x.shape[1:] or height % 2 or width % 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected {_MAP}, height and width even")
    checks.check_tensor_like("other", call.other, (batch, channels, height // 2, width // 2), _HALF, x)
    hidden = _check_conv("first", call.first, 2 * channels, x)
    hidden = _check_conv("second", call.second, hidden, x)
    checks.check_tensor_like("last_weight", call.last_weight, (2, hidden, 3, 3), _LAST, x)
    if call.last_bias is not None:
        checks.check_tensor_like("last_bias", call.last_bias, (2,), "(2,)", x)


def _check_conv(name: str, conv: Any, inputs: int, x: Tensor) -> int:
    """Raises for a wrong convolution; returns its outputs."""
    checks.check_kind(name, conv, NormalizedConv)
    weight = conv.weight
    checks.check_float_tensor(f"{name}.weight", weight, _WEIGHT)
    checks.check_rank(f"{name}.weight", weight, 4, _WEIGHT)
    outputs = weight.shape[0]
    checks.check_tensor_like(f"{name}.weight", weight, (outputs, inputs, 3, 3), _WEIGHT, x)
    if outputs < 1:
        raise ValueError(f"{name}.weight: got shape {tuple(weight.shape)}, expected at least 1 output")
    for field in ("bias", "bn_weight", "bn_bias", "running_mean", "running_var"):
        vector = getattr(conv, field)
        if vector is not None or field.startswith("running"):
            checks.check_tensor_like(f"{name}.{field}", vector, (outputs,), "(outputs,)", x)
    checks.check_positive(f"{name}.eps", conv.eps)
    return int(outputs)


def _cost_class(call: Record) -> str:
    batch, channels, height, width = call.x.shape
    hidden = f"{call.first.weight.shape[0]} and {call.second.weight.shape[0]} channels"
    words = f"{size_class(batch)} images of {size_class(height * width)} pixels, twice {channels} to {hidden}"
    return words + (", channels last" if call.x.stride(1) == 1 else "")


@operator(
    backends={"triton": triton_kernels(_triton.selective_fusion, _triton.why_unsupported)},
    cost_class=_cost_class,
    sample=sampled(2**18, "x", "other"),
    check=_check,
)
def selective_fusion(
    x: Tensor,
    other: Tensor,
    first: NormalizedConv,
    second: NormalizedConv,
    last_weight: Tensor,
    last_bias: Tensor | None = None,
) -> Tensor:
    """Computes x · a + up · b for up = upsample(other) and (a, b) = sigmoid(conv(second(first(x, up)))).

    The selective feature fusion of GLPN (Kim et al. 2022, section 3.4) with the upsampling before it;
    upstream ``GLPNSelectiveFeatureFusion`` of transformers. ``first`` reads the channels of ``x``, then those
    of ``up``; it and ``second`` are 3×3 convolutions with BatchNorm, by its running statistics, and ReLU. a
    and b are two numbers for each pixel. ``upsample`` doubles both sides as ``F.interpolate(scale_factor=2,
    mode="bilinear", align_corners=False)``.

    Args:
        x: ``(B, C, H, W)``, channels last or not, ``H`` and ``W`` even; float16, bfloat16, float32 or
            float64.
        other: ``(B, C, H/2, W/2)``.
        first: From 2·C channels to ``D``.
        second: From ``D`` channels to ``E``.
        last_weight: Of the last convolution, ``(2, E, 3, 3)``.
        last_bias: ``(2,)``, or None for 0.

    Returns:
        The fused features as contiguous tokens ``(B, H·W, C)`` in row-major order, of the dtype of ``x``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, or an eps that is not positive.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    up = F.interpolate(other, scale_factor=2, mode="bilinear", align_corners=False)
    hidden = torch.cat((x, up), 1)
    for conv in (first, second):
        hidden = F.conv2d(hidden, conv.weight, conv.bias, padding=1)
        statistics = conv.running_mean, conv.running_var
        hidden = F.batch_norm(hidden, *statistics, conv.bn_weight, conv.bn_bias, eps=conv.eps).relu()
    gates = F.conv2d(hidden, last_weight, last_bias, padding=1).sigmoid()
    fused = x * gates[:, :1] + up * gates[:, 1:]
    return fused.flatten(2).transpose(1, 2).to(x.dtype).contiguous()
