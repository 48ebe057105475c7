"""Launch configurations and compile-time constants of the 8-bit kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .... import launching, machine
from ....launch import generation_of
from ....launch.records import Product as LaunchConfig
from ....records import LIMITS
from ...conv_embedding.triton.common import Parts
from ...triton_launch import Overrides

#: The most channels of a row that is rounded: it is held in the registers of a program.
MAX_CHANNELS = 8192
#: The most inputs of a product, whose sum fits into 32 bits.
MAX_INPUTS = 2**16
_MOST_NARROW = 192

# Launch configurations ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowConfig:
    """The launch configuration of a kernel that rounds rows.

    Attributes:
        elements: The most elements of a tile of rows; a longer row is a tile too.
        num_warps: Warps of a program.
        channels: The most channels of a row that it serves.
    """

    elements: int
    num_warps: int
    channels: int

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.num_warps, "num_stages": 1}


ROW_CONFIGS = (
    RowConfig(elements=4096, num_warps=4, channels=4096),
    RowConfig(elements=8192, num_warps=8, channels=MAX_CHANNELS),
)

# The configurations of products, by generation and dtype. Names: ``narrow`` for results of up to 192 columns;
# ``float32`` for 32-bit results, which take more registers; ``wide`` for whole tiles of 256 columns without a
# residual, for which there would be no room; ``odd`` where rows are not aligned to 16 bytes, so that each
# number needs an address. sm_80 is every chip whose tensor cores take their factors from registers.
#
# Chosen by what the compiler makes of them; none has been tuned on a GPU. Products of 8 bits are so fast
# that L2 bounds small tiles. Tiles of float8 are smaller on sm_90, where sums in float32 take registers too.
_SMALL = LaunchConfig(block_m=128, width=128, block_k=64, num_stages=4)
_MEDIUM = LaunchConfig(block_m=128, width=128, block_k=128, num_stages=3)
_TALL = LaunchConfig(block_m=256, width=128, block_k=128, num_stages=3)
_WIDE = LaunchConfig(block_m=128, width=256, block_k=128, num_stages=4, programs=1)
_NARROW_SMALL = LaunchConfig(block_m=128, width=64, block_k=64, num_stages=4)
_NARROW = LaunchConfig(block_m=128, width=64, parts=3, block_k=128, num_stages=2)
_ODD = LaunchConfig(block_m=64, width=64, block_k=64, num_warps=4, num_stages=2)
_NARROW_100 = LaunchConfig(block_m=128, width=64, parts=3, block_k=64, num_stages=3)


def _kernels(
    linear: LaunchConfig, wide: LaunchConfig, narrow: LaunchConfig, float32: LaunchConfig
) -> dict[str, LaunchConfig]:
    kernels = {"linear": linear, "linear_wide": wide, "linear_narrow": narrow, "linear_float32": float32}
    return kernels | {"linear_odd": _ODD}


CONFIGS: dict[tuple[int, torch.dtype], dict[str, LaunchConfig]] = {
    (80, torch.int8): _kernels(_SMALL, _SMALL, _NARROW_SMALL, _SMALL),
    (80, torch.float8_e4m3fn): _kernels(_SMALL, _SMALL, _NARROW_SMALL, _SMALL),
    (90, torch.int8): _kernels(_TALL, _WIDE, _NARROW, _MEDIUM),
    (90, torch.float8_e4m3fn): _kernels(_MEDIUM, _MEDIUM, _NARROW, _MEDIUM),
    (100, torch.int8): _kernels(_MEDIUM, _MEDIUM, _NARROW_100, _MEDIUM),
    (100, torch.float8_e4m3fn): _kernels(_MEDIUM, _WIDE, _NARROW, _MEDIUM),
}

_overrides: Overrides[LaunchConfig] = Overrides(CONFIGS[90, torch.int8])
overridden = _overrides.replaced


def configuration_for(x: Tensor, out: Tensor, residual: Tensor | None) -> LaunchConfig:
    """Returns the configuration of a product of x (M, K) of 8 bits with the result ``out``, on its device."""
    kernel = "linear"
    if x.shape[1] % 16 != 0 or out.shape[1] % 8 != 0:
        kernel = "linear_odd"
    elif out.shape[1] <= _MOST_NARROW:
        kernel = "linear_narrow"
    elif out.element_size() > 2:
        kernel = "linear_float32"
    elif out.shape[1] % 256 == 0 and residual is None:
        kernel = "linear_wide"
    generation = generation_of(launching.chip(x.device).capability)
    return _overrides.get(kernel) or CONFIGS[generation, x.dtype][kernel]


# Specification of the kernels that round ------------------------------------------------------------------


class RowSpec(NamedTuple):
    """The compile-time constants of a kernel that rounds rows.

    Attributes:
        parts: The parts of a row.
        rows: Rows that the threads of a program hold at once.
        repeats: Rounds of rows per program.
        limit: The largest number of the dtype of the values.
        is_float8: Whether the values are float8_e4m3fn, rather than int8.
        interpreted: Whether the kernel runs in Triton's interpreter.
        converts_exactly: Whether conversions to float8 round once, to nearest. sm_89's go by way of float16,
            and the interpreter's are right only for numbers that need no rounding.
    """

    parts: Parts
    rows: int
    repeats: int
    limit: float
    is_float8: bool
    interpreted: bool
    converts_exactly: bool

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype) -> tuple[RowSpec, RowConfig]:
        """Returns the specification for contiguous rows x (M, C) and values of ``dtype``, and its launch."""
        channels = x.shape[1]
        config = next(config for config in ROW_CONFIGS if channels <= config.channels)
        parts = Parts.of(channels, x, least=1, most=MAX_CHANNELS)
        # A thread stores 16 values at once.
        rows = max(32 * config.num_warps * 16 // parts.width, 1)
        repeats = max(config.elements // triton.next_power_of_2(rows * parts.width * parts.count), 1)
        spec = cls(
            parts=parts,
            rows=rows,
            repeats=repeats,
            limit=LIMITS[dtype],
            is_float8=dtype == torch.float8_e4m3fn,
            interpreted=machine.INTERPRETING,
            converts_exactly=not machine.INTERPRETING and launching.chip(x.device).capability >= 90,
        )
        return spec, config
