"""The kernels between the products of a linear layer and of its gradients.

The products are PyTorch's. A residual branch ends in one pass (``linear_ends``), which reads product and
residual: ``out = (residual + branch) · scale`` or ``residual + branch · scale`` with ``branch = product +
bias``; without it the bias is part of the product.

The backward has one pass before its products (``linear_starts``). It reads the gradient of the output, and
GELU's input; it writes the gradient of the product where that differs, of the residual where the sum is
scaled, and GELU where it is wanted. Summed over the rows, the first is the gradient of the bias: a program
sums its share of the rows of some columns in registers, and ``sum_regions`` adds up the shares, in a fixed
order. PyTorch's sum would read the gradient once more, at a fifth of the memory's rate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launch, machine
from ....launch import formulas, launching
from ....launch.records import Rows
from ...conv_projection.triton.backward import sum_regions
from ...graph_operators import launcher
from ...triton_gelu import activate_half, derivative_half
from ...triton_launch import accumulator_dtype, grid_dependency_synchronize
from .common import part_width

#: The most columns of a tile: a row of it is 256 bytes in half precision.
_WIDEST = 128

launch.register(Rows, formulas.linear_rows, "linear_ends", "linear_starts")


class RowsSpec(NamedTuple):
    """The compile-time constants of a pass over rows."""

    columns: int  # N
    # Of a tile
    rows: int
    width: int
    accumulator: Any  # float32, or float64 for float64
    approximate: str  # GELU's variant
    is_half: bool  # Whether gradients have 16 bits
    hardware: bool  # Whether GELU's derivative uses the GPU's instructions for powers and reciprocals
    scales_sum: bool  # Whether the factor of an image scales the residual too

    @classmethod
    def of(
        cls, kernel: str, like: Tensor, approximate: str = "none", *, scales_sum: bool = False
    ) -> tuple[RowsSpec, Any]:
        """Returns the specification and the configuration of a pass over rows like (M, N)."""
        rows, columns = like.shape
        config = launch.configuration(kernel, like.dtype, (columns,), rows, launching.chip(like.device))
        width = part_width(columns, min(_WIDEST, config.elements), -(-columns // 16))
        is_half = like.element_size() == 2
        spec = cls(
            columns, max(1, config.elements // width), width,
            tl.float64 if like.dtype == torch.float64 else tl.float32,
            approximate, is_half, is_half and not machine.INTERPRETING, scales_sum,
        )  # fmt: skip
        return spec, config


@triton.jit
def _places(first_row, rows, SPEC: tl.constexpr):
    """Returns the rows of a tile, the offsets of its elements and their mask."""
    ROWS: tl.constexpr = SPEC.rows
    WIDTH: tl.constexpr = SPEC.width
    row = first_row + tl.arange(0, ROWS)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    offset = row.to(tl.int64)[:, None] * SPEC.columns + column[None, :]
    return row, offset, (row < rows)[:, None] & (column < SPEC.columns)[None, :]


@triton.jit
def _factors(scale_ptr, row, rows, tokens, SPEC: tl.constexpr):
    """Returns the factors (rows, 1) of the images that rows belong to."""
    return tl.load(scale_ptr + row // tokens, mask=row < rows, other=0.0).to(SPEC.accumulator)[:, None]


# The end of a branch --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "tokens"])
def _linear_ends_kernel(
    product_ptr, bias_ptr, residual_ptr, scale_ptr, out_ptr, rows, tokens, SPEC: tl.constexpr
):  # fmt: skip
    """Writes a tile of the residual plus the product and its bias, with the factors of images."""
    grid_dependency_synchronize()
    WIDTH: tl.constexpr = SPEC.width
    row, offset, mask = _places(tl.program_id(1) * SPEC.rows, rows, SPEC)
    value = tl.load(product_ptr + offset, mask=mask, other=0.0).to(SPEC.accumulator)
    if bias_ptr is not None:
        column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        bias = tl.load(bias_ptr + column, mask=column < SPEC.columns, other=0.0)
        value += bias.to(SPEC.accumulator)[None, :]
    residual = tl.load(residual_ptr + offset, mask=mask, other=0.0).to(SPEC.accumulator)
    if scale_ptr is not None:
        factors = _factors(scale_ptr, row, rows, tokens, SPEC)
        value = (residual + value) * factors if SPEC.scales_sum else residual + value * factors
    else:
        value += residual
    tl.store(out_ptr + offset, value.to(out_ptr.dtype.element_ty), mask=mask)


def _sum_like(product, bias, residual, scale, scales_sum, dtype):
    return torch.empty_like(product, dtype=dtype)


@launcher("linear_ends", _sum_like)
def linear_ends(
    product: Tensor, bias: Tensor | None, residual: Tensor, scale: Tensor | None, scales_sum: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns the end of a branch in a dtype, for contiguous matrices (M, N) and factors (B,)."""
    out = torch.empty_like(product, dtype=dtype)
    spec, config = RowsSpec.of("linear_ends", product, scales_sum=scales_sum)
    rows = product.shape[0]
    launching.launch(
        _linear_ends_kernel, (-(-spec.columns // spec.width), -(-rows // spec.rows)),
        on=product, options=config.options,
        product_ptr=product, bias_ptr=bias, residual_ptr=residual, scale_ptr=scale, out_ptr=out, rows=rows,
        tokens=1 if scale is None else rows // scale.shape[0], SPEC=spec,
    )  # fmt: skip
    return out


# The start of the backward --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "tokens", "share"])
def _linear_starts_kernel(
    dout_ptr, pre_ptr, scale_ptr, dproduct_ptr, dresidual_ptr, activated_ptr, partial_ptr, rows, tokens,
    share, SPEC: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of a share of the rows of some columns, and their sums: partial (shares, N)."""
    grid_dependency_synchronize()
    APPROXIMATE: tl.constexpr = SPEC.approximate
    ROWS: tl.constexpr = SPEC.rows
    WIDTH: tl.constexpr = SPEC.width
    first = tl.program_id(1) * share
    sums = tl.zeros([ROWS, WIDTH], SPEC.accumulator)
    for first_row in range(first, tl.minimum(first + share, rows), ROWS):
        row, offset, mask = _places(first_row, rows, SPEC)
        value = tl.load(dout_ptr + offset, mask=mask, other=0.0).to(SPEC.accumulator)
        if scale_ptr is not None:
            value *= _factors(scale_ptr, row, rows, tokens, SPEC)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + offset, value.to(dresidual_ptr.dtype.element_ty), mask=mask)
        if pre_ptr is not None:
            half = 0.5 * tl.load(pre_ptr + offset, mask=mask, other=0.0).to(SPEC.accumulator)
            value *= derivative_half(half, APPROXIMATE, SPEC.is_half, SPEC.hardware)
            if activated_ptr is not None:
                activated = activate_half(half, APPROXIMATE, SPEC.is_half, SPEC.hardware)
                tl.store(activated_ptr + offset, activated.to(activated_ptr.dtype.element_ty), mask=mask)
        if dproduct_ptr is not None:
            tl.store(dproduct_ptr + offset, value.to(dproduct_ptr.dtype.element_ty), mask=mask)
        if partial_ptr is not None:
            sums += value
    if partial_ptr is not None:
        column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        place = partial_ptr + tl.program_id(1).to(tl.int64) * SPEC.columns + column
        tl.store(place, tl.sum(sums, axis=0), mask=column < SPEC.columns)


class Start(NamedTuple):
    """The gradients and features with which the backward begins."""

    product: Tensor  # The gradient of the product
    residual: Tensor  # Of a residual
    bias: Tensor | None  # Of the bias, if it is needed
    activated: Tensor | None = None  # GELU, if it is wanted


def linear_starts(
    dout: Tensor, dtype: torch.dtype, bias: torch.dtype | None, *, pre: Tensor | None = None,
    approximate: str = "none", activates: bool = False, scale: Tensor | None = None, scales_sum: bool = False,
) -> Start:  # fmt: skip
    """Returns the gradients of a product with what follows it, for a contiguous one of the output (M, N).

    ``dtype`` is the product's and ``bias`` the dtype of a bias, None if its gradient is not needed. If GELU
    follows, ``pre`` is its input; ``activates`` asks for GELU too, which the forward has not kept. ``scale``
    are the factors of images (B,) in float32, which may scale the residual too.
    """
    changes = pre is not None or scale is not None or dout.dtype != dtype
    if not changes and bias is None:
        return Start(dout, dout, None)
    activates = activates and pre is not None
    scales_sum = scales_sum and scale is not None
    made = iter(
        _starts(dout, dtype if changes else None, bias, pre, approximate, activates, scale, scales_sum)
    )
    return Start(
        product=next(made) if changes else dout,
        residual=next(made) if scales_sum else dout,
        bias=None if bias is None else next(made),
        activated=next(made) if activates else None,
    )


def _start_shapes(dout, dtype, bias, pre, approximate, activates, scale, scales_sum):
    made = [] if dtype is None else [dout.new_empty(dout.shape, dtype=dtype)]
    made += [torch.empty_like(dout)] if scales_sum else []
    made += [] if bias is None else [dout.new_empty(dout.shape[1], dtype=bias)]
    return made + ([torch.empty_like(pre)] if activates else [])


@launcher("linear_starts", _start_shapes)
def _starts(
    dout: Tensor, dtype: torch.dtype | None, bias: torch.dtype | None, pre: Tensor | None, approximate: str,
    activates: bool, scale: Tensor | None, scales_sum: bool,
) -> list[Tensor]:  # fmt: skip
    """Returns the new ones among the tensors of :class:`Start`."""
    rows, columns = dout.shape
    spec, config = RowsSpec.of("linear_starts", dout if pre is None else pre, approximate)
    groups = -(-columns // spec.width)
    tiles = -(-rows // spec.rows)
    programs = config.resident_programs * launching.chip(dout.device).multiprocessors
    share = -(-tiles // max(1, min(tiles, programs // groups))) * spec.rows
    shares = -(-rows // share)
    dproduct = None if dtype is None else dout.new_empty(dout.shape, dtype=dtype)
    dresidual = torch.empty_like(dout) if scales_sum else None
    activated = torch.empty_like(pre) if activates and pre is not None else None
    partial = None if bias is None else dout.new_empty(1, shares, columns, dtype=accumulator_dtype(dout))
    launching.launch(
        _linear_starts_kernel, (groups, shares), on=dout, options=config.options,
        dout_ptr=dout, pre_ptr=pre, scale_ptr=scale, dproduct_ptr=dproduct, dresidual_ptr=dresidual,
        activated_ptr=activated, partial_ptr=partial, rows=rows,
        tokens=1 if scale is None else rows // scale.shape[0], share=share, SPEC=spec,
    )  # fmt: skip
    dbias = None if bias is None or partial is None else sum_regions(partial, (1,), bias)
    return [each for each in (dproduct, dresidual, dbias, activated) if each is not None]
