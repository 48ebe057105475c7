"""The CPU kernels of depthwise_conv_gelu against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cvt_kernels as ck
from cvt_kernels import machine, reference
from tests.checks import needs_extension
from tests.cvt_kernels.ops.agreement import assert_agrees, assert_agrees_on

pytestmark = needs_extension


@pytest.fixture(autouse=True)
def _cpu():
    with ck.use_backend("cpu"):
        yield


def make(grid, channels, batch=2):
    """Returns x, weight and bias."""
    shapes = (batch, grid[0] * grid[1], channels), (channels, 1, 3, 3), (channels,)
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("approximate", ["none", "tanh", "quick"])
@pytest.mark.parametrize(("grid", "channels"), [((35, 9), 40), ((7, 7), 300)], ids=str)
def test_values_and_gradients_are_accurate(dtype, approximate, grid, channels):
    sizes = {"height": grid[0], "width": grid[1], "channels": channels}
    assert_agrees("depthwise_conv_gelu", "cpu", **sizes, dtype=dtype, approximate=approximate)


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(1, 19),
    width=st.integers(1, 19),
    channels=st.integers(1, 70),
    batch=st.integers(1, 3),
    dtype=st.sampled_from(("float32", "bfloat16", "float16", "float64")),
    layout=st.sampled_from(("contiguous", "sliced", "transposed", "permuted", "offset", "steps")),
    bare=st.booleans(),
)
def test_any_shape_and_strides(**settings):
    assert_agrees("depthwise_conv_gelu", "cpu", **settings)


def test_nan_and_inf_reach_their_neighbors_only():
    x, weight, bias = make((6, 7), 20)
    x[0, 9, 3], x[1, 20, 4], weight[5, 0, 0, 2], bias[19] = torch.nan, torch.inf, torch.nan, torch.inf
    with torch.no_grad():
        ours, theirs = (f.depthwise_conv_gelu(x, (6, 7), weight, bias) for f in (ck, reference))
    # gelu(inf) is inf, but NaN in PyTorch's vectorized loop
    ours, theirs = (t.masked_fill(t == torch.inf, torch.nan) for t in (ours, theirs))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@torch.no_grad()
def test_an_image_is_the_same_in_any_batch():
    x, weight, bias = make((9, 11), 65, 5)
    together = ck.depthwise_conv_gelu(x, (9, 11), weight, bias)
    alone = [ck.depthwise_conv_gelu(image[None], (9, 11), weight, bias) for image in x]
    assert torch.equal(together, torch.cat(alone))


def test_operators_check_what_they_would_read():
    x, weight, bias = make((4, 5), 6)
    ops = machine.load_extension() and torch.ops.cvt_kernels

    def call(dout=x, x=x, grid=(4, 5), weight=weight, bias=bias, activation="none"):
        return ops.depthwise_conv_gelu_backward(dout, x, *grid, weight, bias, activation)

    assert call()[0].shape == x.shape
    for changes, message in (
        ({"x": x[0]}, r"x: got .*, expected \(batch, height · width, channels\)"),
        ({"grid": (4, 6)}, "x: got .*, expected"),
        ({"grid": (-4, -5)}, "height: got -4, expected at least 1"),
        ({"weight": weight[:5]}, r"weight: got .*, expected \(channels, 1, 3, 3\)"),
        ({"weight": weight[..., :2]}, r"weight: got .*, expected \(channels, 1, 3, 3\)"),
        ({"weight": weight.double()}, "weight: got float64 .*, expected the dtype and device of x"),
        ({"bias": bias[:5]}, r"bias: got .*, expected \(channels,\)"),
        ({"bias": bias.double()}, "bias: got float64 .*, expected the dtype of x"),
        ({"dout": x[:, 1:]}, "dout: got .*, expected the shape of float32"),
        ({"dout": x.double()}, "dout: got float64 .*, expected the dtype of x"),
        ({"activation": "identity"}, "activation: got 'identity', expected none, tanh or quick"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**changes)


@pytest.mark.parametrize("name", ["plain", "avx2", "avx512"])
def test_other_instruction_sets(name):
    sizes = {"height": 7, "width": 21, "channels": 37, "approximate": "quick"}
    assert_agrees_on(name, "depthwise_conv_gelu", sizes)
