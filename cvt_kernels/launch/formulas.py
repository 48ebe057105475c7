"""Formulas of launch configurations, for calls and GPUs that no table has.

Each takes the need of a call and returns a configuration. Tiles are as large as leaves a
program for every multiprocessor: a large tile reads little, a small one starts at once. Steps of the loop
are long, and the pipeline deep, where a multiprocessor has one program only, whose loads nothing else hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from .launching import Chip
from .records import Attention, ConvLinear, Mlp, Pixels, Product, Rows, Sliding


class Need(NamedTuple):
    """A call, as far as a configuration depends on it.

    Attributes:
        kernel: The name of the kernel.
        numbers: The numbers that it multiplies: half or single.
        sizes: K and N of a product, the channels of a head, or channels.
        rows: Rows of a product, tokens, or queries of all heads.
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


#: By compute capability; others are taken to have as little as the least.
_SHARED = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


def shared_kilobytes(capability: int) -> int:
    """Returns the kilobytes of shared memory that a program may have."""
    return _SHARED.get(capability, min(_SHARED.values()))


def _fitting(formula: Callable[[Need], Product]) -> Callable[[Need], Product]:
    """Returns a formula of products with pipelines that fit into shared memory."""

    def fitted(need: Need) -> Product:
        config, size = formula(need), {"single": 4, "half": 2}.get(need.numbers, 1)
        stage = (config.block_m + config.width * config.parts) * config.block_k * size
        most = shared_kilobytes(need.chip.capability) * 2**10 // stage
        return replace(config, num_stages=max(1, min(config.num_stages, most)))

    return fitted


def _tiles(config: Product, need: Need) -> int:
    """Returns the number of tiles of a product with a configuration."""
    return -(-need.rows // config.block_m) * -(-need.sizes[1] // (config.width * config.parts))


def _product(block_m: int, width: int, block_k: int, num_stages: int, num_warps: int = 4) -> Product:
    return Product(block_m=block_m, width=width, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


def _of_registers(need: Need) -> Product:
    """Returns the product of GPUs whose tensor cores take operands from registers, and of 32 bits.

    It has the largest tiles that leave few multiprocessors idle.
    """
    if need.numbers == "single":
        ladder = [_product(128, 64, 16, 3, 8), _product(64, 64, 16, 3), _product(32, 32, 32, 3)]
    else:
        ladder = [
            _product(128, 128, 32, 4, 8),
            _product(128, 64, 32, 4, 8),
            _product(64, 64, 32, 4),
            _product(32, 32, 64, 4),
        ]
    narrow = [each for each in ladder if each.width <= max(64, need.sizes[1])]
    filling = (each for each in narrow if 2 * _tiles(each, need) > need.chip.multiprocessors)
    return next(filling, narrow[-1])


@_fitting
def linear_gelu(need: Need) -> Product:
    """Returns a product of tall tiles, in few programs that stay where there are many."""
    if need.generation == 80 or need.numbers == "single":
        return _of_registers(need)
    tall = _product(128, 64, 64, 3)
    if _tiles(tall, need) >= _PERSISTS * need.chip.multiprocessors:
        if need.generation == 100:
            return Product(block_m=128, width=256, block_k=64, num_stages=4, programs=1, specialized=True)
        return _in_steps(replace(tall, num_stages=4, programs=2), need)
    return _in_steps(replace(tall, block_m=64) if need.rows <= 64 else tall, need)


def _in_steps(config: Product, need: Need) -> Product:
    """Returns the configuration, on sm_90 in two steps at least: ptxas waits within a single one (C7517)."""
    if need.generation != 90 or need.sizes[0] > config.block_k:
        return config
    return replace(config, block_k=config.block_k // 2, num_stages=2 * config.num_stages)


@_fitting
def linear_add(need: Need) -> Product:
    """Returns a product whose steps are long where tiles are few."""
    if need.generation == 80 or need.numbers == "single":
        return _of_registers(need)
    tall, wide, small = _product(128, 64, 64, 3), _product(128, 128, 64, 2), _product(64, 32, 256, 4)
    tiles, multiprocessors = _tiles(tall, need), need.chip.multiprocessors
    if tiles >= _PERSISTS * multiprocessors and need.sizes[1] % wide.width == 0:
        return wide
    if tiles >= multiprocessors:
        return tall
    if 2 * tiles >= multiprocessors:
        return replace(tall, block_k=128, num_stages=4)
    if need.rows <= 64:
        return replace(small, block_m=32) if need.rows > 16 else replace(small, block_m=16, width=16)
    return small


def _whole_rows(need: Need) -> tuple[int, int, int]:
    """Returns the columns of a product, and the width and number of parts of a tile with all of them."""
    outputs = need.sizes[1]
    return (outputs, 64, 3) if outputs <= 192 else (outputs, 128, 3 if outputs <= 384 else 4)


@_fitting
def linear_add_layer_norm(need: Need) -> Product:
    """Returns a product whose tiles have whole rows, in parts that waste few columns."""
    outputs, width, parts = _whole_rows(need)
    if need.numbers == "single":
        many = _product(32 if outputs <= 384 else 16, width, 16, 2, 8)
    elif need.generation == 80:
        many = _product(64 if outputs <= 384 else 32, width, 32, 3, 8)
    else:
        many = _product(64, width, 64, 2, 4 if outputs <= 384 else 8)
    many = replace(many, parts=parts)
    if 2 * _tiles(many, need) >= need.chip.multiprocessors:
        return many
    return replace(many, block_m=16, block_k=128 if many.block_k == 64 else many.block_k, num_warps=8)


@_fitting
def patches(need: Need) -> Product:
    """Returns a product of whole rows with long pipelines: there are many inputs, and often few tiles."""
    config = linear_add_layer_norm(need)
    if need.generation == 100 and need.sizes[1] > 384:  # 64 rows of them would spill
        config = replace(config, block_m=min(config.block_m, 32))
    wide = need.sizes[1] > 192
    return replace(config, num_warps=8) if wide else replace(config, num_warps=4, num_stages=3)


@_fitting
def windows_in_registers(need: Need) -> Product:
    """Returns a product whose first factor is made in registers: windows in a weight's order, or tokens.

    Tiles of 32 rows are for ``mma``: where ``wgmma`` takes that factor from registers, Triton does not wait
    for the products of all parts before it overwrites it (3.7.1).
    """
    outputs, width, parts = _whole_rows(need)
    block_k = 16 if need.numbers == "single" else 64
    warps = 4 if outputs <= 128 else 8
    return Product(block_m=32, width=width, parts=parts, block_k=block_k, num_warps=warps, num_stages=4)


def segmentation_head(need: Need) -> Product:
    """Returns tiles of pixels; a step is as many channels as can be interpolated in registers."""
    if need.numbers == "single":
        return Product(block_m=32, width=32, parts=4, block_k=16, num_stages=1)
    wide = Product(block_m=64, width=64, parts=4, block_k=32, num_stages=2)
    if need.generation == 80:
        return replace(wide, block_m=32)
    return replace(wide, width=32, parts=5) if need.sizes[1] <= 160 else wide


# Other kernels --------------------------------------------------------------------------------------------


def conv_linear(need: Need) -> ConvLinear:
    """Returns tiles of one branch.

    A lane has as many tokens as registers allow: they share its taps. Tensor cores that take operands from
    registers need smaller tiles, and products of 32 bits, without tensor cores, smaller ones still.
    """
    (channels,) = need.sizes
    few = ConvLinear(tokens=32, branches=1, outputs=64, chunk=64, num_warps=8, registers=255)
    if need.numbers == "single":
        tile = replace(few, tokens=16, outputs=32, chunk=16)
        return replace(tile, outputs=64) if need.generation == 100 and channels > 256 else tile
    if channels <= 64:
        return replace(few, tokens=64, num_warps=4, registers=128 if need.generation == 90 else 168)
    if need.generation == 80:
        return few if channels <= 256 else replace(few, chunk=32)
    few = replace(few, outputs=128)
    if channels > 256:
        return replace(few, tokens=64)
    many = replace(few, tokens=64, num_warps=4)
    return many if 2 * need.rows >= many.tokens * need.chip.multiprocessors else few


# Attention ------------------------------------------------------------------------------------------------
#
# By numbers, generation and padded channels of a head: tile of queries and of keys, warps, stages of each
# kernel. Tensor cores that take operands from shared memory want 64 rows per 4 warps, and leave registers for
# wider tiles. Products of 32 bits hold their operands in registers: small tiles, many warps. sm_90's for up
# to 64 channels are the fastest of those tried on an H200 (in bwd_dkdv 128 keys are 3 % faster in Triton 3.6,
# and spill in 3.7); the others were chosen by what the compiler makes of them. On sm_100 fwd_loop with 64
# keys takes 126 to 132 registers, where two programs need 128, or spills.

#: What has a configuration of attention, as in names of kernels.
ATTENTION_KERNELS = ("fwd", "fwd_loop", "bwd", "bwd_dq", "bwd_dkdv")
_ATTENTION = {
    ("half", 80, 64): ((64, 128, 4, 2), (128, 64, 8, 3), (32, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2)),
    ("half", 80, 128): ((64, 64, 8, 2), (32, 32, 4, 1), (32, 64, 8, 1), (32, 32, 8, 1), (32, 64, 8, 1)),
    ("half", 90, 64): ((64, 128, 4, 3), (128, 64, 8, 3), (32, 64, 4, 3), (128, 64, 8, 3), (32, 64, 4, 3)),
    ("half", 100, 64): ((64, 128, 4, 1), (128, 32, 8, 3), (32, 64, 4, 2), (128, 64, 8, 2), (32, 64, 4, 3)),
    ("half", 90, 128): ((64, 64, 8, 2), (64, 64, 8, 2), (32, 64, 8, 1), (64, 64, 8, 1), (64, 64, 8, 1)),
    ("single", 80, 64): ((32, 64, 8, 1), (32, 32, 8, 2), (16, 64, 8, 1), (32, 32, 8, 2), (32, 32, 8, 1)),
    ("single", 80, 128): ((16, 64, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1), (32, 32, 8, 1)),
}


def attention(need: Need) -> Attention:
    """Returns the configuration of the newest generation that is no newer than the GPU's."""
    width, kernel = (64 if need.sizes[0] <= 64 else 128), need.kernel.removeprefix("attention_")
    generations = [g for n, g, w in _ATTENTION if (n, w) == (need.numbers, width) and g <= need.generation]
    known = _ATTENTION[need.numbers, max(generations), width][ATTENTION_KERNELS.index(kernel)]
    return Attention(**dict(zip(Attention.__dataclass_fields__, known, strict=True)))


# Convolutional projection ---------------------------------------------------------------------------------
#
# In sliding-row kernels a thread has 2 channels, whose 27 taps in three branches take 54 registers: with 128
# registers a multiprocessor holds 16 warps. The gradients of the taps need as many again: 8 warps. A program
# of one warp then waits for no other; narrow grids of many channels have too few pairs of columns for that.

_SLIDING = Sliding(pairs=4, channels=64, registers=128, resident_warps=16)


def sliding(need: Need) -> Sliding:
    """Returns warps that slide over pairs of columns."""
    return _SLIDING


def sliding_bwd_conv(need: Need) -> Sliding:
    """Returns the same with registers for the gradients of the taps."""
    of_taps = replace(_SLIDING, registers=255)
    return of_taps if need.sizes[0] > 256 else replace(of_taps, pairs=1, resident_warps=8)


# Sums of partial sums are few programs that wait for their loads. On an H200, merge_stats took 2.3 µs, and
# 0.6 for each turn of its loop: one turn has the regions of most calls, and all programs run at once.


def merge_stats(need: Need) -> Pixels:
    """Returns tiles that merge the regions of most calls in one turn."""
    return Pixels(pixels=512, channels=8, num_warps=8, registers=128)


def sum_regions(need: Need) -> Pixels:
    """Returns tiles that add up partial sums."""
    return Pixels(pixels=256, channels=16, num_warps=8)


# A lane of depthwise_conv_gelu has 4 channels of 16 bits, so that one access of 8 bytes moves them, or 2 of
# 32 bits. More would save little, and the taps of 8 channels take 72 registers. The backward holds the
# gradients of the taps beside them.


def depthwise(need: Need) -> Sliding:
    """Returns warps that slide over pairs of columns, with twice the channels."""
    return replace(_SLIDING, channels=128)


def depthwise_bwd_conv(need: Need) -> Sliding:
    """Returns the same with registers for the gradients of the taps."""
    return replace(_SLIDING, channels=128, registers=255, resident_warps=8)


# Rows -----------------------------------------------------------------------------------------------------


def embed(need: Need) -> Rows:
    """Returns the configuration of the embedding in one kernel.

    A thread has half a row's sums and two of its vectors in registers.
    """
    if need.numbers == "single" or need.sizes[0] > 64:
        return Rows(num_warps=4, resident_programs=2)
    registers, programs = {80: (168, 3), 90: (128, 4), 100: (168, 2)}[need.generation]
    return Rows(num_warps=4, registers=registers, resident_programs=programs)


def normalize(need: Need) -> Rows:
    """Returns the tiles of the pass that normalizes an embedding's tokens."""
    return Rows(elements=4096 if need.numbers == "single" else 8192, num_warps=4)


def linear_rows(need: Need) -> Rows:
    """Returns the configuration of a pass beside the products of a linear layer.

    A thread has 16 elements under way, and a multiprocessor as many programs as its registers hold.
    """
    if need.numbers == "single":
        return Rows(elements=2048, num_warps=4, registers=96, resident_programs=5)
    return Rows(elements=2048, num_warps=4, resident_programs=8)


def quantize(need: Need) -> Rows:
    """Returns tiles of whole rows, as they are rounded."""
    return Rows(elements=4096, num_warps=4) if need.sizes[0] <= 4096 else Rows(elements=8192, num_warps=8)


# MLP ------------------------------------------------------------------------------------------------------


def mlp(need: Need) -> Mlp:
    """Returns the configuration of the MLP; its sizes are the padded channels and hidden features.

    Weights stay in shared memory on sm_90. Two programs fit on a multiprocessor with weights of 64 KiB. On
    sm_100 each product has an accumulator in tensor memory, and the unrolled products of resident weights
    would need too much of it.
    """
    channels, hidden = need.sizes
    is_small = channels <= 64 and channels * hidden <= 2**14
    if need.numbers == "single":
        rows = 64 if is_small else 32
        return Mlp(resident=False, block_rows=rows, block_hidden=32, num_warps=8)
    if need.generation == 80:
        rows = 128 if is_small else 64
        return Mlp(resident=False, block_rows=rows, block_hidden=32, num_warps=8, num_stages=2, programs=1)
    best = Mlp(resident=need.generation == 90, block_rows=128, block_hidden=64, num_warps=8)
    if is_small:
        best = replace(best, registers=128)
    elif best.resident:
        best = replace(best, programs=1)
    return best if best.resident else replace(best, num_stages=2)
