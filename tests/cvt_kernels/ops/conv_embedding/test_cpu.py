"""conv_embedding by the compiled extension, on every instruction set."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import assert_accurate, every_instruction_set, needs_extension
from tests.cvt_kernels.ops.agreement import DTYPES, assert_agrees_on


@needs_extension
@every_instruction_set
def test_values(name):
    sizes = {"height": 41, "width": 30, "inputs": 5, "channels": 80, "kernel": 7, "stride": 4, "padding": 2}
    assert_agrees_on(name, "conv_embedding", sizes, sizes | {"channels_last": True}, dtypes=DTYPES[:3])


def call(image, parameters, class_token=None):
    return ck.conv_embedding(image, *parameters, stride=2, padding=1, class_token=class_token)


def make_parameters():
    return [torch.randn(20, 3, 3, 3), *torch.randn(3, 20)]


@needs_extension
@pytest.mark.parametrize("absent", [(1,), (2,), (3,), (1, 2, 3)])
@torch.no_grad()
def test_images_of_other_strides_and_absent_parameters(absent):
    image = torch.randn(2, 10, 13, 6).permute(0, 3, 1, 2)[:, ::2, 1:, ::2]  # neither layout
    parameters = [None if i in absent else tensor for i, tensor in enumerate(make_parameters())]
    for view in (image, image.transpose(2, 3), image.contiguous(memory_format=torch.channels_last)):
        with ck.use_backend("cpu"):
            out = call(view, parameters)
        expected = reference.conv_embedding(view, *parameters, stride=2, padding=1)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@needs_extension
@pytest.mark.parametrize("channels_last", [False, True])
@torch.no_grad()
def test_sums_of_thousands_of_inputs_are_accurate(channels_last):
    image, parameters = torch.randn(2, 320, 14, 14), [torch.randn(96, 320, 3, 3), *torch.randn(3, 96)]
    if channels_last:
        image = image.contiguous(memory_format=torch.channels_last)
    with ck.use_backend("cpu"):
        out = call(image, parameters)
    exact = reference.conv_embedding(image.double(), *(p.double() for p in parameters), stride=2, padding=1)
    assert_accurate(out, reference.conv_embedding(image, *parameters, stride=2, padding=1), exact)
