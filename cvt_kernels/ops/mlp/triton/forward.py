"""The kernel of the MLP, its launch, and the backend's functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launch, machine, modes
from ....backends import Record
from ....launch import formulas, launching
from ....launch.records import Mlp
from ...graph_operators import launcher
from ...triton_gelu import activate, activate_half
from ...triton_launch import contiguous, grid_dependency_synchronize, padded, product_types, rounded

#: The most channels of a row, and the most weights of a layer, padded: two layers have 128 KiB in 16 bits.
MAX_CHANNELS, MAX_WEIGHTS = 128, 2**15

launch.register(Mlp, formulas.mlp, "layer_norm_mlp")


def configuration_for(x: Tensor, hidden: int, dtype: torch.dtype) -> Mlp:
    """Returns the configuration for rows ``x``, hidden features and a dtype of operands, on its device."""
    rows, channels = x.numel() // x.shape[-1], x.shape[-1]
    sizes = padded(channels), weights(channels, hidden) // padded(channels)
    if x.element_size() != dtype.itemsize:  # wider rows, beside which less fits
        sizes = 2 * sizes[0], sizes[1]
    found: Mlp = launch.configuration("layer_norm_mlp", dtype, sizes, rows, launching.chip(x.device))
    return found


def weights(channels: int, hidden: int) -> int:
    """Returns the number of weights of one layer, with the kernel's padding."""
    return padded(channels) * (-(-hidden // 64) * 64)


class KernelSpec(NamedTuple):
    """The compile-time constants of a kernel besides its tiles."""

    # C and the hidden features
    channels: int
    hidden: int
    block_c: int  # C padded to a power of two of at least 16
    approximate: str  # GELU's variant
    # See :func:`product_types`, of the factors' dtype
    element: Any
    operand: Any
    accumulator: Any
    precision: str
    # Whether products are added to x, rather than x to their sum: a 16-bit x loses no digits by it
    residual_first: bool
    is_half: bool  # Whether x has 16 bits
    hardware_tanh: bool  # Whether GELU uses the GPU's tanh instruction
    unpack: bool  # Whether bfloat16 is widened in pairs, by one instruction for each number

    @classmethod
    def of(cls, x: Tensor, hidden: int, approximate: str, dtype: torch.dtype) -> KernelSpec:
        """Returns the specification for rows ``x``, operands of ``dtype`` and PyTorch's TF32 setting."""
        tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return cls(
            channels=x.shape[-1], hidden=hidden, block_c=padded(x.shape[-1]), approximate=approximate,
            residual_first=x.element_size() == 2, is_half=dtype.itemsize == 2,
            hardware_tanh=dtype.itemsize == 2 and not machine.INTERPRETING,
            unpack=x.dtype == torch.bfloat16 and not machine.INTERPRETING, **product_types(dtype, tf32=tf32),
        )  # fmt: skip


_ONES = tl.constexpr(16)  # the least depth of a product


@triton.jit
def _widened(values, SPEC: tl.constexpr):
    """Converts numbers of x's dtype to the accumulator's dtype."""
    if SPEC.unpack and values.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r", [values], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return values.to(SPEC.accumulator)


@triton.jit
def _mask_of(row, c, rows, SPEC: tl.constexpr):
    """Returns the mask of a tile's elements; ``rows`` rows are left from its first on."""
    mask = (row < rows)[:, None]
    if SPEC.block_c > SPEC.channels:
        mask = mask & (c < SPEC.channels)[None, :]
    return mask


@triton.jit
def _load_vector(ptr, index, size: tl.constexpr, SPEC: tl.constexpr):
    """Returns a vector at ``index``, widened; zeros beyond its end, or where there is none."""
    if ptr is None:
        vector = tl.zeros(index.shape, SPEC.accumulator)
    else:  # after a return this would be compiled all the same
        vector = _widened(tl.load(ptr + index, mask=index < size, other=0.0), SPEC)
    return vector


@triton.jit
def _load_fc1(ptr, h, c, SPEC: tl.constexpr):
    """Returns the weights of fc1 for the hidden features ``h``, [block_c, chunk]."""
    mask = (h < SPEC.hidden)[None, :] & (c < SPEC.channels)[:, None]
    return tl.load(ptr + h[None, :] * SPEC.channels + c[:, None], mask=mask, other=0.0)


@triton.jit
def _load_fc2(ptr, h, c, SPEC: tl.constexpr):
    """Returns the weights of fc2 for the hidden features ``h``, [chunk, block_c]."""
    mask = (c < SPEC.channels)[None, :] & (h < SPEC.hidden)[:, None]
    return tl.load(ptr + c[None, :] * SPEC.hidden + h[:, None], mask=mask, other=0.0)


@triton.jit
def _bias_factor(ptr, index, size: tl.constexpr, FACTOR: tl.constexpr, SPEC: tl.constexpr):
    """Returns the factor [_ONES, …] whose product with ``_ones`` is FACTOR · bias in every row."""
    bias = _load_vector(ptr, index, size, SPEC) * FACTOR
    first = tl.arange(0, _ONES) == 0
    return tl.where(first[:, None], bias[None, :], 0.0).to(SPEC.element).to(SPEC.operand)


@triton.jit
def _ones(rows, SPEC: tl.constexpr):
    """Returns a factor [rows, _ONES] whose first column is 1 and whose others are 0."""
    first = tl.arange(0, _ONES) == 0
    return tl.where((rows >= 0)[:, None] & first[None, :], 1.0, 0.0).to(SPEC.operand)


@triton.jit
def _dot(a, b, acc, SPEC: tl.constexpr):
    """Returns acc + a · b; both are rounded to the dtype of operands first."""
    a = rounded(a.to(SPEC.element).to(SPEC.operand), SPEC)
    b = rounded(b.to(SPEC.element).to(SPEC.operand), SPEC)
    if acc is None or SPEC.element != SPEC.accumulator:
        total = tl.dot(a, b, acc, input_precision=SPEC.precision, out_dtype=SPEC.accumulator)
    else:  # Products are added up before, for smaller errors; the limit keeps the compiler from undoing that.
        total = acc + tl.dot(
            a, b, input_precision=SPEC.precision, out_dtype=SPEC.accumulator, max_num_imprecise_acc=1
        )
    return total


@triton.jit
def _normalized(x, c, norm_weight_ptr, norm_bias_ptr, shift_ptr, eps, SPEC: tl.constexpr):
    """Returns the LayerNorm of the rows ``x`` + shift, rounded to the dtype of operands."""
    values = _widened(x, SPEC)
    if shift_ptr is not None:
        values += _load_vector(shift_ptr, c, SPEC.channels, SPEC)[None, :]
    mean = tl.sum(values, axis=1) / SPEC.channels
    deviation = values - mean[:, None]
    if SPEC.block_c > SPEC.channels:
        deviation = tl.where((c < SPEC.channels)[None, :], deviation, 0.0)
    variance = tl.sum(deviation * deviation, axis=1) / SPEC.channels
    y = deviation * tl.rsqrt(variance + eps)[:, None]
    if norm_weight_ptr is not None:
        y = y * _load_vector(norm_weight_ptr, c, SPEC.channels, SPEC)[None, :]
    if norm_bias_ptr is not None:
        y = y + _load_vector(norm_bias_ptr, c, SPEC.channels, SPEC)[None, :]
    return y.to(SPEC.element).to(SPEC.operand)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_mlp_fwd_kernel(
    x_ptr, out_ptr, norm_weight_ptr, norm_bias_ptr, shift_ptr,
    fc1_weight_ptr, fc1_bias_ptr, fc2_weight_ptr, fc2_bias_ptr, eps, rows, hidden,
    SPEC: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """Computes one tile of rows after another, with the weights streamed."""
    grid_dependency_synchronize()
    APPROXIMATE: tl.constexpr = SPEC.approximate
    BLOCK_C: tl.constexpr = SPEC.block_c
    r, c = tl.arange(0, BLOCK_ROWS), tl.arange(0, SPEC.block_c)
    offsets = r[:, None] * SPEC.channels + c[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=1):
        first = tile * tl.full([], BLOCK_ROWS * SPEC.channels, tl.int64)
        mask = _mask_of(r, c, rows - tile * BLOCK_ROWS, SPEC)
        x = tl.load(x_ptr + first + offsets, mask=mask, other=0.0)
        y = _normalized(x, c, norm_weight_ptr, norm_bias_ptr, shift_ptr, eps, SPEC)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_C], SPEC.accumulator)
        for start in range(0, hidden, BLOCK_HIDDEN):
            h = start + tl.arange(0, BLOCK_HIDDEN)
            product = _dot(y, _load_fc1(fc1_weight_ptr, h, c, SPEC), None, SPEC)
            product += _load_vector(fc1_bias_ptr, h, SPEC.hidden, SPEC)[None, :]
            activated = activate(product, APPROXIMATE, SPEC.is_half, SPEC.hardware_tanh)
            acc = _dot(activated, _load_fc2(fc2_weight_ptr, h, c, SPEC), acc, SPEC)
        acc += _load_vector(fc2_bias_ptr, c, SPEC.channels, SPEC)[None, :]
        acc += _widened(x, SPEC)
        tl.store(out_ptr + first + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _layer_norm_mlp_fwd_resident_kernel(
    x_ptr, out_ptr, norm_weight_ptr, norm_bias_ptr, shift_ptr,
    fc1_weight_ptr, fc1_bias_ptr, fc2_weight_ptr, fc2_bias_ptr, eps, rows,
    SPEC: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """Computes one tile of rows after another, with the weights in shared memory."""
    grid_dependency_synchronize()
    APPROXIMATE: tl.constexpr = SPEC.approximate
    HIDDEN: tl.constexpr = SPEC.hidden
    BLOCK_C: tl.constexpr = SPEC.block_c
    r, c = tl.arange(0, BLOCK_ROWS), tl.arange(0, SPEC.block_c)
    # What a product takes and no loop changes, the compiler puts into shared memory where it is made.
    ones = _ones(r, SPEC)
    fc1, fc1_biases, fc2 = (), (), ()
    for start in tl.static_range(0, HIDDEN, BLOCK_HIDDEN):
        h = start + tl.arange(0, BLOCK_HIDDEN)
        halved = _load_fc1(fc1_weight_ptr, h, c, SPEC).to(SPEC.accumulator) * 0.5
        fc1 = fc1 + (halved.to(SPEC.element).to(SPEC.operand),)
        fc1_biases = fc1_biases + (_bias_factor(fc1_bias_ptr, h, SPEC.hidden, 0.5, SPEC),)
        fc2 = fc2 + (_load_fc2(fc2_weight_ptr, h, c, SPEC).to(SPEC.element).to(SPEC.operand),)
    fc2_bias = _bias_factor(fc2_bias_ptr, c, SPEC.channels, 1.0, SPEC)
    offsets = r[:, None] * SPEC.channels + c[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0), num_stages=1):
        first = tile * tl.full([], BLOCK_ROWS * SPEC.channels, tl.int64)
        mask = _mask_of(r, c, rows - tile * BLOCK_ROWS, SPEC)
        x = tl.load(x_ptr + first + offsets, mask=mask, other=0.0)
        y = _normalized(x, c, norm_weight_ptr, norm_bias_ptr, shift_ptr, eps, SPEC)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_C], SPEC.accumulator)
        if SPEC.residual_first:
            acc = _widened(x, SPEC)
        if fc2_bias_ptr is not None:
            acc = _dot(ones, fc2_bias, acc, SPEC)
        for start in tl.static_range(0, HIDDEN, BLOCK_HIDDEN):
            half = None
            if fc1_bias_ptr is not None:
                half = _dot(ones, fc1_biases[start // BLOCK_HIDDEN], None, SPEC)
            half = _dot(y, fc1[start // BLOCK_HIDDEN], half, SPEC)
            hidden = activate_half(half, APPROXIMATE, SPEC.is_half, SPEC.hardware_tanh)
            acc = _dot(hidden, fc2[start // BLOCK_HIDDEN], acc, SPEC)
        if not SPEC.residual_first:
            acc += _widened(x, SPEC)
        tl.store(out_ptr + first + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@launcher("layer_norm_mlp", _like)
def layer_norm_mlp_forward(
    x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, fc1_weight: Tensor,
    fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None, shift: Tensor | None, eps: float,
    approximate: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Launches the kernel, with operands of ``dtype``; a tensor that is not contiguous is copied first."""
    channels, hidden = x.shape[-1], fc1_weight.shape[0]
    x = x.contiguous()
    out = _like(x)
    rows = x.numel() // channels
    config = configuration_for(x, hidden, dtype)
    kernel = _layer_norm_mlp_fwd_resident_kernel if config.resident else _layer_norm_mlp_fwd_kernel
    programs = min(-(-rows // config.block_rows), config.programs * launching.chip(x.device).multiprocessors)
    # The bound of a loop that must not be unrolled, as one of constant bounds would be.
    bound = {} if config.resident else {"hidden": hidden}
    launching.launch(
        kernel, (programs,), on=x, options=config.options,
        x_ptr=x, out_ptr=out, norm_weight_ptr=contiguous(norm_weight), norm_bias_ptr=contiguous(norm_bias),
        shift_ptr=contiguous(shift), fc1_weight_ptr=fc1_weight.contiguous(),
        fc1_bias_ptr=contiguous(fc1_bias), fc2_weight_ptr=fc2_weight.contiguous(),
        fc2_bias_ptr=contiguous(fc2_bias), eps=eps, rows=rows, **bound,
        SPEC=KernelSpec.of(x, hidden, approximate, dtype),
        BLOCK_ROWS=config.block_rows, BLOCK_HIDDEN=config.block_hidden,
    )  # fmt: skip
    return out


def why_unsupported(call: Record) -> str | None:
    """Returns why the kernel cannot serve a call, or None."""
    x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, _, _, shift = call
    tensors = norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, shift
    channels, hidden = x.shape[-1], fc1_weight.shape[0]
    if modes.wants_gradient(x, *tensors):
        return "has no gradients"
    if x.numel() == 0 or hidden == 0:
        return "there are no rows, or none of their features"
    if channels > MAX_CHANNELS:
        return f"rows have {channels} channels, more than {MAX_CHANNELS}"
    if weights(channels, hidden) > MAX_WEIGHTS:
        return f"{hidden} hidden features of {channels} channels do not fit the chip's shared memory"
    if x.is_cuda and x.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if x.numel() // channels >= 2**30:
        return "there are 2³⁰ rows or more"
    return None


def layer_norm_mlp(call: Record) -> Tensor:
    """Computes ``cvt_kernels.layer_norm_mlp`` for checked arguments.

    Under autocast the products are in autocast's dtype; x is read and the result written in x's dtype.
    """
    x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, eps, approximate, shift = call
    dtype = modes.autocast_dtype(x) or x.dtype
    return layer_norm_mlp_forward(
        x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, shift, eps, approximate, dtype
    )
