"""The tilings of ``conv_linear``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import launch
from ....launch import formulas, launching
from ....launch.records import ConvLinear
from ...conv_projection.triton.common import Geometry
from ...conv_projection.triton.sliding import Lanes
from ...triton_launch import padded, product_types

#: The most channels of a token, before and after the linear layers.
MAX_CHANNELS = 512

launch.register(ConvLinear, formulas.conv_linear, "conv_linear")


@dataclass(frozen=True)
class Group:
    """Branches that one program computes together: ``GROUPS[i]`` in the kernel.

    It is a dataclass because Triton forgets the field names of NamedTuples within a tuple.
    """

    stride: int  # The stride of its convolutions
    branches: tuple[int, ...]  # Indices of the branches, whose outputs are computed from the same pixels
    # Indices of other branches of the same sizes as the only one in ``branches``. A program computes one of
    # all these: code for each would take a multiple of the time to compile.
    twins: tuple[int, ...]
    # The output grid
    height: int
    width: int
    # Size of a strip of outputs, which a lane computes at once
    rows: int
    columns: int
    # Number of strips below and beside one another
    strip_rows: int
    strip_columns: int
    # The programs of a period that belong to the group, ``turns`` for each twin
    first_turn: int
    turns: int


@dataclass(frozen=True)
class Layer:
    """The linear layer of a branch: ``LAYERS[i]`` in the kernel."""

    outputs: int  # Output channels
    widths: tuple[int, ...]  # Widths of the blocks of outputs; all but the last are equal
    tokens: int  # Output tokens per image


class Spec(NamedTuple):
    """The other constants of the kernel: ``SPEC``."""

    # The input grid
    height: int
    width: int
    class_tokens: int  # Class tokens of an image, 0 or 1
    class_rows: int  # Images whose class tokens are multiplied together
    chunks: int  # Chunks of channels of a token
    period: int  # Programs after which the turns of the groups begin again
    # See :func:`product_types`
    element: Any
    operand: Any
    accumulator: Any
    precision: str


class ConvLinearTiling(NamedTuple):
    """The tiling of a launch: options, number of programs, and arguments (sizes and constants)."""

    options: dict[str, int]
    programs: int
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls, x: Tensor, geometry: Geometry, weights: Sequence[Tensor], outputs: tuple[int, ...],
        kinds: tuple[Any, ...],
    ) -> ConvLinearTiling:  # fmt: skip
        """Returns the tiling for tokens ``x`` (B, T, C) and the weights of the convolutions.

        ``outputs`` are the channels of each branch; ``kinds`` what else must be the same in branches that are
        computed by the same code.
        """
        chip = launching.chip(x.device)
        sizes = (max(x.shape[2], *outputs),)
        config = launch.configuration("conv_linear", x.dtype, sizes, x.shape[0] * x.shape[1], chip)
        is_packed = (
            x.element_size() == 2
            and not (x.shape[2] | x.stride(0) | x.stride(1)) % 2
            and all(tensor.data_ptr() % 4 == 0 for tensor in (x, *weights))
        )
        tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return _tiling(config, x.shape, x.dtype, is_packed, tf32, geometry, outputs, kinds, chip)


@functools.lru_cache(maxsize=1024)
def _tiling(
    config: ConvLinear, shape: torch.Size, dtype: torch.dtype, is_packed: bool, tf32: bool,
    geometry: Geometry, outputs: tuple[int, ...], kinds: tuple[Any, ...], chip: launching.Chip,
) -> ConvLinearTiling:  # fmt: skip
    batch, tokens, channels = shape
    height, width = geometry.grid
    chunk = min(config.chunk, padded(channels))
    chunks = -(-channels // chunk)
    lanes = 32 * config.num_warps
    strips = lanes // (chunk // 2 if dtype.itemsize == 2 else chunk)  # a lane has one at a time
    groups = _groups(config, geometry, strips, list(zip(outputs, kinds, strict=True)))
    tiles = [-(-batch * g.strip_rows * g.strip_columns // strips) for g in groups]
    # Long jobs share the loading of the taps, short ones leave no multiprocessor idle.
    all_tiles = sum(n * (1 + len(g.twins)) for n, g in zip(tiles, groups, strict=True))
    length = max(1, min(8, all_tiles // (4 * chip.multiprocessors))) if chunks == 1 else 1
    jobs = [-(-n // length) for n in tiles]
    period = sum(g.turns * (1 + len(g.twins)) for g in groups)
    rounds = max(-(-n // g.turns) for n, g in zip(jobs, groups, strict=True))
    spec = Spec(
        height=height, width=width, class_tokens=tokens - height * width, class_rows=config.tokens,
        chunks=chunks, period=period, **product_types(dtype, tf32=tf32),
    )  # fmt: skip
    lanes = Lanes(
        pairs=strips, channels=chunk, is_packed=is_packed, element=spec.element,
        accumulator=spec.accumulator, alignment=4 if is_packed else 1,
    )  # fmt: skip
    arguments = {
        "batch": batch,
        "length": length,
        "CHANNELS": channels,
        "LAYERS": tuple(
            Layer(n, _widths(n, config.outputs), h * w + spec.class_tokens)
            for n, (h, w) in zip(outputs, geometry.output_grids, strict=True)
        ),
        "GROUPS": groups,
        "LANES": lanes,
        "SPEC": spec,
    }
    return ConvLinearTiling(config.options, rounds * period, arguments)


def _widths(outputs: int, most: int) -> tuple[int, ...]:
    """Returns the widths of blocks of a linear layer's outputs, powers of two; all but the last are equal."""
    whole, rest = divmod(outputs, most)
    return (most,) * whole + ((padded(rest),) if rest else ())


def _groups(config: ConvLinear, geometry: Geometry, strips: int, kinds: Sequence[Any]) -> tuple[Group, ...]:
    """Returns the groups of branches: a branch of stride 1 alone, branches of stride 2 two by two.

    ``kinds`` has what else must be the same in branches that are computed by the same code.
    """
    ones = [(i,) for i, stride in enumerate(geometry.strides) if stride == 1]
    twos = [i for i, stride in enumerate(geometry.strides) if stride == 2]
    together = [tuple(twos[i : i + config.branches]) for i in range(0, len(twos), config.branches)]
    alike: dict[Any, list[tuple[int, ...]]] = {}
    for branches in (*ones, *together):
        first = branches[0]
        key = (geometry.strides[first], kinds[first]) if len(branches) == 1 else branches
        alike.setdefault(key, []).append(branches)
    groups = []
    for branches, *others in alike.values():
        stride = geometry.strides[branches[0]]
        height, width = geometry.output_grids[branches[0]]
        tokens = max(1, config.tokens // (strips * len(branches)))
        rows, columns = _strip(tokens, height, width, stride)
        groups.append(
            Group(
                stride=stride, branches=branches, twins=tuple(i for (i,) in others),
                height=height, width=width, rows=rows, columns=columns,
                strip_rows=-(-height // rows), strip_columns=-(-width // columns), first_turn=0, turns=0,
            )
        )  # fmt: skip
    sizes = [group.strip_rows * group.strip_columns for group in groups]
    placed, first_turn = [], 0
    for group, n in zip(groups, sizes, strict=True):
        placed.append(replace(group, turns=max(1, round(n / min(sizes))), first_turn=first_turn))
        first_turn += placed[-1].turns * (1 + len(group.twins))
    return tuple(placed)


def _strip(tokens: int, height: int, width: int, stride: int) -> tuple[int, int]:
    """Returns rows and columns of strips of ``tokens`` outputs: the fewest strips, then the fewest pixels."""

    def cost(shape: tuple[int, int]) -> tuple[int, int]:
        rows, columns = shape
        strips = -(-height // rows) * -(-width // columns)
        return strips, ((rows - 1) * stride + 3) * ((columns - 1) * stride + 3)

    shapes = [(1 << i, tokens >> i) for i in range(tokens.bit_length())]
    return min(shapes, key=cost)
