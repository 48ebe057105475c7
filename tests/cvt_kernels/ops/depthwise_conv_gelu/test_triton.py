"""The Triton kernels of depthwise_conv_gelu, on a GPU or else in Triton's interpreter on CPU tensors."""

import contextlib
from dataclasses import replace

import pytest
import torch
import triton

import cvt_kernels as ck
from cvt.commands.compile import launches
from cvt_kernels import backends, machine
from cvt_kernels.ops.conv_projection.triton import walk
from cvt_kernels.ops.depthwise_conv_gelu.triton import common, why_unsupported
from tests.checks import WIDEST, assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = machine.Chip(90, 132)


@pytest.fixture(autouse=True)
def _poison():
    """Fills new tensors with NaN, which stays where a kernel does not write what it should."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def wide_walks(monkeypatch):
    """Gives one program all columns, rows and images, for which the interpreter takes the least time."""
    monkeypatch.setattr(walk, "_pairs", lambda needed, most: triton.next_power_of_2(needed))
    monkeypatch.setattr(walk, "_walk_length", lambda batch, blocks, row_pairs, resident: (row_pairs, batch))
    walk._plan.cache_clear()
    yield
    walk._plan.cache_clear()


def make(batch, grid, channels, dtype, *, bias=True):
    """Returns tokens, weight and bias whose sums reach where GELU bends."""
    shapes = (batch, grid[0] * grid[1], channels), (channels, 1, 3, 3), (channels,)
    x, weight, shift = (torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes)
    return x, weight, shift if bias else None


def run(backend, grid, tensors, approximate="none", cast=torch.clone):
    """Returns the result and the gradients of all tensors for a fixed pattern."""
    leaves = [None if t is None else cast(t).detach().requires_grad_() for t in tensors]
    with ck.use_backend(backend):
        y = ck.depthwise_conv_gelu(leaves[0], grid, *leaves[1:], approximate=approximate)
    dy = torch.linspace(-1, 1, y.numel(), device=DEVICE, dtype=torch.float64).sin()
    dy = cast(dy.to(tensors[0].dtype).view_as(y))
    return y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy)


def assert_backends_agree(grid, tensors, approximate="none"):
    ours, theirs = (run(backend, grid, tensors, approximate) for backend in ("triton", "reference"))
    if tensors[0].dtype == torch.float64:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        return
    exact = run("reference", grid, tensors, approximate, torch.Tensor.double)
    for factor, *results in zip((2, 3, 3, 3), ours, theirs, exact, strict=False):
        assert_accurate(*results, factor=factor, floor=4)


@pytest.mark.usefixtures("wide_walks")
@pytest.mark.parametrize(
    ("dtype", "approximate"),
    [
        (torch.float16, "none"),
        (torch.float16, "quick"),
        (torch.bfloat16, "none"),
        (torch.bfloat16, "tanh"),
        (torch.float32, "none"),
    ],
    ids=str,
)
def test_results_and_gradients_are_accurate(dtype, approximate):
    assert_backends_agree((3, 4), make(2, (3, 4), 64, dtype), approximate)


@pytest.mark.parametrize(
    ("batch", "grid", "channels", "dtype"),
    [
        (1, (1, 1), 1, WIDEST),
        (3, (1, 5), 3, torch.bfloat16),  # odd channels are read one by one
        (2, (4, 1), 66, torch.float16),
        (1, (2, 9), 130, torch.bfloat16),  # two blocks of columns, and of channels
    ],
    ids=str,
)
def test_sizes_at_edges(batch, grid, channels, dtype):
    assert_backends_agree(grid, make(batch, grid, channels, dtype, bias=batch > 1))


def launched_by(function):
    """Returns what a function makes, and its launches, planned for a GPU of one multiprocessor."""
    launched = []

    def take(launch):
        launched.append(launch)
        launch.start()

    with machine.intercepted_launches(take, machine.Chip(90, 1)):
        return function(), launched


def name_of(launch):
    return launch.kernel.__name__.strip("_").removesuffix("_kernel")


@pytest.fixture
def few_programs():
    """Lets walks go over several strips and several images, of few."""
    with contextlib.ExitStack() as stack:
        for kernel in common.CONFIGS:
            config = replace(common.CONFIGS[kernel], pairs=1, resident_warps=4)
            stack.enter_context(common.overridden(kernel, config))
        yield


@pytest.mark.usefixtures("few_programs")
def test_walks_of_several_strips_and_images_have_the_same_bits_every_time():
    tensors = make(5, (3, 2), 2, torch.float32)
    first, launched = launched_by(lambda: run("triton", (3, 2), tensors))
    assert [name_of(launch) for launch in launched] == [
        "depthwise_conv_gelu_fwd", "depthwise_conv_gelu_bwd_conv", "sum_regions",
        "conv_projection_walk_bwd_input",
    ]  # fmt: skip
    backward = launched[1].arguments
    assert (backward["strips"], backward["groups"]) == (2, 2)
    again, _ = launched_by(lambda: run("triton", (3, 2), tensors))
    assert all(map(torch.equal, first, again))
    torch.testing.assert_close(first, run("reference", (3, 2), tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("wide_walks")
def test_tokens_are_read_as_they_lie():
    """Channels from an odd one on, images with others between, and a transposed view, which is copied."""
    x, weight, bias = make(2, (2, 3), 4, torch.float16)
    wide = torch.cat([x[:, :, :1], x, x[:, :, :3]], dim=2)
    expected = run("triton", (2, 3), (x, weight, bias))
    for view in (wide[:, :, 1:5], torch.stack([x, x], dim=1)[:, 1], x.mT.contiguous().mT):
        assert not view.is_contiguous()
        tensors = view, weight, bias
        results, launched = launched_by(
            lambda tensors=tensors: run("triton", (2, 3), tensors, cast=lambda tensor: tensor)
        )
        assert (launched[0].arguments["x_ptr"].data_ptr() == view.data_ptr()) is (view.stride(2) == 1)
        assert all(map(torch.equal, results, expected))


@pytest.mark.usefixtures("wide_walks")
def test_only_what_is_needed_is_computed():
    """A frozen convolution's x has its gradient, and x that needs none takes no launch."""
    x, weight, bias = make(1, (2, 2), 2, torch.float32)

    def gradients(x, weight):
        with ck.use_backend("triton"):
            y = ck.depthwise_conv_gelu(x, (2, 2), weight, bias)
        return torch.autograd.grad(y.sum(), [t for t in (x, weight) if t.requires_grad])

    (dx,) = gradients(x.clone().requires_grad_(), weight)
    (dweight,), launched = launched_by(lambda: gradients(x, weight.clone().requires_grad_()))
    assert "conv_projection_walk_bwd_input" not in map(name_of, launched)
    both = gradients(x.requires_grad_(), weight.requires_grad_())
    assert torch.equal(dx, both[0])
    assert torch.equal(dweight, both[1])


def test_calls_that_the_kernels_do_not_serve():
    x, weight, bias = make(1, (2, 2), 4, torch.float32)
    call = backends.operators["depthwise_conv_gelu"].bind(x, (2, 2), weight, bias)
    assert why_unsupported(call) is None
    assert why_unsupported(call._replace(x=x[:0])) == "the batch is empty"
    huge = torch.empty(1, 1, 1).expand(1, 2**16, 2**15)
    assert why_unsupported(call._replace(x=huge, grid=(2**8, 2**8))) == "one image has 2³¹ elements or more"


# Launches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", launches.PYRAMIDS)
def test_walks_of_real_shapes(model):
    """Every pixel has one program; the blocks of channels are full, and columns hardly overlap a map."""
    for stage in launches.stages_of(model, launches.image_size_of(model)):
        for launch in launches.depthwise_conv_gelu_launches(stage, torch.bfloat16, H200, batch=8):
            if "WALK" not in launch.arguments:
                continue
            sizes, tile = launch.arguments, launch.arguments["WALK"]
            assert stage.channels % tile.channels == 0
            assert tile.is_packed
            assert tile.alignment == 16
            height, width = stage.grid
            assert 0 <= sizes["strips"] * sizes["strip_rows"] - height < sizes["strip_rows"]
            assert 0 <= sizes["col_blocks"] * 2 * tile.pairs - width <= 1
            blocks = stage.channels // tile.channels
            regions = sizes["groups"] * sizes["strips"] * sizes["col_blocks"]
            assert launch.grid == (regions * blocks,)


@pytest.mark.parametrize(("channels", "block"), [(64, 64), (65, 64), (68, 128), (128, 128), (192, 64)])
def test_blocks_of_channels(channels, block):
    x, weight, _ = make(1, (2, 2), channels, torch.bfloat16)
    plan = common.ConvPlan.of("fwd", x, (2, 2), "none", (weight,), has_bias=False)
    assert plan.others["WALK"].channels == block


def test_a_configuration_is_overridden_for_a_while():
    x, weight, _ = make(1, (4, 8), 4, torch.float32)

    def warps():
        plan = common.ConvPlan.of("fwd", x, (4, 8), "none", (weight,), has_bias=False)
        return plan.walk.options["num_warps"]

    config = replace(common.CONFIGS["fwd"], pairs=2)
    with common.overridden("fwd", config):
        assert warps() == 2
    assert warps() == 4
    with pytest.raises(ValueError, match="expected one of fwd"), common.overridden("forward", config):
        pass
