"""Launch configurations and compile-time constants of the kernels on rows of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
from torch import Tensor

from ...conv_embedding.triton.common import Parts

#: The most channels of a token: a row is held in the registers of a program.
MAX_CHANNELS = 4096

# Launch configurations ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The launch configuration of a kernel.

    Attributes:
        elements: The most elements of a tile of rows; a longer row is a tile too.
        num_warps: Warps of a program.
        channels: The most channels of a row that it serves.
        resident_programs: For a persistent kernel, whose programs compute several tiles each: programs
            resident on a multiprocessor. 0 for one program per tile.
    """

    elements: int
    num_warps: int
    channels: int
    resident_programs: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options. Loops are not pipelined: other programs hide the latency."""
        return {"num_warps": self.num_warps, "num_stages": 1}


#: By kernel, the configurations for more and more channels, of every chip and dtype. Chosen by what the
#: compiler makes of them; none has been tuned on a GPU.
CONFIGS: dict[str, tuple[LaunchConfig, ...]] = {
    **{
        kernel: (
            LaunchConfig(elements=4096, num_warps=4, channels=1024),
            LaunchConfig(elements=8192, num_warps=8, channels=MAX_CHANNELS),
        )
        for kernel in ("gather", "normalize", "scatter")
    },
    # Its gradients of γ and β are in registers too.
    "backward": (
        LaunchConfig(elements=1024, num_warps=4, channels=1024, resident_programs=3),
        LaunchConfig(elements=2048, num_warps=8, channels=MAX_CHANNELS, resident_programs=2),
    ),
}


# Specification of a kernel --------------------------------------------------------------------------------


class RowSpec(NamedTuple):
    """The compile-time constants of a kernel.

    Attributes:
        parts: The parts of a row.
        rows: Rows that the threads of a program hold at once.
        repeats: Rounds of rows per program.
    """

    parts: Parts
    rows: int
    repeats: int

    @classmethod
    def of(cls, kernel: str, x: Tensor) -> tuple[RowSpec, LaunchConfig]:
        """Returns the specification of a kernel for rows of tensors like x, and its configuration."""
        channels = x.shape[-1]
        config = next(config for config in CONFIGS[kernel] if channels <= config.channels)
        parts = Parts.of(channels, x, least=1, most=MAX_CHANNELS)
        vector = 16 // x.element_size()
        rows = max(32 * config.num_warps * vector // parts.width, 1)
        repeats = max(config.elements // triton.next_power_of_2(rows * parts.width * parts.count), 1)
        return cls(parts, rows, repeats), config

    def tiles(self, rows: int) -> int:
        """Returns the number of tiles for a number of rows."""
        return -(-rows // (self.rows * self.repeats))
