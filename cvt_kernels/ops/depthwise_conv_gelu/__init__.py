"""Depthwise 3×3 convolution of tokens, bias and GELU in one pass, as between the layers of a Mix-FFN."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ... import checks, modes, reference
from ...backends import Record
from ...declaration import extension_kernels, operator, triton_kernels
from ...records import GeluVariant
from ..cost_classes import gelu_words, sampled, size_class
from ..layer_norm_gelu import check_approximate

_SHAPE, _WEIGHT = "(batch, tokens, channels)", "(channels, 1, 3, 3)"


def _check(call: Any) -> None:
    x = call.x
    checks.check_dimensions("x", x, 3, _SHAPE)
    if not x.shape[2]:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected {_SHAPE} with at least one channel")
    check_whole_grid(call.grid, x)
    check_depthwise("", call.weight, call.bias, x, x.shape[2])
    check_approximate(call.approximate)


def check_whole_grid(grid: tuple[int, int], x: Tensor) -> None:
    """Raises TypeError or ValueError unless the tokens fill the grid, without a class token."""
    checks.check_grid("grid", grid)
    height, width = grid
    if any(map(modes.is_known, (height < 1, width < 1, x.shape[1] != height * width))):
        raise ValueError(f"grid: got {height}×{width} for {x.shape[1]} tokens, expected tokens = H·W")


def check_depthwise(prefix: str, weight: Tensor, bias: Tensor | None, x: Tensor, channels: int) -> None:
    """Raises TypeError or ValueError for a wrong 3×3 convolution; ``prefix`` begins the argument's name."""
    checks.check_tensor_like(f"{prefix}weight", weight, (channels, 1, 3, 3), _WEIGHT, x)
    checks.check_vector(f"{prefix}bias", bias, channels, x)


def _cost_class(call: Record) -> str:
    batch, _, channels = call.x.shape
    pixels = call.grid[0] * call.grid[1]
    words = gelu_words(call.approximate)
    words += f", {size_class(batch)} images of {size_class(pixels)} pixels, {channels} channels"
    words += ", without bias" if call.bias is None else ""
    return words + ("" if call.x.is_contiguous() else ", strided")


@operator(
    backends={"triton": triton_kernels("triton"), "cpu": extension_kernels("cpu", None)},
    cost_class=_cost_class,
    sample=sampled(2**18, "x"),
    check=_check,
)
def depthwise_conv_gelu(
    x: Tensor,
    grid: tuple[int, int],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: GeluVariant = "none",
) -> Tensor:
    """Computes gelu(depthwise_conv(x) + bias), on tokens.

    It is the part between the two linear layers in the Mix-FFN of SegFormer (Xie et al. 2021, section 3.1)
    and in the feed-forward layers of PVT v2 (Wang et al. 2022, section 3.2); upstream ``SegformerMixFFN`` and
    ``PvtV2ConvFeedForwardNetwork`` of transformers.

    Args:
        x: Tokens ``(B, H·W, C)`` in row-major order; float16, bfloat16, float32 or float64.
        grid: ``(H, W)``.
        weight: ``(C, 1, 3, 3)``, a convolution of stride 1, padded by one zero on each side.
        bias: ``(C,)``, or None for 0.
        approximate: As in :func:`cvt_kernels.gelu`.

    Returns:
        The shape of ``x``, contiguous.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, or unknown ``approximate``.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    image = x.unflatten(1, grid).permute(0, 3, 1, 2)
    y = F.conv2d(image, weight, bias, padding=1, groups=weight.shape[0])
    return reference.gelu(y.permute(0, 2, 3, 1).flatten(1, 2), approximate=approximate)
