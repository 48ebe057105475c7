"""The operators of frozen models that reach over several layers, in inference, at the sizes of CvT-13.

Contenders are the kernels, the same composed of other operators of this project, and PyTorch, compiled or
not. What must move: every input and every output once, but of x the rows only that are needed.
"""

import functools

import pytest
import torch

import cvt_kernels as ck

from . import suites

pytestmark = pytest.mark.benchmark(**suites.TIMER)

EMBEDDINGS = {1: (3, 7, 4, 2), 2: (64, 3, 2, 1), 3: (192, 3, 2, 1)}  # channels, kernel size, stride, padding


def linear_layer(stage, dtype, images, inputs, outputs):
    """Returns x, weight, bias and residual of a linear layer, its widths in units of C."""
    (height, width), channels, class_tokens = suites.stages()[stage]
    rows, fan_in, fan_out = (images, height * width + class_tokens), inputs * channels, outputs * channels
    shapes = enumerate(((*rows, fan_in), (fan_out, fan_in), (fan_out,), (*rows, fan_out)))
    x, weight, bias, residual = (suites.randn(*shape, dtype=dtype, seed=i) for i, shape in shapes)
    return x, weight / fan_in**0.5, bias, residual


def vectors_of(x):
    """Returns weight and bias of a LayerNorm for tokens."""
    return [suites.randn(x.shape[-1], dtype=x.dtype, seed=i) for i in (4, 5)]


def with_settings(**settings):
    """Returns a call of an operator with its leaves and settings."""
    return lambda function, *leaves: function(*leaves, **settings)


def linear_gelu(stage, dtype, images):
    *leaves, _ = linear_layer(stage, dtype, images, 1, 4)
    return leaves, with_settings(approximate="quick")


def linear_add(stage, dtype, images):
    return linear_layer(stage, dtype, images, 4, 1), with_settings(inplace=False)


def linear_add_layer_norm(stage, dtype, images):
    tensors = linear_layer(stage, dtype, images, 1, 1)
    return (*tensors, *vectors_of(tensors[3])), with_settings(eps=1e-5, shift=None, inplace=False)


def layer_norm_mlp(stage, dtype, images):
    x, *fc1, _ = linear_layer(stage, dtype, images, 1, 4)
    _, *fc2, _ = linear_layer(stage, dtype, images, 4, 1)
    return (x, *vectors_of(x), *fc1, *fc2), with_settings(eps=1e-5, approximate="quick", shift=None)


def convs_of(taps, bias, variance):
    """Returns the three convolutions of a block, whose statistics have no gradients."""
    mean = bias.detach()
    return tuple(
        ck.ConvBatchNorm(taps, bias, bias, mean, variance.to(bias), stride=stride, padding=1)
        for stride in (1, 2, 2)
    )


def convolved(stage, dtype, images):
    """Returns x, weight, bias, taps of the convolutions, and a variance."""
    x, weight, bias, _ = linear_layer(stage, dtype, images, 1, 1)
    taps = suites.randn(x.shape[2], 1, 3, 3, dtype=dtype, seed=4)
    return x, weight, bias, taps, suites.randn(x.shape[2], dtype=dtype, seed=5).abs() + 0.5


def conv_linear(stage, dtype, images):
    grid, *_ = suites.stages()[stage]
    *leaves, variance = convolved(stage, dtype, images)

    def call(function, x, weight, bias, taps):
        return function(x, grid, convs_of(taps, bias, variance), [(weight, bias)] * 3)

    return leaves, call


def depthwise_conv_gelu(stage, dtype, images):
    grid, channels, _ = suites.stages()[stage]
    shapes = (images, grid[0] * grid[1], 4 * channels), (4 * channels, 1, 3, 3), (4 * channels,)
    x, weight, bias = (suites.randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))

    def call(function, x, weight, bias):
        return function(x, grid, weight, bias, approximate="none")

    return (x, weight / 3, bias), call


@functools.lru_cache(maxsize=1)  # kernels may keep packed copies for a block that they have seen
def block_of(approximate, scale, reduce, weight, bias, fc1_weight, fc1_bias, fc2_weight, mix=None):
    """Returns the parameters of a block, in which some layers have the same ones."""
    norm, linear = ck.Norm(bias, bias, 1e-5), ck.Linear(weight, bias)
    return ck.TransformerBlock(
        norm1=norm, reduce=reduce, linears=(linear,) * 3, num_heads=len(bias) // 64, scale=scale, proj=linear,
        norm2=norm, fc1=ck.Linear(fc1_weight, fc1_bias), approximate=approximate,
        fc2=ck.Linear(fc2_weight, bias), mix=mix,
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def cvt_block(variance, taps, weight, bias, *mlp):
    return block_of("quick", len(bias) ** -0.5, convs_of(taps, bias, variance), weight, bias, *mlp)


def transformer_block(stage, dtype, images):
    grid, *_ = suites.stages()[stage]
    x, weight, bias, taps, variance = convolved(stage, dtype, images)
    _, *fc1, _ = linear_layer(stage, dtype, images, 1, 4)
    _, fc2_weight, *_ = linear_layer(stage, dtype, images, 4, 1)

    def call(function, x, *parameters):
        return function(x, grid, cvt_block(variance, *parameters), inplace=False)

    return (x, taps, weight, bias, *fc1, fc2_weight), call


def ratio_of(stage):
    """Returns the ratio of the reduction where a stage is one of SegFormer: 8 in the first, 4 in the next."""
    grid, _, _ = suites.stages()[stage]
    return min(8 >> list(suites.stages()).index(stage), *grid)


@functools.lru_cache(maxsize=1)
def pyramid_block(reducing, taps, weight, bias, fc1_weight, fc1_bias, fc2_weight):
    reduction = ck.Reduction(reducing, bias, ck.Norm(bias, bias, 1e-5))
    mix = ck.DepthwiseConv(taps, fc1_bias)
    return block_of("none", None, reduction, weight, bias, fc1_weight, fc1_bias, fc2_weight, mix)


def segformer_block(stage, dtype, images):
    (height, width), channels, _ = suites.stages()[stage]
    _, weight, bias, _ = linear_layer(stage, dtype, images, 1, 1)
    _, *fc1, _ = linear_layer(stage, dtype, images, 1, 4)
    _, fc2_weight, *_ = linear_layer(stage, dtype, images, 4, 1)
    ratio = ratio_of(stage)
    x = suites.randn(images, height * width, channels, dtype=dtype, seed=0)
    reducing = suites.randn(channels, channels, ratio, ratio, dtype=dtype, seed=4) / (ratio * channels**0.5)
    taps = suites.randn(4 * channels, 1, 3, 3, dtype=dtype, seed=5) / 3

    def call(function, x, *parameters):
        return function(x, (height, width), pyramid_block(*parameters), inplace=False)

    return (x, reducing, taps, weight, bias, *fc1, fc2_weight), call


def conv_embedding(stage, dtype, images):
    (height, width), channels, class_tokens = suites.stages()[stage]
    inputs, kernel_size, stride, padding = EMBEDDINGS[list(suites.stages()).index(stage) + 1]
    image = suites.randn(images, inputs, height * stride, width * stride, dtype=dtype, seed=0)
    if inputs > 3:
        image = image.to(memory_format=torch.channels_last)
    fan_in = inputs * kernel_size**2
    weight = suites.randn(channels, inputs, kernel_size, kernel_size, dtype=dtype, seed=1) / fan_in**0.5
    *vectors, token = (suites.randn(channels, dtype=dtype, seed=i) for i in (2, 3, 4, 5))

    def call(function, *leaves):
        settings = {"class_token": token.to(leaves[0].dtype) if class_tokens else None, "eps": 1e-5}
        return function(*leaves, stride=stride, padding=padding, **settings)

    return (image, weight, *vectors), call


def tokens_and_rows(stage, dtype, images):
    """Returns tokens, the index of 7 of 10, other ones for every image, and values for these."""
    (height, width), channels, class_tokens = suites.stages()[stage]
    tokens = height * width + class_tokens
    order = suites.randn(images, tokens, dtype=torch.float32, seed=0).argsort(1)
    rows = order[:, : kept_of(tokens)].sort(1).values
    x, values = (suites.randn(images, n, channels, dtype=dtype, seed=n) for n in (tokens, rows.shape[1]))
    return x, rows, values


def kept_of(tokens):
    return -(-7 * tokens // 10)


def gather_rows(stage, dtype, images):
    x, rows, _ = tokens_and_rows(stage, dtype, images)
    return (x,), lambda function, x: function(x, rows)


def gather_add_layer_norm(stage, dtype, images):
    x, rows, branch = tokens_and_rows(stage, dtype, images)
    settings = {"eps": 1e-5, "dtype": None}
    return (x, branch, *vectors_of(x)), lambda function, x, *others: function(x, rows, *others, **settings)


def scatter_rows(stage, dtype, images):
    x, rows, values = tokens_and_rows(stage, dtype, images)
    branch = suites.randn(*values.shape, dtype=dtype, seed=4)
    return (x, values, branch), lambda function, x, *others: function(x, rows, *others, inplace=False)


def unread_bytes(operator, x):
    """Returns the bytes of x that an operator on rows has no need of."""
    if operator not in ON_ROWS:
        return 0
    kept = kept_of(x.shape[1])
    return x[:, : kept if operator == "scatter_rows" else x.shape[1] - kept].nbytes


CASES = [
    conv_embedding,
    conv_linear,
    depthwise_conv_gelu,
    linear_add_layer_norm,
    linear_gelu,
    linear_add,
    layer_norm_mlp,
    transformer_block,
    segformer_block,
    gather_rows,
    gather_add_layer_norm,
    scatter_rows,
]
ON_ROWS = ("gather_rows", "gather_add_layer_norm", "scatter_rows")
#: What a composition may take for its parts.
PARTS = ("composed", "triton", "cuda", "cpu", "reference")


def operator_of(make):
    """Returns the operator that a case calls: the one of its name, or the whole block."""
    return "transformer_block" if make is segformer_block else make.__name__


def operations_of(case, stage):
    """Returns the operations of a block's products; None for operators whose memory is what counts."""
    (height, width), channels, class_tokens = suites.stages()[stage]
    if case == "segformer_block":
        ratio, queries = ratio_of(stage), height * width
        keys = height // ratio * (width // ratio)
        products = queries * 10 * channels**2 + keys * (2 + ratio**2) * channels**2
        return 2 * suites.batch() * (products + 2 * queries * keys * channels + 9 * queries * 4 * channels)
    if case != "transformer_block":
        return None
    queries, keys = height * width + class_tokens, -(-height // 2) * -(-width // 2) + class_tokens
    products = queries * 10 * channels**2 + keys * 2 * channels**2 + 2 * queries * keys * channels
    return 2 * suites.batch() * products


def contender(operator, name):
    """Returns a contender, to be called as the public function is."""
    if name != "composed":
        return suites.implementation(operator, name)

    def call(*args, **kwargs):
        with ck.use_backend(*PARTS):
            return getattr(ck, operator)(*args, **kwargs)

    return call


@pytest.mark.parametrize("dtype", suites.dtypes(), ids=suites.short)
@pytest.mark.parametrize("stage", suites.stages())
@pytest.mark.parametrize(
    ("make", "name"),
    [(make, name) for make in CASES for name in suites.contenders(operator_of(make))],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_fused(benchmark, stage, dtype, make, name):
    case, operator = make.__name__, operator_of(make)
    leaves, call = make(stage, dtype, suites.batch())
    ours, reference = (functools.partial(call, contender(operator, which)) for which in (name, "reference"))
    outputs = suites.results(reference, leaves)
    suites.compare(
        benchmark,
        {"suite": "fused", "case": f"{case}, {stage}, forward", "contender": name},
        ours, reference, leaves,
        moved=sum(t.nbytes for t in (*leaves, *outputs)) - unread_bytes(operator, leaves[0]),
        operations=operations_of(case, stage),
    )  # fmt: skip
