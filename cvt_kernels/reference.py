"""The operators of cvt_kernels in plain PyTorch: specification, oracle, fallback and baseline.

``reference.attention`` and so on are the functions that the operators were declared by (``declaration``).
They have the signature of the public operator, take any floating-point dtype (float64 included, so that
``torch.autograd.gradcheck`` applies), and check nothing. Here stand the parts that several of them share.

Activations are tokens ``(B, T, C)``; the spatial tokens lie in row-major ``(H, W)`` order, which is NHWC
memory. Where there is a class token it is token 0, and ``T = H·W + 1``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .records import Pool, PositionBias

if TYPE_CHECKING:

    def __getattr__(operator: str) -> Any: ...


def position_bias(position: PositionBias, queries: int, keys: int) -> Tensor:
    """Returns the bias of a table, ``(heads, Nq, Nkv)``, or ``(B, heads, Nq, Nkv)`` with rows."""
    table, (_, width), (key_height, key_width), stride, rows = position
    token = torch.arange(queries, device=table.device) if rows is None else rows
    token = token[..., None] - (keys - key_height * key_width)  # as many class tokens as there are of keys
    key = torch.arange(keys, device=table.device) - (keys - key_height * key_width)
    has_place = (token >= 0) & (key >= 0)
    token, key = token.clamp_min(0), key.clamp_min(0)
    down = token // width - stride * (key // key_width) + stride * (key_height - 1)
    across = token % width - stride * (key % key_width) + stride * (key_width - 1)
    bias = table[:, down, across].masked_fill(~has_place, 0.0)
    return bias if rows is None else bias.transpose(0, 1)


def resize_table(table: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Returns the table (heads, …) of a bias by position for other grids: bilinear, corner to corner."""
    if not torch.jit.is_tracing() and table.shape[1:] == sizes:  # sizes that are recorded are not compared
        return table
    return F.interpolate(table[None], sizes, mode="bilinear", align_corners=True)[0]


@torch.no_grad()
def attended_keys(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    pool: Pool,
    class_tokens: int,
    rows: Tensor | None = None,
) -> Tensor:
    """Returns how much a query attends to each key (B, Nkv), summed over the heads; without a gradient.

    With ``"cls"`` it is the first query, with ``"avg"`` the mean of all that are of no class token, and of
    no row that is -1; zero if there are none. Of float32, or float64 for float64.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if pool == "cls":
        query = q[:, :1].to(dtype)
    elif rows is None:
        query = q[:, class_tokens:].mean(1, keepdim=True, dtype=dtype)
    else:
        present = (rows >= class_tokens)[..., None, None]
        query = (q * present).sum(1, keepdim=True, dtype=dtype) / present.sum(1, keepdim=True).clamp_min(1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    products = (query * scale * k.to(dtype)).sum(3)  # no product of matrices, which autocast would round
    return products.softmax(1).sum(2)
