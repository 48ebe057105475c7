"""``conv_linear`` in two launches for sm_90: the projection, then one product of all branches, in Gluon."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...backends import Record
from ..linear.gluon import product, why_not_multiplied
from . import stacked


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, groups: tuple[int, ...]) -> None:
    """See ``stacked.Multiply``."""
    product(x, weight, bias, out, groups=groups)


def conv_linear(call: Record) -> tuple[Tensor, ...]:
    """Computes ``cvt_kernels.conv_linear`` for checked arguments."""
    return stacked.serve(multiply, call)


def why_unsupported(call: Any) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    reason = stacked.why_unsupported(call)
    return reason or why_not_multiplied(call.x, call.linears[0][0], len(call.linears))
