"""Autograd function, custom operators for torch.compile and backend functions of attention's Triton kernels.

In eager mode the autograd function is called directly; a registered operator would cost more host time per
call. Under torch.compile the same launchers run behind opaque operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .... import modes, reference
from ....backends import Record
from ....records import PositionBias
from ...autograd import gradients_again
from ...graph_operators import graph_operator
from ...triton_launch import accumulator_dtype
from .. import why_scale_too_small
from .backward import attention_backward
from .common import MAX_HEAD_DIM
from .forward import attention_forward

# Autograd and torch.compile -------------------------------------------------------------------------------


def _position_of(
    table: Tensor | None, rows: Tensor | None, places: Sequence[int] | None
) -> PositionBias | None:
    """Rebuilds the bias by position of a call from its parts; returns None without one."""
    if table is None or places is None:
        return None
    height, width, key_height, key_width, stride = places
    return PositionBias(table, (height, width), (key_height, key_width), stride, rows)


def _parts_of(position: PositionBias | None) -> tuple[Tensor | None, Tensor | None, list[int] | None]:
    """Returns the parts of a bias by position, as :func:`_position_of` takes them."""
    if position is None:
        return None, None, None
    return position.table, position.rows, [*position.query_grid, *position.key_grid, position.stride]


class _Attention(torch.autograd.Function):
    """Attention as an autograd function of (q, k, v, bias, table, rows, places, scale)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
        table: Tensor | None, rows: Tensor | None, places: list[int] | None, scale: float,
    ) -> Tensor:  # fmt: skip
        """Saves the inputs, the output and ``stats``."""
        out, stats = _forward(q, k, v, bias, table, rows, places, scale, True)
        ctx.save_for_backward(q, k, v, bias, out, stats, table, rows)
        ctx.places, ctx.scale = places, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients that are needed; dk and dv come together."""
        _, need_k, need_v, need_bias, need_table, *_ = ctx.needs_input_grad
        q, k, v, bias, out, stats, table, rows = ctx.saved_tensors
        if torch.is_grad_enabled():

            def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, table: Tensor | None) -> Tensor:
                position = _position_of(table, rows, ctx.places)
                return reference.attention(q, k, v, scale=ctx.scale, bias=bias, position=position)

            return *gradients_again(formula, (q, k, v, bias, table), dout), None, None, None
        settings = ctx.scale, need_k or need_v, need_bias, need_table
        gradients = _backward(q, k, v, bias, out, stats, dout, table, rows, ctx.places, *settings)
        return *gradients, None, None, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, table: Tensor | None, rows: Tensor | None,
    places: list[int] | None, scale: float, need_stats: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    position = _position_of(table, rows, places)
    return attention_forward(q, k, v, bias, scale, need_stats=need_stats, position=position)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, stats: Tensor, dout: Tensor,
    table: Tensor | None, rows: Tensor | None, places: list[int] | None, scale: float, need_kv: bool,
    need_bias: bool, need_table: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return attention_backward(
        q, k, v, bias, out, stats, dout, scale, need_kv=need_kv, need_bias=need_bias,
        position=_position_of(table, rows, places), need_table=need_table,
    )  # fmt: skip


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


def _shapes(q, k, v, bias, scale, heads, need_stats=True, table=None, rows=None, places=None):
    batch, queries = q.shape[:2]
    shape = (batch * heads, 2, queries) if need_stats else (0,)
    channels = q.shape[2] if q.ndim == 3 else heads * q.shape[3]
    return q.new_empty(batch, queries, channels), q.new_empty(shape, dtype=accumulator_dtype(q))


@graph_operator("attention", _shapes)
def _forward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, heads: int, need_stats: bool = True,
    table: Tensor | None = None, rows: Tensor | None = None, places: list[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = (_divided(each, heads) for each in (q, k, v))
    out, stats = _forward(q, k, v, bias, table, rows, places, scale, need_stats)
    saved = q.new_empty(0, dtype=accumulator_dtype(q)) if stats is None else stats.flatten(0, 1)
    return out.flatten(2), saved


def _gradient_shapes(
    q, k, v, bias, out, stats, dout, scale, heads, need_bias, table=None, rows=None, places=None,
    need_table=False,
):  # fmt: skip
    needed = (q, k, v, *([bias] if need_bias else []), *([table] if need_table else []))
    return [t.new_empty(t.shape) for t in needed]


@graph_operator("attention_backward", _gradient_shapes)
def _backward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, stats: Tensor, dout: Tensor,
    scale: float, heads: int, need_bias: bool,
    table: Tensor | None = None, rows: Tensor | None = None, places: list[int] | None = None,
    need_table: bool = False,
) -> list[Tensor]:  # fmt: skip
    gradients = _backward(
        _divided(q, heads), _divided(k, heads), _divided(v, heads), bias, _divided(out, heads),
        stats.unflatten(0, (-1, heads)), _divided(dout, heads), table, rows, places, scale, True, need_bias,
        need_table,
    )  # fmt: skip
    own = [
        each.view(like.shape) for each, like in zip(gradients, (q, k, v), strict=False) if each is not None
    ]
    return [*own, *(each for each in gradients[3:] if each is not None)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, ctx.scale, ctx.heads, need_stats, table, rows, ctx.places = inputs
    if not need_stats:
        raise ValueError("need_stats: got False, expected True, since the gradients need them")
    ctx.save_for_backward(q, k, v, bias, *output, table, rows)


def _backward_of_op(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    _, _, _, need_bias, *others = ctx.needs_input_grad  # PyTorch leaves out last ones that have defaults
    need_table = len(others) > 3 and others[3]
    *saved, table, rows = ctx.saved_tensors
    settings = ctx.scale, ctx.heads, need_bias
    dq, dk, dv, *rest = _backward_op(*saved, dout, *settings, table, rows, ctx.places, need_table)
    dbias = rest.pop(0) if need_bias else None
    dtable = rest.pop(0) if need_table else None
    return dq, dk, dv, dbias, None, None, None, dtable, None, None


torch.library.register_autograd("cvt_kernels::attention", _backward_of_op, setup_context=_setup_context)


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    q, k, _, scale, bias, dropout_p, position = call
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
    return None if position is None else why_scale_too_small(scale)


#: The largest magnitude of a scale that is left to the softmax, where the factor on scores must be finite.
_LARGEST_SCALE = 2.0**64


def attention(call: Record) -> Tensor:
    """Computes ``cvt_kernels.attention`` for checked arguments.

    q, k and v are read in place if their last dimension is contiguous; otherwise they are copied first. Under
    autocast it computes in autocast's dtype, as ``F.scaled_dot_product_attention`` does; biases keep their
    own.
    """
    q, k, v, scale, bias, _, position = call
    if scale is None:
        scale = q.shape[3] ** -0.5
    if (dtype := modes.autocast_dtype(q)) is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if abs(scale) > _LARGEST_SCALE:
        q, scale = q * scale, 1.0
    table, rows, places = _parts_of(position)
    needs_gradient = modes.wants_gradient(q, k, v, bias, table)
    if torch.compiler.is_compiling():
        heads, given = q.shape[2], [_merged(each) for each in (q, k, v)]
        out, _ = _forward_op(*given, bias, scale, heads, needs_gradient, table, rows, places)
        return out.unflatten(2, (heads, -1))
    if needs_gradient:
        return _Attention.apply(q, k, v, bias, table, rows, places, scale)
    return attention_forward(q, k, v, bias, scale, need_stats=False, position=position)[0]
