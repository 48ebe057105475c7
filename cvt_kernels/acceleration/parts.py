"""The modules of a block and of a stage, whatever their upstream calls them, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.linear_int8.modules import LinearInt8
from ..ops.token_selection import TokenKeep
from ..records import (
    AnyLinear,
    ConvBatchNorm,
    DepthwiseConv,
    GeluVariant,
    Linear,
    Norm,
    Pool,
    QuantizedLinear,
    Reduction,
    TransformerBlock,
)


class BlockParts(NamedTuple):
    """The modules of a block.

    Attributes:
        norm1, norm2: The LayerNorms before attention and before the MLP.
        linears: The linear layers of Q, of K and of V.
        num_heads: Heads of attention.
        scale: Factor on the scores.
        proj: The linear layer after attention.
        fc1, fc2: Those of the MLP.
        approximate: Its GELU, as :func:`cvt_kernels.gelu` names it.
        activation: The module of its GELU; None where it is none.
        branches: Convolution and BatchNorm of Q, of K and of V; empty where there are none.
        reduction: The convolution that makes the tokens of keys and values, and its LayerNorm; None where
            there is none.
        mix: The depthwise convolution before the GELU; None where there is none.
        layer_scales: The modules of the factors (C,) on the two branches, each with its ``gamma``; None where
            there are none.
        token_keep: How many tokens stay after the block; 1 for all.
        pool: The query that says which.
    """

    norm1: nn.LayerNorm
    linears: Sequence[nn.Linear | LinearInt8]
    num_heads: int
    scale: float
    proj: nn.Linear | LinearInt8
    norm2: nn.LayerNorm
    fc1: nn.Linear | LinearInt8
    approximate: GeluVariant
    fc2: nn.Linear | LinearInt8
    activation: nn.Module | None = None
    branches: Sequence[tuple[Any, Any]] = ()
    reduction: tuple[nn.Conv2d, nn.LayerNorm] | None = None
    mix: nn.Conv2d | None = None
    layer_scales: tuple[Any, Any] = (None, None)
    token_keep: TokenKeep = 1.0
    pool: Pool = "cls"

    def modules(self) -> list[nn.Module]:
        """Returns the modules whose work a served block does."""
        branches = (module for branch in self.branches for module in branch)
        others = (self.activation, self.mix, *(self.reduction or ()), *self.layer_scales)
        found = (self.norm1, self.norm2, *branches, *self.layers(), *others)
        return [module for module in found if module is not None]

    def layers(self) -> list[nn.Linear | LinearInt8]:
        """Returns the linear layers of Q, K and V, that after attention and the two of the MLP."""
        return [*self.linears, self.proj, self.fc1, self.fc2]

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the factors of the layer scales; None where there are none."""
        first, second = (None if scale is None else scale.gamma for scale in self.layer_scales)
        return first, second

    def folded(self) -> list[Tensor | None]:
        """Returns the tensors of which a block with folded layer scales holds copies, or sums of them."""
        sources = [self.proj.bias, self.fc2.bias, *self.factors()]
        if any(factor is not None for factor in self.factors()):
            sources += [_factor_of(self.proj), _factor_of(self.fc2)]
        return sources

    def as_operator(self) -> TransformerBlock:
        """Returns the arguments of ``transformer_block``: live tensors, but layers with a scale folded in."""
        of_proj, of_fc2 = self.factors()
        q, k, v = map(_linear_of, self.linears)
        return TransformerBlock(
            norm1=norm_of(self.norm1),
            reduce=self._reduce(),
            linears=(q, k, v),
            num_heads=self.num_heads,
            scale=self.scale,
            proj=_scaled(self.proj, of_proj),
            norm2=norm_of(self.norm2),
            fc1=_linear_of(self.fc1),
            approximate=self.approximate,
            fc2=_scaled(self.fc2, of_fc2),
            mix=None if self.mix is None else DepthwiseConv(self.mix.weight, self.mix.bias),
        )

    def _reduce(self) -> tuple[ConvBatchNorm, ConvBatchNorm, ConvBatchNorm] | Reduction | None:
        if self.branches:
            q, k, v = (ConvBatchNorm.from_modules(*branch) for branch in self.branches)
            return q, k, v
        if self.reduction is None:
            return None
        conv, norm = self.reduction
        return Reduction(conv.weight, conv.bias, norm_of(norm))


class StageParts(NamedTuple):
    """The modules of a stage.

    Attributes:
        conv: The convolution of the embedding.
        batch_norm: A BatchNorm behind it; None where there is none.
        norm: The LayerNorm of the embedding.
        class_token: (1, 1, C); None where the stage has none.
        blocks: Its blocks.
        token_keep_bounds: The least and the greatest fraction of tokens that stay, where entropy decides.
    """

    conv: nn.Conv2d
    batch_norm: nn.BatchNorm2d | None
    norm: nn.LayerNorm
    class_token: Tensor | None
    blocks: Sequence[BlockParts]
    token_keep_bounds: tuple[float, float] = (0.0, 1.0)

    def modules(self) -> list[nn.Module]:
        """Returns the modules whose work a served stage does."""
        own = (module for module in (self.conv, self.batch_norm, self.norm) if module is not None)
        return [*own, *(module for block in self.blocks for module in block.modules())]

    def folded(self) -> list[Tensor]:
        """Returns the tensors of which the folded stage holds copies, or sums of them."""
        sources = [self.norm.bias, self.class_token, self.conv.weight, self.conv.bias]
        if self.batch_norm is not None:
            norm = self.batch_norm
            sources += [norm.weight, norm.bias, norm.running_mean, norm.running_var]
        sources += [tensor for block in self.blocks for tensor in block.folded()]
        return [tensor for tensor in sources if tensor is not None]


def norm_of(norm: nn.LayerNorm) -> Norm:
    """Returns the live tensors of a LayerNorm."""
    return Norm(norm.weight, norm.bias, norm.eps)


def wide(tensor: Tensor) -> Tensor:
    """Returns a tensor in float32, or in float64 if it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _linear_of(linear: nn.Linear | LinearInt8) -> AnyLinear:
    if isinstance(linear, LinearInt8):
        return linear.parameters_of_operator()
    return Linear(linear.weight, linear.bias)


def _factor_of(linear: nn.Linear | LinearInt8) -> Tensor:
    """Returns the tensor of a linear layer by which its outputs are scaled."""
    return linear.weight_scale if isinstance(linear, LinearInt8) else linear.weight


def _scaled(linear: nn.Linear | LinearInt8, factors: Tensor | None) -> AnyLinear:
    """Returns a linear layer with the factors of its outputs folded into weight, or its scales, and bias."""
    if factors is None:
        return _linear_of(linear)
    bias = None if linear.bias is None else (wide(factors) * linear.bias).to(linear.bias.dtype)
    if isinstance(linear, LinearInt8):
        scales = (wide(factors) * linear.weight_scale).float()
        return QuantizedLinear(linear.weight, scales, bias, linear.input_scale)
    return Linear((wide(factors)[:, None] * linear.weight).to(linear.weight.dtype), bias)
