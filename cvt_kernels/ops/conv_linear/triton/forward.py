"""The kernel of ``conv_linear``, its launch, and the backend's functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import modes
from ....backends import Record
from ....launch import launching
from ...conv_projection.triton.common import Geometry, Parameters, class_tokens, maybe_contiguous
from ...conv_projection.triton.sliding import load_scaled, load_vector, units, why_not_sliding, widen
from ...graph_operators import launcher
from ...linear.triton.forward import grouped_linear_forward
from ...triton_launch import grid_dependency_synchronize, rounded
from .. import stacked
from .common import MAX_CHANNELS, ConvLinearTiling

# The convolutions -----------------------------------------------------------------------------------------


class Channels(NamedTuple):
    """The channels of a chunk [1, BC] and the units of one access [1, units], each with its mask."""

    c: Any
    c_mask: Any
    unit: Any
    unit_mask: Any


@triton.jit
def _channels_at(chunk, CHANNELS: tl.constexpr, LANES: tl.constexpr):
    """Returns the :class:`Channels` of a chunk."""
    BC: tl.constexpr = LANES.channels
    SIZE: tl.constexpr = 2 if LANES.is_packed else 1
    c = chunk * BC + tl.arange(0, BC)[None, :]
    unit = chunk * (BC // SIZE) + tl.arange(0, BC // SIZE)[None, :]
    return Channels(c=c, c_mask=c < CHANNELS, unit=unit, unit_mask=unit * SIZE < CHANNELS)


@triton.jit
def _fold(channels, w_ptr, gamma_ptr, beta_ptr, mean_ptr, var_ptr, eps, LANES: tl.constexpr):
    """Returns a branch's initial sum and taps, with BatchNorm folded into them."""
    scale = load_vector(gamma_ptr, channels, LANES) * tl.rsqrt(load_vector(var_ptr, channels, LANES) + eps)
    start = load_vector(beta_ptr, channels, LANES) - load_vector(mean_ptr, channels, LANES) * scale
    return start, load_scaled(w_ptr, channels, scale, LANES)


@triton.jit
def _of_branch(values, twin, N: tl.constexpr, GROUPS: tl.constexpr, INDEX: tl.constexpr):
    """Returns the value of a program's branch, the Nth of its group or a twin of it; None for None."""
    GROUP: tl.constexpr = GROUPS[INDEX]
    value = values[GROUP.branches[N]]
    if value is not None:
        for i in tl.static_range(len(GROUP.twins)):
            value = tl.where(twin == i + 1, values[GROUP.twins[i]], value)
    return value


@triton.jit
def _fold_group(
    channels, twin, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, epss,
    GROUPS: tl.constexpr, INDEX: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Returns the results of :func:`_fold` for each branch of a group, as two tuples."""
    GROUP: tl.constexpr = GROUPS[INDEX]
    starts = ()
    taps = ()
    for n in tl.static_range(len(GROUP.branches)):
        start, folded = _fold(
            channels,
            _of_branch(w_ptrs, twin, n, GROUPS, INDEX),
            _of_branch(gamma_ptrs, twin, n, GROUPS, INDEX),
            _of_branch(beta_ptrs, twin, n, GROUPS, INDEX),
            _of_branch(mean_ptrs, twin, n, GROUPS, INDEX),
            _of_branch(var_ptrs, twin, n, GROUPS, INDEX),
            _of_branch(epss, twin, n, GROUPS, INDEX),
            LANES,
        )
        starts = starts + (start,)
        taps = taps + (folded,)
    return starts, taps


class Place(NamedTuple):
    """The places of some strips: their images, first output rows and columns."""

    image: Any
    row: Any
    col: Any


@triton.jit
def _locate(strip, GROUPS: tl.constexpr, INDEX: tl.constexpr):
    """Returns the :class:`Place` of strips, which are numbered row by row and image by image."""
    GROUP: tl.constexpr = GROUPS[INDEX]
    return Place(
        image=strip // (GROUP.strip_rows * GROUP.strip_columns),
        row=strip // GROUP.strip_columns % GROUP.strip_rows * GROUP.rows,
        col=strip % GROUP.strip_columns * GROUP.columns,
    )


@triton.jit
def _add_pixels(sums, pixels, taps, J: tl.constexpr, GROUPS: tl.constexpr, INDEX: tl.constexpr):
    """Adds row J of a strip's pixels to the sums that it reaches, of branches × rows × columns."""
    GROUP: tl.constexpr = GROUPS[INDEX]
    STRIDE: tl.constexpr = GROUP.stride
    ROWS: tl.constexpr = GROUP.rows
    COLUMNS: tl.constexpr = GROUP.columns
    added = ()
    for n in tl.static_range(len(GROUP.branches)):
        for r in tl.static_range(ROWS):
            for column in tl.static_range(COLUMNS):
                total = sums[(n * ROWS + r) * COLUMNS + column]
                if r * STRIDE <= J and J - r * STRIDE < 3:
                    for k in tl.static_range(3):
                        pixel = pixels[column * STRIDE + k]
                        total = tl.fma(pixel, taps[n][(J - r * STRIDE) * 3 + k], total)
                added = added + (total,)
    return added


@triton.jit
def _load_where(ptrs, masks):
    """Loads where all masks of a tuple hold, zeros elsewhere; an empty tuple loads everywhere."""
    if len(masks) == 0:
        loaded = tl.load(ptrs)
    else:
        mask = masks[0]
        for i in tl.static_range(1, len(masks)):
            mask = mask & masks[i]
        loaded = tl.load(ptrs, mask=mask, other=0)
    return loaded


@triton.jit
def _convolve(
    x_ptr, place, starts, taps, channels, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, INDEX: tl.constexpr,
    LANES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Returns the outputs of strips [P, 1] of every branch: branches × rows × columns tiles [P, BC]."""
    GROUP: tl.constexpr = GROUPS[INDEX]
    DISTANCE: tl.constexpr = STEP // 2 if LANES.is_packed else STEP
    STRIDE: tl.constexpr = GROUP.stride
    ROWS: tl.constexpr = GROUP.rows
    COLUMNS: tl.constexpr = GROUP.columns
    row = place.row * STRIDE
    col = place.col * STRIDE
    token = (row - 1) * SPEC.width + col - 1
    lane = token * DISTANCE + channels.unit
    ptrs = units(x_ptr + SPEC.class_tokens * STEP + place.image.to(tl.int64) * stride_b, LANES) + lane
    column_masks = ()
    for k in tl.static_range((COLUMNS - 1) * STRIDE + 3):
        masks = ()
        if k == 0:
            masks = masks + (col > 0,)
        elif (GROUP.strip_columns - 1) * COLUMNS * STRIDE + k > SPEC.width:
            masks = masks + (col + (k - 1) < SPEC.width,)
        if CHANNELS % LANES.channels:
            masks = masks + (channels.unit_mask,)
        column_masks = column_masks + (masks,)
    sums = ()
    for n in tl.static_range(len(GROUP.branches)):
        for _ in tl.static_range(ROWS * COLUMNS):
            sums = sums + (starts[n],)
    for j in tl.static_range((ROWS - 1) * STRIDE + 3):
        row_masks = ()
        if j == 0:
            row_masks = row_masks + (row > 0,)
        elif (GROUP.strip_rows - 1) * ROWS * STRIDE + j > SPEC.height:
            row_masks = row_masks + (row + (j - 1) < SPEC.height,)
        raw = ()
        for k in tl.static_range((COLUMNS - 1) * STRIDE + 3):
            raw = raw + (_load_where(ptrs + (j * SPEC.width + k) * DISTANCE, row_masks + column_masks[k]),)
        sums = _add_pixels(sums, widen(raw, LANES), taps, j, GROUPS, INDEX)
    return sums


@triton.jit
def _stacked(tiles, LANES: tl.constexpr):
    """Stacks tiles [P, BC] to one [P · tiles, BC], the rows of a strip one after the other."""
    P: tl.constexpr = LANES.pairs
    BC: tl.constexpr = LANES.channels
    COUNT: tl.constexpr = len(tiles)
    parts = tiles
    for _ in tl.static_range(8):  # more than it needs
        if len(parts) > 1:
            joined = ()
            for i in tl.static_range(len(parts) // 2):
                joined = joined + (tl.join(parts[i], parts[i + len(parts) // 2]),)
            parts = joined
    return tl.permute(tl.reshape(parts[0], [P, BC, COUNT]), [0, 2, 1]).reshape([P * COUNT, BC])


# The products ---------------------------------------------------------------------------------------------


@triton.jit
def _zeros(M: tl.constexpr, BRANCH: tl.constexpr, LAYERS: tl.constexpr, SPEC: tl.constexpr):
    """Returns an accumulator of M rows for each block of a branch's outputs."""
    accs = ()
    for b in tl.static_range(len(LAYERS[BRANCH].widths)):
        accs = accs + (_zero_block(M, LAYERS[BRANCH].widths[b], SPEC),)
    return accs


@triton.jit
def _zero_block(M: tl.constexpr, WIDTH: tl.constexpr, SPEC: tl.constexpr):
    return tl.zeros([M, WIDTH], SPEC.accumulator)


@triton.jit
def _multiply(
    accs, operand, chunk, linear_ptr,
    BRANCH: tl.constexpr, CHANNELS: tl.constexpr, LAYERS: tl.constexpr,
    LANES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Adds the product of a chunk of channels [M, BC] with its linear weights to the accumulators."""
    BC: tl.constexpr = LANES.channels
    c = chunk * BC + tl.arange(0, BC)
    added = ()
    for b in tl.static_range(len(LAYERS[BRANCH].widths)):
        n = b * LAYERS[BRANCH].widths[0] + tl.arange(0, LAYERS[BRANCH].widths[b])
        ptrs = linear_ptr + n[:, None] * CHANNELS + c[None, :]
        if LAYERS[BRANCH].outputs % LAYERS[BRANCH].widths[b] == 0 and CHANNELS % BC == 0:
            weight = tl.load(ptrs)
        else:
            weight = tl.load(
                ptrs, mask=(n < LAYERS[BRANCH].outputs)[:, None] & (c < CHANNELS)[None, :], other=0.0
            )
        product = tl.dot(
            rounded(operand, SPEC), tl.trans(rounded(weight.to(SPEC.operand), SPEC)), accs[b],
            input_precision=SPEC.precision, out_dtype=SPEC.accumulator,
        )  # fmt: skip
        added = added + (product,)
    return added


@triton.jit
def _store(accs, bias_ptr, y_ptrs, row_mask, BRANCH: tl.constexpr, LAYERS: tl.constexpr, SPEC: tl.constexpr):
    """Writes finished rows, plus the bias, to pointers [M, 1]."""
    for b in tl.static_range(len(LAYERS[BRANCH].widths)):
        n = b * LAYERS[BRANCH].widths[0] + tl.arange(0, LAYERS[BRANCH].widths[b])[None, :]
        total = accs[b]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + n, mask=n < LAYERS[BRANCH].outputs, other=0.0).to(SPEC.accumulator)
        mask = row_mask
        if LAYERS[BRANCH].outputs % LAYERS[BRANCH].widths[b]:
            mask = row_mask & (n < LAYERS[BRANCH].outputs)
        tl.store(y_ptrs + n, total.to(SPEC.element), mask=mask)


@triton.jit
def _run_group(
    job, twin, length, batch, x_ptr, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, linear_ptrs,
    bias_ptrs, y_ptrs, epss, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, LAYERS: tl.constexpr,
    GROUPS: tl.constexpr, INDEX: tl.constexpr, LANES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes the tiles of a job of a group of branches, or of a twin."""
    GROUP: tl.constexpr = GROUPS[INDEX]
    P: tl.constexpr = LANES.pairs
    BRANCHES: tl.constexpr = len(GROUP.branches)
    PER_STRIP: tl.constexpr = GROUP.rows * GROUP.columns
    PER_IMAGE: tl.constexpr = GROUP.strip_rows * GROUP.strip_columns
    TOKENS: tl.constexpr = GROUP.height * GROUP.width + SPEC.class_tokens
    strips = batch * PER_IMAGE
    if SPEC.chunks == 1:
        channels = _channels_at(0, CHANNELS, LANES)
        starts, taps = _fold_group(
            channels, twin, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, epss, GROUPS, INDEX, LANES
        )
    end = tl.minimum(job * length + length, tl.cdiv(strips, P))
    for tile in tl.range(job * length, end, num_stages=1):
        # The last strips of all are computed again rather than none.
        strip = tl.minimum(tile * P + tl.arange(0, P)[:, None], strips - 1)
        place = _locate(strip, GROUPS, INDEX)
        accs = ()  # of branches
        for n in tl.static_range(BRANCHES):
            accs = accs + (_zeros(P * PER_STRIP, GROUP.branches[n], LAYERS, SPEC),)
        for chunk in tl.range(SPEC.chunks, num_stages=1):  # pixels go to registers, not to shared memory
            if SPEC.chunks > 1:
                channels = _channels_at(chunk, CHANNELS, LANES)
                starts, taps = _fold_group(
                    channels, twin, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, epss, GROUPS, INDEX,
                    LANES,
                )  # fmt: skip
            sums = _convolve(
                x_ptr, place, starts, taps, channels, stride_b, STEP, CHANNELS, GROUPS, INDEX, LANES, SPEC
            )
            rounded = ()
            for t in tl.static_range(len(sums)):
                rounded = rounded + (sums[t].to(SPEC.element),)
            added = ()
            for n in tl.static_range(BRANCHES):
                operand = _stacked(rounded[n * PER_STRIP : (n + 1) * PER_STRIP], LANES).to(SPEC.operand)
                product = _multiply(
                    accs[n], operand, chunk, _of_branch(linear_ptrs, twin, n, GROUPS, INDEX),
                    GROUP.branches[n], CHANNELS, LAYERS, LANES, SPEC,
                )  # fmt: skip
                added = added + (product,)
            accs = added
        m = tl.arange(0, P * PER_STRIP)[:, None]
        strip = tile * P + m // PER_STRIP
        place = _locate(strip, GROUPS, INDEX)
        row = place.row + m % PER_STRIP // GROUP.columns
        col = place.col + m % GROUP.columns
        mask = (strip < strips) & (row < GROUP.height) & (col < GROUP.width)
        first_image = tile * P // PER_IMAGE
        token = (place.image - first_image) * TOKENS + SPEC.class_tokens + row * GROUP.width + col
        for n in tl.static_range(BRANCHES):
            y_ptr = _of_branch(y_ptrs, twin, n, GROUPS, INDEX) + first_image.to(tl.int64) * (
                TOKENS * LAYERS[GROUP.branches[n]].outputs
            )
            y_rows = y_ptr + token * LAYERS[GROUP.branches[n]].outputs
            bias_ptr = _of_branch(bias_ptrs, twin, n, GROUPS, INDEX)
            _store(accs[n], bias_ptr, y_rows, mask, GROUP.branches[n], LAYERS, SPEC)


@triton.jit
def _run_class_tokens(
    block, batch, x_ptr, linear_ptrs, bias_ptrs, y_ptrs, stride_b,
    CHANNELS: tl.constexpr, LAYERS: tl.constexpr,
    LANES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Computes the linear layers of the class tokens of some images."""
    image = block * SPEC.class_rows + tl.arange(0, SPEC.class_rows)[:, None]
    mask = image < batch
    x_ptrs = x_ptr + image.to(tl.int64) * stride_b
    for i in tl.static_range(len(LAYERS)):
        accs = _zeros(SPEC.class_rows, i, LAYERS, SPEC)
        for chunk in tl.range(SPEC.chunks, num_stages=1):
            c = chunk * LANES.channels + tl.arange(0, LANES.channels)[None, :]
            operand = tl.load(x_ptrs + c, mask=mask & (c < CHANNELS), other=0.0).to(SPEC.operand)
            accs = _multiply(accs, operand, chunk, linear_ptrs[i], i, CHANNELS, LAYERS, LANES, SPEC)
        y = y_ptrs[i] + image.to(tl.int64) * (LAYERS[i].tokens * LAYERS[i].outputs)
        _store(accs, bias_ptrs[i], y, mask, i, LAYERS, SPEC)


# The launch -----------------------------------------------------------------------------------------------


@triton.jit
def _job_of(number, GROUPS: tl.constexpr, INDEX: tl.constexpr, SPEC: tl.constexpr):
    """Returns the job of a program within a group, a negative number for none, and its twin, 0 for the first.

    The programs of the groups alternate, so that they read the same images at the same time.
    """
    GROUP: tl.constexpr = GROUPS[INDEX]
    turn = number % SPEC.period - GROUP.first_turn
    is_own = (turn >= 0) & (turn < GROUP.turns * (1 + len(GROUP.twins)))
    job = number // SPEC.period * GROUP.turns + turn % GROUP.turns
    return tl.where(is_own, job, -1), turn // GROUP.turns


@triton.jit(do_not_specialize=("batch", "length", "stride_b"))
def _conv_linear_fwd_kernel(
    x_ptr, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs, linear_ptrs, bias_ptrs, y_ptrs, epss,
    batch, length, stride_b,
    STEP: tl.constexpr, CHANNELS: tl.constexpr, LAYERS: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """Writes the outputs of all branches: tiles of one group per program; some do class tokens first."""
    grid_dependency_synchronize()
    number = tl.program_id(0)
    if SPEC.class_tokens:  # of a few programs, the first
        for block in tl.range(number, tl.cdiv(batch, SPEC.class_rows), tl.num_programs(0), num_stages=1):
            _run_class_tokens(
                block, batch, x_ptr, linear_ptrs, bias_ptrs, y_ptrs, stride_b, CHANNELS, LAYERS, LANES, SPEC
            )
    for g in tl.static_range(len(GROUPS)):
        job, twin = _job_of(number, GROUPS, g, SPEC)
        if job >= 0:
            _run_group(
                job, twin, length, batch, x_ptr, w_ptrs, gamma_ptrs, beta_ptrs, mean_ptrs, var_ptrs,
                linear_ptrs, bias_ptrs, y_ptrs, epss, stride_b, STEP, CHANNELS, LAYERS,
                GROUPS, g, LANES, SPEC,
            )  # fmt: skip


def _tokens(
    x: Tensor, grid: list[int], strides: list[int], epss: Any, parameters: Any, linears: list[Tensor], *_: Any
) -> list[Tensor]:
    geometry = Geometry.of(grid, strides)
    return [
        x.new_empty(x.shape[0], h * w + class_tokens(x, geometry), linear.shape[0])
        for (h, w), linear in zip(geometry.output_grids, linears, strict=True)
    ]


@launcher("conv_linear", _tokens)
def conv_linear_forward(
    x: Tensor, grid: list[int], strides: list[int], epss: list[float], parameters: list[Tensor],
    linears: list[Tensor], biases: list[Tensor | None],
) -> list[Tensor]:  # fmt: skip
    """Returns every branch (B, Tᵢ, outputs), normalized by the given statistics (C,)."""
    x, geometry = maybe_contiguous(x), Geometry.of(grid, strides)
    outs = _tokens(x, grid, strides, epss, parameters, linears)
    weights, *vectors = given = Parameters.divided(parameters)
    of_branches = zip(*vectors, biases, strict=True)
    kinds = tuple([tuple([None if t is None else t.dtype for t in each]) for each in of_branches])
    tiling = ConvLinearTiling.of(x, geometry, weights, tuple([weight.shape[0] for weight in linears]), kinds)
    launching.launch(
        _conv_linear_fwd_kernel, (tiling.programs,), on=x, options=tiling.options,
        x_ptr=x, **given.pointers(), linear_ptrs=tuple(linears), bias_ptrs=tuple(biases),
        y_ptrs=tuple(outs), epss=tuple(epss), stride_b=x.stride(0), STEP=x.stride(1), **tiling.arguments,
    )  # fmt: skip
    return outs


def why_unsupported(call: Record) -> str | None:
    """Returns why this kernel cannot serve a call, or None."""
    x, _, convs, linears = call
    if (reason := why_not_sliding(convs)) is not None:
        return reason
    batch, tokens, channels = x.shape
    outputs = [weight.shape[0] for weight, _ in linears]
    parameters = [t for conv in convs for t in (conv.weight, conv.bn_weight, conv.bn_bias)]
    if modes.wants_gradient(x, *parameters, *(t for each in linears for t in each)):
        return "there are no gradients"
    if x.numel() == 0 or 0 in outputs:
        return "the batch or an output is empty"
    if any(conv.running_mean is None for conv in convs):
        return "a branch has no running statistics"
    if max(channels, *outputs) > MAX_CHANNELS and not _is_stacked(call):
        return f"tokens have {max(channels, *outputs)} channels, more than {MAX_CHANNELS}"
    if x.is_cuda and x.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if batch * tokens >= 2**30 or tokens * max(channels, *outputs) >= 2**29:
        return "the batch has 2³⁰ tokens or more, or one image 2²⁹ elements or more"
    return None


def _is_stacked(call: Record) -> bool:
    """Returns whether ``stacked`` serves a call: by a projection and a product, or one launch of few tokens.

    Many channels leave no registers to hide the loads of a fused kernel. On an H200, it takes 185 µs for 256
    images of CvT-13 at 384 channels, the projection and three products of cuBLAS 100, for one image 49 and
    16; at 192 channels 189 and 175 for 256, 32 and 33 for 32 (where the one kernel is not worth the time to
    compile it), 14 and 21 for 8; at 64 channels 130 and 199 for 256.
    """
    batch, tokens, channels = call.x.shape
    if channels <= 64 or stacked.why_unsupported(call) is not None:
        return False
    return channels > 192 or batch * tokens > 2**14 or stacked.is_one_launch(*call)


def conv_linear(call: Record) -> tuple[Tensor, ...]:
    """Computes ``cvt_kernels.conv_linear`` for checked arguments.

    ``x`` is read in place if its channels are contiguous; otherwise it is copied first. Under autocast it
    computes in autocast's dtype.
    """
    return stacked.serve(grouped_linear_forward, call) if _is_stacked(call) else _in_one(call)


def _in_one(call: Record) -> tuple[Tensor, ...]:
    x, grid, convs, linears = call
    dtype = modes.autocast_dtype(x) or x.dtype
    x = x.to(dtype)
    products = [weight.to(dtype).contiguous() for weight, _ in linears]
    biases = [None if bias is None else bias.to(dtype).contiguous() for _, bias in linears]
    constants = list(grid), [conv.stride for conv in convs], [conv.eps for conv in convs]
    return tuple(conv_linear_forward(x, *constants, Parameters.of(x, convs).flat(), products, biases))
