"""The accuracy rule takes what is as accurate as PyTorch, and finds everything else."""

import math

import pytest
import torch

from cvt_kernels import accuracy, measure
from cvt_kernels.accuracy import GRADIENT_FACTOR, VALUE_FACTOR, Error, allowed_error, compare, usual_units
from tests.checks import assert_accurate

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32, torch.float64)
MANY = 2000


def exact_values(count=MANY):
    """Returns values whose largest is 1."""
    return torch.linspace(-0.5, 1, count, dtype=torch.float64)


def with_one(tensor, value, index=-7):
    """Returns a copy in which one element is another."""
    copy = tensor.clone()
    copy[index] = value
    return copy


# The rule -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_allowed_error(dtype):
    eps = torch.finfo(dtype).eps
    assert allowed_error(0.25, 4.0, dtype) == 2 * 0.25 + 4 * eps
    assert allowed_error(0.25, 4.0, dtype, factor=GRADIENT_FACTOR, units=8) == 3 * 0.25 + 32 * eps
    assert allowed_error(0.0, 0.0, dtype) == 0
    assert (VALUE_FACTOR, GRADIENT_FACTOR) == (2, 3)


def test_few_values_have_more_units():
    assert [usual_units(values) for values in (0, 1, 999, 1000, 10**9)] == [8, 8, 8, 1, 1]


def test_the_largest_allowed_error_passes_and_the_next_does_not():
    assert Error(0.5, 0.25, 0.5).passed
    assert not Error(math.nextafter(0.5, 1), 0.25, 0.5).passed
    assert Error(0.0, 0.0, 0.0).passed


@pytest.mark.parametrize("ours", [0.0, 1.0, math.inf, math.nan])
@pytest.mark.parametrize("allowed", [math.inf, math.nan])
def test_nothing_passes_where_what_is_allowed_is_not_finite(ours, allowed):
    assert not Error(ours, allowed, allowed).passed


@pytest.mark.parametrize("ours", [math.inf, math.nan])
def test_an_error_that_is_not_finite_does_not_pass(ours):
    assert not Error(ours, 0.5, 1.0).passed


# Comparing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_pytorch_computes_passes(dtype):
    x = torch.linspace(-3, 3, MANY, dtype=torch.float64).to(dtype)
    same, exact = x.sin(), x.double().sin()
    error = compare(same, same, exact)
    assert error.passed
    assert error.ours == error.pytorchs == (same.double() - exact).abs().max().item()
    assert error.allowed == 2 * error.pytorchs + torch.finfo(dtype).eps * exact.abs().max().item()


@pytest.mark.parametrize("shape", [(MANY,), (1,), (), (10, 10, 20)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_fails(dtype, shape):
    exact = exact_values(math.prod(shape)).reshape(shape)
    same = exact.to(dtype)
    assert compare(same, same, exact).passed
    for position in {0, same.numel() // 2, same.numel() - 1}:
        wrong = with_one(same.flatten(), same.flatten()[position] + 0.1, position).reshape(shape)
        error = compare(wrong, same, exact)
        assert not error.passed
        assert error.ours == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_element_that_is_not_finite_fails(dtype, value):
    exact = exact_values()
    same = exact.to(dtype)
    error = compare(with_one(same, value), same, exact)
    assert not error.passed
    assert not math.isfinite(error.ours)
    # Even if it happens to PyTorch too, which then cannot tell what is right.
    both = with_one(same, value)
    assert not compare(both, both, exact).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_passes_beside_a_result_of_pytorch_that_is_not_finite(dtype):
    exact = exact_values()
    same = exact.to(dtype)
    for value in (math.inf, math.nan):
        assert not compare(same + 0.5, with_one(same, value), exact).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_not_written_fails(dtype):
    exact = exact_values()
    same = exact.to(dtype)
    assert not compare(torch.full_like(same, math.nan), same, exact).passed
    unwritten = same.clone()
    unwritten[-1:] = math.nan
    assert not compare(unwritten, same, exact).passed
    assert not compare(torch.zeros_like(same), same, exact).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_infinities_are_no_error(dtype):
    exact = with_one(with_one(exact_values(), math.inf, 0), -math.inf, 1)
    same = exact.to(dtype)
    error = compare(same, same, exact)
    assert error.passed
    # They leave the units as they are: those of the largest finite value.
    assert error.allowed == 2 * error.pytorchs + torch.finfo(dtype).eps
    assert not compare(with_one(same, same[-7] + 0.1), same, exact).passed
    for wrong in (-math.inf, 1.0, math.nan):
        assert not compare(with_one(same, wrong, 0), same, exact).passed


def test_all_values_infinite():
    exact = torch.full((3,), math.inf, dtype=torch.float64)
    assert compare(exact.half(), exact.half(), exact) == Error(0.0, 0.0, 0.0)
    assert not compare(-exact.half(), exact.half(), exact).passed


def test_nan_fails_even_where_it_is_exact():
    exact = with_one(exact_values(), math.nan)
    assert not compare(exact, exact, exact).passed
    assert not compare(exact_values(), exact_values(), exact).passed


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_tensors_have_no_error(dtype, shape):
    empty = torch.empty(shape, dtype=dtype)
    error = compare(empty, empty, empty.double())
    assert error == Error(0.0, 0.0, 0.0)
    assert error.passed


@pytest.mark.parametrize("factor", [VALUE_FACTOR, GRADIENT_FACTOR])
def test_the_factor_at_its_boundary(factor):
    exact, step = torch.ones(MANY, dtype=torch.float64), 2.0**-10
    same = with_one(exact, 1 + step)
    assert compare(with_one(exact, 1 + factor * step), same, exact, factor=factor, units=0) == Error(
        factor * step, step, factor * step
    )
    assert compare(with_one(exact, 1 + factor * step), same, exact, factor=factor, units=0).passed
    beyond = with_one(exact, 1 + factor * step + 2.0**-50)
    assert not compare(beyond, same, exact, factor=factor, units=0).passed


def test_the_factor_of_values_is_the_default():
    exact, step = torch.ones(MANY, dtype=torch.float64), 2.0**-10
    same = with_one(exact, 1 + step)
    assert compare(with_one(exact, 1 + 2 * step), same, exact).passed
    assert not compare(with_one(exact, 1 + 3 * step), same, exact).passed


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("units", [1, 4])
def test_the_units_at_their_boundary(dtype, units):
    exact = torch.ones(MANY, dtype=torch.float64)
    same, eps = exact.to(dtype), torch.finfo(dtype).eps
    assert compare(with_one(same, 1 + units * eps), same, exact, units=units).passed
    assert not compare(with_one(same, 1 + (units + 1) * eps), same, exact, units=units).passed
    # Scaled by a power of two, everything is.
    assert compare(64 * with_one(same, 1 + units * eps), 64 * same, 64 * exact, units=units).passed
    assert not compare(with_one(same, 1 + eps), same, exact, units=0).passed


@pytest.mark.parametrize(("count", "units"), [(999, 8), (1000, 1)])
def test_few_values_may_have_more_error(count, units):
    exact = torch.ones(count, dtype=torch.float64)
    same, eps = exact.half(), torch.finfo(torch.float16).eps
    assert compare(with_one(same, 1 + units * eps), same, exact).passed
    assert not compare(with_one(same, 1 + (units + 1) * eps), same, exact).passed
    assert not compare(with_one(same, 1 + 2 * eps), same, exact, units=1).passed


def test_the_units_of_another_dtype():
    exact = torch.ones(MANY, dtype=torch.float64)
    same = exact.float()
    rounded = with_one(same, 1 + torch.finfo(torch.bfloat16).eps)
    assert not compare(rounded, same, exact).passed
    assert compare(rounded, same, exact, dtype=torch.bfloat16).passed


def test_strides_and_gradients_do_not_matter_and_nothing_is_changed():
    exact = exact_values().reshape(40, 50)
    same = exact.float()
    inputs = [same.t().contiguous().t().requires_grad_(), same.clone().requires_grad_(), exact.clone()]
    assert compare(*inputs) == compare(same, same, exact)
    assert torch.equal(inputs[0], same)
    assert torch.equal(inputs[2], exact)
    assert compare(same[:1].expand(40, 50), same[:1].expand(40, 50), exact[:1].expand(40, 50)).passed
    with torch.inference_mode():
        assert compare(same * 1, same * 1, exact * 1).passed


def test_memory_is_that_of_a_few_copies():
    exact = exact_values(10**5)
    same = exact.half()
    assert measure.peak_bytes(lambda: compare(same, same, exact), "cpu") < 3 * exact.nbytes


@pytest.mark.gpu
def test_on_a_gpu():
    exact = exact_values().cuda()
    for dtype in DTYPES:
        same = exact.to(dtype)
        assert compare(same, same, exact) == compare(same.cpu(), same.cpu(), exact.cpu())
        assert not compare(with_one(same, math.nan), same, exact).passed


@pytest.mark.parametrize(
    ("actual", "same_dtype", "exact", "message"),
    [
        ((2, 3), (1, 3), (1, 3), r"actual: got shape \(2, 3\), expected \(1, 3\), that of exact"),
        ((2, 3), (6,), (2, 3), r"same_dtype: got shape \(6,\), expected \(2, 3\), that of exact"),
    ],
)
def test_other_shapes_are_refused(actual, same_dtype, exact, message):
    with pytest.raises(ValueError, match=message):
        compare(torch.zeros(actual), torch.zeros(same_dtype), torch.zeros(exact, dtype=torch.float64))


def test_other_dtypes_are_refused():
    x = torch.zeros(3)
    with pytest.raises(
        ValueError, match=r"actual: got torch\.float16, expected torch\.float32, that of same"
    ):
        compare(x.half(), x, x.double())
    with pytest.raises(ValueError, match=r"exact: got torch\.float32, expected torch\.float64"):
        compare(x, x, x)


# 8-bit numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", accuracy.OF_8_BITS)
def test_errors_of_8_bit_numbers_are_in_steps(dtype):
    bits = torch.arange(127, dtype=torch.uint8)  # the finite numbers that are not negative, in their order
    numbers = bits.view(dtype)
    exact = numbers.double()
    assert compare(numbers, numbers, exact).ours == 0
    middles = (exact[:126] + exact[1:127]) / 2
    for result in (numbers[:126], numbers[1:127]):
        error = compare(result.clone(), result.clone(), middles)
        assert (error.ours, error.passed) == (0.5, True)
    for i in (1, 7, 8, 60, 125):
        error = compare(with_one(numbers, numbers[i + 1], i), numbers, exact)
        assert (error.ours, error.passed) == (1.0, False)
    below = with_one(middles, middles[60] * (1 - 1e-3), 60)
    assert not compare(numbers[1:127], accuracy.rounded(below, dtype), below).passed


def test_a_tie_may_go_either_way_as_far_as_float32_tells():
    exact = torch.linspace(-100, 100, 2000, dtype=torch.float64)
    near, far = exact.clone(), exact.clone()
    near[7], far[7] = 63.5 + 1e-6, 63.5 + 1e-3
    for truth, passes in ((near, True), (far, False)):
        same = accuracy.rounded(truth, torch.int8)
        assert same[7] == 64
        assert compare(with_one(same, 63, 7), same, truth).passed == passes


@pytest.mark.parametrize("poison", [-1, -128])
def test_memory_that_was_not_written_is_no_8_bit_number(poison):
    exact = torch.linspace(-100, 100, 2000, dtype=torch.float64)
    same = accuracy.rounded(exact, torch.int8)
    assert not compare(with_one(same, poison, 7), same, exact).passed


# The assertion of the tests -------------------------------------------------------------------------------


def test_the_assertion_passes_and_fails_by_the_rule():
    exact = torch.ones(10, dtype=torch.float64)
    same, eps = exact.half(), torch.finfo(torch.float16).eps
    assert_accurate(with_one(same, 1 + eps), same, exact)
    with pytest.raises(AssertionError, match=r"error 1\.953e-03, PyTorch's 0\.000e\+00, allowed 9\.766e-04"):
        assert_accurate(with_one(same, 1 + 2 * eps), same, exact)  # its floor is 1 unit for few values too
    assert_accurate(with_one(same, 1 + 2 * eps), same, exact, floor=2)
    assert_accurate(with_one(same, 1 + 4 * eps), with_one(same, 1 + eps), exact, factor=3)
    with pytest.raises(AssertionError):
        assert_accurate(with_one(same, 1 + 4 * eps), with_one(same, 1 + eps), exact)
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_accurate(same[:0], same[:0], exact[:0])
