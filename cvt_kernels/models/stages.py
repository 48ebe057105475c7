"""Folding and forward of a whole stage, or a layer of a pyramid, for inference.

On a CPU a block is one operator, ``transformer_block``, as are the blocks of SegFormer, PVT and PVT v2
everywhere. Each block of a CvT overwrites the residual stream. On sm_90 all blocks are one operator,
``transformer_blocks``, in 16 bits and where the MLP is not one already. Elsewhere a block is a few launches,
whose matrix products accumulate into the stream without biases: the stream contains the biases of all blocks
from its start, by the embedding's LayerNorm bias and class token, and each inner LayerNorm subtracts the
biases of later blocks (``shift``). Quantized products add their own biases. A stage that drops tokens runs on
a CPU only, because dropped tokens would lack the biases of later blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils import fuse_conv_bn_weights

from .. import backends
from ..ops.conv_embedding import conv_embedding
from ..ops.layer_norm_gelu import layer_norm
from ..ops.token_selection import scores_of_tokens, select_tokens
from ..ops.transformer_block import transformer_block
from ..ops.transformer_block.composed import compute_within_stage
from ..ops.transformer_blocks import transformer_blocks, why_not_in_gluon
from ..records import (
    AnyLinear,
    Linear,
    QuantizedLinear,
    Reduction,
    TransformerBlock,
)
from .blocks import StageParts, wide
from .class_token import class_token_of
from .forward import output_grid

#: The widest tokens whose MLP is asked of ``layer_norm_mlp``: more weights do not fit on a multiprocessor.
_MLP_CHANNELS = 64
#: Up to so many tokens times channels squared, the last block is one operator with the others, for all of its
#: tokens. That takes up to four launches fewer than the class token alone, of 3 µs or more on an H200, and
#: 6.6 ns more for each token of 384 channels.
_FEW_PRODUCTS = 2**27


class FoldedBlock(NamedTuple):
    """A block as it is served in launches, without the biases that are in the stream.

    ``norm1_shift`` and ``norm2_shift`` are what its LayerNorms subtract from the stream, negated; None where
    the stream has no biases in advance.
    """

    block: TransformerBlock
    norm1_shift: Tensor | None
    norm2_shift: Tensor | None


class FoldedStage(NamedTuple):
    """A stage as it is served.

    Attributes:
        parts: Its modules.
        conv_weight, conv_bias: Of the convolution, with BatchNorm folded into them; channels last for maps.
        norm_bias: LayerNorm's, plus the biases of all blocks that are in the stream; None for 0.
        class_token: (C,), plus the same, if the stage has one.
        blocks: The blocks, each one operator or a few launches.
        are_one: Whether all blocks together are one operator.
    """

    parts: StageParts
    conv_weight: Tensor
    conv_bias: Tensor | None
    norm_bias: Tensor | None
    class_token: Tensor | None
    blocks: Sequence[TransformerBlock | FoldedBlock]
    are_one: bool = False


@torch.inference_mode(False)  # in which changes of tensors would not be counted
@torch.no_grad()
def fold(parts: StageParts, device_type: str) -> FoldedStage:
    """Computes what serving on a type of device needs, once for as long as no parameter changes."""
    weight, bias = _fold_batch_norm(parts)
    norm_bias: Tensor | None = parts.norm.bias
    # A copy: swap_tensors refuses a tensor that has a view.
    token = None if parts.class_token is None else parts.class_token.flatten().clone()
    operators = [block.as_operator() for block in parts.blocks]
    blocks: Sequence[TransformerBlock | FoldedBlock] = operators
    are_one = device_type != "cpu" and _are_one_operator(parts.conv.weight, operators)
    if device_type != "cpu" and not are_one and all(block.convs for block in operators):
        due = wide(parts.conv.weight.new_zeros(parts.conv.out_channels))  # still to come, from the end
        blocks = []
        for block in reversed(operators):
            folded, due = _fold_block(block, due)
            blocks.insert(0, folded)
        norm_bias = due if norm_bias is None else wide(norm_bias) + due
        token = None if token is None else wide(token) + due
    if weight.shape[1] >= 8:  # as maps are read, but not images of few channels
        weight = weight.contiguous(memory_format=torch.channels_last)
    return FoldedStage(parts, weight, bias, norm_bias, token, blocks, are_one)


def _are_one_operator(weight: Tensor, blocks: Sequence[TransformerBlock]) -> bool:
    """Returns whether one operator computes the blocks behind a convolution with this weight."""
    x = weight.new_empty(1, 1, weight.shape[0])
    if backends.why_unavailable("transformer_blocks", "gluon", x.device.type) is not None:
        return False
    if not blocks or any(map(_has_one_mlp, blocks)):
        return False
    return all(why_not_in_gluon(x, (1, 1), block) is None for block in blocks)


def _fold_block(block: TransformerBlock, due: Tensor) -> tuple[FoldedBlock, Tensor]:
    """Returns a block as it is served, and the biases that the stream must have before it, in float32."""
    proj, fc2 = block.proj, block.fc2
    if not _has_one_mlp(block):
        fc2, due = _without_bias(fc2, due)
    norm2_shift = -due
    proj, due = _without_bias(proj, due)
    return FoldedBlock(block._replace(proj=proj, fc2=fc2), -due, norm2_shift), due


def _without_bias(layer: AnyLinear, due: Tensor) -> tuple[AnyLinear, Tensor]:
    """Returns a layer without its bias unless it is quantized, and the biases of the stream before it."""
    if isinstance(layer, QuantizedLinear) or layer.bias is None:
        return layer, due
    return Linear(layer.weight), due + layer.bias


def _has_one_mlp(block: TransformerBlock) -> bool:
    is_quantized = isinstance(block.fc1, QuantizedLinear) or isinstance(block.fc2, QuantizedLinear)
    return block.fc2.weight.shape[0] <= _MLP_CHANNELS and not is_quantized


def _fold_batch_norm(parts: StageParts) -> tuple[Tensor, Tensor | None]:
    weight, bias, norm = parts.conv.weight, parts.conv.bias, parts.batch_norm
    if norm is None:
        return weight, bias
    tensors = weight, bias, norm.running_mean, norm.running_var, norm.weight, norm.bias
    values: list[Any] = [None if tensor is None else wide(tensor) for tensor in tensors]
    w, b, mean, variance, scale, offset = values
    folded, shift = fuse_conv_bn_weights(w, b, mean, variance, norm.eps, scale, offset)
    return folded.detach().to(weight.dtype), shift.detach().to(weight.dtype)


def _embedding_of(stage: FoldedStage) -> dict[str, Any]:
    conv, norm = stage.parts.conv, stage.parts.norm
    return {
        "weight": stage.conv_weight,
        "bias": stage.conv_bias,
        "norm_weight": norm.weight,
        "norm_bias": stage.norm_bias,
        "stride": conv.stride[0],
        "padding": int(conv.padding[0]),
        "eps": norm.eps,
        "class_token": stage.class_token,
    }


# The steps ------------------------------------------------------------------------------------------------

#: Computes tokens, from images or from the tokens of the step before.
Step = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class _Operator:
    """An operator as a step, with what it takes besides the tokens."""

    name: str
    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    settings: dict[str, Any]

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(x, *self.arguments, **self.settings)

    def bound(self, x: Tensor) -> Step | None:
        """Returns the step bound to its parameters, for tensors like x; None for a block that cannot be."""
        operator: Any = backends.operators[self.name]
        step: Step | None = operator.bound(operator.bind(x, *self.arguments, **self.settings))
        return self if step is None and self.name != "transformer_block" else step


def _steps_of(
    form: FoldedStage | TransformerBlock, x: Tensor, grid: tuple[int, int], class_token_only: bool
) -> list[Step]:
    def operator_of(block: TransformerBlock, only: bool, **settings: Any) -> Step:
        settings["rows"] = class_token_of(x) if only else None
        return _Operator("transformer_block", transformer_block, (grid, block), settings)

    if isinstance(form, TransformerBlock):
        return [operator_of(form, class_token_only)]
    steps: list[Step] = [_Operator("conv_embedding", conv_embedding, (), _embedding_of(form))]
    if form.are_one:
        steps.append(functools.partial(_serve_as_one, form.blocks, grid, class_token_only))
    elif any(block.token_keep != 1 for block in form.parts.blocks):
        steps.append(functools.partial(_serve_and_drop, form, grid, class_token_only))
    else:
        for block in form.blocks:
            only = class_token_only and block is form.blocks[-1]
            if isinstance(block, TransformerBlock):
                steps.append(operator_of(block, only, inplace=bool(block.convs)))
            else:
                steps.append(functools.partial(_serve_in_launches, block, grid, only))
    norm = form.parts.last_norm
    if norm is not None:
        steps.append(_Operator("layer_norm", layer_norm, (norm.weight, norm.bias), {"eps": norm.eps}))
    return steps


def _serve_as_one(
    blocks: Sequence[Any], grid: tuple[int, int], class_token_only: bool, stream: Tensor
) -> Tensor:
    """Computes all blocks in the place of the stream, the last one perhaps for the class token only."""
    class_token_only = class_token_only and stream.numel() * stream.shape[2] > _FEW_PRODUCTS
    together = blocks[:-1] if class_token_only else blocks
    if together:
        stream = transformer_blocks(stream, grid, together, inplace=True)
    if class_token_only:
        stream = _serve_in_launches(FoldedBlock(blocks[-1], None, None), grid, True, stream)
    return stream


def _serve_and_drop(
    stage: FoldedStage, grid: tuple[int, int], class_token_only: bool, stream: Tensor
) -> Tensor:
    """Computes the blocks of a stage in the place of the stream, each for the tokens that stay before it."""
    rows, bounds = None, stage.parts.token_keep_bounds
    for block, parts in zip(stage.blocks, stage.parts.blocks, strict=True):
        assert isinstance(block, TransformerBlock)
        settings: dict[str, Any] = {"inplace": True}
        if class_token_only and block is stage.blocks[-1]:
            rows = class_token_of(stream)
        elif parts.token_keep != 1:
            settings["scores"] = parts.pool
        out: Any = transformer_block(stream, grid, block, rows=rows, **settings)
        if "scores" not in settings:
            stream = out
            continue
        stream, received = out
        scores = scores_of_tokens(received, grid, block.convs[1].stride)
        class_token = stage.class_token is not None
        rows = select_tokens(scores, rows, parts.token_keep, bounds, class_token=class_token)
    return stream


def _serve_in_launches(
    block: FoldedBlock, grid: tuple[int, int], class_token_only: bool, stream: Tensor
) -> Tensor:
    """Computes a block, in the place of the stream unless it is for the class token only."""
    return compute_within_stage(
        stream,
        grid,
        block.block,
        (block.norm1_shift, block.norm2_shift),
        class_token_only=class_token_only,
        mlp_is_one=_has_one_mlp(block.block),
    )


# A stage, or a layer of a pyramid -------------------------------------------------------------------------


def grid_of(
    form: FoldedStage | TransformerBlock, x: Tensor, grid: tuple[Any, Any] | None
) -> tuple[int, int] | None:
    """Returns the grid of the result; None where x is not what a stage, or a layer with this grid, takes."""
    if isinstance(form, TransformerBlock):
        assert grid is not None
        return grid if _are_tokens(form, x, grid) else None
    weight = form.conv_weight
    if (x.dtype, x.device, x.ndim) != (weight.dtype, weight.device, 4) or x.shape[1] != weight.shape[1]:
        return None
    made = output_grid(x, form.parts.conv)
    return made if min(made) >= max(map(_ratio_of, form.blocks), default=1) else None


def compute(
    form: FoldedStage | TransformerBlock, x: Tensor, grid: tuple[int, int], class_token_only: bool
) -> Tensor:
    """Turns images or maps into the tokens of a stage (B, T, C), or computes the tokens of a layer.

    With ``class_token_only`` nobody reads other tokens behind the last block of a stage, or behind a layer.
    The result is a tensor of its own, since others may hold ``x``.
    """
    for step in _steps_of(form, x, grid, class_token_only):
        x = step(x)
    return x


def bound(
    form: FoldedStage | TransformerBlock,
    x: Tensor,
    out: Tensor,
    grid: tuple[int, int],
    class_token_only: bool,
) -> Sequence[Step] | None:
    """Returns the steps of :func:`compute`, bound to their parameters; None if one cannot be.

    ``x`` is an input that has been served, ``out`` its result.
    """
    steps: list[Step | None] = []
    for step in _steps_of(form, x, grid, class_token_only):
        steps.append(step.bound(out if steps else x) if isinstance(step, _Operator) else None)
    return None if None in steps else cast(list[Step], steps)


def _are_tokens(block: TransformerBlock, x: Tensor, grid: tuple[Any, Any]) -> bool:
    like = block.linears[0].weight if block.norm1.weight is None else block.norm1.weight
    if (x.dtype, x.device, x.ndim) != (like.dtype, like.device, 3) or x.shape[2] != block.fc1.weight.shape[1]:
        return False
    if not all(isinstance(size, int) for size in grid):
        return False
    if block.mix is None and block.reduce is None:
        return True  # of a PVT, which may have a class token
    return x.shape[1] == grid[0] * grid[1] and min(grid) >= _ratio_of(block)


def _ratio_of(block: TransformerBlock | FoldedBlock) -> int:
    """Returns the least height and width of the tokens of a block."""
    reduction = block.reduce if isinstance(block, TransformerBlock) else None
    return reduction.weight.shape[3] if isinstance(reduction, Reduction) else 1
