"""The head of a depth model: a map at a quarter of the result's size to the depth of every pixel."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ... import checks
from ...backends import Record
from ...declaration import extension_kernels, operator
from ..cost_classes import sampled, size_class

#: The result's height by the map's, and the result's width by the map's.
SCALE = 4

_MAP, _WEIGHT, _LAST = "(batch, C, height, width)", "(channels, C, 3, 3)", "(1, channels, 3, 3)"


def _check(call: Any) -> None:
    x, weight, last = call.x, call.weight, call.last_weight
    checks.check_dimensions("x", x, 4, _MAP)
    if 0 in x.shape[1:]:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected channels and pixels")
    checks.check_dimensions("weight", weight, 4, _WEIGHT)
    channels = weight.shape[0]
    checks.check_tensor_like("weight", weight, (channels, x.shape[1], 3, 3), _WEIGHT, x)
    if channels < 1:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected at least 1 channel")
    checks.check_tensor_like("last_weight", last, (1, channels, 3, 3), _LAST, x)
    checks.check_vector("bias", call.bias, channels, x)
    checks.check_vector("last_bias", call.last_bias, 1, x, "(1,)")
    checks.check_number("max_depth", call.max_depth)


def _cost_class(call: Record) -> str:
    batch, inputs, height, width = call.x.shape
    words = f"{size_class(batch)} images of {size_class(height * width)} pixels, {inputs} to "
    return words + f"{call.weight.shape[0]} channels" + (", channels last" if call.x.stride(1) == 1 else "")


@operator(
    backends={"cpu": extension_kernels("cpu")},
    cost_class=_cost_class,
    sample=sampled(2**16, "x"),
    check=_check,
)
def depth_head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    last_weight: Tensor,
    last_bias: Tensor | None,
    max_depth: float = 1.0,
) -> Tensor:
    """Computes max_depth · sigmoid(conv(relu(conv(upsample(upsample(x)))))), the depth of every pixel.

    The head of GLPN (Kim et al. 2022, section 3.2) with the two upsamplings before it; upstream the end of
    ``GLPNDecoder`` and ``GLPNDepthEstimationHead`` of transformers. ``upsample`` doubles both sides as
    ``F.interpolate(scale_factor=2, mode="bilinear", align_corners=False)``; the convolutions are of 3×3,
    padded by zeros. A kernel multiplies the channels of ``x`` at its own size, and interpolates the products:
    a sixteenth of the multiplications, and no upsampled map in memory.

    Args:
        x: ``(B, C, H, W)``; float16, bfloat16, float32 or float64.
        weight: Of the first convolution, ``(D, C, 3, 3)``.
        bias: ``(D,)``, or None for 0.
        last_weight: Of the last convolution, ``(1, D, 3, 3)``.
        last_bias: ``(1,)``, or None for 0.
        max_depth: The factor on the sigmoid.

    Returns:
        The depths ``(B, 4·H, 4·W)``, of the dtype of ``x`` or, under autocast, of a convolution.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    for _ in range(2):
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    hidden = F.conv2d(x, weight, bias, padding=1).relu()
    return F.conv2d(hidden, last_weight, last_bias, padding=1).sigmoid()[:, 0] * max_depth
