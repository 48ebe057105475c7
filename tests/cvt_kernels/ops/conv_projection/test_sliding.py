"""The sliding-row kernels of conv_projection."""

import itertools

import pytest
import torch

from cvt.tools.commands.compile import launches
from cvt_kernels.launch import launching
from cvt_kernels.ops.conv_projection.triton import common, sliding
from tests.contract.examples import assert_right, run, same_bits
from tests.contract.test_contract import run_guarded
from tests.cvt_kernels.ops.conv_projection.test_triton import made_with, name_of, replaced, sizes


def geometry(grid, strides=(1, 2, 2)):
    return common.Geometry.of(grid, strides)


def assert_launches(made, *names):
    """Fails unless a call is right, and launches some kernels where a GPU has one multiprocessor."""
    launched = []

    def take(launch):
        launched.append(launch)
        launch.start()

    with launching.intercepted_launches(take, launching.Chip(90, 1)):
        results = run_guarded(made)
    assert_right(made, results)
    assert {name_of(launch.kernel) for launch in launched} >= set(names)
    return launched


@pytest.mark.parametrize("layout", ["offset", "sliced"])
def test_what_cannot_be_read_two_channels_at_a_time(layout):
    """16-bit tokens and weights that do not lie at multiples of 4 bytes are read one by one."""
    made = made_with((1, 2, 2), **sizes((3, 4), 4, dtype="float16", layout=layout, gradient="none"))
    (launch,) = assert_launches(made, "sliding_fwd")
    assert not launch.arguments["LANES"].is_packed


@pytest.mark.parametrize("statistics", ["running", "none"])
def test_a_mean_of_many_deviations(statistics):
    """BatchNorm is folded into the weights, and the subtraction of the mean into what dconv starts with."""
    made = made_with((1,), **sizes((5, 4), 8, statistics=statistics))
    (conv,), x = made.call.record.convs, made.call.record.x
    center = torch.zeros_like(conv.weight)
    center[:, :, 1, 1] = 1
    mean = None if conv.running_mean is None else conv.running_mean + 1e3
    conv = conv._replace(weight=center.requires_grad_(), running_mean=mean)
    made = replaced(made, x=(x.detach() + 1e3).requires_grad_(), convs=(conv,))
    assert_launches(made, "sliding_fwd", "sliding_bwd_conv")


@pytest.mark.parametrize(
    ("strides", "changed", "served"),
    [
        ((1, 2, 2), {}, True),
        ((1, 1, 1), {}, True),
        ((1, 2, 3), {}, False),
        ((1, 2, 2, 2), {}, False),  # more than registers have weights for
        ((1, 2, 2), {"weight": torch.empty(8, 1, 5, 5)}, False),
        ((1, 2, 2), {"padding": 0}, False),
        ((1, 2, 2), {"dilation": 2}, False),
    ],
)
def test_convolutions_of_sliding_kernels(strides, changed, served):
    (conv,) = made_with((1,)).call.record.convs
    *convs, last = (conv._replace(stride=stride) for stride in strides)
    assert (sliding.why_not_sliding((*convs, last._replace(**changed))) is None) is served


def plan_of(grid, channels, batch, class_tokens=0):
    x = torch.empty(batch, grid[0] * grid[1] + class_tokens, channels, device="meta", dtype=torch.bfloat16)
    with launching.recorded_launches(launching.Chip(90, 132)):
        return sliding.SlidingTiling.of("sliding_fwd", x, geometry(grid), [])


@pytest.mark.parametrize("batch", [1, 3, 256])
@pytest.mark.parametrize("stage", launches.stages_of("cvt_13"), ids=str)
def test_every_pixel_has_one_program(stage, batch):
    """At batch 256 a program reads few rows twice, and has no lane without columns."""
    (height, width), channels, class_tokens, *_ = stage
    plan = plan_of((height, width), channels, batch, class_tokens)
    groups, strips, rows, blocks = (
        plan.arguments[n] for n in ("groups", "strips", "strip_rows", "col_blocks")
    )
    cols = 2 * plan.arguments["LANES"].pairs
    assert plan.regions == groups * strips * blocks
    assert plan.programs == plan.regions * channels // 64
    covered = torch.zeros(batch, height, width, dtype=torch.int64)
    for group, strip, block in itertools.product(range(groups), range(strips), range(blocks)):
        covered[group::groups, strip * rows : (strip + 1) * rows, block * cols : (block + 1) * cols] += 1
    assert (covered == 1).all()
    if batch == 256:
        assert strips * (rows + 2) <= 1.15 * height
        assert blocks * cols == width


def test_small_batches_get_shorter_strips():
    """One image has about as many programs as multiprocessors; 256 images have whole strips."""
    one, many = (plan_of((56, 56), 64, batch) for batch in (1, 256))
    assert (one.arguments["strip_rows"], one.programs) == (2, 7 * 28)
    assert many.arguments["strip_rows"] >= 28
    assert many.programs <= 4 * 132


# Gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "strides"), [("bfloat16", (1, 2, 2)), ("float64", (1,))], ids=str)
def test_programs_of_several_strips_and_images(dtype, strides):
    made = made_with(strides, **sizes((4, 3), 2, batch=9, dtype=dtype), training=True)
    launched = assert_launches(made)
    found = [launch.arguments for launch in launched if name_of(launch.kernel).startswith("sliding_bwd")]
    assert len(found) == 3
    assert all(each["strips"] > 1 and each["groups"] < 9 for each in found)


def test_rows_of_a_view_of_other_tokens():
    """Its tokens have the stride of both together, and its channels begin at an odd one."""
    made = made_with((1, 2, 2), **sizes((2, 3), 4, dtype="float16"), training=True)
    x, expected = made.call.record.x.detach(), run(made)
    wide = torch.cat([x[:, :, :1], x, x[:, :, :2]], dim=2)
    for view in (wide[:, :, 1:5], wide[:, :, :6].roll(-1, dims=2)[:, :, :4]):
        assert not view.is_contiguous()
        viewed = replaced(made, x=view.detach().requires_grad_())
        assert same_bits(run(viewed), expected)
