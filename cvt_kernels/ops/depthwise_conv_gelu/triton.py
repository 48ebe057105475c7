"""The Triton kernels of ``depthwise_conv_gelu``: y = gelu(conv(x) + bias), a 3×3 convolution of each channel.

x and y are tokens (B, H·W, C), channels contiguous, in row-major order; weight is (C, 1, 3, 3). The kernels
are sliding-row kernels, as in ``conv_projection`` (its ``sliding.py``). The taps stay in registers, halved,
so that a sum is half of GELU's argument, as GELU needs it.

With a = conv(x) + bias, the gradient of the convolution's output is da = dy · gelu'(a). It gives the
gradients of the bias, Σ da, of a tap, Σ x · da over the pixels that the tap reaches, and of x.

Launches and their bytes, in units of one activation B·H·W·C of e bytes per element, halos apart:

- ``fwd``: x is read once and y written once, 2 units, where PyTorch's convolution and GELU move 4 or more.
- backward: ``bwd_conv`` recomputes a from x, reads dy, writes da, and sums the gradients of taps and bias in
  registers: 3 units. A sliding-row kernel of ``conv_projection`` then computes dx from da, if needed:
  2 units. Only x is saved.

Partial sums are added up in a fixed order: no atomics, equal bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import launch, machine, modes, reference
from ...backends import Record
from ...launch import formulas, launching
from ...launch.records import Sliding
from ..autograd import gradients_again
from ..conv_projection.triton.backward import (
    add_weight_gradients,
    channels_of,
    sliding_backward_input,
    store_weight_gradients,
    sum_regions,
    zeros,
)
from ..conv_projection.triton.common import Geometry, maybe_contiguous
from ..conv_projection.triton.sliding import (
    SIZES,
    SlidingTiling,
    add_row,
    alignment_of,
    column_limits,
    load_above,
    load_at,
    load_outputs,
    load_scaled,
    load_vector,
    locate_strip,
    output_lanes,
    rows_of,
    store_row,
    widen,
)
from ..graph_operators import launcher
from ..triton_gelu import activate_half, derivative_half
from ..triton_launch import accumulator_dtype, grid_dependency_synchronize

launch.register(Sliding, formulas.depthwise, "depthwise_conv_gelu_fwd")
launch.register(Sliding, formulas.depthwise_bwd_conv, "depthwise_conv_gelu_bwd_conv")

# Tilings --------------------------------------------------------------------------------------------------


class GeluSpec(NamedTuple):
    """The compile-time constants of a kernel besides its lanes': ``SPEC`` in the kernels."""

    approximate: str  # GELU's variant
    is_half: bool  # Whether results have 16 bits, so that erf may be approximated
    hardware: bool  # Whether special functions use the GPU's own instructions, accurate enough for 16 bits
    has_bias: bool  # Whether there is a bias


def _tiling(
    kernel: str, x: Tensor, grid: Sequence[int], approximate: str, parameters: Sequence[Tensor], *,
    has_bias: bool,
) -> SlidingTiling:  # fmt: skip
    """Returns the tiling of a kernel, ``fwd`` or ``bwd_conv``, with its SPEC among the arguments.

    The channels of ``x`` are contiguous; ``parameters`` are the other tensors that the kernel reads by units.
    """
    rows, chip = x.shape[0] * x.shape[1], launching.chip(x.device)
    config = launch.configuration(f"depthwise_conv_gelu_{kernel}", x.dtype, (x.shape[2],), rows, chip)
    if _prefers_half(config, x.shape[2], alignment_of(x, parameters)):
        config = replace(config, channels=config.channels // 2)
    tiling = SlidingTiling.by(config, x, Geometry.of(grid, (1,)), parameters)
    is_half = x.element_size() == 2
    spec = GeluSpec(approximate, is_half, is_half and not machine.INTERPRETING, has_bias)
    # There is no class token, and one convolution of stride 1.
    unused = "CLASS_TOKEN", "STRIDES"
    sizes = {name: value for name, value in tiling.arguments.items() if name not in unused}
    return tiling._replace(arguments=sizes | {"SPEC": spec})


def _prefers_half(config: Sliding, channels: int, alignment: int) -> bool:
    """Returns whether blocks of half the channels are better.

    They are where one of them holds the last channels, and where a lane would read its channels by several
    accesses, for whose addresses and masks there are no registers.
    """
    return alignment % 8 != 0 or 0 < channels % config.channels <= config.channels // 2


# Forward --------------------------------------------------------------------------------------------------


@triton.jit
def _load_halved(w_ptr, bias_ptr, place, LANES: tl.constexpr, SPEC: tl.constexpr):
    """Returns half the bias, the initial sum, and half of each tap."""
    P: tl.constexpr = LANES.pairs
    BC: tl.constexpr = LANES.channels
    start = tl.zeros([P, BC], LANES.accumulator)
    if SPEC.has_bias:
        start = load_vector(bias_ptr, place, LANES) * 0.5
    return start, load_scaled(w_ptr, place, 0.5, LANES)


@triton.jit
def _activated(halves, SPEC: tl.constexpr):
    """Returns gelu(2 · h) for each tile h."""
    APPROXIMATE: tl.constexpr = SPEC.approximate
    tiles = ()
    for n in tl.static_range(len(halves)):
        tiles = tiles + (activate_half(halves[n], APPROXIMATE, SPEC.is_half, SPEC.hardware),)
    return tiles


@triton.jit
def _begin(start, taps, above, here):
    """Returns the sums of two rows of outputs, begun by the rows of pixels ``above`` and ``here``."""
    upper = add_row(add_row((start, start), above, taps, 0), here, taps, 1)
    return upper, add_row((start, start), here, taps, 0)


@triton.jit(do_not_specialize=SIZES)
def _depthwise_conv_gelu_fwd_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr,
    batch, groups, height, width, strips, strip_rows, col_blocks, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of a strip of some images."""
    grid_dependency_synchronize()
    place = locate_strip(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, LANES)
    start, taps = _load_halved(w_ptr, bias_ptr, place, LANES, SPEC)
    limits = column_limits(place.col, width, height, place.c_mask, 0, 2)
    lane = place.col * CHANNELS + place.c
    for n in range(place.images):
        image = place.first_image + n * groups
        rows = rows_of(x_ptr + image * stride_b, place, height, width, STEP, LANES)
        y = y_ptr + image * (height * width) * CHANNELS
        above = widen(load_above(rows, place.first_row, STEP, LANES), LANES)
        here = widen(load_at(rows, place.first_row, STEP, LANES), LANES)
        upper, lower = _begin(start, taps, above, here)
        for row in range(place.first_row, place.end_row, 2):
            below_raw = load_at(rows, row + 1, STEP, LANES)
            last_raw = load_at(rows, row + 2, STEP, LANES)
            below = widen(below_raw, LANES)
            last = widen(last_raw, LANES)
            upper = _activated(add_row(upper, below, taps, 2), SPEC)
            lower = _activated(add_row(add_row(lower, below, taps, 1), last, taps, 2), SPEC)
            y_row = y + row * width * CHANNELS
            store_row(y_row, lane, upper, limits, row, CHANNELS)
            store_row(y_row + width * CHANNELS, lane, lower, limits, row + 1, CHANNELS)
            upper, lower = _begin(start, taps, below, last)


def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@launcher("triton_depthwise_conv_gelu", _like)
def conv_gelu_forward(
    x: Tensor, grid: list[int], weight: Tensor, bias: Tensor | None, approximate: str
) -> Tensor:
    """Returns y for tokens ``x`` and contiguous parameters of the same dtype."""
    x = maybe_contiguous(x)
    tiling = _tiling("fwd", x, grid, approximate, (weight,), has_bias=bias is not None)
    y = x.new_empty(x.shape)
    bias_ptr = weight if bias is None else bias
    tiling.launch(_depthwise_conv_gelu_fwd_kernel, x, w_ptr=weight, bias_ptr=bias_ptr, y_ptr=y)
    return y


# Backward -------------------------------------------------------------------------------------------------


@triton.jit
def _gradients_of_sums(window, raw_dys, start, taps, LANES: tl.constexpr, SPEC: tl.constexpr):
    """Returns da of a lane's two outputs of a row, from three rows of pixels and the raw gradients of y."""
    APPROXIMATE: tl.constexpr = SPEC.approximate
    dys = widen(raw_dys, LANES)
    halves = (start, start)
    for a in tl.static_range(3):
        halves = add_row(halves, window[a], taps, a)
    das = ()
    for n in tl.static_range(2):
        das = das + (dys[n] * derivative_half(halves[n], APPROXIMATE, SPEC.is_half, SPEC.hardware),)
    return das


@triton.jit(do_not_specialize=SIZES)
def _depthwise_conv_gelu_bwd_conv_kernel(
    x_ptr, w_ptr, bias_ptr, dy_ptr, da_ptr, partial_ptr,
    batch, groups, height, width, strips, strip_rows, col_blocks, stride_b, regions,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Writes da of a strip of some images, and its share of the gradients of taps and bias.

    The partial sums are (10, regions, C), the bias's last.
    """
    grid_dependency_synchronize()
    place = locate_strip(batch, groups, height, strips, strip_rows, col_blocks, CHANNELS, LANES)
    start, taps = _load_halved(w_ptr, bias_ptr, place, LANES, SPEC)
    limits = column_limits(place.col, width, height, place.c_mask, 0, 2)
    lane = place.col * CHANNELS + place.c
    dws = zeros(9, LANES)
    (dbias,) = zeros(1, LANES)
    for n in range(place.images):
        image = place.first_image + n * groups
        first = image * (height * width) * CHANNELS
        rows = rows_of(x_ptr + image * stride_b, place, height, width, STEP, LANES)
        dys = output_lanes(dy_ptr + first, place, 1, False, CHANNELS, LANES)
        above = widen(load_above(rows, place.first_row, STEP, LANES), LANES)
        here = widen(load_at(rows, place.first_row, STEP, LANES), LANES)
        for row in range(place.first_row, place.end_row, 2):
            raw_below = load_at(rows, row + 1, STEP, LANES)
            raw_last = load_at(rows, row + 2, STEP, LANES)
            below = widen(raw_below, LANES)
            last = widen(raw_last, LANES)
            window = (above, here, below, last)
            for r in tl.static_range(2):
                raw_dys = load_outputs(dys, row + r, width, rows.limits, 1, False, CHANNELS, LANES)
                own = (window[r], window[r + 1], window[r + 2])
                das = _gradients_of_sums(own, raw_dys, start, taps, LANES, SPEC)
                store_row(da_ptr + first + (row + r) * width * CHANNELS, lane, das, limits, row + r, CHANNELS)
                dws = add_weight_gradients(dws, own, das)
                if SPEC.has_bias:
                    dbias += das[0] + das[1]
            above = below
            here = last
    plane = tl.cast(regions, tl.int64) * CHANNELS
    partial_ptr += place.region.to(tl.int64) * CHANNELS
    c = channels_of(place.region, CHANNELS, LANES)
    store_weight_gradients(partial_ptr, plane, dws, c, CHANNELS, LANES)
    if SPEC.has_bias:
        tl.store(partial_ptr + 9 * plane + c, tl.sum(dbias, axis=0, keep_dims=True), mask=c < CHANNELS)


def _gradients_like(dy: Any, x: Tensor, grid: Any, weight: Any, bias: Any, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[2] * (9 if bias is None else 10))


@launcher("triton_depthwise_conv_gelu_backward", _gradients_like)
def conv_gelu_backward(
    dy: Tensor, x: Tensor, grid: list[int], weight: Tensor, bias: Tensor | None, approximate: str
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the parameters.

    Those of weight and bias are one tensor; :func:`_parameters_of` gives each.
    """
    dy, x = dy.contiguous(), maybe_contiguous(x)
    has_bias, channels = bias is not None, x.shape[2]
    tiling = _tiling("bwd_conv", x, grid, approximate, (weight, dy), has_bias=has_bias)
    da = x.new_empty(x.shape)
    partial = x.new_empty(9 + has_bias, tiling.regions, channels, dtype=accumulator_dtype(x))
    tiling.launch(
        _depthwise_conv_gelu_bwd_conv_kernel, x, w_ptr=weight, bias_ptr=weight if bias is None else bias,
        dy_ptr=dy, da_ptr=da, partial_ptr=partial, regions=tiling.regions,
    )  # fmt: skip
    sums, dx = sum_regions(partial, (9, 1) if has_bias else (9,), x.dtype), x.new_empty(x.shape)
    sliding_backward_input(dx, Geometry.of(grid, (1,)), (weight,), (da,), (dy,))
    return dx, sums


def _parameters_of(sums: Tensor, channels: int) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of weight and bias, None without a bias, as views of one tensor of both."""
    dweight, *dbias = sums.split([9 * channels, *[channels] * (sums.shape[0] > 9 * channels)])
    return dweight.view(channels, 1, 3, 3), dbias[0] if dbias else None


class _DepthwiseConvGelu(torch.autograd.Function):
    """Autograd function of (x, grid, weight, bias, approximate)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grid: tuple[int, int], weight: Tensor, bias: Tensor | None, approximate: str
    ) -> Tensor:
        """Saves x and the parameters."""
        ctx.save_for_backward(x, weight, bias)
        ctx.settings = grid, approximate
        return conv_gelu_forward(x, list(grid), weight, bias, approximate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients of x and the parameters."""
        x, weight, bias = ctx.saved_tensors
        grid, approximate = ctx.settings
        if torch.is_grad_enabled():

            def formula(x: Tensor, *parameters: Any) -> Tensor:
                return reference.depthwise_conv_gelu(x, grid, *parameters, approximate=approximate)

            dx, *others = gradients_again(formula, (x, weight, bias), dy)
            return dx, None, *others, None
        dx, sums = conv_gelu_backward(dy, x, list(grid), weight, bias, approximate)
        return dx, None, *_parameters_of(sums, x.shape[2]), None


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x = call.x
    if x.numel() == 0:
        return "the batch is empty"
    if x.is_cuda and x.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if x.shape[1] * x.shape[2] >= 2**31:
        return "one image has 2³¹ elements or more"
    return None


def depthwise_conv_gelu(call: Record) -> Tensor:
    """Computes ``cvt_kernels.depthwise_conv_gelu`` for checked arguments.

    ``x`` is read in place if its channels are contiguous; otherwise it is copied first. Under autocast it
    computes in autocast's dtype, as a convolution does.
    """
    x, grid, weight, bias, approximate = call
    dtype = modes.autocast_dtype(x) or x.dtype
    x, weight = x.to(dtype), weight.to(dtype).contiguous()
    bias = None if bias is None else bias.to(dtype).contiguous()
    if modes.wants_gradient(x, weight, bias):  # an autograd function takes the host long
        return _DepthwiseConvGelu.apply(x, grid, weight, bias, approximate)
    return conv_gelu_forward(x, list(grid), weight, bias, approximate)
