"""The models and operators that are compiled, and the launches of Triton kernels that each stage makes.

The launchers run on tensors without memory (``device="meta"``), and their launches are recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cvt_kernels import machine

from ...config import PRESETS, default_image_size


class Stage(NamedTuple):
    """The shape that the attention blocks of a stage work on.

    Attributes:
        grid: Height and width, in tokens.
        channels: Channels of a token.
        class_tokens: 1 where a class token precedes the grid, else 0.
    """

    grid: tuple[int, int]
    channels: int
    class_tokens: int


def stages(model: str, image_size: int | None = None) -> list[Stage]:
    """Returns the stages of a model of ``PRESETS``, for square images of its own size or another."""
    height = width = image_size or default_image_size(model)
    shapes = []
    for stage in PRESETS[model].stages:
        height, width = stage.grid(height, width)
        shapes.append(Stage((height, width), stage.embed_dim, int(stage.cls_token)))
    return shapes


def conv_projection_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """Returns the launches of a CvT block's projection (q has stride 1, k and v stride 2).

    Training is under autocast, with BatchNorm's parameters in float32; inference has all in ``dtype``.
    """
    from cvt_kernels.ops.conv_projection.triton import backward, common, forward

    grid, channels, class_tokens = stage
    geometry = common.Geometry(
        grid=grid,
        kernel_sizes=(3, 3, 3),
        strides=(1, 2, 2),
        paddings=(1, 1, 1),
        dilations=(1, 1, 1),
        epss=(1e-5, 1e-5, 1e-5),
    )

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = meta(batch, grid[0] * grid[1] + class_tokens, channels)
    weights = [meta(channels, 1, 3, 3)] * 3
    vectors = [meta(channels, dtype=torch.float32 if training else dtype)] * 3
    tracked = [meta(dtype=torch.int64)] * 3
    dys = [meta(batch, h * w + class_tokens, channels) for h, w in geometry.output_grids]
    with machine.recorded_launches(chip) as launches:
        forward.projection_forward(x, geometry, weights, *[vectors] * 4)
        if training:
            mean, variance = forward.batch_statistics(x, geometry, weights)
            forward.update_running_statistics(
                mean, variance, range(3), vectors, vectors, tracked, [0.1] * 3, [1.1] * 3
            )
            sums = backward.backward_sums(x, geometry, weights, vectors, vectors, dys)
            dconvs, _ = backward.backward_conv(
                x, geometry, weights, vectors, vectors, vectors, dys, sums, [1.0] * 3
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

    grid, channels, class_tokens = stage
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


def attention_launches(
    stage: Stage,
    dtype: torch.dtype,
    chip: machine.Chip,
    *,
    batch: int = 256,
    training: bool = True,
    bias: bool = False,
) -> list[machine.Launch]:
    """Returns the launches of a CvT block's attention (heads of 64, k and v strided by 2)."""
    from cvt_kernels.ops.attention.triton import backward, forward

    (height, width), channels, class_tokens = stage
    queries, keys = (h * w + class_tokens for h, w in ((height, width), (-(-height // 2), -(-width // 2))))
    heads = channels // 64

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = (meta(batch, tokens, heads, 64) for tokens in (queries, keys, keys))
    table = meta(heads, queries, keys) if bias else None
    with machine.recorded_launches(chip) as launches:
        out, stats = forward.attention_forward(q, k, v, table, channels**-0.5, need_stats=training)
        if stats is not None:
            backward.attention_backward(q, k, v, table, out, stats, out, channels**-0.5, need_bias=bias)
    return launches


#: Operators with Triton kernels, by name. CvT's attention has no bias.
TRITON_OPERATORS: dict[str, Callable[..., list[machine.Launch]]] = {
    "conv_projection": conv_projection_launches,
    "conv_linear": conv_linear_launches,
    "attention": attention_launches,
    "attention_with_bias": functools.partial(attention_launches, bias=True),
}
#: The operator with CUDA kernels. All of them in the extension are examined, since they depend on no shape.
CUDA_OPERATOR = "layer_norm_gelu"
