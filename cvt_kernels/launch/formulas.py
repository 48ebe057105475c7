"""Formulas of launch configurations, for calls and GPUs that no table has.

Each takes the need of a call and returns configurations, the best first. Tiles are as large as leaves a
program for every multiprocessor: a large tile reads little, a small one starts at once. Steps of the loop
are long, and the pipeline deep, where a multiprocessor has one program only, whose loads nothing else hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ..launching import Chip
from .records import ConvLinear, Product


class Need(NamedTuple):
    """A call, as far as a configuration depends on it.

    Attributes:
        kernel, numbers, sizes, rows: As in the entries of ``tables``.
        chip: The GPU.
    """

    kernel: str
    numbers: str
    sizes: tuple[int, ...]
    rows: int
    chip: Chip

    @property
    def generation(self) -> int:
        """The GPU's generation: 80, 90 or 100."""
        return generation_of(self.chip.capability)


def generation_of(capability: int) -> int:
    """Returns the generation of a compute capability: 80, 90 or 100.

    80 are all whose tensor cores take their operands from registers (sm_80, sm_86, sm_89, sm_120), 90 and 100
    those that take them from shared memory.
    """
    return 80 if capability < 90 or capability >= 120 else min(capability // 10 * 10, 100)


# Products -------------------------------------------------------------------------------------------------
#
# All but sm_90's in 16 bits were chosen by what the compiler makes of them, and have not been timed on a GPU.

_PERSISTS = 8  # tiles per multiprocessor from which programs that stay pay off


#: Kilobytes of shared memory that a program may have, by compute capability; of others, the least.
_SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


def _fitted(config: Product, need: Need) -> Product:
    """Returns the configuration with a pipeline that fits into shared memory."""
    size = {"single": 4, "half": 2}.get(need.numbers, 1)
    stage = (config.block_m + config.width * config.parts) * config.block_k * size
    most = _SHARED.get(need.chip.capability, min(_SHARED.values())) * 2**10 // stage
    return replace(config, num_stages=max(1, min(config.num_stages, most)))


def _fitting(ranked: Callable[[Need], list[Product]]) -> Callable[[Need], list[Product]]:
    """Returns a formula of products whose pipelines fit into shared memory."""
    return lambda need: [_fitted(config, need) for config in ranked(need)]


def _tiles(config: Product, need: Need) -> int:
    """Returns the number of tiles of a product with a configuration."""
    return -(-need.rows // config.block_m) * -(-need.sizes[1] // (config.width * config.parts))


def _filling(ladder: list[Product], need: Need) -> list[Product]:
    """Returns a ladder from large tiles to small ones, those first whose programs fill the chip."""
    filling = [config for config in ladder if _tiles(config, need) >= need.chip.multiprocessors]
    return filling + [config for config in reversed(ladder) if config not in filling]


def _product(block_m: int, width: int, block_k: int, num_stages: int, num_warps: int = 4) -> Product:
    return Product(block_m=block_m, width=width, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


def _of_registers(need: Need) -> list[Product]:
    """Returns the products of GPUs whose tensor cores take operands from registers, and of 32 bits."""
    if need.numbers == "single":
        ladder = [_product(128, 64, 16, 3, 8), _product(64, 64, 16, 3), _product(32, 32, 32, 3)]
    else:
        ladder = [
            _product(128, 128, 32, 4, 8),
            _product(128, 64, 32, 4, 8),
            _product(64, 64, 32, 4),
            _product(32, 32, 64, 4),
        ]
    return _filling([each for each in ladder if each.width <= max(64, need.sizes[1])], need)


def _linear_gelu(need: Need) -> list[Product]:
    if need.generation == 80 or need.numbers == "single":
        return _of_registers(need)
    tall = _product(128, 64, 64, 3)
    tiles, multiprocessors = _tiles(tall, need), need.chip.multiprocessors
    persistent = replace(tall, num_stages=4, programs=2)
    if need.generation == 100:
        persistent = Product(block_m=128, width=256, block_k=64, num_stages=4, programs=1, specialized=True)
    if tiles >= _PERSISTS * multiprocessors:
        return [persistent, _product(128, 128, 64, 2), tall]
    if need.rows <= 64:
        return [replace(tall, block_m=64), tall]
    return [tall, persistent, _product(128, 128, 64, 2)]


def _linear_add(need: Need) -> list[Product]:
    if need.generation == 80 or need.numbers == "single":
        return _of_registers(need)
    tall, wide = _product(128, 64, 64, 3), _product(128, 128, 64, 2)
    deep, small = replace(tall, block_k=128, num_stages=4), _product(64, 32, 256, 4)
    tiles, multiprocessors = _tiles(tall, need), need.chip.multiprocessors
    if tiles >= _PERSISTS * multiprocessors and need.sizes[1] % wide.width == 0:
        return [wide, tall]
    if tiles >= multiprocessors:
        return [tall, wide, deep]
    if 2 * tiles >= multiprocessors:
        return [deep, tall, small]
    if need.rows <= 64:
        return [replace(small, block_m=32), small, deep]
    return [small, replace(small, num_stages=3), deep]


def _linear_add_layer_norm(need: Need) -> list[Product]:
    """Returns products whose tiles have whole rows, in parts that waste few columns."""
    outputs = need.sizes[1]
    width, parts = (64, 3) if outputs <= 192 else (128, 3) if outputs <= 384 else (128, 4)
    if need.numbers == "single":
        rows, block_k, stages, warps = (32 if outputs <= 384 else 16), 16, 2, 8
    elif need.generation == 80:
        rows, block_k, stages, warps = (64 if outputs <= 384 else 32), 32, 3, 8
    else:
        rows, block_k, stages, warps = 64, 64, 2, (4 if outputs <= 384 else 8)
    many = Product(
        block_m=rows, width=width, parts=parts, block_k=block_k, num_warps=warps, num_stages=stages
    )
    short = replace(many, block_m=16, block_k=128 if block_k == 64 else block_k, num_warps=8)
    is_full = 2 * _tiles(many, need) >= need.chip.multiprocessors
    return [many, short] if is_full else [short, many]


# Other kernels --------------------------------------------------------------------------------------------


def _conv_linear(need: Need) -> list[ConvLinear]:
    """Returns tiles of one branch.

    A lane has as many tokens as registers allow: they share its taps. Tensor cores that take operands from
    registers need smaller tiles, and products of 32 bits, without tensor cores, smaller ones still.
    """
    (channels,) = need.sizes
    few = ConvLinear(tokens=32, branches=1, outputs=64, chunk=64, num_warps=8, registers=255)
    if need.numbers == "single":
        tile = replace(few, tokens=16, outputs=32, chunk=16)
        return [replace(tile, outputs=64) if need.generation == 100 and channels > 256 else tile]
    if channels <= 64:
        registers = 128 if need.generation == 90 else 168
        tile = replace(few, tokens=64, num_warps=4, registers=registers)
        return [tile, replace(tile, tokens=32)]
    if need.generation == 80:
        return [few if channels <= 256 else replace(few, chunk=32)]
    few = replace(few, outputs=128)
    if channels > 256:
        return [replace(few, tokens=64), few]
    many = replace(few, tokens=64, num_warps=4)
    is_full = 2 * need.rows >= many.tokens * need.chip.multiprocessors
    return [many, few] if is_full else [few, many]


class Kernel(NamedTuple):
    """A kernel: the records of its variants, and the formula that ranks configurations for a need."""

    records: tuple[type, ...]
    ranked: Callable[[Need], list[Any]]


KERNELS: dict[str, Kernel] = {
    "linear_gelu": Kernel((Product,), _fitting(_linear_gelu)),
    "linear_add": Kernel((Product,), _fitting(_linear_add)),
    "linear_add_layer_norm": Kernel((Product,), _fitting(_linear_add_layer_norm)),
    "conv_linear": Kernel((ConvLinear,), _conv_linear),
}
