"""LayerNorm, GELU and their combinations: what they accept and refuse, on every backend of a CPU."""

import inspect
from pathlib import Path

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import dispatch
from tests.checks import python_blocks, record_calls, run_blocks

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
@pytest.mark.parametrize("operator", ONE_CALL_EACH)
def test_no_rows(operator):
    arguments, settings = ONE_CALL_EACH[operator]
    empty = [t[:0] if t is not W and t is not B else t for t in arguments]
    out = getattr(ck, operator)(*empty, **settings)
    assert all(t.shape == (0, 5, 8) for t in (out if isinstance(out, tuple) else (out,)))


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
    page = Path(__file__).parents[4] / "docs" / "layer_norm_gelu.md"
    run_blocks(python_blocks(page.read_text(encoding="utf-8")))
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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ck.layer_norm(X, W[:7], B), ValueError, r"weight: got shape \(7,\), expected \(8,\)"),
        (lambda: ck.layer_norm(X, W, B.view(1, 8)), ValueError, r"bias: got shape \(1, 8\)"),
        (lambda: ck.layer_norm(X, W.half(), B), TypeError, "weight: has dtype float16, expected float32"),
        (lambda: ck.layer_norm(X, W, B.to("meta")), ValueError, "bias: is on meta, expected cpu as x"),
        (lambda: ck.layer_norm(X, W, B, eps=0), ValueError, "eps: got 0, expected a positive number"),
        (lambda: ck.layer_norm(X, W, B, eps=float("nan")), ValueError, "eps: got nan"),
        (lambda: ck.layer_norm(X.long(), W, B), TypeError, "x: got dtype int64"),
        (lambda: ck.layer_norm(X, W, B, dtype=torch.long), TypeError, "dtype: got torch.int64, expected"),
        (lambda: ck.layer_norm(X, shift=W[:7]), ValueError, r"shift: got shape \(7,\), expected \(8,\)"),
        (lambda: ck.layer_norm(X, shift=X), ValueError, r"shift: got shape \(2, 5, 8\), expected \(8,\)"),
        (lambda: ck.layer_norm(X, shift=W.half()), TypeError, "shift: has dtype float16, expected float32"),
        (lambda: ck.layer_norm(X.half(), shift=W.double()), TypeError, "shift: has dtype float64, expected"),
        (lambda: ck.layer_norm(X, shift=W.long()), TypeError, "shift: got dtype int64"),
        (lambda: ck.layer_norm(X, shift=0.5), TypeError, "shift: got float, expected a tensor"),
        (lambda: ck.layer_norm(X, shift=W.to("meta")), ValueError, "shift: is on meta, expected cpu as x"),
        (lambda: ck.add_layer_norm(X, X, W, B, dtype="half"), TypeError, "dtype: got 'half', expected"),
        (lambda: ck.layer_norm(torch.tensor(1.0)), ValueError, r"x: got shape \(\), expected \(..., ch"),
        (lambda: ck.layer_norm(X[..., :0]), ValueError, "x: got shape"),
        (lambda: ck.add_layer_norm(X, X[:1], W, B), ValueError, "residual: got shape .* as x"),
        (lambda: ck.add_layer_norm(X, X.double(), W, B), TypeError, "residual: has dtype float64"),
        (lambda: ck.add_layer_norm(X, None, W, B), TypeError, "residual: got NoneType"),
        (lambda: ck.gelu(X, approximate="fast"), ValueError, "approximate: got 'fast', expected one of none"),
        (lambda: ck.gelu(3.0), TypeError, "x: got float, expected a tensor"),
        (lambda: ck.gelu(X.bool()), TypeError, "x: got dtype bool"),
        (lambda: ck.bias_gelu(X, B[:3]), ValueError, r"bias: got shape \(3,\)"),
        (lambda: ck.bias_gelu(X, None), TypeError, "bias: got NoneType"),
        (lambda: ck.layer_norm_gelu(X, W, B, approximate=None), ValueError, "approximate: got None"),
        (lambda: ck.layer_norm_gelu(X, W, B, eps=-1.0), ValueError, "eps: got -1.0"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.int32, "bfloat16"], ids=str)
def test_a_result_of_no_floating_dtype(dtype):
    x = torch.randn(2, 8)
    for call in (lambda: ck.layer_norm(x, dtype=dtype), lambda: ck.add_layer_norm(x, x, dtype=dtype)):
        with pytest.raises(TypeError, match=f"dtype: got {dtype!r}, expected one of "):
            call()
