"""The reference against independent formulas, in float64; and against PyTorch's modules, in every dtype."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck
from torch.nn import functional as F

from cvt_kernels import reference
from cvt_kernels.reference import ConvBatchNorm
from tests.checks import assert_accurate

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GELUS = ("none", "tanh", "quick")


def random_conv(channels, k=3, *, dtype=torch.float64, grad=False, **settings):
    def parameter(*shape, base=0.0):
        return (base + 0.5 * torch.randn(*shape, dtype=torch.float64)).to(dtype).requires_grad_(grad)

    return ConvBatchNorm(
        parameter(channels, 1, k, k),
        parameter(channels, base=1.0),
        parameter(channels),
        torch.randn(channels, dtype=torch.float64).to(dtype),
        (0.5 + torch.rand(channels, dtype=torch.float64)).to(dtype),
        torch.tensor(3),
        **settings,
    )


def clone_buffers(conv):
    return conv._replace(
        **{
            name: getattr(conv, name).clone()
            for name in ("running_mean", "running_var", "num_batches_tracked")
        }
    )


def modules(conv, channels):
    """Returns nn.Conv2d and nn.BatchNorm2d with copies of the tensors of ``conv``."""
    k = conv.weight.shape[-1]
    settings = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    conv2d = nn.Conv2d(channels, channels, k, groups=channels, bias=False, **settings)
    bn = nn.BatchNorm2d(channels, momentum=conv.momentum, eps=conv.eps)
    both = nn.Sequential(conv2d, bn).to(conv.weight.dtype)
    with torch.no_grad():
        for ours, theirs in (
            (conv.weight, conv2d.weight),
            (conv.bn_weight, bn.weight),
            (conv.bn_bias, bn.bias),
            (conv.running_mean, bn.running_mean),
            (conv.running_var, bn.running_var),
            (conv.num_batches_tracked, bn.num_batches_tracked),
        ):
            theirs.copy_(ours)
    return both


def tokens_to_image(x, grid):
    """Returns tokens as (B, C, H, W), without the class token, spelled out pixel by pixel."""
    height, width = grid
    image = x.new_empty(x.shape[0], x.shape[2], height, width)
    first = x.shape[1] - height * width
    for i in range(height):
        for j in range(width):
            image[:, :, i, j] = x[:, first + i * width + j]
    return image


def image_to_tokens(image, class_token):
    pixels = [image[:, :, i, j] for i in range(image.shape[2]) for j in range(image.shape[3])]
    return torch.cat([class_token, torch.stack(pixels, dim=1)], dim=1)


def conv_by_taps(image, weight, stride, padding, dilation):
    """Computes a depthwise convolution as a sum over the taps."""
    padded = F.pad(image, [padding] * 4)
    k = weight.shape[-1]
    height, width = ((n - dilation * (k - 1) - 1) // stride + 1 for n in padded.shape[2:])
    total = 0
    for a in range(k):
        for b in range(k):
            rows = slice(a * dilation, a * dilation + (height - 1) * stride + 1, stride)
            columns = slice(b * dilation, b * dilation + (width - 1) * stride + 1, stride)
            total = total + padded[:, :, rows, columns] * weight[:, :, a, b, None]
    return total


# conv_projection ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_tokens", [0, 1])
@pytest.mark.parametrize(
    ("k", "stride", "padding", "dilation"),
    [
        (1, 1, 0, 1),
        (1, 2, 0, 1),
        (3, 1, 1, 1),
        (3, 2, 1, 1),
        (3, 1, 2, 2),
        (5, 2, 2, 1),
        (5, 3, 4, 2),
        (7, 1, 3, 1),
    ],
)
def test_conv_projection_is_its_formula(k, stride, padding, dilation, class_tokens):
    batch, grid, channels, momentum, eps = 2, (7, 6), 3, 0.3, 1e-3
    x = torch.randn(batch, class_tokens + grid[0] * grid[1], channels, dtype=torch.float64)
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "momentum": momentum, "eps": eps}
    conv = random_conv(channels, k, **settings)
    y = conv_by_taps(tokens_to_image(x, grid), conv.weight, stride, padding, dilation)
    assert conv.output_grid(grid) == tuple(y.shape[2:])

    def normalized(mean, var):
        mean, var, gamma, beta = (t.view(1, -1, 1, 1) for t in (mean, var, conv.bn_weight, conv.bn_bias))
        return image_to_tokens((y - mean) / (var + eps).sqrt() * gamma + beta, x[:, :class_tokens])

    (out,) = reference.conv_projection(x, grid, [conv], training=False)
    torch.testing.assert_close(out, normalized(conv.running_mean, conv.running_var), rtol=0, atol=1e-12)

    trained = clone_buffers(conv)
    (out,) = reference.conv_projection(x, grid, [trained], training=True)
    count = y.numel() // channels
    mean = y.sum(dim=(0, 2, 3)) / count
    square = ((y - mean.view(1, -1, 1, 1)) ** 2).sum(dim=(0, 2, 3))
    torch.testing.assert_close(out, normalized(mean, square / count), rtol=0, atol=1e-12)
    expected_mean = (1 - momentum) * conv.running_mean + momentum * mean
    expected_var = (1 - momentum) * conv.running_var + momentum * square / (count - 1)
    torch.testing.assert_close(trained.running_mean, expected_mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(trained.running_var, expected_var, rtol=0, atol=1e-12)
    assert trained.num_batches_tracked == conv.num_batches_tracked + 1


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_running_statistics_are_bitwise_those_of_batch_norm(dtype, momentum):
    grid, channels = (6, 5), 8
    conv = random_conv(channels, dtype=dtype, padding=1, momentum=momentum)
    theirs = modules(conv, channels).train()
    for _ in range(3):
        x = torch.randn(2, 30, channels).to(dtype)
        image = x.transpose(1, 2).unflatten(2, grid)
        (out,) = reference.conv_projection(x, grid, [conv], training=True)
        assert torch.equal(out, theirs(image).flatten(2).transpose(1, 2))
    assert torch.equal(conv.running_mean, theirs[1].running_mean)
    assert torch.equal(conv.running_var, theirs[1].running_var)
    assert torch.equal(conv.num_batches_tracked, theirs[1].num_batches_tracked)


def test_branches_are_independent_and_without_affine_or_statistics():
    x = torch.randn(2, 21, 4, dtype=torch.float64)
    q, k = random_conv(4, padding=1), random_conv(4, 5, stride=2, padding=2)
    together = reference.conv_projection(x, (4, 5), [q, k], training=False)
    for conv, out in zip((q, k), together, strict=True):
        assert torch.equal(out, reference.conv_projection(x, (4, 5), [conv], training=False)[0])
    bare = ConvBatchNorm(q.weight, None, None, None, None, padding=1)
    plain = bare._replace(bn_weight=torch.ones(4).double(), bn_bias=torch.zeros(4).double())
    outs = [
        reference.conv_projection(x, (4, 5), [c], training=t)[0] for c in (bare, plain) for t in (True, False)
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)  # without statistics, evaluation uses the batch's


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_conv_projection_over_odd_sizes(data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    grid, channels, batch = (draw(1, 6), draw(1, 6)), draw(1, 5), draw(1, 3)
    k = data.draw(st.sampled_from([1, 3, 5, 7]))
    conv = random_conv(channels, k, stride=draw(1, 8), padding=draw(k // 2, 4), dilation=draw(1, 2))
    height, width = conv.output_grid(grid)
    if height < 1 or width < 1:
        return
    training = data.draw(st.booleans()) and batch * height * width > 1
    x = torch.randn(batch, grid[0] * grid[1] + draw(0, 1), channels, dtype=torch.float64)
    theirs = modules(conv, channels).train(training)(tokens_to_image(x, grid))
    (out,) = reference.conv_projection(x, grid, [conv], training=training)
    class_token = x[:, : x.shape[1] - grid[0] * grid[1]]
    torch.testing.assert_close(out, image_to_tokens(theirs, class_token), rtol=1e-9, atol=1e-9)
    assert out.is_contiguous()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("class_tokens", [0, 1])
@pytest.mark.parametrize("batch", [1, 2])
def test_conv_projection_gradients(training, class_tokens, batch):
    grid, channels = (4, 3), 2
    x = torch.randn(batch, class_tokens + 12, channels, dtype=torch.float64, requires_grad=True)
    convs = [random_conv(channels, grad=True, stride=s, padding=1) for s in (1, 2)]
    names = ("weight", "bn_weight", "bn_bias")

    def function(x, *parameters):
        live = [
            clone_buffers(conv)._replace(**dict(zip(names, parameters[3 * i : 3 * i + 3], strict=True)))
            for i, conv in enumerate(convs)
        ]
        return reference.conv_projection(x, grid, live, training=training)

    assert gradcheck(function, (x, *(getattr(conv, name) for conv in convs for name in names)))


# attention ------------------------------------------------------------------------------------------------


def sdpa(q, k, v, scale=None, bias=None):
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=bias, scale=scale)
    return out.transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_attention_over_odd_sizes(data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    batch, queries, keys, heads, dim = draw(1, 3), draw(1, 9), draw(1, 9), draw(1, 3), draw(1, 8)
    q, k, v = (torch.randn(batch, n, heads, dim, dtype=torch.float64) for n in (queries, keys, keys))
    bias = None
    if data.draw(st.booleans()):
        full = (batch, heads, queries, keys)
        shape = [data.draw(st.sampled_from([1, n])) for n in full][draw(0, 4) :]
        bias = torch.randn(shape, dtype=torch.float64)
    scale = data.draw(st.sampled_from([None, 0.3, -1.0, 0.0]))
    out = reference.attention(q, k, v, scale=scale, bias=bias)
    expanded = None if bias is None else bias.expand(batch, heads, queries, keys)
    torch.testing.assert_close(out, sdpa(q, k, v, scale, expanded), rtol=1e-10, atol=1e-10)
    assert out.is_contiguous()


def test_attention_by_hand():
    q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    k = torch.tensor([[0.0, 5.0], [math.log(3), -5.0]]).view(1, 2, 1, 2)
    v = torch.tensor([[4.0, 0.0], [8.0, 1.0]]).view(1, 2, 1, 2)
    out = reference.attention(q, k, v, scale=1.0)  # weights 1/4 and 3/4
    torch.testing.assert_close(out.flatten(), torch.tensor([7.0, 0.75]))


def test_rows_excluded_by_the_bias_are_zero_and_have_zero_gradients():
    q, k, v = (torch.randn(1, n, 1, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5, 5))
    bias = torch.zeros(1, 1, 3, 5, dtype=torch.float64)
    bias[:, :, 1] = -torch.inf
    bias[:, :, 2, :4] = -torch.inf
    bias.requires_grad_()
    out = reference.attention(q, k, v, bias=bias)
    assert torch.equal(out[0, 1, 0], torch.zeros(4).double())
    torch.testing.assert_close(out[0, 2, 0], v[0, 4, 0])
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v, bias))
    assert not bias.grad[:, :, 1].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_stay_finite(dtype):
    q, k, v = (torch.randn(1, n, 2, 16).to(dtype) * 80 for n in (5, 7, 7))
    assert (torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / 4).abs().max() > 1e4
    assert reference.attention(q, k, v).isfinite().all()


@pytest.mark.parametrize("bias_shape", [None, (2, 2, 3, 4), (1, 2, 1, 4), (4,)])
def test_attention_gradients(bias_shape):
    inputs = [torch.randn(2, n, 2, 3, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4)]
    if bias_shape is not None:
        inputs.append(torch.randn(bias_shape, dtype=torch.float64, requires_grad=True))
    assert gradcheck(
        lambda q, k, v, bias=None: reference.attention(q, k, v, scale=0.7, bias=bias), tuple(inputs)
    )


def test_attention_dropout_keeps_the_mean():
    q, k = (torch.randn(1, n, 1, 4) for n in (200, 300))
    v = torch.ones(1, 300, 1, 4)
    out = reference.attention(q, k, v, dropout_p=0.25)
    assert not torch.equal(out, torch.ones_like(out))
    assert abs(out.mean() - 1) < 0.01


# layer_norm and gelu --------------------------------------------------------------------------------------


def layer_norm_formula(x, weight, bias, eps):
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]
    return (x - mean) / (variance + eps).sqrt() * weight + bias


def gelu_formula(x, approximate):
    def scalar(x):
        if approximate == "none":
            return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))
        if approximate == "tanh":
            return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x / (1 + math.exp(-1.702 * x))

    return torch.tensor([scalar(v) for v in x.flatten().tolist()], dtype=torch.float64).view(x.shape)


@pytest.mark.parametrize("approximate", GELUS)
def test_layer_norm_and_gelu_are_their_formulas(approximate):
    x, residual = (3 * torch.randn(2, 5, 7, dtype=torch.float64) for _ in range(2))
    weight, bias = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    close = {"rtol": 1e-12, "atol": 1e-12}
    normed = layer_norm_formula(x, weight, bias, 1e-3)
    torch.testing.assert_close(reference.layer_norm(x, weight, bias, eps=1e-3), normed, **close)
    bare = layer_norm_formula(x, torch.ones(7), torch.zeros(7), 1e-5)
    torch.testing.assert_close(reference.layer_norm(x), bare, **close)
    h, y = reference.add_layer_norm(x, residual, weight, bias, eps=1e-3)
    torch.testing.assert_close(h, x + residual, **close)
    torch.testing.assert_close(y, layer_norm_formula(x + residual, weight, bias, 1e-3), **close)
    torch.testing.assert_close(
        reference.gelu(x, approximate=approximate), gelu_formula(x, approximate), **close
    )
    biased = reference.bias_gelu(x, bias, approximate=approximate)
    torch.testing.assert_close(biased, gelu_formula(x + bias, approximate), **close)
    fused = reference.layer_norm_gelu(x, weight, bias, eps=1e-3, approximate=approximate)
    torch.testing.assert_close(fused, gelu_formula(normed, approximate), **close)


@pytest.mark.parametrize("approximate", GELUS)
def test_layer_norm_and_gelu_gradients(approximate):
    x, residual = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert gradcheck(reference.layer_norm, (x, weight, bias))
    assert gradcheck(reference.add_layer_norm, (x, residual, weight, bias))
    assert gradcheck(lambda x: reference.gelu(x, approximate=approximate), (x,))
    assert gradcheck(lambda x, b: reference.bias_gelu(x, b, approximate=approximate), (x, bias))
    assert gradcheck(
        lambda x, w, b: reference.layer_norm_gelu(x, w, b, approximate=approximate), (x, weight, bias)
    )


# dtypes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operator_keeps_the_dtype_and_its_accuracy(dtype):
    """Compares each with another composition in the same dtype and in float64."""

    def check(function, composition, *tensors):
        exact = composition(*(t.double() for t in tensors))
        assert_accurate(function(*tensors), composition(*tensors), exact, floor=4)

    def normed(x, weight, bias):
        return layer_norm_formula(x, weight, bias, 1e-5)

    def tanh_gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 20, 16), (16,), (16,)))
    check(reference.layer_norm, normed, x, weight, bias)
    check(
        lambda x, w, b: reference.add_layer_norm(x, x, w, b)[1],
        lambda x, w, b: normed(2 * x, w, b),
        *(x, weight, bias),
    )
    check(lambda x: reference.gelu(x, approximate="quick"), lambda x: x / (1 + torch.exp(-1.702 * x)), x)
    check(reference.bias_gelu, lambda x, b: 0.5 * (x + b) * (1 + torch.erf((x + b) / math.sqrt(2))), x, bias)
    check(
        lambda x, w, b: reference.layer_norm_gelu(x, w, b, approximate="tanh"),
        lambda x, w, b: tanh_gelu(normed(x, w, b)),
        *(x, weight, bias),
    )
    check(reference.attention, sdpa, *(torch.randn(2, n, 2, 16).to(dtype) for n in (9, 5, 5)))
    conv = random_conv(16, dtype=dtype, padding=1, stride=2)
    branch = modules(conv, 16).eval()
    (out,) = reference.conv_projection(x, (4, 5), [conv], training=False)
    with torch.no_grad():
        same_dtype = image_to_tokens(branch(tokens_to_image(x, (4, 5))), x[:, :0])
        exact = image_to_tokens(branch.double()(tokens_to_image(x.double(), (4, 5))), x[:, :0].double())
    assert_accurate(out, same_dtype, exact)
