"""The reduction of tokens of SegFormer and PVT with the linear layers of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from ... import checks, choose, modes, reference
from ...backends import Implementation, Record, lazy
from ...declaration import operator, triton_kernels
from ..conv_embedding import conv_embedding
from ..conv_linear import WeightAndBias, check_linears
from ..cost_classes import first_images, images_within, size_class
from ..depthwise_conv_gelu import check_whole_grid
from ..linear import linear

if TYPE_CHECKING:
    from . import triton as _triton
else:
    (_triton,) = lazy(__name__, "triton")

_SAMPLE = 2**18  # elements
_SHAPE, _WEIGHT = "(batch, tokens, channels)", "(channels, channels, k, k)"


def _with_tuple(call: Any) -> Any:
    if type(call.linears) is tuple:
        return call
    return call._replace(
        linears=checks.as_tuple("linears", call.linears, "a sequence of pairs (weight, bias)")
    )


def _check(call: Any) -> None:
    x, grid, weight = call.x, call.grid, call.weight
    checks.check_float_tensor("x", x, _SHAPE)
    checks.check_rank("x", x, 3, _SHAPE)
    channels = x.shape[2]
    if not channels:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected {_SHAPE} with at least one channel")
    check_whole_grid(grid, x)
    checks.check_float_tensor("weight", weight, _WEIGHT)
    checks.check_rank("weight", weight, 4, _WEIGHT)
    ratio = weight.shape[3]
    checks.check_tensor_like("weight", weight, (channels, channels, ratio, ratio), _WEIGHT, x)
    if ratio < 1:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected a kernel of at least one pixel")
    for name in ("bias", "norm_weight", "norm_bias"):
        vector = getattr(call, name)
        if vector is not None:
            checks.check_tensor_like(name, vector, (channels,), "(channels,)", x)
    checks.check_positive("eps", call.eps)
    if not call.linears:
        raise ValueError("linears: got none, expected at least one pair (weight, bias)")
    check_linears(x, call.linears)
    if any(modes.is_known(size < ratio) for size in grid):
        raise ValueError(f"grid: got {grid[0]}×{grid[1]}, expected at least {ratio}×{ratio}, the kernel")


def _composition(call: Any) -> Callable[..., tuple[Tensor, ...]] | None:
    x = call.x
    return None if x.is_cuda or choose.may_be_ours("reduction_linear", x.device.type) else _compose


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


def _sample(factor: int, call: Record) -> Record:
    x = call.x
    return first_images(call, images_within(_SAMPLE * factor, x.shape[0], x.numel()), "x")


@operator(
    backends={
        "triton": triton_kernels(_triton.reduction_linear, _triton.why_unsupported),
        "composed": Implementation(_compose, ("cuda",)),
    },
    cost_class=_cost_class,
    sample=_sample,
    arguments=_with_tuple,
    check=_check,
    composition=_composition,
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
