"""Operations and parts that SegFormer, PVT, PVT v2 and GLPN share, whatever their upstreams call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..ops.attention import attention
from ..ops.conv_embedding import conv_embedding
from ..ops.depthwise_conv_gelu import depthwise_conv_gelu
from ..ops.linear import linear
from ..ops.transformer_block.reduction import matrix_of, squares_of
from .entries import why_norms_unsupported
from .fused import GELU_VARIANTS, apply_linear, check_images, gelu_variant, is_watched, normalize

#: What the activation of a feed-forward network may be: a GELU of PyTorch or of transformers.
GELUS: tuple[type | str, ...] = (nn.GELU, *GELU_VARIANTS)

# Operations -----------------------------------------------------------------------------------------------


def embed_tokens(projection: Any, norm: Any, image: Tensor) -> tuple[Tensor, int, int]:
    """Computes an embedding: images or maps (B, C, H, W) to normalized tokens (B, H'·W', C'), H' and W'."""
    check_images("pixel_values", image, projection)
    if _is_plain_embedding(projection) and image.dtype == norm.weight.dtype == projection.weight.dtype:
        kernel, stride, padding = (
            getattr(projection, name)[0] for name in ("kernel_size", "stride", "padding")
        )
        height, width = ((size + 2 * padding - kernel) // stride + 1 for size in image.shape[2:])
        settings: dict[str, Any] = {"stride": stride, "padding": padding, "eps": norm.eps}
        args = projection.weight, projection.bias, norm.weight, norm.bias
        return conv_embedding(image, *args, **settings), height, width
    image = projection(image)
    height, width = image.shape[2:]
    return normalize(norm, image.flatten(2).transpose(1, 2)), height, width


def _is_plain_embedding(conv: Any) -> bool:
    """Says whether ``conv_embedding`` computes a convolution, which nobody watches."""
    if type(conv) is not nn.Conv2d or is_watched(conv) or conv.padding_mode != "zeros" or conv.groups != 1:
        return False
    sizes = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    return conv.dilation[0] == 1 and all(not isinstance(n, str) and n[0] == n[1] for n in sizes)


def reduce(conv: Any, norm: Any, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Returns the tokens of keys and values: LayerNorm of a convolution whose stride is its kernel size."""
    squares = squares_of(x, grid, conv.kernel_size[0])
    return normalize(norm, linear(squares, matrix_of(conv.weight), conv.bias))


def attend(x: Tensor, kept: Tensor, linears: Sequence[nn.Module], *, num_heads: int, scale: float) -> Tensor:
    """Computes attention (B, T, C) with queries of ``x``, and keys and values of ``kept``."""
    tokens = zip((x, kept, kept), linears, strict=True)
    q, k, v = (apply_linear(layer, each).unflatten(2, (num_heads, -1)) for each, layer in tokens)
    return attention(q, k, v, scale=scale).flatten(2)


def convolve_and_activate(conv: Any, activation: nn.Module, x: Tensor, height: int, width: int) -> Tensor:
    """Computes a depthwise convolution of tokens and the GELU after it."""
    approximate = gelu_variant(activation)
    return depthwise_conv_gelu(x, (height, width), conv.weight, conv.bias, approximate=approximate)


def drop(dropout: Any, x: Tensor) -> Tensor:
    """Calls the dropout after a convolution, on tokens or a map, so that it drops what it drops upstream.

    Random numbers follow the order in memory, and for a batch of one the strides of upstream's views tell
    PyTorch that channels are first.
    """
    is_active = isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0
    if is_active and x.shape[0] == 1:
        x = x.contiguous() if x.ndim == 4 else x.transpose(1, 2).contiguous().transpose(1, 2)
    return dropout(x)


def as_map(tokens: Tensor, grid: Sequence[int]) -> Tensor:
    """Returns the map (B, C, H, W) of tokens, channels last in memory."""
    # In this order a batch of one has the strides by which PyTorch knows that channels are last.
    return tokens.unflatten(1, tuple(grid)).permute(0, 3, 1, 2)


# Reasons --------------------------------------------------------------------------------------------------


def why_reduction_unsupported(conv: Any, norm: Any) -> str | None:
    """Says why a convolution and a LayerNorm make no reduction by a linear layer; None if they do."""
    if conv.groups != 1 or conv.dilation != (1, 1) or conv.padding != (0, 0):
        return "the reduction is not a plain convolution without padding"
    if conv.kernel_size != conv.stride or conv.stride[0] != conv.stride[1]:
        return f"the reduction has stride {conv.stride}, expected its kernel size, {conv.kernel_size}"
    return why_norms_unsupported(norm)


def why_convolution_unsupported(conv: Any) -> str | None:
    """Says why ``depthwise_conv_gelu`` does not compute a convolution; None if it does."""
    if not conv.groups == conv.in_channels == conv.out_channels:
        return "the convolution is not depthwise"
    geometry = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    if geometry != ((3, 3), (1, 1), (1, 1), (1, 1)) or conv.padding_mode != "zeros":
        return "the convolution is not one of 3×3 with stride 1, padded by one zero on each side"
    return None
