"""The convolutional token embedding: a convolution over an image and the LayerNorm of its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import checks, modes, reference
from ...backends import Record
from ...declaration import extension_kernels, operator, triton_kernels
from ..cost_classes import sampled, size_class
from ..layer_norm_gelu import layer_norm


def _check(call: Any) -> None:
    image, weight = call.image, call.weight
    checks.check_dimensions("image", image, 4, "(batch, channels, height, width)")
    checks.check_dimensions("weight", weight, 4, "(channels, in_channels, k, k)")
    if image.shape[1] != weight.shape[1]:
        raise ValueError(f"image: got {image.shape[1]} channels, expected {weight.shape[1]} as weight")
    kernel_size = weight.shape[3]
    expected = (weight.shape[0], image.shape[1], kernel_size, kernel_size)
    checks.check_shape("weight", weight, expected, "(channels, in_channels, k, k)")
    checks.check_like("weight", weight, "image", image)
    if weight.numel() == 0:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected channels and pixels")
    checks.check_positive("eps", call.eps)
    grid = checks.check_geometry("", kernel_size, image.shape[2:], call.stride, call.padding)
    if any(modes.is_known(size < 1) for size in grid):
        raise ValueError(
            f"image: {image.shape[2]}×{image.shape[3]} pixels are too few for a kernel of {kernel_size}"
        )
    for name in ("bias", "norm_weight", "norm_bias", "class_token"):
        vector, also = getattr(call, name), () if name == "bias" else (torch.float32,)
        checks.check_vector(name, vector, weight.shape[0], image, also=also, x_name="image")
    if call.positions is not None:
        shape = grid[0] * grid[1] + (call.class_token is not None), weight.shape[0]
        meaning, also = "(tokens, channels)", (torch.float32,)
        checks.check_tensor_like("positions", call.positions, shape, meaning, image, also, "image")


def _compose(call: Record) -> Tensor:
    """Computes the embedding by a convolution and ``layer_norm``.

    The image becomes channels last, and so do the tokens without a copy; it stays as it is where that could
    cost precision.
    """
    image, weight, bias, norm_weight, norm_bias, stride, padding, eps, class_token, positions = call
    if not (modes.convolves_in_tf32(image) or needs_channels_first(image, weight)):
        image = image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # channels last, also within vmap
    tokens = F.conv2d(image, weight, None, stride, padding).permute(0, 2, 3, 1).flatten(1, 2)
    norm_weight, norm_bias = (
        None if vector is None else vector.to(tokens.dtype) for vector in (norm_weight, norm_bias)
    )
    tokens = layer_norm(tokens, norm_weight, norm_bias, eps=eps, shift=bias)
    return _finish(tokens, class_token, positions)


def needs_channels_first(image: Tensor, weight: Tensor | None) -> bool:
    """Returns whether an image keeps its channels first, as upstream: on a CPU in training in float32.

    With channels last, oneDNN's results have two to five times the error.
    """
    is_wide = (modes.autocast_dtype(image) or image.dtype).itemsize > 2
    return not image.is_cuda and is_wide and modes.wants_gradient(image, weight)


def _finish(tokens: Tensor, class_token: Tensor | None, positions: Tensor | None) -> Tensor:
    """Returns tokens behind a class token, with positions, in the dtype of the tokens."""
    if class_token is not None:
        class_tokens = class_token.to(tokens.dtype).expand(tokens.shape[0], 1, -1)
        tokens = torch.cat([class_tokens, tokens], dim=1)
    return tokens if positions is None else tokens + positions.to(tokens.dtype)


def _cost_class(call: Record) -> str:
    batch, inputs, height, width = call.image.shape
    geometry = call.weight.shape[3], call.stride, call.padding
    words = f"{size_class(batch)} images of {size_class(height * width)} pixels, {inputs} to "
    words += f"{call.weight.shape[0]} channels, kernel/stride/padding {'/'.join(map(str, geometry))}"
    words += "" if call.class_token is None else ", and a class token"
    words += "" if call.positions is None else ", and positions"
    words += ", convolved in tf32" if modes.convolves_in_tf32(call.image) else ""
    # Of channels last, torch.func.vmap knows the stride alone.
    return words + (", channels last" if call.image.stride(1) == 1 else "")


@operator(
    backends={"triton": triton_kernels("triton.operator"), "cpu": extension_kernels("cpu")},
    cost_class=_cost_class,
    sample=sampled(2**18, "image"),
    check=_check,
    composed=_compose,
)
def conv_embedding(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    stride: int,
    padding: int,
    eps: float = 1e-5,
    class_token: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Computes layer_norm(conv(image)) as tokens, the convolutional token embedding of CvT.

    Wu et al. 2021, section 3.1; upstream ``ConvEmbed`` in Microsoft's ``cls_cvt.py``. With ``positions`` it
    is PVT's patch embedding, Wang et al. 2021, section 3.2; upstream ``PvtPatchEmbeddings`` of transformers.

    The kernels have no gradients. Where one is wanted, PyTorch's convolution, ``layer_norm`` and PyTorch's
    operators for class token and positions compute it.

    Args:
        image: ``(B, in_channels, H, W)``, channels last or not; float16, bfloat16, float32 or float64.
        weight: The convolution's ``(C, in_channels, k, k)``.
        bias: The convolution's ``(C,)``, or None for 0.
        norm_weight: LayerNorm's ``(C,)``, or None for 1. It, ``norm_bias``, ``class_token`` and ``positions``
            may be float32 beside an ``image`` of half precision.
        norm_bias: LayerNorm's ``(C,)``, or None for 0.
        stride: Stride of the convolution in both directions.
        padding: Zero padding on each side.
        eps: Added to the variance.
        class_token: ``(C,)``, written before the tokens of every image; None for no class token.
        positions: ``(H'·W' (+ 1), C)``, added to the tokens of every image, the class token's first; None for
            0. The kernels of a GPU add them before they round to the dtype of the result.

    Returns:
        Contiguous tokens ``(B, H'·W' (+ 1), C)``, the spatial ones in row-major order, of the dtype of
        ``image`` or, under autocast, of ``F.layer_norm`` behind a convolution, which is float32 on a GPU.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, an invalid setting, or an empty output.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    y = F.conv2d(image, weight, bias, stride, padding)
    tokens = reference.layer_norm(y.flatten(2).transpose(1, 2), norm_weight, norm_bias, eps=eps)
    return _finish(tokens, class_token, positions)
