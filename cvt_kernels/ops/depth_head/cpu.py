"""The depth head on a CPU by the compiled extension (csrc), for inference.

A product over channels and an interpolation between pixels commute: the nine taps of the first convolution
multiply the map at its own size, and up to 16 rows of it pass through all the rest while they are in the
cache. Everything is in float32. Results are bitwise deterministic, whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import machine
from ...backends import Record
from .. import weight_cache
from . import SCALE

machine.load_extension()
_ops = torch.ops.cvt_kernels

_MOST_SIDE = 2**20  # kMostSide in csrc/depth_head/cpu_operators.cpp


@torch.library.register_fake("cvt_kernels::depth_head_packed")
def _(x: Tensor, taps: Tensor, bias: Tensor, last: Tensor, last_bias: float, max_depth: float) -> Tensor:
    return x.new_empty(x.shape[0], SCALE * x.shape[2], SCALE * x.shape[3])


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    if max(call.x.shape[2:]) > _MOST_SIDE:
        return f"serves heights and widths of up to {_MOST_SIDE}"
    return weight_cache.why_unpackable(*call[:5])


def depth_head(call: Record) -> Tensor:
    """Computes ``cvt_kernels.depth_head`` for checked arguments."""
    x, weight, bias, last_weight, last_bias, max_depth = call

    def pack() -> tuple[Any, ...]:
        channels = weight.shape[0]
        taps = weight.detach().float().permute(0, 2, 3, 1).reshape(channels, 9, -1).contiguous()
        vector = weight_cache.vector(bias, channels)
        last = last_weight.detach().float().reshape(channels, 9).contiguous()
        return taps, vector, last, 0.0 if last_bias is None else float(last_bias)

    packed = weight_cache.packed(weight, "depth head", pack, (bias, last_weight, last_bias))
    return _ops.depth_head_packed.default(x, *packed, float(max_depth))
