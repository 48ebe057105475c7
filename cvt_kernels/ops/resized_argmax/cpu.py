"""The class of every pixel on a CPU by the compiled extension (csrc).

One pass over the logits finds the largest class of each of their pixels. A resized pixel whose four neighbors
agree has their class; only of others logits are interpolated, in float32 and in the cache. Logits whose
classes are not adjacent are copied first. Results do not depend on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import machine
from ...backends import Record

machine.load_extension()
_ops = torch.ops.cvt_kernels

_MOST_SIDE = 2**20  # kMostSide in csrc/resized_argmax/cpu_loops.h


torch.library.register_fake(
    "cvt_kernels::resized_argmax",
    lambda logits, *size: logits.new_empty(logits.shape[0], *size, dtype=torch.int64),
)


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    if call.logits.dtype == torch.float64:
        return "serves float32, bfloat16 and float16"
    if max(*call.logits.shape[2:], *call.size) > _MOST_SIDE:
        return f"serves heights and widths of up to {_MOST_SIDE}"
    return None


def resized_argmax(call: Record) -> Tensor:
    """Computes ``cvt_kernels.resized_argmax`` for checked arguments."""
    return _ops.resized_argmax.default(call.logits.permute(0, 2, 3, 1), *call.size)
