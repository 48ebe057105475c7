"""The Triton kernel of conv_linear, on a GPU or else in Triton's interpreter on CPU tensors."""

import pytest
import torch

import cvt_kernels as ck
from cvt.commands.compile import launches
from cvt_kernels import backends, machine
from cvt_kernels.ops.conv_linear.triton import common, forward
from cvt_kernels.ops.conv_projection.triton.common import Geometry
from tests.checks import WIDEST, assert_accurate
from tests.cvt_kernels.test_reference import random_conv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STRIDES = (1, 2, 2)
SMALL = common.LaunchConfig(tokens=16, branches=1, outputs=16, chunk=16, num_warps=1, registers=255)


@pytest.fixture(autouse=True)
def _poison():
    """Fills new tensors with NaN, which stays where a kernel does not write what it should."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


WIDE = common.LaunchConfig(tokens=256, branches=2, outputs=256, chunk=64, num_warps=32, registers=64)


@pytest.fixture(autouse=True)
def _wide_tiles():
    """Gives a program many tokens, for which the interpreter takes hardly more time than for few.

    The configurations that ship have a test of their own.
    """
    if DEVICE == "cuda":
        yield
    else:
        with common.overridden("fwd", WIDE):
            yield


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def make(
    batch, grid, channels, class_tokens=0, *, strides=STRIDES, outputs=None, bias=True, dtype=torch.float32,
    bn_dtype=None,
):  # fmt: skip
    """Returns the arguments of a call."""

    def cast(tensor, to=dtype):
        return tensor.to(DEVICE, to)

    x = cast(torch.randn(batch, class_tokens + grid[0] * grid[1], channels))
    convs = []
    for stride in strides:
        conv = random_conv(channels, stride=stride, padding=1)
        vectors = ("bn_weight", "bn_bias", "running_mean", "running_var")
        changes = {name: cast(getattr(conv, name), bn_dtype or dtype) for name in vectors}
        convs.append(conv._replace(weight=cast(conv.weight), num_batches_tracked=None, **changes))
    linears = [
        (cast(torch.randn(n, channels) * channels**-0.5), cast(torch.randn(n)) if bias else None)
        for n in outputs or [channels] * len(strides)
    ]
    return x, grid, convs, linears


def doubled(x, grid, convs, linears):
    def double(t):
        return t.double() if torch.is_tensor(t) and t.is_floating_point() else t

    convs = [type(conv)(*map(double, conv)) for conv in convs]
    return x.double(), grid, convs, [(double(weight), double(bias)) for weight, bias in linears]


def assert_backends_agree(*arguments):
    with ck.use_backend("triton"):
        ours = ck.conv_linear(*arguments)
    theirs = ck.reference.conv_linear(*arguments)
    if arguments[0].dtype == torch.float64:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        return
    exact = ck.reference.conv_linear(*doubled(*arguments))
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert (a.shape, a.dtype, a.is_contiguous()) == (b.shape, b.dtype, True)
        # Triton's interpreter cuts bfloat16 off instead of rounding it, twice here.
        assert_accurate(a, b, c, floor=4)


@pytest.mark.parametrize(
    ("batch", "grid", "channels", "class_tokens", "settings"),
    [
        (3, (1, 1), 16, 1, {}),
        (1, (5, 7), 20, 0, {}),
        (1, (14, 14), 8, 1, {}),
        (1, (3, 2), 70, 0, {}),
        (2, (4, 3), 64, 1, {"dtype": WIDEST}),
        (3, (1, 6), 3, 0, {}),
        # Even numbers of 16-bit channels are read two at a time, odd ones one by one.
        *((1, (3, 4), n, 1, {"dtype": dtype}) for n in (7, 66) for dtype in (torch.float16, torch.bfloat16)),
        *(
            (1, (3, 4), 18, 1, {"dtype": t, "bn_dtype": torch.float32})
            for t in (torch.float16, torch.bfloat16)
        ),
        *((1, (4, 3), 10, 1, {"strides": s}) for s in ((1,), (2,), (1, 1, 1), (2, 2, 2), (2, 1, 2), (2, 1))),
    ],
    ids=str,
)
def test_agrees_with_the_reference(batch, grid, channels, class_tokens, settings):
    assert_backends_agree(*make(batch, grid, channels, class_tokens, **settings))


@pytest.mark.parametrize(
    ("dtype", "channels"),
    [(torch.float16, 48), (torch.float16, 66), (torch.float16, 260), (torch.float32, 20)],
    ids=str,
)
def test_configurations_that_ship(dtype, channels):
    with common.overridden("fwd", common.shipped(channels, dtype.itemsize, 90)):
        assert_backends_agree(*make(1, (2, 2), channels, 1, strides=(1, 2), dtype=dtype))


def test_layers_of_their_own():
    """Each branch has as many outputs as its layer, and BatchNorm need not scale and shift."""
    x, grid, convs, linears = make(2, (4, 6), 12, outputs=(5, 40, 132), bias=False)
    convs[1] = convs[1]._replace(bn_weight=None, bn_bias=None, eps=0.1)
    assert_backends_agree(x, grid, convs, linears)


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [(torch.float16, {"branches": 2}), (torch.float16, {"tokens": 64}), (torch.float32, {"chunk": 32})],
    ids=str,
)
def test_tiles_of_other_sizes(dtype, changes):
    """Several tiles, chunks of channels and blocks of outputs, none of them full."""
    config = common.LaunchConfig(**{**vars(SMALL), **changes})
    with common.overridden("fwd", config):
        assert_backends_agree(*make(2, (3, 4), 34, 1, outputs=(18, 20, 5), dtype=dtype))


def test_a_mean_of_many_deviations():
    """BatchNorm is folded into the weights: its sums do not cancel worse than PyTorch's."""
    x, grid, convs, linears = make(1, (4, 4), 16)
    convs = [conv._replace(running_mean=conv.running_mean + 1000) for conv in convs]
    assert_backends_agree(x, grid, convs, linears)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"padding": 0}, "only up to three 3×3 convolutions"),
        (
            {"weight": torch.ones(16, 1, 1, 1, device=DEVICE), "padding": 0},
            "only up to three 3×3 convolutions",
        ),
        ({"running_mean": None, "running_var": None}, "a branch has no running statistics"),
    ],
    ids=str,
)
def test_convolutions_that_are_refused(changed, reason):
    x, grid, convs, linears = make(2, (6, 6), 16)
    convs[1] = convs[1]._replace(**changed)
    with ck.use_backend("triton"), pytest.raises(ck.BackendUnavailable, match=reason):
        ck.conv_linear(x, grid, convs, linears)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"strides": (1, 1, 2, 2)}, "only up to three 3×3 convolutions"),
        ({"channels": 516}, "tokens have 516 channels, more than 512"),
        ({"outputs": (4, 600, 4)}, "tokens have 600 channels, more than 512"),
        ({"outputs": (4, 0, 4)}, "the batch or an output is empty"),
    ],
    ids=str,
)
def test_shapes_that_are_refused(settings, reason):
    arguments = make(**{"batch": 1, "grid": (2, 2), "channels": 4, **settings})
    with ck.use_backend("triton"), pytest.raises(ck.BackendUnavailable, match=reason):
        ck.conv_linear(*arguments)


# Plans ----------------------------------------------------------------------------------------------------


def plan_of(stage, batch, dtype=torch.bfloat16):
    """Returns the plan of CvT's projection with the configuration that ships."""
    (height, width), channels, class_tokens, _ = stage
    geometry = Geometry((height, width), (3,) * 3, STRIDES, (1,) * 3, (1,) * 3, (1e-5,) * 3)
    x = torch.empty(batch, height * width + class_tokens, channels, device="meta", dtype=dtype)
    config = common.shipped(channels, dtype.itemsize, 90)
    with machine.recorded_launches(machine.Chip(90, 132)), common.overridden("fwd", config):
        return common.Plan.of(x, geometry, [], (channels,) * 3)


@pytest.mark.parametrize("batch", [1, 3, 256])
@pytest.mark.parametrize("stage", launches.stages("cvt_13"), ids=str)
def test_every_strip_has_one_program(stage, batch):
    plan = plan_of(stage, batch)
    arguments = plan.arguments
    spec = arguments["SPEC"]
    for group in arguments["GROUPS"]:
        jobs = [
            number // spec.period * group.turns + number % spec.period - group.first_turn
            for number in range(plan.programs)
            if group.first_turn <= number % spec.period < group.first_turn + group.turns
        ]
        assert jobs == list(range(len(jobs)))
        strips = batch * group.strip_rows * group.strip_columns
        assert len(jobs) * arguments["length"] * arguments["WALK"].pairs >= strips
        assert group.strip_rows * group.rows >= group.height
        assert group.strip_columns * group.columns >= group.width


@pytest.mark.parametrize("stage", launches.stages("cvt_13"), ids=str)
def test_few_lanes_have_no_outputs(stage):
    for group in plan_of(stage, 256).arguments["GROUPS"]:
        computed = group.strip_rows * group.rows * group.strip_columns * group.columns
        assert computed <= 1.15 * group.height * group.width


@pytest.mark.parametrize(
    ("outputs", "widths"), [(3, (16,)), (64, (64,)), (192, (128, 64)), (384, (128,) * 3), (132, (128, 16))]
)
def test_blocks_of_outputs(outputs, widths):
    assert common._widths(outputs, 128) == widths


def test_one_launch_reads_its_arguments_as_they_lie():
    """The linear weights are the model's own, and nothing is computed before the launch."""
    x, grid, convs, linears = make(2, (4, 4), 16, 1)
    with machine.recorded_launches(machine.Chip(90, 132)) as recorded:
        forward.conv_linear(backends.operators["conv_linear"].bind(x, grid, convs, linears))
    (launch,) = recorded
    assert launch.arguments["x_ptr"] is x
    for name, tensors in {
        "w_ptrs": [conv.weight for conv in convs],
        "var_ptrs": [conv.running_var for conv in convs],
        "linear_ptrs": [weight for weight, _ in linears],
        "bias_ptrs": [bias for _, bias in linears],
    }.items():
        given = launch.arguments[name]
        assert all(a is b for a, b in zip(given, tensors, strict=True)), name
