"""Q, K and V of few tokens in one launch, in Triton's interpreter; the emulator runs it in blocks."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import machine
from cvt_kernels.launch import launching
from cvt_kernels.ops.conv_linear import few_rows, stacked
from tests.checks import assert_accurate
from tests.cvt_kernels.ops.test_accesses import project_few, project_linearly, random_conv

pytestmark = pytest.mark.skipif(not machine.INTERPRETING, reason="the emulator runs what is compiled")
H200 = launching.Chip(90, 132)


def reference_of(x, grid, convs, norm, weight, bias):
    """Returns LayerNorm, convolutions and layers by PyTorch, in the dtype of x."""
    y = torch.nn.functional.layer_norm(x, x.shape[2:], norm.weight.to(x), norm.bias.to(x), norm.eps)
    linears = zip(weight.to(x).chunk(len(convs)), bias.to(x).chunk(len(convs)), strict=True)
    convs = [
        conv._replace(**{n: t.to(x) for n, t in conv._asdict().items() if isinstance(t, torch.Tensor)})
        for conv in convs
    ]
    return ck.reference.conv_linear(y, grid, convs, tuple(linears))


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize(
    ("grid", "channels", "outputs", "block_m"),
    [((5, 4), 40, 24, 16), ((3, 7), 160, 72, 32), ((1, 1), 64, 64, 64), ((6, 5), 16, 136, 16)],
    ids=str,
)
def test_layer_norm_convolutions_and_layers(grid, channels, outputs, block_m, statistics):
    x, convs, norm, weight, bias, out = project_few(
        grid, channels, outputs, statistics=statistics, block_m=block_m
    )
    actual = stacked.branches_of(out, x, grid, convs)
    same = reference_of(x, grid, convs, norm, weight, bias)
    exact = reference_of(x.double(), grid, convs, norm, weight, bias)
    for each in zip(actual, same, exact, strict=True):
        assert_accurate(*each)


def test_a_large_mean_cancels():
    grid, channels = (4, 4), 64
    x = torch.randn(1, 16, channels).round().add(200).half()
    convs = [random_conv(channels, dtype=torch.float16, stride=1, padding=1)]
    weight = torch.randn(channels, channels).half()
    norm = stacked.NormOfRows(None, 0, torch.ones(channels).half(), torch.zeros(channels).half(), 1e-5)
    out = x.new_empty(16, channels)
    taps = few_rows.packed_taps(convs)
    few_rows.project_few(x, stacked._geometry(grid, convs), taps, weight, None, out, 16, norm)
    bias = torch.zeros(channels)
    same, exact = (
        reference_of(x.to(t), grid, convs, norm, weight, bias)[0] for t in (x.dtype, torch.float64)
    )
    assert_accurate(out[None], same, exact)


def test_changes_of_a_convolution_are_noticed():
    convs = [random_conv(8, dtype=torch.float16, stride=1, padding=1)]
    before = few_rows.packed_taps(convs)
    assert few_rows.packed_taps(convs) is before
    assert not torch.equal(few_rows.packed_taps([convs[0]._replace(eps=1.0)]), before)
    convs[0].running_mean.add_(1)
    assert not torch.equal(few_rows.packed_taps(convs), before)


def test_conv_linear_takes_one_launch_for_few_tokens():
    for chip, kernels in ((H200, 1), (launching.Chip(90, 2), 2)):
        with launching.recorded_launches(chip) as launches, ck.use_backend("triton"):
            project_linearly((5, 3), 200, (72,) * 3, dtype=torch.float16, gap=0)
        assert len(launches) == kernels
