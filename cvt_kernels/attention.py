"""Attention of many queries over fewer keys, softmax(scale · q kᵀ + bias) v, heads side by side; its maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference, runtime

_SHAPE = "(batch, tokens, heads, head_dim)"


def _triton(*args: Any, **kwargs: Any) -> Tensor:
    from . import attention_triton  # imports Triton, so not before it is needed

    return attention_triton.attention(*args, **kwargs)


def _triton_refuses(*args: Any, **kwargs: Any) -> str | None:
    from . import attention_triton

    return attention_triton.refuses(*args, **kwargs)


def _native(*args: Any, **kwargs: Any) -> Tensor:
    from . import attention_native  # needs the extension

    return attention_native.attention(*args, **kwargs)


def _native_refuses(*args: Any, **kwargs: Any) -> str | None:
    from . import attention_native

    return attention_native.refuses(*args, **kwargs)


runtime.register(
    "attention",
    "triton",
    runtime.Implementation(
        _triton,
        ("cuda",),
        runtime.triton_missing,
        _triton_refuses,
        opt_in={"cuda": "has not run on a GPU yet; use_backend('triton') tries it"},
    ),
)
runtime.register(
    "attention",
    "native",
    runtime.Implementation(_native, ("cpu",), runtime.native_missing, _native_refuses),
)
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

    The Triton kernels follow FlashAttention (Dao et al. 2022; Dao 2023): they read q, k and v as they lie if
    the last dimension is adjacent (else they copy), keep the softmax in float32 and give the same bits every
    time. They serve heads of up to 128 channels, without dropout.
    """
    _check(q, k, v, scale, bias, dropout_p)
    return runtime.call("attention", q, k, v, scale=scale, bias=bias, dropout_p=dropout_p)


class AttentionMap(NamedTuple):
    """What some queries attend to.

    Attributes:
        probabilities: ``(B, h, R, Nkv)``, float32 (float64 for float64); a row sums to 1, or is 0 throughout
            if the bias excludes every key.
        entropy: ``(B, h, R)``, −Σ p ln p in nats: from 0 (one key) to ln Nkv (all keys alike).
        distance: ``(B, h, R)``, mean distance of the attended keys in tokens of their grid; None without one.
    """

    probabilities: Tensor
    entropy: Tensor
    distance: Tensor | None


@torch.no_grad()
def attention_map(
    q: Tensor,
    k: Tensor,
    *,
    rows: int | Sequence[int] = 0,
    scale: float | None = None,
    bias: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    query_grid: tuple[int, int] | None = None,
) -> AttentionMap:
    """Attention probabilities of chosen queries, without the rest of the matrix, and what is plotted of them.

    Plain PyTorch in float32 (float64 for float64), without gradients; only ``R · Nkv`` scores per head exist.

    The mean attention distance (Dosovitskiy et al. 2021, figure 7) is Σ p · |place of query − place of key|,
    Euclidean. A class token, token 0, has no place: as a key it is left out and the other probabilities are
    renormalised; as a query its distance is NaN, like that of a row with nothing on the grid. Queries on a
    finer grid than the keys, as in CvT, are measured in tokens of the key grid: key (i, j) lies at query
    (s·i, s·j), where a 3×3 convolution of stride s and padding 1 is centred; s is the ratio of the grids,
    rounded up.

    Args:
        q: Queries ``(B, Nq, h, D)``; float16, bfloat16, float32 or float64, any strides.
        k: Keys ``(B, Nkv, h, D)``.
        rows: Index of a query or indices of R; negative ones count from the end. Row 0 is a class token if
            there is one.
        scale: As of :func:`attention`.
        bias: As of :func:`attention`.
        grid: ``(H, W)`` of the keys, of which there are ``H·W``, or ``H·W + 1`` with a class token.
        query_grid: ``(H, W)`` of the queries, with a class token if there is one query more; None if it is a
            multiple of ``grid``, the same in both directions.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device, a row that does not exist, a bias that does not broadcast, a
            scale that is not finite, a grid that does not fit the tokens.
    """
    _check(q, k, None, scale, bias, 0.0)
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    index = torch.tensor(_check_rows(rows, queries), device=q.device)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if scale is None:
        scale = head_dim**-0.5
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, index].to(dtype) * scale, k.to(dtype))
    if bias is not None:
        scores = scores + bias.expand(batch, heads, queries, keys)[:, :, index]
    probabilities = scores.softmax(-1)
    probabilities = probabilities.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    entropy = torch.special.entr(probabilities).sum(-1)
    if grid is None:
        return AttentionMap(probabilities, entropy, None)
    offsets = _offsets(index, queries, keys, grid, query_grid).to(dtype)
    spatial = probabilities[..., keys - grid[0] * grid[1] :]
    return AttentionMap(probabilities, entropy, (spatial * offsets).sum(-1) / spatial.sum(-1))


def _check_rows(rows: int | Sequence[int], queries: int) -> list[int]:
    found = [rows] if isinstance(rows, int) else [int(row) for row in rows]
    if not found or any(not -queries <= row < queries for row in found):
        raise ValueError(f"rows: got {found}, expected at least one index into {queries} queries")
    return [row % queries for row in found]


def _offsets(
    index: Tensor, queries: int, keys: int, grid: tuple[int, int], query_grid: tuple[int, int] | None
) -> Tensor:
    """(R, H·W) distances from the queries to the keys of the grid; NaN for a class token."""
    height, width = grid
    _check_grid("grid", grid, keys, "keys")
    if query_grid is None:
        stride = max(math.isqrt(queries // (height * width)), 1)
        query_grid = height * stride, width * stride
    query_height, query_width = query_grid
    _check_grid("query_grid", query_grid, queries, "queries")
    place = (index - (queries - query_height * query_width)).double()
    key = torch.arange(height * width, device=index.device)
    down = (place // query_width / -(-query_height // height))[:, None] - key // width
    across = (place % query_width / -(-query_width // width))[:, None] - key % width
    return torch.hypot(down, across).masked_fill((place < 0)[:, None], torch.nan)


def _check_grid(name: str, grid: tuple[int, int], tokens: int, meaning: str) -> None:
    if min(grid) < 1 or tokens - grid[0] * grid[1] not in (0, 1):
        raise ValueError(
            f"{name}: got {grid[0]}×{grid[1]} for {tokens} {meaning}, expected {meaning} = H·W or H·W + 1"
        )


def _check(
    q: Tensor, k: Tensor, v: Tensor | None, scale: float | None, bias: Tensor | None, dropout_p: float
) -> None:
    named = [("q", q), ("k", k), ("v", v)] if v is not None else [("q", q), ("k", k)]
    for name, tensor in named:
        runtime.check_float_tensor(name, tensor, _SHAPE)
        runtime.check_rank(name, tensor, 4, _SHAPE)
        runtime.check_like(name, tensor, "q", q)
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    if queries < 1 or keys < 1:
        raise ValueError(f"{'q' if queries < 1 else 'k'}: got no tokens, expected at least one")
    if heads < 1 or head_dim < 1:
        raise ValueError(f"q: got shape {tuple(q.shape)}, expected at least one head and one channel of it")
    for name, tensor in named[1:]:
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
    # By ==, since torch.compile takes `in` for False where a size is dynamic.
    if tensor.ndim > len(shape) or any(size != 1 and size != full for size, full in pairs):
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, which does not broadcast to {shape}")
