"""The backward kernel of ``depthwise_conv_gelu`` and the launches of its gradients.

With a = conv(x) + bias, the gradient of the convolution's output is da = dy · gelu'(a). It is written, and
gives the gradients of the bias, Σ da, of a tap, Σ x · da over the pixels that the tap reaches, and of x, the
convolution of da with the flipped taps, a sliding-row kernel of ``conv_projection``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ....launch import launching
from ...conv_projection.triton.backward import sum_regions
from ...conv_projection.triton.common import maybe_contiguous
from ...conv_projection.triton.sliding import (
    SIZES,
    add_row,
    column_limits,
    load_above,
    load_at,
    load_outputs,
    locate_strip,
    output_lanes,
    rows_of,
    store_row,
    widen,
)
from ...conv_projection.triton.sliding_backward import (
    add_weight_gradients,
    channels_of,
    sliding_backward_input,
    store_weight_gradients,
    zeros,
)
from ...graph_operators import launcher
from ...triton_gelu import derivative_half
from ...triton_launch import accumulator_dtype, grid_dependency_synchronize
from .common import ConvGeluTiling, geometry_of
from .forward import load_halved


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
    start, taps = load_halved(w_ptr, bias_ptr, place, LANES, SPEC)
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

    Those of weight and bias are one tensor; :func:`parameters_of` gives each.
    """
    dy, x = dy.contiguous(), maybe_contiguous(x)
    has_bias, channels = bias is not None, x.shape[2]
    tiling = ConvGeluTiling.of("bwd_conv", x, grid, approximate, (weight, dy), has_bias=has_bias)
    da = x.new_empty(x.shape)
    partial = x.new_empty(9 + has_bias, tiling.sliding.regions, channels, dtype=accumulator_dtype(x))
    launching.launch(
        _depthwise_conv_gelu_bwd_conv_kernel, (tiling.sliding.programs,), on=x,
        options=tiling.sliding.options,
        x_ptr=x, w_ptr=weight, bias_ptr=weight if bias is None else bias, dy_ptr=dy, da_ptr=da,
        partial_ptr=partial, regions=tiling.sliding.regions, **tiling.others,
    )  # fmt: skip
    sums, dx = sum_regions(partial, (9, 1) if has_bias else (9,), x.dtype), x.new_empty(x.shape)
    sliding_backward_input(dx, geometry_of(grid), (weight,), (da,), (dy,))
    return dx, sums


def parameters_of(sums: Tensor, channels: int) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of weight and bias, None without a bias, as views of one tensor of both."""
    dweight, *dbias = sums.split([9 * channels, *[channels] * (sums.shape[0] > 9 * channels)])
    return dweight.view(channels, 1, 3, 3), dbias[0] if dbias else None
