"""The reduction of tokens of SegFormer and PVT with the linear layers of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ... import checks, modes, reference
from ...backends import Record
from ...declaration import operator, triton_kernels
from ..conv_embedding import conv_embedding
from ..conv_linear import WeightAndBias, check_linears
from ..cost_classes import sampled, size_class
from ..depthwise_conv_gelu import check_whole_grid
from ..linear import linear

_SHAPE, _WEIGHT = "(batch, tokens, channels)", "(channels, channels, k, k)"


def _check(call: Any) -> None:
    x, grid, weight = call.x, call.grid, call.weight
    checks.check_dimensions("x", x, 3, _SHAPE)
    channels = x.shape[2]
    if not channels:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected {_SHAPE} with at least one channel")
    check_whole_grid(grid, x)
    checks.check_dimensions("weight", weight, 4, _WEIGHT)
    ratio = weight.shape[3]
    checks.check_tensor_like("weight", weight, (channels, channels, ratio, ratio), _WEIGHT, x)
    if ratio < 1:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected a kernel of at least one pixel")
    for name in ("bias", "norm_weight", "norm_bias"):
        checks.check_vector(name, getattr(call, name), channels, x)
    checks.check_positive("eps", call.eps)
    if not call.linears:
        raise ValueError("linears: got none, expected at least one pair (weight, bias)")
    check_linears(x, call.linears)
    if any(modes.is_known(size < ratio) for size in grid):
        raise ValueError(f"grid: got {grid[0]}×{grid[1]}, expected at least {ratio}×{ratio}, the kernel")


def _compose(call: Record) -> tuple[Tensor, ...]:
    x, grid, weight, bias, norm_weight, norm_bias, linears, eps = call
    image = x.unflatten(1, grid).permute(0, 3, 1, 2)
    settings: dict[str, Any] = {"stride": weight.shape[3], "padding": 0, "eps": eps}
    kept = conv_embedding(image, weight, bias, norm_weight, norm_bias, **settings)
    return tuple(linear(kept, *each) for each in linears)


def _cost_class(call: Record) -> str:
    batch, tokens, channels = call.x.shape
    outputs = " ".join(str(weight.shape[0]) for weight, _ in call.linears)
    words = f"{size_class(batch)} images of {size_class(tokens)} tokens, windows of {call.weight.shape[3]}, "
    words += f"{channels} to {outputs} channels"
    words += "" if call.weight.is_contiguous() else ", packed weight"
    return words + ("" if call.x.is_contiguous() else ", strided")


@operator(
    backends={"triton": triton_kernels("triton")},
    cost_class=_cost_class,
    sample=sampled(2**18, "x"),
    sequences={"linears": "a sequence of pairs (weight, bias)"},
    check=_check,
    composed=_compose,
)
def reduction_linear(
    x: Tensor,
    grid: tuple[int, int],
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linears: Sequence[WeightAndBias],
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, ...]:
    """Computes linearᵢ(layer_norm(conv(x))) of tokens for every layer, where windows are side by side.

    The keys and values of attention with a spatial reduction: SegFormer (Xie et al. 2021, section 3.1) and
    PVT (Wang et al. 2021, section 3.3).

    Args:
        x: Tokens ``(B, H·W, C)``; float16, bfloat16, float32 or float64.
        grid: ``(H, W)``. Rows and columns that fill no window are left out.
        weight: The convolution's ``(C, C, k, k)``; its stride is k. Channels may lie last.
        bias: The convolution's ``(C,)``, or None for 0.
        norm_weight: LayerNorm's ``(C,)``, or None for 1.
        norm_bias: LayerNorm's ``(C,)``, or None for 0.
        linears: Weight ``(outputs, C)`` and bias ``(outputs,)`` or None of each layer.
        eps: Added to the variance.

    Returns:
        One ``(B, H//k · W//k, outputs)`` per layer.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, an invalid setting, or a grid smaller than a window.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    image = x.unflatten(1, grid).permute(0, 3, 1, 2)
    tokens = F.conv2d(image, weight, bias, weight.shape[3]).flatten(2).transpose(1, 2)
    tokens = reference.layer_norm(tokens, norm_weight, norm_bias, eps=eps)
    return tuple(F.linear(tokens, *each) for each in linears)
