"""The checks of a transformer block's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from ... import checks, modes
from ...backends import Record
from ...records import (
    LIMITS,
    AnyLinear,
    ConvBatchNorm,
    DepthwiseConv,
    Linear,
    Norm,
    Pool,
    QuantizedLinear,
    Reduction,
    TransformerBlock,
)
from ..attention import check_scale
from ..autograd import check_inplace
from ..conv_projection import check_arguments
from ..depthwise_conv_gelu import check_depthwise, check_whole_grid
from ..layer_norm_gelu import check_approximate, check_norm
from ..linear_int8 import check_scales

_LAYERS = (Linear, QuantizedLinear)
_SHAPE, _WEIGHT, _REDUCING = "(batch, tokens, channels)", "(outputs, inputs)", "(channels, channels, r, r)"


def check(call: Record) -> None:
    """Raises TypeError or ValueError for wrong arguments of a call."""
    check_row_values(call)
    x, grid, block, rows, scores, inplace = call
    _check_parts(block)
    _check_tokens(x, grid, block)
    check_approximate(block.approximate)
    for name in ("norm1", "norm2"):
        check_norm(f"block.{name}", getattr(block, name), x)
    _check_layers(x, block)
    if rows is not None:
        _check_rows(rows, x, block)
    if scores is not None:
        _check_scores(scores, block, x.shape[1] - grid[0] * grid[1])
    checks.check_flag("inplace", inplace)
    if block.quantized_layers() and modes.wants_gradient(x, *block.tensors()):
        raise ValueError("x: a gradient is wanted, expected none, since quantized layers have none")
    if inplace:
        check_inplace("x", x, x, *block.tensors())


def check_row_values(call: Record) -> None:
    """Raises ValueError unless the values of rows are ascending indices of tokens."""
    x, rows, scores = call.x, call.rows, call.scores
    if isinstance(rows, Tensor) and isinstance(x, Tensor) and _are_rows_of(rows, x):
        is_cls = isinstance(scores, str) and scores == "cls"
        checks.check_row_values("rows", rows, x.shape[1], ascending=True, class_token=is_cls)


def _check_parts(block: TransformerBlock) -> None:
    """Raises TypeError or ValueError for a block with parts of wrong types or in wrong numbers."""
    checks.check_kind("block", block, TransformerBlock)
    triples: dict[str, tuple[type, ...]] = {"linears": _LAYERS}
    if isinstance(block.reduce, Reduction):
        checks.check_kind("block.reduce.norm", block.reduce.norm, Norm)
    elif block.reduce is not None:
        triples = {"reduce": (ConvBatchNorm,), **triples}
    for name, kinds in triples.items():
        parts = getattr(block, name)
        if not isinstance(parts, tuple):
            expected = "a tuple, a Reduction or None" if name == "reduce" else "a tuple"
            raise TypeError(f"block.{name}: got {type(parts).__name__}, expected {expected}")
        if len(parts) != 3:
            raise ValueError(f"block.{name}: got {len(parts)}, expected those of Q, of K and of V")
        for i, part in enumerate(parts):
            checks.check_kind(f"block.{name}[{i}]", part, *kinds)
    for name in ("proj", "fc1", "fc2"):
        checks.check_kind(f"block.{name}", getattr(block, name), *_LAYERS)
    for name in ("norm1", "norm2"):
        checks.check_kind(f"block.{name}", getattr(block, name), Norm)
    if block.mix is not None:
        checks.check_kind("block.mix", block.mix, DepthwiseConv)


def _check_tokens(x: Tensor, grid: tuple[int, int], block: TransformerBlock) -> None:
    """Raises TypeError or ValueError for tokens and a grid that do not fit the block."""
    if block.convs:
        check_arguments(x, grid, block.convs, training=False)
        _check_grids(grid, block.convs)
    else:
        checks.check_dimensions("x", x, 3, _SHAPE)
    if block.mix is not None or isinstance(block.reduce, Reduction):
        check_whole_grid(grid, x)
    elif not block.convs:
        checks.check_grid("grid", grid)
    if isinstance(block.reduce, Reduction):
        _check_reduction(x, grid, block.reduce)


def _check_grids(grid: tuple[int, int], convs: Sequence[ConvBatchNorm]) -> None:
    """Raises ValueError for branches that do not fit together or have no running statistics."""
    for i, conv in enumerate(convs):
        if conv.running_mean is None:
            raise ValueError(f"block.reduce[{i}].running_mean: got None, expected running statistics")
    of_queries, of_keys, of_values = (conv.output_grid(grid) for conv in convs)
    if of_queries != grid:
        got, expected = ("×".join(map(str, sizes)) for sizes in (of_queries, grid))
        raise ValueError(f"block.reduce[0]: makes {got} of the {expected} grid, expected as many queries")
    if of_keys != of_values:
        keys, values = ("×".join(map(str, sizes)) for sizes in (of_keys, of_values))
        raise ValueError(f"block.reduce: got {keys} keys and {values} values, expected as many")


def _check_reduction(x: Tensor, grid: tuple[int, int], reduction: Reduction) -> None:
    channels, weight = x.shape[2], reduction.weight
    checks.check_dimensions("block.reduce.weight", weight, 4, _REDUCING)
    ratio = weight.shape[3]
    checks.check_tensor_like("block.reduce.weight", weight, (channels, channels, ratio, ratio), _REDUCING, x)
    if not 1 <= ratio <= min(grid):
        raise ValueError(
            f"block.reduce.weight: got a kernel of {ratio}×{ratio} for a grid of {grid[0]}×{grid[1]}, "
            "expected at most its sizes"
        )
    checks.check_vector("block.reduce.bias", reduction.bias, channels, x)
    check_norm("block.reduce.norm", reduction.norm, x)


def _check_rows(rows: Any, x: Tensor, block: TransformerBlock) -> None:
    """Raises for rows of a wrong type or shape; their values are left to the backends."""
    meaning = "(batch, rows)"
    checks.check_dtype("rows", rows, meaning, torch.int64)
    checks.check_rank("rows", rows, 2, meaning)
    batch, tokens = x.shape[:2]
    if not _are_rows_of(rows, x):
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, expected ({batch}, 1 to {tokens}) {meaning}")
    checks.check_device("rows", rows, "x", x)
    if block.mix is not None:
        raise ValueError("rows: got some tokens of a block with a convolution in its MLP, expected None")


def _are_rows_of(rows: Tensor, x: Tensor) -> bool:
    """Returns whether an index has the shape of one of the tokens of x, and its dtype."""
    if rows.dtype != torch.int64 or rows.ndim != 2 or x.ndim != 3:
        return False
    return rows.shape[0] == x.shape[0] and 1 <= rows.shape[1] <= x.shape[1]


def _check_scores(scores: object, block: TransformerBlock, class_tokens: int) -> None:
    if not isinstance(scores, str) or scores not in get_args(Pool):
        raise ValueError(f"scores: got {checks.shown(scores)}, expected 'cls', 'avg' or None")
    if not block.convs:
        raise ValueError(f"scores: got {scores!r} without convolutional projections, expected None")
    if scores == "cls" and not class_tokens:
        raise ValueError("scores: got 'cls' for tokens without a class token, expected 'avg'")


def _check_layers(x: Tensor, block: TransformerBlock) -> None:
    """Raises TypeError or ValueError for linear layers that do not fit together, and wrong heads."""
    channels = x.shape[2]
    widths = [
        _check_linear(f"block.linears[{i}]", linear, channels, x) for i, linear in enumerate(block.linears)
    ]
    width, heads, scale = widths[0], block.num_heads, block.scale
    if widths != [width] * 3:
        of_q, of_k, of_v = widths
        raise ValueError(
            f"block.linears: got {of_q}, {of_k} and {of_v} channels of Q, K and V, expected as many"
        )
    checks.check_int("block.num_heads", heads, 1)
    if width < 1 or width % heads:
        raise ValueError(f"block.num_heads: got {heads!r}, expected a divisor of {width} channels")
    check_scale("block.scale", scale)
    _check_linear("block.proj", block.proj, width, x, channels)
    hidden = _check_linear("block.fc1", block.fc1, channels, x)
    if block.mix is not None:
        check_depthwise("block.mix.", *block.mix, x, hidden)
    _check_linear("block.fc2", block.fc2, hidden, x, channels)


def _check_linear(name: str, layer: AnyLinear, inputs: int, x: Tensor, outputs: int | None = None) -> int:
    """Returns the outputs of a linear layer; raises TypeError or ValueError for a wrong one."""
    weight = layer.weight
    if isinstance(layer, Linear):
        checks.check_float_tensor(f"{name}.weight", weight, _WEIGHT)
    else:
        checks.check_dtype(f"{name}.weight", weight, _WEIGHT, *LIMITS)
    checks.check_rank(f"{name}.weight", weight, 2, _WEIGHT)
    outputs = weight.shape[0] if outputs is None else outputs
    if isinstance(layer, Linear):
        checks.check_tensor_like(f"{name}.weight", weight, (outputs, inputs), _WEIGHT, x)
    else:
        checks.check_shape(f"{name}.weight", weight, (outputs, inputs), _WEIGHT)
        checks.check_device(f"{name}.weight", weight, "x", x)
        check_scales(f"{name}.weight_scale", layer.weight_scale, x, (outputs,), "(outputs,)")
    checks.check_vector(f"{name}.bias", layer.bias, outputs, x, "(outputs,)")
    return outputs
