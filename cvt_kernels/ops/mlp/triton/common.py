"""Launch configurations and compile-time constants of the MLP's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from .... import launching, machine
from ....launch import generation_of
from ...linear.triton.common import ELEMENTS, padded
from ...triton_launch import Overrides

#: The most channels of a row, and the most weights of a layer, padded: two layers have 128 KiB in 16 bits.
MAX_CHANNELS, MAX_WEIGHTS = 128, 2**15

# Launch configurations ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The launch configuration of the kernel.

    Attributes:
        block_rows: Rows of a tile.
        block_hidden: Hidden features of a chunk.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline of loads, where weights are streamed.
        programs: Programs per multiprocessor.
        max_registers: The limit of registers per thread; None for no limit.
    """

    block_rows: int
    block_hidden: int
    num_warps: int
    num_stages: int = 1
    programs: int = 2
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}


# The kernel of a call and how it is launched, by generation, bytes per element of the operands and size.
# "small" is what two programs of a multiprocessor can hold: weights of 64 KiB, C of 64, x in the dtype of the
# operands. "80" is every chip whose tensor cores take both operands from registers. On sm_100 each product of
# a program has an accumulator in tensor memory, and the unrolled products of resident weights would need too
# much of it. float32 products run without tensor cores unless TF32 is allowed. Chosen by what the compiler
# makes of CvT's first stage: nothing spills on sm_80, sm_90 and sm_100. On an H200 the MLP takes 177 µs at
# batch 256, 2.7 times its floor.
CONFIGS: dict[tuple[int, int, str], dict[str, LaunchConfig]] = {
    (80, 2, "small"): {
        "fwd": LaunchConfig(block_rows=128, block_hidden=32, num_warps=8, num_stages=2, programs=1)
    },
    (80, 2, "large"): {
        "fwd": LaunchConfig(block_rows=64, block_hidden=32, num_warps=8, num_stages=2, programs=1)
    },
    (90, 2, "small"): {
        "fwd_resident": LaunchConfig(block_rows=128, block_hidden=64, num_warps=8, max_registers=128)
    },
    (90, 2, "large"): {
        "fwd_resident": LaunchConfig(block_rows=128, block_hidden=64, num_warps=8, programs=1)
    },
    (100, 2, "small"): {
        "fwd": LaunchConfig(block_rows=128, block_hidden=64, num_warps=8, num_stages=2, max_registers=128)
    },
    (100, 2, "large"): {"fwd": LaunchConfig(block_rows=128, block_hidden=64, num_warps=8, num_stages=2)},
}
for _generation in (80, 90, 100):
    CONFIGS[_generation, 4, "small"] = {"fwd": LaunchConfig(block_rows=64, block_hidden=32, num_warps=8)}
    CONFIGS[_generation, 4, "large"] = {"fwd": LaunchConfig(block_rows=32, block_hidden=32, num_warps=8)}

_overrides: Overrides[LaunchConfig] = Overrides(("fwd", "fwd_resident"))
overridden = _overrides.replaced


class Plan(NamedTuple):
    """The kernel for a call, by its name in ``CONFIGS``, and its configuration."""

    kernel: str
    config: LaunchConfig


def plan_for(x: Tensor, hidden: int, dtype: torch.dtype) -> Plan:
    """Returns the plan for rows ``x``, hidden features and a dtype of operands, on the device of ``x``."""
    generation = generation_of(launching.chip(x.device).capability)
    channels, size = x.shape[-1], dtype.itemsize
    is_small = padded(channels) <= 64 and weights(channels, hidden) <= 2**14 and x.element_size() == size
    ((kernel, config),) = CONFIGS[generation, min(size, 4), "small" if is_small else "large"].items()
    return Plan(kernel, _overrides.get(kernel) or config)


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
