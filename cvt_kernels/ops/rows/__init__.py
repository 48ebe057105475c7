"""Rows of tokens by an index for each image: gathered with the LayerNorm after, put back with the sum before.

They serve blocks that compute on some of the tokens only. ``rows`` names them, ascending; -1 after them fills
up an image that has fewer than others of its batch: zeros are gathered for it, and nothing is put back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import reference


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Returns the tokens of x (B, T, C) at ``rows`` (B, K), ``(B, K, C)``; zeros where a row is -1."""
    return reference.gather_rows(x, rows)


def gather_add_layer_norm(
    x: Tensor,
    rows: Tensor,
    branch: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (h, layer_norm(h)) with h = gather_rows(x, rows) + branch."""
    return reference.gather_add_layer_norm(x, rows, branch, weight, bias, eps=eps, dtype=dtype)


def scatter_rows(
    x: Tensor, rows: Tensor, values: Tensor, branch: Tensor | None = None, *, inplace: bool = False
) -> Tensor:
    """Returns x (B, T, C) with values + branch (B, K, C) at ``rows`` (B, K), but where a row is -1."""
    return reference.scatter_rows(x, rows, values, branch, inplace=inplace)
