"""Attention of many queries over fewer keys, softmax(scale · q kᵀ + bias) v, heads side by side.

``native`` is the forward on a CPU, ``triton`` has the kernels for GPUs, ``maps`` looks at the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import backends, checks, dispatch
from ...reference import PositionBias, position_bias
from ..registration import images_within, register_native, register_reference, register_triton, size_class

_SHAPE = "(batch, tokens, heads, head_dim)"


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, bias: Tensor | None, dropout_p: float
) -> Tensor:
    """Computes ``cvt_kernels.attention`` by PyTorch's ``scaled_dot_product_attention``."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale)
    return out.transpose(1, 2).contiguous()


_SAMPLE = 2**20  # scores


def _why_sdpa_unsupported(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, bias: Tensor | None, dropout_p: float
) -> str | None:
    if bias is not None:
        return "gives no zeros where the bias excludes every key"
    return "draws other random numbers than the reference" if dropout_p > 0 else None


def _signature(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, bias: Tensor | None, dropout_p: float
) -> tuple[Any, ...]:
    gradient = checks.wants_gradient(q, k, v, bias)
    form = None if bias is None else (tuple(n == 1 for n in bias.shape), bias.requires_grad)
    contiguous = q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    return gradient, q.shape, k.shape[1], contiguous, form, dropout_p > 0


def _shape_class(
    gradient: bool, shape: Sequence[int], keys: int, contiguous: bool, bias: Any, drops: bool
) -> str:
    batch, queries, heads, channels = shape
    words = f"{size_class(batch * heads)} images × heads of {channels} channels"
    words += f", {size_class(queries, 2)} queries, {size_class(keys, 2)} keys"
    if bias is not None:
        ones, has_gradient = bias
        form = "×".join("1" if one else "n" for one in ones)
        words += f", {'learned' if has_gradient else 'fixed'} bias of {form}"
    return words + ("" if contiguous else ", strided") + (", dropout" if drops else "")


def _sample(
    factor: int, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    batch, queries, heads, _ = q.shape
    images = images_within(_SAMPLE * factor, batch, batch * heads * queries * k.shape[1])
    if bias is not None and bias.ndim == 4 and bias.shape[0] == batch:
        bias = bias[:images]
    return (q[:images], k[:images], v[:images]), {"bias": bias, **settings}


register_triton("attention", __name__)
register_native("attention", __name__, forward_only=True)
backends.register("attention", "sdpa", backends.Implementation(sdpa, why_unsupported=_why_sdpa_unsupported))
register_reference("attention")
backends.describe(
    "attention", backends.Operator(_signature, _shape_class, _sample, defaults=("sdpa", "reference"))
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
        position: A learned bias by the offset from key to query, added too; see :class:`PositionBias`.

    Returns:
        ``(B, Nq, h, D)``, contiguous.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, no keys, a bias that does not broadcast, a scale that is not
            finite or a probability outside [0, 1).
        BackendUnavailable: The requested backend cannot serve the call.

    The Triton kernels follow FlashAttention (Dao et al. 2022; Dao 2023): they read q, k and v as they lie if
    the last dimension is adjacent (else they copy), keep the softmax in float32 and give the same bits every
    time. They serve heads of up to 128 channels, without dropout.
    """
    if position is not None:
        by_offset = position_bias(position, q.shape[1], k.shape[1])
        bias = by_offset if bias is None else bias + by_offset
    if torch.jit.is_tracing():
        return dispatch.call_recorded("attention", q, k, v, scale=scale, bias=bias, dropout_p=dropout_p)
    settings = scale, type(scale), dropout_p, type(dropout_p)
    key = dispatch.key_of("attention", settings, q, k, v, bias)
    known = dispatch.known(key)
    if known is None:
        check_attention(q, k, v, scale, bias, dropout_p)
    elif known.run is not None:
        return known.run(q, k, v)
    out = dispatch.call("attention", q, k, v, scale=scale, bias=bias, dropout_p=dropout_p)
    if known is None:
        dispatch.remember(key, "attention", q, k, v, scale=scale, bias=bias, dropout_p=dropout_p)
    return out


def check_attention(
    q: Tensor, k: Tensor, v: Tensor | None, scale: float | None, bias: Tensor | None, dropout_p: float
) -> None:
    """Raises the errors that :func:`attention` documents; ``v`` is None for an attention map."""
    named = [("q", q), ("k", k), ("v", v)] if v is not None else [("q", q), ("k", k)]
    for name, tensor in named:
        checks.check_float_tensor(name, tensor, _SHAPE)
        checks.check_rank(name, tensor, 4, _SHAPE)
        checks.check_like(name, tensor, "q", q)
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    if queries < 1 or keys < 1:
        raise ValueError(f"{'q' if queries < 1 else 'k'}: got no tokens, expected at least one")
    if heads < 1 or head_dim < 1:
        raise ValueError(f"q: got shape {tuple(q.shape)}, expected at least one head and one channel of it")
    for name, tensor in named[1:]:
        checks.check_shape(name, tensor, (batch, keys, heads, head_dim), _SHAPE)
    if scale is not None and not -math.inf < scale < math.inf:  # torch.compile cannot trace math.isfinite
        raise ValueError(f"scale: got {scale}, expected a finite number or None")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: got {dropout_p}, expected a probability in [0, 1)")
    if bias is not None:
        checks.check_float_tensor("bias", bias, "that broadcasts to (batch, heads, queries, keys)")
        checks.check_like("bias", bias, "q", q)
        _check_broadcasts("bias", bias, (batch, heads, queries, keys))


def _check_broadcasts(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
    # By ==, since torch.compile takes `in` for False where a size is dynamic.
    if tensor.ndim > len(shape) or any(size != 1 and size != full for size, full in pairs):
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, which does not broadcast to {shape}")
