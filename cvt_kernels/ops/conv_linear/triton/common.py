"""The launch configurations and plans of ``conv_linear``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import machine
from ...conv_projection.triton.common import Geometry
from ...conv_projection.triton.walk import WalkTile
from ...triton_launch import Budget, Overrides

#: The most channels of a token, before and after the linear layers.
MAX_CHANNELS = 512

# Launch configurations ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The way the kernel cuts its work.

    Attributes:
        tokens: Rows of the products of a program, all branches of its group together.
        outputs: The most channels of a product that a program computes at once.
        num_warps: Warps of a program; each has a strip of outputs at a time.
        num_stages: Depth of the pipeline of loads of the linear weights.
        registers: The most that a thread may take.
    """

    tokens: int
    outputs: int
    num_warps: int
    num_stages: int
    registers: int

    @property
    def options(self) -> dict[str, int]:
        """Triton's options of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.registers}


# By compute capability and bytes per element: the widest token that a configuration serves → it.
_HALF = {
    64: LaunchConfig(tokens=128, outputs=64, num_warps=8, num_stages=2, registers=128),
    256: LaunchConfig(tokens=128, outputs=64, num_warps=8, num_stages=2, registers=128),
    512: LaunchConfig(tokens=64, outputs=64, num_warps=8, num_stages=2, registers=128),
}
_SINGLE = {
    512: LaunchConfig(tokens=64, outputs=32, num_warps=8, num_stages=2, registers=255),
}
CONFIGS = {(80, 2): _HALF, (90, 2): _HALF, (100, 2): _HALF, (80, 4): _SINGLE}

# Plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The branches that a program computes together: ``GROUPS[i]`` in the kernel.

    It is a dataclass because Triton forgets the field names of NamedTuples within a tuple.

    Attributes:
        stride: The stride of its convolutions.
        branches: Their numbers; their outputs are computed from the same pixels.
        height, width: The output grid.
        rows, columns: Those of a strip of outputs, which a lane computes at once.
        strip_rows, strip_columns: How many strips there are below and beside one another.
        repeats: How many strips a lane computes for one tile.
        first_turn, turns: Which programs of a period are its.
    """

    stride: int
    branches: tuple[int, ...]
    height: int
    width: int
    rows: int
    columns: int
    strip_rows: int
    strip_columns: int
    repeats: int
    first_turn: int
    turns: int


class Spec(NamedTuple):
    """The other constants of the kernel: ``SPEC``.

    Attributes:
        height, width: The input grid.
        class_tokens: Class tokens of an image, 0 or 1.
        class_rows: Images whose class tokens are multiplied by one program.
        chunks: Chunks of channels of a token.
        outputs: Channels that a program computes at once.
        period: Programs after which the turns of the groups begin again.
        most_halvings: As often as a power of two can be halved here.
        element: Triton's dtype of the activations.
        operand: Triton's dtype of the factors of a product: ``element``, but float32 for bfloat16 in Triton's
            interpreter, whose product of bfloat16 is wrong.
        accumulator: float32, or float64 for float64.
        precision: ``input_precision`` of ``tl.dot``.
    """

    height: int
    width: int
    class_tokens: int
    class_rows: int
    chunks: int
    outputs: int
    period: int
    most_halvings: int
    element: Any
    operand: Any
    accumulator: Any
    precision: str


class Plan(NamedTuple):
    """The plan of a launch: its options, programs, and arguments (sizes and constants)."""

    options: dict[str, int]
    programs: int
    arguments: dict[str, Any]

    @classmethod
    def of(cls, x: Tensor, geometry: Geometry, weights: Sequence[Tensor], outputs: tuple[int, ...]) -> Plan:
        """Returns the plan for tokens ``x`` (B, T, C), of which ``outputs`` channels are made."""
        chip = machine.chip(x.device)
        config = configuration(x.shape[2], x.element_size(), chip.capability)
        is_packed = (
            x.element_size() == 2
            and not (x.shape[2] | x.stride(0) | x.stride(1)) % 2
            and all(tensor.data_ptr() % 4 == 0 for tensor in (x, *weights))
        )
        tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return _plan(config, x.shape, x.dtype, is_packed, tf32, geometry, outputs, chip)


@functools.lru_cache(maxsize=1024)
def _plan(
    config: LaunchConfig, shape: torch.Size, dtype: torch.dtype, is_packed: bool, tf32: bool,
    geometry: Geometry, outputs: tuple[int, ...], chip: machine.Chip,
) -> Plan:  # fmt: skip
    batch, tokens, channels = shape
    height, width = geometry.grid
    size = min(dtype.itemsize, 4)
    chunk = min(128 // size, max(16, triton.next_power_of_2(channels)))
    chunks = -(-channels // chunk)
    warps = config.num_warps
    groups = _groups(config, geometry)
    tiles = [-(-batch * g.strip_rows * g.strip_columns // (warps * g.repeats)) for g in groups]
    length = 8 if chunks == 1 else 1
    jobs = [-(-n // length) for n in tiles]
    class_count = tokens - height * width
    class_rows = config.tokens
    period = sum(g.turns for g in groups)
    rounds = max(-(-n // g.turns) for n, g in zip(jobs, groups, strict=True))
    accumulator = tl.float64 if dtype == torch.float64 else tl.float32
    element = _ELEMENTS[dtype]
    upcast = machine.INTERPRETING and dtype == torch.bfloat16
    spec = Spec(
        height=height,
        width=width,
        class_tokens=class_count,
        class_rows=class_rows,
        chunks=chunks,
        outputs=min(config.outputs, max(16, triton.next_power_of_2(max(outputs)))),
        period=period,
        most_halvings=config.tokens.bit_length(),
        element=element,
        operand=tl.float32 if upcast else element,
        accumulator=accumulator,
        precision="tf32" if tf32 else "ieee",
    )
    walk = WalkTile(
        pairs=warps, channels=chunk, is_packed=is_packed, element=element, accumulator=accumulator
    )
    arguments = {
        "batch": batch,
        "length": length,
        "CHANNELS": channels,
        "OUTPUTS": outputs,
        "GROUPS": groups,
        "WALK": walk,
        "SPEC": spec,
    }
    programs = rounds * period + class_count * -(-batch // class_rows)
    return Plan(config.options, programs, arguments)


_ELEMENTS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _groups(config: LaunchConfig, geometry: Geometry) -> tuple[Group, ...]:
    ones = [(i,) for i, stride in enumerate(geometry.strides) if stride == 1]
    twos = [i for i, stride in enumerate(geometry.strides) if stride == 2]
    pairs = [tuple(twos[i : i + 2]) for i in range(0, len(twos), 2)]
    groups = []
    for branches in (*ones, *pairs):
        stride = geometry.strides[branches[0]]
        height, width = geometry.output_grids[branches[0]]
        columns = 2 if stride == 1 else 1
        most = config.tokens // (config.num_warps * columns * len(branches))
        rows = min((r for r in (4, 2, 1) if r <= most), key=lambda r: _cost(r, height, stride, len(branches)))
        strip_rows, strip_columns = -(-height // rows), -(-width // columns)
        repeats = config.tokens // (config.num_warps * rows * columns * len(branches))
        groups.append(
            Group(
                stride=stride, branches=branches, height=height, width=width, rows=rows, columns=columns,
                strip_rows=strip_rows, strip_columns=strip_columns, repeats=repeats, first_turn=0, turns=0,
            )
        )  # fmt: skip
    tiles = [g.strip_rows * g.strip_columns / g.repeats for g in groups]
    turns = [max(1, round(n / min(tiles))) for n in tiles]
    return tuple(
        replace(group, turns=n, first_turn=sum(turns[:i]))
        for i, (group, n) in enumerate(zip(groups, turns, strict=True))
    )


def _cost(rows: int, height: int, stride: int, branches: int) -> float:
    """Returns the relative cost of computing a grid in strips of ``rows`` rows."""
    columns = 2 if stride == 1 else 1
    pixels = ((rows - 1) * stride + 3) * ((columns - 1) * stride + 3)
    outputs = rows * columns * branches
    # Three instructions for two channels of a pixel; 9 products per output, and about 5 for all else.
    return -(-height // rows) * rows * (14 + 1.5 * pixels / outputs)


def configuration(channels: int, element_size: int, capability: int) -> LaunchConfig:
    """Returns the configuration of the kernel for tokens of some channels."""
    generation = 80 if capability < 90 or capability >= 120 else min(capability // 10 * 10, 100)
    by_width = CONFIGS.get((generation, min(element_size, 4)), CONFIGS[80, min(element_size, 4)])
    return by_width[min(width for width in by_width if channels <= width)]
