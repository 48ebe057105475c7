"""Launch configurations of the kernels of ``depthwise_conv_gelu``, their budgets and plans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import backends, machine
from ...conv_projection.triton.common import Geometry, WalkConfig
from ...conv_projection.triton.walk import WalkPlan
from ...triton_launch import Budget, Overrides

# Launch configurations, for every GPU ---------------------------------------------------------------------

CONFIGS: dict[str, WalkConfig] = {
    "fwd": WalkConfig(pairs=4, channels=64, registers=64, resident_warps=32),
    "bwd_conv": WalkConfig(pairs=4, channels=64, registers=128, resident_warps=16),
}
#: By compute capability and kernel, what ``cvt compile`` allows in bfloat16 for the models that it compiles.
BUDGETS: dict[int, dict[str, Budget]] = {
    90: {
    },
}
_overrides: Overrides[WalkConfig] = Overrides(CONFIGS)


@contextlib.contextmanager
def overridden(kernel: str, config: WalkConfig) -> Iterator[None]:
    """Replaces the configuration of one kernel within a ``with`` statement, on every chip; it is for tuning.

    Args:
        kernel: The kernel's name in ``CONFIGS``.
        config: Its configuration, for 2-byte dtypes.

    Raises:
        ValueError: There is no such kernel.
    """
    try:
        with _overrides.replaced(kernel, config):
            backends.forget()  # the launches that are planned
            yield
    finally:
        backends.forget()


# Plans ----------------------------------------------------------------------------------------------------


def geometry_of(grid: tuple[int, int]) -> Geometry:
    """Returns the geometry of the convolution on a grid, as walks know it."""
    return Geometry(grid, kernel_sizes=(3,), strides=(1,), paddings=(1,), dilations=(1,), epss=(0.0,))


class GeluSpec(NamedTuple):
    """The constants of a kernel besides its walk: ``SPEC`` in the kernels.

    Attributes:
        approximate: GELU's variant.
        is_half: Whether results are rounded to 16 bits, so that erf may be approximated.
        hardware: Whether special functions are the GPU's own instructions, of which results of 16 bits need
            no more.
        has_bias: Whether there is a bias.
    """

    approximate: str
    is_half: bool
    hardware: bool
    has_bias: bool


class ConvPlan(NamedTuple):
    """The plan of a launch.

    Attributes:
        walk: How the walks of its programs go.
        others: The arguments of its kernel besides tensors.
    """

    walk: WalkPlan
    others: dict[str, Any]

    @classmethod
    def of(
        cls, kernel: str, x: Tensor, grid: tuple[int, int], weight: Tensor, approximate: str, *, has_bias: bool,
        dy: Tensor | None = None,
    ) -> ConvPlan:
        """Returns the plan of a kernel of ``CONFIGS`` for tokens ``x`` whose channels are adjacent."""
        config = _overrides.get(kernel) or CONFIGS[kernel]
        walk = WalkPlan.by(config, x, geometry_of(grid), (weight,) if dy is None else (weight, dy))
        is_half = x.element_size() == 2
        spec = GeluSpec(approximate, is_half, is_half and not machine.INTERPRETING, has_bias)
        sizes = {name: value for name, value in walk.arguments.items() if name != "CLASS_TOKEN"}
        return cls(walk, sizes | {"stride_b": x.stride(0), "STEP": x.stride(1), "SPEC": spec})
