"""The CPU kernels of depthwise_conv_gelu against the reference."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cvt_kernels as ck
from cvt_kernels import machine, reference
from tests.checks import assert_accurate, compiler, not_built, run_on_instruction_set, run_sanitized

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Where a compiler was at hand and the extension is missing all the same, these tests fail.
pytestmark = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


@pytest.fixture(autouse=True)
def _native():
    with ck.use_backend("native"):
        yield


def make(grid, channels, batch=2, dtype=torch.float64):
    """Returns x, weight and bias."""
    shapes = (batch, grid[0] * grid[1], channels), (channels, 1, 3, 3), (channels,)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def run(function, grid, tensors, approximate="none", dtype=None):
    """Returns the result and the gradients of x, weight and, if there is one, bias."""
    leaves = [t if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    out = function(leaves[0], grid, *leaves[1:], approximate=approximate)
    pattern = (torch.arange(out.numel()) % 17 - 7.0).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [t for t in leaves if t is not None], pattern)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh", "quick"])
@pytest.mark.parametrize(("grid", "channels", "batch"), [((35, 9), 40, 2), ((7, 7), 300, 1)], ids=str)
def test_values_and_gradients_are_accurate(dtype, approximate, grid, channels, batch):
    tensors = make(grid, channels, batch, dtype)
    ours, same = (run(f.depthwise_conv_gelu, grid, tensors, approximate) for f in (ck, reference))
    exact = run(reference.depthwise_conv_gelu, grid, tensors, approximate, torch.float64)
    for i, (got, same_dtype, expected) in enumerate(zip(ours, same, exact, strict=True)):
        assert got.dtype == dtype
        if dtype == torch.float64:  # in which the reference is not exact
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
        else:
            assert_accurate(got, same_dtype, expected, factor=3 if i else 2, floor=4 if i else 1)


@settings(max_examples=40, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 19), st.integers(1, 19)),
    channels=st.integers(1, 70),
    batch=st.integers(0, 3),
    dtype=st.sampled_from((*DTYPES, torch.float64)),
    layout=st.sampled_from(("contiguous", "sliced", "transposed", "expanded", "offset", "channels")),
    has_bias=st.booleans(),
)
def test_any_shape_and_strides(grid, channels, batch, dtype, layout, has_bias):
    x, weight, bias = make(grid, channels, batch, dtype)
    x = {
        "contiguous": lambda t: t,
        "sliced": lambda t: torch.cat([t, t], 1)[:, t.shape[1] :],
        "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "expanded": lambda t: t[:1].expand(t.shape),
        "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
        "channels": lambda t: t.mT.contiguous().mT,
    }[layout](x)
    tensors = [x, weight, bias if has_bias else None]
    ours = run(ck.depthwise_conv_gelu, grid, tensors)
    same = run(ck.depthwise_conv_gelu, grid, [x.contiguous(), *tensors[1:]])
    assert all(map(torch.equal, ours, same))
    assert ours[0].is_contiguous()
    # Not the accuracy rule: on a handful of values PyTorch's error may be 0 by luck.
    epsilon = 64 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps + torch.finfo(dtype).eps
    exact = run(reference.depthwise_conv_gelu, grid, tensors, dtype=torch.float64)
    for got, expected in zip(ours, exact, strict=True):
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=epsilon * scale)


def test_nan_and_inf_reach_their_neighbors_only():
    x, weight, bias = make((6, 7), 20, dtype=torch.float32)
    x[0, 9, 3], x[1, 20, 4], weight[5, 0, 0, 2], bias[19] = torch.nan, torch.inf, torch.nan, torch.inf
    with torch.no_grad():
        ours, theirs = (f.depthwise_conv_gelu(x, (6, 7), weight, bias) for f in (ck, reference))
    # gelu(inf) is inf, but NaN in PyTorch's vectorized loop
    ours, theirs = (t.masked_fill(t == torch.inf, torch.nan) for t in (ours, theirs))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@torch.no_grad()
def test_an_image_is_the_same_in_any_batch():
    x, weight, bias = make((9, 11), 65, 5, torch.float32)
    together = ck.depthwise_conv_gelu(x, (9, 11), weight, bias)
    alone = [ck.depthwise_conv_gelu(image[None], (9, 11), weight, bias) for image in x]
    assert torch.equal(together, torch.cat(alone))


def test_operators_check_what_they_would_read():
    x, weight, bias = make((4, 5), 6, dtype=torch.float32)
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


INSTRUCTION_SETS = """
import torch, cvt_kernels as ck
torch.manual_seed(0)
tolerances = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
for dtype, rtol in tolerances.items():
    tensors = [torch.randn(shape).to(dtype) for shape in ((2, 7 * 21, 37), (37, 1, 3, 3), (37,))]
    pair = []
    for backend, kind in (("native", dtype), ("reference", torch.float64)):
        x, weight, bias = (t.to(kind).requires_grad_() for t in tensors)
        with ck.use_backend(backend):
            out = ck.depthwise_conv_gelu(x, (7, 21), weight, bias, approximate="quick")
        pair.append([out, *torch.autograd.grad(out, (x, weight, bias), out.detach().sin())])
    for a, b in zip(*pair):
        assert (a.double() - b).norm() < rtol * b.norm()
"""


@pytest.mark.parametrize("name", ["plain", "avx2", "avx512"])
def test_other_instruction_sets(name):
    run_on_instruction_set(name, INSTRUCTION_SETS)


@pytest.mark.sanitized
@pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="there is no C++ compiler")
def test_loops_are_right_and_stay_within_their_buffers(tmp_path):
    run_sanitized("depthwise_conv_gelu", tmp_path)
