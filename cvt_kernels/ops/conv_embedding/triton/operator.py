"""The Triton kernels of the embedding as PyTorch sees them: torch.compile, and the backend's functions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .... import checks
from .common import MAX_CHANNELS
from .embed import embed, why_not_embedded
from .normalize import normalize


def _embedding(
    image: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    stride: int, padding: int, eps: float, class_token: Tensor | None,
) -> Tensor:  # fmt: skip
    """Returns the tokens of an image, by one kernel or by PyTorch's convolution and one kernel."""
    bias, norm_weight, norm_bias, class_token = (
        None if vector is None else vector.contiguous()
        for vector in (bias, norm_weight, norm_bias, class_token)
    )
    if why_not_embedded(image, weight, stride, padding) is None:
        return embed(
            image, weight, bias, norm_weight, norm_bias, stride=stride, padding=padding, eps=eps,
            class_token=class_token,
        )  # fmt: skip
    image = image.contiguous(memory_format=torch.channels_last)
    x = F.conv2d(image, weight, None, stride, padding)
    x = x.permute(0, 2, 3, 1).contiguous().flatten(1, 2)
    return normalize(x, bias, norm_weight, norm_bias, eps=eps, class_token=class_token)


@torch.library.custom_op("cvt_kernels::conv_embedding", mutates_args=())
def _embedding_op(
    image: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    stride: int, padding: int, eps: float, class_token: Tensor | None,
) -> Tensor:  # fmt: skip
    return _embedding(image, weight, bias, norm_weight, norm_bias, stride, padding, eps, class_token)


@_embedding_op.register_fake
def _(image, weight, bias, norm_weight, norm_bias, stride, padding, eps, class_token):
    height, width = ((n + 2 * padding - weight.shape[3]) // stride + 1 for n in image.shape[2:])
    return image.new_empty(image.shape[0], height * width + (class_token is not None), weight.shape[0])


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(
    image: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None, *, stride: int, padding: int, eps: float, class_token: Tensor | None,
) -> str | None:  # fmt: skip
    """Says why these kernels cannot serve a call; None if they can."""
    batch, _, height, width = image.shape
    channels, kernel_size = weight.shape[0], weight.shape[3]
    if checks.wants_gradient(image, weight, bias, norm_weight, norm_bias, class_token):
        return "gradients are not computed"
    if checks.autocast_dtype(image) is not None:
        return "autocast is not supported"
    if batch == 0:
        return "the batch is empty"
    if image.is_cuda and image.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if channels > MAX_CHANNELS:
        return f"tokens have {channels} channels, more than {MAX_CHANNELS}"
    rows, columns = ((n + 2 * padding - kernel_size) // stride + 1 for n in (height, width))
    if rows * columns * channels >= 2**31:
        return "one image has 2³¹ elements of tokens or more"
    return None


def conv_embedding(
    image: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None, *, stride: int, padding: int, eps: float, class_token: Tensor | None,
) -> Tensor:  # fmt: skip
    """Computes ``cvt_kernels.conv_embedding``, whose checks it relies on."""
    operator = _embedding_op if torch.compiler.is_compiling() else _embedding
    return operator(image, weight, bias, norm_weight, norm_bias, stride, padding, eps, class_token)
