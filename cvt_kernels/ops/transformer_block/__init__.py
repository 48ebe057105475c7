"""A block of CvT, SegFormer or PVT as one operator, for inference."""

from __future__ import annotations

import math
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import checks, reference
from ...backends import Implementation, Record
from ...declaration import extension_kernels, operator
from ...records import AnyLinear, Linear, Pool, Reduction, TransformerBlock
from ..conv_projection import geometry_of
from ..cost_classes import first_images, gelu_words, images_within, scores_within, size_class
from . import checking, composed

_SAMPLE = 2**17  # elements
_NAMES = ("q", "k", "v", "proj", "fc1", "fc2")  # of the linear layers


def _cost_class(call: Record) -> str:
    x, block = call.x, call.block
    batch, _, channels = x.shape
    words = gelu_words(block.approximate)
    words += f", {size_class(batch)} images, {channels} channels, {_words_of_tokens(call)}"
    words += f", {block.num_heads} heads of {block.linears[0].weight.shape[0] // block.num_heads}"
    words += f", {block.fc1.weight.shape[0]} hidden"
    words += "" if block.mix is None else ", with a convolution"
    kinds = [_kind_of(layer) for layer in block.layers()]
    for kind in dict.fromkeys(filter(None, kinds)):
        words += f", {kind} in " + " ".join(
            name for name, each in zip(_NAMES, kinds, strict=True) if each == kind
        )
    words += "" if call.rows is None else f", {size_class(call.rows.shape[1], 2)} tokens computed"
    words += "" if call.scores is None else f", with scores of {call.scores}"
    return words + (", in place" if call.inplace else "") + ("" if x.is_contiguous() else ", strided")


def _words_of_tokens(call: Record) -> str:
    """Returns words for the tokens, and for the convolutions or reduction before keys and values."""
    x, block, tokens = call.x, call.block, call.x.shape[1]
    if isinstance(block.reduce, Reduction):
        ratio = block.reduce.weight.shape[3]
        return f"{size_class(tokens)} tokens, keys of {ratio}x{ratio} tokens"
    if not block.convs:
        return f"{size_class(tokens)} tokens"
    pixels, mean = call.grid[0] * call.grid[1], block.convs[0].running_mean
    branches = " ".join(f"{k}x{k}/{s}/{p}/{d}" for k, s, p, d in geometry_of(block.convs))
    words = f"kernel/stride/padding/dilation {branches}, {size_class(pixels)} pixels"
    words += " and a class token" if tokens > pixels else ""
    return words + (", BatchNorm of another dtype" if mean is not None and mean.dtype != x.dtype else "")


def _kind_of(layer: AnyLinear) -> str:
    """Returns the dtype of a quantized layer; "" for other layers."""
    return "" if isinstance(layer, Linear) else checks.dtype_name(layer.weight.dtype)


def _sample(factor: int, call: Record) -> Record:
    images = images_within(_SAMPLE * factor, call.x.shape[0], call.x.numel())
    # Scores in bfloat16 come from a single rounded query: chance would decide which backend is more accurate.
    scores = None if call.x.dtype == torch.bfloat16 else call.scores
    copied = "x" if call.inplace else None
    call = first_images(call._replace(scores=scores), images, "x", "rows", copied=copied)
    return _cut(call, scores_within(factor))


def _cut(call: Record, most: int) -> Record:
    """Returns the call of an image cut to a part of its grid, with about ``most`` scores of attention.

    Stays whole: an image with a class token beside its grid, of which some tokens are chosen, or that is not
    contiguous, since a part of its grid would be.
    """
    x, (height, width), block = call.x, call.grid, call.block
    if x.shape[0] > 1 or call.rows is not None or not x.is_contiguous():
        return call
    if block.reduce is None and block.mix is None:  # tokens have no places
        return call._replace(x=x[:, : max(1, math.isqrt(most // block.num_heads))])
    if x.shape[1] != height * width:
        return call
    reducing = block.reduce if isinstance(block.reduce, Reduction | None) else block.reduce[1]
    keys = height * width if reducing is None else math.prod(reducing.output_grid(call.grid))
    scores = block.num_heads * height * width * keys
    while scores > most:
        height, width = (height // 2, width) if height >= width else (height, width // 2)
        scores //= 4  # half the queries, half the keys
    if (height, width) == call.grid:
        return call
    part = x.unflatten(1, call.grid)[:, :height, :width].flatten(1, 2)
    return call._replace(x=part, grid=(height, width))


def _apply(x: Tensor, layer: AnyLinear) -> Tensor:
    """Computes a linear layer, quantized or not, in plain PyTorch."""
    if isinstance(layer, Linear):
        return F.linear(x, *layer)
    return reference.linear_int8(x, *layer)


def _tokens_to_project(y: Tensor, grid: tuple[int, int], block: TransformerBlock) -> list[Tensor]:
    """Returns the tokens from which Q, K and V are projected, in plain PyTorch."""
    if not isinstance(block.reduce, Reduction):
        convs = block.convs
        return list(reference.conv_projection(y, grid, convs, training=False)) if convs else [y, y, y]
    weight, bias, norm = block.reduce
    kept = F.conv2d(y.unflatten(1, grid).permute(0, 3, 1, 2), weight, bias, weight.shape[-1])
    kept = reference.layer_norm(kept.flatten(2).transpose(1, 2), norm.weight, norm.bias, eps=norm.eps)
    return [y, kept, kept]


@overload
def transformer_block(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    *,
    rows: Tensor | None = None,
    scores: None = None,
    inplace: bool = False,
) -> Tensor: ...


@overload
def transformer_block(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    *,
    rows: Tensor | None = None,
    scores: Pool,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]: ...


@operator(
    backends={
        "cpu": extension_kernels("cpu"),
        "composed": Implementation(composed.transformer_block, ("cpu", "cuda")),
    },
    cost_class=_cost_class,
    sample=_sample,
    defaults=("composed", "reference"),
    check=checking.check,
    check_numbers=("rows", checking.check_row_values),
)
def transformer_block(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    *,
    rows: Tensor | None = None,
    scores: Pool | None = None,
    inplace: bool = False,
) -> Any:
    """Computes a block of CvT, SegFormer or PVT: x + attention(norm1(x)), then x + mlp(norm2(x)).

    With convolutional projections it is CvT's block (Wu et al. 2021, section 3), in evaluation: BatchNorm
    normalizes by the running statistics. With a reduction and a convolution in the MLP it is the block of
    SegFormer (Xie et al. 2021, section 3.1) and PVT v2 (Wang et al. 2022); without that convolution, of PVT
    (Wang et al. 2021). Any of the six linear layers may be quantized, for inference only.

    Args:
        x: Tokens ``(B, T, C)`` as in :func:`cvt_kernels.conv_projection`; no class token with a reduction or
            a convolution in the MLP; any number of tokens without any convolution.
        grid: ``(H, W)`` of the spatial tokens.
        block: The parameters. Kernels may cache packed copies of the weights until these change or die.
        rows: ``(B, K)`` int64, the tokens of each image to compute, ascending, padded by -1; the others stay
            as they are, but still have keys and values. None for all tokens; must be None with a convolution
            in the MLP.
        scores: ``"cls"`` also returns the class token's attention to each key (it must be among the rows),
            ``"avg"`` the attention of the mean query of the other computed tokens; None returns no scores.
            Needs convolutional projections.
        inplace: Whether the result overwrites ``x``. Autograd does not track it.

    Returns:
        The shape and dtype of ``x``; ``x`` itself if ``inplace``. With ``scores`` a second tensor
        ``(B, Nkv)``, float32 (float64 for float64), the probabilities summed over the heads, without
        gradients.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, an invalid setting, ``inplace`` or quantized layers where a
            gradient is required, or ``inplace`` where ``x`` is not contiguous.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    y = reference.layer_norm(x, block.norm1.weight, block.norm1.bias, eps=block.norm1.eps)
    projected = _tokens_to_project(y, grid, block)
    if rows is not None:
        projected[0] = reference.gather_rows(projected[0], rows)
    layers = zip(projected, block.linears, strict=True)
    q, k, v = (_apply(t, layer).unflatten(2, (block.num_heads, -1)) for t, layer in layers)
    y = reference.attention(q, k, v, scale=block.scale).flatten(2)
    y = (x if rows is None else reference.gather_rows(x, rows)) + _apply(y, block.proj)
    hidden = reference.layer_norm(y, block.norm2.weight, block.norm2.bias, eps=block.norm2.eps)
    hidden = _apply(hidden, block.fc1)
    if block.mix is None:
        hidden = reference.gelu(hidden, approximate=block.approximate)
    else:
        hidden = reference.depthwise_conv_gelu(hidden, grid, *block.mix, approximate=block.approximate)
    hidden = _apply(hidden, block.fc2)
    if rows is not None:
        out = reference.scatter_rows(x, rows, y, hidden, inplace=inplace)
    else:
        out = x.copy_(y + hidden) if inplace else y + hidden
    if scores is None:
        return out
    class_tokens = x.shape[1] - grid[0] * grid[1]
    return out, reference.attended_keys(
        q, k, scale=block.scale, pool=scores, class_tokens=class_tokens, rows=rows
    )
