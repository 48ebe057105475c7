"""The Triton kernel of conv_linear, on a GPU or else in Triton's interpreter on CPU tensors."""

import pytest
import torch

import cvt_kernels as ck
from cvt.tools.commands.compile import launches
from cvt_kernels import launch
from cvt_kernels.launch import formulas, launching, tables
from cvt_kernels.launch.records import ConvLinear
from cvt_kernels.ops.conv_linear.triton import common
from cvt_kernels.ops.conv_projection.triton.common import Geometry
from tests.contract.examples import assert_agrees, made_of

SMALL = ConvLinear(tokens=16, branches=1, outputs=16, chunk=16, num_warps=1, registers=255)
WIDE = ConvLinear(tokens=256, branches=2, outputs=256, chunk=64, num_warps=32, registers=64)
H200 = launching.Chip(90, 132)


def shipped(channels, dtype, rows=50000):
    """Returns the configuration that ships for sm_90."""
    need = formulas.Need("conv_linear", tables.numbers_of(dtype), (channels,), rows, H200)
    return launch.shipped(need) or formulas.conv_linear(need)[0]


@pytest.fixture(autouse=True)
def _wide_tiles():
    """Gives a program many tokens, for which the interpreter takes hardly more time than for few."""
    if torch.cuda.is_available():
        yield
    else:
        with launch.overridden("conv_linear", WIDE):
            yield


def sizes(batch, grid, channels, **settings):
    height, width = grid
    return {"batch": batch, "height": height, "width": width, "channels": channels, **settings}


@pytest.mark.parametrize("without_bias", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("strides", [(1, 1, 1), (2, 2, 2), (2, 1, 2)], ids=str)
def test_branches_of_the_same_sizes_share_code_and_nothing_else(strides, without_bias):
    x, grid, (conv, *_), _ = made_of("conv_linear", "triton").call.record
    convs = [
        conv._replace(stride=stride, eps=10.0**-i, weight=torch.randn_like(conv.weight))
        for i, stride in enumerate(strides)
    ]
    linears = [
        (torch.randn(40, x.shape[2], device=x.device), None if i in without_bias else torch.randn(40).to(x))
        for i in range(3)
    ]
    with ck.use_backend("triton"):
        ours = ck.conv_linear(x, grid, convs, linears)
    torch.testing.assert_close(ours, ck.reference.conv_linear(x, grid, convs, linears), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [("float16", {"branches": 2}), ("float16", {"tokens": 64}), ("float32", {"chunk": 32})],
    ids=str,
)
def test_tiles_of_other_sizes(dtype, changes):
    """Several tiles, chunks of channels and blocks of outputs, none of them full."""
    with launch.overridden("conv_linear", ConvLinear(**{**vars(SMALL), **changes})):
        assert_agrees("conv_linear", "triton", **sizes(2, (3, 4), 34, dtype=dtype, outputs=18))


# Plans ----------------------------------------------------------------------------------------------------


def plan_of(stage, batch, dtype=torch.bfloat16):
    """Returns the plan of CvT's projection with the configuration that ships."""
    (height, width), channels, class_tokens, *_ = stage
    geometry = Geometry((height, width), (1, 2, 2))
    x = torch.empty(batch, height * width + class_tokens, channels, device="meta", dtype=dtype)
    config = shipped(channels, dtype, x.shape[0] * x.shape[1])
    with launching.recorded_launches(H200), launch.overridden("conv_linear", config):
        return common.ConvLinearTiling.of(x, geometry, [], (channels,) * 3, (None,) * 3)


@pytest.mark.parametrize("batch", [1, 3, 256])
@pytest.mark.parametrize("stage", launches.stages_of("cvt_13"), ids=str)
def test_every_strip_has_one_program(stage, batch):
    """At batch 256 few lanes have no outputs."""
    plan = plan_of(stage, batch)
    arguments = plan.arguments
    spec = arguments["SPEC"]
    assert [(each.branches, each.twins) for each in arguments["GROUPS"]] == [((0,), ()), ((1,), (2,))]
    for group, twin in [(each, i) for each in arguments["GROUPS"] for i in range(1 + len(each.twins))]:
        first_turn = group.first_turn + twin * group.turns
        jobs = [
            number // spec.period * group.turns + number % spec.period - first_turn
            for number in range(plan.programs)
            if first_turn <= number % spec.period < first_turn + group.turns
        ]
        assert jobs == list(range(len(jobs)))
        strips = batch * group.strip_rows * group.strip_columns
        assert len(jobs) * arguments["length"] * arguments["LANES"].pairs >= strips
        computed = group.strip_rows * group.rows, group.strip_columns * group.columns
        assert computed[0] >= group.height
        assert computed[1] >= group.width
        if batch == 256:
            assert computed[0] * computed[1] <= 1.15 * group.height * group.width
