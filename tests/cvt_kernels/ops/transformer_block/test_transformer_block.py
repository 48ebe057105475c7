"""transformer_block on a CPU: more kinds of blocks than the contract has, and what it refuses."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, reference
from cvt_kernels.ops.transformer_block import transformer_block
from cvt_kernels.records import Linear
from tests.cvt_kernels.ops.transformer_block.calls import (
    call,
    check,
    every_backend,
    make,
    pyramid,
)
from tests.cvt_kernels.test_reference import random_conv


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
    check(backend, (x[:, :29].contiguous(), (1, 1), block))
    rows = torch.tensor([[0, 3, 29], [1, 2, -1]])
    whole = reference.transformer_block(x, (1, 1), block)
    expected = reference.scatter_rows(x, rows, reference.gather_rows(whole, rows))
    stream = x.clone()
    out = call(backend, (stream, (1, 1), block), rows=rows, inplace=inplace)
    assert (out is stream) == inplace
    torch.testing.assert_close(out, expected)


# Samples for tuning ---------------------------------------------------------------------------------------


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
