"""The compile-time constants of the kernels on rows of tokens."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from .... import launch, launching
from ....launch import formulas
from ....launch.records import Rows
from ...conv_embedding.triton.common import Parts

#: The most channels of a token: a row is held in the registers of a program.
MAX_CHANNELS = 4096

launch.register(Rows, formulas.rows, "rows_gather", "rows_normalize", "rows_scatter")
launch.register(Rows, formulas.rows_backward, "rows_backward")

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
    def of(cls, kernel: str, x: Tensor) -> tuple[RowSpec, Rows]:
        """Returns the specification of a kernel for rows of tensors like x, and its configuration."""
        channels = x.shape[-1]
        rows, chip = x.numel() // channels, launching.chip(x.device)
        config = launch.configuration(f"rows_{kernel}", x.dtype, (channels,), rows, chip)
        parts = Parts.of(channels, x, least=1, most=MAX_CHANNELS)
        vector = 16 // x.element_size()
        rows = max(32 * config.num_warps * vector // parts.width, 1)
        repeats = max(config.elements // triton.next_power_of_2(rows * parts.width * parts.count), 1)
        return cls(parts, rows, repeats), config

    def tiles(self, rows: int) -> int:
        """Returns the number of tiles for a number of rows."""
        return -(-rows // (self.rows * self.repeats))
