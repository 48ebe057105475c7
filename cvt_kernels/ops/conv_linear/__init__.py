"""Convolutional projection and linear layers fused: queries, keys and values from tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ... import checks, reference
from ...backends import Record
from ...declaration import gluon_kernels, operator, triton_kernels
from ...records import Branch
from ..conv_projection import check_arguments, conv_projection, cost_class_of_projection, sample_of_projection
from ..linear import linear

#: Weight (outputs, C) and bias (outputs,) of a linear layer; the bias may be None.
WeightAndBias = tuple[Tensor, Tensor | None]


def check_linears(x: Tensor, linears: Sequence[WeightAndBias]) -> None:
    """Raises TypeError or ValueError unless these are pairs of weight and bias for the channels of x."""
    for i, pair in enumerate(linears):
        name = f"linears[{i}]"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{name}: got {checks.shown(pair)}, expected a pair (weight, bias)")
        weight, bias = pair
        checks.check_dimensions(name, weight, 2, "(outputs, channels)")
        checks.check_shape(name, weight, (weight.shape[0], x.shape[2]), "(outputs, channels)")
        checks.check_like(name, weight, "x", x)
        checks.check_vector(f"the bias of {name}", bias, weight.shape[0], x, "(outputs,)")


def _check(call: Any) -> None:
    check_arguments(call.x, call.grid, call.convs, training=False)
    if len(call.linears) != len(call.convs):
        raise ValueError(f"linears: got {len(call.linears)}, expected {len(call.convs)} as convs")
    check_linears(call.x, call.linears)


def _compose(call: Record) -> tuple[Tensor, ...]:
    x, grid, convs, linears = call
    projected = conv_projection(x, grid, convs, training=False)
    return tuple(linear(y, *each) for y, each in zip(projected, linears, strict=True))


def _cost_class(call: Record) -> str:
    outputs = " ".join(str(weight.shape[0]) for weight, _ in call.linears)
    return f"{cost_class_of_projection(call)}, to {outputs} channels"


@operator(
    backends={"gluon": gluon_kernels("gluon"), "triton": triton_kernels("triton.forward")},
    cost_class=_cost_class,
    sample=sample_of_projection,
    sequences={"convs": "a sequence of ConvBatchNorm", "linears": "a sequence of pairs (weight, bias)"},
    check=_check,
    composed=_compose,
)
def conv_linear(
    x: Tensor, grid: tuple[int, int], convs: Sequence[Branch], linears: Sequence[WeightAndBias]
) -> tuple[Tensor, ...]:
    """Computes linearᵢ(BatchNormᵢ(depthwise_convᵢ(x))) for every branch, on tokens, in evaluation.

    The convolutional projection of CvT (Wu et al. 2021, section 3.2) with its linear layers.

    Args:
        x: Tokens ``(B, T, C)`` as in :func:`cvt_kernels.conv_projection`; a class token goes through the
            linear layers only.
        grid: ``(H, W)`` of the spatial tokens.
        convs: One branch per output, as in :func:`cvt_kernels.conv_projection`. BatchNorm normalizes by the
            running statistics.
        linears: Weight ``(outputs, C)`` and bias ``(outputs,)`` or None of the linear layer of each branch.

    Returns:
        One contiguous ``(B, Hᵢ·Wᵢ (+ 1), outputs)`` per branch.

    Raises:
        TypeError: An argument of the wrong type or dtype, see :func:`cvt_kernels.conv_projection`.
        ValueError: A wrong shape or device, an invalid setting, or not as many linear layers as branches.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    projected = reference.conv_projection(x, grid, convs, training=False)
    return tuple(F.linear(y, *linear) for y, linear in zip(projected, linears, strict=True))
