"""A reduction as a linear layer: squares of tokens, and its weight as a matrix."""

from __future__ import annotations

from torch import Tensor


def squares_of(x: Tensor, grid: tuple[int, int], ratio: int) -> Tensor:
    """Returns the squares of ratio × ratio tokens of x (B, H·W, C) as rows (B, H'·W', ratio² · C)."""
    height, width = grid[0] // ratio, grid[1] // ratio
    image = x.unflatten(1, grid)[:, : height * ratio, : width * ratio]
    squares = image.unflatten(2, (width, ratio)).unflatten(1, (height, ratio))
    return squares.transpose(2, 3).flatten(3).flatten(1, 2)


def matrix_of(weight: Tensor) -> Tensor:
    """Returns the weight (outputs, C, ratio, ratio) of a reduction as (outputs, ratio² · C)."""
    return weight.permute(0, 2, 3, 1).flatten(1)
