"""The depthwise convolution of tokens with GELU: formula, arguments, and what is remembered of calls."""

import pytest
import torch
import torch.nn.functional as F

import cvt_kernels as ck
from cvt_kernels import backends, dispatch, reference
from tests.checks import not_built, recorded_operators, remember_verdict

GRID, CHANNELS = (3, 4), 6
X = torch.randn(2, 12, CHANNELS)
WEIGHT, BIAS = torch.randn(CHANNELS, 1, 3, 3), torch.randn(CHANNELS)

needs_extension = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
every_backend = pytest.mark.parametrize(
    "backend", ["reference", pytest.param("native", marks=needs_extension)]
)


@every_backend
@pytest.mark.parametrize("approximate", ["none", "tanh", "quick"])
@pytest.mark.parametrize("bias", [None, BIAS], ids=["bare", "bias"])
def test_values_are_those_of_a_loop(backend, approximate, bias):
    with ck.use_backend(backend):
        out = ck.depthwise_conv_gelu(X, GRID, WEIGHT, bias, approximate=approximate)
    image = F.pad(X.view(2, *GRID, CHANNELS), (0, 0, 1, 1, 1, 1))
    sums = torch.zeros(2, *GRID, CHANNELS) if bias is None else bias.expand(2, *GRID, CHANNELS).clone()
    for y in range(3):
        for x in range(3):
            sums += image[:, y : y + 3, x : x + 4] * WEIGHT[:, 0, y, x]
    expected = sums * torch.sigmoid(1.702 * sums) if approximate == "quick" else None
    expected = F.gelu(sums, approximate=approximate) if expected is None else expected
    torch.testing.assert_close(out, expected.flatten(1, 2))
    assert out.is_contiguous()


@needs_extension
@torch.no_grad()
def test_what_is_remembered_of_a_call_is_not_taken_for_another():
    """Each differs from the first in one thing that matters, and comes between two calls like it."""
    others = {
        "values": (X * 2, GRID, WEIGHT + 1, BIAS),
        "grid": (X, (4, 3), WEIGHT, BIAS),
        "batch": (X[:1], GRID, WEIGHT, BIAS),
        "strides": (X.mT.contiguous().mT, GRID, WEIGHT, BIAS),
        "no bias": (X, GRID, WEIGHT, None),
        "dtype": (X.double(), GRID, WEIGHT.double(), BIAS.double()),
    }
    with ck.use_backend("native"):
        for args in others.values():
            for each in ((X, GRID, WEIGHT, BIAS), args):
                torch.testing.assert_close(
                    ck.depthwise_conv_gelu(*each), reference.depthwise_conv_gelu(*each)
                )
        quick = ck.depthwise_conv_gelu(X, GRID, WEIGHT, BIAS, approximate="quick")
        with pytest.raises(TypeError, match="grid"):  # though it equals the one that is remembered
            ck.depthwise_conv_gelu(X, (3.0, 4.0), WEIGHT, BIAS)
    expected = reference.depthwise_conv_gelu(X, GRID, WEIGHT, BIAS, approximate="quick")
    torch.testing.assert_close(quick, expected)


@needs_extension
@torch.no_grad()
def test_a_call_like_an_earlier_one_goes_to_the_kernel_at_once(monkeypatch):
    with ck.use_backend("native"):
        first = ck.depthwise_conv_gelu(X, GRID, WEIGHT, BIAS)
        monkeypatch.setattr(dispatch, "choose", lambda *_: pytest.fail("asked again"))
        assert torch.equal(ck.depthwise_conv_gelu(X, GRID, WEIGHT, BIAS), first)


@needs_extension
@pytest.mark.parametrize("verdict", ["native", "reference"])
def test_auto_takes_it_by_verdict(verdict):
    remember_verdict(verdict, "depthwise_conv_gelu", X, GRID, WEIGHT, BIAS, approximate="none")
    with ck.use_backend("auto"), torch.no_grad(), recorded_operators() as called:
        ck.depthwise_conv_gelu(X, GRID, WEIGHT, BIAS)
    assert ("cvt_kernels.depthwise_conv_gelu.default" in called) == (verdict == "native")
    assert ("aten.convolution.default" in called) == (verdict == "reference")


def test_the_words_for_a_kind_of_call():
    def question(x=X, grid=GRID, bias=BIAS, approximate="none"):
        return dispatch.question("depthwise_conv_gelu", x, grid, WEIGHT, bias, approximate=approximate)

    plain = question()
    assert plain == question(grid=(4, 3)) == question(X[:1].expand(3, -1, -1).contiguous())
    kinds = [plain, question(bias=None), question(approximate="tanh"), question(X.mT.contiguous().mT)]
    assert len({*kinds}) == 4
    assert "6 channels" in str(plain)


def test_a_sample_has_fewer_images():
    declared = backends.operators["depthwise_conv_gelu"]
    call = declared.bind(torch.empty(9, 2**14, 4), (128, 128), WEIGHT)
    sample = declared.sample(1, call)
    assert sample.x.shape == (4, 2**14, 4)
    assert sample[1:] == call[1:]
