"""The sliding-row kernels of conv_projection."""

import itertools

import pytest
import torch

from cvt.tools.commands.compile import launches
from cvt_kernels.launch import launching
from cvt_kernels.ops.conv_projection.triton import common, sliding
from tests.contract.examples import assert_right, made_of, run, run_guarded, same_bits
from tests.cvt_kernels.ops.conv_projection.test_triton import replaced


def made_with(height, width, channels, **settings):
    sizes = {"height": height, "width": width, "channels": channels}
    return made_of("conv_projection", "triton", **sizes, **settings)


def launched_by(made):
    """Fails unless a call is right; returns its launches, planned for a GPU of one multiprocessor."""
    launched = {}

    def take(launch):
        name = launch.kernel.__name__.removeprefix("_conv_projection_sliding_").removesuffix("_kernel")
        launched[name] = launch.arguments
        launch.start()

    with launching.intercepted_launches(take, launching.Chip(90, 1)):
        results = run_guarded(made)
    assert_right(made, results)
    return launched


@pytest.mark.parametrize("layout", ["offset", "sliced"])
def test_what_cannot_be_read_two_channels_at_a_time(layout):
    """16-bit tokens and weights that do not lie at multiples of 4 bytes are read one by one."""
    made = made_with(3, 4, 4, branches=3, dtype="float16", layout=layout, gradient="none")
    assert not launched_by(made)["fwd"]["LANES"].is_packed


@pytest.mark.parametrize("statistics", ["running", "none"])
def test_a_mean_of_many_deviations(statistics):
    """BatchNorm is folded into the weights, and the subtraction of the mean into what dconv starts with."""
    made = made_with(5, 4, 8, branches=1, statistics=statistics)
    (conv,), x = made.call.record.convs, made.call.record.x
    center = torch.zeros_like(conv.weight)
    center[:, :, 1, 1] = 1
    mean = None if conv.running_mean is None else conv.running_mean + 1e3
    conv = conv._replace(weight=center.requires_grad_(), running_mean=mean)
    made = replaced(made, x=(x.detach() + 1e3).requires_grad_(), convs=(conv,))
    assert {"fwd", "bwd_conv"} <= set(launched_by(made))


@pytest.mark.parametrize("batch", [1, 3, 256])
@pytest.mark.parametrize("stage", launches.stages_of("cvt_13"), ids=str)
def test_every_pixel_has_one_program(stage, batch):
    """At batch 256 a program reads few rows twice, and has no lane without columns."""
    (height, width), channels, class_tokens, *_ = stage
    x = torch.empty(batch, height * width + class_tokens, channels, device="meta", dtype=torch.bfloat16)
    geometry = common.Geometry.of((height, width), (1, 2, 2))
    with launching.recorded_launches(launching.Chip(90, 132)):
        plan = sliding.SlidingTiling.of("sliding_fwd", x, geometry, [])
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


@pytest.mark.parametrize(("dtype", "branches"), [("bfloat16", 3), ("float64", 1)])
def test_programs_of_several_strips_and_images(dtype, branches):
    launched = launched_by(made_with(4, 3, 2, batch=9, dtype=dtype, branches=branches, training=True))
    for name in ("bwd_sums", "bwd_conv", "bwd_input"):
        assert launched[name]["strips"] > 1
        assert launched[name]["groups"] < 9


def test_rows_of_a_view_of_other_tokens():
    """Its tokens have the stride of both together, and its channels begin at an odd one."""
    made = made_with(2, 3, 4, dtype="float16", branches=3, training=True)
    x, expected = made.call.record.x.detach(), run(made)
    wide = torch.cat([x[:, :, :1], x, x[:, :, :2]], dim=2)
    for view in (wide[:, :, 1:5], wide[:, :, :6].roll(-1, dims=2)[:, :, :4]):
        assert not view.is_contiguous()
        viewed = replaced(made, x=view.detach().requires_grad_())
        assert same_bits(run(viewed), expected)
