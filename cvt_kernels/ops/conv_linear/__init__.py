"""Convolutional projection and linear layers fused: queries, keys and values from tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ... import backends, checks, dispatch, reference
from ...backends import Implementation, Record
from ...declaration import facts_of_pairs, operator, triton_kernels
from ...records import Branch
from ..conv_projection import (
    check_arguments,
    conv_projection,
    facts_of_convs,
    kind_of_projection,
    sample_of_projection,
)
from ..linear import linear

#: Weight (outputs, C) and bias (outputs,) of a linear layer; the bias may be None.
Linear = tuple[Tensor, Tensor | None]


def _with_tuples(call: Any) -> Any:
    convs = checks.as_tuple("convs", call.convs, "a sequence of ConvBatchNorm")
    linears = checks.as_tuple("linears", call.linears, "a sequence of pairs (weight, bias)")
    return call._replace(convs=convs, linears=linears)


def _check_linears(x: Tensor, convs: Sequence[Branch], linears: Sequence[Linear]) -> None:
    if len(linears) != len(convs):
        raise ValueError(f"linears: got {len(linears)}, expected {len(convs)} as convs")
    for i, pair in enumerate(linears):
        name = f"linears[{i}]"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{name}: got {checks.shown(pair)}, expected a pair (weight, bias)")
        weight, bias = pair
        checks.check_float_tensor(name, weight, "(outputs, channels)")
        checks.check_rank(name, weight, 2, "(outputs, channels)")
        checks.check_shape(name, weight, (weight.shape[0], x.shape[2]), "(outputs, channels)")
        checks.check_like(name, weight, "x", x)
        if bias is not None:
            checks.check_tensor_like(f"the bias of {name}", bias, weight.shape[:1], "(outputs,)", x)


def _check(call: Any) -> None:
    check_arguments(call.x, call.grid, call.convs, training=False)
    _check_linears(call.x, call.convs, call.linears)


def _instead(call: Any) -> Callable[..., tuple[Tensor, ...]] | None:
    x = call.x
    if x.is_cuda:
        return _compose if backends.is_auto() and _parts_are_faster(x) else None
    return None if dispatch.may_be_ours("conv_linear", x.device.type) else _compose


def _parts_are_faster(x: Tensor) -> bool:
    """Returns whether a GPU takes the projection and the products one after the other, rather than fused.

    Many channels leave no registers to hide the loads of a fused kernel. On an H200, the parts and the kernel
    take 100 and 185 µs for 256 images of CvT-13 at 384 channels, 16 and 49 for one; at 192 channels 175 and
    189 for 256, 33 and 32 for 32 (where the fused kernel is not worth its compilation), 21 and 14 for 8; at
    64 channels 199 and 130 for 256.
    """
    return x.shape[2] > 192 or (x.shape[2] > 64 and x.shape[0] * x.shape[1] > 2**14)


def _compose(call: Record) -> tuple[Tensor, ...]:
    x, grid, convs, linears = call
    projected = conv_projection(x, grid, convs, training=False)
    return tuple(linear(y, *each) for y, each in zip(projected, linears, strict=True))


def _kind(call: Record) -> str:
    outputs = " ".join(str(weight.shape[0]) for weight, _ in call.linears)
    return f"{kind_of_projection(call)}, to {outputs} channels"


@operator(
    backends={"triton": triton_kernels(), "composed": Implementation(_compose, ("cuda",))},
    kind=_kind,
    sample=sample_of_projection,
    arguments=_with_tuples,
    check=_check,
    instead=_instead,
    facts={"convs": (facts_of_convs,), "linears": (facts_of_pairs,)},
)
def conv_linear(
    x: Tensor, grid: tuple[int, int], convs: Sequence[Branch], linears: Sequence[Linear]
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
