"""A convolutional transformer block as one operator, for serving."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ... import backends, checks, dispatch
from ...reference import TransformerBlock
from ..attention import attention
from ..conv_linear import conv_linear
from ..conv_projection import check_arguments, geometry_of
from ..layer_norm_gelu import check_approximate, check_layer_norm, layer_norm
from ..linear import check_linear, linear_add, linear_add_layer_norm, linear_gelu
from ..registration import images_within, register_composed, register_native, register_reference, size_class

_SAMPLE = 2**17  # elements


def transformer_block(
    x: Tensor, grid: tuple[int, int], block: TransformerBlock, *, inplace: bool = False
) -> Tensor:
    """Computes a block of CvT: x + attention and x + MLP, each of a LayerNorm (Wu et al. 2021, section 3).

    BatchNorm normalizes by the running statistics.

    Args:
        x: Tokens ``(B, T, C)`` as of :func:`cvt_kernels.conv_projection`.
        grid: ``(H, W)`` of the spatial tokens.
        block: The parameters. Kernels may keep packed copies of its weights for as long as these live and are
            not changed.
        inplace: Whether the result takes the place of ``x``. Autograd does not follow it.

    Returns:
        The shape and dtype of ``x``; ``x`` itself if ``inplace``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, an invalid setting, or ``inplace`` where a gradient is wanted or
            ``x`` is not contiguous.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    _check(x, grid, block, inplace)
    return dispatch.call("transformer_block", x, grid, block, inplace=inplace)


def _compose(x: Tensor, grid: tuple[int, int], block: TransformerBlock, *, inplace: bool) -> Tensor:
    norm1, norm2 = block.norm1, block.norm2
    y = layer_norm(x, norm1.weight, norm1.bias, eps=norm1.eps)
    projected = conv_linear(y, grid, block.convs, block.linears)
    q, k, v = (tokens.unflatten(2, (block.num_heads, -1)) for tokens in projected)
    y = attention(q, k, v, scale=block.scale).flatten(2)
    stream, y = linear_add_layer_norm(
        y, *block.proj, x, norm2.weight, norm2.bias, eps=norm2.eps, inplace=inplace
    )
    y = linear_gelu(y, *block.fc1, approximate=block.approximate)
    return linear_add(y, *block.fc2, stream, inplace=not checks.wants_gradient(y, stream, *block.fc2))


# Checks ---------------------------------------------------------------------------------------------------


def _check(x: Tensor, grid: tuple[int, int], block: TransformerBlock, inplace: bool) -> None:
    if not isinstance(block, TransformerBlock):
        raise TypeError(f"block: got {type(block).__name__}, expected TransformerBlock")
    check_arguments(x, grid, block.convs, training=False)
    for name, count in (("convs", len(block.convs)), ("linears", len(block.linears))):
        if count != 3:
            raise ValueError(f"block.{name}: got {count}, expected those of Q, of K and of V")
    for norm in (block.norm1, block.norm2):
        check_layer_norm(x, norm.weight, norm.bias, norm.eps)
    check_approximate(block.approximate)
    _check_layers(x, block)
    if inplace and checks.wants_gradient(*_tensors(x, block)):
        raise ValueError("inplace: got True where a gradient is wanted, expected False")
    if inplace and not x.is_contiguous():
        raise ValueError("x: is not contiguous, expected it to be with inplace=True")


def _check_layers(x: Tensor, block: TransformerBlock) -> None:
    """Raises TypeError or ValueError for linear layers that do not follow one another."""
    channels = x.shape[2]
    widths = []
    for name, linear in zip(("q", "k", "v"), block.linears, strict=True):
        check_linear(x, *linear, name=name)
        widths.append(linear.weight.shape[0])
    heads = block.num_heads
    if not isinstance(heads, int) or heads < 1 or any(width % heads for width in widths):
        raise ValueError(f"block.num_heads: got {heads!r}, expected a divisor of {widths} channels")
    if widths[0] != widths[1]:
        raise ValueError(
            f"block.linears: got {widths[0]} channels of Q and {widths[1]} of K, expected as many"
        )
    hidden = block.fc1.weight.shape[0]
    check_linear(x, *block.fc1, name="fc1")
    for name, linear, inputs in (("proj", block.proj, widths[2]), ("fc2", block.fc2, hidden)):
        shape = (channels, inputs)
        checks.check_float_tensor(f"{name}_weight", linear.weight, "(channels, inputs)")
        checks.check_shape(f"{name}_weight", linear.weight, shape, "(channels, inputs)")
        checks.check_like(f"{name}_weight", linear.weight, "x", x)
        if linear.bias is not None:
            checks.check_float_tensor(f"{name}_bias", linear.bias, "(channels,)")
            checks.check_shape(f"{name}_bias", linear.bias, (channels,), "(channels,)")
            checks.check_like(f"{name}_bias", linear.bias, "x", x)


def _tensors(x: Tensor, block: TransformerBlock) -> list[Tensor]:
    return [t for t in pytree.tree_leaves((x, block)) if isinstance(t, Tensor)]


# Registration ---------------------------------------------------------------------------------------------


def _signature(
    x: Tensor, grid: tuple[int, int], block: TransformerBlock, *, inplace: bool
) -> tuple[Any, ...]:
    gradient = checks.wants_gradient(*_tensors(x, block))
    hidden = block.fc1.weight.shape[0]
    widths = tuple([linear.weight.shape[0] for linear in block.linears])
    geometry = geometry_of(block.convs)
    settings = widths, hidden, block.num_heads, block.approximate, inplace
    return gradient, x.shape, grid, x.is_contiguous(), geometry, settings


def _shape_class(
    gradient: bool,
    shape: tuple[int, ...],
    grid: tuple[int, int],
    contiguous: bool,
    geometry: tuple[tuple[int, ...], ...],
    settings: tuple[Any, ...],
) -> str:
    widths, hidden, heads, approximate, inplace = settings
    batch, tokens, channels = shape
    pixels = grid[0] * grid[1]
    branches = " ".join(f"{k}x{k}/{s}/{p}/{d}" for k, s, p, d in geometry)
    words = "exact" if approximate == "none" else approximate
    words += f", {size_class(batch)} images of {size_class(pixels, 2)} pixels"
    words += " and a class token" if tokens > pixels else ""
    words += f", {channels} channels, {heads} heads of {' '.join(map(str, widths))}, {hidden} hidden"
    words += f", kernel/stride/padding/dilation {branches}" + (", in place" if inplace else "")
    return words + ("" if contiguous else ", strided")


def _sample(
    factor: int, x: Tensor, grid: tuple[int, int], block: TransformerBlock, *, inplace: bool
) -> tuple[Any, dict[str, Any]]:
    images = x[: images_within(_SAMPLE * factor, x.shape[0], x.numel())]
    # A trial in place must not change what the caller has.
    return (images.clone() if inplace else images, grid, block), {"inplace": inplace}


register_native("transformer_block", __name__, forward_only=True)
register_composed("transformer_block", _compose, devices=("cpu", "cuda"))
register_reference("transformer_block")
backends.describe("transformer_block", backends.Operator(_signature, _shape_class, _sample))
