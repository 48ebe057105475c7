"""The token reduction before keys and values (SegFormer, PVT) as a linear layer of squares of tokens."""

from __future__ import annotations

from torch import Tensor

from ... import modes
from ...records import Reduction
from ..layer_norm_gelu import layer_norm
from ..linear import linear


def reduce_tokens(x: Tensor, grid: tuple[int, int], reduction: Reduction) -> Tensor:
    """Reduces tokens (B, H·W, C) to (B, H'·W', C)."""
    weight, bias, norm = reduction
    kept = linear(squares_of(x, grid, weight.shape[-1]), matrix_of(weight), bias)
    return layer_norm(kept, norm.weight, norm.bias, eps=norm.eps)


def squares_of(x: Tensor, grid: tuple[int, int], ratio: int) -> Tensor:
    """Returns the squares of ratio × ratio tokens of x (B, H·W, C) as rows (B, H'·W', ratio² · C)."""
    image = x.unflatten(1, grid)
    if modes.is_known(grid[0] % ratio == 0) and modes.is_known(grid[1] % ratio == 0):
        squares = image.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio)).transpose(2, 3)
    else:  # without the last rows and columns, which a slice of symbolic sizes would compare
        squares = image.unfold(1, ratio, ratio).unfold(2, ratio, ratio).movedim(3, 5)
    return squares.flatten(3).flatten(1, 2)


def matrix_of(weight: Tensor) -> Tensor:
    """Returns the weight (outputs, C, ratio, ratio) of a reduction as (outputs, ratio² · C)."""
    return weight.permute(0, 2, 3, 1).flatten(1)
