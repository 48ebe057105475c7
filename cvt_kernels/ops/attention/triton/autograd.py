"""Autograd function and backend functions of attention's Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .... import modes, reference
from ....backends import Record
from ...autograd import gradients_again
from .backward import attention_backward
from .common import MAX_HEAD_DIM
from .forward import attention_forward, divided, merged


class _Attention(torch.autograd.Function):
    """Attention as an autograd function of (q, k, v, scale, heads), whose tokens are merged."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, heads: int) -> Tensor:
        """Saves the inputs, the output and ``stats``."""
        out, stats = attention_forward(q, k, v, scale, heads, True)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.scale, ctx.heads = scale, heads
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of q, k and v."""
        q, k, v, out, stats = ctx.saved_tensors
        if torch.is_grad_enabled():

            def formula(*tokens: Tensor) -> Tensor:
                q, k, v = (divided(each, ctx.heads) for each in tokens)
                return reference.attention(q, k, v, scale=ctx.scale).flatten(2)

            return *gradients_again(formula, (q, k, v), dout), None, None
        return *attention_backward(q, k, v, out, stats, dout, ctx.scale, ctx.heads), None, None


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    q, k, _, _, bias, dropout_p, position = call
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    if dropout_p > 0:
        return "dropout of the probabilities is not supported"
    if bias is not None or position is not None:
        return "a bias is left to masks of PyTorch's attention"
    if batch == 0:
        return "the batch is empty"
    if head_dim > MAX_HEAD_DIM:
        return f"heads have {head_dim} channels, more than {MAX_HEAD_DIM}"
    if q.is_cuda and q.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if max(queries, keys) * heads * head_dim >= 2**31:
        return "one image has 2³¹ elements or more"
    return None


#: The largest scale that is left to the softmax, where the factor on scores must be finite and not negative.
_LARGEST_SCALE = 2.0**64


def attention(call: Record) -> Tensor:
    """Computes ``cvt_kernels.attention`` for checked arguments.

    q, k and v are read in place if their last dimension is contiguous; otherwise they are copied first. Under
    autocast it computes in autocast's dtype, as ``F.scaled_dot_product_attention`` does.
    """
    q, k, v, scale, *_ = call
    if scale is None:
        scale = q.shape[3] ** -0.5
    if (dtype := modes.autocast_dtype(q)) is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not 0 <= scale <= _LARGEST_SCALE:
        q, scale = q * scale, 1.0
    heads, given = q.shape[2], (merged(q), merged(k), merged(v))
    if modes.wants_gradient(q, k, v):
        out = _Attention.apply(*given, scale, heads)
    else:
        out, _ = attention_forward(*given, scale, heads, False)
    return out.unflatten(2, (heads, -1))
