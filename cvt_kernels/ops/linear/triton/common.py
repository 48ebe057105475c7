"""The parts that the Triton kernels of linear layers share: tilings, device functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .... import launch, machine
from ....launch import formulas, launching
from ....launch.records import Product
from ...triton_launch import padded, product_types, rounded

#: The most outputs of a row that is normalized: its sums stay in registers.
MAX_NORMALIZED = 512
#: Triton 3.6 fails to compile warps of their own for sm_100 (its pass NVWSInsertAref).
_CAN_SPECIALIZE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)

launch.register(Product, formulas.linear_gelu, "linear_gelu")
launch.register(Product, formulas.linear_add, "linear_add")
launch.register(Product, formulas.linear_add_layer_norm, "linear_add_layer_norm")


@functools.cache
def part_width(outputs: int, widest: int, parts: int) -> int:
    """Returns the width of at most ``parts`` equal parts that hold all outputs and waste few columns.

    It is a power of two, at least 16; ``widest`` where so many parts cannot hold them.
    """
    widths = [16 << i for i in range(10) if 16 << i <= widest and outputs <= parts * (16 << i)]
    return min(widths, key=lambda width: (-(-outputs // width) * width, -width), default=widest)


class KernelSpec(NamedTuple):
    """The compile-time constants of a kernel."""

    # K and N
    inputs: int
    outputs: int
    # See ``Product``
    block_m: int
    width: int
    parts: int
    block_k: int
    columns: int  # Tiles side by side
    store_width: int  # Columns that are stored at once
    has_descriptors: bool  # Whether x and weight are tensor descriptors rather than pointers
    writes_descriptors: bool  # Whether the results are
    is_persistent: bool  # Whether a program computes several tiles, one after the other
    residual_first: bool  # Whether the products are added to the residual, not the residual to the products
    specialized: bool  # See ``Product``
    is_half: bool  # Whether the result has 16 bits
    hardware_tanh: bool  # Whether GELU uses the GPU's tanh instruction
    # See :func:`product_types`
    element: Any
    operand: Any
    accumulator: Any
    precision: str


class LinearTiling(NamedTuple):
    """The tiling of a launch."""

    spec: KernelSpec  # The specification of the kernel
    options: dict[str, int]  # Triton's options
    tiles: int  # Tiles of the result
    programs: int  # Number of programs

    @classmethod
    def of(cls, kernel: str, x: Tensor, weight: Tensor, results: Sequence[Tensor]) -> LinearTiling:
        """Returns the tiling of a kernel such as ``linear_add``: x (M, K), weight (N, K), results (M, N)."""
        rows, outputs = x.shape[0], weight.shape[0]
        chip = launching.chip(x.device)
        config = launch.configuration(kernel, x.dtype, (x.shape[1], outputs), rows, chip)
        return cls.by(config, x, weight, results)

    @classmethod
    def by(cls, config: Product, x: Tensor, weight: Tensor, results: Sequence[Tensor]) -> LinearTiling:
        """Returns the tiling of a configuration."""
        chip = launching.chip(x.device)
        (rows, inputs), outputs = x.shape, weight.shape[0]
        width = part_width(outputs, config.width, config.parts)
        columns = -(-outputs // (width * config.parts))
        parts = -(-outputs // (width * columns))
        tiles = -(-rows // config.block_m) * columns
        generation = launch.generation_of(chip.capability)
        has_descriptors = generation >= 90 and all(map(_may_be_described, (x, weight)))
        writes_descriptors = has_descriptors and all(map(_may_be_described, results))
        is_persistent = has_descriptors and config.programs > 0
        tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        is_half = results[0].element_size() == 2
        spec = KernelSpec(
            inputs=inputs, outputs=outputs, block_m=config.block_m, width=width, parts=parts,
            block_k=min(config.block_k, padded(inputs)), columns=columns, store_width=min(width, 128),
            has_descriptors=has_descriptors, writes_descriptors=writes_descriptors,
            is_persistent=is_persistent, residual_first=x.element_size() == 2,
            specialized=is_persistent and config.specialized and _CAN_SPECIALIZE, is_half=is_half,
            hardware_tanh=is_half and not machine.INTERPRETING, **product_types(x.dtype, tf32=tf32),
        )  # fmt: skip
        programs = min(tiles, config.programs * chip.multiprocessors) if is_persistent else tiles
        return cls(spec, config.options, tiles, programs)

    def launch(self, kernel: Any, x: Tensor, weight: Tensor, **given: Any) -> None:
        """Launches a kernel on x (M, K) and the weight (N, K), with these arguments besides the sizes."""
        spec, operands = self.spec, {"x": x, "weight": weight}
        if spec.has_descriptors:
            operands["x"] = _described(x, spec.block_m, spec.block_k)
            operands["weight"] = _described(weight, spec.width, spec.block_k)
        launching.launch(
            kernel, (self.programs,), on=x, options=self.options, **operands, rows=x.shape[0], SPEC=spec,
            **given,
        )  # fmt: skip

    def result(self, out: Tensor) -> Tensor | TensorDescriptor:
        """Returns a result (M, N) as the kernel's argument: itself or a descriptor."""
        spec = self.spec
        return _described(out, spec.block_m, spec.store_width) if spec.writes_descriptors else out


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _may_be_described(matrix: Tensor) -> bool:
    """Returns whether a contiguous 16-bit matrix may have a descriptor: rows aligned to 16 bytes."""
    row = matrix.shape[1] * matrix.element_size()
    return matrix.element_size() <= 2 and row % 16 == 0 and matrix.data_ptr() % 16 == 0


# Device functions -----------------------------------------------------------------------------------------


@triton.jit
def origin_of(tile, SPEC: tl.constexpr):
    """Returns the first row and column of a tile; adjacent indices share rows of x."""
    return tile // SPEC.columns * SPEC.block_m, tile % SPEC.columns * (SPEC.parts * SPEC.width)


@triton.jit
def load_columns(ptr, column, SPEC: tl.constexpr):
    """Returns the elements ``column`` of a vector (N,) as a row; zeros for None."""
    if ptr is None:
        values = tl.zeros(column.shape, SPEC.accumulator)
    elif SPEC.columns * SPEC.parts * SPEC.width == SPEC.outputs:
        values = tl.load(ptr + column)
    else:
        values = tl.load(ptr + column, mask=column < SPEC.outputs, other=0.0)
    return values.to(SPEC.accumulator)[None, :]


@triton.jit
def halves(values):
    """Returns the left and the right half of the columns of a tile."""
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    return tl.split(tl.permute(tl.reshape(values, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))


@triton.jit
def _load_tile(matrix, first_row, first_k, rows, COUNT: tl.constexpr, SPEC: tl.constexpr):
    """Returns COUNT rows of a matrix (rows, K) and block_k of their columns, zeros beyond its end."""
    BLOCK_K: tl.constexpr = SPEC.block_k
    if SPEC.has_descriptors:
        tile = matrix.load([first_row, first_k])
    else:
        k = first_k + tl.arange(0, BLOCK_K)[None, :]
        row = tl.arange(0, COUNT)[:, None]
        ptrs = matrix + first_row * tl.full([], SPEC.inputs, tl.int64) + (row * SPEC.inputs + k)
        mask = row < rows - first_row
        if SPEC.inputs % BLOCK_K != 0:
            mask = mask & (k < SPEC.inputs)
        tile = tl.load(ptrs, mask=mask, other=0.0)
    return tile.to(SPEC.operand)


@triton.jit
def zero_sums(SPEC: tl.constexpr):
    """Returns zero sums, a tuple with one tile for each part."""
    BLOCK_M: tl.constexpr = SPEC.block_m
    WIDTH: tl.constexpr = SPEC.width
    PARTS: tl.constexpr = SPEC.parts
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros([BLOCK_M, WIDTH], SPEC.accumulator),)
    return sums


@triton.jit
def add_products(sums, x, weight, first_row, first_column, rows, SPEC: tl.constexpr):
    """Adds x · weightᵀ to the parts' sums, for the rows and columns from the first ones on."""
    BLOCK_M: tl.constexpr = SPEC.block_m
    WIDTH: tl.constexpr = SPEC.width
    BLOCK_K: tl.constexpr = SPEC.block_k
    PARTS: tl.constexpr = SPEC.parts
    for first_k in range(0, SPEC.inputs, BLOCK_K):
        a = rounded(_load_tile(x, first_row, first_k, rows, BLOCK_M, SPEC), SPEC)
        new_sums = ()
        for part in tl.static_range(PARTS):
            b = _load_tile(weight, first_column + part * WIDTH, first_k, SPEC.outputs, WIDTH, SPEC)
            total = tl.dot(
                a, rounded(b, SPEC).T, sums[part], input_precision=SPEC.precision, out_dtype=SPEC.accumulator
            )
            new_sums = new_sums + (total,)
        sums = new_sums
    return sums


@triton.jit
def add_residual(sums, bias_ptr, residual_ptr, first_row, first_column, rows, SPEC: tl.constexpr):
    """Adds residual + bias to the parts' sums."""
    WIDTH: tl.constexpr = SPEC.width
    PARTS: tl.constexpr = SPEC.parts
    new_sums = ()
    for part in tl.static_range(PARTS):
        column = first_column + part * WIDTH
        residual = load_part(residual_ptr, first_row, column, rows, SPEC)
        new_sums = new_sums + (
            sums[part] + (residual + load_columns(bias_ptr, column + tl.arange(0, WIDTH), SPEC)),
        )
    return new_sums


@triton.jit
def sums_with_residual(
    x, weight, bias_ptr, residual_ptr, first_row, first_column, rows, SPEC: tl.constexpr
):  # fmt: skip
    """Returns the parts of residual + x · weightᵀ + bias.

    Products of 16 bits are added to the residual, whose loads are then waited for once, at the start. float32
    adds the residual last: a large one would cost every product digits.
    """
    sums = zero_sums(SPEC)
    if SPEC.residual_first:
        sums = add_residual(sums, bias_ptr, residual_ptr, first_row, first_column, rows, SPEC)
        sums = add_products(sums, x, weight, first_row, first_column, rows, SPEC)
    else:
        sums = add_products(sums, x, weight, first_row, first_column, rows, SPEC)
        sums = add_residual(sums, bias_ptr, residual_ptr, first_row, first_column, rows, SPEC)
    return sums


@triton.jit
def _part_of_tile(first_row, first_column, rows, SPEC: tl.constexpr):
    """Returns the offsets of a stored part within a matrix (rows, N), and their mask."""
    BLOCK_M: tl.constexpr = SPEC.block_m
    WIDTH: tl.constexpr = SPEC.store_width
    row, column = tl.arange(0, BLOCK_M)[:, None], first_column + tl.arange(0, WIDTH)[None, :]
    mask = row < rows - first_row
    if SPEC.columns * SPEC.parts * SPEC.width != SPEC.outputs:
        mask = mask & (column < SPEC.outputs)
    return first_row * tl.full([], SPEC.outputs, tl.int64) + (row * SPEC.outputs + column), mask


@triton.jit
def store_part(out, first_row, first_column, rows, values, SPEC: tl.constexpr):
    """Stores a part of a tile in the dtype of ``out`` (M, N), masked beyond its end."""
    if SPEC.writes_descriptors:
        out.store([first_row, first_column], values.to(out.dtype))
    else:
        offsets, mask = _part_of_tile(first_row, first_column, rows, SPEC)
        tl.store(out + offsets, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def load_part(ptr, first_row, first_column, rows, SPEC: tl.constexpr):
    """Returns a part of a tile of (M, N), zeros beyond its end."""
    offsets, mask = _part_of_tile(first_row, first_column, rows, SPEC)
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(SPEC.accumulator)
