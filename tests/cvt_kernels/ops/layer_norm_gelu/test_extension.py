"""LayerNorm and GELU on a CPU: rows far from zero, exact GELU, and shifts."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import (
    assert_accurate,
    needs_extension,
    recorded_operators,
    run_python,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def test_unknown_instruction_set():
    result = run_python(INSTRUCTION_SETS, CVT_KERNELS_CPU="sse")
    assert "CVT_KERNELS_CPU: got 'sse', expected plain" in result.stderr
