"""The accuracy rule takes what is as accurate as PyTorch, and finds everything else."""

import math

import pytest
import torch

from cvt_kernels.tuning import accuracy
from cvt_kernels.tuning.accuracy import (
    GRADIENT_FACTOR,
    VALUE_FACTOR,
    Error,
    compare,
    usual_units,
)
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


def test_which_errors_pass():
    assert Error(0.5, 0.25, 0.5).passed
    assert not Error(math.nextafter(0.5, 1), 0.25, 0.5).passed
    assert Error(0.0, 0.0, 0.0).passed
    for allowed in (1.0, math.inf, math.nan):
        for ours in (math.inf, math.nan) if allowed == 1.0 else (0.0, 1.0, math.inf, math.nan):
            assert not Error(ours, 0.5, allowed).passed


# Comparing ------------------------------------------------------------------------------------------------


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
    bad = with_one(same, value)
    assert not math.isfinite(compare(bad, same, exact).ours)
    # Where it happens to PyTorch too, that cannot tell what is right.
    for ours, theirs in ((bad, same), (bad, bad), (same + 0.5, bad)):
        assert not compare(ours, theirs, exact).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_infinities_are_no_error(dtype):
    exact = with_one(with_one(exact_values(), math.inf, 0), -math.inf, 1)
    same = exact.to(dtype)
    error = compare(same, same, exact)
    assert error.passed
    # They leave the units at the largest finite value's.
    assert error.allowed == 2 * error.pytorchs + torch.finfo(dtype).eps
    assert not compare(with_one(same, same[-7] + 0.1), same, exact).passed
    for wrong in (-math.inf, 1.0, math.nan):
        assert not compare(with_one(same, wrong, 0), same, exact).passed
    infinite = torch.full((3,), math.inf, dtype=torch.float64)
    assert compare(infinite.to(dtype), infinite.to(dtype), infinite) == Error(0.0, 0.0, 0.0)


@pytest.mark.parametrize("factor", [VALUE_FACTOR, GRADIENT_FACTOR])
def test_the_factor_at_its_boundary(factor):
    exact, step = torch.ones(MANY, dtype=torch.float64), 2.0**-10
    same = with_one(exact, 1 + step)
    error = compare(with_one(exact, 1 + factor * step), same, exact, factor=factor, units=0)
    assert error == Error(factor * step, step, factor * step)
    beyond = with_one(exact, 1 + factor * step + 2.0**-50)
    assert not compare(beyond, same, exact, factor=factor, units=0).passed


@pytest.mark.parametrize(("count", "units"), [(999, None), (MANY, None), (MANY, 1), (MANY, 4)])
@pytest.mark.parametrize("dtype", HALF)
def test_the_units_at_their_boundary(dtype, count, units):
    exact = torch.ones(count, dtype=torch.float64)
    same, eps = exact.to(dtype), torch.finfo(dtype).eps
    allowed = units or usual_units(count)
    for scale in (1, 64):  # by a power of two, everything is scaled
        right, wrong = (scale * with_one(same, 1 + n * eps) for n in (allowed, allowed + 1))
        assert compare(right, scale * same, scale * exact, units=units).passed
        assert not compare(wrong, scale * same, scale * exact, units=units).passed


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("actual", "same_dtype", "exact", "message"),
    [
        (X, X[:1], X[:1].double(), r"actual: got shape \(2, 3\), expected \(1, 3\)"),
        (X, X.view(6), X.double(), r"same_dtype: got shape \(6,\), expected \(2, 3\)"),
        (X.half(), X, X.double(), r"actual: got torch\.float16, expected torch\.float32"),
        (X, X, X, r"exact: got torch\.float32, expected torch\.float64"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(actual, same_dtype, exact, message):
    with pytest.raises(ValueError, match=message):
        compare(actual, same_dtype, exact)


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


@pytest.mark.parametrize(("beside", "passes"), [(1e-6, True), (1e-3, False)])
def test_a_tie_may_go_either_way_as_far_as_float32_tells(beside, passes):
    exact = with_one(torch.linspace(-100, 100, 2000, dtype=torch.float64), 63.5 + beside)
    same = accuracy.rounded(exact, torch.int8)
    assert same[-7] == 64
    assert compare(with_one(same, 63), same, exact).passed == passes
    for poison in (-1, -128):  # as in memory that was not written
        assert not compare(with_one(same, poison), same, exact).passed


# The assertion of the tests -------------------------------------------------------------------------------


def test_the_assertion_passes_and_fails_by_the_rule():
    exact = torch.ones(10, dtype=torch.float64)
    same, eps = exact.half(), torch.finfo(torch.float16).eps
    assert_accurate(with_one(same, 1 + eps), same, exact)
    with pytest.raises(AssertionError, match=r"error 1\.953e-03, PyTorch's 0\.000e\+00, allowed 9\.766e-04"):
        assert_accurate(with_one(same, 1 + 2 * eps), same, exact)  # its floor is 1 unit for few values too
    assert_accurate(with_one(same, 1 + 2 * eps), same, exact, floor=2)
    assert_accurate(with_one(same, 1 + 4 * eps), with_one(same, 1 + eps), exact, factor=3)
    with pytest.raises(AssertionError, match="nothing to compare"):
        assert_accurate(same[:0], same[:0], exact[:0])


def test_nan_fails_even_where_it_is_exact():
    exact = with_one(exact_values(), math.nan)
    assert not compare(exact, exact, exact).passed
    assert not compare(exact_values(), exact_values(), exact).passed
