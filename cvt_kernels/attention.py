"""Attention of many queries over fewer keys: softmax(scale · q kᵀ + bias) v, heads side by side."""

from __future__ import annotations

import math

from torch import Tensor

from . import reference, runtime

_SHAPE = "(batch, tokens, heads, head_dim)"

runtime.register("attention", "reference", runtime.Implementation(reference.attention))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(scale · q kᵀ + bias) v for each head (Vaswani et al. 2017, section 3.2.1).

    Args:
        q: Queries ``(B, Nq, h, D)``; float16, bfloat16, float32 or float64, any strides.
        k: Keys ``(B, Nkv, h, D)``.
        v: Values ``(B, Nkv, h, D)``.
        scale: Factor on the scores; None for ``D ** -0.5``. CvT uses ``(h·D) ** -0.5``.
        bias: Added to the scores; broadcasts to ``(B, h, Nq, Nkv)``. A row that is −inf throughout gives
            zeros.
        dropout_p: Probability of dropping an attention probability, in every call: pass 0 in evaluation.

    Returns:
        ``(B, Nq, h, D)``, contiguous.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, no keys, a bias that does not broadcast, a scale that is not
            finite or a probability outside [0, 1).
        BackendUnavailable: The requested backend cannot serve the call.
    """
    _check(q, k, v, scale, bias, dropout_p)
    return runtime.call("attention", q, k, v, scale=scale, bias=bias, dropout_p=dropout_p)


def _check(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor | None, dropout_p: float
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        runtime.check_float_tensor(name, tensor, _SHAPE)
        runtime.check_rank(name, tensor, 4, _SHAPE)
        runtime.check_like(name, tensor, "q", q)
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    if queries < 1 or keys < 1:
        raise ValueError(f"{'q' if queries < 1 else 'k'}: got no tokens, expected at least one")
    if heads < 1 or head_dim < 1:
        raise ValueError(f"q: got shape {tuple(q.shape)}, expected at least one head and one channel of it")
    for name, tensor in (("k", k), ("v", v)):
        runtime.check_shape(name, tensor, (batch, keys, heads, head_dim), _SHAPE)
    if scale is not None and not -math.inf < scale < math.inf:  # torch.compile cannot trace math.isfinite
        raise ValueError(f"scale: got {scale}, expected a finite number or None")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: got {dropout_p}, expected a probability in [0, 1)")
    if bias is not None:
        runtime.check_float_tensor("bias", bias, "that broadcasts to (batch, heads, queries, keys)")
        runtime.check_like("bias", bias, "q", q)
        _check_broadcasts("bias", bias, (batch, heads, queries, keys))


def _check_broadcasts(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
    if tensor.ndim > len(shape) or any(size not in (1, full) for size, full in pairs):
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, which does not broadcast to {shape}")
