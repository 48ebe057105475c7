"""Triton kernels of the quantization of activations.

- ``quantize_rows``: values = round(x · limit / max |x|), scales = max |x| / limit, row by row
- ``layer_norm_quantize``: the same of layer_norm(x + shift)
- ``gelu_quantize``: the same of gelu(x + bias)

The limit is 127 for int8 and 448 for float8_e4m3fn. Layout: x (..., K) as PyTorch has it; dimensions before
the last are M rows. Inputs that are not contiguous are copied first; results are contiguous.

Rounding: a program holds several short rows in registers, from one read of x to one write of the values.
Results of LayerNorm and GELU stay in float32 until they are rounded. The largest number of a row is found by
comparing the bits without the sign as integers, where NaN > infinity > all other numbers. Multiplication and
rounding must not be fused, which would round ties differently from the reference; these kernels are therefore
compiled without FMA contraction.

Products of such rows are PyTorch's. There are no gradients. Bytes per launch, with e per element of x:
M·K·(e + 1) + 4·M.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import launch, machine
from ...backends import Record
from ...launch import formulas, launching
from ...launch.records import Rows
from ...records import LEAST, LIMITS, QuantizedRows
from ..conv_embedding.triton.common import Parts, channels_of, layer_norm, load_vector, within
from ..graph_operators import launcher
from ..triton_gelu import activate
from ..triton_launch import contiguous, grid_dependency_synchronize

_LEAST = tl.constexpr(LEAST)
_INFINITY = tl.constexpr(0x7F800000)  # its bits
_WITHOUT_SIGN = tl.constexpr(0x7FFFFFFF)
_MAGIC = tl.constexpr(1.5 * 2.0**23)  # the lowest bit of a sum with it is worth 1
_MAGIC_SMALL = tl.constexpr(1.5 * 2.0**14)  # and here 2^-9, the least number of float8_e4m3fn
# In x, 2/ln 2 times the arguments of the tanh that GELU is defined by.
_TANH_LINEAR = tl.constexpr(1.5957691216057308 / 0.6931471805599453)
_TANH_CUBIC = tl.constexpr(0.044715 * 1.5957691216057308 / 0.6931471805599453)
_QUICK = tl.constexpr(1.702 / 0.6931471805599453)
_LEAST_NORMAL = tl.constexpr(2.0**-6)  # of float8_e4m3fn

#: The most channels of a row that is rounded: it is held in the registers of a program.
MAX_CHANNELS = 8192

launch.register(Rows, formulas.quantize, "quantize_rows")


class RowSpec(NamedTuple):
    """The compile-time constants of a kernel that rounds rows."""

    parts: Parts  # The parts of a row
    rows: int  # Rows that the threads of a program hold at once
    repeats: int  # Rounds of rows per program
    limit: float  # The largest number of the dtype of the values
    is_float8: bool  # Whether the values are float8_e4m3fn, rather than int8
    interpreted: bool  # Whether the kernel runs in Triton's interpreter
    # Whether conversions to float8 round once, to nearest. sm_89's go by way of float16, and the
    # interpreter's are right only for numbers that need no rounding.
    converts_exactly: bool

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype) -> tuple[RowSpec, Rows]:
        """Returns the specification for contiguous rows x (M, C) and values of ``dtype``, and its launch."""
        count, channels = x.shape
        chip = launching.chip(x.device)
        config = launch.configuration("quantize_rows", x.dtype, (channels,), count, chip)
        parts = Parts.of(channels, x, least=1, most=MAX_CHANNELS)
        # A thread stores 16 values at once.
        rows = max(32 * config.num_warps * 16 // parts.width, 1)
        repeats = max(config.elements // triton.next_power_of_2(rows * parts.width * parts.count), 1)
        spec = cls(
            parts=parts, rows=rows, repeats=repeats, limit=LIMITS[dtype],
            is_float8=dtype == torch.float8_e4m3fn, interpreted=machine.INTERPRETING,
            converts_exactly=not machine.INTERPRETING and chip.capability >= 90,
        )  # fmt: skip
        return spec, config


# Device functions -----------------------------------------------------------------------------------------


@triton.jit
def _rows_of_program(SPEC: tl.constexpr):
    """Returns the rows of a program from its first one on, [REPEATS, ROWS, 1], and the first one."""
    row = tl.arange(0, SPEC.repeats)[:, None, None] * SPEC.rows + tl.arange(0, SPEC.rows)[None, :, None]
    return row, tl.program_id(0).to(tl.int64) * (SPEC.repeats * SPEC.rows)


@triton.jit
def _load_rows(x_ptr, first, row, count, SPEC: tl.constexpr):
    """Returns the parts of some rows in float32, zeros beyond their end."""
    PARTS: tl.constexpr = SPEC.parts
    COUNT: tl.constexpr = PARTS.count
    C: tl.constexpr = PARTS.channels
    x_ptr += first * C
    xs = ()
    for part in tl.static_range(COUNT):
        ptrs = x_ptr + (row * C + channels_of(part, PARTS))
        x = tl.load(ptrs, mask=within(part, row < count, PARTS), other=0.0)
        xs = xs + (x.to(tl.float32),)
    return xs


@triton.jit
def _vector(ptr, SPEC: tl.constexpr):
    """Returns the parts of a vector (C,), loaded by each row's threads; () for None."""
    PARTS: tl.constexpr = SPEC.parts
    ROWS: tl.constexpr = SPEC.rows
    return load_vector(ptr, tl.zeros([1, ROWS, 1], tl.int32), PARTS)


@triton.jit
def _gelu(x, APPROXIMATE: tl.constexpr, SPEC: tl.constexpr):
    """Returns gelu(x) with the accuracy of float32, whatever the dtype of x."""
    if SPEC.interpreted or APPROXIMATE == "none":
        y = activate(x, APPROXIMATE, False, False)
    else:  # x / (1 + 2^-p), with an approximate reciprocal and powers that may be infinite
        p = x * (_TANH_LINEAR + _TANH_CUBIC * (x * x)) if APPROXIMATE == "tanh" else x * _QUICK
        y = x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + tl.exp2(-p)], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _nearest_float8(v):
    """Returns the numbers of float8_e4m3fn nearest to some within its range, ties to even, in float32."""
    bits = v.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    small = (v + _MAGIC_SMALL) - _MAGIC_SMALL
    return tl.where(tl.abs(v) < _LEAST_NORMAL, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def _rounded(v, SPEC: tl.constexpr):
    """Rounds numbers within the limit to 8 bits, ties to even."""
    if SPEC.is_float8:
        if not SPEC.converts_exactly:
            v = _nearest_float8(v)
        numbers = v.to(tl.float8e4nv)
    else:
        if SPEC.interpreted:
            bits = (v + _MAGIC).to(tl.int32, bitcast=True)
        else:  # not fused with the product v: an FMA would round only once
            bits = tl.inline_asm_elementwise(
                "{ .reg .f32 s; add.rn.f32 s, $1, 0f4B400000; mov.b32 $0, s; }",
                "=r,f", [v], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        numbers = bits.to(tl.int8)  # the low byte of the mantissa
    return numbers


@triton.jit
def _store_rounded(ys, values_ptr, scales_ptr, first, row, rows, SPEC: tl.constexpr):
    """Stores the parts ``ys`` of rows, which are zeros beyond their end, and the scales of the rows."""
    PARTS: tl.constexpr = SPEC.parts
    COUNT: tl.constexpr = PARTS.count
    C: tl.constexpr = PARTS.channels
    LIMIT: tl.constexpr = SPEC.limit
    count = rows - first
    bits = ys[0].to(tl.int32, bitcast=True) & _WITHOUT_SIGN
    for part in tl.static_range(1, COUNT):  # the parts first, so that lanes exchange one number
        bits = tl.maximum(bits, ys[part].to(tl.int32, bitcast=True) & _WITHOUT_SIGN)
    bits = tl.max(bits, axis=-1, keep_dims=True)
    is_finite = bits < _INFINITY
    largest = bits.to(tl.float32, bitcast=True)
    has_scale = is_finite & (largest >= _LEAST)
    scales = tl.where(has_scale, tl.math.div_rn(largest, LIMIT), 0.0)
    factor = tl.where(has_scale, tl.math.div_rn(LIMIT, tl.where(has_scale, largest, 1.0)), 0.0)
    tl.store(scales_ptr + first + row, tl.where(is_finite, scales, float("nan")), mask=row < count)
    values_ptr += first * C
    for part in tl.static_range(COUNT):
        ptrs = values_ptr + (row * C + channels_of(part, PARTS))
        value = tl.where(is_finite, ys[part], 0.0) * factor
        tl.store(ptrs, _rounded(value, SPEC), mask=within(part, row < count, PARTS))


# Kernels --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _quantize_rows_kernel(x_ptr, values_ptr, scales_ptr, rows, SPEC: tl.constexpr):
    """Rounds rows of x (M, C)."""
    grid_dependency_synchronize()
    row, first = _rows_of_program(SPEC)
    xs = _load_rows(x_ptr, first, row, rows - first, SPEC)
    _store_rounded(xs, values_ptr, scales_ptr, first, row, rows, SPEC)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_quantize_kernel(
    x_ptr, shift_ptr, gamma_ptr, beta_ptr, values_ptr, scales_ptr, rows, eps, SPEC: tl.constexpr
):  # fmt: skip
    """Rounds rows of layer_norm(x + shift), where the sum is in the dtype of x (M, C)."""
    grid_dependency_synchronize()
    PARTS: tl.constexpr = SPEC.parts
    COUNT: tl.constexpr = PARTS.count
    row, first = _rows_of_program(SPEC)
    xs = _load_rows(x_ptr, first, row, rows - first, SPEC)
    if shift_ptr is not None:
        shift = _vector(shift_ptr, SPEC)
        shifted = ()
        for part in tl.static_range(COUNT):
            shifted = shifted + ((xs[part] + shift[part]).to(x_ptr.dtype.element_ty).to(tl.float32),)
        xs = shifted
    ys = layer_norm(xs, (), _vector(gamma_ptr, SPEC), _vector(beta_ptr, SPEC), eps, PARTS)
    _store_rounded(ys, values_ptr, scales_ptr, first, row, rows, SPEC)


@triton.jit(do_not_specialize=["rows"])
def _gelu_quantize_kernel(
    x_ptr, bias_ptr, values_ptr, scales_ptr, rows, APPROXIMATE: tl.constexpr, SPEC: tl.constexpr
):  # fmt: skip
    """Rounds rows of gelu(x + bias), x (M, C)."""
    grid_dependency_synchronize()
    COUNT: tl.constexpr = SPEC.parts.count
    row, first = _rows_of_program(SPEC)
    xs = _load_rows(x_ptr, first, row, rows - first, SPEC)
    bias = _vector(bias_ptr, SPEC)
    ys = ()
    for part in tl.static_range(COUNT):
        x = xs[part]
        if len(bias) > 0:
            x += bias[part]
        # The zeros beyond a row have biases of 0.
        ys = ys + (_gelu(x, APPROXIMATE, SPEC),)
    _store_rounded(ys, values_ptr, scales_ptr, first, row, rows, SPEC)


# Launchers ------------------------------------------------------------------------------------------------


def _allocated(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=others[-1]), x.new_empty(x.shape[0], 1, dtype=torch.float32)


@launcher("triton_quantize_rows", _allocated)
def quantize_rows_forward(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the values and scales of contiguous rows x (M, C)."""
    return _launch(_quantize_rows_kernel, x, dtype)


@launcher("triton_layer_norm_quantize", _allocated)
def layer_norm_quantize_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, shift: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the values and scales of layer_norm(x + shift) for contiguous rows x (M, C)."""
    given = {"shift_ptr": shift, "gamma_ptr": weight, "beta_ptr": bias, "eps": eps}
    return _launch(_layer_norm_quantize_kernel, x, dtype, **given)


@launcher("triton_gelu_quantize", _allocated)
def gelu_quantize_forward(
    x: Tensor, bias: Tensor | None, approximate: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the values and scales of gelu(x + bias) for contiguous rows x (M, C)."""
    return _launch(_gelu_quantize_kernel, x, dtype, bias_ptr=bias, APPROXIMATE=approximate)


def _launch(kernel: Any, x: Tensor, dtype: torch.dtype, **given: Any) -> tuple[Tensor, Tensor]:
    rows = x.shape[0]
    values, scales = _allocated(x, dtype)
    spec, config = RowSpec.of(x, dtype)
    launching.launch(
        kernel, (-(-rows // (spec.repeats * spec.rows)),), on=x, options=config.options,
        x_ptr=x, values_ptr=values, scales_ptr=scales, rows=rows, SPEC=spec, **given,
    )  # fmt: skip
    return values, scales


def why_rows_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot round the rows of a call, or None."""
    x, dtype = call.x, call.dtype
    if x.numel() == 0:
        return "the batch is empty"
    if x.dtype == torch.float64:
        return "float64 is not rounded, but for checks of accuracy, by the reference"
    if x.shape[-1] > MAX_CHANNELS:
        return f"rows of {x.shape[-1]} channels, more than {MAX_CHANNELS}, do not fit on the chip"
    if x.numel() // x.shape[-1] >= 2**31 - 2**10:
        return "there are 2³¹ rows or more"
    if dtype == torch.float8_e4m3fn and (capability := launching.chip(x.device).capability) < 89:
        return f"float8_e4m3fn needs compute capability 8.9, got {capability / 10}"
    return None


def quantize_rows(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.quantize_rows`` for checked arguments."""
    return _served(quantize_rows_forward, *call)


def layer_norm_quantize(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.layer_norm_quantize`` for checked arguments."""
    x, weight, bias, eps, shift, dtype = call
    weight, bias, shift = map(contiguous, (weight, bias, shift))
    return _served(layer_norm_quantize_forward, x, weight, bias, eps, shift, dtype)


def gelu_quantize(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.gelu_quantize`` for checked arguments."""
    x, bias, approximate, dtype = call
    return _served(gelu_quantize_forward, x, contiguous(bias), approximate, dtype)


def _served(forward: Any, x: Tensor, *others: Any) -> QuantizedRows:
    """Calls a launcher on the rows of x; reshapes the values like x."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    values, scales = forward(rows, *others)
    return QuantizedRows(values.view(x.shape), scales.view(*x.shape[:-1], 1))
