"""The accuracy of the CPU kernels where rounding errors add up: sums over many rows, and tails in float64."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from tests.checks import assert_accurate, needs_extension

pytestmark = needs_extension


@pytest.fixture(autouse=True)
def _cpu():
    with ck.use_backend("cpu"):
        yield


def test_gradients_of_biases_are_sums_as_accurate_as_those_of_pytorch():
    dout, bias = torch.randn(1_000_000, 8), torch.zeros(8, requires_grad=True)
    x = torch.full_like(dout, 30.0)  # where GELU is x
    for out in (ck.gelu(x, bias), ck.layer_norm(x, torch.ones(8), bias)):
        (gradient,) = torch.autograd.grad(out, bias, dout)
        assert_accurate(gradient, dout.sum(0), dout.double().sum(0), factor=3)


@pytest.mark.parametrize("seed", range(3))
def test_sums_of_rows_that_are_alike(seed):
    """Gradients of a mean over the tokens of two images are such rows, whose sums all round the same way."""
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(2, 1, 48, generator=generator).repeat(1, 64, 1)
    bias, x = torch.zeros(48, requires_grad=True), torch.full_like(dout, 30.0)
    exact = dout.double().sum((0, 1))
    for out in (ck.gelu(x, bias), ck.layer_norm(x, torch.ones(48), bias)):
        (gradient,) = torch.autograd.grad(out, bias, dout)
        assert_accurate(gradient, dout.sum((0, 1)), exact, factor=3)


def test_gradients_of_weights_are_sums_as_accurate_as_those_of_pytorch():
    dout, weight = torch.randn(500_000, 2), torch.ones(2, requires_grad=True)
    x = torch.tensor([-1.0, 1.0]).expand_as(dout)  # which LayerNorm leaves as they are
    (gradient,) = torch.autograd.grad(ck.layer_norm(x, weight, torch.zeros(2), eps=1e-12), weight, dout)
    products = dout * x
    assert_accurate(gradient, products.sum(0), products.double().sum(0), factor=3)


def _begins_apart(shape, count, by):
    """Returns rows whose first values, the origin of one pass, are off by some deviations."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    x[:, :count] += by
    return x


@pytest.mark.parametrize(
    ("x", "factor"),
    [
        (1e4 + 1e-3 * torch.randn(64, 384), 1.0),
        (_begins_apart((64, 384), 16, 1e4), 2.0),
        (_begins_apart((200, 1024), 16, -2.05) + 2.05, 2.0),
    ],
    ids=["huge mean, tiny variance", "far from the mean", "two deviations from the mean"],
)
def test_rows_that_lose_accuracy_where_they_are_summed_plainly(x, factor):
    same, exact = (F.layer_norm(each, x.shape[1:]) for each in (x, x.double()))
    assert_accurate(ck.layer_norm(x), same, exact, factor=factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_shift_of_float32_beside_16_bits(dtype):
    x, weight, bias, shift = (torch.randn(*n, 65).to(dtype) for n in ((37,), (), (), ()))
    leaves = [t.requires_grad_() for t in (x, weight, bias, shift.float())]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    results = []
    for function, (*given, shift) in ((ck.layer_norm, leaves), (ck.reference.layer_norm, leaves),
                                      (ck.reference.layer_norm, exact)):  # fmt: skip
        out = function(*given, shift=shift)
        dout = (torch.arange(out.numel()) % 17 / 8 - 1).view(out.shape).to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, [*given, shift], dout)])
    for ours, same, right in zip(*results, strict=True):
        assert ours.dtype == same.dtype
        assert_accurate(ours, same, right, factor=3)


def test_exact_gelu_is_as_good_as_float():
    """Measured densely: at most 7.5e-8 · abs(x), and 9.3e-8 without fused multiply-add."""
    x = torch.linspace(-14, 14, 2_000_001)
    exact = x.double() * torch.special.ndtr(x.double())
    assert ((ck.gelu(x).double() - exact).abs() <= 1e-7 * x.double().abs()).all()


def test_rows_of_one_channel_have_no_gradient():
    x, weight = torch.randn(64, 1, requires_grad=True), torch.tensor([0.7])
    (gradient,) = torch.autograd.grad(ck.layer_norm(x, weight, None), x, torch.randn(64, 1))
    assert gradient.eq(0).all()


def test_quick_gelu_in_float64_to_the_end_of_its_tail():
    """Each value and derivative is exact to a few units in its own last place."""
    x = torch.cat([torch.linspace(-435, -2, 200, dtype=torch.float64), torch.linspace(-0.5, 40, 50).double()])
    x.requires_grad_()
    out = ck.gelu(x, approximate="quick")
    (gradient,) = torch.autograd.grad(out.sum(), x)
    with localcontext() as context:
        context.prec = 60
        slope, units, least = Decimal.from_float(1.702), Decimal("1e-15"), Decimal(math.ulp(0.0))
        for number, value, derivative in zip(x.tolist(), out.tolist(), gradient.tolist(), strict=True):
            share = 1 / (1 + (-slope * Decimal(number)).exp())
            expected = Decimal(number) * share
            assert abs(Decimal(value) - expected) <= abs(expected) * units + least
            expected = share + slope * Decimal(number) * share * (1 - share)
            assert abs(Decimal(derivative) - expected) <= (share + abs(expected)) * units + least


@pytest.mark.parametrize("number", [math.inf, 1e300, -1e300, -0.0])
def test_quick_gelu_in_float64_of_extreme_numbers(number):
    x = torch.tensor([number], dtype=torch.float64)
    torch.testing.assert_close(
        ck.gelu(x, approximate="quick"), ck.reference.gelu(x, approximate="quick"), rtol=0, atol=0
    )
