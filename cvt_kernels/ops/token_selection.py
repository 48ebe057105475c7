"""The choice of the tokens that stay where a stage drops some: their scores, budgets, and rows.

The score of a token is how much the query of the head attends to it: the class token's, or with
``pool="avg"`` the mean of all queries, summed over the heads. Keys lie on a coarser grid than tokens, and
what a key receives is shared among the tokens that it stands for (:func:`spread_keys`). A token that has
dropped out keeps the values that it has: it still takes part in the depthwise convolutions of keys and
values, but has no query and no MLP any more.
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
_PREFERENCE = 1e-3  # how much less the last token counts than the first
_SMALLEST = 1e-12  # added to scores of 0

#: How many tokens stay: a fraction, or "entropy" for as many as attention is spread over.
TokenKeep = float | Literal["entropy"]


def spread_keys(grid: Grid, stride: int, *, class_token: bool, device: torch.device | None = None) -> Tensor:
    """Returns (S, T): how what each key receives is shared among the tokens; every row sums to 1.

    Args:
        grid: (H, W) of the tokens.
        stride: Of the keys.
        class_token: Whether there is one, token and key 0. It stands for itself.
        device: Where the result is made.
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
    """Returns how much the query of the head attends to each token, (B, H·W) float32, of sum ≤ heads.

    A bias by position has no part in it: neither a class token nor a mean of queries has a place.

    Args:
        q: Queries (B, Nq, h, D), a class token's first if there is one.
        k: Keys (B, Nkv, h, D).
        grid: (H, W) of the tokens.
        stride: Of the keys.
        scale: Factor on the scores of attention.
        pool: ``"cls"`` for the query of the class token, ``"avg"`` for the mean query of the other tokens.
        rows: (B, Nq), the tokens that the queries are; None where there is one for each token.
    """
    height, width = ((n - 1) // stride + 1 for n in grid)
    class_tokens = k.shape[1] - height * width
    received = attended_keys(q, k, scale=scale, pool=pool, class_tokens=class_tokens, rows=rows)
    return scores_of_tokens(received, grid, stride)


@torch.no_grad()
def scores_of_tokens(received: Tensor, grid: Grid, stride: int) -> Tensor:
    """Returns the scores of tokens (B, H·W) from what their keys receive (B, Nkv), a class token left out."""
    spread = spread_keys(grid, stride, class_token=False, device=received.device).to(received.dtype)
    autocast = modes.autocast_enabled(received)  # which would round them, so that more are equal
    with torch.autocast(received.device.type, enabled=False) if autocast else contextlib.nullcontext():
        return received[:, -spread.shape[0] :] @ spread


@torch.no_grad()
def select_tokens(
    scores: Tensor, rows: Tensor | None, keep: TokenKeep, bounds: tuple[float, float], *, class_token: bool
) -> Tensor:
    """Returns the rows (B, K) of the tokens that stay: the class token, then the best, ascending, then −1.

    With a fraction every image keeps as many. With ``"entropy"`` an image keeps exp(entropy) of its n
    tokens, the number that its scores are spread over, within ``bounds`` as parts of n; K is the largest
    number of the batch, or where shapes have to be known before (torch.compile, export, CUDA graphs) the
    largest possible one.

    Args:
        scores: (B, H·W), not negative.
        rows: The tokens that stayed before, (B, K); None for all.
        keep: The fraction or ``"entropy"``.
        bounds: The least and the greatest fraction for ``"entropy"``.
        class_token: Whether token 0 is one.
    """
    batch, tokens = scores.shape
    if rows is None:
        before, present = tokens, torch.ones_like(scores, dtype=torch.bool)
    else:
        spatial = rows[:, int(class_token) :] - int(class_token)
        before = spatial.shape[1]
        # Not of bool, which torch.jit.trace and ONNX do not know a scatter of.
        marks = scores.new_zeros(batch, tokens + 1)
        marks = marks.scatter(1, torch.where(spatial < 0, tokens, spatial), scores.new_ones(spatial.shape))
        present = marks[:, :tokens] > 0
    ranked = _ranked(scores, present)
    count = present.sum(1)
    if keep == "entropy":
        budget, most = (
            _budgets(scores * present, count, bounds),
            max(1, math.ceil(bounds[1] * before - _ROUNDING)),
        )
        kept = most if _needs_known_shapes(scores) or not batch else int(budget.max())
    else:
        budget, kept = _part(count, keep), max(1, math.ceil(keep * before - _ROUNDING))
    beyond = torch.arange(kept, device=scores.device) >= budget[:, None]
    chosen = ranked[:, :kept].masked_fill(beyond, tokens)
    chosen = _with_a_row(chosen).sort(1).values[:batch]
    chosen = torch.where(chosen == tokens, -1, chosen + int(class_token))
    return torch.cat([chosen.new_zeros(batch, 1), chosen], 1) if class_token else chosen


def _budgets(scores: Tensor, count: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Returns how many of ``count`` tokens (B,) stay, those that the scores (B, H·W) are spread over."""
    shares = scores / scores.sum(1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    spread = torch.special.entr(shares).sum(1).exp()
    least, most = (_part(count, bound) for bound in bounds)
    budget = torch.minimum(torch.maximum(spread.ceil(), least), most)
    return torch.where(budget.isnan(), most, budget)  # what is not a number spoils its own image only


def _part(count: Tensor, fraction: float) -> Tensor:
    return (count.double() * fraction - _ROUNDING).ceil().clamp_min(1)


def _ranked(scores: Tensor, present: Tensor) -> Tensor:
    """Returns the tokens (B, H·W), best first, those that are not present last.

    Tokens that share their key alone have equal scores, but for rounding. So that rounding, which differs
    from batch to batch, does not choose among them, those further back count a little less.
    """
    tokens = scores.shape[1]
    factors = 1 - _PREFERENCE * torch.arange(tokens, device=scores.device) / tokens
    ranked = ((scores + _SMALLEST) * factors).masked_fill(~present, -1.0)
    return _with_a_row(ranked).topk(tokens).indices[: scores.shape[0]]  # ONNX has no stable sort


def _with_a_row(x: Tensor) -> Tensor:
    """Returns x with a row more where it is exported: without rows, sorting ends onnxruntime by a signal."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])]) if modes.is_exporting() else x


def _needs_known_shapes(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or x.is_meta:
        return True
    return is_capturing(x)
