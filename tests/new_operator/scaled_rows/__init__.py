"""An operator as a folder of ``cvt_kernels/ops``, which a line of ``cvt_kernels/__init__.py`` exports."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cvt_kernels import checks
from cvt_kernels.declaration import operator, triton_kernels
from cvt_kernels.ops.cost_classes import rows_of, sampled, size_class


def _check(call: Any) -> None:
    checks.check_float_tensor("x", call.x, "(..., channels)")
    if call.x.ndim == 0 or call.x.shape[-1] == 0:
        raise ValueError(f"x: got shape {tuple(call.x.shape)}, expected (..., channels)")
    checks.check_tensor_like("scale", call.scale, call.x.shape[-1:], "(channels,)", call.x)


def _cost_class(call: Any) -> str:
    return f"{size_class(rows_of(call.x.shape))} rows of {call.x.shape[-1]} channels"


@operator(
    backends={"triton": triton_kernels("triton")},
    cost_class=_cost_class,
    sample=sampled(2**18, "x"),
    check=_check,
)
def scaled_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Computes x · scale, of ``(..., C)`` and ``(C,)``."""
    return x * scale
