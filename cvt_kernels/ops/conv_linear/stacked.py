"""``conv_linear`` in two launches: the projection, then one product of all branches. In one of few tokens.

The projection writes the tokens of all branches below one another into one matrix, each branch from a
multiple of ``GROUP_ROWS`` rows on. The product multiplies each group of rows by the weight of its branch. The
few rows between two groups are never read by anybody else.

Bytes, in units of one B·T·C activation, for CvT's q (stride 1), k and v (stride 2): 2.5 of the projection, 3
of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...backends import Record
from ...records import ConvBatchNorm
from .. import weight_cache
from ..conv_projection.triton.common import Geometry, Parameters, class_tokens, maybe_contiguous
from ..conv_projection.triton.forward import NormOfRows, sliding_forward
from ..conv_projection.triton.sliding import why_not_sliding
from . import WeightAndBias, few_rows
from .few_rows import GROUP_ROWS

#: Writes the product of groups of rows, each by a weight and a bias of its own: takes x (M, C), the weights
#: (groups · N, C), the biases (groups · N,) or None, the result (M, N), and where the second and third group
#: begin.
Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor, tuple[int, ...]], Any]


def project(
    multiply: Multiply, x: Tensor, grid: tuple[int, int], convs: Sequence[ConvBatchNorm], weight: Tensor,
    bias: Tensor | None, norm: NormOfRows | None = None, taps: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns the results of all branches as rows of one matrix; :func:`branches_of` finds them in it.

    Weights (branches · outputs, C) and biases of the linear layers lie below one another; ``norm`` is a
    LayerNorm of x before the convolutions. With taps (:func:`few_rows.packed_taps`) it is one launch.
    """
    x, geometry = maybe_contiguous(x), _geometry(grid, convs)
    first_rows, rows = _rows_of(x, geometry)
    out = x.new_empty(rows, weight.shape[0] // len(convs))
    if taps is not None:
        block_m = few_rows.tile_rows(x, geometry, out.shape[1])
        assert block_m is not None
        few_rows.project_few(x, geometry, taps, weight, bias, out, block_m, norm)
        return out
    if norm is not None:
        norm = norm._replace(weight=_aligned(norm.weight), bias=_aligned(norm.bias))
    parameters = Parameters.of(x, convs)
    parameters = parameters._replace(weights=[_aligned(weight) for weight in parameters.weights])
    tokens = x.new_empty(rows, x.shape[2])
    epss, outs = [conv.eps for conv in convs], [tokens] * len(convs)
    sliding_forward(x, geometry, epss, parameters, outs, norm=norm, first_rows=first_rows)
    multiply(tokens, weight, bias, out, tuple(first_rows[1:]))
    return out


def branches_of(
    out: Tensor, x: Tensor, grid: tuple[int, int], convs: Sequence[ConvBatchNorm]
) -> list[Tensor]:
    """Returns the result of each branch (B, Tᵢ, outputs), a part of what :func:`project` has returned."""
    geometry = _geometry(grid, convs)
    first_rows, _ = _rows_of(x, geometry)
    batch, tokens = x.shape[0], class_tokens(x, geometry)
    return [
        out[first : first + batch * (height * width + tokens)].view(batch, -1, out.shape[1])
        for first, (height, width) in zip(first_rows, geometry.output_grids, strict=True)
    ]


def _geometry(grid: tuple[int, int], convs: Sequence[ConvBatchNorm]) -> Geometry:
    return Geometry.of(grid, [conv.stride for conv in convs])


def _rows_of(x: Tensor, geometry: Geometry) -> tuple[list[int], int]:
    """Returns the first row of each branch, and the number of rows."""
    first_rows, rows = [], 0
    for height, width in geometry.output_grids:
        first_rows.append(-(-rows // GROUP_ROWS) * GROUP_ROWS)
        rows = first_rows[-1] + x.shape[0] * (height * width + class_tokens(x, geometry))
    return first_rows, rows


def _aligned(tensor: Tensor) -> Tensor:
    """Returns a tensor of which the kernel can read two channels at once: itself or a copy."""
    return tensor if tensor.data_ptr() % 4 == 0 else tensor.clone()


def taps_of(
    x: Tensor, grid: tuple[int, int], convs: Sequence[ConvBatchNorm], linears: Sequence[WeightAndBias]
) -> Tensor | None:
    """Returns the taps for one launch; None for two."""
    return few_rows.packed_taps(convs) if is_one_launch(x, grid, convs, linears) else None


def is_one_launch(
    x: Tensor, grid: tuple[int, int], convs: Sequence[ConvBatchNorm], linears: Sequence[WeightAndBias]
) -> bool:
    """Returns whether a call that is served here takes one launch, as that of few tokens does."""
    return few_rows.tile_rows(x, _geometry(grid, convs), linears[0][0].shape[0]) is not None


def serve(multiply: Multiply, call: Record) -> tuple[Tensor, ...]:
    """Computes ``cvt_kernels.conv_linear``."""
    x, grid, convs, linears = call
    taps = taps_of(x, grid, convs, linears)
    out = project(multiply, x, grid, convs, *weight_cache.packed_linears(linears), taps=taps)
    return tuple(branches_of(out, x, grid, convs))


def why_unsupported(call: Record) -> str | None:
    """Returns why a call is not served in two launches, or None."""
    x, grid, convs, linears = call
    parameters = [t for conv in convs if type(conv) is ConvBatchNorm for t in conv[:5]]
    reason = weight_cache.why_unpackable(x, *parameters, *(t for each in linears for t in each))
    return reason or why_not_projected(x, grid, convs, linears)


def why_not_projected(
    x: Tensor, grid: tuple[int, int], convs: Sequence[Any], linears: Sequence[WeightAndBias]
) -> str | None:
    """Returns why a call is not served in two launches, or None."""
    if (reason := why_not_sliding(convs)) is not None:
        return reason
    if any(conv.running_mean is None for conv in convs):
        return "a branch has no running statistics"
    if len({weight.shape[0] for weight, _ in linears}) > 1:
        return "the linear layers have different numbers of outputs"
    if x.shape[1] * x.shape[2] >= 2**31:
        return "one image has 2³¹ elements or more"
    return None
