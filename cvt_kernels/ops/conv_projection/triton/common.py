"""The parts that the projection's Triton kernels share: tilings, device functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launch
from ....launch import formulas, launching
from ....launch.records import Pixels, Sliding
from ....records import ConvBatchNorm

for _kernel in ("fwd", "stats", "bwd_sums", "bwd_conv", "bwd_input"):
    _sliding = formulas.sliding_bwd_conv if _kernel == "bwd_conv" else formulas.sliding
    launch.register(Sliding, _sliding, f"conv_projection_sliding_{_kernel}")
launch.register(Pixels, formulas.merge_stats, "conv_projection_merge_stats")
launch.register(Pixels, formulas.sum_regions, "conv_projection_sum_regions")


def configuration(kernel: str, x: Tensor) -> Any:
    """Returns the configuration of a kernel for tokens or partial sums like x (…, C), on its device."""
    rows = x.numel() // max(x.shape[-1], 1)
    chip = launching.chip(x.device)
    return launch.configuration(f"conv_projection_{kernel}", x.dtype, (x.shape[-1],), rows, chip)


class Geometry(NamedTuple):
    """The geometry of a call, whose convolutions are 3×3 with padding 1. Hashable."""

    grid: tuple[int, int]  # (H, W) of the input
    strides: tuple[int, ...]  # One per convolution

    @classmethod
    def of(cls, grid: Sequence[int], strides: Sequence[int]) -> Geometry:
        """Returns the geometry from sequences, as operators take them."""
        height, width = grid
        return cls((height, width), tuple(strides))

    @property
    def output_grids(self) -> list[tuple[int, int]]:
        """(Hᵢ, Wᵢ) of every convolution."""
        height, width = self.grid
        return [((height - 1) // s + 1, (width - 1) // s + 1) for s in self.strides]


class Tile(NamedTuple):
    """The constants of a tile: ``TILE`` in the kernels."""

    pixels: int  # P
    channels: int  # BC
    accumulator: Any  # Triton's dtype of sums

    @classmethod
    def of(cls, config: Pixels, dtype: torch.dtype) -> Tile:
        """Returns the tile of a configuration, for activations or sums of a dtype."""
        accumulator = tl.float64 if dtype == torch.float64 else tl.float32
        return cls(config.pixels, config.channels, accumulator)


def class_tokens(x: Tensor, geometry: Geometry) -> int:
    """Returns how many class tokens ``x`` (B, T, C) has: 0 or 1."""
    return x.shape[1] - geometry.grid[0] * geometry.grid[1]


def maybe_contiguous(x: Tensor) -> Tensor:
    """Returns ``x`` itself if its channels are contiguous and offsets fit 32 bits, else a copy."""
    return x if x.stride(2) == 1 and x.stride(1) * x.shape[1] < 2**31 else x.contiguous()


class Parameters(NamedTuple):
    """The parameters of all convolutions of a call, contiguous; operators take them as one flat sequence."""

    weights: list[Tensor]  # (C, 1, 3, 3), in the dtype of the tokens
    gammas: list[Tensor]
    betas: list[Tensor]
    means: list[Tensor]
    variances: list[Tensor]

    @classmethod
    def of(cls, x: Tensor, convs: Sequence[ConvBatchNorm]) -> Parameters:
        """Returns those for tokens ``x``; without running statistics there are no means and variances."""

        def vectors(values: Sequence[Tensor | None], absent: Any) -> list[Tensor]:
            return [absent(x.shape[2]) if each is None else each.contiguous() for each in values]

        tracking = [conv for conv in convs if conv.running_mean is not None]
        return cls(
            [conv.weight.to(x.dtype).contiguous() for conv in convs],
            vectors([conv.bn_weight for conv in convs], x.new_ones),
            vectors([conv.bn_bias for conv in convs], x.new_zeros),
            vectors([conv.running_mean for conv in tracking], x.new_zeros),
            vectors([conv.running_var for conv in tracking], x.new_ones),
        )

    @classmethod
    def divided(cls, flat: list[Tensor]) -> Parameters:
        """Returns the parameters of a flat sequence."""
        size = len(flat) // 5
        return cls(*[flat[i : i + size] for i in range(0, 5 * size, size)])

    def flat(self) -> list[Tensor]:
        """Returns all parameters, one kind after the other."""
        return [each for kind in self for each in kind]

    def pointers(self) -> dict[str, tuple[Tensor, ...]]:
        """Returns the arguments of kernels that take all parameters."""
        names = "w_ptrs", "gamma_ptrs", "beta_ptrs", "mean_ptrs", "var_ptrs"
        return dict(zip(names, map(tuple, self), strict=True))


@triton.jit
def load_partial(ptr, number, c, c_mask, regions, channels):
    """Returns the partial sums of some regions, from (regions, C); 0 beyond the last."""
    offset = number.to(tl.int64) * channels
    mask = (number < regions)[:, None] & c_mask[None, :]
    return tl.load(ptr + offset[:, None] + c[None, :], mask=mask, other=0.0)
