"""Attention of many queries over fewer keys, softmax(scale · q kᵀ + bias) v, heads side by side.

``cpu`` has the CPU kernel (forward only), ``triton`` the GPU kernels, ``maps`` the attention maps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import checks, modes, reference
from ...backends import Implementation, Record
from ...declaration import extension_kernels, operator, triton_kernels
from ...records import PositionBias
from ...reference import position_bias
from ..autograd import gradients_again
from ..cost_classes import first_images, images_within, scores_within, size_class

_SHAPE = "(batch, tokens, heads, head_dim)"


def sdpa(call: Record) -> Tensor:
    """Computes ``cvt_kernels.attention`` by PyTorch's ``scaled_dot_product_attention``.

    A bias becomes a mask; one by position has (1, h, Nq, Nkv), or (B, h, Nq, Nkv) with rows. What PyTorch
    computes where a mask excludes every key differs from device to device, so these rows are computed without
    their mask and set to zero.
    """
    q, k, v, scale, bias, _, position = call
    mask, dtype = bias, modes.autocast_dtype(q) or q.dtype
    present = None
    if bias is not None:
        present = (bias != -torch.inf).any(-1, keepdim=True)
        mask = bias.masked_fill(~present, 0.0)
    if position is not None:
        places = position_bias(position, q.shape[1], k.shape[1])
        mask = places if mask is None else places + mask
    if mask is not None:
        mask = mask.to(dtype)
        mask = _with_four_dimensions(mask)
    q, k, v = (each.transpose(1, 2).to(dtype) for each in (q, k, v))
    if _has_no_second_derivatives(q, k, v, mask, scale):
        out = _Flash.apply(q, k, v, mask, scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if present is not None:
        out = out * _with_four_dimensions(present)
    return out.transpose(1, 2).contiguous()


def _with_four_dimensions(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def _has_no_second_derivatives(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
) -> bool:
    """Returns whether PyTorch computes gradients by its kernel for CPUs, which have no derivatives."""
    if q.device.type != "cpu" or not modes.wants_gradient(q, k, v):
        return False
    if torch.compiler.is_compiling() or modes.is_transformed() or modes.wants_gradient(mask):
        return False
    return torch._fused_sdp_choice(q, k, v, attn_mask=mask, scale=scale) == _FLASH


_FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value


class _Flash(torch.autograd.Function):
    """Autograd function of ``scaled_dot_product_attention`` by that kernel: (q, k, v, mask, scale)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
    ) -> Tensor:
        """Saves the inputs, the result and the logarithms of the sums."""
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, sums = run(q, k, v, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, mask, out, sums)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of q, k and v."""
        q, k, v, mask, out, sums = ctx.saved_tensors
        if torch.is_grad_enabled():

            def formula(*heads: Tensor) -> Tensor:
                q, k, v = (each.transpose(1, 2) for each in heads)
                return reference.attention(q, k, v, scale=ctx.scale, bias=mask).transpose(1, 2)

            return *gradients_again(formula, (q, k, v), dout), None, None
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return *run(dout, q, k, v, out, sums, 0.0, False, attn_mask=mask, scale=ctx.scale), None, None


_SAMPLE = 2**20  # scores


def _why_sdpa_unsupported(call: Record) -> str | None:
    q, dropout_p = call.q, call.dropout_p
    if modes.forward_mode_enabled():
        return "has no derivatives in forward mode"
    if q.device.type == "cpu" and modes.is_transformed():
        return "computes one call of a vmap after the other on a CPU"
    return "draws other random numbers than the reference" if dropout_p > 0 else None


def _check(call: Any) -> None:
    check_attention_map(call.q, call.k, call.scale, call.bias, call.position, ("v", call.v))
    checks.check_number("dropout_p", call.dropout_p, "a probability in [0, 1)")
    if not 0 <= call.dropout_p < 1:
        raise ValueError(f"dropout_p: got {call.dropout_p}, expected a probability in [0, 1)")


def _check_row_values(position: PositionBias | None, keys: int) -> None:
    """Raises ValueError unless chosen queries are tokens, the class token among them, or -1."""
    if position is not None and position.rows is not None:
        (height, width), (key_height, key_width) = position.query_grid, position.key_grid
        tokens = height * width + keys - key_height * key_width
        checks.check_row_values("position.rows", position.rows, tokens)


def _cost_class(call: Record) -> str:
    batch, queries, heads, channels = call.q.shape
    words = f"{size_class(batch * heads)} images × heads of {channels} channels"
    words += f", {size_class(queries)} queries, {size_class(call.k.shape[1])} keys"
    if call.bias is not None:
        form = "×".join("1" if size == 1 else "n" for size in call.bias.shape)
        words += f", {'learned' if call.bias.requires_grad else 'fixed'} bias of {form}"
    if call.position is not None:
        learned = call.position.table.requires_grad
        words += f", {'learned' if learned else 'fixed'} bias by position"
        words += "" if call.position.rows is None else " of chosen queries"
    contiguous = call.q.is_contiguous() and call.k.is_contiguous() and call.v.is_contiguous()
    return words + ("" if contiguous else ", strided") + (", dropout" if call.dropout_p > 0 else "")


def _sample(factor: int, call: Record) -> Record:
    batch, queries, heads, _ = call.q.shape
    images = images_within(_SAMPLE * factor, batch, batch * heads * queries * call.k.shape[1])
    if call.bias is not None and call.bias.ndim == 4 and call.bias.shape[0] == batch:
        call = call._replace(bias=call.bias[:images])
    if call.position is not None and call.position.rows is not None:
        call = call._replace(position=call.position._replace(rows=call.position.rows[:images]))
    return _first_queries(first_images(call, images, "q", "k", "v"), scores_within(factor))


def _first_queries(call: Record, most: int) -> Record:
    """Returns the call of an image cut to its first queries, with ``most`` scores together.

    A bias by position stays whole, since it is for a whole grid of queries.
    """
    batch, queries, heads, _ = call.q.shape
    few = max(1, most // max(1, batch * heads * call.k.shape[1]))
    if few >= queries or batch > 1 or call.position is not None:
        return call
    bias = call.bias
    if bias is not None and bias.ndim > 1 and bias.shape[-2] == queries:
        bias = bias[..., :few, :]
    return call._replace(q=call.q[:, :few], bias=bias)


@operator(
    backends={
        "triton": triton_kernels("triton.autograd"),
        "cpu": extension_kernels("cpu"),
        "sdpa": Implementation(sdpa, why_unsupported=_why_sdpa_unsupported),
    },
    cost_class=_cost_class,
    sample=_sample,
    check=_check,
    defaults=("sdpa", "reference"),
    check_numbers=("position", lambda call: _check_row_values(call.position, call.k.shape[1])),
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    position: PositionBias | None = None,
) -> Tensor:
    """Computes softmax(scale · q kᵀ + bias) v for each head (Vaswani et al. 2017, section 3.2.1).

    Args:
        q: Queries ``(B, Nq, h, D)``; float16, bfloat16, float32 or float64, any strides.
        k: Keys ``(B, Nkv, h, D)``.
        v: Values ``(B, Nkv, h, D)``.
        scale: Factor on the scores; None for ``D ** -0.5``. CvT uses ``(h·D) ** -0.5``.
        bias: Added to the scores; broadcasts to ``(B, h, Nq, Nkv)``. A row that is −inf throughout gives
            zeros.
        dropout_p: Probability of dropping an attention probability, in every call: pass 0 in evaluation.
        position: A learned bias by the offset from key to query, added too; see :class:`PositionBias`. The
            CPU's kernel reads its table; no matrix is made of it.

    Returns:
        ``(B, Nq, h, D)``, contiguous.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, no keys, a bias that does not broadcast, a scale that is not
            finite, a probability outside [0, 1), or grids, a table or rows that do not fit the tokens.
        BackendUnavailable: The requested backend cannot serve the call.

    The Triton kernels follow FlashAttention (Dao et al. 2022; Dao 2023): they read q, k and v as they lie if
    the last dimension is adjacent (else they copy), keep the softmax in float32 and give the same bits every
    time. They serve heads of up to 128 channels, without a bias and dropout.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k)  # scaling q first keeps float16 in range
    if position is not None:
        scores = scores + reference.position_bias(position, q.shape[1], k.shape[1])
    if bias is None:
        probabilities = scores.softmax(dim=-1)
    else:
        scores = scores + bias
        excluded = (scores == -torch.inf).all(dim=-1, keepdim=True)
        probabilities = scores.masked_fill(excluded, 0.0).softmax(dim=-1).masked_fill(excluded, 0.0)
    if dropout_p > 0:
        probabilities = F.dropout(probabilities, dropout_p)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v).contiguous()


def attend_by_modules(
    q: Tensor, k: Tensor, v: Tensor, dropout: nn.Module, *, scale: float, position: PositionBias | None = None
) -> Tensor:
    """Computes attention of q, k and v (B, N, h, D) in plain PyTorch, with a module on its probabilities.

    The module gets them as (B, h, Nq, Nkv). It returns tokens (B, Nq, C), the heads side by side.
    """
    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k)
    if position is not None:
        scores = scores + position_bias(position, q.shape[1], k.shape[1])
    return torch.einsum("bhqk,bkhd->bqhd", dropout(F.softmax(scores, dim=-1)), v).flatten(2)


def check_attention_map(
    q: Tensor,
    k: Tensor,
    scale: float | None,
    bias: Tensor | None,
    position: PositionBias | None,
    *values: tuple[str, Tensor],
) -> None:
    """Raises the errors that :func:`attention` documents, for all its arguments but the probability."""
    _check_tokens(q, k, *values)
    check_scale("scale", scale)
    if position is not None:
        checks.check_kind("position", position, PositionBias)
    _check_scores(q, k, bias, position)
    _check_row_values(position, k.shape[1])


def _check_tokens(q: Tensor, k: Tensor, *values: tuple[str, Tensor]) -> None:
    named = (("q", q), ("k", k), *values)
    for name, tensor in named:
        checks.check_dimensions(name, tensor, 4, _SHAPE)
        checks.check_like(name, tensor, "q", q)
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    for name, count in (("q", queries), ("k", keys)):
        if modes.is_known(count < 1):
            raise ValueError(f"{name}: got no tokens, expected at least one")
    if heads < 1 or head_dim < 1:
        raise ValueError(f"q: got shape {tuple(q.shape)}, expected at least one head and one channel of it")
    for name, tensor in named[1:]:
        checks.check_shape(name, tensor, (batch, keys, heads, head_dim), _SHAPE)


def check_scale(name: str, scale: float | None) -> None:
    """Raises TypeError or ValueError unless a factor on scores is a finite number or None."""
    if scale is not None:
        checks.check_number(name, scale, "a finite number or None")


def _check_scores(q: Tensor, k: Tensor, bias: Tensor | None, position: PositionBias | None) -> None:
    """Checks what is added to the scores of queries and keys that are right themselves."""
    if bias is not None:
        checks.check_float_tensor("bias", bias, "that broadcasts to (batch, heads, queries, keys)")
        checks.check_like("bias", bias, "q", q)
        _check_broadcasts("bias", bias, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    if position is not None:
        _check_position(position, q, k.shape[1])


def _check_position(position: PositionBias, q: Tensor, keys: int) -> None:
    for name in ("query_grid", "key_grid"):
        grid = getattr(position, name)
        checks.check_grid(f"position.{name}", grid, tuple | list)
        if modes.is_known(grid[0] < 1) or modes.is_known(grid[1] < 1):
            raise ValueError(f"position.{name}: got {grid}, expected integers of at least 1")
    checks.check_int("position.stride", position.stride, 1)
    batch, queries, heads, _ = q.shape
    table, (height, width), (key_height, key_width), stride, rows = position
    class_tokens = keys - key_height * key_width
    if modes.is_known(class_tokens < 0) or modes.is_known(class_tokens > 1):
        raise ValueError(
            f"position.key_grid: got {key_height}×{key_width} for {keys} keys, expected keys = H·W or H·W + 1"
        )
    if rows is None and modes.is_known(queries != height * width + class_tokens):
        raise ValueError(
            f"position.query_grid: got {height}×{width} for {queries} queries, expected "
            f"{height * width + class_tokens} of them, or rows"
        )
    meaning = "(heads, H + s·(Hk − 1), W + s·(Wk − 1))"
    checks.check_float_tensor("position.table", table, meaning)
    checks.check_like("position.table", table, "q", q)
    sizes = heads, height + stride * (key_height - 1), width + stride * (key_width - 1)
    checks.check_rank("position.table", table, 3, meaning)
    checks.check_shape("position.table", table, sizes, meaning)
    if rows is None:
        return
    checks.check_dtype("position.rows", rows, "(batch, queries)", torch.int64)
    checks.check_device("position.rows", rows, "q", q)
    checks.check_rank("position.rows", rows, 2, "(batch, queries)")
    checks.check_shape("position.rows", rows, (batch, queries), "(batch, queries)")


def _check_broadcasts(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
    # By ==, since torch.compile takes `in` for False where a size is dynamic.
    if tensor.ndim > len(shape) or any(size != 1 and size != full for size, full in pairs):
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, which does not broadcast to {shape}")
