"""The accuracy rule that tuning, tests, benchmarks and reports share.

Against float64, our largest error may be a factor times the largest error of PyTorch's own operators in the
same dtype, plus a few units in the last place (ulp) of the largest exact value.

Errors of 8-bit results (int8, float8) are counted in steps from one representable number to the next. Half a
step is always allowed, because rounding makes it; the rule applies to the rest. So a result may differ from
the nearest number only where the exact value is about halfway between two.
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
    """The largest errors of our result and PyTorch's against float64, and the allowed error.

    Attributes:
        ours: The error of our result; NaN if a difference is NaN.
        pytorchs: The error of PyTorch's result in the same dtype.
        allowed: The limit for ``ours``.
    """

    ours: float
    pytorchs: float
    allowed: float

    @property
    def passed(self) -> bool:
        """True if our error is allowed; False for NaN, and where ``allowed`` is not finite."""
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

    An infinity that equals the exact one is no error. NaN is always an error, even where the exact value is
    NaN. For 8-bit results, errors are in steps, and ``exact`` has the values before rounding.

    Args:
        actual: Our result.
        same_dtype: The result of PyTorch's own operators, in the dtype of ``actual``.
        exact: The float64 result.
        factor: ``VALUE_FACTOR``, or ``GRADIENT_FACTOR`` for gradients.
        units: Allowed in addition, in units in the last place of the largest exact value; by default
            :func:`usual_units`.
        dtype: The dtype of these units, by default the dtype of ``actual``. Under autocast, results may be
            wider than the dtype that computes them.

    Returns:
        The absolute errors; 0 for empty tensors.

    Raises:
        ValueError: The shapes differ, the dtypes of the results differ, or ``exact`` is not float64.
    """
    for name, result in (("actual", actual), ("same_dtype", same_dtype)):
        if result.shape != exact.shape:
            raise ValueError(
                f"{name}: got shape {tuple(result.shape)}, expected {tuple(exact.shape)} as exact"
            )
    if actual.dtype != same_dtype.dtype:
        raise ValueError(f"actual: got {actual.dtype}, expected {same_dtype.dtype} as same_dtype")
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
    """Returns each number in steps of an 8-bit dtype from 0, with fractions in float64."""
    numbers = numbers.detach().double()
    if dtype == torch.int8:
        return numbers
    size = numbers.abs()
    exponents = torch.frexp(size.clamp_min(2.0**-6)).exponent - 1  # smaller ones are as far apart as these
    return (torch.ldexp(size, 3 - exponents) + 8 * (exponents + 6)).copysign(numbers)


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns numbers cast to another dtype; for int8, rounded to the nearest from −127 to 127."""
    return numbers.round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else numbers.to(dtype)


def allowed_error(
    pytorchs: float,
    largest: float,
    dtype: torch.dtype,
    *,
    factor: float = VALUE_FACTOR,
    units: float = 1.0,
) -> float:
    """Returns the largest error that the rule allows, given PyTorch's.

    ``largest`` is the largest exact value (1 for relative errors), and ``units`` count its last place.
    """
    return factor * pytorchs + units * torch.finfo(dtype).eps * largest


def usual_units(values: int) -> float:
    """Returns the default ``units`` for a result with this number of values.

    They are 1, or 8 below 1000 values, where the largest error is a matter of luck.
    """
    return 8.0 if values < _FEW else 1.0


@torch.no_grad()
def _largest_difference(result: Tensor, exact: Tensor) -> float:
    if not exact.numel():
        return 0.0
    difference = (result.double() - exact).abs_()
    largest = difference.max().item()
    if math.isnan(largest):  # also from ∞ − ∞
        largest = difference.masked_fill_(result == exact, 0.0).max().item()
    return largest


@torch.no_grad()
def _largest_finite(exact: Tensor) -> float:
    """Returns the largest finite absolute value, or NaN if there is a NaN."""
    if not exact.numel():
        return 0.0
    least, most = exact.aminmax()
    largest = max(-least.item(), most.item())
    if largest == math.inf:
        largest = exact.abs().masked_fill_(exact.isinf(), 0.0).max().item()
    return largest
