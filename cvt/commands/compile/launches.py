"""The models and operators that are compiled, and the launches of Triton kernels that each stage makes.

The launchers run on tensors without memory (``device="meta"``), and their launches are recorded.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cvt_kernels import backends, machine

from ...config import PRESETS, default_image_size


class Embedding(NamedTuple):
    """The convolutional token embedding at the start of a stage.

    Attributes:
        size: Height and width of the images or maps that it reads.
        in_channels: Their channels.
        kernel_size, stride, padding: Those of its convolution.
    """

    size: tuple[int, int]
    in_channels: int
    kernel_size: int
    stride: int
    padding: int


class Stage(NamedTuple):
    """The shape that the attention blocks of a stage work on.

    Attributes:
        grid: Height and width, in tokens.
        channels: Channels of a token.
        class_tokens: 1 where a class token precedes the grid, else 0.
        embedding: What makes these tokens.
    """

    grid: tuple[int, int]
    channels: int
    class_tokens: int
    embedding: Embedding


class HiddenStage(NamedTuple):
    """The shape that the Mix-FFNs of a stage work on.

    Attributes:
        grid: Height and width, in tokens.
        channels: Channels between the two linear layers.
    """

    grid: tuple[int, int]
    channels: int


class Pyramid(NamedTuple):
    """The facts of a model with Mix-FFNs; the grid of its first stage is a fourth of the image.

    Attributes:
        image_size: Pixels of a side, as the model is mostly used.
        hidden: Channels between the two linear layers, by stage.
    """

    image_size: int
    hidden: tuple[int, ...]


#: SegFormer-B1 to B5 have the same Mix-FFNs, as have PVT v2-B2 to B4.
PYRAMIDS = {
    "segformer_b0": Pyramid(512, (128, 256, 640, 1024)),
    "segformer_b5": Pyramid(512, (256, 512, 1280, 2048)),
    "pvt_v2_b2": Pyramid(224, (512, 1024, 1280, 2048)),
}
#: The operators of these models; all others are of ``PRESETS``.
PYRAMID_OPERATORS = ("depthwise_conv_gelu",)


def image_size_of(model: str) -> int:
    """Returns the pixels of a side of a model's own images."""
    return PYRAMIDS[model].image_size if model in PYRAMIDS else default_image_size(model)


def is_of(operator: str, model: str) -> bool:
    """Returns whether a model has an operator."""
    return (operator in PYRAMID_OPERATORS) == (model in PYRAMIDS)


def stages_of(model: str, image_size: int) -> Sequence[Stage | HiddenStage]:
    """Returns the stages of a model of ``PRESETS`` or ``PYRAMIDS``, for square images."""
    if model not in PYRAMIDS:
        return stages(model, image_size)
    sides = (-(-image_size // (4 << i)) for i in itertools.count())
    hidden = PYRAMIDS[model].hidden
    return [HiddenStage((side, side), channels) for side, channels in zip(sides, hidden, strict=False)]


def stages(model: str, image_size: int | None = None) -> list[Stage]:
    """Returns the stages of a model of ``PRESETS``, for square images of its own size or another."""
    height = width = image_size or default_image_size(model)
    shapes = []
    for stage in PRESETS[model].stages:
        embedding = Embedding(
            (height, width), stage.in_chans, stage.patch_size, stage.patch_stride, stage.patch_padding
        )
        height, width = stage.grid(height, width)
        if not height > 0:
            raise ValueError(f"image_size: got {image_size}, of which {model} has no tokens")
        shapes.append(Stage((height, width), stage.embed_dim, int(stage.cls_token), embedding))
    return shapes


def conv_projection_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True,
    hybrid: bool = False,
) -> list[machine.Launch]:  # fmt: skip
    """Returns the launches of a CvT block's projection (q has stride 1, k and v stride 2).

    With ``hybrid`` mixing a 5×5 convolution of dilation 2 is added to each of 3×3. Training is under
    autocast, with BatchNorm's parameters in float32; inference has all in ``dtype``.
    """
    from cvt_kernels.ops.conv_projection.triton import backward, common, forward

    grid, channels, class_tokens, _ = stage
    kinds = ((3, 1, 1), (5, 4, 2)) if hybrid else ((3, 1, 1),)
    convolutions = [(kernel, stride, *others) for stride in (1, 2, 2) for kernel, *others in kinds]
    kernel_sizes, strides, paddings, dilations = zip(*convolutions, strict=True)
    count = len(convolutions)
    geometry = common.Geometry(
        grid,
        kernel_sizes,
        strides,
        paddings,
        dilations,
        epss=(1e-5,) * count,
        summands=(len(kinds), *[0] * (len(kinds) - 1)) * 3,
    )

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = meta(batch, grid[0] * grid[1] + class_tokens, channels)
    weights = [meta(channels, 1, kernel, kernel) for kernel in geometry.kernel_sizes]
    vectors = [meta(channels, dtype=torch.float32 if training else dtype)] * count
    tracked = [meta(dtype=torch.int64)] * count
    dys = geometry.of_each([meta(*shape) for shape in forward.output_shapes(x, geometry)])
    with machine.recorded_launches(chip) as launches:
        forward.projection_forward(x, geometry, weights, *[vectors] * 4)
        if training:
            mean, variance = forward.batch_statistics(x, geometry, weights)
            forward.update_running_statistics(
                mean, variance, range(count), vectors, vectors, tracked, [0.1] * count, [1.1] * count
            )
            sums = backward.backward_sums(x, geometry, weights, vectors, vectors, dys)
            dconvs, _ = backward.backward_conv(
                x, geometry, weights, vectors, vectors, vectors, dys, sums, [1.0] * count
            )
            backward.backward_input(geometry, weights, dconvs, dys)
    return launches


def conv_linear_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launch of a CvT block's projection with its linear layers; there is none in training."""
    if training:
        return []
    from cvt_kernels.ops.conv_linear.triton import forward
    from cvt_kernels.ops.conv_projection.triton.common import Geometry

    grid, channels, class_tokens, _ = stage
    ones = (1, 1, 1)
    geometry = Geometry(grid, (3, 3, 3), (1, 2, 2), paddings=ones, dilations=ones, epss=(1e-5, 1e-5, 1e-5))

    def meta(*shape: int) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device="meta")] * 3

    x, *_ = meta(batch, grid[0] * grid[1] + class_tokens, channels)
    vectors = meta(channels)
    with machine.recorded_launches(chip) as launches:
        forward.conv_linear_forward(
            x, geometry, meta(channels, 1, 3, 3), vectors, vectors, vectors, vectors,
            meta(channels, channels), vectors,
        )  # fmt: skip
    return launches


def depthwise_conv_gelu_launches(
    stage: Stage | HiddenStage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256,
    training: bool = True,
) -> list[machine.Launch]:  # fmt: skip
    """Returns the launches of a Mix-FFN's convolution with exact GELU."""
    from cvt_kernels.ops.depthwise_conv_gelu.triton import backward, forward

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = meta(batch, math.prod(stage.grid), stage.channels)
    parameters = meta(stage.channels, 1, 3, 3), meta(stage.channels)
    with machine.recorded_launches(chip) as launches:
        y = forward.conv_gelu_forward(x, stage.grid, *parameters, "none")
        if training:
            backward.conv_gelu_backward(y, x, stage.grid, *parameters, "none", needs_dx=True)
    return launches


def attention_launches(
    stage: Stage,
    dtype: torch.dtype,
    chip: machine.Chip,
    *,
    batch: int = 256,
    training: bool = True,
    bias: bool = False,
    by_position: bool = False,
) -> list[machine.Launch]:
    """Returns the launches of a CvT block's attention (heads of 64, k and v strided by 2)."""
    from cvt_kernels.ops.attention.triton import backward, forward
    from cvt_kernels.records import PositionBias

    grid, channels, class_tokens, _ = stage
    key_grid = -(-grid[0] // 2), -(-grid[1] // 2)
    queries, keys = (math.prod(each) + class_tokens for each in (grid, key_grid))
    heads, scale = channels // 64, channels**-0.5

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = (meta(batch, tokens, heads, 64) for tokens in (queries, keys, keys))
    matrix = meta(heads, queries, keys) if bias else None
    position = None
    if by_position:
        offsets = [n + 2 * (key_n - 1) for n, key_n in zip(grid, key_grid, strict=True)]
        position = PositionBias(meta(heads, *offsets), grid, key_grid, stride=2)
    with machine.recorded_launches(chip) as launches:
        out, stats = forward.attention_forward(q, k, v, matrix, scale, need_stats=training, position=position)
        if stats is not None:
            backward.attention_backward(
                q, k, v, matrix, out, stats, out, scale,
                need_bias=bias, position=position, need_table=by_position,
            )  # fmt: skip
    return launches


def conv_embedding_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launches of a stage's embedding: of images with channels first, and of channels-last maps.

    There are none for training, since the kernels compute no gradients.
    """
    from cvt_kernels.ops.conv_embedding import triton

    if training:
        return []
    size, in_channels, kernel_size, stride, padding = stage.embedding

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    image = meta(batch, in_channels, *size)
    if in_channels > 3:
        image = image.to(memory_format=torch.channels_last)
    weight = meta(stage.channels, in_channels, kernel_size, kernel_size)
    vector = meta(stage.channels)
    with machine.recorded_launches(chip) as launches:
        call = backends.operators["conv_embedding"].bind(
            image, weight, vector, vector, vector, stride=stride, padding=padding,
            class_token=vector if stage.class_tokens else None,
        )  # fmt: skip
        triton.conv_embedding(call)
    return launches


def layer_norm_mlp_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launch of a CvT block's MLP (4 hidden features per channel, QuickGELU).

    There is none in training, and none for stages whose weights do not fit the chip.
    """
    from cvt_kernels.ops.mlp.triton import forward

    (height, width), channels, class_tokens, _ = stage

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = meta(batch, height * width + class_tokens, channels)
    vector, hidden = meta(channels), 4 * channels
    layers = meta(hidden, channels), meta(hidden), meta(channels, hidden), vector
    bind = backends.operators["layer_norm_mlp"].bind
    call = bind(x, vector, vector, *layers, approximate="quick")
    if training or forward.why_unsupported(call) is not None:
        return []
    with machine.recorded_launches(chip) as launches:
        forward.layer_norm_mlp(call)
    return launches


def linear_gelu_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launch of a CvT block's first linear layer of the MLP, with Microsoft's GELU."""
    from cvt_kernels.ops.linear.triton import forward

    x, weight, bias, _ = _linear_layer(stage, batch, dtype, widths=(1, 4))
    with machine.recorded_launches(chip) as launches:
        forward.linear_gelu_forward(x, weight, bias, "quick", need_pre=training)
    return launches


def linear_add_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launches of a CvT block's layers that end its residual branches, attention's and the MLP's.

    There are none for training: the kernels have no gradients.
    """
    from cvt_kernels.ops.linear.triton import forward

    with machine.recorded_launches(chip) as launches:
        for width in () if training else (1, 4):
            x, weight, bias, residual = _linear_layer(stage, batch, dtype, widths=(width, 1))
            forward.linear_add_forward(x, weight, bias, residual, torch.empty_like(residual))
    return launches


def linear_add_layer_norm_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launches of ``linear_add_launches`` with the LayerNorm that follows each of them."""
    from cvt_kernels.ops.linear.triton import forward

    with machine.recorded_launches(chip) as launches:
        for width in () if training else (1, 4):
            x, weight, bias, residual = _linear_layer(stage, batch, dtype, widths=(width, 1))
            h, y = torch.empty_like(residual), torch.empty_like(residual)
            forward.linear_add_layer_norm_forward(x, weight, bias, residual, bias, bias, None, 1e-5, h, y)
    return launches


def _linear_layer(
    stage: Stage, batch: int, dtype: torch.dtype, *, widths: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x, weight, bias and residual of a linear layer on a stage's tokens.

    Its inputs and outputs are ``widths`` times the stage's channels.
    """
    (height, width), channels, class_tokens, _ = stage
    rows = batch * (height * width + class_tokens)
    inputs, outputs = (channels * width for width in widths)
    shapes = (rows, inputs), (outputs, inputs), (outputs,), (rows, outputs)
    x, weight, bias, residual = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    return x, weight, bias, residual


def quantize_rows_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True,
    numbers: torch.dtype = torch.int8,
) -> list[machine.Launch]:  # fmt: skip
    """Returns the launch that rounds a stage's tokens to 8-bit ``numbers``; there is none in training."""
    from cvt_kernels.ops.linear_int8.triton import rows

    x, *_ = _linear_layer(stage, batch, dtype, widths=(1, 1))
    with machine.recorded_launches(chip) as launches:
        if not training:
            rows.quantize_rows_forward(x, None, numbers)
    return launches


def layer_norm_quantize_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True,
    numbers: torch.dtype = torch.int8,
) -> list[machine.Launch]:  # fmt: skip
    """Returns the launch that rounds the LayerNorm of a stage's tokens, shifted as where they are frozen."""
    from cvt_kernels.ops.linear_int8.triton import rows

    x, _, vector, _ = _linear_layer(stage, batch, dtype, widths=(1, 1))
    with machine.recorded_launches(chip) as launches:
        if not training:
            rows.layer_norm_quantize_forward(x, vector, vector, 1e-5, vector, None, numbers)
    return launches


def gelu_quantize_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True,
    numbers: torch.dtype = torch.int8,
) -> list[machine.Launch]:  # fmt: skip
    """Returns the launch that rounds Microsoft's GELU of the hidden features of a CvT block's MLP."""
    from cvt_kernels.ops.linear_int8.triton import rows

    x, *_ = _linear_layer(stage, batch, dtype, widths=(4, 1))
    with machine.recorded_launches(chip) as launches:
        if not training:
            rows.gelu_quantize_forward(x, None, "quick", None, numbers)
    return launches


def linear_int8_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True,
    numbers: torch.dtype = torch.int8,
) -> list[machine.Launch]:  # fmt: skip
    """Returns the launches of a CvT block's linear layers by 8-bit ``numbers``, one of each kind.

    These are that of Q, that after attention and the two of the MLP, the second and the last with a residual.
    """
    from cvt_kernels.ops.linear_int8.triton import forward

    with machine.recorded_launches(chip) as launches:
        for inputs, outputs, adds in () if training else ((1, 1, 0), (1, 1, 1), (1, 4, 0), (4, 1, 1)):
            x, weight, bias, residual = _linear_layer(stage, batch, dtype, widths=(inputs, outputs))
            scales = x.new_empty(x.shape[0], 1, dtype=torch.float32)
            forward.linear_int8_forward(
                x.to(numbers), scales, weight.to(numbers), bias.float(), bias, None,
                residual if adds else None, dtype,
            )  # fmt: skip
    return launches


def linear_float8_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launches of the four operators with float8_e4m3fn, none for chips without such products."""
    if chip.capability < 89:
        return []
    settings: dict[str, Any] = {"batch": batch, "training": training, "numbers": torch.float8_e4m3fn}
    return [
        *quantize_rows_launches(stage, dtype, chip, **settings),
        *layer_norm_quantize_launches(stage, dtype, chip, **settings),
        *gelu_quantize_launches(stage, dtype, chip, **settings),
        *linear_int8_launches(stage, dtype, chip, **settings),
    ]


def gather_rows_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launch that gathers 7 of 10 tokens of a stage, and for training that of its gradient."""
    from cvt_kernels.ops.rows.triton import forward

    x, rows, values = _rows_of_tokens(stage, batch, dtype)
    with machine.recorded_launches(chip) as launches:
        forward.gather_rows_forward(x, rows)
        if training:
            forward.scatter_rows_forward(None, rows, values, None, x.shape[1])
    return launches


def gather_add_layer_norm_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launch that gathers 7 of 10 tokens, adds and normalizes, and those of its gradients."""
    from cvt_kernels.ops.rows.triton import backward, forward

    x, rows, values = _rows_of_tokens(stage, batch, dtype)
    vector = x.new_empty(x.shape[2])
    with machine.recorded_launches(chip) as launches:
        h, y = forward.gather_add_layer_norm_forward(x, rows, values, vector, vector, 1e-5, dtype)
        if training:
            dh, *_ = backward.layer_norm_backward(y, h, h, vector, vector, 1e-5)
            forward.scatter_rows_forward(None, rows, dh, None, x.shape[1])
    return launches


def scatter_rows_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launches that put 7 of 10 tokens back with a branch, one in place; or with gradients."""
    from cvt_kernels.ops.rows.triton import forward

    x, rows, values = _rows_of_tokens(stage, batch, dtype)
    with machine.recorded_launches(chip) as launches:
        forward.scatter_rows_forward(x, rows, values, values, x.shape[1])
        if training:
            forward.scatter_rows_forward(x, rows, None, None, x.shape[1])
            forward.gather_rows_forward(x, rows)
        else:
            forward.scatter_rows_inplace_forward(x, rows, values, values)
    return launches


def _rows_of_tokens(stage: Stage, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a stage's tokens, the index of 7 of 10, and values for these."""
    (height, width), channels, class_tokens, _ = stage
    tokens = height * width + class_tokens
    x = torch.empty(batch, tokens, channels, dtype=dtype, device="meta")
    rows = torch.empty(batch, -(-7 * tokens // 10), dtype=torch.int64, device="meta")
    return x, rows, x.new_empty(*rows.shape, channels)


#: Operators with Triton kernels, by name. CvT's attention has no bias.
TRITON_OPERATORS: dict[str, Callable[..., list[machine.Launch]]] = {
    "conv_projection": conv_projection_launches,
    "conv_projection_hybrid": functools.partial(conv_projection_launches, hybrid=True),
    "conv_embedding": conv_embedding_launches,
    "conv_linear": conv_linear_launches,
    "depthwise_conv_gelu": depthwise_conv_gelu_launches,
    "attention": attention_launches,
    "attention_with_bias": functools.partial(attention_launches, bias=True),
    "attention_by_position": functools.partial(attention_launches, by_position=True),
    "layer_norm_mlp": layer_norm_mlp_launches,
    "linear_gelu": linear_gelu_launches,
    "linear_add": linear_add_launches,
    "linear_add_layer_norm": linear_add_layer_norm_launches,
    "quantize_rows": quantize_rows_launches,
    "layer_norm_quantize": layer_norm_quantize_launches,
    "gelu_quantize": gelu_quantize_launches,
    "linear_int8": linear_int8_launches,
    "linear_float8": linear_float8_launches,
    "gather_rows": gather_rows_launches,
    "gather_add_layer_norm": gather_add_layer_norm_launches,
    "scatter_rows": scatter_rows_launches,
}
