"""The models and operators that are compiled, and the launches of Triton kernels that each stage makes.

The operators run on meta tensors, and their launches are recorded instead of started.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cvt.config import PRESETS, default_image_size
from cvt_kernels import backends, launching
from cvt_kernels.records import ConvBatchNorm, Linear, Norm, PositionBias, TransformerBlock

# Models ---------------------------------------------------------------------------------------------------


class Embedding(NamedTuple):
    """The convolutional token embedding at the start of a stage, of images or maps of ``size``."""

    size: tuple[int, int]
    in_channels: int
    kernel_size: int
    stride: int
    padding: int


class Stage(NamedTuple):
    """The shape that the blocks of a stage work on.

    Attributes:
        grid: Height and width, in tokens.
        channels: Channels of a token; of a pyramid, those between the two linear layers of the Mix-FFN.
        class_tokens: 1 where a class token precedes the grid, else 0.
        embedding: What makes these tokens; of a pyramid, what makes fewer of them for keys and values, or
            None.
        decoder: Channels of the decode head whose logits have this grid, or 0.
    """

    grid: tuple[int, int]
    channels: int
    class_tokens: int
    embedding: Embedding | None
    decoder: int = 0


class Pyramid(NamedTuple):
    """A model with Mix-FFNs, by its image size and, in each stage, channels of tokens and between layers.

    A block of ``RATIOS`` squared tokens makes one of keys and values. ``decoder`` are the channels of the
    decode head, or 0.
    """

    image_size: int
    channels: tuple[int, ...]
    hidden: tuple[int, ...]
    decoder: int = 0


#: Of each stage.
RATIOS = (8, 4, 2, 1)
_WIDE = (64, 128, 320, 512)
#: SegFormer-B1 to B5 have the same Mix-FFNs, as have PVT v2-B2 to B4.
PYRAMIDS = {
    "segformer_b0": Pyramid(512, (32, 64, 160, 256), (128, 256, 640, 1024), 256),
    "segformer_b5": Pyramid(512, _WIDE, (256, 512, 1280, 2048), 768),
    "pvt_v2_b2": Pyramid(224, _WIDE, (512, 1024, 1280, 2048)),
}
#: The operators of these models; all others are of ``PRESETS``.
PYRAMID_OPERATORS = ("depthwise_conv_gelu", "token_reduction", "segmentation_head")


def image_size_of(model: str) -> int:
    """Returns the pixels of a side of a model's own images."""
    return PYRAMIDS[model].image_size if model in PYRAMIDS else default_image_size(model)


def is_of(operator: str, model: str) -> bool:
    """Returns whether a model has an operator."""
    return (operator in PYRAMID_OPERATORS) == (model in PYRAMIDS)


def stages_of(model: str, image_size: int) -> list[Stage]:
    """Returns the stages of a model of ``PRESETS`` or ``PYRAMIDS``, for square images."""
    if model not in PYRAMIDS:
        return stages(model, image_size)
    sides = (-(-image_size // (4 << i)) for i in itertools.count())
    _, widths, hidden, decoder = PYRAMIDS[model]
    stages_of_pyramid = []
    for side, channels, between, ratio in zip(sides, widths, hidden, RATIOS, strict=False):
        reduction = None if ratio == 1 else Embedding((side, side), channels, ratio, ratio, 0)
        stages_of_pyramid.append(Stage((side, side), between, 0, reduction, decoder))
        decoder = 0  # of the first stage's grid
    return stages_of_pyramid


def stages(model: str, image_size: int | None = None) -> list[Stage]:
    """Returns the stages of a model of ``PRESETS``, for square images of its own size or another."""
    height = width = image_size or default_image_size(model)
    shapes = []
    for stage in PRESETS[model].stages:
        convolution = stage.in_chans, stage.patch_size, stage.patch_stride, stage.patch_padding
        embedding = Embedding((height, width), *convolution)
        height, width = stage.grid(height, width)
        if not height > 0:
            raise ValueError(f"image_size: got {image_size}, of which {model} has no tokens")
        shapes.append(Stage((height, width), stage.embed_dim, int(stage.cls_token), embedding))
    return shapes


# Launches -------------------------------------------------------------------------------------------------


class _Step:
    """A step of a stage: makes tensors, by default without memory, and calls Triton's operators on them."""

    def __init__(self, stage: Stage, dtype: torch.dtype, batch: int, training: bool, device: str = "meta"):
        self.stage, self.dtype, self.batch, self.training = stage, dtype, batch, training
        self.device = device
        self.channels = stage.channels
        self.tokens = math.prod(stage.grid) + stage.class_tokens

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a tensor, by default of the dtype of the step; in training it requires a gradient."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if self.device != "meta":  # numbers that every operator takes
            tensor = tensor.uniform_(0.1, 1) if tensor.is_floating_point() else tensor.zero_()
        return tensor.requires_grad_(self.training and tensor.is_floating_point())

    def x(self) -> Tensor:
        """Returns the tokens of the stage."""
        return self.tensor(self.batch, self.tokens, self.channels)

    def linear(self, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns x, weight, bias and residual of a linear layer, its widths in multiples of the channels."""
        rows, inputs, outputs = self.batch * self.tokens, inputs * self.channels, outputs * self.channels
        layer = self.tensor(rows, inputs), self.tensor(outputs, inputs), self.tensor(outputs)
        return *layer, self.tensor(rows, outputs)

    def call(
        self, operator: str, *args: Any, backward: bool = True, backend: str = "triton", **settings: Any
    ) -> None:
        """Calls an operator if a backend's kernels serve such a call, in training with the ``backward``."""
        implementation = backends.implementations[operator][backend].load()
        call = backends.operators[operator].bind(*args, **settings)
        if implementation.why_unsupported(call) is not None:
            return
        results = implementation.function(call)
        if self.training and backward:
            results = results if isinstance(results, tuple) else (results,)
            torch.autograd.backward(results, [torch.empty_like(each) for each in results])


#: Operators with Triton kernels, by name.
TRITON_OPERATORS: dict[str, Callable[..., list[launching.Launch]]] = {}


def _operator(run: Callable[..., None]) -> Callable[..., list[launching.Launch]]:
    """Turns a function that runs a :class:`_Step` into one that returns its launches, and lists it.

    That takes the stage, the dtype and the GPU, and by keyword ``batch``, ``training``, the settings, and the
    ``device`` of the tensors, on which the launches can be started.
    """

    @functools.wraps(run)
    def launches_of(
        stage: Stage,
        dtype: torch.dtype,
        chip: launching.Chip,
        *,
        batch: int = 256,
        training: bool = True,
        device: str = "meta",
        **settings: Any,
    ) -> list[launching.Launch]:
        with launching.recorded_launches(chip) as launches, torch.set_grad_enabled(training):
            run(_Step(stage, dtype, batch, training, device), **settings)
        return launches

    TRITON_OPERATORS[run.__name__.removesuffix("_launches")] = launches_of
    return launches_of


def _conv_batch_norm(step: _Step, stride: int, kernel: int, padding: int, dilation: int) -> ConvBatchNorm:
    def vector() -> Tensor:
        return step.tensor(step.channels, dtype=torch.float32 if step.training else None)

    weight, count = step.tensor(step.channels, 1, kernel, kernel), step.tensor(dtype=torch.int64)
    vectors = vector(), vector(), vector(), vector()
    return ConvBatchNorm(weight, *vectors, count, stride, padding, dilation)


@_operator
def conv_projection_launches(step: _Step, *, hybrid: bool = False) -> None:
    """Runs a CvT block's projection (q has stride 1, k and v stride 2).

    With ``hybrid`` mixing a 5×5 convolution of dilation 2 is added to each of 3×3. Training is under
    autocast, with BatchNorm's parameters in float32; inference has all in ``dtype``.
    """
    kernels = ((3, 1, 1), (5, 4, 2)) if hybrid else ((3, 1, 1),)
    branches = [tuple(_conv_batch_norm(step, stride, *kernel) for kernel in kernels) for stride in (1, 2, 2)]
    convs = branches if hybrid else [conv for (conv,) in branches]
    step.call("conv_projection", step.x(), step.stage.grid, convs, training=step.training)


TRITON_OPERATORS["conv_projection_hybrid"] = functools.partial(conv_projection_launches, hybrid=True)


@_operator
def conv_embedding_launches(step: _Step) -> None:
    """Runs a stage's embedding: of images with channels first, and of channels-last maps."""
    assert step.stage.embedding is not None
    size, in_channels, kernel_size, stride, padding = step.stage.embedding
    image = step.tensor(step.batch, in_channels, *size)
    if in_channels > 3:
        image = image.to(memory_format=torch.channels_last)
    weight = step.tensor(step.channels, in_channels, kernel_size, kernel_size)
    vector = step.tensor(step.channels)
    step.call(
        "conv_embedding", image, weight, vector, vector, vector, stride=stride, padding=padding,
        class_token=vector if step.stage.class_tokens else None,
    )  # fmt: skip


@_operator
def token_reduction_launches(step: _Step) -> None:
    """Runs a pyramid's reduction of the tokens of keys and values, where it has one."""
    if step.stage.embedding is None:
        return
    (height, width), channels, ratio, _, _ = step.stage.embedding
    image = step.tensor(step.batch, height, width, channels).permute(0, 3, 1, 2)
    weight = step.tensor(channels, channels, ratio, ratio).to(memory_format=torch.channels_last)
    vector = step.tensor(channels)
    step.call("conv_embedding", image, weight, vector, vector, vector, stride=ratio, padding=0)


@_operator
def segmentation_head_launches(step: _Step) -> None:
    """Runs SegFormer's decode head for 150 classes, with maps of a half, a quarter and an eighth."""
    if not step.stage.decoder:
        return
    assert step.stage.embedding is not None
    (height, width), inputs, channels = step.stage.grid, step.stage.embedding.in_channels, step.stage.decoder

    def map_and_weight(shift: int) -> tuple[Tensor, Tensor]:
        size = -(-height >> shift), -(-width >> shift)
        image = step.tensor(step.batch, *size, inputs << shift).permute(0, 3, 1, 2)
        return image, step.tensor(channels, inputs << shift)

    first, *others = map(map_and_weight, range(4))
    classifier = step.tensor(150, channels), step.tensor(150)
    step.call("segmentation_head", *first, step.tensor(channels), tuple(others), *classifier)


@_operator
def conv_linear_launches(step: _Step) -> None:
    """Runs a CvT block's projection with its linear layers."""
    convs = [_conv_batch_norm(step, stride, 3, 1, 1) for stride in (1, 2, 2)]
    linears = [(step.tensor(step.channels, step.channels), step.tensor(step.channels)) for _ in convs]
    step.call("conv_linear", step.x(), step.stage.grid, convs, linears)


@_operator
def depthwise_conv_gelu_launches(step: _Step) -> None:
    """Runs a Mix-FFN's convolution with exact GELU."""
    weight, bias = step.tensor(step.channels, 1, 3, 3), step.tensor(step.channels)
    step.call("depthwise_conv_gelu", step.x(), step.stage.grid, weight, bias)


@_operator
def attention_launches(step: _Step, *, bias: bool = False, by_position: bool = False) -> None:
    """Runs a CvT block's attention (heads of 64, k and v strided by 2)."""
    grid, heads = step.stage.grid, step.channels // 64
    key_grid = -(-grid[0] // 2), -(-grid[1] // 2)
    keys = math.prod(key_grid) + step.stage.class_tokens
    q, k, v = (step.tensor(step.batch, tokens, heads, 64) for tokens in (step.tokens, keys, keys))
    matrix = step.tensor(heads, step.tokens, keys) if bias else None
    position = None
    if by_position:
        offsets = [n + 2 * (key_n - 1) for n, key_n in zip(grid, key_grid, strict=True)]
        position = PositionBias(step.tensor(heads, *offsets), grid, key_grid, stride=2)
    step.call("attention", q, k, v, scale=step.channels**-0.5, bias=matrix, position=position)


TRITON_OPERATORS["attention_with_bias"] = functools.partial(attention_launches, bias=True)
TRITON_OPERATORS["attention_by_position"] = functools.partial(attention_launches, by_position=True)


@_operator
def layer_norm_mlp_launches(step: _Step) -> None:
    """Runs a CvT block's MLP (4 hidden features per channel, QuickGELU)."""
    _, first, first_bias, _ = step.linear(1, 4)
    _, second, second_bias, _ = step.linear(4, 1)
    norm = step.tensor(step.channels), step.tensor(step.channels)
    layers = first, first_bias, second, second_bias
    step.call("layer_norm_mlp", step.x(), *norm, *layers, approximate="quick")


@_operator
def linear_gelu_launches(step: _Step) -> None:
    """Runs a CvT block's first linear layer of the MLP, with Microsoft's GELU."""
    x, weight, bias, _ = step.linear(1, 4)
    step.call("linear_gelu", x, weight, bias, approximate="quick")


@_operator
def linear_add_launches(step: _Step) -> None:
    """Runs a CvT block's layers that end its residual branches, attention's and the MLP's.

    Training is beside a stream of float32, as under autocast, with stochastic depth and without.
    """
    if not step.training:
        for width in (1, 4):
            step.call("linear_add", *step.linear(width, 1))
        return
    x, weight, bias, residual = step.linear(1, 1)
    stream = step.tensor(*residual.shape, dtype=torch.float32)
    factors = torch.empty(step.batch, dtype=torch.float32, device=step.device)
    as_images = [each.unflatten(0, (step.batch, -1)) for each in (x, stream)]
    for scale, scales_sum in ((None, False), (factors, False), (factors, True)):
        step.call("linear_add", as_images[0], weight, bias, as_images[1], scale=scale, scales_sum=scales_sum)


@_operator
def mlp_add_launches(step: _Step) -> None:
    """Runs a CvT block's MLP in training, with stochastic depth; only there has it kernels of its own."""
    if not step.training:
        return
    x, fc1, bias1, _ = step.linear(1, 4)
    _, fc2, bias2, _ = step.linear(4, 1)
    factors = torch.empty(step.batch, dtype=torch.float32, device=step.device)
    residual = step.tensor(*x.shape, dtype=torch.float32).unflatten(0, (step.batch, -1))
    x = x.unflatten(0, (step.batch, -1))
    step.call("mlp_add", x, fc1, bias1, fc2, bias2, residual, approximate="quick", scale=factors)


@_operator
def linear_launches(step: _Step) -> None:
    """Runs a CvT block's layers of queries, keys and values, which have kernels in training only."""
    step.call("linear", *step.linear(1, 1)[:3])


@_operator
def linear_gluon_launches(step: _Step) -> None:
    """Runs the layers of the two above, without gradients, by the product in Gluon on GPUs that have it."""
    x, weight, bias, _ = step.linear(1, 4)
    for approximate in ("none", "tanh", "quick"):
        step.call("linear_gelu", x, weight, bias, approximate=approximate, backend="gluon")
    for width in (1, 4):
        step.call("linear_add", *step.linear(width, 1), backend="gluon")


@_operator
def transformer_blocks_launches(step: _Step) -> None:
    """Runs three blocks of CvT, the first, an inner and the last, by the kernels for sm_90."""
    c = step.channels

    def layer(inputs: int, outputs: int) -> Linear:
        return Linear(step.tensor(outputs, inputs), step.tensor(outputs))

    def block() -> TransformerBlock:
        query, key, value = (_conv_batch_norm(step, stride, 3, 1, 1) for stride in (1, 2, 2))
        norms = [Norm(step.tensor(c), step.tensor(c), 1e-5) for _ in range(2)]
        return TransformerBlock(
            norms[0], (query, key, value), (layer(c, c), layer(c, c), layer(c, c)), c // 64, c**-0.5,
            layer(c, c), norms[1], layer(c, 4 * c), "quick", layer(4 * c, c),
        )  # fmt: skip

    blocks = [block() for _ in range(3)]
    step.call("transformer_blocks", step.x(), step.stage.grid, blocks, backend="gluon")


@_operator
def linear_add_layer_norm_launches(step: _Step) -> None:
    """Runs the layers of ``linear_add_launches`` with the LayerNorm that follows each of them."""
    for width in (1, 4):
        x, weight, bias, residual = step.linear(width, 1)
        step.call("linear_add_layer_norm", x, weight, bias, residual, bias, bias)


@_operator
def quantize_rows_launches(step: _Step, *, numbers: torch.dtype = torch.int8) -> None:
    """Rounds a stage's tokens to 8-bit ``numbers``, which has no gradient."""
    if not step.training:
        step.call("quantize_rows", step.x(), dtype=numbers)


@_operator
def layer_norm_quantize_launches(step: _Step, *, numbers: torch.dtype = torch.int8) -> None:
    """Rounds the LayerNorm of a stage's tokens, shifted as where they are frozen."""
    vector = step.tensor(step.channels)
    if not step.training:
        step.call("layer_norm_quantize", step.x(), vector, vector, shift=vector, dtype=numbers)


@_operator
def gelu_quantize_launches(step: _Step, *, numbers: torch.dtype = torch.int8) -> None:
    """Rounds Microsoft's GELU of the hidden features of a CvT block's MLP."""
    hidden, *_ = step.linear(4, 1)
    if not step.training:
        step.call("gelu_quantize", hidden, approximate="quick", dtype=numbers)


@_operator
def linear_int8_launches(step: _Step, *, numbers: torch.dtype = torch.int8) -> None:
    """Runs a CvT block's linear layers by 8-bit ``numbers``, one of each kind.

    These are Q, the layer after attention and the two of the MLP, the second and the last with a residual.
    """
    for inputs, outputs, adds in () if step.training else ((1, 1, 0), (1, 1, 1), (1, 4, 0), (4, 1, 1)):
        x, weight, bias, residual = step.linear(inputs, outputs)
        step.call(
            "linear_int8", x.to(numbers), weight.to(numbers), bias.float(), bias,
            x_scales=step.tensor(len(x), 1, dtype=torch.float32), residual=residual if adds else None,
            dtype=step.dtype,
        )  # fmt: skip


def linear_float8_launches(*args: Any, **options: Any) -> list[launching.Launch]:
    """Returns the launches of these four with float8_e4m3fn; none on chips without such products."""
    operators = (
        quantize_rows_launches,
        layer_norm_quantize_launches,
        gelu_quantize_launches,
        linear_int8_launches,
    )
    return [each for run in operators for each in run(*args, numbers=torch.float8_e4m3fn, **options)]


TRITON_OPERATORS["linear_float8"] = linear_float8_launches


def _rows(step: _Step) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a stage's tokens, the index of 7 of 10, and values for these."""
    kept = -(-7 * step.tokens // 10)
    values = step.tensor(step.batch, kept, step.channels)
    return step.x(), step.tensor(step.batch, kept, dtype=torch.int64), values


@_operator
def gather_rows_launches(step: _Step) -> None:
    """Gathers 7 of 10 tokens of a stage."""
    x, rows, _ = _rows(step)
    step.call("gather_rows", x, rows)


@_operator
def gather_add_layer_norm_launches(step: _Step) -> None:
    """Gathers 7 of 10 tokens, adds and normalizes."""
    vector = step.tensor(step.channels)
    step.call("gather_add_layer_norm", *_rows(step), vector, vector)


@_operator
def scatter_rows_launches(step: _Step) -> None:
    """Puts 7 of 10 tokens back with a branch, in inference once more in place."""
    x, rows, values = _rows(step)
    for inplace in (False,) if step.training else (False, True):
        step.call("scatter_rows", x, rows, values, values, inplace=inplace)
