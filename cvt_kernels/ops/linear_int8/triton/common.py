"""Launch configurations and compile-time constants of the kernels that round."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .... import launch, machine
from ....launch import formulas, launching
from ....launch.records import Rows
from ....records import LIMITS
from ...conv_embedding.triton.common import Parts

#: The most channels of a row that is rounded: it is held in the registers of a program.
MAX_CHANNELS = 8192

launch.register(Rows, formulas.quantize, "quantize_rows")


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
    def of(cls, x: Tensor, dtype: torch.dtype) -> tuple[RowSpec, Rows]:
        """Returns the specification for contiguous rows x (M, C) and values of ``dtype``, and its launch."""
        count, channels = x.shape
        chip = launching.chip(x.device)
        config = launch.configuration("quantize_rows", x.dtype, (channels,), count, chip)
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
            converts_exactly=not machine.INTERPRETING and chip.capability >= 90,
        )
        return spec, config
