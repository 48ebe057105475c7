"""Launch configurations and launch plans of the kernels of ``depthwise_conv_gelu``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from .... import machine
from ...conv_projection.triton.common import Geometry, SlidingConfig
from ...conv_projection.triton.sliding import SlidingPlan, alignment_of
from ...triton_launch import Overrides

# Launch configurations ------------------------------------------------------------------------------------

#: By kernel, on every GPU. A lane has 4 channels of 16 bits, so that one access of 8 bytes moves them, or 2
#: of 32 bits. More would save little, and the taps of 8 channels take 72 registers. The backward holds the
#: gradients of the taps beside them. Nothing spills. None has been tuned on a GPU.
CONFIGS: dict[str, SlidingConfig] = {
    "fwd": SlidingConfig(pairs=4, channels=128, registers=128, resident_warps=16),
    "bwd_conv": SlidingConfig(pairs=4, channels=128, registers=255, resident_warps=8),
}
_overrides: Overrides[SlidingConfig] = Overrides(CONFIGS)


#: Replaces the configuration of one kernel within a ``with`` statement, on every chip, for tuning: see
#: :meth:`Overrides.replaced`.
overridden = _overrides.replaced


# Plans ----------------------------------------------------------------------------------------------------


def geometry_of(grid: tuple[int, int]) -> Geometry:
    """Returns the geometry of the convolution on a grid, for the sliding-row kernels."""
    return Geometry(grid, kernel_sizes=(3,), strides=(1,), paddings=(1,), dilations=(1,), epss=(0.0,))


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


class ConvPlan(NamedTuple):
    """The plan of a launch.

    Attributes:
        sliding: The plan of its programs' strips.
        others: The kernel's arguments besides tensors.
    """

    sliding: SlidingPlan
    others: dict[str, Any]

    @classmethod
    def of(
        cls, kernel: str, x: Tensor, grid: tuple[int, int], approximate: str, parameters: Sequence[Tensor], *,
        has_bias: bool,
    ) -> ConvPlan:  # fmt: skip
        """Returns the plan of a kernel of ``CONFIGS``.

        The channels of ``x`` are contiguous; ``parameters`` are the other tensors that the kernel reads by
        units.
        """
        config = _overrides.get(kernel) or CONFIGS[kernel]
        if _prefers_half(config, x.shape[2], alignment_of(x, parameters)):
            config = replace(config, channels=config.channels // 2)
        sliding = SlidingPlan.by(config, x, geometry_of(grid), parameters)
        is_half = x.element_size() == 2
        spec = GeluSpec(approximate, is_half, is_half and not machine.INTERPRETING, has_bias)
        sizes = {name: value for name, value in sliding.arguments.items() if name not in _UNUSED}
        return cls(sliding, sizes | {"stride_b": x.stride(0), "STEP": x.stride(1), "SPEC": spec})


#: Arguments that other sliding-row kernels have: there is no class token, and one convolution of stride 1.
_UNUSED = "CLASS_TOKEN", "STRIDES"


def _prefers_half(config: SlidingConfig, channels: int, alignment: int) -> bool:
    """Returns whether blocks of half the channels are better.

    They are where one of them holds the last channels, and where a lane would read its channels by several
    accesses, for whose addresses and masks there are no registers.
    """
    return alignment % 8 != 0 or 0 < channels % config.channels <= config.channels // 2
