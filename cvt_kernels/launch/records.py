"""The launch configurations of the kernels: a record for each variant of a kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Product:
    """The configuration of a product of matrices, with what follows it: tile, warps and pipeline stages.

    Attributes:
        block_m: Rows of a tile.
        width: Columns of a part of a tile.
        parts: Parts of a tile, side by side, each with its own sums.
        block_k: Inputs per step of the loop.
        num_warps: Warps of a program.
        num_stages: Depth of the pipeline of loads.
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

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, kw_only=True)
class ConvLinear:
    """The configuration of ``conv_linear``: its tiles, warps and registers.

    Attributes:
        tokens: Rows of the products of a program, all branches of its group together.
        branches: The most branches that a program computes together: 1 or 2.
        outputs: The most channels of one product.
        chunk: The most channels that a product sums over at once.
        num_warps: Warps of a program; a lane has one strip of outputs at a time.
        registers: The limit of registers per thread.
    """

    tokens: int
    branches: int
    outputs: int
    chunk: int
    num_warps: int
    registers: int

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        return {"num_warps": self.num_warps, "maxnreg": self.registers}
