"""Attention with a module, such as the model's own dropout, applied to its probabilities."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...records import PositionBias
from ...reference import position_bias


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
