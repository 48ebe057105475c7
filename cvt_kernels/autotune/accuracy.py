"""The accuracy rule of the project, which tests, benchmarks, reports and autotuning share.

Against a float64 result, our largest error is at most a factor times the largest error of PyTorch's own
operators in the same dtype, plus a few units in the last place of the largest exact value.

Where results are 8-bit numbers, errors are counted in steps from one such number to the next. Half a step is
everyone's, by rounding; the rule is for what goes beyond it. So a number may be another one than the nearest
only where the exact value is as good as in the middle of both.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

#: The factors of the rule, for results and for gradients.
VALUE_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
#: The dtypes whose errors are counted in steps.
OF_8_BITS = (torch.int8, torch.float8_e4m3fn)
_FEW = 1000
_ROUNDING = 0.5  # of a step


class Error(NamedTuple):
    """The largest errors of two results against float64, and the one that is allowed.

    Attributes:
        ours: The error of our result; NaN if a difference is NaN.
        pytorchs: The error of PyTorch's result in the same dtype.
        allowed: The largest error that is allowed to ours.
    """

    ours: float
    pytorchs: float
    allowed: float

    @property
    def passed(self) -> bool:
        """True if our error is allowed; NaN is not, and nothing is where ``allowed`` is not finite."""
        return self.ours <= self.allowed < math.inf

    def __str__(self) -> str:
        return f"error {self.ours:.3e}, PyTorch's {self.pytorchs:.3e}, allowed {self.allowed:.3e}"


def compare(
    actual: Tensor,
    same_dtype: Tensor,
    exact: Tensor,
    *,
    factor: float = VALUE_FACTOR,
    units: float | None = None,
    dtype: torch.dtype | None = None,
) -> Error:
    """Compares our result and PyTorch's with the exact one, by the accuracy rule.

    Infinities that equal the exact ones are no error. NaN always is one, even where the exact value is NaN.
    Of 8-bit numbers, the errors are in steps, and ``exact`` is what they would be if they were not rounded.

    Args:
        actual: Our result.
        same_dtype: The result of PyTorch's own operators, in the dtype of ``actual``.
        exact: The float64 result.
        factor: ``VALUE_FACTOR``, or ``GRADIENT_FACTOR`` for gradients.
        units: Also allowed, in units in the last place of the largest exact value; None for
            :func:`usual_units`.
        dtype: The dtype of these units, where results are wider than what they are computed in, as under
            autocast; None for the dtype of ``actual``.

    Returns:
        The absolute errors; those of empty tensors are 0.

    Raises:
        ValueError: The shapes differ, the dtypes of the results differ, or ``exact`` is not float64.
    """
    for name, result in (("actual", actual), ("same_dtype", same_dtype)):
        if result.shape != exact.shape:
            raise ValueError(
                f"{name}: got shape {tuple(result.shape)}, expected {tuple(exact.shape)}, that of exact"
            )
    if actual.dtype != same_dtype.dtype:
        raise ValueError(f"actual: got {actual.dtype}, expected {same_dtype.dtype}, that of same_dtype")
    if exact.dtype != torch.float64:
        raise ValueError(f"exact: got {exact.dtype}, expected torch.float64")
    units = usual_units(exact.numel()) if units is None else units
    rounding, unit = 0.0, dtype or actual.dtype
    if actual.dtype in OF_8_BITS:
        rounding, unit = _ROUNDING, torch.float32  # in which steps are computed
        actual, same_dtype, exact = (_in_steps(each, actual.dtype) for each in (actual, same_dtype, exact))
    pytorchs = _largest_difference(same_dtype, exact)
    ours = pytorchs if actual is same_dtype else _largest_difference(actual, exact)
    beyond = max(pytorchs - rounding, 0.0)
    allowed = allowed_error(beyond, _largest_finite(exact), unit, factor=factor, units=units)
    return Error(ours, pytorchs, rounding + allowed)


def _in_steps(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns how many 8-bit numbers of a dtype lie between 0 and each number, with fractions in float64."""
    numbers = numbers.detach().double()
    if dtype == torch.int8:
        return numbers
    size = numbers.abs()
    exponents = torch.frexp(size.clamp_min(2.0**-6)).exponent - 1  # smaller ones are as far apart as these
    return (torch.ldexp(size, 3 - exponents) + 8 * (exponents + 6)).copysign(numbers)


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns numbers in another dtype, for integers the nearest ones that quantized rows may have."""
    return numbers.round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else numbers.to(dtype)


def allowed_error(
    pytorchs: float,
    largest: float,
    dtype: torch.dtype,
    *,
    factor: float = VALUE_FACTOR,
    units: float = 1.0,
) -> float:
    """Returns the largest error that the rule allows beside an error of PyTorch's.

    ``units`` are in the last place of ``largest``, the largest exact value; 1 if errors are relative to it.
    """
    return factor * pytorchs + units * torch.finfo(dtype).eps * largest


def usual_units(values: int) -> float:
    """Returns the units in the last place that are allowed by default to a result of so many values.

    It is 1, or 8 below 1000 values, because the largest error of few values is luck.
    """
    return 8.0 if values < _FEW else 1.0


@torch.no_grad()
def _largest_difference(result: Tensor, exact: Tensor) -> float:
    if not exact.numel():
        return 0.0
    difference = (result.double() - exact).abs_()
    largest = difference.max().item()
    if math.isnan(largest):  # which ∞ − ∞ is too
        largest = difference.masked_fill_(result == exact, 0.0).max().item()
    return largest


@torch.no_grad()
def _largest_finite(exact: Tensor) -> float:
    """Returns the largest absolute value that is not infinite, NaN if there is one."""
    if not exact.numel():
        return 0.0
    least, most = exact.aminmax()
    largest = max(-least.item(), most.item())
    if largest == math.inf:
        largest = exact.abs().masked_fill_(exact.isinf(), 0.0).max().item()
    return largest
