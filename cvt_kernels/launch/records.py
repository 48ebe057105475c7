"""The launch configurations of the kernels: a record for each variant of a kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar


class _Launched:
    """A record with fields that are Triton's launch options.

    They are ``num_warps``, the warps of a program; ``num_stages``, the depth of the pipeline of loads; and
    ``registers``, the limit of registers per thread, None for no limit. Without a limit ptxas may target an
    occupancy of its own choice and spill to reach it.
    """

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {**self._options}

    @functools.cached_property
    def _options(self) -> dict[str, int]:
        fields = {"num_warps": "num_warps", "num_stages": "num_stages", "maxnreg": "registers"}
        given = {option: getattr(self, field, None) for option, field in fields.items()}
        return {option: value for option, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Product(_Launched):
    """The configuration of a product of matrices, with what follows it: tile, warps and pipeline stages.

    Attributes:
        block_m: Rows of a tile.
        width: Columns of a part of a tile.
        parts: Parts of a tile, side by side, each with its own sums.
        block_k: Inputs per step of the loop.
        programs: Persistent programs per multiprocessor; 0 for one program per tile.
        specialized: Whether dedicated warps load the tiles (warp specialization), with descriptors.
    """

    block_m: int
    width: int
    parts: int = 1
    block_k: int
    num_warps: int = 8
    num_stages: int
    programs: int = 0
    specialized: bool = False


@dataclass(frozen=True, kw_only=True)
class ConvLinear(_Launched):
    """The configuration of ``conv_linear``: its tiles, warps and registers.

    Attributes:
        tokens: Rows of the products of a program, all branches of its group together.
        branches: The most branches that a program computes together: 1 or 2.
        outputs: The most channels of one product.
        chunk: The most channels that a product sums over at once.
    """

    tokens: int
    branches: int
    outputs: int
    chunk: int
    num_warps: int
    registers: int


@dataclass(frozen=True, kw_only=True)
class Attention(_Launched):
    """The configuration of a kernel of attention: tile sizes, warps and pipeline stages.

    Attributes:
        block_q: Queries of a tile.
        block_kv: Keys of a tile; the widest one in the forward that holds all keys.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True)
class Pixels(_Launched):
    """The configuration of a kernel of the convolutional projection: its tile, warps and registers.

    Attributes:
        pixels: P, rows of a tile: pixels, or partial sums.
        channels: BC, channels of a tile; 8 of them are one 16-byte load in half precision.
    """

    pixels: int
    channels: int
    num_warps: int
    registers: int = 255


@dataclass(frozen=True, kw_only=True)
class Sliding:
    """The configuration of a sliding-row kernel.

    Attributes:
        pairs: The most pairs of columns of a program; one warp has each.
        channels: Channels of a program: for 2-byte dtypes, half as many for others.
        resident_warps: Warps resident on a multiprocessor.
    """

    pairs: int
    channels: int
    registers: int
    resident_warps: int


@dataclass(frozen=True, kw_only=True)
class Rows(_Launched):
    """The configuration of a kernel on whole rows of channels: its tile, warps, registers and programs.

    Attributes:
        elements: The most elements of a tile of rows; a longer row is a tile too. 0 where a tile has 16 rows
            of each warp.
        resident_programs: For a persistent kernel, whose programs compute several tiles each: programs
            resident on a multiprocessor. 0 for one program per tile.
    """

    num_stages: ClassVar[int] = 1  # loops are not pipelined: other programs hide the latency
    elements: int = 0
    num_warps: int
    registers: int | None = None
    resident_programs: int = 0


@dataclass(frozen=True, kw_only=True)
class Mlp(_Launched):
    """The configuration of the MLP in one kernel.

    Attributes:
        resident: Whether a program keeps all weights in shared memory, rather than streams them.
        block_rows: Rows of a tile.
        block_hidden: Hidden features of a chunk.
        programs: Programs per multiprocessor.
    """

    resident: bool
    block_rows: int
    block_hidden: int
    num_warps: int
    num_stages: int = 1
    programs: int = 2
    registers: int | None = None
