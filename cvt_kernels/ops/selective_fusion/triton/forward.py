"""The kernels of selective fusion, their launches, and the backend's function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import checks, launch, launching, modes
from ....backends import Record
from ....launch.records import Product
from ....records import NormalizedConv
from ...linear.triton.common import padded, part_width
from ...planned_launches import planned_with_operators
from ...triton_launch import contiguous, grid_dependency_synchronize, product_types
from ...triton_resize import source
from ...triton_tf32 import rounded

#: The numbers of a tile of pixels of ``fusion_starts``, and the weights of a program.
_NUMBERS = 2048
#: The pixels and the channels of a tile of ``fusion_sum``.
_PIXELS, _CHANNELS = 32, 64


class ConvSpec(NamedTuple):
    """The compile-time constants of ``fusion_conv``: ``SPEC`` in it.

    Attributes:
        inputs: Channels of a map.
        maps: 1 or 2, maps side by side.
        outputs: D.
        block_m: Pixels of a program.
        width: Outputs of a program.
        step: Inputs of a step of the product.
        operand, accumulator, precision: See :func:`product_types`.
    """

    inputs: int
    maps: int
    outputs: int
    block_m: int
    width: int
    step: int
    operand: Any
    accumulator: Any
    precision: str


# Upsampling, and weights with their taps outermost -----------------------------------------------------------


@triton.jit
def _store_upsampled(
    other_ptr, up_ptr, tile, rows, height, width, C: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Writes P pixels of the upsampled map; ``height`` and ``width`` are those of the small one."""
    row = tile * P + tl.arange(0, P)
    inside = row < rows
    image = (row // (4 * height * width)).to(tl.int64)
    top, bottom, down = source(row // (2 * width) % (2 * height), 0.5, height)
    left, right, across = source(row % (2 * width), 0.5, width)
    other_ptrs = other_ptr + (image * height * width * C)[:, None]
    up_ptrs = up_ptr + (row.to(tl.int64) * C)[:, None]
    across, down = across[:, None], down[:, None]
    for first in range(0, C, CHUNK):
        c = first + tl.arange(0, CHUNK)[None, :]
        mask = inside[:, None] & (c < C)
        upper = other_ptrs + (top * width * C)[:, None] + c
        lower = other_ptrs + (bottom * width * C)[:, None] + c
        of_left, of_right = (left * C)[:, None], (right * C)[:, None]
        above = (1.0 - across) * tl.load(upper + of_left, mask=mask, other=0.0).to(tl.float32)
        above += across * tl.load(upper + of_right, mask=mask, other=0.0).to(tl.float32)
        below = (1.0 - across) * tl.load(lower + of_left, mask=mask, other=0.0).to(tl.float32)
        below += across * tl.load(lower + of_right, mask=mask, other=0.0).to(tl.float32)
        value = (1.0 - down) * above + down * below
        tl.store(up_ptrs + c, value.to(up_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_taps(w_ptr, taps_ptr, part, PAIRS: tl.constexpr, NUMBERS: tl.constexpr):
    """Writes a part of the weights (PAIRS, 9) as (9, PAIRS), of all pairs of output and input."""
    i = part * NUMBERS + tl.arange(0, NUMBERS)
    mask = i < 9 * PAIRS
    tl.store(taps_ptr + i, tl.load(w_ptr + i % PAIRS * 9 + i // PAIRS, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["rows", "height", "width", "tiles"])
def _fusion_starts_kernel(
    other_ptr, up_ptr, first_ptr, first_taps_ptr, second_ptr, second_taps_ptr, rows, height, width, tiles,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Writes a part of the upsampled map, or of one of the weights (D, 2·C, 9) and (E, D, 9)."""
    grid_dependency_synchronize()
    PARTS: tl.constexpr = (18 * C * D + NUMBERS - 1) // NUMBERS
    program = tl.program_id(0)
    if program < tiles:
        _store_upsampled(other_ptr, up_ptr, program, rows, height, width, C, P, CHUNK)
    elif program < tiles + PARTS:
        _store_taps(first_ptr, first_taps_ptr, program - tiles, 2 * C * D, NUMBERS)
    else:
        _store_taps(second_ptr, second_taps_ptr, program - tiles - PARTS, D * E, NUMBERS)


def _start(other: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``other`` (B, h, w, C) upsampled, and two weights with their taps outermost."""
    batch, height, width, channels = other.shape
    up = other.new_empty(batch, 2 * height, 2 * width, channels)
    taps = [weight.new_empty(9, *weight.shape[:2]) for weight in (first, second)]
    chunk = min(_CHANNELS, padded(channels))
    pixels = _NUMBERS // chunk
    rows = batch * 4 * height * width
    tiles = -(-rows // pixels)
    parts = sum(-(-weight.numel() // _NUMBERS) for weight in (first, second))
    launching.launch(
        _fusion_starts_kernel, (tiles + parts,), on=other, options={"num_warps": 4},
        other_ptr=other, up_ptr=up, first_ptr=first, first_taps_ptr=taps[0], second_ptr=second,
        second_taps_ptr=taps[1], rows=rows, height=height, width=width, tiles=tiles, C=channels,
        D=first.shape[0], E=second.shape[0], P=pixels, CHUNK=chunk, NUMBERS=_NUMBERS,
    )  # fmt: skip
    return up, taps[0], taps[1]


# A convolution with BatchNorm and ReLU -----------------------------------------------------------------------


@triton.jit
def _add_map(total, map_ptr, w_ptr, y, x, inside, n, height, width, MAP: tl.constexpr, SPEC: tl.constexpr):
    """Adds the products of a map's pixels by the weights of nine taps.

    ``map_ptr`` is the first pixel of the program, (y, x) are the places of all of them in their images.
    """
    C: tl.constexpr = SPEC.inputs
    STEP: tl.constexpr = SPEC.step
    STEPS: tl.constexpr = (C + STEP - 1) // STEP
    ALL: tl.constexpr = SPEC.maps * C
    for step in range(9 * STEPS):
        tap = step // STEPS
        dy, dx = tap // 3 - 1, tap % 3 - 1
        k = step % STEPS * STEP + tl.arange(0, STEP)
        mask = inside & (y + dy >= 0) & (y + dy < height) & (x + dx >= 0) & (x + dx < width)
        place = tl.arange(0, SPEC.block_m) + (dy * width + dx)
        ptrs, w_ptrs = map_ptr + (place * C)[:, None] + k, w_ptr + ((tap * SPEC.outputs + n) * ALL)[:, None]
        w_ptrs += MAP * C + k
        if C % STEP == 0:
            pixels = tl.load(ptrs, mask=mask[:, None], other=0.0)
        else:
            pixels = tl.load(ptrs, mask=mask[:, None] & (k < C), other=0.0)
        if C % STEP == 0 and SPEC.outputs % SPEC.width == 0:
            weight = tl.load(w_ptrs)
        else:
            weight = tl.load(w_ptrs, mask=(n < SPEC.outputs)[:, None] & (k < C), other=0.0)
        factor, weight = rounded(pixels.to(SPEC.operand), SPEC), rounded(weight.to(SPEC.operand), SPEC)
        total = tl.dot(factor, weight.T, total, input_precision=SPEC.precision, out_dtype=SPEC.accumulator)
    return total


@triton.jit
def _load_vector(ptr, n, default: tl.constexpr, SPEC: tl.constexpr):
    """Returns a number of each output in float32; the default where there is no vector."""
    if ptr is None:
        vector = tl.full([SPEC.width], default, tl.float32)
    else:
        vector = tl.load(ptr + n, mask=n < SPEC.outputs, other=0.0).to(tl.float32)
    return vector


@triton.jit(do_not_specialize=["rows", "height", "width"])
def _fusion_conv_kernel(
    x_ptr, other_ptr, w_ptr, bias_ptr, gamma_ptr, beta_ptr, mean_ptr, var_ptr, out_ptr, eps, rows, height,
    width, SPEC: tl.constexpr,
):  # fmt: skip
    """Writes some outputs of some pixels; weights are (9, outputs, inputs of all maps)."""
    grid_dependency_synchronize()
    M: tl.constexpr = SPEC.block_m
    D: tl.constexpr = SPEC.outputs
    first = tl.program_id(0) * M
    row = first + tl.arange(0, M)
    inside = row < rows
    y, x = row // width % height, row % width
    n = tl.program_id(1) * SPEC.width + tl.arange(0, SPEC.width)
    start = first.to(tl.int64)
    total = tl.zeros([M, SPEC.width], SPEC.accumulator)
    total = _add_map(total, x_ptr + start * SPEC.inputs, w_ptr, y, x, inside, n, height, width, 0, SPEC)
    if other_ptr is not None:
        other_ptr += start * SPEC.inputs
        total = _add_map(total, other_ptr, w_ptr, y, x, inside, n, height, width, 1, SPEC)
    variance = _load_vector(var_ptr, n, 1.0, SPEC)
    scale = _load_vector(gamma_ptr, n, 1.0, SPEC) / tl.sqrt_rn(variance + eps)
    shift = _load_vector(bias_ptr, n, 0.0, SPEC) - _load_vector(mean_ptr, n, 0.0, SPEC)
    shift = shift * scale + _load_vector(beta_ptr, n, 0.0, SPEC)
    total = total * scale[None, :] + shift[None, :]
    total = tl.where(total < 0.0, 0.0, total)  # NaN stays, as by PyTorch
    mask = inside[:, None] & (n < D)[None, :]
    out_ptrs = out_ptr + start * D + (tl.arange(0, M) * D)[:, None] + n[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


def _convolve(maps: list[Tensor], taps: Tensor, conv: NormalizedConv) -> Tensor:
    """Returns relu(BatchNorm(convolution)) of maps (B, H, W, C) side by side, (B, H, W, outputs)."""
    x = maps[0]
    batch, height, width, inputs = x.shape
    outputs, rows = taps.shape[1], batch * height * width
    config: Product = launch.configuration(
        "fusion_conv", x.dtype, (9 * taps.shape[2], outputs), rows, launching.chip(x.device)
    )
    types = product_types(x.dtype, tf32=modes.convolves_in_tf32(x))
    spec = ConvSpec(
        inputs=inputs,
        maps=len(maps),
        outputs=outputs,
        block_m=config.block_m,
        width=part_width(outputs, config.width, config.parts),
        step=min(config.block_k, padded(inputs)),
        operand=types["operand"],
        accumulator=types["accumulator"],
        precision=types["precision"],
    )
    out = x.new_empty(batch, height, width, outputs)
    vectors = dict(zip(("bias", "gamma", "beta", "mean", "var"), map(contiguous, conv[1:6]), strict=True))
    launching.launch(
        _fusion_conv_kernel, (-(-rows // spec.block_m), -(-outputs // spec.width)), on=x,
        options=config.options,
        x_ptr=x, other_ptr=maps[1] if len(maps) > 1 else None, w_ptr=taps, out_ptr=out, eps=float(conv.eps),
        rows=rows, height=height, width=width, SPEC=spec,
        **{f"{name}_ptr": vector for name, vector in vectors.items()},
    )  # fmt: skip
    return out


# The weighted sum --------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "height", "width"])
def _fusion_sum_kernel(
    hidden_ptr, last_ptr, bias_ptr, x_ptr, up_ptr, out_ptr, rows, height, width, E: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, OF_E: tl.constexpr, OF_C: tl.constexpr,
):  # fmt: skip
    """Writes M pixels of the result."""
    grid_dependency_synchronize()
    first = tl.program_id(0) * M
    place = tl.arange(0, M)
    row = first + place
    inside = row < rows
    y, x = row // width % height, row % width
    start = first.to(tl.int64)
    hidden_ptr += start * E
    ours = tl.zeros([M, OF_E], tl.float32)
    others = tl.zeros([M, OF_E], tl.float32)
    for channel in range(0, E, OF_E):
        e = channel + tl.arange(0, OF_E)
        for tap in range(9):
            dy, dx = tap // 3 - 1, tap % 3 - 1
            mask = inside & (y + dy >= 0) & (y + dy < height) & (x + dx >= 0) & (x + dx < width)
            ptrs = hidden_ptr + ((place + (dy * width + dx)) * E)[:, None] + e[None, :]
            hidden = tl.load(ptrs, mask=mask[:, None] & (e < E)[None, :], other=0.0).to(tl.float32)
            w_ptrs = last_ptr + e * 9 + tap
            ours += hidden * tl.load(w_ptrs, mask=e < E, other=0.0).to(tl.float32)[None, :]
            others += hidden * tl.load(w_ptrs + E * 9, mask=e < E, other=0.0).to(tl.float32)[None, :]
    of_x, of_up = tl.sum(ours, 1), tl.sum(others, 1)
    if bias_ptr is not None:
        of_x += tl.load(bias_ptr).to(tl.float32)
        of_up += tl.load(bias_ptr + 1).to(tl.float32)
    of_x, of_up = 1.0 / (1.0 + tl.exp(-of_x)), 1.0 / (1.0 + tl.exp(-of_up))
    x_ptr += start * C
    up_ptr += start * C
    out_ptr += start * C
    for channel in range(0, C, OF_C):
        c = channel + tl.arange(0, OF_C)[None, :]
        mask = inside[:, None] & (c < C)
        at = place[:, None] * C + c
        fused = of_x[:, None] * tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        fused += of_up[:, None] * tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, fused.to(out_ptr.dtype.element_ty), mask=mask)


def _sum(hidden: Tensor, last_weight: Tensor, last_bias: Tensor | None, x: Tensor, up: Tensor) -> Tensor:
    """Returns the fused features (B, H·W, C)."""
    batch, height, width, channels = x.shape
    rows, of_hidden = batch * height * width, hidden.shape[3]
    out = x.new_empty(batch, height * width, channels)
    launching.launch(
        _fusion_sum_kernel, (-(-rows // _PIXELS),), on=x, options={"num_warps": 4, "num_stages": 1},
        hidden_ptr=hidden, last_ptr=last_weight, bias_ptr=last_bias, x_ptr=x, up_ptr=up, out_ptr=out,
        rows=rows, height=height, width=width, E=of_hidden, C=channels, M=_PIXELS,
        OF_E=min(_CHANNELS, padded(of_hidden)), OF_C=min(_CHANNELS, padded(channels)),
    )  # fmt: skip
    return out


# The backend -------------------------------------------------------------------------------------------------


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x = call.x
    batch, channels, height, width = x.shape
    if modes.wants_gradient(*checks.tensors_of(call)):
        return "gradients are not computed"
    if torch.compiler.is_compiling():
        return "is not for torch.compile"
    if modes.autocast_enabled(x):
        return "is not for autocast: convert the model to half precision instead"
    if batch == 0:
        return "the batch is empty"
    if x.dtype == torch.float64:
        return "serves float32, bfloat16 and float16"
    widest = max(channels, call.first.weight.shape[0], call.second.weight.shape[0])
    weights = max(call.first.weight.numel(), call.second.weight.numel())
    if max(height * width * widest, batch * height * width + 2**16, weights + 2**16) >= 2**31:
        return "an image, all pixels or the weights have nearly 2³¹ elements or more"
    return None


@planned_with_operators
def selective_fusion(call: Record) -> Tensor:
    """Computes ``cvt_kernels.selective_fusion`` for checked arguments."""
    x, other = (image.permute(0, 2, 3, 1).contiguous() for image in (call.x, call.other))
    first, second = call.first, call.second
    up, *taps = _start(other, first.weight.contiguous(), second.weight.contiguous())
    hidden = _convolve([_convolve([x, up], taps[0], first)], taps[1], second)
    return _sum(hidden, call.last_weight.contiguous(), contiguous(call.last_bias), x, up)
