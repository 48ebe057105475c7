"""The memory that every Triton kernel touches, in Triton's interpreter, at sizes without full tiles."""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from triton import language as tl
from triton.runtime.interpreter import InterpretedFunction

import cvt_kernels as ck
from benchmarks import floors
from cvt_kernels import machine, ops
from cvt_kernels.launch import launching
from cvt_kernels.ops import cards
from cvt_kernels.ops.cards import call_public
from cvt_kernels.ops.conv_linear import few_rows, stacked
from cvt_kernels.ops.conv_projection.triton.forward import NormOfRows
from cvt_kernels.ops.linear.card import BIAS_GRADIENT
from cvt_kernels.ops.transformer_blocks import attention_add
from cvt_kernels.tuning import tuner
from tests.accesses import Accesses, recorded_accesses, tensors_of
from tests.cvt_kernels.test_reference import random_conv

pytestmark = pytest.mark.skipif(not machine.INTERPRETING, reason="the kernels are compiled, not interpreted")
#: Few multiprocessors, so that programs that take several tiles are several all the same.
CHIP = launching.Chip(90, 2)
FLOAT16, BFLOAT16, FLOAT32 = torch.float16, torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A call of an operator.

    Attributes:
        call: Makes the call and returns its results.
        kernels: The kernels that it launches, without ``_`` before and ``_kernel`` behind.
        chip: The GPU that it is planned for.
        is_dense: Whether the launches read all rows of their tensors.
    """

    call: Callable[[], Any]
    kernels: str
    chip: launching.Chip = CHIP
    is_dense: bool = True


def randn(*shape: int, dtype: torch.dtype = FLOAT32, gap: int = 0, grad: bool = False) -> Tensor:
    """Returns random numbers; with ``gap`` there are others before each row and behind it."""
    wide = torch.randn(*shape[:-1], shape[-1] + 2 * gap).to(dtype)
    return wide[..., gap : gap + shape[-1]].requires_grad_(grad)


def gradients(outs: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Returns the outputs and the gradients of the inputs."""
    outs = outs if isinstance(outs, tuple) else (outs,)
    return *outs, *torch.autograd.grad(outs, inputs, [torch.ones_like(out) for out in outs])


# What no card calls ---------------------------------------------------------------------------------------


def project_linearly(grid, channels, outputs, *, strides=(1, 2, 2), dtype=FLOAT32, gap=4):
    x = randn(3, 1 + grid[0] * grid[1], channels, dtype=dtype, gap=gap)
    convs = [random_conv(channels, dtype=dtype, stride=stride, padding=1) for stride in strides]
    linears = [(randn(n, channels, dtype=dtype), randn(n, dtype=dtype)) for n in outputs]
    with torch.no_grad():
        return ck.conv_linear(x, grid, convs, linears)


def project_few(grid, channels, outputs, *, statistics, block_m=16, dtype=FLOAT16):
    """Projects a few tokens with LayerNorm, whose statistics the kernel reads or computes."""
    x = randn(2, 1 + grid[0] * grid[1], channels, dtype=dtype)
    convs = [random_conv(channels, dtype=dtype, stride=stride, padding=1) for stride in (1, 2, 2)]
    parts, vectors = (
        x.float().flatten(0, 1).split(16, dim=1),
        [randn(channels, dtype=dtype) for _ in range(2)],
    )
    squares = [part.var(1, correction=0) * part.shape[1] for part in parts]
    sums = torch.stack([torch.stack([part.sum(1) for part in parts]), torch.stack(squares)])
    norm = NormOfRows(sums if statistics else None, 16, *vectors, 1e-5)
    weight, bias = randn(3 * outputs, channels, dtype=dtype), randn(3 * outputs, dtype=dtype)
    out = torch.zeros(stacked._rows_of(x, stacked._geometry(grid, convs))[1], outputs, dtype=dtype)
    geometry, taps = stacked._geometry(grid, convs), few_rows.packed_taps(convs)
    few_rows.project_few(x, geometry, taps, weight, bias, out, block_m, norm)
    return x, convs, norm, weight, bias, out


def attend_and_add(queries, keys, heads, dim, outputs, *, dtype=FLOAT16, block_m=16, batch=2):
    """Attends from a few tokens and adds the layer behind to a residual, in place."""
    q, k, v = (randn(batch, n, heads, dim, dtype=dtype, gap=8) for n in (queries, keys, keys))
    weight, bias = randn(outputs, heads * dim, dtype=dtype), randn(outputs, dtype=dtype)
    residual = randn(batch * queries, outputs, dtype=dtype)
    before, scale = residual.clone(), -(dim**-0.5)
    sums = attention_add.attention_add(q, k, v, scale, weight, bias, residual, residual, block_m)
    return q, k, v, weight, bias, before, residual, sums


def reduce_tokens(channels, ratio, size, *, gap=0, dtype=FLOAT16, packs=False):
    inputs, outputs = channels
    image = randn(2, size[0], size[1] * inputs, dtype=dtype, gap=gap).unflatten(2, (size[1], inputs))
    weight = randn(outputs, inputs, ratio, ratio, dtype=dtype)
    weight = weight.contiguous(memory_format=torch.channels_last) if packs else weight
    vectors = (randn(outputs, dtype=dtype) for _ in range(3))
    return ck.conv_embedding(image.permute(0, 3, 1, 2), weight, *vectors, stride=ratio, padding=0)


def find_classes(classes, sizes, *, gap=0, dtype=FLOAT16, channels_last=True):
    size, to = sizes
    logits = randn(2, size[0], size[1], classes, dtype=dtype, gap=gap).permute(0, 3, 1, 2)
    classes = ck.resized_argmax(logits if channels_last else logits.contiguous(), to)
    resized = F.interpolate(logits.double(), to, mode="bilinear", align_corners=False)
    return resized.gather(1, classes[:, None]).to(dtype)  # numbers, which are compared


CONVOLUTIONS = {
    "with linear layers": Case(lambda: project_linearly((5, 3), 5, (7, 3, 17)), "conv_linear_fwd"),
    "with linear layers, pairs": Case(
        lambda: project_linearly((3, 5), 34, (18, 6, 6), dtype=FLOAT16), "conv_linear_fwd"
    ),
    "with linear layers, few tokens": Case(
        lambda: project_linearly((127, 1), 200, (24, 24, 24), strides=(1, 1, 1), dtype=FLOAT16, gap=0),
        "conv_linear_few",
        launching.Chip(90, 132),
    ),
    "with linear layers, grouped": Case(  # without rows between two groups, which nobody writes
        lambda: project_linearly((127, 1), 200, (24, 24, 24), strides=(1, 1, 1), dtype=FLOAT16),
        "conv_projection_sliding_fwd grouped_linear",
    ),
    "patches by a packed weight": Case(
        lambda: reduce_tokens((5, 13), 3, (9, 6), gap=1, packs=True), "conv_embedding_patches"
    ),
    "classes of resized logits": Case(
        lambda: find_classes(19, ((3, 5), (12, 20)), gap=1), "pixel_classes resized_argmax"
    ),
    "classes of smaller logits": Case(
        lambda: find_classes(70, ((7, 9), (3, 4)), dtype=FLOAT32, channels_last=False),
        "pixel_classes resized_argmax",
        is_dense=False,
    ),
    "one class": Case(
        lambda: find_classes(1, ((2, 3), (5, 7)), dtype=BFLOAT16),
        "pixel_classes resized_argmax",
        is_dense=False,
    ),
}

# Linear layers --------------------------------------------------------------------------------------------


def layer(rows, inputs, outputs, dtype, grad=False):
    shapes = (rows, inputs), (outputs, inputs), (outputs,), (rows, outputs)
    return [randn(*shape, dtype=dtype, grad=grad) for shape in shapes]


def train_linear_add(rows, inputs, outputs, dtype=FLOAT32, stream=FLOAT32, *, batch=0, scales_sum=False):
    """Ends a branch of ``dtype`` beside a stream of another one, in a ``batch`` with factors of images."""
    x, weight, bias, _ = layer(rows, inputs, outputs, dtype, grad=True)
    residual = randn(rows, outputs, dtype=stream, grad=True)
    scale, shape = (torch.rand(batch), (batch, rows // batch, -1)) if batch else (None, (rows, -1))
    with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", dtype, enabled=stream != dtype):
        out = ck.linear_add(
            x.view(shape), weight, bias, residual.view(shape), scale=scale, scales_sum=scales_sum
        )
    return gradients(out, x, weight, bias, residual)


LINEAR = {
    "end of a branch": Case(lambda: train_linear_add(131, 5, 67), f"linear_ends {BIAS_GRADIENT}"),
    "end of a branch of 16 bits": Case(
        lambda: train_linear_add(262, 24, 192, BFLOAT16, batch=2), f"linear_ends {BIAS_GRADIENT}"
    ),
    "scaled sum": Case(
        lambda: train_linear_add(201, 5, 67, BFLOAT16, batch=3, scales_sum=True),
        f"linear_ends {BIAS_GRADIENT}",
    ),
}

# By the cards ---------------------------------------------------------------------------------------------


def made(operator: str, settings: dict[str, Any]) -> tuner.Call:
    """Returns the arguments of a call that a card makes."""
    return cards.make(operator, cards.card_of(operator).settings(settings)).call


def call(operator: str, words: str, **settings: Any) -> Any:
    """Makes a call by the card of an operator; returns the results, and the gradients that it has."""
    arguments = made(operator, cards.worded(words) | settings)
    outs = call_public(operator, arguments.record)
    leaves = [tensor for tensor in arguments.tensors() if tensor.requires_grad]
    return gradients(tuple(outs) if isinstance(outs, tuple) else outs, *leaves) if leaves else outs


BY_CARD = {
    name: Case(
        functools.partial(call, operator, each.words),
        each.kernels,
        CHIP._replace(capability=each.capability),
        each.is_dense,
    )
    for operator, card in cards.all_cards().items()
    for name, each in card.accesses.items()
}

#: Launches that no operator makes but transformer_blocks, by Gluon.
OF_BLOCKS = {
    "projection with LayerNorm": Case(
        lambda: project_few((5, 4), 40, 24, statistics=False)[-1], "conv_linear_few"
    ),
    "projection with statistics": Case(
        lambda: project_few((5, 4), 40, 24, statistics=True)[-1], "conv_linear_few"
    ),
    "attention and a layer": Case(lambda: attend_and_add(21, 5, 3, 7, 67)[-2:], "attention_add"),
}

CASES = CONVOLUTIONS | LINEAR | BY_CARD | OF_BLOCKS

# The tests ------------------------------------------------------------------------------------------------


def run(
    case: Case, change: Callable[[launching.Launch], launching.Launch] = lambda launch: launch
) -> Accesses:
    """Returns what a case touches, its results included, with changed launches."""
    torch.manual_seed(0)
    with (
        launching.intercepted_launches(lambda launch: change(launch).start(), case.chip),
        ck.use_backend("triton"),
        recorded_accesses() as accesses,
    ):
        results = case.call()
        for result in results if isinstance(results, tuple) else (results,):
            result.clone()
    return accesses


@functools.cache
def accesses_of(name: str) -> Accesses:
    return run(CASES[name])


def name_of(launch: launching.Launch) -> str:
    return launch.kernel.__name__.removeprefix("_").removesuffix("_kernel")


@pytest.mark.parametrize("name", CASES)
def test_every_program_keeps_to_its_own_memory(name):
    accesses = accesses_of(name)
    assert accesses.faults == []
    assert {name_of(traffic.launch) for traffic in accesses.traffic} == set(CASES[name].kernels.split())


#: The parameters that do not count among the bytes of kernels that begin so.
NOT_COUNTED = {start: names for card in cards.all_cards().values() for start, names in card.uncounted.items()}


@pytest.mark.parametrize("name", CASES)
def test_launches_move_the_bytes_that_are_said(name):
    for traffic in accesses_of(name).traffic:
        kernel = name_of(traffic.launch)
        parameters = next((NOT_COUNTED[start] for start in NOT_COUNTED if kernel.startswith(start)), "")
        hidden = {f"{parameter}_ptr{s}" for parameter in parameters.split() for s in ("", "s")}
        counted = {n: value for n, value in traffic.launch.arguments.items() if n not in hidden}
        moved, said = traffic.bytes_of(tensors_of(counted)), floors.work_of(traffic.launch).bytes
        assert moved == said if CASES[name].is_dense else moved <= said, kernel


def test_every_kernel_has_a_case():
    kernels = set()
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        if ".triton" in module.name or module.name.endswith((".few_rows", ".attention_add")):
            values = vars(importlib.import_module(module.name)).values()
            kernels |= {each.__name__ for each in values if isinstance(each, InterpretedFunction)}
    with_case = {kernel for case in CASES.values() for kernel in case.kernels.split()}
    assert {kernel for kernel in kernels if kernel.endswith("_kernel")} == {f"_{k}_kernel" for k in with_case}


# Planted faults -------------------------------------------------------------------------------------------


@triton.jit
def _copy_kernel(x_ptr, y_ptr, count, step, end, shift, BLOCK: tl.constexpr):
    """Copies x to y, of ``count`` elements, if ``step`` is BLOCK, ``end`` is ``count`` and ``shift`` is 0."""
    i = tl.program_id(0) * step + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i + shift, mask=i + shift < count), mask=i < end)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"programs": 2}, "28 bytes of an output (23,) are never written"),
        ({"end": 22}, "4 bytes of an output (23,) are never written"),
        ({"end": 24}, "_copy_kernel writes 4 bytes outside of its tensors, first in program 2"),
        ({"count": 24}, "_copy_kernel reads 4 bytes outside of its tensors, first in program 2"),
        ({"shift": -1}, "_copy_kernel reads 4 bytes outside of its tensors, first in program 0"),
        ({"step": 7}, "_copy_kernel writes y_ptr in program 0 where program 1 writes"),
        ({"programs": 4, "step": 0}, "_copy_kernel writes y_ptr in program 0 where program 3 writes"),
        ({"inplace": True}, None),
        (
            {"inplace": True, "shift": 1},
            "_copy_kernel reads x_ptr and y_ptr in program 0 where program 1 writes",
        ),
    ],
    ids=str,
)
def test_a_fault_of_programs_or_bounds_is_found(changes, fault):
    settings = {"count": 23, "end": 23, "shift": 0, "step": 8, "programs": 3, "inplace": False} | changes
    programs, inplace = settings.pop("programs"), settings.pop("inplace")
    wide = torch.randn(25)  # what lies beside x and belongs to nothing
    with recorded_accesses() as accesses:
        y = wide[1:24] if inplace else torch.empty(23)
        _copy_kernel[(programs,)](y if inplace else wide[1:24], y, BLOCK=8, **settings)
    assert fault in accesses.faults if fault else accesses.faults == []


@triton.jit
def _turn_kernel(x_ptr, y_ptr, KIND: tl.constexpr):
    """Writes 8 elements of x to y, then reverses y in a way."""
    i = tl.arange(0, 8)
    if KIND == "unwritten":
        tl.store(y_ptr + i, tl.load(y_ptr + i))
    elif KIND == "atomic":
        tl.atomic_add(y_ptr + i, tl.load(x_ptr + i))
    elif KIND == "not aligned":
        tl.store(y_ptr + i, tl.load((x_ptr + 1).to(tl.pointer_type(tl.int64), bitcast=True)).to(tl.float32))
    else:
        tl.store(y_ptr + i, tl.load(x_ptr + i))
        if KIND == "barrier":
            tl.debug_barrier()
        if KIND == "again":
            tl.store(y_ptr + 7 - i, tl.load(x_ptr + i))
        else:
            tl.store(x_ptr + i, tl.load(y_ptr + 7 - i))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("barrier", None),
        ("no barrier", "_turn_kernel reads y_ptr where the same program wrote, without a barrier in between"),
        ("again", "_turn_kernel writes y_ptr twice in one program without a barrier in between"),
        ("unwritten", "_turn_kernel reads y_ptr where nothing has been written"),
        ("atomic", "_turn_kernel has atomic operations"),
        ("not aligned", "_turn_kernel reads at an address that is not a multiple of the width"),
    ],
)
def test_a_fault_within_a_program_is_found(kind, fault):
    x = torch.randn(8)
    with recorded_accesses() as accesses:
        _turn_kernel[(1,)](x, torch.empty(8), KIND=kind)
    assert fault in accesses.faults if fault else accesses.faults == []


def test_what_pytorch_reads_and_writes_counts_too():
    y = torch.randn(8)
    with recorded_accesses() as accesses:
        half, zeros = torch.empty(8), torch.empty(8).zero_()
        half[:4] = 1
        _turn_kernel[(1,)](zeros, y, KIND="barrier")
        half[:4].sum()
        assert accesses.faults == []
        half.sum()
    assert accesses.faults == ["aten.sum.default reads what nothing has written, of a tensor (8,)"]


@pytest.mark.parametrize(
    ("name", "kernel", "argument", "by", "fault"),
    [
        ("keys on the chip", "attention_fwd", "queries", 1, "outside of its tensors"),
        ("keys in a loop", "attention_bwd_dkdv", "keys", 1, "outside of its tensors"),
        ("convolution and GELU", "depthwise_conv_gelu_fwd", "groups", -1, "where program"),
        ("sum", "linear_add", "rows", 1, "outside of its tensors"),
        ("MLP", "layer_norm_mlp_fwd", "rows", -1, "are never written"),
    ],
)
def test_a_wrong_size_is_found(name, kernel, argument, by, fault):
    def change(launch):
        if name_of(launch) != kernel:
            return launch
        return launch._replace(arguments=launch.arguments | {argument: launch.arguments[argument] + by})

    assert any(fault in found for found in run(CASES[name], change).faults)
