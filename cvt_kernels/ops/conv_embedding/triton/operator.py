"""Operator for torch.compile and backend function of the embedding's Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .... import modes
from ....backends import Record
from ...graph_operators import launcher
from .common import MAX_CHANNELS
from .embed import embed, why_not_embedded
from .normalize import normalize
from .patches import gather, why_not_gathered


def _tokens(
    image: Tensor, weight: Tensor, bias: Any, norm_weight: Any, norm_bias: Any, stride: int, padding: int,
    eps: float, class_token: Tensor | None, positions: Any, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    height, width = ((n + 2 * padding - weight.shape[3]) // stride + 1 for n in image.shape[2:])
    tokens = height * width + (class_token is not None)
    return image.new_empty(image.shape[0], tokens, weight.shape[0], dtype=dtype)


@launcher("conv_embedding", _tokens)
def _embedding(
    image: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    stride: int, padding: int, eps: float, class_token: Tensor | None, positions: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns the tokens of an image, by one kernel or by PyTorch's convolution and one kernel."""
    vectors = [
        None if vector is None else vector.contiguous()
        for vector in (bias, norm_weight, norm_bias, class_token, positions)
    ]
    if why_not_gathered(image, weight, stride, padding, class_token) is None:
        return gather(image, weight, *vectors, eps=eps, dtype=dtype)
    if why_not_embedded(image, weight, stride, padding) is None:
        return embed(image, weight, *vectors, stride=stride, padding=padding, eps=eps, dtype=dtype)
    if not modes.convolves_in_tf32(image):
        image = image.contiguous(memory_format=torch.channels_last)
    x = F.conv2d(image, weight, None, stride, padding)
    x = x.permute(0, 2, 3, 1).contiguous().flatten(1, 2)
    return normalize(x, *vectors, eps=eps, dtype=dtype)


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    image, weight, bias, norm_weight, norm_bias, stride, padding, _, class_token, positions = call
    batch, _, height, width = image.shape
    channels, kernel_size = weight.shape[0], weight.shape[3]
    if modes.wants_gradient(image, weight, bias, norm_weight, norm_bias, class_token, positions):
        return "gradients are not computed"
    if batch == 0:
        return "the batch is empty"
    if image.is_cuda and image.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if channels > MAX_CHANNELS:
        return f"tokens have {channels} channels, more than {MAX_CHANNELS}"
    rows, columns = ((n + 2 * padding - kernel_size) // stride + 1 for n in (height, width))
    if rows * columns * channels >= 2**31:
        return "the tokens of one image have 2³¹ elements or more"
    return None


def conv_embedding(call: Record) -> Tensor:
    """Computes ``cvt_kernels.conv_embedding`` for checked arguments.

    Under autocast it convolves in autocast's dtype, as a convolution does, and the tokens have the dtype of
    ``F.layer_norm``, which is float32 on a GPU.
    """
    image, weight, bias, *others = call
    dtype: torch.dtype = image.dtype
    if (lower := modes.autocast_dtype(image)) is not None:
        image, weight, bias = image.to(lower), weight.to(lower), None if bias is None else bias.to(lower)
        dtype = torch.float32 if image.is_cuda else lower
    return _embedding(image, weight, bias, *[*others, dtype])
