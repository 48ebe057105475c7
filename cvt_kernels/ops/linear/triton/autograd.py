"""Autograd functions, launchers and backend functions of the linear layers' Triton kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .... import modes, reference
from ....backends import Record
from ...autograd import gradients_again, refuse_again
from ...triton_launch import contiguous
from .backward import linear_ends, linear_starts
from .common import MAX_NORMALIZED
from .forward import linear_add_forward, linear_add_layer_norm_forward, linear_gelu_forward

# Autograd -------------------------------------------------------------------------------------------------
#
# The functions take the tensors of the call and cast them: casts outside would be nodes of autograd, and
# gradients of biases come in the dtype of the model's own.


class _Linear(torch.autograd.Function):
    """Autograd function of a linear layer, of one with GELU if there is a variant of it, or with a sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str | None = None,
        residual: Tensor | None = None, scale: Tensor | None = None, scales_sum: bool = False,
    ) -> Tensor:  # fmt: skip
        """Saves x and weight in the dtype of the product, GELU's input and the factors of images.

        PyTorch looks at every argument of an autograd function, so that calls leave out those behind theirs.
        """
        adds, pre = residual is not None, None
        rows, narrow_weight, narrow = matrices(x, weight, None if adds else bias)
        if approximate is not None:
            out, pre = linear_gelu_forward(rows, narrow_weight, narrow, approximate, True)
        else:
            out = F.linear(rows, narrow_weight, narrow)
        if residual is not None:
            dtype = sum_dtype(x, residual)
            out = linear_ends(out, contiguous(bias), rows_of(residual), scale, scales_sum, dtype)
        save(ctx, (x, rows), (weight, narrow_weight), bias, pre, scale)
        ctx.approximate, ctx.adds, ctx.scales_sum = approximate, adds, scales_sum
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients that are needed; autograd casts that of a residual to its dtype."""
        x, weight, bias, pre, scale = ctx.saved_tensors
        need_x, need_weight, need_bias, *others = needs = ctx.needs_input_grad
        need_residual = ctx.adds and others[1]
        settings: dict[str, Any] = {"scale": scale, "scales_sum": ctx.scales_sum}
        if torch.is_grad_enabled() and ctx.are_given:
            given: tuple[Any, ...] = (x, weight, bias)
            formula: Any = reference.linear
            if ctx.adds:
                given = *given, zeros_for(dout, need_residual)
                formula = functools.partial(reference.linear_add, **settings)
            elif ctx.approximate is not None:
                formula = functools.partial(reference.linear_gelu, approximate=ctx.approximate)
            *of_layer, dresidual = *gradients_again(formula, given, dout), *[None] * (not ctx.adds)
            return (*of_layer, None, dresidual, None, None)[: len(needs)]
        start = linear_starts(
            rows_of(dout), weight.dtype if pre is None else pre.dtype,
            dtype_of(bias, need_bias), pre=pre, approximate=ctx.approximate or "none",
            **settings,
        )  # fmt: skip
        dx = (start.product @ weight).view(ctx.shape) if need_x else None
        dweight = start.product.t() @ rows_of(x) if need_weight else None
        dresidual = start.residual.view_as(dout) if need_residual else None
        return refuse_again((dx, dweight, start.bias, None, dresidual, None, None)[: len(needs)])


def save(ctx: Any, *pairs: Any) -> None:
    """Saves tensors for a backward; of pairs, of an argument and of what was read, the argument.

    Second derivatives need its history. Where autocast has converted one, what was read is saved.
    """
    chosen = [pair if not isinstance(pair, tuple) else pair[pair[0].dtype != pair[1].dtype] for pair in pairs]
    ctx.are_given = all(
        kept is pair[0] for kept, pair in zip(chosen, pairs, strict=True) if type(pair) is tuple
    )
    ctx.save_for_backward(*chosen)
    ctx.shape = pairs[0][0].shape


def dtype_of(bias: Tensor | None, is_needed: bool) -> torch.dtype | None:
    """Returns the dtype of a bias whose gradient is needed, else None."""
    return bias.dtype if bias is not None and is_needed else None


def zeros_for(dout: Tensor, is_needed: bool) -> Tensor:
    """Returns what has the gradient of a residual, which does not depend on its values."""
    return torch.zeros_like(dout, requires_grad=is_needed)


def rows_of(tensor: Tensor) -> Tensor:
    """Returns a tensor as a contiguous matrix of rows."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call of one of the three operators, or None."""
    x, weight, given = call.x, call.weight, call._asdict()
    residual, scale = given.get("residual"), given.get("scale")
    if x.numel() == 0 or weight.numel() == 0:
        return "the batch is empty" if weight.numel() else "the weight is empty"
    if x.is_cuda and x.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if x.numel() // x.shape[-1] >= 2**31 - 2**10 or weight.numel() >= 2**31:
        return "there are 2³¹ rows, or as many elements of the weight, or more"
    if "eps" in given and weight.shape[0] > MAX_NORMALIZED:
        return f"rows of {weight.shape[0]} channels, more than {MAX_NORMALIZED}, do not fit on the chip"
    if scale is not None or (residual is not None and modes.wants_gradient(*call)):
        return "has no gradients" if "eps" in given else why_not_training(call)
    if residual is not None and call.inplace and sum_dtype(x, residual) != residual.dtype:
        return "autocast would round the sum before it is written in place"
    return None


def why_linear_unsupported(call: Record) -> str | None:
    """Returns why :func:`linear` cannot serve a call, or None."""
    x, weight, bias = call
    if not modes.wants_gradient(bias):
        return "is for gradients of a bias; PyTorch's own does all else"
    if torch.compiler.is_compiling():
        return "has no gradients under torch.compile"  # which sums them itself
    if x.numel() == 0 or weight.numel() == 0:
        return "the batch is empty" if weight.numel() else "the weight is empty"
    return why_not_training(call)


def why_not_training(call: Record) -> str | None:
    """Returns why the kernels around the products of gradients cannot serve a call, or None."""
    if modes.forward_mode_enabled():
        return "has no derivatives in forward mode"
    if call.x.is_cuda and call.x.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    return None


def matrices(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns x as (M, K), weight and bias, contiguous and in the dtype in which the product is computed."""
    dtype = modes.autocast_dtype(x) or x.dtype
    x = x.reshape(-1, x.shape[-1]).to(dtype).contiguous()
    return x, weight.to(dtype).contiguous(), None if bias is None else bias.to(dtype).contiguous()


def linear(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear`` for checked arguments of which the bias needs a gradient."""
    return _Linear.apply(*call)


def linear_gelu(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear_gelu`` for checked arguments; under autocast, in its dtype."""
    x, weight, bias, approximate = call
    if modes.wants_gradient(x, weight, bias):
        return _Linear.apply(*call)
    out, _ = linear_gelu_forward(*matrices(x, weight, bias), approximate, False)
    return out.view(*x.shape[:-1], weight.shape[0])


def sum_dtype(x: Tensor, residual: Tensor) -> torch.dtype:
    """Returns the dtype of residual + linear(x), as PyTorch promotes it."""
    return torch.promote_types(modes.autocast_dtype(x) or x.dtype, residual.dtype)


def linear_add(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear_add`` for checked arguments; the product, in autocast's dtype."""
    x, weight, bias, residual, inplace, scale, scales_sum = call
    if scale is not None or modes.wants_gradient(x, weight, bias, residual):
        return _Linear.apply(x, weight, bias, None, residual, contiguous(scale), scales_sum)
    out = residual
    if not inplace:
        out = _sum_like(residual, sum_dtype(x, residual))
    linear_add_forward(*matrices(x, weight, bias), None if inplace else residual.contiguous(), out)
    return out


def _sum_like(residual: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(residual, dtype=dtype, memory_format=torch.contiguous_format)


def linear_add_layer_norm(call: Record) -> tuple[Tensor, Tensor]:
    """Computes ``cvt_kernels.linear_add_layer_norm`` for checked arguments.

    Under autocast the product is in its dtype, and LayerNorm gives float32 on a GPU, as PyTorch's own does.
    """
    x, weight, bias, residual, norm_weight, norm_bias, eps, shift, inplace = call
    dtype = sum_dtype(x, residual)
    norm_dtype = torch.float32 if x.is_cuda and modes.autocast_dtype(x) is not None else dtype
    norm = contiguous(norm_weight), contiguous(norm_bias), contiguous(shift), eps
    h, y = residual if inplace else _sum_like(residual, dtype), _sum_like(residual, norm_dtype)
    operands = *matrices(x, weight, bias), None if inplace else residual.contiguous()
    linear_add_layer_norm_forward(*operands, *norm, h, y)
    return h, y
