"""Autograd function, custom operators and backend functions of the linear layers' Triton kernels.

In eager mode the launchers are called directly; a registered operator would cost more host time per call.
Under torch.compile they run behind opaque operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .... import machine, modes
from ....backends import Record
from ...autograd import count_change
from ...planned_launches import planned
from ...triton_launch import accumulator_dtype, contiguous
from .common import MAX_NORMALIZED
from .forward import linear_add_forward, linear_add_layer_norm_forward, linear_gelu_forward

# Linear and GELU: autograd and torch.compile --------------------------------------------------------------


class _LinearGelu(torch.autograd.Function):
    """Autograd function of linear_gelu: (x, weight, bias, approximate), x of shape (M, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        """Saves x, weight, and GELU's input."""
        out, pre = linear_gelu_forward(x, weight, bias, approximate, need_pre=True)
        ctx.save_for_backward(x, weight, pre)
        ctx.approximate = approximate
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients that are needed."""
        x, weight, pre = ctx.saved_tensors
        return *_gradients(x, weight, pre, dout, ctx.approximate, ctx.needs_input_grad[:3]), None


def _gradients(
    x: Tensor, weight: Tensor, pre: Tensor, dout: Tensor, approximate: str, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of x, weight and bias, None where they are not needed."""
    need_x, need_weight, need_bias = needed
    dpre = _gelu_backward(dout.contiguous(), pre, approximate)
    return (
        dpre @ weight if need_x else None,
        dpre.t() @ x if need_weight else None,
        dpre.sum(0, dtype=accumulator_dtype(dpre)).to(dpre.dtype) if need_bias else None,
    )


def _is_served_by_extension(pre: Tensor) -> bool:
    if machine.why_extension_unavailable(pre.device.type) is not None:
        return False
    if not pre.is_cuda:
        return True
    return pre.dtype != torch.float64 and machine.why_gpu_unsupported("cuda", pre.device.index) is None


def _gelu_backward(dout: Tensor, pre: Tensor, approximate: str) -> Tensor:
    """Returns ``dout`` times GELU's derivative at ``pre``, by the compiled extension if available."""
    if _is_served_by_extension(pre):
        machine.load_extension()
        return torch.ops.cvt_kernels.gelu_backward.default(dout, pre, None, approximate)[0]
    if approximate != "quick":
        return torch.ops.aten.gelu_backward(dout, pre, approximate=approximate)
    wide = pre.to(accumulator_dtype(pre))
    sigmoid = torch.sigmoid(1.702 * wide)
    return (dout * (sigmoid + 1.702 * wide * sigmoid * (1 - sigmoid))).to(pre.dtype)


@torch.library.custom_op("cvt_kernels::linear_gelu", mutates_args=())
def _linear_gelu_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, need_pre: bool = True
) -> tuple[Tensor, Tensor]:
    out, pre = linear_gelu_forward(x, weight, bias, approximate, need_pre=need_pre)
    return out, x.new_empty(0) if pre is None else pre


@_linear_gelu_op.register_fake
def _(x, weight, bias, approximate, need_pre=True):
    out = x.new_empty(x.shape[0], weight.shape[0])
    return out, torch.empty_like(out) if need_pre else x.new_empty(0)


@torch.library.custom_op("cvt_kernels::linear_gelu_backward", mutates_args=())
def _linear_gelu_backward_op(
    x: Tensor, weight: Tensor, pre: Tensor, dout: Tensor, approximate: str, needed: list[bool]
) -> list[Tensor]:
    gradients = _gradients(x, weight, pre, dout, approximate, tuple(needed))
    return [gradient for gradient in gradients if gradient is not None]


@_linear_gelu_backward_op.register_fake
def _(x, weight, pre, dout, approximate, needed):
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return [x.new_empty(shape) for shape, need in zip(shapes, needed, strict=True) if need]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.approximate, need_pre = inputs
    if not need_pre:
        raise ValueError("need_pre: got False, expected True, since the gradients need it")
    ctx.save_for_backward(x, weight, output[1])


def _backward_of_op(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    needed = list(ctx.needs_input_grad[:3])
    gradients = iter(_linear_gelu_backward_op(*ctx.saved_tensors, dout, ctx.approximate, needed))
    return *[next(gradients) if need else None for need in needed], None, None


_linear_gelu_op.register_autograd(_backward_of_op, setup_context=_setup_context)


# Linear, residual and LayerNorm: torch.compile ------------------------------------------------------------


@torch.library.custom_op("cvt_kernels::linear_add", mutates_args=())
def _linear_add_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, dtype: torch.dtype
) -> Tensor:
    out = torch.empty_like(residual, dtype=dtype)
    linear_add_forward(x, weight, bias, residual, out)
    return out


@_linear_add_op.register_fake
def _(x, weight, bias, residual, dtype):
    return torch.empty_like(residual, dtype=dtype)


@torch.library.custom_op("cvt_kernels::linear_add_", mutates_args=("residual",))
def _linear_add_inplace_op(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    linear_add_forward(x, weight, bias, residual, residual)


@torch.library.custom_op("cvt_kernels::linear_add_layer_norm", mutates_args=())
def _linear_add_layer_norm_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, shift: Tensor | None, eps: float, dtype: torch.dtype, norm_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h, y = torch.empty_like(residual, dtype=dtype), torch.empty_like(residual, dtype=norm_dtype)
    linear_add_layer_norm_forward(x, weight, bias, residual, norm_weight, norm_bias, shift, eps, h, y)
    return h, y


@_linear_add_layer_norm_op.register_fake
def _(x, weight, bias, residual, norm_weight, norm_bias, shift, eps, dtype, norm_dtype):
    return torch.empty_like(residual, dtype=dtype), torch.empty_like(residual, dtype=norm_dtype)


@torch.library.custom_op("cvt_kernels::linear_add_layer_norm_", mutates_args=("residual",))
def _linear_add_layer_norm_inplace_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor | None,
    norm_bias: Tensor | None, shift: Tensor | None, eps: float, norm_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    y = torch.empty_like(residual, dtype=norm_dtype)
    linear_add_layer_norm_forward(x, weight, bias, residual, norm_weight, norm_bias, shift, eps, residual, y)
    return y


@_linear_add_layer_norm_inplace_op.register_fake
def _(x, weight, bias, residual, norm_weight, norm_bias, shift, eps, norm_dtype):
    return torch.empty_like(residual, dtype=norm_dtype)


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call of one of the three operators, or None."""
    x, weight, given = call.x, call.weight, call._asdict()
    residual = given.get("residual")
    if x.numel() == 0 or weight.numel() == 0:
        return "the batch is empty" if weight.numel() else "the weight is empty"
    if x.is_cuda and x.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if x.numel() // x.shape[-1] >= 2**31 - 2**10 or weight.numel() >= 2**31:
        return "there are 2³¹ rows, or as many elements of the weight, or more"
    if "eps" in given and weight.shape[0] > MAX_NORMALIZED:
        return f"rows of {weight.shape[0]} channels, more than {MAX_NORMALIZED}, do not fit on the chip"
    if residual is not None and modes.wants_gradient(*call):
        return "has no gradients"
    if residual is not None and call.inplace and sum_dtype(x, residual) != residual.dtype:
        return "autocast would round the sum before it is written in place"
    return None


def matrices(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns x as (M, K), weight and bias, contiguous and in the dtype in which the product is computed."""
    dtype = modes.autocast_dtype(x) or x.dtype
    x = x.reshape(-1, x.shape[-1]).to(dtype).contiguous()
    return x, weight.to(dtype).contiguous(), None if bias is None else bias.to(dtype).contiguous()


@planned
def linear_gelu(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear_gelu`` for checked arguments; under autocast, in its dtype."""
    x, weight, bias, approximate = call
    shape = (*x.shape[:-1], weight.shape[0])
    x, weight, bias = matrices(x, weight, bias)
    needs_gradient = modes.wants_gradient(x, weight, bias)
    if torch.compiler.is_compiling():
        out, _ = _linear_gelu_op(x, weight, bias, approximate, needs_gradient)
    elif needs_gradient:
        out = _LinearGelu.apply(x, weight, bias, approximate)
    else:
        out, _ = linear_gelu_forward(x, weight, bias, approximate)
    return out.view(shape)


def sum_dtype(x: Tensor, residual: Tensor) -> torch.dtype:
    """Returns the dtype of residual + linear(x), as PyTorch promotes it."""
    return torch.promote_types(modes.autocast_dtype(x) or x.dtype, residual.dtype)


@planned
def linear_add(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear_add`` for checked arguments; the product, in autocast's dtype."""
    x, weight, bias, residual, inplace = call
    dtype = sum_dtype(x, residual)
    x, weight, bias = matrices(x, weight, bias)
    if not inplace:
        residual = residual.contiguous()
        if torch.compiler.is_compiling():
            return _linear_add_op(x, weight, bias, residual, dtype)
        out = torch.empty_like(residual, dtype=dtype)
        linear_add_forward(x, weight, bias, residual, out)
        return out
    if torch.compiler.is_compiling():
        _linear_add_inplace_op(x, weight, bias, residual)
    else:
        linear_add_forward(x, weight, bias, residual, residual)
        count_change(residual)
    return residual


@planned
def linear_add_layer_norm(call: Record) -> tuple[Tensor, Tensor]:
    """Computes ``cvt_kernels.linear_add_layer_norm`` for checked arguments.

    Under autocast the product is in its dtype, and LayerNorm gives float32 on a GPU, as PyTorch's own does.
    """
    x, weight, bias, residual, norm_weight, norm_bias, eps, shift, inplace = call
    dtype = sum_dtype(x, residual)
    norm_dtype = torch.float32 if x.is_cuda and modes.autocast_dtype(x) is not None else dtype
    x, weight, bias = matrices(x, weight, bias)
    norm = contiguous(norm_weight), contiguous(norm_bias), contiguous(shift), eps
    if not inplace:
        residual = residual.contiguous()
        if torch.compiler.is_compiling():
            return _linear_add_layer_norm_op(x, weight, bias, residual, *norm, dtype, norm_dtype)
        h = torch.empty_like(residual, dtype=dtype)
    elif torch.compiler.is_compiling():
        return residual, _linear_add_layer_norm_inplace_op(x, weight, bias, residual, *norm, norm_dtype)
    else:
        h = residual
    y = torch.empty_like(residual, dtype=norm_dtype)
    linear_add_layer_norm_forward(x, weight, bias, residual, *norm, h, y)
    if inplace:
        count_change(h)
    return h, y
