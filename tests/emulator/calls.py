"""The calls that the emulator makes: the memory-access tests' and some with more tiles."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import cvt_kernels as ck
from cvt_kernels import launch
from cvt_kernels.launch import launching, tables
from cvt_kernels.ops import cards
from cvt_kernels.ops.conv_linear.triton import forward as conv_linear
from cvt_kernels.ops.transformer_blocks import transformer_blocks
from cvt_kernels.records import Linear, Norm, TransformerBlock
from tests.cvt_kernels.ops import test_accesses as tests
from tests.cvt_kernels.ops.test_accesses import BFLOAT16, FLOAT16, FLOAT32


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        case: What is called, and the number of multiprocessors that it is planned for.
        arch: The GPU that the kernels are compiled for, as 80.
        precision: Of products in float32, ``ieee`` or ``tf32``.
        backends: What serves it and the operators that it is made of, the first one that can.
    """

    case: tests.Case
    arch: int = 80
    precision: str = "ieee"
    backends: tuple[ck.Backend, ...] = ("triton",)


def _call(function: Callable[..., Any], *args: Any, precision: str = "ieee", **kwargs: Any) -> Call:
    return Call(tests.Case(lambda: function(*args, **kwargs), ""), precision=precision)


def _layer(
    operator: str, rows: int, channels: int, outputs: int, *, dtype: Any = BFLOAT16, **settings: Any
) -> Any:
    sizes = {"rows": rows, "channels": channels, "outputs": outputs}
    return tests.call(operator, "", dtype=str(dtype).removeprefix("torch."), **sizes, **settings)


def _of_cvt_13() -> dict[str, Call]:
    """Returns what CvT-13 calls for one image of 224², in bfloat16, by stage."""
    calls: dict[str, Call] = {}
    for stage, (size, heads) in enumerate(((56, 1), (28, 3), (14, 6)), 1):
        tokens, keys, channels = size**2, (size // 2) ** 2, 64 * heads
        hidden, of_half = 4 * channels, "dtype=bfloat16"
        calls |= {
            f"stage {stage}: attention": _call(
                tests.call, "attention", of_half, queries=tokens, keys=keys, heads=heads, channels=64
            ),
            f"stage {stage}: projection": _call(
                tests.call,
                "conv_projection",
                of_half,
                height=size,
                width=size,
                channels=channels,
                kernel=3,
                padding=1,
                branches=3,
            ),
            f"stage {stage}: linear_gelu": _call(
                _layer, "linear_gelu", tokens, channels, hidden, gradient="all"
            ),
            f"stage {stage}: linear_add": _call(_layer, "linear_add", tokens, hidden, channels),
            f"stage {stage}: end of a branch": _call(
                tests.train_linear_add, tokens, 8, channels, BFLOAT16, batch=1, scales_sum=True
            ),
        }
    words = "dtype=bfloat16 height=224 width=224 inputs=3 channels=64 kernel=7 stride=4 padding=3"
    return calls | {"stage 1: embedding": _call(tests.call, "conv_embedding", words)}


def _of_every_dtype() -> dict[str, Call]:
    calls: dict[str, Call] = {}
    for name, dtype in {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}.items():
        calls |= {
            f"{name}: conv_linear": _call(tests.project_linearly, (14, 14), 64, (64, 64, 64), dtype=dtype),
            f"{name}: conv_linear in two launches": _call(
                tests.project_linearly, (7, 9), 200, (72,) * 3, dtype=dtype
            ),
            f"{name}: patches, packed weight": _call(
                tests.reduce_tokens, (40, 136), 4, (13, 27), dtype=dtype, packs=True
            ),
            f"{name}: classes of resized logits": _call(
                tests.find_classes, 150, ((5, 9), (20, 37)), dtype=dtype
            ),
            f"{name}: linear_add, training": _call(
                tests.train_linear_add, 150, 24, 136, dtype, batch=3, scales_sum=True
            ),
        }
    return calls


def _of_the_table() -> dict[str, Call]:
    """Returns calls with every configuration of sm_90's table, at its smallest and its largest sizes.

    A few rows less than a tile has, then more than two tiles, reach the same code as many.
    """

    def run(entry: tables.Entry, rows: int) -> Any:
        dtype, sizes = BFLOAT16, entry.sizes
        with contextlib.ExitStack() as stack:
            stack.enter_context(launch.overridden(entry.kernel, entry.config))
            if entry.kernel == "conv_linear":
                stack.enter_context(mock.patch.object(conv_linear, "_is_stacked", return_value=False))
                return tests.project_linearly((rows, 14), *sizes, 3 * sizes, dtype=dtype)
            if entry.kernel == "conv_projection_sliding_bwd_conv":
                words = "kernel=3 padding=1 batch=3 class_token=True branches=3 training=True gradient=all"
                sizes_of = {"height": rows, "width": 13, "channels": sizes[0], "dtype": "bfloat16"}
                return tests.call("conv_projection", words, **sizes_of)
            settings = cards.worded(next(iter(cards.card_of(entry.kernel).emulated.values())))
            sizes_of = {"rows": rows, "channels": sizes[0], "outputs": sizes[1], "dtype": "bfloat16"}
            return tests.call(entry.kernel, "", **settings | sizes_of)

    def size_of(entry: tables.Entry) -> tuple[tuple[int, ...], int]:
        return entry.sizes, entry.rows

    calls: dict[str, Call] = {}
    for kernel, config in dict.fromkeys((each.kernel, each.config) for each in tables.SM_90):
        entries = [each for each in tables.SM_90 if (each.kernel, each.config) == (kernel, config)]
        tile = getattr(config, "block_m", None)
        for entry, rows in (
            (min(entries, key=size_of), tile - 5 if tile else 3),
            (max(entries, key=size_of), 2 * tile + 5 if tile else 14),
        ):
            name = f"sm_90: {kernel} {entry.sizes} {rows} {fields_of(config)}"
            calls[name] = Call(tests.Case(functools.partial(run, entry, rows), ""), 90)
    return calls


def fields_of(config: Any) -> str:
    """Returns the fields of a configuration in a word."""
    return "-".join(str(int(value)) for value in dataclasses.astuple(config))


_TWO_LAUNCHES = {
    "sm_90: conv_linear in two launches": _call(
        tests.project_linearly, (7, 9), 200, (136,) * 3, dtype=BFLOAT16
    )._replace(arch=90)
}
_FEW = {
    f"sm_{arch}: conv_linear of few tokens": Call(
        tests.Case(
            lambda: tests.project_linearly((5, 6), 200, (72,) * 3, dtype=BFLOAT16, gap=0),
            "",
            launching.Chip(arch, 132),
        ),
        arch,
    )
    for arch in (80, 90)
}
#: Sizes of 1 are constants for Triton, which compiles other code for them.
_ONES = {
    "ones: conv_linear": _call(tests.project_linearly, (1, 1), 1, (1, 1, 1)),
    "ones: linear_add, training": _call(tests.train_linear_add, 1, 1, 1, BFLOAT16, batch=1),
}
_TF32 = {
    f"tf32: {name}": _call(tests.call, "attention", words, dtype="float32", precision="tf32")
    for name, words in cards.card_of("attention").emulated.items()
} | {
    "tf32: conv_linear": _call(tests.project_linearly, (14, 14), 64, (64, 64, 64), precision="tf32"),
}


def _by_cards() -> dict[str, Call]:
    """Returns the calls of the operators' cards: in every dtype, in TF32, and of sizes of 1."""
    calls: dict[str, Call] = {}
    for operator, card in cards.all_cards().items():
        for name, words in card.emulated.items():
            settings = cards.worded(words)
            arch = 89 if "float8" in settings.get("to", "") else 80
            for dtype in ("float32", "float16", "bfloat16"):
                call = _call(tests.call, operator, words, **{"dtype": dtype} | settings)
                calls[name if "dtype" in settings else f"{dtype}: {name}"] = call._replace(arch=arch)
        if card.factors and card.emulated:
            words = next(iter(card.emulated.values()))
            calls[f"tf32: {operator}"] = _call(tests.call, operator, words, dtype="float32", precision="tf32")
        for example in [*card.accesses.values()][:1]:
            settings = card.settings(cards.worded(example.words))
            kept = ("kernel", "padding", "branches") if "padding" in settings else ()
            ones = {
                name: 1 if type(value) is int and name not in kept else value
                for name, value in settings.items()
            }
            calls[f"ones: {operator}"] = _call(tests.call, operator, "", **ones)
    return calls


def _by_gluon(
    function: Callable[..., Any], *args: Any, programs: int, dtype: Any = BFLOAT16, **kwargs: Any
) -> Call:
    case = tests.Case(lambda: function(*args, dtype=dtype, **kwargs), "", launching.Chip(90, programs))
    return Call(case, 90, backends=("gluon", "triton", "reference"))


def _blocks_serving(
    grid: tuple[int, int], heads: int, count: int, *, tokens: int, dtype: Any, mean: float = 0.0
) -> Any:
    channels, approximate = 64 * heads, "quick" if tokens == 0 else "none"
    x = tests.randn(2, tokens + grid[0] * grid[1], channels, dtype=dtype)
    x = x.round() + mean if mean else x  # integers, which every dtype has

    def layer(inputs: int, outputs: int) -> Linear:
        weight = tests.randn(outputs, inputs, dtype=dtype) / inputs**0.5
        return Linear(weight, tests.randn(outputs, dtype=dtype))

    def norm() -> Norm:
        return Norm(tests.randn(channels, dtype=dtype), tests.randn(channels, dtype=dtype), 1e-5)

    blocks = [
        TransformerBlock(
            norm(),
            tuple(tests.random_conv(channels, dtype=dtype, stride=n, padding=1) for n in (1, 2, 2)),
            (layer(channels, channels), layer(channels, channels), layer(channels, channels)),
            heads,
            channels**-0.5,
            layer(channels, channels),
            norm(),
            layer(channels, 4 * channels),
            approximate,
            layer(4 * channels, channels),
        )
        for _ in range(count)
    ]
    return transformer_blocks(x, grid, blocks)


#: Tails of M, N and K; one and several tiles of a program, odd numbers of them, more programs than tiles;
#: each tile of ``gluon.TILES``.
_GLUON = {
    **{
        f"gluon: {approximate} GELU, {sizes}, {programs} programs": _by_gluon(
            _layer, "linear_gelu", *sizes, approximate=approximate, programs=programs
        )
        for approximate, sizes, programs in (
            ("none", (197, 384, 384), 1),
            ("tanh", (197, 200, 136), 3),
            ("quick", (1, 64, 64), 132),
            ("none", (785, 192, 768), 7),
        )
    },
    **{
        f"gluon: sum{' in place' * inplace}, {sizes}, {programs} programs": _by_gluon(
            _layer, "linear_add", *sizes, inplace=inplace, programs=programs
        )
        for sizes, inplace, programs in (
            ((197, 768, 384), True, 2),
            ((300, 384, 384), False, 5),
            ((65, 264, 136), True, 1),
            ((785, 64, 64), True, 132),
        )
    },
    "gluon: float16 GELU": _by_gluon(_layer, "linear_gelu", 197, 192, 192, dtype=FLOAT16, programs=3),
    **{
        f"gluon: Q, K and V of {grid}, {channels} to {outputs} channels, {programs} programs": _by_gluon(
            tests.project_linearly, grid, channels, (outputs,) * 3, programs=programs
        )
        for grid, channels, outputs, programs in (
            ((14, 14), 64, 64, 5),
            ((7, 9), 136, 200, 132),
            ((14, 13), 192, 128, 1),
        )
    },
    "gluon: two blocks": _by_gluon(_blocks_serving, (7, 6), 3, 2, tokens=1, programs=5),
    "gluon: three blocks, float16": _by_gluon(
        _blocks_serving, (5, 5), 2, 3, tokens=0, dtype=FLOAT16, programs=3
    ),
    "gluon: two blocks, means of 100 deviations": _by_gluon(
        _blocks_serving, (8, 8), 3, 2, tokens=1, mean=100.0, programs=1
    ),
    **{
        f"gluon: Q, K and V of few tokens, {channels} to {outputs} channels": _by_gluon(
            tests.project_linearly, (14, 13), channels, (outputs,) * 3, programs=132, gap=0
        )
        for channels, outputs in ((64, 64), (384, 384), (136, 200))
    },
    "gluon: two blocks of few tokens": _by_gluon(_blocks_serving, (7, 6), 3, 2, tokens=1, programs=132),
    "gluon: three blocks of few tokens, float16": _by_gluon(
        _blocks_serving, (5, 5), 2, 3, tokens=0, dtype=FLOAT16, programs=132
    ),
    "gluon: two blocks of few tokens, means of 100 deviations": _by_gluon(
        _blocks_serving, (8, 8), 3, 2, tokens=1, mean=100.0, programs=132
    ),
    "gluon: float16 sum": _by_gluon(_layer, "linear_add", 197, 192, 192, dtype=FLOAT16, programs=3),
}

CALLS: dict[str, Call] = {
    name: Call(case, 89 if name.startswith("float8") else 80)
    for name, case in tests.CASES.items()
    # The reference has no parts of blocks.
    if name not in tests.OF_BLOCKS
}
#: Calls of kernels with the configurations that ship for sm_90, which is what they are compiled for.
SHIPPED = _of_the_table()
CALLS |= _of_every_dtype() | _TWO_LAUNCHES | _FEW | _ONES | _TF32 | _by_cards() | _GLUON | _of_cvt_13()
CALLS |= SHIPPED

#: A part of them, with a kernel of each family, all of which compile quickly.
SMOKE = (
    "no gradient", "keys on the chip", "float32: projection", "embedding with positions",
    "embedding of many channels with positions",
    "with linear layers", "convolution and GELU", "GELU", "sum of 16 bits", "LayerNorm", "MLP", "int8 rows",
    "LayerNorm to int8", "GELU to int8",
    "tf32: linear_add",
    "gluon: sum in place, (65, 264, 136), 1 programs",
)  # fmt: skip

#: Likewise for sm_90, of kernels with bulk copies (TMA) and products of four warps.
SMOKE_90 = (
    "bfloat16: attention", "bfloat16: linear_add", "bfloat16: linear_gelu",
    "tf32: linear_gelu",
)  # fmt: skip
