"""The parts of a block of SegFormer, PVT, PVT v2 or GLPN, whatever its upstream calls them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from ..reference import (
    DepthwiseConv,
    GeluVariant,
    Linear,
    Norm,
    PyramidBlock,
    Reduction,
)


class PyramidParts(NamedTuple):
    """The modules of a block, whatever its upstream calls them.

    Attributes:
        norm1, norm2: The LayerNorms before attention and before the feed-forward layers.
        linears: The linear layers of Q, of K and of V.
        reduction: The convolution that makes the tokens of keys and values, and its LayerNorm; None where
            these are all tokens.
        num_heads: Heads of attention.
        scale: Factor on the scores.
        proj: The linear layer after attention.
        fc1: The first of the feed-forward layers.
        conv: The depthwise convolution after it; None where there is none.
        activation: The module of its GELU.
        approximate: This GELU, as :func:`cvt_kernels.gelu` names it.
        fc2: The last layer.
    """

    norm1: nn.LayerNorm
    linears: tuple[nn.Linear, nn.Linear, nn.Linear]
    reduction: tuple[nn.Conv2d, nn.LayerNorm] | None
    num_heads: int
    scale: float
    proj: nn.Linear
    norm2: nn.LayerNorm
    fc1: nn.Linear
    conv: nn.Conv2d | None
    activation: nn.Module
    approximate: GeluVariant
    fc2: nn.Linear

    def modules(self) -> list[nn.Module]:
        """Returns the modules whose work a served block does."""
        layers = (*self.linears, self.proj, self.fc1, self.fc2, self.activation, *(self.reduction or ()))
        return [self.norm1, self.norm2, *layers, *([] if self.conv is None else [self.conv])]

    def folded(self) -> list[Tensor]:
        """Returns the tensors of which a served block holds copies: none, it has the live ones."""
        return []

    def as_operator(self) -> PyramidBlock:
        """Returns the block as the arguments of ``pyramid_block``, its live tensors."""
        q, k, v = map(_linear_of, self.linears)
        return PyramidBlock(
            norm1=_norm_of(self.norm1),
            linears=(q, k, v),
            reduction=None if self.reduction is None else reduction_of(*self.reduction),
            num_heads=self.num_heads,
            scale=self.scale,
            proj=_linear_of(self.proj),
            norm2=_norm_of(self.norm2),
            fc1=_linear_of(self.fc1),
            conv=None if self.conv is None else DepthwiseConv(self.conv.weight, self.conv.bias),
            approximate=self.approximate,
            fc2=_linear_of(self.fc2),
        )


def reduction_of(conv: nn.Conv2d, norm: nn.LayerNorm) -> Reduction:
    """Returns the live tensors of a reduction."""
    return Reduction(conv.weight, conv.bias, _norm_of(norm))


def _linear_of(linear: nn.Linear) -> Linear:
    return Linear(linear.weight, linear.bias)


def _norm_of(norm: nn.LayerNorm) -> Norm:
    return Norm(norm.weight, norm.bias, norm.eps)
