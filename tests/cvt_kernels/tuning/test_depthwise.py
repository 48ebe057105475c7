"""Depthwise convolutions in float64 as sums: the same numbers; any other convolution is PyTorch's own."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from cvt_kernels import backends
from cvt_kernels.tuning import tuner
from cvt_kernels.tuning.depthwise import AsSums
from tests.checks import recorded_operators
from tests.cvt_kernels.test_reference import random_conv

GEOMETRIES = list(itertools.product([(1, 1), (3, 3), (2, 5)], [1, 2, 3], [0, 1, 2], [1, 2]))


def make(channels=5, size=(3, 3), batch=2, dtype=torch.float64):
    image = torch.randn(batch, 11, 13, channels, dtype=dtype).permute(0, 3, 1, 2)  # channels last
    return image, torch.randn(channels, 1, *size, dtype=dtype), torch.randn(channels, dtype=dtype)


@pytest.mark.parametrize(("size", "stride", "padding", "dilation"), GEOMETRIES)
def test_the_sums_are_the_convolution_with_its_gradients(size, stride, padding, dilation):
    leaves = [tensor.requires_grad_() for tensor in make(size=size)]
    results = []
    for is_sum in (True, False):
        with recorded_operators() as operators:
            if is_sum:
                with AsSums():
                    out = F.conv2d(*leaves, stride, padding, dilation, groups=5)
            else:
                out = F.conv2d(*leaves, stride, padding, dilation, groups=5)
        assert any("convolution" in name for name in operators) != is_sum
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ({"dtype": torch.float32}, {"groups": 5}),
        ({}, {"groups": 5, "padding": "same"}),
        ({}, {"groups": 5, "stride": (1, 2)}),
    ],
    ids=["float32", "words", "pairs"],
)
def test_other_convolutions_are_pytorchs(change, settings):
    tensors = make(**change)
    with AsSums():
        out = F.conv2d(*tensors, **settings)
    assert torch.equal(out, F.conv2d(*tensors, **settings))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_oracle_has_no_convolution_in_float64(batch, gradient):
    """One image too: some strides would make PyTorch's BatchNorm compute wrong gradients on a CPU."""
    x, conv = torch.randn(batch, 21, 6), random_conv(6, padding=1, dtype=torch.float32, grad=gradient)
    declared = backends.operators["conv_projection"]
    call = tuner.Call(declared.bind(x.requires_grad_(gradient), (4, 5), (conv,), training=False), gradient)
    exact_call = call.map(lambda tensor: tensor.detach().double().requires_grad_(tensor.requires_grad))
    with recorded_operators() as operators, tuner.undisturbed(x.device):
        expected = tuner.Expected.of(declared.reference, call)
    assert operators == []  # undisturbed
    plain = tuner.run(declared.reference, exact_call, [dout.double() for dout in expected.douts])
    torch.testing.assert_close(expected.exact.outputs, plain.outputs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(expected.exact.gradients, plain.gradients, rtol=1e-10, atol=1e-10)
    assert len(plain.gradients) == (4 if gradient else 0)
