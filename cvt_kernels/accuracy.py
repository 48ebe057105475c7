"""The accuracy rule of the project, which tests, benchmarks, reports and proofs share.

Against a float64 result, our largest error is at most a factor times the largest error of PyTorch's own
operators in the same dtype, plus a few units in the last place of the largest exact value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

#: The factors of the rule, for results and for gradients.
VALUE_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
_FEW = 1000


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
    pytorchs = _largest_difference(same_dtype, exact)
    allowed = allowed_error(
        pytorchs,
        _largest_finite(exact),
        dtype or actual.dtype,
        factor=factor,
        units=usual_units(exact.numel()) if units is None else units,
    )
    return Error(_largest_difference(actual, exact), pytorchs, allowed)


def allowed_error(
    pytorchs: float,
    largest: float,
    dtype: torch.dtype,
    *,
    factor: float = VALUE_FACTOR,
    units: float = 1.0,
) -> float:
    """Returns the largest error that the accuracy rule allows.

    Args:
        pytorchs: The error of PyTorch's result.
        largest: The largest exact value; 1 if errors are relative to it.
        dtype: The dtype of the units in the last place.
        factor: ``VALUE_FACTOR``, or ``GRADIENT_FACTOR`` for gradients.
        units: Also allowed, in units in the last place of ``largest``.
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
    return difference.masked_fill_(result == exact, 0.0).max().item()  # ∞ − ∞ is NaN


@torch.no_grad()
def _largest_finite(exact: Tensor) -> float:
    """Returns the largest absolute value that is not infinite, NaN if there is one."""
    if not exact.numel():
        return 0.0
    size = exact.abs()
    return size.masked_fill_(size == math.inf, 0.0).max().item()
