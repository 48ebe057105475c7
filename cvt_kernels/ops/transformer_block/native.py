"""A transformer block on a CPU by the compiled extension (csrc): inference in the place of x.

Weights are packed once for this CPU. A call takes two steps. First a band of an image's rows is normalized,
convolved and multiplied into finished queries, keys and values; then a tile of queries passes through
attention, the linear layer behind it, LayerNorm and the MLP in one go. Nothing else goes through memory.
Where only some tokens are computed, only these have queries and pass through the second step; what they get
is the same to the last bit as if all were computed. Sums are in float32, and products too, but for bfloat16
where the CPU multiplies pairs of it. In front of a quantized layer rows are rounded where they lie, and the
products are of 8-bit integers. The same bits every time, whatever the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import checks, machine
from ...backends import Record, bound_by
from ...records import AnyLinear, ConvBatchNorm, Linear, Norm, TransformerBlock
from .. import packing

machine.load_extension()
_ops = torch.ops.cvt_kernels

_MAX_KERNEL = 16  # kMaxKernel in csrc/conv_projection/cpu_loops.h
_MAX_HEAD_DIM = 256  # kMaxHeadDim in csrc/attention/cpu_loops.h
_MAX_INPUTS = 2**16  # kMostInputs in csrc/linear_int8/cpu_loops.h


def why_unsupported(call: Record) -> str | None:
    """Says why these kernels cannot serve a call; None if they can."""
    x, _, block, rows, _, _ = call
    if torch.compiler.is_compiling():
        return "is not for torch.compile, which cannot trace what keeps packed weights"
    tensors = (x, *block.tensors(), rows)
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors if tensor is not None):
        return "packs plain tensors only"
    if x.dtype == torch.float64:
        return "serves float32, bfloat16 and float16"
    quantized = block.quantized_layers()
    if quantized and x.dtype != torch.float32:
        return f"has quantized layers for float32 only, not for {checks.dtype_name(x.dtype)}"
    if any(layer.weight.dtype != torch.int8 for layer in quantized):
        return "has quantized layers of int8 only"
    if any(layer.weight.shape[1] > _MAX_INPUTS for layer in quantized):
        return f"has quantized layers of up to {_MAX_INPUTS} inputs"
    if checks.autocast_enabled(x):
        return "is not for autocast: convert the model to bfloat16 instead"
    if checks.wants_gradient(x, *block.tensors()):
        return "has no gradients"
    if any(conv.running_mean is None for conv in block.convs):
        return "normalizes by running statistics only"
    kernel = max(conv.weight.shape[3] for conv in block.convs)
    if kernel > _MAX_KERNEL:
        return f"has kernels of up to {_MAX_KERNEL}×{_MAX_KERNEL}, not {kernel}×{kernel}"
    if len({linear.weight.shape[0] for linear in block.linears}) > 1:
        return "needs as many channels of queries as of keys and values"
    head_dim = block.linears[0].weight.shape[0] // block.num_heads
    if head_dim > _MAX_HEAD_DIM:
        return f"heads have {head_dim} channels, more than {_MAX_HEAD_DIM}"
    return None


class _Packed(NamedTuple):
    """The arguments of the operator that a block's parameters make: see ``csrc/module.cpp``."""

    packed: list[Tensor]
    vectors: list[Tensor]
    geometry: list[int]
    widths: list[int]
    weight_scales: list[Tensor]
    input_scales: list[float]


@torch.inference_mode(False)  # in which the copies could not be used elsewhere
@torch.no_grad()
def _pack(block: TransformerBlock) -> _Packed:
    channels = block.fc2.weight.shape[0]
    linears = block.layers()
    norms = [vector for norm in (block.norm1, block.norm2) for vector in _vectors_of(norm, channels)]
    return _Packed(
        packed=[*map(_pack_convolution, block.convs), *map(_pack_linear, linears)],
        vectors=norms + [_vector(linear.bias, linear.weight.shape[0], 0.0) for linear in linears],
        geometry=[n for c in block.convs for n in (c.weight.shape[3], c.stride, c.padding, c.dilation)],
        widths=[block.linears[0].weight.shape[0], block.fc1.weight.shape[0], block.num_heads],
        weight_scales=[_weight_scale(linear) for linear in linears],
        input_scales=[_input_scale(linear) for linear in linears],
    )


def _pack_linear(linear: AnyLinear) -> Tensor:
    pack = _ops.pack_linear if isinstance(linear, Linear) else _ops.pack_linear_int8
    return pack.default(linear.weight)


def _weight_scale(linear: AnyLinear) -> Tensor:
    """Returns the scales of a quantized layer's outputs; an empty tensor of another."""
    return torch.empty(0) if isinstance(linear, Linear) else linear.weight_scale.detach().contiguous()


def _input_scale(linear: AnyLinear) -> float:
    """Returns the scale of a quantized layer's input; 0 where there is none for all rows.

    Raises:
        ValueError: It is not a positive number.
    """
    if isinstance(linear, Linear) or linear.input_scale is None:
        return 0.0
    scale = float(linear.input_scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"input_scale: got {scale}, expected a positive number")
    return scale


def _pack_convolution(conv: ConvBatchNorm) -> Tensor:
    mean, variance = conv.running_mean, conv.running_var
    assert mean is not None
    assert variance is not None
    scale = torch.ones_like(mean) if conv.bn_weight is None else conv.bn_weight
    shift = torch.zeros_like(mean) if conv.bn_bias is None else conv.bn_bias
    norms = (t.detach().contiguous() for t in (scale, shift, mean, variance))
    return _ops.pack_convolution.default(conv.weight.detach(), *norms, conv.eps)


def _vectors_of(norm: Norm, channels: int) -> list[Tensor]:
    return [_vector(norm.weight, channels, 1.0), _vector(norm.bias, channels, 0.0)]


def _vector(given: Tensor | None, size: int, absent: float) -> Tensor:
    """Returns a parameter in float32."""
    return torch.full((size,), absent) if given is None else given.detach().float().contiguous()


def _arguments(call: Record) -> tuple[Any, ...]:
    """Returns what the operator takes besides x, of a block whose tokens are all computed."""
    block = call.block
    scale = block.scale
    if scale is None:
        scale = (block.linears[0].weight.shape[0] // block.num_heads) ** -0.5
    settings = "native", block.num_heads, tuple((*conv[6:9], conv.eps) for conv in block.convs)
    packed = packing.packed(block.fc1.weight, settings, lambda: _pack(block), block.tensors())
    return *call.grid, *packed, block.norm1.eps, block.norm2.eps, scale, block.approximate


def _run(out: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Computes a block in the place of its input."""
    _ops.transformer_block_.default(out, *arguments)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)  # the stable ABI has no kernel that does
    return out


def _bind(call: Record) -> Callable[[Tensor], Tensor] | None:
    if not call.inplace or call.rows is not None or call.scores is not None or not call.x.numel():
        return None
    arguments = _arguments(call)
    return lambda x: _run(x, arguments)


@bound_by(_bind)
def transformer_block(call: Record) -> Any:
    """Computes ``cvt_kernels.transformer_block``, whose checks it relies on."""
    x, grid, block, rows, scores, inplace = call
    out = x if inplace else x.clone(memory_format=torch.contiguous_format)
    received = None if scores is None else _new_scores(x, grid, block)
    if out.numel():
        chosen = () if rows is None and scores is None else (_contiguous(rows), received, scores or "")
        _run(out, (*_arguments(call), *chosen))
    return out if scores is None else (out, received)


def _contiguous(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows.contiguous()


def _new_scores(x: Tensor, grid: tuple[int, int], block: TransformerBlock) -> Tensor:
    height, width = block.convs[1].output_grid(grid)
    class_tokens = x.shape[1] - grid[0] * grid[1]
    return torch.empty(x.shape[0], class_tokens + height * width, dtype=torch.float32)
