"""The CPU kernels of LayerNorm and GELU against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cvt_kernels as ck
from cvt_kernels import machine, reference
from tests.checks import (
    assert_accurate,
    needs_extension,
    recorded_operators,
    run_on_instruction_set,
    run_python,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Every operator with every GELU: name, keywords.
CALLS = [
    ("layer_norm", {}),
    ("add_layer_norm", {}),
    *(
        (operator, {"approximate": approximate})
        for operator in ("gelu", "layer_norm_gelu")
        for approximate in ("none", "tanh", "quick")
    ),
]
every_call = pytest.mark.parametrize(
    ("operator", "keywords"), CALLS, ids=["-".join((name, *keywords.values())) for name, keywords in CALLS]
)


pytestmark = needs_extension


@pytest.fixture(autouse=True)
def _cpu():
    with ck.use_backend("cpu"):
        yield


def arguments(operator, shape, dtype=torch.float64):
    x, residual = torch.randn(2, *shape, dtype=torch.float64).mul(2).unbind()
    weight, bias = torch.randn(2, shape[-1], dtype=torch.float64).unbind()
    chosen = {
        "layer_norm": (x, weight, bias),
        "add_layer_norm": (x, residual, weight, bias),
        "gelu": (x, bias),
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
    """Compares values and gradients of an operator, or of a function of the module that has it."""
    of = operator if callable(operator) else lambda module: getattr(module, operator)
    ours, theirs = (outputs_and_gradients(of(module), tensors, keywords) for module in (ck, reference))
    exact = outputs_and_gradients(of(reference), [t.double() for t in tensors], keywords)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
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
@pytest.mark.parametrize("shape", [(37, 192), (2, 8192)], ids=str)
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
    # Not the accuracy rule: on a handful of values PyTorch's error may be 0 by luck, and a row of three may
    # have almost no variance.
    ours = outputs_and_gradients(getattr(ck, operator), laid, keywords)
    exact = outputs_and_gradients(getattr(reference, operator), [t.double() for t in laid], keywords)
    epsilon = 256 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps + 2 * torch.finfo(dtype).eps
    for got, expected in zip(ours, exact, strict=True):
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=epsilon * scale)


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
def test_nan_and_inf_propagate(operator, keywords):
    tensors = arguments(operator, (6, 32), torch.float32)
    x, inf = tensors[0], torch.inf
    x[0, 3], x[1, 4], x[2, 5], x[3, :2] = torch.nan, inf, -inf, torch.tensor([inf, -inf])
    ours, theirs = (outputs_and_gradients(getattr(f, operator), tensors, keywords) for f in (ck, reference))
    for got, expected in zip(ours, theirs, strict=True):
        if keywords.get("approximate") == "none":  # gelu(inf) is inf, but NaN in PyTorch's vectorized loop
            got, expected = (t.masked_fill(t == inf, torch.nan) for t in (got, expected))
        torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_operators_check_what_they_would_read():
    x, weight, bias = arguments("layer_norm", (4, 6), torch.float32)
    ops = machine.load_extension() and torch.ops.cvt_kernels
    vector, wide = torch.ones(4), (1e-5, "none", torch.half)
    for operator, args, message in (
        (ops.layer_norm_backward, (x, x, x, vector, vector, weight, bias, "identity", True), "with_dbranch"),
        (ops.layer_norm, (x, weight[:5], bias, 1e-5, "none", x.dtype), "weight: .*, expected .channels"),
        (
            ops.layer_norm_inference, (x, weight, bias, 1e-5, "identity", x.dtype, bias[:5]),
            "shift: .*, expected .channels",
        ),
        (ops.add_layer_norm, (x[:2], x, weight, bias, 1e-5, x.dtype), "x: .*, expected the shape of float32"),
        (ops.add_layer_norm, (x, x, weight, bias, 1e-5, torch.half), "x: .*, expected the dtype of the res"),
        (ops.layer_norm, (x, weight, bias, *wide), "results of the dtype of their rows"),
        (ops.gelu, (x.long(), None, "none"), "gelu: x: got int64, expected float64, float32"),
        (ops.gelu, (x, None, "relu"), "activation: got 'relu'"),
        (ops.gelu_backward, (x.half(), x, None, "none"), "dout: got float16 .*, expected the dtype of x"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            operator(*args)


@pytest.mark.parametrize("operator", ["layer_norm", "add_layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("named", DTYPES, ids=str)
def test_a_named_dtype(operator, dtype, named):
    """The result has it, and the values and gradients of the reference; a sum and float64 keep theirs."""
    tensors = arguments(operator, (37, 64), dtype)
    check(operator, {"dtype": named}, tensors)
    exact = getattr(ck, operator)(*(t.double() for t in tensors), dtype=named)
    assert {out.dtype for out in (exact if isinstance(exact, tuple) else (exact,))} == {torch.float64}


@pytest.mark.parametrize("operator", ["layer_norm", "add_layer_norm", "gelu", "layer_norm_gelu"])
def test_dtypes_may_differ_under_autocast(operator):
    """A branch of 16 bits, beside a stream and parameters of float32."""
    x, *others = arguments(operator, (37, 64), torch.float32)
    names = {"dtype": torch.bfloat16} if operator == "add_layer_norm" else {}
    for keywords in ({}, names):
        with torch.autocast("cpu", torch.bfloat16):
            check(operator, keywords, [x.bfloat16(), *others])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("float_shift", [False, True])
@pytest.mark.parametrize("named", [None, torch.float32, torch.bfloat16], ids=str)
def test_a_shift(dtype, float_shift, named):
    """It is added in one pass with the norm, and gets only the sum's gradient."""
    tensors = arguments("layer_norm", (37, 65), dtype)
    tensors.append(torch.randn(65).to(torch.float32 if float_shift and dtype != torch.float64 else dtype))
    with recorded_operators() as called:
        _layer_norm_with_shift(ck)(*tensors, dtype=named)
    assert called[0] == "cvt_kernels.layer_norm_inference.default"
    check(_layer_norm_with_shift, {"dtype": named}, tensors)


def _layer_norm_with_shift(module):
    return lambda x, weight, bias, shift, **keywords: module.layer_norm(
        x, weight, bias, shift=shift, **keywords
    )


INSTRUCTION_SETS = """
import torch, cvt_kernels as ck
x, w, b = torch.randn(37, 65), torch.randn(65), torch.randn(65)
with ck.use_backend("cpu"):
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
