"""Calls of transformer_block on a CPU, and what every backend must make of them."""

import pytest
import torch
from torch.utils import _pytree as pytree

import cvt_kernels as ck
from cvt_kernels import reference
from cvt_kernels.ops.transformer_block import transformer_block
from cvt_kernels.records import DepthwiseConv, Linear, Norm, QuantizedLinear, Reduction, TransformerBlock
from tests.checks import assert_accurate
from tests.cvt_kernels.test_reference import random_conv

#: The backends under test, each with those that serve its parts.
BACKENDS = {
    "reference": ("reference",),
    "composed": ("composed", "cpu", "reference"),
    "cpu": ("cpu",),
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def make(
    batch=2, grid=(4, 5), channels=24, heads=3, class_tokens=0, *, bias=True, approximate="none",
    dtype=torch.float32, strides=(1, 2, 2), ratio=None, convolves=False, hidden=None, width=None, scale=None,
):  # fmt: skip
    """Returns the arguments of a call.

    Keys and values come from convolutions, unless there is a ``ratio``, of a reduction, where 0 is none.
    The block attends in ``width`` channels.
    """
    width, hidden = width or channels, hidden or 3 * channels

    def randn(*shape, scale=1.0):
        return (torch.randn(shape) * scale).to(dtype)

    def linear(outputs, inputs):
        return Linear(randn(outputs, inputs, scale=inputs**-0.5), randn(outputs) if bias else None)

    def norm():
        if not bias:
            return Norm(None, None, 1e-3)
        return Norm(1 + randn(channels, scale=0.25), randn(channels), 1e-5)

    reduce = None
    if ratio is None:
        reduce = tuple(random_conv(channels, dtype=dtype, stride=stride, padding=1) for stride in strides)
    elif ratio:
        weight = randn(channels, channels, ratio, ratio, scale=channels**-0.5 / ratio)
        reduce = Reduction(weight, randn(channels) if bias else None, norm())
    mix = DepthwiseConv(randn(hidden, 1, 3, 3, scale=1 / 3), randn(hidden) if bias else None)
    block = TransformerBlock(
        norm1=norm(),
        reduce=reduce,
        linears=tuple(linear(width, channels) for _ in range(3)),
        num_heads=heads,
        scale=scale,
        proj=linear(channels, width),
        norm2=norm(),
        fc1=linear(hidden, channels),
        approximate=approximate,
        fc2=linear(channels, hidden),
        mix=mix if convolves else None,
    )
    return randn(batch, class_tokens + grid[0] * grid[1], channels), grid, block


def pyramid(batch=2, grid=(6, 5), channels=24, heads=3, *, ratio=2, convolves=True, **settings):
    """Returns the arguments of a call of a block of SegFormer; with ``convolves=False`` of PVT."""
    return make(batch, grid, channels, heads, ratio=ratio, convolves=convolves, **settings)


def in_float64(arguments):
    """Returns the arguments in float64; the scales of 8-bit numbers stay in float32, as operators expect."""

    def wide(leaf):
        if isinstance(leaf, QuantizedLinear):
            return leaf._replace(bias=wide(leaf.bias))
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(wide, arguments, is_leaf=lambda leaf: isinstance(leaf, QuantizedLinear))


def call(backend, arguments, **settings):
    with torch.no_grad(), ck.use_backend(*BACKENDS[backend]):
        return transformer_block(*arguments, **settings)


def check(backend, arguments):
    """Compares a call, a second one like it, and one in place, with the reference and with float64."""
    x, grid, block = arguments
    same, exact = reference.transformer_block(*arguments), reference.transformer_block(*in_float64(arguments))
    given = x.clone()
    out = call(backend, arguments)
    assert torch.equal(call(backend, arguments), out)
    assert torch.equal(x, given)
    if x.is_contiguous():
        assert out.is_contiguous()
        stream = x.clone()
        assert call(backend, (stream, grid, block), inplace=True) is stream
        assert torch.equal(stream, out)
    # oneDNN sums products in another order than MKL, with other rounding.
    assert_accurate(out, same, exact, floor=4)


def check_images_apart(arguments, atol):
    """Checks that CPU kernels compute an image alone as in a batch, which they cut otherwise."""
    x, *rest = arguments
    out = call("cpu", arguments)
    assert torch.equal(torch.cat([call("cpu", (image[None], *rest)) for image in x]), out)
    exact = reference.transformer_block(*in_float64(arguments))
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=atol)


def is_computed(x, rows):
    """Returns which tokens (B, T, 1) are among the rows."""
    return (rows[:, :, None] == torch.arange(x.shape[1])).any(1)[..., None]


def quantized(layer, dtype=torch.int8):
    values, scales = reference.quantize_rows(layer.weight, dtype=dtype)
    return QuantizedLinear(values, scales.flatten(), layer.bias)


def with_quantized(arguments, which=range(6), dtype=torch.int8):
    """Returns the arguments of a call with some of the six layers quantized."""
    x, grid, block = arguments
    layers = [quantized(layer, dtype) if i in which else layer for i, layer in enumerate(block.layers())]
    linears, (proj, fc1, fc2) = tuple(layers[:3]), layers[3:]
    return x, grid, block._replace(linears=linears, proj=proj, fc1=fc1, fc2=fc2)


def decibels(expected, actual):
    """Returns the ratio of a signal to the noise in another version of it."""
    noise = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def is_far_from_ties(arguments, least=75.0, **settings):
    """Returns whether float32's rounding takes no number that matters to another integer of 8 bits.

    If one does depends on the CPU, and changes the result by 50 to 80 dB. Here other inputs stand for other
    roundings: numbers that differ by a few units in the last place.
    """

    def result(x):
        out = reference.transformer_block(x, *rest, **settings)
        return (out[0] if isinstance(out, tuple) else out) - x

    x, *rest = arguments
    expected, generator = result(x), torch.Generator().manual_seed(0)
    nudges = (1 + 1e-6 * torch.randn(x.shape, generator=generator) for _ in range(4))
    return all(decibels(expected, result(x * nudge)) > least for nudge in nudges)


def far_from_ties(made, least=75.0, **settings):
    """Returns arguments as `made` makes them, drawn anew until they are far from ties."""
    drawn = (made() for _ in range(100))
    return next(arguments for arguments in drawn if is_far_from_ties(arguments, least, **settings))


def some_rows(x, grid, kept, seed=0):
    """Returns the rows (B, kept) of a call; the class token is among them, and the second image has fewer."""
    generator = torch.Generator().manual_seed(seed)
    batch, tokens = x.shape[:2]
    class_tokens = tokens - grid[0] * grid[1]
    rows = torch.zeros(batch, kept, dtype=torch.int64)
    for image in rows:
        spatial = torch.randperm(tokens - class_tokens, generator=generator)[: kept - class_tokens]
        image[class_tokens:] = spatial.sort().values + class_tokens
    if batch > 1 and kept > 2:
        rows[1, -2:] = -1
    return rows
