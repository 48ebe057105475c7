"""The convolutional token embedding on a CPU by the compiled extension (csrc), for inference.

The pixels under the kernel are copied into rows, a tile of tokens at a time, and multiplied with the packed
weight; the sums are normalized and written once. An image with channels first is copied before, so that the
channels of a pixel are adjacent. Sums and products are in float32; only products of bfloat16 use the CPU's
instructions for pairs, where it has them. PyTorch adds positions behind it, in place. Results are bitwise
deterministic, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import machine
from ...backends import Record, bound_by
from .. import weight_cache

machine.load_extension()
_ops = torch.ops.cvt_kernels


@torch.library.register_fake("cvt_kernels::conv_embedding_inference")
def _(
    image: Tensor, packed: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor,
    class_token: Tensor | None, kernel: int, stride: int, padding: int, eps: float,
) -> Tensor:  # fmt: skip
    height, width = ((size + 2 * padding - kernel) // stride + 1 for size in image.shape[2:])
    tokens = height * width + (class_token is not None)
    return image.new_empty(image.shape[0], tokens, bias.shape[0])


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    image, weight, bias, norm_weight, norm_bias, _, _, _, class_token, positions = call
    return weight_cache.why_unpackable(image, weight, bias, norm_weight, norm_bias, class_token, positions)


class _Packed(NamedTuple):
    """The operator's arguments made of the parameters, see ``csrc/module.cpp``."""

    packed: Tensor
    bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    class_token: Tensor | None


def _bind(call: Record) -> Callable[[Tensor], Tensor]:
    """Binds the operator to its packed parameters; returns a function of an image."""
    _, weight, bias, norm_weight, norm_bias, stride, padding, eps, class_token, positions = call
    channels = weight.shape[0]

    def pack() -> _Packed:
        return _Packed(
            packed=_ops.pack_linear.default(weight.detach().permute(0, 2, 3, 1).flatten(1)),
            bias=weight_cache.vector(bias, channels),
            norm_weight=weight_cache.vector(norm_weight, channels, 1.0),
            norm_bias=weight_cache.vector(norm_bias, channels),
            class_token=None if class_token is None else weight_cache.vector(class_token, channels),
        )

    tensors = (bias, norm_weight, norm_bias, class_token)
    packed = weight_cache.packed(weight, "embedding", pack, tensors)
    arguments = *packed, weight.shape[3], stride, padding, eps
    if positions is None:
        return lambda image: _ops.conv_embedding_inference.default(image, *arguments)
    return lambda image: _ops.conv_embedding_inference.default(image, *arguments).add_(positions)


@bound_by(_bind)
def conv_embedding(call: Record) -> Tensor:
    """Computes ``cvt_kernels.conv_embedding`` for checked arguments."""
    return _bind(call)(call.image)
