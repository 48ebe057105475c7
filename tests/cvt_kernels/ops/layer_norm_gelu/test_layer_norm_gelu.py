"""LayerNorm, GELU and their combinations: what they accept and refuse, on every backend of a CPU."""

import inspect

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import dispatch
from tests.checks import python_blocks, record_calls, run_blocks, section_of

X, W, B = torch.randn(2, 5, 8), torch.randn(8), torch.randn(8)
ONE_CALL_EACH = {
    "layer_norm": ((X, W, B), {"eps": 1e-3}),
    "add_layer_norm": ((X, X + 1, W, B), {"eps": 1e-3}),
    "gelu": ((X,), {"approximate": "tanh"}),
    "bias_gelu": ((X, B), {"approximate": "quick"}),
    "layer_norm_gelu": ((X, W, B), {"eps": 1e-3, "approximate": "none"}),
}


@pytest.fixture(params=["native", "reference"])
def _each_backend(request):
    """Runs the test by each backend; the reference serves what it cannot."""
    with ck.use_backend(request.param, "reference"):
        yield


def test_a_shift_that_is_absent_is_none_for_a_backend():
    calls = record_calls("layer_norm")
    with ck.use_backend("native"):
        ck.layer_norm(X, W, B)
        ck.layer_norm(X, W, B, shift=W)
    assert [set(keywords) for _, keywords in calls] == [{"eps", "dtype", "shift"}] * 2
    assert calls[0][1]["shift"] is None
    assert calls[1][1]["shift"] is W


@pytest.mark.parametrize("operator", ONE_CALL_EACH)
def test_a_backend_gets_the_arguments_as_they_are(operator):
    calls = record_calls(operator)
    arguments, settings = ONE_CALL_EACH[operator]
    with ck.use_backend("native"):
        getattr(ck, operator)(*arguments, **settings)
    ((got, keywords),) = calls
    parameters = inspect.signature(getattr(ck, operator)).parameters.values()
    absent = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords == {**absent, **settings}
    assert len(got) == len(arguments)
    assert all(a is b for a, b in zip(got, arguments, strict=True))


@pytest.mark.usefixtures("_each_backend")
def test_optional_weight_and_bias():
    bare = (X - X.mean(-1, keepdim=True)) / (X.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(ck.layer_norm(X), bare)
    torch.testing.assert_close(ck.layer_norm(X, W), bare * W)
    torch.testing.assert_close(ck.layer_norm(X, None, B), bare + B)


@pytest.mark.usefixtures("_each_backend")
def test_a_shift():
    torch.testing.assert_close(ck.layer_norm(X, W, B, shift=W), ck.layer_norm(X + W, W, B))
    half = ck.layer_norm(X.bfloat16(), shift=W)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), ck.layer_norm(X + W), atol=5e-2, rtol=5e-2)
    assert ck.layer_norm(X[:0], shift=W).shape == (0, 5, 8)


@pytest.mark.usefixtures("_each_backend")
def test_autocast_gives_the_dtype_of_pytorch():
    half = X.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = ck.layer_norm(half, W, B), torch.nn.functional.layer_norm(half, (8,), W, B)
        h, normalized = ck.add_layer_norm(half, X, W, B)
    torch.testing.assert_close(ours, theirs)  # the dtype too
    torch.testing.assert_close(h, half.float() + X)
    torch.testing.assert_close(normalized, torch.nn.functional.layer_norm(h, (8,), W, B))


def test_the_page_runs_as_it_stands(capsys):
    run_blocks(python_blocks(section_of("inside.md", "## LayerNorm and GELU")))
    assert capsys.readouterr().out == "torch.bfloat16 torch.float32 torch.bfloat16\n"


@pytest.mark.parametrize("operator", ["layer_norm", "add_layer_norm"])
def test_a_named_dtype_is_another_kind_of_call(operator):
    """But on a CPU not that of x, which is what the call gives without it."""
    arguments, settings = ONE_CALL_EACH[operator]
    plain, same, other = (
        dispatch.question(operator, *arguments, **settings, dtype=dtype)
        for dtype in (None, torch.float32, torch.bfloat16)
    )
    assert plain == same
    assert other == plain + ", to bfloat16"


def test_a_shift_is_another_kind_of_call():
    plain, shifted = (dispatch.question("layer_norm", X, W, B, eps=1e-5, shift=shift) for shift in (None, W))
    assert shifted == plain + ", shifted"
