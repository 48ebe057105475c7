"""The operators of cvt_kernels in plain PyTorch: specification, oracle, fallback and baseline.

``reference.attention`` and so on are the functions that declare the operators (``declaration``). They have
the public operator's signature, take any floating-point dtype (float64 too, so that
``torch.autograd.gradcheck`` works), and check no arguments. This file has the parts that they share.

Activations are tokens ``(B, T, C)``; the spatial tokens are in row-major ``(H, W)`` order, which is NHWC
memory. A class token is token 0, and then ``T = H·W + 1``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .modes import is_known
from .records import Pool, PositionBias

if TYPE_CHECKING:

    def __getattr__(operator: str) -> Any: ...


def position_bias(position: PositionBias, queries: int, keys: int) -> Tensor:
    """Returns the bias of attention scores, ``(heads, Nq, Nkv)``, or ``(B, heads, Nq, Nkv)`` with rows."""
    table, (_, width), (key_height, key_width), stride, rows = position
    token = torch.arange(queries, device=table.device) if rows is None else rows
    token = token[..., None] - (keys - key_height * key_width)  # as many class tokens as class keys
    key = torch.arange(keys, device=table.device) - (keys - key_height * key_width)
    has_place = (token >= 0) & (key >= 0)
    token, key = token.clamp_min(0), key.clamp_min(0)
    down = token // width - stride * (key // key_width) + stride * (key_height - 1)
    across = token % width - stride * (key % key_width) + stride * (key_width - 1)
    bias = table[:, down, across].masked_fill(~has_place, 0.0)
    return bias if rows is None else bias.transpose(0, 1)


def resize_table(table: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Resizes the table (heads, …) of a position bias for other grids: bilinear, with aligned corners."""
    if not torch.jit.is_tracing():  # traced sizes are not compared
        _, height, width = table.shape
        if is_known(height == sizes[0]) and is_known(width == sizes[1]):
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
    """Returns a query's attention to each key (B, Nkv), summed over the heads, without a gradient.

    With ``"cls"`` the query is the first one. With ``"avg"`` it is the mean of all except class tokens and
    rows of -1, or zero if there are none. The dtype is float32, or float64 for float64.
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
    products = (query * scale * k.to(dtype)).sum(3)  # not a matrix product, which autocast would round
    return products.softmax(1).sum(2)
