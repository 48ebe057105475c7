"""Attention maps: the probabilities of chosen queries, their entropy and mean attention distance."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import checks, modes
from ...records import PositionBias
from ...reference import position_bias
from . import check_attention_map


class AttentionMap(NamedTuple):
    """The attention of chosen queries.

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
    position: PositionBias | None = None,
) -> AttentionMap:
    """Computes the attention probabilities of chosen queries, their entropy and mean attention distance.

    It is plain PyTorch in float32 (float64 for float64), without gradients; only the ``R · Nkv`` scores
    of the chosen queries are computed per head.

    The mean attention distance (Dosovitskiy et al. 2021, figure 7) is Σ p · |place of query − place of key|,
    Euclidean. A class token, token 0, has no place: as a key it is left out and the other probabilities are
    renormalized; as a query its distance is NaN, as is a row's with nothing on the grid. Queries on a
    finer grid than the keys, as in CvT, are measured in tokens of the key grid: key (i, j) lies at query
    (s·i, s·j), where a 3×3 convolution of stride s and padding 1 is centered; s is the ratio of the grids,
    rounded up.

    Args:
        q: Queries ``(B, Nq, h, D)``; float16, bfloat16, float32 or float64, any strides.
        k: Keys ``(B, Nkv, h, D)``.
        rows: Index of a query or indices of R; negative ones count from the end. Row 0 is a class token if
            there is one.
        scale: As in :func:`attention`.
        bias: As in :func:`attention`.
        grid: ``(H, W)`` of the keys: ``H·W`` keys, or ``H·W + 1`` with a class token.
        query_grid: ``(H, W)`` of the queries, with a class token if there is one query more; None if it is a
            multiple of ``grid``, the same in both directions.
        position: As in :func:`attention`; with ``rows`` of its own, these are the tokens of the queries.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device, a row that does not exist, a bias that does not broadcast, a
            scale that is not finite, a grid that does not fit the tokens.
    """
    check_attention_map(q, k, scale, bias, position)
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    query_grid = _check_grids(grid, query_grid, queries, keys)
    index = torch.tensor(_check_rows(rows, queries), device=q.device)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if scale is None:
        scale = head_dim**-0.5
    autocast = modes.autocast_enabled(q)
    with torch.autocast(q.device.type, enabled=False) if autocast else contextlib.nullcontext():
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, index].to(dtype) * scale, k.to(dtype))
    if bias is not None:
        scores = scores + bias.expand(batch, heads, queries, keys)[:, :, index]
    if position is not None:
        tokens = index[None] if position.rows is None else position.rows[:, index]
        scores = scores + position_bias(position._replace(rows=tokens), len(index), keys).to(dtype)
    probabilities = scores.softmax(-1)
    if bias is not None:
        probabilities = probabilities.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    entropy = torch.special.entr(probabilities).sum(-1)
    if grid is None or query_grid is None:
        return AttentionMap(probabilities, entropy, None)
    offsets = _offsets(index, queries, grid, query_grid).to(dtype)
    spatial = probabilities[..., keys - grid[0] * grid[1] :]
    return AttentionMap(probabilities, entropy, (spatial * offsets).sum(-1) / spatial.sum(-1))


def _check_rows(rows: int | Sequence[int], queries: int) -> list[int]:
    indices = checks.indices("rows", rows)
    if not indices or any(not -queries <= row < queries for row in indices):
        raise ValueError(
            f"rows: got {checks.shown(indices)}, expected at least one index into {queries} queries"
        )
    return [row % queries for row in indices]


def _check_grids(
    grid: tuple[int, int] | None, query_grid: tuple[int, int] | None, queries: int, keys: int
) -> tuple[int, int] | None:
    """Checks both grids; returns the grid of the queries, or None without a grid of the keys."""
    if query_grid is not None:
        _check_grid("query_grid", query_grid, queries, "queries")
    if grid is None:
        return None
    _check_grid("grid", grid, keys, "keys")
    if query_grid is not None:
        return query_grid
    stride = max(math.isqrt(queries // (grid[0] * grid[1])), 1)
    query_grid = grid[0] * stride, grid[1] * stride
    _check_grid("query_grid", query_grid, queries, "queries")
    return query_grid


def _check_grid(name: str, grid: tuple[int, int], tokens: int, meaning: str) -> None:
    checks.check_grid(name, grid, tuple | list)
    if min(grid) < 1 or tokens - grid[0] * grid[1] not in (0, 1):
        raise ValueError(
            f"{name}: got {grid[0]}×{grid[1]} for {tokens} {meaning}, expected {meaning} = H·W or H·W + 1"
        )


def _offsets(index: Tensor, queries: int, grid: tuple[int, int], query_grid: tuple[int, int]) -> Tensor:
    """Returns the distances (R, H·W) from the queries to the keys of the grid; NaN for a class token."""
    (height, width), (query_height, query_width) = grid, query_grid
    place = (index - (queries - query_height * query_width)).double()
    key = torch.arange(height * width, device=index.device)
    down = (place // query_width / -(-query_height // height))[:, None] - key // width
    across = (place % query_width / -(-query_width // width))[:, None] - key % width
    return torch.hypot(down, across).masked_fill((place < 0)[:, None], torch.nan)
