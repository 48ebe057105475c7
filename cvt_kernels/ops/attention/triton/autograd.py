"""Autograd function, custom operators for torch.compile and backend functions of attention's Triton kernels.

In eager mode the autograd function is called directly; a registered operator would cost more host time per
call. Under torch.compile the same launchers run behind opaque operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .... import modes, reference
from ....backends import Record
from ...autograd import gradients_again
from ...graph_operators import graph_operator
from ...triton_launch import accumulator_dtype
from .backward import attention_backward
from .common import MAX_HEAD_DIM
from .forward import attention_forward

# Autograd and torch.compile -------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """Attention as an autograd function of (q, k, v, bias, scale)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        """Saves the inputs, the output and ``stats``."""
        out, stats = _forward(q, k, v, bias, scale, True)
        ctx.save_for_backward(q, k, v, bias, out, stats)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients that are needed; dk and dv come together."""
        _, need_k, need_v, need_bias, _ = ctx.needs_input_grad
        q, k, v, bias, out, stats = ctx.saved_tensors
        if torch.is_grad_enabled():

            def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
                return reference.attention(q, k, v, scale=ctx.scale, bias=bias)

            return *gradients_again(formula, (q, k, v, bias), dout), None
        return *_backward(q, k, v, bias, out, stats, dout, ctx.scale, need_k or need_v, need_bias), None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, need_stats: bool
) -> tuple[Tensor, Tensor | None]:
    return attention_forward(q, k, v, bias, scale, need_stats=need_stats)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, stats: Tensor, dout: Tensor,
    scale: float, need_kv: bool, need_bias: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return attention_backward(q, k, v, bias, out, stats, dout, scale, need_kv=need_kv, need_bias=need_bias)


# Where a graph has convolutions, Inductor lays out what has four dimensions and is saved for the backward as
# images with channels last, by a copy. So the operators take and give (B, T, heads · D), and saved statistics
# are (B · heads, 2, T).


def _merged(tensor: Tensor) -> Tensor:
    """Returns (B, T, heads, D) as (B, T, heads · D), unless that would be a copy."""
    _, _, heads, dim = tensor.shape
    return tensor.flatten(2) if heads == 1 or tensor.stride(2) == dim * tensor.stride(3) else tensor


def _divided(tensor: Tensor, heads: int) -> Tensor:
    """Returns what :func:`_merged` took."""
    return tensor if tensor.ndim == 4 else tensor.unflatten(2, (heads, -1))


def _shapes(q, k, v, bias, scale, heads, need_stats=True):
    batch, queries = q.shape[:2]
    shape = (batch * heads, 2, queries) if need_stats else (0,)
    channels = q.shape[2] if q.ndim == 3 else heads * q.shape[3]
    return q.new_empty(batch, queries, channels), q.new_empty(shape, dtype=accumulator_dtype(q))


@graph_operator("attention", _shapes)
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, heads: int, need_stats: bool = True
) -> tuple[Tensor, Tensor]:
    q, k, v = (_divided(each, heads) for each in (q, k, v))
    out, stats = _forward(q, k, v, bias, scale, need_stats)
    saved = q.new_empty(0, dtype=accumulator_dtype(q)) if stats is None else stats.flatten(0, 1)
    return out.flatten(2), saved


def _gradient_shapes(q, k, v, bias, out, stats, dout, scale, heads, need_bias):
    needed = (q, k, v, *([bias] if need_bias else []))
    return [t.new_empty(t.shape) for t in needed]


@graph_operator("attention_backward", _gradient_shapes)
def _backward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, stats: Tensor, dout: Tensor,
    scale: float, heads: int, need_bias: bool,
) -> list[Tensor]:  # fmt: skip
    gradients = _backward(
        _divided(q, heads), _divided(k, heads), _divided(v, heads), bias, _divided(out, heads),
        stats.unflatten(0, (-1, heads)), _divided(dout, heads), scale, True, need_bias,
    )  # fmt: skip
    own = [
        each.view(like.shape) for each, like in zip(gradients, (q, k, v), strict=False) if each is not None
    ]
    return [*own, *(each for each in gradients[3:] if each is not None)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, ctx.scale, ctx.heads, need_stats = inputs
    if not need_stats:
        raise ValueError("need_stats: got False, expected True, since the gradients need them")
    ctx.save_for_backward(q, k, v, bias, *output)


def _backward_of_op(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    need_bias = ctx.needs_input_grad[3]
    dq, dk, dv, *rest = _backward_op(*ctx.saved_tensors, dout, ctx.scale, ctx.heads, need_bias)
    return dq, dk, dv, rest[0] if need_bias else None, None, None, None


torch.library.register_autograd("cvt_kernels::attention", _backward_of_op, setup_context=_setup_context)


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    q, k, _, _, bias, dropout_p, position = call
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    if dropout_p > 0:
        return "dropout of the probabilities is not supported"
    if position is not None:
        return "a bias by position is left to masks of PyTorch's attention"
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


#: The largest magnitude of a scale that is left to the softmax, where the factor on scores must be finite.
_LARGEST_SCALE = 2.0**64


def attention(call: Record) -> Tensor:
    """Computes ``cvt_kernels.attention`` for checked arguments.

    q, k and v are read in place if their last dimension is contiguous; otherwise they are copied first. Under
    autocast it computes in autocast's dtype, as ``F.scaled_dot_product_attention`` does; biases keep their
    own.
    """
    q, k, v, scale, bias, *_ = call
    if scale is None:
        scale = q.shape[3] ** -0.5
    if (dtype := modes.autocast_dtype(q)) is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if abs(scale) > _LARGEST_SCALE:
        q, scale = q * scale, 1.0
    needs_gradient = modes.wants_gradient(q, k, v, bias)
    if torch.compiler.is_compiling():
        heads, given = q.shape[2], [_merged(each) for each in (q, k, v)]
        out, _ = _forward_op(*given, bias, scale, heads, needs_gradient)
        return out.unflatten(2, (heads, -1))
    if needs_gradient:
        return _Attention.apply(q, k, v, bias, scale)
    return attention_forward(q, k, v, bias, scale, need_stats=False)[0]
