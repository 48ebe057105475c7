"""The CPU kernels of LayerNorm and GELU against the reference."""

import functools
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cvt_kernels as ck
from cvt_kernels import machine, reference
from tests.checks import (
    assert_accurate,
    compiler,
    needs_avx2,
    not_built,
    recorded_operators,
    remember_verdict,
    run_on_instruction_set,
    run_python,
    run_sanitized,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Every operator with every GELU: name, keywords.
CALLS = [
    ("layer_norm", {}),
    ("add_layer_norm", {}),
    *(
        (operator, {"approximate": approximate})
        for operator in ("gelu", "bias_gelu", "layer_norm_gelu")
        for approximate in ("none", "tanh", "quick")
    ),
]
every_call = pytest.mark.parametrize(
    ("operator", "keywords"), CALLS, ids=["-".join((name, *keywords.values())) for name, keywords in CALLS]
)


# Where a compiler was at hand and the extension is missing all the same, these tests fail.
pytestmark = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


@pytest.fixture(autouse=True)
def _native():
    with ck.use_backend("native"):
        yield


def arguments(operator, shape, dtype=torch.float64):
    x, residual = torch.randn(2, *shape, dtype=torch.float64).mul(2).unbind()
    weight, bias = torch.randn(2, shape[-1], dtype=torch.float64).unbind()
    chosen = {
        "layer_norm": (x, weight, bias),
        "add_layer_norm": (x, residual, weight, bias),
        "gelu": (x,),
        "bias_gelu": (x, bias),
        "layer_norm_gelu": (x, weight, bias),
    }[operator]
    return [t.to(dtype) for t in chosen]


def outputs_and_gradients(function, tensors, keywords):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    outputs = function(*leaves, **keywords)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [(torch.arange(t.numel()) % 17 / 8 - 1).view(t.shape) for t in outputs]  # exact in every dtype
    gradients = torch.autograd.grad(outputs, leaves, [w.to(t) for w, t in zip(weights, outputs, strict=True)])
    return [t.detach() for t in outputs] + list(gradients)


def check(operator, keywords, tensors):
    ours, theirs = (outputs_and_gradients(getattr(f, operator), tensors, keywords) for f in (ck, reference))
    exact = outputs_and_gradients(getattr(reference, operator), [t.double() for t in tensors], keywords)
    outputs = len(ours) - len(tensors)
    for i, (got, same_dtype, expected) in enumerate(zip(ours, theirs, exact, strict=True)):
        if got.numel() == 0:
            assert got.shape == expected.shape
        elif got.dtype == torch.float64:  # in which the reference is not exact
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
        else:
            assert_accurate(got, same_dtype, expected, factor=2.0 if i < outputs else 3.0)


@every_call
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 50, 64), (37, 192), (1, 197, 384), (5, 65), (2, 8192)], ids=str)
def test_accuracy(operator, keywords, dtype, shape):
    check(operator, keywords, arguments(operator, shape, dtype))


@settings(max_examples=60, deadline=None)
@given(
    call=st.sampled_from(CALLS),
    sizes=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    channels=st.integers(3, 70),
    dtype=st.sampled_from((*DTYPES, torch.float64)),
    layout=st.sampled_from(("sliced", "transposed", "expanded", "offset")),
)
def test_any_shape_and_strides(call, sizes, channels, dtype, layout):
    operator, keywords = call
    tensors = arguments(operator, (*sizes, channels), dtype)
    lay = {
        "sliced": lambda t: torch.stack([t, t], -1)[..., 1],
        "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
        "expanded": lambda t: t[:1].expand(t.shape) if t.ndim > 1 else t,
        "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    }[layout]
    laid = [lay(t) for t in tensors]
    got, expected = (getattr(ck, operator)(*t, **keywords) for t in (laid, [t.contiguous() for t in laid]))
    for ours, same in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, expected)), strict=True):
        assert torch.equal(ours, same)
        assert ours.is_contiguous()
    # Not the accuracy rule: on a handful of values PyTorch's error may be 0 by luck, and a row of three may
    # have almost no variance.
    ours = outputs_and_gradients(getattr(ck, operator), laid, keywords)
    exact = outputs_and_gradients(getattr(reference, operator), [t.double() for t in laid], keywords)
    epsilon = 256 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps + 2 * torch.finfo(dtype).eps
    for got, expected in zip(ours, exact, strict=True):
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=epsilon * scale)


def test_one_channel():
    x, weight, bias = torch.randn(5, 1), torch.randn(1), torch.randn(1)
    assert torch.equal(ck.layer_norm(x, weight, bias), bias.expand(5, 1))


@pytest.mark.parametrize(("use_weight", "use_bias"), [(False, False), (True, False), (False, True)])
def test_optional_parameters(use_weight, use_bias):
    x, weight, bias = (t.requires_grad_() for t in arguments("layer_norm", (4, 6)))
    options = (weight if use_weight else None, bias if use_bias else None)
    for operator in (ck.layer_norm, ck.layer_norm_gelu, lambda x, *o: ck.add_layer_norm(x, x, *o)):
        function = functools.partial(lambda operator, x, *_: operator(x, *options), operator)
        assert torch.autograd.gradcheck(function, (x, weight, bias))


def test_huge_mean_tiny_variance():
    x = 1e4 + 1e-3 * torch.randn(64, 384)
    exact = reference.layer_norm(x.double())
    assert_accurate(ck.layer_norm(x), reference.layer_norm(x), exact, factor=1)


def test_a_row_that_begins_far_from_its_mean():
    """Its first values are the origin of one pass; the variance is taken again around the mean."""
    x = torch.randn(64, 384)
    x[:, :16] += 1e4
    exact = reference.layer_norm(x.double())
    assert_accurate(ck.layer_norm(x), reference.layer_norm(x), exact)


def test_exact_gelu_is_as_good_as_float():
    """Measured densely: at most 7.5e-8 · abs(x), and 9.3e-8 without fused multiply-add."""
    x = torch.linspace(-14, 14, 2_000_001)
    exact = x.double() * torch.special.ndtr(x.double())
    assert ((ck.gelu(x).double() - exact).abs() <= 1e-7 * x.double().abs()).all()


@every_call
@pytest.mark.parametrize("verdict", ["native", "reference"])
def test_auto_takes_it_by_verdict(operator, keywords, verdict):
    """A verdict on the forward, which those on larger calls and on the backward do not replace."""
    tensors = arguments(operator, (4, 5), torch.float32)
    defaults = {"eps": 1e-5} if "layer_norm" in operator else {}
    remember_verdict(verdict, operator, *tensors, **defaults, **keywords)
    assert count_by_auto(operator, tensors, keywords) == (verdict == "native")
    assert count_by_auto(operator, arguments(operator, (400, 5), torch.float32), keywords) == 0
    assert "has no verdict" in ck.fallbacks()[operator, "native"]
    assert count_by_auto(operator, [t.requires_grad_() for t in tensors], keywords) == 0


def count_by_auto(operator, tensors, keywords):
    """Returns how many operators of the extension ``auto`` calls."""
    with ck.use_backend("auto"), recorded_operators() as called:
        getattr(ck, operator)(*tensors, **keywords)
    return count_ours(called)


@every_call
def test_nan_and_inf_propagate(operator, keywords):
    tensors = arguments(operator, (6, 32), torch.float32)
    x, inf = tensors[0], torch.inf
    x[0, 3], x[1, 4], x[2, 5], x[3, :2] = torch.nan, inf, -inf, torch.tensor([inf, -inf])
    ours, theirs = (outputs_and_gradients(getattr(f, operator), tensors, keywords) for f in (ck, reference))
    for got, expected in zip(ours, theirs, strict=True):
        if keywords.get("approximate") == "none":  # gelu(inf) is inf, but NaN in PyTorch's vectorized loop
            got, expected = (t.masked_fill(t == inf, torch.nan) for t in (got, expected))
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("approximate", ["none", "tanh", "quick"])
def test_gelu_where_it_saturates(approximate):
    x = torch.tensor([0.0, -0.0, 5.5, -5.5, 5.7, -5.7, 20.0, -20.0, 90.0, -90.0, 1e10, -1e10])
    torch.testing.assert_close(*(f.gelu(x, approximate=approximate) for f in (ck, reference)))


def count_ours(operators):
    return sum(name.startswith("cvt_kernels.") for name in operators)


def test_operators_check_what_they_would_read():
    x, weight, bias = arguments("layer_norm", (4, 6), torch.float32)
    ops = machine.load_extension() and torch.ops.cvt_kernels
    vector = torch.ones(4)
    for call, message in (
        (
            lambda: ops.layer_norm_backward(x, x, x, vector, vector, weight, bias, "identity", True),
            "with_dbranch: got true, expected false: the branch has the dtype of its sum",
        ),
        (
            lambda: ops.layer_norm(x, weight[:5], bias, 1e-5, "none", x.dtype),
            r"weight: got .*, expected \(channels,\)",
        ),
        (
            lambda: ops.layer_norm_inference(x, weight, bias, 1e-5, "identity", x.dtype, bias[:5]),
            r"shift: got .*, expected \(channels,\)",
        ),
        (
            lambda: ops.add_layer_norm(x[:2], x, weight, bias, 1e-5, x.dtype),
            "x: got .*, expected the shape of float32",
        ),
        (
            lambda: ops.add_layer_norm(x, x, weight, bias, 1e-5, torch.half),
            "x: got .*, expected the dtype of the result",
        ),
        (
            lambda: ops.layer_norm(x, weight, bias, 1e-5, "none", torch.half),
            "results of the dtype of their rows",
        ),
        (lambda: ops.gelu(x.long(), None, "none"), "gelu: x: got int64, expected float64, float32"),
        (lambda: ops.gelu(x, None, "relu"), "activation: got 'relu'"),
        (
            lambda: ops.gelu_backward(x.half(), x, None, "none"),
            "dout: got float16 .*, expected the dtype of x",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_autocast_gives_the_dtypes_of_pytorch():
    x = torch.randn(2, 8)
    half, weight, bias = x.bfloat16(), *torch.randn(2, 8).unbind()
    calls = {
        "layer_norm": (half, weight, bias),
        "add_layer_norm": (half, x, weight, bias),
        "gelu": (half,),
        "bias_gelu": (half, bias),
        "layer_norm_gelu": (half, weight, bias),
    }
    with torch.autocast("cpu", torch.bfloat16):
        for operator, tensors in calls.items():
            ours, theirs = (getattr(f, operator)(*tensors) for f in (ck, reference))
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("operator", ["layer_norm", "add_layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("named", DTYPES, ids=str)
def test_a_named_dtype(operator, dtype, named):
    """The result has it, and the values and gradients of the reference; a sum and float64 keep theirs."""
    tensors = arguments(operator, (37, 64), dtype)
    check(operator, {"dtype": named}, tensors)
    outputs = getattr(ck, operator)(*tensors, dtype=named)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert [out.dtype for out in outputs] == [dtype, named][-len(outputs) :]
    exact = getattr(ck, operator)(*(t.double() for t in tensors), dtype=named)
    assert {out.dtype for out in (exact if isinstance(exact, tuple) else (exact,))} == {torch.float64}


def test_a_named_dtype_for_a_branch_beside_a_stream():
    """Under autocast: the sum is of the stream's dtype, and so is its gradient."""
    branch, stream, weight, bias = arguments("add_layer_norm", (37, 64), torch.float32)
    tensors = [branch.bfloat16(), stream, weight, bias]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (
            outputs_and_gradients(f.add_layer_norm, tensors, {"dtype": torch.bfloat16})
            for f in (ck, reference)
        )
    assert [t.dtype for t in ours[:4]] == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    exact = outputs_and_gradients(reference.add_layer_norm, [t.double() for t in tensors], {})
    for i, (got, same, right) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert_accurate(got, same, right, factor=2.0 if i < 2 else 3.0)


# A shift ---------------------------------------------------------------------------------------------------


def shifted_arguments(shape, dtype, shift_dtype):
    """Returns x, weight, bias and a shift."""
    shift = torch.randn(shape[-1], dtype=torch.float64).to(shift_dtype)
    return [*arguments("layer_norm", shape, dtype), shift]


def shifted_by(function, **keywords):
    return lambda x, weight, bias, shift: function(x, weight, bias, shift=shift, **keywords)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("float_shift", [False, True])
@pytest.mark.parametrize("shape", [(2, 50, 64), (37, 192), (5, 65), (3, 1)], ids=str)
def test_accuracy_of_a_shift(dtype, float_shift, shape):
    tensors = shifted_arguments(shape, dtype, torch.float32 if float_shift else dtype)
    with recorded_operators() as called:
        got = shifted_by(ck.layer_norm)(*tensors)
    assert list(called) == ["cvt_kernels.layer_norm_inference.default"]
    exact = shifted_by(reference.layer_norm)(*(t.double() for t in tensors))
    if dtype == torch.float64:
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)
    else:
        assert_accurate(got, shifted_by(reference.layer_norm)(*tensors), exact)


def test_a_shift_is_the_sum_that_is_normalized():
    """The bits are the same in float32; a sum with 16 bits is not rounded."""
    x, weight, bias, shift = shifted_arguments((37, 65), torch.float32, torch.float32)
    assert torch.equal(ck.layer_norm(x, weight, bias, shift=shift), ck.layer_norm(x + shift, weight, bias))
    half = x.bfloat16()
    got = ck.layer_norm(half, weight.bfloat16(), bias.bfloat16(), shift=shift)
    sums = ck.layer_norm(half + shift, weight.bfloat16().float(), bias.bfloat16().float())
    assert torch.equal(got, sums.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("named", DTYPES, ids=str)
def test_a_shift_and_a_named_dtype(dtype, named):
    tensors = shifted_arguments((37, 64), dtype, torch.float32)
    ours, theirs = (shifted_by(f.layer_norm, dtype=named) for f in (ck, reference))
    got = ours(*tensors)
    assert got.dtype == named
    assert_accurate(got, theirs(*tensors), theirs(*(t.double() for t in tensors)))


def test_a_shift_under_autocast():
    x, weight, bias, shift = shifted_arguments((37, 64), torch.float32, torch.float32)
    tensors = [x.bfloat16(), weight, bias, shift]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (shifted_by(f.layer_norm)(*tensors) for f in (ck, reference))
    exact = shifted_by(reference.layer_norm)(*(t.double() for t in tensors))
    assert_accurate(ours, theirs, exact)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_a_shift_of_any_strides(dtype):
    tensors = shifted_arguments((4, 6, 9), dtype, dtype)
    laid = [torch.stack([t, t], -1)[..., 1] for t in tensors]
    laid[0] = tensors[0].mT.contiguous().mT
    assert torch.equal(shifted_by(ck.layer_norm)(*laid), shifted_by(ck.layer_norm)(*tensors))
    assert torch.equal(laid[0], tensors[0])  # x itself stays


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("float_shift", [False, True])
def test_gradients_with_a_shift(dtype, float_shift):
    tensors = shifted_arguments((37, 64), dtype, torch.float32 if float_shift else dtype)
    ours, theirs = (outputs_and_gradients(shifted_by(f.layer_norm), tensors, {}) for f in (ck, reference))
    exact = outputs_and_gradients(shifted_by(reference.layer_norm), [t.double() for t in tensors], {})
    assert [t.dtype for t in ours[1:]] == [t.dtype for t in tensors]
    for i, (got, same, right) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert_accurate(got, same, right, factor=2.0 if i < 1 else 3.0)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_compiled_with_a_shift(requires_grad):
    torch.compiler.reset()
    tensors = shifted_arguments((3, 4, 8), torch.float32, torch.float32)
    function = shifted_by(ck.layer_norm)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    if requires_grad:
        eager, graph = (outputs_and_gradients(f, tensors, {}) for f in (function, compiled))
    else:
        eager, graph = ([f(*tensors)] for f in (function, compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


INSTRUCTION_SETS = """
import torch, cvt_kernels as ck
x, w, b = torch.randn(37, 65), torch.randn(65), torch.randn(65)
with ck.use_backend("native"):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        y = [t.to(dtype) for t in (x, w, b)]
        for approximate in ("none", "tanh", "quick"):
            torch.testing.assert_close(
                ck.layer_norm_gelu(*y, approximate=approximate).double(),
                ck.reference.layer_norm_gelu(*(t.double() for t in y), approximate=approximate),
                rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps,
            )
"""


@pytest.mark.parametrize("name", ["plain", "avx2", "avx512"])
def test_other_instruction_sets(name):
    run_on_instruction_set(name, INSTRUCTION_SETS)


def test_unknown_instruction_set():
    result = run_python(INSTRUCTION_SETS, CVT_KERNELS_CPU="sse")
    assert "CVT_KERNELS_CPU: got 'sse', expected plain" in result.stderr


@pytest.mark.sanitized
@pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("flags", ["", pytest.param("-mavx2 -mfma -mf16c", marks=needs_avx2)])
def test_loops_stay_within_their_buffers(tmp_path, flags):
    run_sanitized("layer_norm_gelu", tmp_path, flags)
