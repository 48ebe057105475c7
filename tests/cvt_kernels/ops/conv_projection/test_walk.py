"""The forward of conv_projection as a walk, and the general kernels on what a walk serves."""

import itertools

import pytest
import torch

import cvt_kernels as ck
from cvt.commands.compile import launches
from cvt_kernels import machine
from cvt_kernels.ops.conv_projection.triton import backward, common, forward, walk
from tests.checks import assert_accurate
from tests.cvt_kernels.ops.conv_projection.test_triton import (
    CVT,
    assert_backends_agree,
    make,
    move,
    name_of,
)

H200 = machine.Chip(90, 132)


def geometry(grid, strides=(1, 2, 2)):
    n = len(strides)
    return common.Geometry(grid, (3,) * n, tuple(strides), (1,) * n, (1,) * n, (1e-5,) * n)


@pytest.fixture
def general(monkeypatch):
    """Keeps the walks from serving."""
    for module in (forward, backward):
        monkeypatch.setattr(module, "is_walk", lambda geometry: False, raising=False)


def test_the_general_kernels_serve_3x3_too(general):
    x, convs = make(2, (5, 6), 24, 1, dtype=torch.bfloat16)
    launched = []

    def take(launch):
        launched.append(name_of(launch.kernel))
        launch.start()

    with machine.intercepted_launches(take):
        assert_backends_agree(x, (5, 6), convs, True)
    assert "fwd" in launched
    assert not [name for name in launched if name.startswith("walk")]


def assert_outputs_agree(x, grid, convs):
    with ck.use_backend("triton"):
        ours = ck.conv_projection(x, grid, convs, training=False)
    theirs = ck.reference.conv_projection(x, grid, convs, training=False)
    doubled = [move(conv, torch.float64) for conv in convs]
    exact = ck.reference.conv_projection(x.double(), grid, doubled, training=False)
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert_accurate(a, b, c, floor=4)


@pytest.mark.parametrize("channels", [3, 66])
@pytest.mark.parametrize("grid", [(1, 1), (1, 4), (3, 1), (5, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_packed_and_single_channels_at_edges(dtype, grid, channels):
    """Even numbers of 16-bit channels are read two at a time, odd ones and float32 one by one."""
    x, convs = make(2, grid, channels, 1, dtype=dtype)
    assert_outputs_agree(x, grid, convs)


@pytest.mark.parametrize("strides", [(1,), (2,), (2, 1), (1, 1, 1), (2, 2, 2)], ids=str)
def test_strides(strides):
    branches = [{"stride": stride, "padding": 1} for stride in strides]
    x, convs = make(2, (4, 5), 4, 0, branches=branches, kernel_sizes=[3] * len(strides), dtype=torch.float32)
    assert_outputs_agree(x, (4, 5), convs)


@pytest.mark.parametrize("case", ["x", "stride", "weight"])
def test_what_cannot_be_read_two_channels_at_a_time(case):
    """16-bit tokens and weights that do not lie at multiples of 4 bytes are read one by one."""
    x, convs = make(2, (3, 4), 4, 0, dtype=torch.float16)
    if case == "x":
        x = torch.cat([x.flatten(), x.flatten()[:1]])[1:].view(x.shape)
    elif case == "stride":
        x = torch.cat([x, x[..., :1]], dim=2)[..., :4]
    else:
        shifted = torch.cat([convs[0].weight.flatten(), convs[0].weight.flatten()[:1]])[1:]
        convs = [convs[0]._replace(weight=shifted.view(4, 1, 3, 3)), *convs[1:]]
    tensors = [conv.weight for conv in convs]
    plan = walk.WalkPlan.of("walk_fwd", x, geometry((3, 4)), tensors)
    assert not plan.arguments["WALK"].is_packed
    assert_outputs_agree(x, (3, 4), convs)


def test_a_mean_of_many_deviations():
    """BatchNorm is folded into the weights: its sums do not cancel worse than PyTorch's."""
    x, convs = make(2, (4, 4), 8, 0, dtype=torch.float32)
    x += 1000
    with torch.no_grad():
        means = [
            torch.nn.functional.conv2d(
                x.transpose(1, 2).reshape(2, 8, 4, 4), conv.weight, padding=1, stride=conv.stride, groups=8
            ).mean((0, 2, 3))
            for conv in convs
        ]
    convs = [conv._replace(running_mean=mean) for conv, mean in zip(convs, means, strict=True)]
    assert_outputs_agree(x, (4, 4), convs)


@pytest.mark.parametrize(
    ("changed", "served"),
    [
        ({}, True),
        ({"strides": (1, 1, 1)}, True),
        ({"strides": (1, 2, 3)}, False),
        ({"kernel_sizes": (3, 3, 5)}, False),
        ({"paddings": (1, 1, 0)}, False),
        ({"dilations": (1, 2, 1)}, False),
    ],
)
def test_geometries_that_a_walk_serves(changed, served):
    assert walk.is_walk(geometry((8, 8))._replace(**changed)) is served


def test_more_branches_than_registers_for_weights():
    assert walk.is_walk(geometry((8, 8), (1, 2, 2)))
    assert not walk.is_walk(geometry((8, 8), (1, 2, 2, 2)))


@pytest.mark.parametrize(("needed", "pairs"), [(1, 1), (7, 1), (14, 2), (28, 4), (48, 4), (3, 1)])
def test_pairs_of_columns_of_a_program(needed, pairs):
    """Returns as many as leave the fewest warps without columns."""
    assert walk._pairs(needed, 4) == pairs


def regions(arguments):
    """Returns (first image, first row, first column) of every region, and their sizes."""
    places = itertools.product(
        range(arguments["groups"]),
        range(0, arguments["strips"] * arguments["strip_rows"], arguments["strip_rows"]),
        range(0, arguments["col_blocks"] * 2 * arguments["WALK"].pairs, 2 * arguments["WALK"].pairs),
    )
    return list(places)


@pytest.mark.parametrize("batch", [1, 3, 32, 256])
@pytest.mark.parametrize("stage", launches.stages("cvt_13"), ids=str)
def test_every_pixel_has_one_program(stage, batch):
    (height, width), channels, class_tokens = stage
    x = torch.empty(batch, height * width + class_tokens, channels, device="meta", dtype=torch.bfloat16)
    with machine.recorded_launches(H200):
        plan = walk.WalkPlan.of("walk_fwd", x, geometry((height, width)), [])
    arguments = plan.arguments
    places = regions(arguments)
    assert len(places) == plan.regions
    assert plan.programs == plan.regions * channels // 64
    covered = torch.zeros(batch, height, width, dtype=torch.int64)
    for group, row, col in places:
        rows, cols = arguments["strip_rows"], 2 * arguments["WALK"].pairs
        covered[group :: arguments["groups"], row : row + rows, col : col + cols] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("stage", launches.stages("cvt_13"), ids=str)
def test_bytes_of_a_walk(stage):
    """Evaluation writes its outputs once and reads each pixel 2 to 4 times from L1 and L2, at batch 256."""
    (height, width), channels, class_tokens = stage
    x = torch.empty(256, height * width + class_tokens, channels, device="meta", dtype=torch.bfloat16)
    with machine.recorded_launches(H200):
        arguments = walk.WalkPlan.of("walk_fwd", x, geometry((height, width)), []).arguments
    rows_read = arguments["strips"] * (arguments["strip_rows"] + 2)
    assert rows_read <= 1.15 * height
    pairs_read = arguments["col_blocks"] * arguments["WALK"].pairs
    assert pairs_read * 2 == width  # no lane without columns; each loads two of its own and two more


def test_small_batches_get_shorter_walks():
    """One image has about as many programs as multiprocessors; 256 images walk down whole strips."""

    def plan(batch):
        x = torch.empty(batch, 56 * 56, 64, device="meta", dtype=torch.bfloat16)
        with machine.recorded_launches(H200):
            return walk.WalkPlan.of("walk_fwd", x, geometry((56, 56)), [])

    assert plan(1).arguments["strip_rows"] == 2
    assert plan(1).programs == 7 * 28
    assert plan(256).arguments["strip_rows"] >= 28
    assert plan(256).programs <= 4 * 132


def test_the_default_branches_are_a_walks():
    _, convs = make(1, (3, 3), 2, 0, branches=CVT)
    assert walk.is_walk(common.Geometry.of((3, 3), convs))
