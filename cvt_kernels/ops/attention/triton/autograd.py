"""The Triton kernels of attention as PyTorch sees them: autograd, torch.compile, and the backend's functions.

In eager mode the autograd function is called directly; a registered operator would cost more host time per
call. Under torch.compile the same launchers run behind opaque operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .... import checks, dispatch
from ...triton_launch import accumulator_dtype
from .backward import attention_backward
from .common import MAX_HEAD_DIM
from .forward import attention_forward, planned_forward

# Autograd and torch.compile -------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Attention as an autograd function of (q, k, v, bias, scale)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """Saves everything it was given, the output and ``stats``."""
        out, stats = attention_forward(q, k, v, bias, scale)
        ctx.save_for_backward(q, k, v, bias, out, stats)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients that are needed; those of k and v together."""
        _, need_k, need_v, need_bias, _ = ctx.needs_input_grad
        q, k, v, bias, out, stats = ctx.saved_tensors
        gradients = attention_backward(
            q, k, v, bias, out, stats, dout, ctx.scale, need_kv=need_k or need_v, need_bias=need_bias
        )
        return *gradients, None


@torch.library.custom_op("cvt_kernels::attention", mutates_args=())
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, need_stats: bool = True
) -> tuple[Tensor, Tensor]:
    out, stats = attention_forward(q, k, v, bias, scale, need_stats=need_stats)
    return out, q.new_empty(0, dtype=accumulator_dtype(q)) if stats is None else stats


@_forward_op.register_fake
def _(q, k, v, bias, scale, need_stats=True):
    batch, queries, heads, _ = q.shape
    shape = (batch, heads, 2, queries) if need_stats else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=accumulator_dtype(q))


@torch.library.custom_op("cvt_kernels::attention_backward", mutates_args=())
def _backward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, stats: Tensor, dout: Tensor,
    scale: float, need_bias: bool,
) -> list[Tensor]:  # fmt: skip
    gradients = attention_backward(q, k, v, bias, out, stats, dout, scale, need_bias=need_bias)
    return [gradient for gradient in gradients if gradient is not None]


@_backward_op.register_fake
def _(q, k, v, bias, out, stats, dout, scale, need_bias):
    return [t.new_empty(t.shape) for t in (q, k, v, *([bias] if need_bias else []))]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, ctx.scale, need_stats = inputs
    if not need_stats:
        raise ValueError("need_stats: got False, expected True, since the gradients need them")
    ctx.save_for_backward(q, k, v, bias, *output)


def _backward_of_op(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    _, _, _, need_bias, *_ = ctx.needs_input_grad
    gradients = _backward_op(*ctx.saved_tensors, dout, ctx.scale, need_bias)
    return *gradients, *([] if need_bias else [None]), None, None


_forward_op.register_autograd(_backward_of_op, setup_context=_setup_context)


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, bias: Tensor | None, dropout_p: float
) -> str | None:
    """Says why these kernels cannot serve a call; None if they can."""
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    if dropout_p > 0:
        return "dropout of the probabilities is not supported"
    if batch == 0:
        return "the batch is empty"
    if head_dim > MAX_HEAD_DIM:
        return f"heads have {head_dim} channels, more than {MAX_HEAD_DIM}"
    if q.is_cuda and q.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if max(queries, keys) * heads * head_dim >= 2**31:
        return "one image has 2³¹ elements or more"
    if bias is not None and queries * keys >= 2**31:
        return "one head's bias has 2³¹ elements or more"
    return None


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, bias: Tensor | None, dropout_p: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Returns what serves calls like one without a bias, whose tensors the kernel reads as they lie."""
    if bias is not None or {q.dtype, k.dtype, v.dtype} != {checks.autocast_dtype(q) or q.dtype}:
        return None
    launch = planned_forward(q, k, v, q.shape[3] ** -0.5 if scale is None else scale)
    if launch is None:
        return None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if launch.start(q, q, k, v, out, out, out):
            return out
        return attention(q, k, v, scale=scale, bias=None, dropout_p=0.0)

    return run


@dispatch.prepared_by(_prepare)
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, bias: Tensor | None, dropout_p: float
) -> Tensor:
    """Computes ``cvt_kernels.attention``, whose checks it relies on.

    q, k and v are read as they lie if their last dimension is adjacent, whatever the other strides; otherwise
    they are copied first. Under autocast it computes in autocast's dtype, as
    ``F.scaled_dot_product_attention`` does; the bias keeps its own.
    """
    if scale is None:
        scale = q.shape[3] ** -0.5
    if (dtype := checks.autocast_dtype(q)) is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    needs_gradient = checks.wants_gradient(q, k, v, bias)
    if torch.compiler.is_compiling():
        return _forward_op(q, k, v, bias, scale, needs_gradient)[0]
    if needs_gradient:
        return _Attention.apply(q, k, v, bias, scale)
    return attention_forward(q, k, v, bias, scale, need_stats=False)[0]
