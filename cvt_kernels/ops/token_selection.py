"""Token pruning: scores of tokens, the number that stay, and their rows.

A token's score is the attention that it gets from the class token's query, or with ``pool="avg"`` from the
mean of all queries, summed over the heads. Keys lie on a coarser grid than tokens, and a key's attention is
shared among the tokens that it stands for (:func:`spread_keys`). A dropped token keeps its values: it still
takes part in the depthwise convolutions of keys and values, but has no query and no MLP any more.
"""

from __future__ import annotations

import contextlib
import math
from typing import Literal

import torch
from torch import Tensor

from .. import modes
from ..machine import is_capturing
from ..records import Pool
from ..reference import attended_keys

Grid = tuple[int, int]

_ROUNDING = 1e-6  # 0.55 of 100 tokens are 55, though the product is a little more in binary
_PREFERENCE = 1e-3  # relative penalty of the last token against the first
_SMALLEST = 1e-12  # added to scores of 0

#: How many tokens stay: a fraction, or "entropy" for as many as attention is spread over.
TokenKeep = float | Literal["entropy"]


def spread_keys(grid: Grid, stride: int, *, class_token: bool, device: torch.device | None = None) -> Tensor:
    """Returns (S, T), the shares of each key's attention for the tokens; every row sums to 1.

    A class token, token and key 0, stands for itself.
    """
    down, across = (
        interpolation(torch.arange(n, device=device) / stride, (n - 1) // stride + 1) for n in grid
    )
    spatial = torch.kron(down, across).T
    spatial = spatial / spatial.sum(1, keepdim=True)
    return torch.block_diag(spatial.new_ones(1, 1), spatial) if class_token else spatial


def interpolation(places: Tensor, count: int) -> Tensor:
    """Returns (places, count): weights of linear interpolation between values at 0, 1, …, count − 1."""
    values = torch.arange(count, device=places.device)
    return (1 - (places.clamp(0, count - 1)[:, None] - values).abs()).clamp_min(0)


@torch.no_grad()
def score_tokens(
    q: Tensor, k: Tensor, grid: Grid, *, stride: int, scale: float, pool: Pool, rows: Tensor | None
) -> Tensor:
    """Returns the tokens' scores, (B, H·W) float32, with a sum of at most the number of heads.

    Queries (B, Nq, h, D), a class token's first if there is one, are those of the tokens ``rows`` (B, Nq), or
    of all. A bias by position is ignored: neither a class token nor a mean of queries has a position.
    """
    height, width = ((n - 1) // stride + 1 for n in grid)
    class_tokens = k.shape[1] - height * width
    received = attended_keys(q, k, scale=scale, pool=pool, class_tokens=class_tokens, rows=rows)
    return scores_of_tokens(received, grid, stride)


@torch.no_grad()
def scores_of_tokens(received: Tensor, grid: Grid, stride: int) -> Tensor:
    """Returns the scores of tokens (B, H·W) from their keys' attention (B, Nkv), without a class token."""
    spread = spread_keys(grid, stride, class_token=False, device=received.device).to(received.dtype)
    autocast = modes.autocast_enabled(received)  # autocast would round them, so that more are equal
    with torch.autocast(received.device.type, enabled=False) if autocast else contextlib.nullcontext():
        return received[:, -spread.shape[0] :] @ spread


@torch.no_grad()
def select_tokens(
    scores: Tensor, rows: Tensor | None, keep: TokenKeep, bounds: tuple[float, float], *, class_token: bool
) -> Tensor:
    """Returns the rows (B, K) of the tokens that stay: the class token, then the best, ascending, then −1.

    Scores are (B, H·W), not negative; ``rows`` are the tokens that stayed before, (B, K), None for all. With
    a fraction every image keeps the same number. With ``"entropy"`` an image keeps exp(entropy) of its n
    tokens, the number that its scores are spread over, within ``bounds`` as fractions of n; K is the largest
    number of the batch, or the largest possible one where shapes must be static (torch.compile, export, CUDA
    graphs).
    """
    batch, tokens = scores.shape
    if rows is None:
        before, present = tokens, torch.ones_like(scores, dtype=torch.bool)
    else:
        spatial = rows[:, int(class_token) :] - int(class_token)
        before = spatial.shape[1]
        # Not bool: torch.jit.trace and ONNX have no scatter of bool.
        marks = scores.new_zeros(batch, tokens + 1)
        marks = marks.scatter(1, torch.where(spatial < 0, tokens, spatial), scores.new_ones(spatial.shape))
        present = marks[:, :tokens] > 0
    ranked = _ranked(scores, present)
    count = present.sum(1)
    if keep == "entropy":
        budget = _budgets(scores * present, count, bounds)
        most = max(1, math.ceil(bounds[1] * before - _ROUNDING))
        kept = most if _needs_known_shapes(scores) or not batch else int(budget.max())
    else:
        budget, kept = _part(count, keep), max(1, math.ceil(keep * before - _ROUNDING))
    beyond = torch.arange(kept, device=scores.device) >= budget[:, None]
    chosen = ranked[:, :kept].masked_fill(beyond, tokens)
    chosen = _with_a_row(chosen).sort(1).values[:batch]
    chosen = torch.where(chosen == tokens, -1, chosen + int(class_token))
    return torch.cat([chosen.new_zeros(batch, 1), chosen], 1) if class_token else chosen


def _budgets(scores: Tensor, count: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Returns how many of ``count`` tokens (B,) stay: exp(entropy) of the scores (B, H·W), within bounds."""
    shares = scores / scores.sum(1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    spread = torch.special.entr(shares).sum(1).exp()
    least, most = (_part(count, bound) for bound in bounds)
    budget = torch.minimum(torch.maximum(spread.ceil(), least), most)
    return torch.where(budget.isnan(), most, budget)  # NaN affects its own image only


def _part(count: Tensor, fraction: float) -> Tensor:
    return (count.double() * fraction - _ROUNDING).ceil().clamp_min(1)


def _ranked(scores: Tensor, present: Tensor) -> Tensor:
    """Returns the tokens (B, H·W), best first, absent ones last.

    Tokens with the same key have equal scores up to rounding, which differs from batch to batch. Later tokens
    get a small penalty, so that rounding does not choose among them.
    """
    tokens = scores.shape[1]
    factors = 1 - _PREFERENCE * torch.arange(tokens, device=scores.device) / tokens
    ranked = ((scores + _SMALLEST) * factors).masked_fill(~present, -1.0)
    return _with_a_row(ranked).topk(tokens).indices[: scores.shape[0]]  # ONNX has no stable sort


def _with_a_row(x: Tensor) -> Tensor:
    """Returns x with one more row in exports: onnxruntime crashes when it sorts no rows."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])]) if modes.is_exporting() else x


def _needs_known_shapes(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or x.is_meta:
        return True
    return is_capturing(x)
