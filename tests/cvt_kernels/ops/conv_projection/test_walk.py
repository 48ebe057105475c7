"""The walks of conv_projection, and the general kernels on the convolutions that a walk serves."""

import itertools

import pytest
import torch

from cvt.commands.compile import launches
from cvt_kernels import machine
from cvt_kernels.ops.conv_projection.triton import backward, common, forward, walk
from tests.checks import assert_accurate
from tests.cvt_kernels.ops.conv_projection.test_triton import (
    DEVICE,
    assert_backends_agree,
    assert_outputs_agree,
    make,
    move,
    name_of,
    run,
)
from tests.cvt_kernels.test_reference import random_conv


def geometry(grid, strides=(1, 2, 2)):
    n = len(strides)
    return common.Geometry(grid, (3,) * n, tuple(strides), (1,) * n, (1,) * n, (1e-5,) * n)


@pytest.mark.parametrize("channels", [3, 66])
@pytest.mark.parametrize("grid", [(1, 1), (3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_packed_and_single_channels_at_edges(dtype, grid, channels):
    """Even numbers of 16-bit channels are read two at a time, odd ones and float32 one by one."""
    x, convs = make(2, grid, channels, 1, dtype=dtype)
    assert_outputs_agree(x, grid, convs)


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
    image = x.mT.reshape(2, 8, 4, 4)
    means = [
        torch.nn.functional.conv2d(image, conv.weight, padding=1, stride=conv.stride, groups=8).mean(
            (0, 2, 3)
        )
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
        (geometry((8, 8), (1, 2, 2, 2))._asdict(), False),  # more than registers have weights for
        ({"kernel_sizes": (3, 3, 5)}, False),
        ({"paddings": (1, 1, 0)}, False),
        ({"dilations": (1, 2, 1)}, False),
    ],
)
def test_geometries_that_a_walk_serves(changed, served):
    assert walk.is_walk(geometry((8, 8))._replace(**changed)) is served


@pytest.mark.parametrize(("needed", "pairs"), [(1, 1), (7, 1), (14, 2), (28, 4), (48, 4), (3, 1)])
def test_pairs_of_columns_of_a_program(needed, pairs):
    """Returns as many as leave the fewest warps without columns."""
    assert walk._pairs(needed, 4) == pairs


def plan_of(grid, channels, batch, class_tokens=0):
    x = torch.empty(batch, grid[0] * grid[1] + class_tokens, channels, device="meta", dtype=torch.bfloat16)
    with machine.recorded_launches(machine.Chip(90, 132)):
        return walk.WalkPlan.of("walk_fwd", x, geometry(grid), [])


@pytest.mark.parametrize("batch", [1, 3, 256])
@pytest.mark.parametrize("stage", launches.stages("cvt_13"), ids=str)
def test_every_pixel_has_one_program(stage, batch):
    """At batch 256 a walk reads few rows twice, and has no lane without columns."""
    (height, width), channels, class_tokens, _ = stage
    plan = plan_of((height, width), channels, batch, class_tokens)
    groups, strips, rows, blocks = (
        plan.arguments[n] for n in ("groups", "strips", "strip_rows", "col_blocks")
    )
    cols = 2 * plan.arguments["WALK"].pairs
    assert plan.regions == groups * strips * blocks
    assert plan.programs == plan.regions * channels // 64
    covered = torch.zeros(batch, height, width, dtype=torch.int64)
    for group, strip, block in itertools.product(range(groups), range(strips), range(blocks)):
        covered[group::groups, strip * rows : (strip + 1) * rows, block * cols : (block + 1) * cols] += 1
    assert (covered == 1).all()
    if batch == 256:
        assert strips * (rows + 2) <= 1.15 * height
        assert blocks * cols == width


def test_small_batches_get_shorter_walks():
    """One image has about as many programs as multiprocessors; 256 images walk down whole strips."""
    one, many = (plan_of((56, 56), 64, batch) for batch in (1, 256))
    assert (one.arguments["strip_rows"], one.programs) == (2, 7 * 28)
    assert many.arguments["strip_rows"] >= 28
    assert many.programs <= 4 * 132


# Gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "channels", "class_tokens", "strides", "dtype"),
    [
        ((3, 5), 6, 1, (1, 2, 2), torch.float32),
        ((4, 3), 3, 0, (1, 1, 1), torch.bfloat16),  # odd channels are not packed
        ((1, 7), 4, 1, (2, 2, 2), torch.float16),
        ((5, 1), 2, 1, (1, 2), torch.float64),
        ((2, 2), 66, 0, (2,), torch.bfloat16),
        ((1, 1), 2, 0, (1,), torch.float64),
    ],
    ids=str,
)
def test_gradients_by_walks(grid, channels, class_tokens, strides, dtype):
    branches = [{"stride": stride, "padding": 1} for stride in strides]
    settings = {"branches": branches, "kernel_sizes": [3] * len(strides), "dtype": dtype}
    x, convs = make(2, grid, channels, class_tokens, **settings)
    launched = launched_by(lambda: assert_backends_agree(x, grid, convs, True))
    names = {name_of(launch.kernel) for launch in launched}
    assert names >= {"walk_bwd_sums", "walk_bwd_conv", "walk_bwd_input"}


def launched_by(function):
    """Returns the launches that a function makes, planned for a GPU of one multiprocessor."""
    launched = []

    def take(launch):
        launched.append(launch)
        launch.start()

    with machine.intercepted_launches(take, machine.Chip(90, 1)):
        function()
    return launched


@pytest.mark.parametrize(("dtype", "strides"), [(torch.bfloat16, (1, 2, 2)), (torch.float64, (1,))], ids=str)
def test_walks_of_several_strips_and_images(dtype, strides):
    branches = [{"stride": stride, "padding": 1} for stride in strides]
    x, convs = make(9, (4, 3), 2, 1, branches=branches, kernel_sizes=[3] * len(strides), dtype=dtype)
    launched = launched_by(lambda: assert_backends_agree(x, (4, 3), convs, True))
    walks = [launch.arguments for launch in launched if name_of(launch.kernel).startswith("walk_bwd")]
    assert len(walks) == 3
    assert all(walk["strips"] > 1 and walk["groups"] < 9 for walk in walks)


def test_walks_of_a_view_of_other_tokens():
    """Its tokens are as far apart as those of both, and its channels begin at an odd one."""
    x, convs = make(2, (2, 3), 4, 1, dtype=torch.float16)
    wide = torch.cat([x[:, :, :1], x, x[:, :, :2]], dim=2)
    views = wide[:, :, 1:5], wide[:, :, :6].roll(-1, dims=2)[:, :, :4]
    expected = run("triton", x, (2, 3), convs, True)
    for view in views:
        assert not view.is_contiguous()
        for ours, near in zip(run("triton", view, (2, 3), convs, True), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, near, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_general_kernels_of_3x3(monkeypatch, dtype):
    """They serve these geometries no more, but their strides of 1 and 2 beside others."""
    for module in (backward, forward):
        monkeypatch.setattr(module, "is_walk", lambda geometry: False)
    x, convs = make(2, (3, 4), 6, 1, dtype=dtype)
    launched = launched_by(lambda: assert_backends_agree(x, (3, 4), convs, True))
    assert {"bwd_sums", "bwd_conv", "bwd_input"} <= {name_of(launch.kernel) for launch in launched}


def test_gradients_beside_a_huge_mean():
    """The walk folds the subtraction of the mean into what dconv starts with."""
    x = 1e3 + torch.randn(2, 20, 8, device=DEVICE)
    conv = move(random_conv(8, 3, padding=1), torch.float32)
    center = torch.zeros_like(conv.weight)
    center[:, :, 1, 1] = 1
    conv = conv._replace(weight=center)
    ours, theirs = (run(backend, x, (5, 4), [conv], True)[1] for backend in ("triton", "reference"))
    exact = run("reference", x, (5, 4), [conv], True, double=True)[1]
    for tensors in zip(ours, theirs, exact, strict=True):
        assert_accurate(*tensors, factor=3, floor=4)
