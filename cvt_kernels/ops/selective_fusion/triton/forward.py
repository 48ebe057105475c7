"""The kernels of selective fusion, their launches, and the backend's function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launch, launching, modes
from ....backends import Record
from ....launch import formulas
from ....launch.records import Product
from ....records import NormalizedConv
from ...linear.triton.common import padded, part_width
from ...triton_launch import contiguous, grid_dependency_synchronize, product_types, why_not_for_inference
from ...triton_resize import source
from ...triton_tf32 import rounded

launch.register(Product, formulas.fusion_conv, "fusion_conv")

#: The numbers that a program of ``fusion_starts`` writes.
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


# Upsampling, and the convolutions' weights ----------------------------------------------------------------


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
def _load_vector(ptr, n, default: tl.constexpr, OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr):
    """Returns a number of each output in float32; the default where there is no vector."""
    if ptr is None:
        vector = tl.full([NUMBERS], default, tl.float32)
    else:
        vector = tl.load(ptr + n, mask=n < OUTPUTS, other=default).to(tl.float32)
    return vector


@triton.jit
def _store_conv(
    w_ptr, bias_ptr, gamma_ptr, beta_ptr, mean_ptr, var_ptr, taps_ptr, affine_ptr, eps, part,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Writes a part of a convolution's weights (OUTPUTS, INPUTS, 9) as (9, OUTPUTS, INPUTS).

    Those of its first outputs also write what follows the product, a factor and a summand (2, OUTPUTS).
    """
    PAIRS: tl.constexpr = INPUTS * OUTPUTS
    n = part * NUMBERS + tl.arange(0, NUMBERS)
    mask = n < 9 * PAIRS
    tl.store(taps_ptr + n, tl.load(w_ptr + n % PAIRS * 9 + n // PAIRS, mask=mask), mask=mask)
    if part * NUMBERS < OUTPUTS:
        variance = _load_vector(var_ptr, n, 1.0, OUTPUTS, NUMBERS)
        scale = _load_vector(gamma_ptr, n, 1.0, OUTPUTS, NUMBERS) / tl.sqrt_rn(variance + eps)
        shift = _load_vector(bias_ptr, n, 0.0, OUTPUTS, NUMBERS)
        shift = (shift - _load_vector(mean_ptr, n, 0.0, OUTPUTS, NUMBERS)) * scale
        shift += _load_vector(beta_ptr, n, 0.0, OUTPUTS, NUMBERS)
        tl.store(affine_ptr + n, scale, mask=n < OUTPUTS)
        tl.store(affine_ptr + OUTPUTS + n, shift, mask=n < OUTPUTS)


@triton.jit(do_not_specialize=["rows", "height", "width", "tiles"])
def _fusion_starts_kernel(
    other_ptr, up_ptr, rows, height, width, tiles,
    w0_ptr, bias0_ptr, gamma0_ptr, beta0_ptr, mean0_ptr, var0_ptr, taps0_ptr, affine0_ptr, eps0,
    w1_ptr, bias1_ptr, gamma1_ptr, beta1_ptr, mean1_ptr, var1_ptr, taps1_ptr, affine1_ptr, eps1,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    """Writes a part of the upsampled map, or of one of the convolutions: 2·C to D channels, and D to E."""
    grid_dependency_synchronize()
    PARTS: tl.constexpr = (18 * C * D + NUMBERS - 1) // NUMBERS
    program = tl.program_id(0)
    if program < tiles:
        _store_upsampled(other_ptr, up_ptr, program, rows, height, width, C, P, CHUNK)
    elif program < tiles + PARTS:
        _store_conv(
            w0_ptr, bias0_ptr, gamma0_ptr, beta0_ptr, mean0_ptr, var0_ptr, taps0_ptr, affine0_ptr, eps0,
            program - tiles, 2 * C, D, NUMBERS,
        )  # fmt: skip
    else:
        _store_conv(
            w1_ptr, bias1_ptr, gamma1_ptr, beta1_ptr, mean1_ptr, var1_ptr, taps1_ptr, affine1_ptr, eps1,
            program - tiles - PARTS, D, E, NUMBERS,
        )  # fmt: skip


class Layer(NamedTuple):
    """A convolution as ``fusion_conv`` takes it.

    Attributes:
        taps: Weights ``(9, outputs, inputs)``.
        affine: Factor and summand ``(2, outputs)`` of the product, in float32: bias and BatchNorm.
    """

    taps: Tensor
    affine: Tensor


def _start(other: Tensor, convs: tuple[NormalizedConv, NormalizedConv]) -> tuple[Tensor, Layer, Layer]:
    """Returns ``other`` (B, h, w, C) upsampled, and two convolutions."""
    batch, height, width, channels = other.shape
    up = other.new_empty(batch, 2 * height, 2 * width, channels)
    chunk = min(_CHANNELS, padded(channels))
    pixels = _NUMBERS // chunk
    rows = batch * 4 * height * width
    programs = tiles = -(-rows // pixels)
    layers, arguments = [], {}
    for i, conv in enumerate(convs):
        outputs, inputs = conv.weight.shape[:2]
        taps = other.new_empty(9, outputs, inputs)
        layers.append(Layer(taps, other.new_empty(2, outputs, dtype=torch.float32)))
        given = zip(("w", "bias", "gamma", "beta", "mean", "var"), map(contiguous, conv[:6]), strict=True)
        arguments |= {f"{name}{i}_ptr": tensor for name, tensor in given} | {f"eps{i}": float(conv.eps)}
        arguments |= {f"taps{i}_ptr": taps, f"affine{i}_ptr": layers[i].affine}
        programs += -(-taps.numel() // _NUMBERS)
    launching.launch(
        _fusion_starts_kernel, (programs,), on=other, options={"num_warps": 4},
        other_ptr=other, up_ptr=up, rows=rows, height=height, width=width, tiles=tiles, C=channels,
        D=convs[0].weight.shape[0], E=convs[1].weight.shape[0], P=pixels, CHUNK=chunk, NUMBERS=_NUMBERS,
        **arguments,
    )  # fmt: skip
    return up, layers[0], layers[1]


# A convolution with BatchNorm and ReLU --------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "height", "width"])
def _fusion_conv_kernel(
    x_ptr, other_ptr, w_ptr, affine_ptr, out_ptr, rows, height, width, SPEC: tl.constexpr
):  # fmt: skip
    """Writes some outputs of some pixels; weights are (9, outputs, inputs of all maps)."""
    grid_dependency_synchronize()
    M: tl.constexpr = SPEC.block_m
    N: tl.constexpr = SPEC.width
    C: tl.constexpr = SPEC.inputs
    D: tl.constexpr = SPEC.outputs
    STEP: tl.constexpr = SPEC.step
    STEPS: tl.constexpr = (C + STEP - 1) // STEP
    first = tl.program_id(0) * M
    place = tl.arange(0, M)
    row = first + place
    inside = row < rows
    y, x = row // width % height, row % width
    n = tl.program_id(1) * N + tl.arange(0, N)
    start = first.to(tl.int64)
    map_ptr = x_ptr + start * C
    total = tl.zeros([M, N], SPEC.accumulator)
    # One loop for both maps: two take twice as many registers.
    for step in range(SPEC.maps * 9 * STEPS):
        tap = step // STEPS
        if other_ptr is not None:
            map_ptr = tl.where(tap < 9, x_ptr, other_ptr) + start * C
        w_ptrs = w_ptr + tap // 9 * C
        tap = tap % 9
        dy, dx = tap // 3 - 1, tap % 3 - 1
        k = step % STEPS * STEP + tl.arange(0, STEP)
        mask = inside & (y + dy >= 0) & (y + dy < height) & (x + dx >= 0) & (x + dx < width)
        ptrs = map_ptr + ((place + (dy * width + dx)) * C)[:, None] + k
        w_ptrs = w_ptrs + ((tap * D + n) * (SPEC.maps * C))[:, None] + k
        if C % STEP == 0:
            pixels = tl.load(ptrs, mask=mask[:, None], other=0.0)
        else:
            pixels = tl.load(ptrs, mask=mask[:, None] & (k < C), other=0.0)
        if C % STEP == 0 and D % N == 0:
            weight = tl.load(w_ptrs)
        else:
            weight = tl.load(w_ptrs, mask=(n < D)[:, None] & (k < C), other=0.0)
        factor, weight = rounded(pixels.to(SPEC.operand), SPEC), rounded(weight.to(SPEC.operand), SPEC)
        total = tl.dot(factor, weight.T, total, input_precision=SPEC.precision, out_dtype=SPEC.accumulator)
    scale = tl.load(affine_ptr + n, mask=n < D, other=0.0)
    shift = tl.load(affine_ptr + D + n, mask=n < D, other=0.0)
    total = total * scale[None, :] + shift[None, :]
    total = tl.where(total < 0.0, 0.0, total)  # NaN stays, as by PyTorch
    mask = inside[:, None] & (n < D)[None, :]
    out_ptrs = out_ptr + start * D + (place * D)[:, None] + n[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


def _convolve(maps: list[Tensor], layer: Layer) -> Tensor:
    """Returns relu(BatchNorm(convolution)) of maps (B, H, W, C) side by side, (B, H, W, outputs)."""
    x = maps[0]
    batch, height, width, inputs = x.shape
    _, outputs, together = layer.taps.shape
    rows = batch * height * width
    config: Product = launch.configuration(
        "fusion_conv", x.dtype, (9 * together, outputs), rows, launching.chip(x.device)
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
    launching.launch(
        _fusion_conv_kernel, (-(-rows // spec.block_m), -(-outputs // spec.width)), on=x,
        options=config.options,
        x_ptr=x, other_ptr=maps[1] if len(maps) > 1 else None, w_ptr=layer.taps, affine_ptr=layer.affine,
        out_ptr=out, rows=rows, height=height, width=width, SPEC=spec,
    )  # fmt: skip
    return out


# The weighted sum -----------------------------------------------------------------------------------------


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


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
    of_x, of_up = _sigmoid(of_x), _sigmoid(of_up)
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


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x = call.x
    batch, channels, height, width = x.shape
    if (reason := why_not_for_inference(call)) is not None:
        return reason
    widest = max(channels, call.first.weight.shape[0], call.second.weight.shape[0])
    weights = max(call.first.weight.numel(), call.second.weight.numel())
    if max(height * width * widest, batch * height * width + 2**16, weights + 2**16) >= 2**31:
        return "an image, all pixels or the weights have nearly 2³¹ elements or more"
    return None


def selective_fusion(call: Record) -> Tensor:
    """Computes ``cvt_kernels.selective_fusion`` for checked arguments."""
    x, other = (image.permute(0, 2, 3, 1).contiguous() for image in (call.x, call.other))
    up, first, second = _start(other, (call.first, call.second))
    hidden = _convolve([_convolve([x, up], first)], second)
    return _sum(hidden, call.last_weight.contiguous(), contiguous(call.last_bias), x, up)
