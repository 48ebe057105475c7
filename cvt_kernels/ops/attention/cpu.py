"""Attention on a CPU by the compiled extension (csrc), forward only.

K and V of a head are packed once into the panels that the products read; tiles of up to 32 queries then
pass through up to 224 keys at a time with a running maximum, so that a tile's scores never leave the first
level of cache. Softmax and products are in float32 (float64 for float64); only products of bfloat16 use the
CPU's instructions for pairs, where it has them. Results are bitwise deterministic, whatever the number of
threads.

A bias by position is read from its table, which is packed first so that the biases of a query's keys are
neighbors (``csrc/attention/position.h``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import machine, modes
from ...backends import Record

machine.load_extension()
_op = torch.ops.cvt_kernels.attention_inference.default
_op_by_position = torch.ops.cvt_kernels.attention_by_position.default

_MAX_HEAD_DIM = 256


for _name in ("attention_inference", "attention_by_position"):
    torch.library.register_fake(f"cvt_kernels::{_name}", lambda q, *_: q.new_empty(q.shape))

#: The least magnitude of a scale that a bias by position is divided by.
_LEAST_SCALE = 2.0**-64


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    q, k, v, scale, bias, dropout_p, position = call
    if modes.wants_gradient(q, k, v, None if position is None else position.table):
        return "has no gradients on a CPU"
    if bias is not None:
        return "takes no bias on a CPU"
    if dropout_p > 0:
        return "dropout of the probabilities is not supported"
    if q.shape[3] > _MAX_HEAD_DIM:
        return f"heads have {q.shape[3]} channels, more than {_MAX_HEAD_DIM}"
    if position is not None and scale is not None and abs(scale) < _LEAST_SCALE:
        return f"the scale {scale} is too close to 0 to divide a bias by position by it"
    return None


def attention(call: Record) -> Tensor:
    """Computes ``cvt_kernels.attention`` for checked arguments; under autocast, in autocast's dtype."""
    q, k, v, scale, _, _, position = call
    if scale is None:
        scale = q.shape[3] ** -0.5
    if (dtype := modes.autocast_dtype(q)) is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if position is None:
        return _op(q, k, v, scale)
    table = position.table.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return _op_by_position(q, k, v, scale, table, position.rows, *position.key_grid, position.stride)
