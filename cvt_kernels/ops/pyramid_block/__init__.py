"""A block of SegFormer, PVT or PVT v2 as one operator, for serving.

``onednn`` takes PyTorch's packed linear layers for CPUs. The composition takes other operators of this
package one after the other, each by its own verdict.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ... import checks, reference
from ...backends import Implementation, Record
from ...declaration import facts_of_tensor, native_kernels, operator
from ...records import DepthwiseConv, Linear, Norm, PyramidBlock, Reduction
from ..attention import attention, check_scale
from ..depthwise_conv_gelu import check_depthwise, check_whole_grid, depthwise_conv_gelu
from ..kinds import first_images, gelu_words, images_within, size_class
from ..layer_norm_gelu import check_approximate, check_norm, layer_norm
from ..linear import linear, linear_add, linear_add_layer_norm, linear_gelu
from ..packed_linear import why_unavailable
from . import onednn
from .squares import matrix_of, squares_of

_SHAPE, _WEIGHT, _REDUCING = "(batch, tokens, channels)", "(outputs, inputs)", "(channels, channels, r, r)"
_SAMPLE = 2**17  # elements


# The composition ------------------------------------------------------------------------------------------


def _compose(call: Record) -> Tensor:
    x, grid, inplace = call.x, call.grid, call.inplace
    block: PyramidBlock = call.block
    norm1, norm2, heads = block.norm1, block.norm2, block.num_heads
    y = layer_norm(x, norm1.weight, norm1.bias, eps=norm1.eps)
    kept = y if block.reduction is None else reduce_tokens(y, grid, block.reduction)
    tokens = zip((y, kept, kept), block.linears, strict=True)
    q, k, v = (linear(each, *layer).unflatten(2, (heads, -1)) for each, layer in tokens)
    y = attention(q, k, v, scale=block.scale).flatten(2)
    stream, y = linear_add_layer_norm(
        y, *block.proj, x, norm2.weight, norm2.bias, eps=norm2.eps, inplace=inplace
    )
    if block.conv is None:
        hidden = linear_gelu(y, *block.fc1, approximate=block.approximate)
    else:
        hidden = depthwise_conv_gelu(linear(y, *block.fc1), grid, *block.conv, approximate=block.approximate)
    # Of the stream nobody else has a reference.
    return linear_add(hidden, *block.fc2, stream, inplace=checks.may_change(stream, hidden, *block.fc2))


def reduce_tokens(x: Tensor, grid: tuple[int, int], reduction: Reduction) -> Tensor:
    """Returns the tokens (B, H'·W', C) that a reduction makes of tokens (B, H·W, C), by a linear layer."""
    ratio, norm = reduction.weight.shape[-1], reduction.norm
    squares = squares_of(x, grid, ratio)
    kept = linear(squares, matrix_of(reduction.weight), reduction.bias)
    return layer_norm(kept, norm.weight, norm.bias, eps=norm.eps)


# Checks ---------------------------------------------------------------------------------------------------


def _check(x: Tensor, grid: tuple[int, int], block: PyramidBlock, inplace: bool) -> None:
    checks.check_float_tensor("x", x, _SHAPE)
    checks.check_rank("x", x, 3, _SHAPE)
    _check_parts(block)
    if block.reduction is not None or block.conv is not None:
        check_whole_grid(grid, x)
    else:
        checks.check_grid("grid", grid)
    check_approximate(block.approximate)
    channels = x.shape[2]
    check_norm("block.norm1", block.norm1, x)
    check_norm("block.norm2", block.norm2, x)
    _check_reduction(x, grid, block.reduction)
    _check_layers(x, block, channels)
    checks.check_flag("inplace", inplace)
    if inplace and checks.wants_gradient(x, *block.tensors()):
        raise ValueError("inplace: got True where a gradient is wanted, expected False")
    if inplace and not x.is_contiguous():
        raise ValueError("x: is not contiguous, expected it to be with inplace=True")


def _check_parts(block: PyramidBlock) -> None:
    """Raises TypeError or ValueError for a block whose parts are of other types or numbers."""
    checks.check_kind("block", block, PyramidBlock)
    checks.check_kind("block.linears", block.linears, tuple)
    if len(block.linears) != 3:
        raise ValueError(f"block.linears: got {len(block.linears)}, expected those of Q, of K and of V")
    for i, layer in enumerate(block.linears):
        checks.check_kind(f"block.linears[{i}]", layer, Linear)
    for name in ("proj", "fc1", "fc2"):
        checks.check_kind(f"block.{name}", getattr(block, name), Linear)
    for name in ("norm1", "norm2"):
        checks.check_kind(f"block.{name}", getattr(block, name), Norm)
    if block.reduction is not None:
        checks.check_kind("block.reduction", block.reduction, Reduction)
        checks.check_kind("block.reduction.norm", block.reduction.norm, Norm)
    if block.conv is not None:
        checks.check_kind("block.conv", block.conv, DepthwiseConv)


def _check_reduction(x: Tensor, grid: tuple[int, int], reduction: Reduction | None) -> None:
    if reduction is None:
        return
    channels, weight = x.shape[2], reduction.weight
    checks.check_float_tensor("block.reduction.weight", weight, _REDUCING)
    checks.check_rank("block.reduction.weight", weight, 4, _REDUCING)
    ratio = weight.shape[3]
    checks.check_tensor_like(
        "block.reduction.weight", weight, (channels, channels, ratio, ratio), _REDUCING, x
    )
    if not 1 <= ratio <= min(grid):
        raise ValueError(
            f"block.reduction.weight: got a kernel of {ratio}×{ratio} for a grid of {grid[0]}×{grid[1]}, "
            "expected at most its sizes"
        )
    if reduction.bias is not None:
        checks.check_tensor_like("block.reduction.bias", reduction.bias, (channels,), "(channels,)", x)
    check_norm("block.reduction.norm", reduction.norm, x)


def _check_layers(x: Tensor, block: PyramidBlock, channels: int) -> None:
    """Raises TypeError or ValueError for layers that do not follow one another, and wrong heads."""
    first = block.linears[0].weight
    checks.check_float_tensor("block.linears[0].weight", first, _WEIGHT)
    checks.check_rank("block.linears[0].weight", first, 2, _WEIGHT)
    width, heads, scale = first.shape[0], block.num_heads, block.scale
    for i, layer in enumerate(block.linears):
        _check_linear(f"block.linears[{i}]", layer, (width, channels), x)
    checks.check_int("block.num_heads", heads, 1)
    if width < 1 or width % heads:
        raise ValueError(f"block.num_heads: got {heads!r}, expected a divisor of {width} channels")
    check_scale("block.scale", scale)
    _check_linear("block.proj", block.proj, (channels, width), x)
    checks.check_float_tensor("block.fc1.weight", block.fc1.weight, _WEIGHT)
    checks.check_rank("block.fc1.weight", block.fc1.weight, 2, _WEIGHT)
    hidden = block.fc1.weight.shape[0]
    _check_linear("block.fc1", block.fc1, (hidden, channels), x)
    if block.conv is not None:
        check_depthwise("block.conv.", *block.conv, x, hidden)
    _check_linear("block.fc2", block.fc2, (channels, hidden), x)


def _check_linear(name: str, layer: Linear, shape: tuple[int, int], x: Tensor) -> None:
    checks.check_tensor_like(f"{name}.weight", layer.weight, shape, _WEIGHT, x)
    if layer.bias is not None:
        checks.check_tensor_like(f"{name}.bias", layer.bias, shape[:1], "(outputs,)", x)


# The operator ---------------------------------------------------------------------------------------------


def _kind(call: Record) -> str:
    x, block = call.x, call.block
    batch, tokens, channels = x.shape
    words = gelu_words(block.approximate)
    words += f", {size_class(batch)} images, {channels} channels, {size_class(tokens)} tokens"
    words += f", {block.num_heads} heads of {block.linears[0].weight.shape[0] // block.num_heads}"
    words += f", {block.fc1.weight.shape[0]} hidden"
    if block.reduction is not None:
        ratio = block.reduction.weight.shape[3]
        words += f", keys of {ratio}×{ratio} tokens"
    words += "" if block.conv is None else ", with a convolution"
    return words + (", in place" if call.inplace else "") + ("" if x.is_contiguous() else ", strided")


def _sample(factor: int, call: Record) -> Record:
    images = images_within(_SAMPLE * factor, call.x.shape[0], call.x.numel())
    return first_images(call, images, "x", copied="x" if call.inplace else None)


def _reduce(x: Tensor, grid: tuple[int, int], reduction: Reduction) -> Tensor:
    """Returns the tokens (B, H'·W', C) that a reduction makes of tokens (B, H·W, C), in plain PyTorch."""
    ratio = reduction.weight.shape[-1]
    y = F.conv2d(x.unflatten(1, grid).permute(0, 3, 1, 2), reduction.weight, reduction.bias, ratio)
    norm = reduction.norm
    return reference.layer_norm(y.flatten(2).transpose(1, 2), *norm[:2], eps=norm.eps)


def _facts_of_block(block: PyramidBlock, grad: bool) -> tuple[Any, ...]:
    if type(block) is not PyramidBlock:
        raise TypeError
    reduction = block.reduction
    numbers = block.norm1.eps, block.norm2.eps, reduction and reduction.norm.eps, block.num_heads, block.scale
    kinds = map(type, numbers)
    # Weights of inference mode are not packed: their changes are not counted.
    unpacked = (layer.weight.is_inference() for layer in (*block.linears, block.proj, block.fc1, block.fc2))
    facts = [facts_of_tensor(t, grad) for t in block.tensors()]
    return *numbers, *kinds, *unpacked, block.approximate, block.conv is None, *facts


@operator(
    backends={
        "native": native_kernels(),
        "composed": Implementation(_compose, ("cpu", "cuda")),
        "onednn": Implementation(onednn.pyramid_block, ("cpu",), why_unavailable, onednn.why_unsupported),
    },
    kind=_kind,
    sample=_sample,
    defaults=("composed", "reference"),
    check=lambda call: _check(*call),
    facts={"block": (_facts_of_block,)},
)
def pyramid_block(x: Tensor, grid: tuple[int, int], block: PyramidBlock, *, inplace: bool = False) -> Tensor:
    """Computes a block of SegFormer or PVT: x + attention and x + Mix-FFN, each of a LayerNorm.

    It is the block of SegFormer (Xie et al. 2021, section 3.1) and PVT v2 (Wang et al. 2022), and with no
    convolution that of PVT (Wang et al. 2021), in evaluation.

    Args:
        x: Tokens ``(B, H·W, C)`` in row-major order; float16, bfloat16, float32 or float64. Where the block
            has neither a reduction nor a convolution, there may be any number of them.
        grid: ``(H, W)``.
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
    y = reference.layer_norm(x, *block.norm1[:2], eps=block.norm1.eps)
    kept = y if block.reduction is None else _reduce(y, grid, block.reduction)
    tokens = zip((y, kept, kept), block.linears, strict=True)
    q, k, v = (F.linear(each, *layer).unflatten(2, (block.num_heads, -1)) for each, layer in tokens)
    y = x + F.linear(reference.attention(q, k, v, scale=block.scale).flatten(2), *block.proj)
    hidden = F.linear(reference.layer_norm(y, *block.norm2[:2], eps=block.norm2.eps), *block.fc1)
    if block.conv is None:
        hidden = reference.gelu(hidden, approximate=block.approximate)
    else:
        hidden = reference.depthwise_conv_gelu(hidden, grid, *block.conv, approximate=block.approximate)
    out = y + F.linear(hidden, *block.fc2)
    return x.copy_(out) if inplace else out
