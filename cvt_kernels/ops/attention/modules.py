"""Attention behind convolutional projections, as models hold it: one module for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...records import PositionBias
from ...reference import position_bias
from ..conv_projection.modules import project
from . import attention


def project_and_attend(
    x: Tensor,
    grid: tuple[int, int],
    branches: Sequence[tuple[Any, Any]],
    linears: Sequence[Callable[[Tensor], Tensor]],
    *,
    num_heads: int,
    scale: float,
    dropout_p: float = 0.0,
) -> Tensor:
    """Computes the convolutional projections and attention, up to the linear layer behind it.

    Args:
        x: Normalized tokens (B, T, C).
        grid: (H, W) of the spatial ones.
        branches: Convolution and BatchNorm of Q, of K and of V.
        linears: Linear layers of Q, of K and of V, or functions that compute them.
        num_heads: Number of heads.
        scale: Factor on the scores.
        dropout_p: Probability of dropping an attention probability.

    Returns:
        Tokens (B, Tq, C), the heads side by side.
    """
    q, k, v = (
        linear(projected).unflatten(2, (num_heads, -1))
        for linear, projected in zip(linears, project(x, grid, branches), strict=True)
    )
    return attention(q, k, v, scale=scale, dropout_p=dropout_p).flatten(2)


def attend_by_modules(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: nn.Module,
    *,
    scale: float,
    position: PositionBias | None = None,
) -> Tensor:
    """Computes attention in plain PyTorch, with a module called on its probabilities (B, h, Nq, Nkv).

    Args:
        q: Queries (B, Nq, h, D).
        k: Keys (B, Nkv, h, D).
        v: Values (B, Nkv, h, D).
        dropout: The module.
        scale: Factor on the scores.
        position: A bias of the scores by offset.

    Returns:
        Tokens (B, Nq, C), the heads side by side.
    """
    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k)
    if position is not None:
        scores = scores + position_bias(position, q.shape[1], k.shape[1])
    return torch.einsum("bhqk,bkhd->bqhd", dropout(F.softmax(scores, dim=-1)), v).flatten(2)
