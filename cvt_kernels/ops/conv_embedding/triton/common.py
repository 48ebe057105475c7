"""The parts that the embedding's Triton kernels share: configurations, constants, LayerNorm of a tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launching
from ...triton_launch import Overrides

#: The most channels of a token: a row is held in the registers of a program.
MAX_CHANNELS = 4096

# Launch configurations ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The launch configuration of a kernel: its tile, warps, registers and programs.

    Attributes:
        num_warps: Warps of a program.
        channels: The most channels of a token that it serves.
        elements: The most elements of a tile of tokens; 0 where a tile has 16 tokens of each warp.
        registers: The limit of registers per thread; None for no limit.
        resident_programs: For a persistent kernel, whose programs compute several tiles each: programs
            resident on a multiprocessor. 0 for one program per tile.
    """

    num_warps: int
    channels: int
    elements: int = 0
    registers: int | None = None
    resident_programs: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options. Loops are not pipelined: other programs hide the latency."""
        options = {"num_warps": self.num_warps, "num_stages": 1}
        return options if self.registers is None else options | {"maxnreg": self.registers}


# By kernel, generation and bytes per element (4 for float64 too), the configurations for more and more
# channels. "80" is every chip whose tensor cores take their operands from registers (sm_80, sm_86, sm_89,
# sm_120). A thread of "embed" has half a row's sums and two of its vectors in registers: the numbers of
# channels are those for which nothing spills with windows of 7 × 7 × 3 values. On an H200 the first embedding
# takes 127 µs at batch 256, three times its floor.
_NORMALIZE = {
    2: (LaunchConfig(elements=8192, num_warps=4, channels=MAX_CHANNELS),),
    4: (LaunchConfig(elements=4096, num_warps=4, channels=MAX_CHANNELS),),
}
CONFIGS: dict[tuple[str, int, int], tuple[LaunchConfig, ...]] = {
    ("embed", 80, 2): (
        LaunchConfig(num_warps=4, channels=64, registers=168, resident_programs=3),
        LaunchConfig(num_warps=4, channels=128, resident_programs=2),
    ),
    ("embed", 90, 2): (
        LaunchConfig(num_warps=4, channels=64, registers=128, resident_programs=4),
        LaunchConfig(num_warps=4, channels=128, resident_programs=2),
    ),
    ("embed", 100, 2): (
        LaunchConfig(num_warps=4, channels=64, registers=168, resident_programs=2),
        LaunchConfig(num_warps=4, channels=128, resident_programs=2),
    ),
    **{
        ("embed", generation, 4): (LaunchConfig(num_warps=4, channels=64, resident_programs=2),)
        for generation in (80, 90, 100)
    },
    **{
        ("normalize", generation, size): configs
        for generation in (80, 90, 100)
        for size, configs in _NORMALIZE.items()
    },
}

_overrides: Overrides[LaunchConfig] = Overrides({kernel for kernel, *_ in CONFIGS})


def configuration(kernel: str, channels: int, x: Tensor) -> LaunchConfig | None:
    """Returns the configuration of a kernel for tensors like ``x``; None for too many channels."""
    capability = launching.chip(x.device).capability
    generation = 80 if capability < 90 or capability >= 120 else min(capability // 10 * 10, 100)
    shipped = CONFIGS[kernel, generation, min(x.element_size(), 4)]
    config = next((config for config in shipped if channels <= config.channels), None)
    return config and (_overrides.get(kernel) or config)


#: Replaces the configuration of one kernel within a ``with`` statement, on every chip, for tuning: see
#: :meth:`Overrides.replaced`.
overridden = _overrides.replaced


# Constants of a kernel ------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """The split of a token's channels into parts, since Triton's tiles have powers of two.

    Attributes:
        channels: C.
        width: Channels of a part, a power of two.
        count: Parts of a token; only where ``count · width`` is more than C, the last has empty channels.
        accumulator: Triton's dtype of sums.
    """

    channels: int
    width: int
    count: int
    accumulator: Any

    @classmethod
    def of(cls, channels: int, x: Tensor, *, least: int, most: int) -> Parts:
        """Returns the parts for tensors like ``x``, each of ``least`` to ``most`` channels.

        Three or five parts without empty channels beat one part with many; more parts do not.
        """
        width = min(channels & -channels, most)
        if width < least or channels > 7 * width:
            width = max(least, min(triton.next_power_of_2(channels), most))
        accumulator = tl.float64 if x.dtype == torch.float64 else tl.float32
        return cls(channels, width, -(-channels // width), accumulator)


# Device functions -----------------------------------------------------------------------------------------


@triton.jit
def channels_of(part, PARTS: tl.constexpr):
    """Returns the channels of a part, [width]."""
    return part * PARTS.width + tl.arange(0, PARTS.width)


@triton.jit
def load_vector(ptr, zeros, PARTS: tl.constexpr):
    """Returns the parts of a vector (C,), each ``zeros`` + [width], with zeros beyond C; () for None.

    The shape of ``zeros``, [..., 1], gives each of some threads its own copy, which needs no exchange.
    """
    COUNT: tl.constexpr = PARTS.count
    parts = ()
    if ptr is not None:
        for i in tl.static_range(COUNT):
            c = zeros + channels_of(i, PARTS)
            parts = parts + (tl.load(ptr + c, mask=c < PARTS.channels, other=0.0).to(PARTS.accumulator),)
    return parts


@triton.jit
def layer_norm(xs, bias, gamma, beta, eps, PARTS: tl.constexpr):
    """Returns the parts of γ (x + bias − mean) / √(variance + ε) + β, for parts ``xs`` of rows, [..., width].

    ``bias``, ``gamma`` and ``beta`` are parts of vectors, or () for 0, 1 and 0.
    """
    COUNT: tl.constexpr = PARTS.count
    shifted = ()
    for i in tl.static_range(COUNT):
        x = xs[i]
        if len(bias) > 0:
            x += bias[i]
        shifted = shifted + (x,)
    total = shifted[0]
    for i in tl.static_range(1, COUNT):  # the parts first, so that lanes are added up once
        total += shifted[i]
    total = tl.sum(total, axis=-1, keep_dims=True)
    mean = total * (1.0 / PARTS.channels)
    # Without this the mean of equal numbers may be another one.
    mean += tl.fma(-mean, PARTS.channels * 1.0, total) * (1.0 / PARTS.channels)
    deviations = ()
    for i in tl.static_range(COUNT):
        deviation = shifted[i] - mean
        if (i + 1) * PARTS.width > PARTS.channels:
            deviation = tl.where(channels_of(i, PARTS) < PARTS.channels, deviation, 0.0)
        deviations = deviations + (deviation,)
    squares = deviations[0] * deviations[0]
    for i in tl.static_range(1, COUNT):
        squares += deviations[i] * deviations[i]
    variance = tl.sum(squares, axis=-1, keep_dims=True) * (1.0 / PARTS.channels)
    scale = 1.0 / tl.sqrt(variance + eps)
    ys = ()
    for i in tl.static_range(COUNT):
        y = deviations[i] * scale
        if len(gamma) > 0:
            y *= gamma[i]
        if len(beta) > 0:
            y += beta[i]
        ys = ys + (y,)
    return ys


@triton.jit
def store_class_token(out_ptr, class_token_ptr, PARTS: tl.constexpr):
    """Stores the class token (C,) at ``out_ptr``."""
    COUNT: tl.constexpr = PARTS.count
    for i in tl.static_range(COUNT):
        c = channels_of(i, PARTS)
        token = tl.load(class_token_ptr + c, mask=c < PARTS.channels)
        tl.store(out_ptr + c, token.to(out_ptr.dtype.element_ty), mask=c < PARTS.channels)
