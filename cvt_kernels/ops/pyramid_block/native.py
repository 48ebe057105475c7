"""Blocks of SegFormer and PVT on a CPU by the compiled extension (csrc): inference.

Weights are packed once for this CPU. A call takes three steps: keys and values, of what the reduction makes
of the tokens; tiles of queries through attention and the linear layer behind it; and the feed-forward layers,
a few rows of tokens at a time. Nothing but keys, values and the tokens after attention goes through memory:
of the hidden channels there are as a rule no more than those of a few rows, which stay in the cache. Sums are
in float32, and products too, but for bfloat16 where the CPU multiplies pairs of it. The same bits every time,
whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import checks, machine
from ...backends import Record, bound_by
from ...records import DepthwiseConv, Linear, Norm, PyramidBlock, Reduction
from .. import packing

machine.load_extension()
_ops = torch.ops.cvt_kernels

_MAX_HEAD_DIM = 256  # kMaxHeadDim in csrc/attention/cpu_loops.h


def why_unsupported(call: Record) -> str | None:
    """Says why these kernels cannot serve a call; None if they can."""
    x, block = call.x, call.block
    if torch.compiler.is_compiling():
        return "is not for torch.compile, which cannot trace what keeps packed weights"
    tensors = (x, *block.tensors())
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors if tensor is not None):
        return "packs plain tensors only"
    if x.dtype == torch.float64:
        return "serves float32, bfloat16 and float16"
    if checks.autocast_enabled(x):
        return "is not for autocast: convert the model to bfloat16 instead"
    if checks.wants_gradient(*tensors):
        return "has no gradients"
    head_dim = block.linears[0].weight.shape[0] // block.num_heads
    if head_dim > _MAX_HEAD_DIM:
        return f"heads have {head_dim} channels, more than {_MAX_HEAD_DIM}"
    return None


class _Packed(NamedTuple):
    """The arguments of the operator that a block's parameters make: see ``csrc/module.cpp``."""

    packed: list[Tensor]
    reduction: list[Tensor]
    conv: Tensor | None
    vectors: list[Tensor]
    widths: list[int]


@torch.inference_mode(False)  # in which the copies could not be used elsewhere
@torch.no_grad()
def _pack(block: PyramidBlock) -> _Packed:
    channels, reduction = block.fc2.weight.shape[0], block.reduction
    layers = (*block.linears, block.proj, block.fc1, block.fc2)
    vectors = [*_vectors_of(block.norm1, channels), *_vectors_of(block.norm2, channels), *map(_bias, layers)]
    if reduction is not None:
        vectors += [_bias(reduction), *_vectors_of(reduction.norm, channels)]
    return _Packed(
        packed=[_ops.pack_linear.default(layer.weight) for layer in layers],
        reduction=[] if reduction is None else _pack_rows(reduction.weight),
        conv=None if block.conv is None else _pack_convolution(block.conv),
        vectors=vectors,
        widths=[block.linears[0].weight.shape[0], block.fc1.weight.shape[0], block.num_heads],
    )


def _pack_rows(weight: Tensor) -> list[Tensor]:
    """Returns a packed linear layer for each row of the weight of a reduction."""
    rows = weight.permute(2, 0, 3, 1).flatten(2)
    return [_ops.pack_linear.default(row) for row in rows]


def _pack_convolution(conv: DepthwiseConv) -> Tensor:
    bias = None if conv.bias is None else conv.bias.contiguous()
    return _ops.pack_depthwise.default(conv.weight.contiguous(), bias)


def _vectors_of(norm: Norm, channels: int) -> list[Tensor]:
    return [_vector(norm.weight, channels, 1.0), _vector(norm.bias, channels, 0.0)]


def _bias(layer: Linear | Reduction) -> Tensor:
    return _vector(layer.bias, layer.weight.shape[0], 0.0)


def _vector(given: Tensor | None, size: int, absent: float) -> Tensor:
    """Returns a parameter in float32."""
    return torch.full((size,), absent) if given is None else given.detach().float().contiguous()


def _bind(call: Record) -> Callable[[Tensor], Tensor] | None:
    """Returns the operator on tokens, with the parameters packed; None for none and for results in place."""
    if call.inplace or not call.x.numel():
        return None
    arguments = _arguments(call)
    return lambda x: _ops.pyramid_block_packed.default(x.contiguous(), *arguments)


def _arguments(call: Record) -> tuple[Any, ...]:
    """Returns what the operator takes besides tokens."""
    x, grid, block, _ = call
    scale = block.scale
    if scale is None:
        scale = (block.linears[0].weight.shape[0] // block.num_heads) ** -0.5
    eps = [block.norm1.eps, block.norm2.eps]
    if block.reduction is not None:
        eps.append(block.reduction.norm.eps)
    if block.reduction is None and block.conv is None:
        grid = 1, x.shape[1]
    settings = "native pyramid", block.num_heads
    packed = packing.packed(block.fc1.weight, settings, lambda: _pack(block), block.tensors())
    return *grid, *packed, eps, scale, block.approximate


@bound_by(_bind)
def pyramid_block(call: Record) -> Tensor:
    """Computes ``cvt_kernels.pyramid_block``, whose checks it relies on."""
    x, inplace = call.x, call.inplace
    if not x.numel():
        return x if inplace else x.clone(memory_format=torch.contiguous_format)
    out = _ops.pyramid_block_packed.default(x.contiguous(), *_arguments(call))
    return x.copy_(out) if inplace else out
