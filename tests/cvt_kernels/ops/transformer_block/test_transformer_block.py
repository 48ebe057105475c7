"""transformer_block on a CPU: more kinds of blocks than the contract has, and what it refuses."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, reference
from cvt_kernels.ops.transformer_block import transformer_block
from cvt_kernels.records import Linear
from cvt_kernels.tuning import tuner
from tests.cvt_kernels.ops.transformer_block.calls import (
    BACKENDS,
    call,
    check,
    every_backend,
    make,
    pyramid,
    some_rows,
    with_quantized,
)
from tests.cvt_kernels.test_reference import random_conv


def strided(x, grid, block):
    return x.transpose(1, 2).contiguous().transpose(1, 2), grid, block


def with_float32_norms(x, grid, block):
    """Returns a call of 16 bits whose BatchNorms are float32."""
    wide = ({name: getattr(conv, name).float() for name in conv._fields[1:5]} for conv in block.convs)
    convs = tuple(conv._replace(**floats) for conv, floats in zip(block.convs, wide, strict=True))
    return x, grid, block._replace(reduce=convs)


def of_no_grid():
    """Returns a call of tokens whose places nothing needs."""
    x, _, block = pyramid(ratio=0, convolves=False)
    return x[:, :29].contiguous(), (1, 1), block


CASES = {
    "tanh": lambda: make(class_tokens=1, approximate="tanh"),
    "quick": lambda: make(approximate="quick"),
    "bare": lambda: make(class_tokens=1, bias=False),
    "bfloat16": lambda: make(dtype=torch.bfloat16, class_tokens=1, channels=48, approximate="quick"),
    "float32 norms": lambda: with_float32_norms(*make(dtype=torch.bfloat16)),
    "one token": lambda: make(1, (1, 1), 5, 1, 1),
    "one column": lambda: make(3, (7, 1), 21, 7),
    "all keys": lambda: make(grid=(3, 3), strides=(1, 1, 1), scale=0.1),
    "wide heads": lambda: make(grid=(3, 8), strides=(1, 3, 3), channels=20, width=36, heads=2),
    "pyramid tanh": lambda: pyramid(approximate="tanh"),
    "pyramid quick": lambda: pyramid(approximate="quick", bias=False),
    "PVT quick": lambda: pyramid(approximate="quick", convolves=False),
    "PVT bare": lambda: pyramid(convolves=False, bias=False),
    "pyramid strided": lambda: strided(*pyramid()),
    "pyramid bfloat16": lambda: pyramid(dtype=torch.bfloat16, channels=48),
    "PVT bfloat16": lambda: pyramid(dtype=torch.bfloat16, channels=48, convolves=False),
    "no reduction": lambda: pyramid(ratio=0),
    "ratio of 1": lambda: pyramid(grid=(4, 4), ratio=1),
    "ratio of 2, cut": lambda: pyramid(grid=(7, 5)),
    "ratio of 3, cut": lambda: pyramid(grid=(11, 7), ratio=3),
    "ratio of 8, cut": lambda: pyramid(grid=(17, 25), ratio=8),
    "ratio of the grid": lambda: pyramid(grid=(8, 8), ratio=8),
    "one of a pyramid": lambda: pyramid(1, (1, 1), ratio=0),
    "one reduced": lambda: pyramid(1, (1, 1), 5, 1, ratio=1),
    "many narrow heads": lambda: pyramid(3, (7, 1), 21, 7, ratio=1),
    "a long row": lambda: pyramid(grid=(3, 130), channels=17, heads=1, hidden=33, ratio=3, scale=0.1),
    "many hidden": lambda: pyramid(grid=(31, 8), channels=20, width=36, heads=2, hidden=530),
    "plain": lambda: pyramid(grid=(1, 30), ratio=0, convolves=False, channels=6, hidden=7),
    "tokens of no grid": of_no_grid,
}  # fmt: skip


@every_backend
@pytest.mark.parametrize("name", CASES)
def test_values(backend, name):
    check(backend, CASES[name]())


@every_backend
def test_views_of_one_weight_are_told_apart(backend):
    x, grid, block = pyramid(grid=(8, 8), ratio=4)
    weight = block.reduce.weight
    for ratio in (4, 2, 4):
        reduction = block.reduce._replace(weight=weight[:, :, :ratio, :ratio])
        check(backend, (x, grid, block._replace(reduce=reduction)))


@pytest.mark.parametrize("backend", ["reference", "composed"])
def test_convolutional_projections_and_a_convolution_in_the_mlp(backend):
    x, grid, block = pyramid()
    convs = tuple(random_conv(24, dtype=torch.float32, stride=stride, padding=1) for stride in (1, 2, 2))
    block = block._replace(reduce=convs)
    check(backend, (x, grid, block))
    with pytest.raises(ck.BackendUnavailable, match="has no convolution in the"):
        call("cpu", (x, grid, block))


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize("inplace", [False, True])
def test_some_tokens_without_convolutions(backend, inplace):
    x, _, block = pyramid(ratio=0, convolves=False)
    rows = torch.tensor([[0, 3, 29], [1, 2, -1]])
    whole = reference.transformer_block(x, (1, 1), block)
    expected = reference.scatter_rows(x, rows, reference.gather_rows(whole, rows))
    stream = x.clone()
    out = call(backend, (stream, (1, 1), block), rows=rows, inplace=inplace)
    assert (out is stream) == inplace
    torch.testing.assert_close(out, expected)


# Tuning and kinds of calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", ["convolutional", "pyramid", "rows", "quantized"])
def test_every_backend_passes_its_accuracy_check(kind, inplace):
    x, grid, block = pyramid() if kind == "pyramid" else make(class_tokens=1)
    if kind == "quantized":
        _, _, block = with_quantized((x, grid, block))
    settings = {"rows": some_rows(x, grid, 9), "scores": "cls"} if kind == "rows" else {}
    given = x.clone()
    with torch.no_grad():
        task = tuner.task_of("transformer_block", x, grid, block, **settings, inplace=inplace)
        expected = task.expected()
        measurements = {name: tuner.check(function, expected) for name, function in task.candidates.items()}
        timed = tuner.time_in_turns(task.candidates, task.timed, measurements)
    assert len(expected.same.outputs) == (2 if settings else 1)
    assert {name: measurement.flaw for name, measurement in timed.items()} == dict.fromkeys(BACKENDS)
    assert torch.equal(x, given)


LARGE_GRIDS = {
    # The grid, how it is cut for the check and for the timing, and how the block is made.
    "one head": ((512, 128), (64, 64), (64, 128), lambda: pyramid(1, (6, 5), 4, 1, ratio=2, hidden=4)),
    "heads": ((64, 128), (32, 32), (64, 64), lambda: pyramid(1, (6, 5), 4, 2, ratio=0, hidden=4)),
    "convolutional": ((128, 128), (64, 64), (64, 128), lambda: make(1, (6, 5), 4, 1, hidden=4)),
    "small": ((32, 32), (32, 32), (32, 32), lambda: pyramid(1, (6, 5), 4, 1, ratio=2, hidden=4)),
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", LARGE_GRIDS)
def test_a_sample_of_a_large_image_has_a_part_of_its_grid(kind, inplace):
    grid, checked, timed, make_small = LARGE_GRIDS[kind]
    _, _, block = make_small()
    x = torch.randn(1, grid[0] * grid[1], 4)
    declared = backends.operators["transformer_block"]
    record = declared.bind(x, grid, block, inplace=inplace)
    for factor, expected in ((1, checked), (32, timed)):
        sample = declared.sample(factor, record)
        assert sample.grid == expected
        height, width = expected
        assert torch.equal(sample.x.unflatten(1, expected), x.unflatten(1, grid)[:, :height, :width])
        assert sample.x.is_contiguous()
        assert not inplace or sample.x.data_ptr() != x.data_ptr()


def test_samples_of_large_images_that_have_no_grid_or_stay_whole():
    declared = backends.operators["transformer_block"]
    _, _, plain = pyramid(1, (6, 5), 4, 1, ratio=0, convolves=False, hidden=4)
    sample = declared.sample(1, declared.bind(torch.randn(1, 5000, 4), (1, 1), plain))
    assert (sample.x.shape, sample.grid) == ((1, 2048, 4), (1, 1))
    _, _, block = make(1, (6, 5), 4, 1, hidden=4)
    grid, tokens = (128, 128), 128 * 128
    for x, rows in (
        (torch.randn(1, 1 + tokens, 4), None),
        (torch.randn(1, tokens, 4), torch.arange(tokens)[None]),
        (torch.randn(1, 4, tokens).mT, None),
    ):
        sample = declared.sample(1, declared.bind(x, grid, block, rows=rows))
        assert (sample.x.shape, sample.grid) == (x.shape, grid)


# What does not fit together -------------------------------------------------------------------------------

CONVOLUTIONAL, PYRAMID = make(), pyramid()
CONVS, LAYERS = CONVOLUTIONAL[2].convs, CONVOLUTIONAL[2].linears
TRAINED = CONVS[0]._replace(running_mean=None, running_var=None)
LARGE = PYRAMID[2].reduce._replace(weight=torch.ones(24, 24, 6, 6))
ROWS = torch.tensor([[0], [1]])


@pytest.mark.parametrize(
    ("arguments", "changes", "settings", "message"),
    [
        (CONVOLUTIONAL, {"reduce": (CONVS[1], *CONVS[1:])}, {}, r"block.reduce\[0\]: makes 2×3 of the 4×5"),
        (CONVOLUTIONAL, {"reduce": (CONVS[0], *CONVS[:2])}, {}, "got 4×5 keys and 2×3 values"),
        (CONVOLUTIONAL, {"reduce": ()}, {}, "block.reduce: got 0"),
        (CONVOLUTIONAL, {"linears": LAYERS[:2]}, {}, "block.linears: got 2"),
        (CONVOLUTIONAL, {"linears": (Linear(torch.ones(30, 24)), *LAYERS[1:])}, {}, "got 30, 24 and 24"),
        (CONVOLUTIONAL, {"reduce": (TRAINED, *CONVS[1:])}, {}, r"reduce\[0\].running_mean: got None"),
        (CONVOLUTIONAL, {"num_heads": 5}, {}, "block.num_heads: got 5, expected a divisor of 24"),
        (CONVOLUTIONAL, {}, {"rows": torch.arange(21).expand(2, 21) - 1}, r"rows: .* \(2, 1 to 20\)"),
        (CONVOLUTIONAL, {}, {"scores": "cls"}, "scores: got 'cls' for tokens without a class token"),
        (PYRAMID, {"reduce": LARGE}, {}, "block.reduce.weight: got a kernel of 6×6 for a grid of 6×5"),
        (PYRAMID, {}, {"rows": ROWS}, "rows: got some tokens of a block with a convolution"),
        (PYRAMID, {}, {"scores": "avg"}, "scores: got 'avg' without convolutional projections"),
    ],
)
def test_parts_that_do_not_fit_together(arguments, changes, settings, message):
    x, grid, block = arguments
    with pytest.raises(ValueError, match=message), torch.no_grad():
        transformer_block(x, grid, block._replace(**changes), **settings)
