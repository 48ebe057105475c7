"""The Triton kernel of ``scaled_rows``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cvt_kernels import modes
from cvt_kernels.backends import Record
from cvt_kernels.launch import launching
from cvt_kernels.ops.graph_operators import launcher
from cvt_kernels.ops.triton_launch import ELEMENTS, accumulator_dtype, grid_dependency_synchronize

_BLOCK = 1024


@triton.jit
def _scaled_rows_kernel(
    x_ptr, scale_ptr, out_ptr, channels, elements, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    grid_dependency_synchronize()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < elements, other=0.0)
    scale = tl.load(scale_ptr + i % channels)
    tl.store(out_ptr + i, (x.to(WIDE) * scale.to(WIDE)).to(out_ptr.dtype.element_ty), mask=i < elements)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, scale.dtype))


@launcher("scaled_rows", _scaled)
def scaled_rows_forward(x: Tensor, scale: Tensor) -> Tensor:
    """Launches the kernel; a tensor that is not contiguous is copied first."""
    x = x.contiguous()
    out = _scaled(x, scale)
    launching.launch(
        _scaled_rows_kernel, (-(-x.numel() // _BLOCK),), on=x, options={"num_warps": 4},
        x_ptr=x, scale_ptr=scale.contiguous(), out_ptr=out, channels=x.shape[-1], elements=x.numel(),
        WIDE=ELEMENTS[accumulator_dtype(out)], BLOCK=_BLOCK,
    )  # fmt: skip
    return out


def why_unsupported(call: Record) -> str | None:
    """Returns why the kernel cannot serve a call, or None."""
    if modes.wants_gradient(call.x, call.scale):
        return "has no gradients"
    return "there are no rows" if call.x.numel() == 0 else None


def scaled_rows(call: Record) -> Tensor:
    """Computes ``scaled_rows`` for checked arguments."""
    return scaled_rows_forward(*call)
