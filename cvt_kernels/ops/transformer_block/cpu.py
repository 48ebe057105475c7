"""Transformer blocks on a CPU by the compiled extension (csrc): inference, with weights packed for this CPU.

There are two operators. ``transformer_block_`` computes blocks with convolutional projections, in place and
in two steps: a band of an image's rows is normalized, convolved and multiplied into finished queries, keys
and values; then a tile of queries passes through attention, the linear layer behind it, LayerNorm and the MLP
in one go. Where only some tokens are computed, only these have queries and pass through the second step;
their results are bitwise the same as if all were computed. In front of a quantized layer rows are rounded in
the cache, and the products are of 8-bit integers.

``pyramid_block_packed`` computes blocks with a reduction, or none, in three steps: keys and values; tiles of
queries through attention and the linear layer behind it; and the MLP, a few rows of tokens at a time, whose
hidden channels stay in the cache. Quantized layers and some tokens are as above.

Sums and products are in float32; only products of bfloat16 use the CPU's instructions for pairs, where it has
fast ones. Results are bitwise deterministic, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import machine
from ...backends import Record, bound_by
from ...records import AnyLinear, ConvBatchNorm, Linear, Norm, Reduction, TransformerBlock
from .. import weight_cache
from ..autograd import count_change

machine.load_extension()
_ops = torch.ops.cvt_kernels

_MAX_KERNEL = 16  # kMaxKernel in csrc/conv_projection/cpu_loops.h
_MAX_HEAD_DIM = 256  # kMaxHeadDim in csrc/attention/cpu_loops.h
_MAX_INPUTS = 2**16  # kMostInputs in csrc/linear_int8/cpu_loops.h


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x, block = call.x, call.block
    reason = weight_cache.why_unpackable(x, *block.tensors(), call.rows)
    if reason is not None:
        return reason
    head_dim = block.linears[0].weight.shape[0] // block.num_heads
    if head_dim > _MAX_HEAD_DIM:
        return f"heads have {head_dim} channels, more than {_MAX_HEAD_DIM}"
    quantized = block.quantized_layers()
    if any(layer.weight.dtype != torch.int8 for layer in quantized):
        return "has quantized layers of int8 only"
    if any(layer.weight.shape[1] > _MAX_INPUTS for layer in quantized):
        return f"has quantized layers of up to {_MAX_INPUTS} inputs"
    return _why_convolutional_unsupported(call) if block.convs else None


def _why_convolutional_unsupported(call: Record) -> str | None:
    block = call.block
    if block.mix is not None:
        return "has no convolution in the MLP of a block with convolutional projections"
    if any(conv.running_mean is None for conv in block.convs):
        return "normalizes by running statistics only"
    kernel = max(conv.weight.shape[3] for conv in block.convs)
    if kernel > _MAX_KERNEL:
        return f"has kernels of up to {_MAX_KERNEL}×{_MAX_KERNEL}, not {kernel}×{kernel}"
    return None


# Packed parameters ----------------------------------------------------------------------------------------
#
# Both return arguments of the operators in their order: see ``csrc/module.cpp``.


def _pack_convolutional(block: TransformerBlock) -> tuple[Any, ...]:
    layers, scales = _pack_layers(block)
    packed = [*map(_pack_projection, block.convs), *layers]
    geometry = [n for c in block.convs for n in (c.weight.shape[3], c.stride, c.padding, c.dilation)]
    return packed, _vectors(block), geometry, _widths(block), scales


def _pack_pyramidal(block: TransformerBlock) -> tuple[Any, ...]:
    vectors, rows, conv, reduction = _vectors(block), [], None, block.reduce
    if isinstance(reduction, Reduction):
        vectors += [_bias(reduction), *_vectors_of(reduction.norm, reduction.weight.shape[0])]
        # a linear layer for each row of its weight
        rows = [_ops.pack_linear.default(row) for row in reduction.weight.permute(2, 0, 3, 1).flatten(2)]
    if block.mix is not None:
        weight, bias = block.mix
        conv = _ops.pack_depthwise.default(weight.contiguous(), None if bias is None else bias.contiguous())
    packed, scales = _pack_layers(block)
    return packed, rows, conv, vectors, _widths(block), scales


def _pack_layers(block: TransformerBlock) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the packed weights, and the scales of quantized layers' outputs, empty for other layers."""
    packed, scales = [], []
    for layer in block.layers():
        if isinstance(layer, Linear):
            packed.append(_ops.pack_linear.default(layer.weight))
            scales.append(torch.empty(0))
        else:
            packed.append(_ops.pack_linear_int8.default(layer.weight))
            scales.append(layer.weight_scale.detach().contiguous())
    return packed, scales


def _pack_projection(conv: ConvBatchNorm) -> Tensor:
    mean, variance = conv.running_mean, conv.running_var
    assert mean is not None
    assert variance is not None
    scale = torch.ones_like(mean) if conv.bn_weight is None else conv.bn_weight
    shift = torch.zeros_like(mean) if conv.bn_bias is None else conv.bn_bias
    norms = (t.detach().contiguous() for t in (scale, shift, mean, variance))
    return _ops.pack_convolution.default(conv.weight.detach(), *norms, conv.eps)


def _vectors(block: TransformerBlock) -> list[Tensor]:
    """Returns the weights and biases of the LayerNorms, then the biases of the linear layers."""
    channels = block.fc2.weight.shape[0]
    norms = [vector for norm in (block.norm1, block.norm2) for vector in _vectors_of(norm, channels)]
    return norms + [_bias(linear) for linear in block.layers()]


def _vectors_of(norm: Norm, channels: int) -> list[Tensor]:
    return [weight_cache.vector(norm.weight, channels, 1.0), weight_cache.vector(norm.bias, channels)]


def _bias(layer: AnyLinear | Reduction) -> Tensor:
    return weight_cache.vector(layer.bias, layer.weight.shape[0])


def _widths(block: TransformerBlock) -> list[int]:
    return [block.linears[0].weight.shape[0], block.fc1.weight.shape[0], block.num_heads]


# The operators --------------------------------------------------------------------------------------------


def _scale_of(block: TransformerBlock) -> float:
    head_dim = block.linears[0].weight.shape[0] // block.num_heads
    return float(head_dim**-0.5) if block.scale is None else block.scale


def _arguments_of_convolutional(call: Record) -> tuple[Any, ...]:
    """Returns the operator's arguments besides x, for a call that computes all tokens."""
    block = call.block
    settings = "cpu", block.num_heads, tuple((*conv[6:9], conv.eps) for conv in block.convs)
    packed = weight_cache.packed(
        block.fc1.weight, settings, lambda: _pack_convolutional(block), block.packed_tensors()
    )
    return *call.grid, *packed, block.norm1.eps, block.norm2.eps, _scale_of(block), block.approximate


def _arguments_of_pyramidal(call: Record) -> tuple[Any, ...]:
    """Returns the operator's arguments besides x."""
    grid, block = call.grid, call.block
    eps = [block.norm1.eps, block.norm2.eps]
    if block.reduce is not None:
        eps.append(block.reduce.norm.eps)
    elif block.mix is None:
        grid = call.x.shape[1], 1  # rows of one token, which threads can share
    settings = "pyramid", block.num_heads
    packed = weight_cache.packed(block.fc1.weight, settings, lambda: _pack_pyramidal(block), block.tensors())
    return *grid, *packed, eps, _scale_of(block), block.approximate


def _run_in_place(out: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Computes a block with convolutional projections in place."""
    _ops.transformer_block_.default(out, *arguments)
    count_change(out)
    return out


def _bind(call: Record) -> Callable[[Tensor], Tensor] | None:
    """Binds the operator to its packed parameters; returns a function of the tokens, or None."""
    in_place = bool(call.block.convs)  # as the operator computes it
    if call.inplace != in_place or call.scores is not None or not call.x.numel():
        return None
    if in_place:
        arguments = _arguments_of_convolutional(call)
        if call.rows is not None:
            arguments += call.rows, None, ""
        return lambda x: _run_in_place(x, arguments)
    arguments = *_arguments_of_pyramidal(call), call.rows
    return lambda x: _ops.pyramid_block_packed.default(x.contiguous(), *arguments)


@bound_by(_bind)
def transformer_block(call: Record) -> Any:
    """Computes ``cvt_kernels.transformer_block`` for checked arguments."""
    return _convolutional(call) if call.block.convs else _pyramidal(call)


def _convolutional(call: Record) -> Any:
    x, grid, block, rows, scores, inplace = call
    out = x if inplace else x.clone(memory_format=torch.contiguous_format)
    received = None
    if scores is not None:
        height, width = block.convs[1].output_grid(grid)
        keys = x.shape[1] - grid[0] * grid[1] + height * width
        received = torch.empty(x.shape[0], keys, dtype=torch.float32)
    if out.numel():
        chosen: tuple[Any, ...] = ()
        if rows is not None or scores is not None:
            chosen = None if rows is None else rows.contiguous(), received, scores or ""
        _run_in_place(out, (*_arguments_of_convolutional(call), *chosen))
    return out if scores is None else (out, received)


def _pyramidal(call: Record) -> Tensor:
    x, inplace = call.x, call.inplace
    if not x.numel():
        return x if inplace else x.clone(memory_format=torch.contiguous_format)
    rows = None if call.rows is None else call.rows.contiguous()
    out = _ops.pyramid_block_packed.default(x.contiguous(), *_arguments_of_pyramidal(call), rows)
    return x.copy_(out) if inplace else out
