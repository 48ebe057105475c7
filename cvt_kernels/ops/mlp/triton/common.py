"""Launch configurations and compile-time constants of the MLP's kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from .... import launch, launching, machine
from ....launch.records import Mlp
from ...linear.triton.common import ELEMENTS, padded

#: The most channels of a row, and the most weights of a layer, padded: two layers have 128 KiB in 16 bits.
MAX_CHANNELS, MAX_WEIGHTS = 128, 2**15


def configuration_for(x: Tensor, hidden: int, dtype: torch.dtype) -> Mlp:
    """Returns the configuration for rows ``x``, hidden features and a dtype of operands, on its device."""
    rows, channels = x.numel() // x.shape[-1], x.shape[-1]
    sizes = padded(channels), weights(channels, hidden) // padded(channels)
    if x.element_size() != dtype.itemsize:  # wider rows, beside which less fits
        sizes = 2 * sizes[0], sizes[1]
    found: Mlp = launch.configuration("layer_norm_mlp", dtype, sizes, rows, launching.chip(x.device))
    return found


def weights(channels: int, hidden: int) -> int:
    """Returns the number of weights of one layer, with the kernel's padding."""
    return padded(channels) * (-(-hidden // 64) * 64)


# Kernel specification -------------------------------------------------------------------------------------


class KernelSpec(NamedTuple):
    """The compile-time constants of a kernel besides its tiles.

    Attributes:
        channels, hidden: C and the hidden features.
        block_c: C padded to a power of two of at least 16.
        approximate: GELU's variant.
        element: Triton's dtype of the factors of a product.
        operand: The dtype in which they are multiplied: ``element``, but float32 for bfloat16 in Triton's
            interpreter, whose product of bfloat16 is wrong.
        accumulator: float32, or float64 for float64.
        precision: ``input_precision`` of ``tl.dot``.
        residual_first: Whether products are added to x, rather than x to their sum: a 16-bit x loses no
            digits by it.
        is_half: Whether x has 16 bits.
        hardware_tanh: Whether GELU uses the GPU's tanh instruction.
        unpack: Whether bfloat16 is widened in pairs, by one instruction for each number.
    """

    channels: int
    hidden: int
    block_c: int
    approximate: str
    element: Any
    operand: Any
    accumulator: Any
    precision: str
    residual_first: bool
    is_half: bool
    hardware_tanh: bool
    unpack: bool

    @classmethod
    def of(cls, x: Tensor, hidden: int, approximate: str, dtype: torch.dtype) -> KernelSpec:
        """Returns the specification for rows ``x``, operands of ``dtype`` and PyTorch's TF32 setting."""
        tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        upcast = machine.INTERPRETING and dtype == torch.bfloat16
        return cls(
            channels=x.shape[-1],
            hidden=hidden,
            block_c=padded(x.shape[-1]),
            approximate=approximate,
            element=ELEMENTS[dtype],
            operand=tl.float32 if upcast else ELEMENTS[dtype],
            accumulator=tl.float64 if dtype == torch.float64 else tl.float32,
            precision="tf32" if tf32 else "ieee",
            residual_first=x.element_size() == 2,
            is_half=dtype.itemsize == 2,
            hardware_tanh=dtype.itemsize == 2 and not machine.INTERPRETING,
            unpack=x.dtype == torch.bfloat16 and not machine.INTERPRETING,
        )
