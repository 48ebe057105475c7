"""The depthwise convolution with GELU in Triton: strips and images of a program, views, launches."""

import contextlib

import pytest
import torch
import triton

import cvt_kernels as ck
from cvt.tools.commands.compile import launches
from cvt_kernels import backends, launch
from cvt_kernels.launch import launching
from cvt_kernels.launch.records import Sliding
from cvt_kernels.ops.conv_projection.triton import sliding
from cvt_kernels.ops.depthwise_conv_gelu.triton import why_unsupported
from tests.contract.examples import assert_agrees

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def wide_strips(monkeypatch):
    """Gives one program all columns, rows and images, for which the interpreter takes the least time."""
    monkeypatch.setattr(sliding, "_pairs", lambda needed, most: triton.next_power_of_2(needed))
    monkeypatch.setattr(
        sliding, "_strip_length", lambda batch, blocks, row_pairs, resident: (row_pairs, batch)
    )
    sliding._tiling.cache_clear()
    yield
    sliding._tiling.cache_clear()


def make(batch, grid, channels, dtype):
    """Returns tokens, weight and bias."""
    shapes = (batch, grid[0] * grid[1], channels), (channels, 1, 3, 3), (channels,)
    return [torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes]


def run(grid, x, weight, bias):
    """Returns the result and the gradients of those that want some, for a fixed pattern."""
    with ck.use_backend("triton"):
        y = ck.depthwise_conv_gelu(x, grid, weight, bias)
    dy = torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, [t for t in (x, weight, bias) if t.requires_grad], dy)


def launched_by(function):
    """Returns what a function makes, and its launches, planned for a GPU of one multiprocessor."""
    launched = []

    def take(launch):
        launched.append(launch)
        launch.start()

    with launching.intercepted_launches(take, launching.Chip(90, 1)):
        return function(), launched


@pytest.fixture
def few_programs():
    """Lets programs go over several strips and several images, of few."""
    with contextlib.ExitStack() as stack:
        for kernel, registers in (("fwd", 128), ("bwd_conv", 255)):
            config = Sliding(pairs=1, channels=128, registers=registers, resident_warps=4)
            stack.enter_context(launch.overridden(f"depthwise_conv_gelu_{kernel}", config))
        yield


@pytest.mark.usefixtures("few_programs")
def test_programs_of_several_strips_and_images():
    settings = {"batch": 5, "height": 3, "width": 2, "channels": 2}
    _, launched = launched_by(lambda: assert_agrees("depthwise_conv_gelu", "triton", **settings))
    backward = launched[1].arguments
    assert (backward["strips"], backward["groups"]) == (2, 2)


@pytest.mark.usefixtures("wide_strips")
def test_tokens_are_read_as_they_lie():
    """Channels from an odd one on, images with others between, and a transposed view, which is copied."""
    x, *parameters = make(2, (2, 3), 4, torch.float16)
    wide = torch.cat([x[:, :, :1], x, x[:, :, :3]], dim=2)
    expected = run((2, 3), x.clone().requires_grad_(), *parameters)
    for view in (wide[:, :, 1:5], torch.stack([x, x], dim=1)[:, 1], x.mT.contiguous().mT):
        assert not view.is_contiguous()
        leaf = view.detach().requires_grad_()
        results, launched = launched_by(lambda leaf=leaf: run((2, 3), leaf, *parameters))
        assert (launched[0].arguments["x_ptr"].data_ptr() == view.data_ptr()) is (view.stride(2) == 1)
        assert all(map(torch.equal, results, expected))


def test_calls_that_the_kernels_do_not_serve():
    x, weight, bias = make(1, (2, 2), 4, torch.float32)
    call = backends.operators["depthwise_conv_gelu"].bind(x, (2, 2), weight, bias)
    assert why_unsupported(call) is None
    huge = torch.empty(1, 1, 1).expand(1, 2**16, 2**15)
    assert why_unsupported(call._replace(x=huge, grid=(2**8, 2**8))) == "one image has 2³¹ elements or more"


# Launches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", launches.PYRAMIDS)
def test_programs_of_real_shapes(model):
    """Every pixel has one program; the blocks of channels are full, and columns hardly overlap a map."""
    chip = launching.Chip(90, 132)
    for stage in launches.stages_of(model, launches.image_size_of(model)):
        for each in launches.TRITON_OPERATORS["depthwise_conv_gelu"](stage, torch.bfloat16, chip, batch=8):
            if "LANES" not in each.arguments:
                continue
            sizes, tile = each.arguments, each.arguments["LANES"]
            assert stage.channels % tile.channels == 0
            assert (tile.is_packed, tile.alignment) == (True, 16)
            height, width = stage.grid
            assert 0 <= sizes["strips"] * sizes["strip_rows"] - height < sizes["strip_rows"]
            assert 0 <= sizes["col_blocks"] * 2 * tile.pairs - width <= 1
            regions = sizes["groups"] * sizes["strips"] * sizes["col_blocks"]
            assert each.grid == (regions * stage.channels // tile.channels,)
