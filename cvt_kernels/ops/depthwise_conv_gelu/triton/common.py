"""Tilings of the kernels of ``depthwise_conv_gelu``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from .... import launch, machine
from ....launch import formulas, launching
from ....launch.records import Sliding
from ...conv_projection.triton.common import Geometry
from ...conv_projection.triton.sliding import SlidingTiling, alignment_of

launch.register(Sliding, formulas.depthwise, "depthwise_conv_gelu_fwd")
launch.register(Sliding, formulas.depthwise_bwd_conv, "depthwise_conv_gelu_bwd_conv")

# Plans ----------------------------------------------------------------------------------------------------


def geometry_of(grid: Sequence[int]) -> Geometry:
    """Returns the geometry of the convolution on a grid, for the sliding-row kernels."""
    return Geometry.of(grid, (1,))


class GeluSpec(NamedTuple):
    """The compile-time constants of a kernel besides its lanes': ``SPEC`` in the kernels.

    Attributes:
        approximate: GELU's variant.
        is_half: Whether results have 16 bits, so that erf may be approximated.
        hardware: Whether special functions use the GPU's own instructions, accurate enough for 16 bits.
        has_bias: Whether there is a bias.
    """

    approximate: str
    is_half: bool
    hardware: bool
    has_bias: bool


class ConvGeluTiling(NamedTuple):
    """The tiling of a launch.

    Attributes:
        sliding: The tiling of its programs' strips.
        others: The kernel's arguments besides tensors.
    """

    sliding: SlidingTiling
    others: dict[str, Any]

    @classmethod
    def of(
        cls, kernel: str, x: Tensor, grid: Sequence[int], approximate: str, parameters: Sequence[Tensor], *,
        has_bias: bool,
    ) -> ConvGeluTiling:  # fmt: skip
        """Returns the tiling of a kernel, ``fwd`` or ``bwd_conv``.

        The channels of ``x`` are contiguous; ``parameters`` are the other tensors that the kernel reads by
        units.
        """
        rows, chip = x.shape[0] * x.shape[1], launching.chip(x.device)
        config = launch.configuration(f"depthwise_conv_gelu_{kernel}", x.dtype, (x.shape[2],), rows, chip)
        if _prefers_half(config, x.shape[2], alignment_of(x, parameters)):
            config = replace(config, channels=config.channels // 2)
        sliding = SlidingTiling.by(config, x, geometry_of(grid), parameters)
        is_half = x.element_size() == 2
        spec = GeluSpec(approximate, is_half, is_half and not machine.INTERPRETING, has_bias)
        sizes = {name: value for name, value in sliding.arguments.items() if name not in _UNUSED}
        return cls(sliding, sizes | {"stride_b": x.stride(0), "STEP": x.stride(1), "SPEC": spec})


#: Arguments that other sliding-row kernels have: there is no class token, and one convolution of stride 1.
_UNUSED = "CLASS_TOKEN", "STRIDES"


def _prefers_half(config: Sliding, channels: int, alignment: int) -> bool:
    """Returns whether blocks of half the channels are better.

    They are where one of them holds the last channels, and where a lane would read its channels by several
    accesses, for whose addresses and masks there are no registers.
    """
    return alignment % 8 != 0 or 0 < channels % config.channels <= config.channels // 2
