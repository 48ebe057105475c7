"""Attention with a module, such as the model's own dropout, applied to its probabilities."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...records import PositionBias
from ...reference import position_bias


def attend_by_modules(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: nn.Module,
    *,
    scale: float,
    position: PositionBias | None = None,
) -> Tensor:
    """Computes attention in plain PyTorch and applies a module to its probabilities (B, h, Nq, Nkv).

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
