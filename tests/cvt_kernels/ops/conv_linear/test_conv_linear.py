"""conv_linear as a composition of other operators, on the CPU."""

import types

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import dispatch
from cvt_kernels.ops import conv_linear as family
from tests.checks import record_all_calls
from tests.cvt_kernels.test_reference import random_conv

GRID = (4, 5)


def make(class_tokens=0, *, bias=True):
    x = torch.randn(2, class_tokens + 20, 6)
    convs = [random_conv(6, dtype=torch.float32, stride=s, padding=1) for s in (1, 2, 2)]
    linears = [(torch.randn(n, 6), torch.randn(n) if bias else None) for n in (3, 6, 8)]
    return x, GRID, convs, linears


@pytest.mark.parametrize(("class_tokens", "bias"), [(0, True), (1, False)])
def test_values_of_the_composition(class_tokens, bias):
    arguments = make(class_tokens=class_tokens, bias=bias)
    torch.testing.assert_close(ck.conv_linear(*arguments), ck.reference.conv_linear(*arguments))


@torch.no_grad()
def test_without_a_kernel_it_is_composed():
    """Then each part is dispatched by itself."""
    arguments = make()
    called = record_all_calls()
    with ck.use_backend("cpu"):
        ck.conv_linear(*arguments)
    assert called == ["conv_linear"]
    assert not dispatch.may_be_ours("conv_linear", "meta")
    ck.conv_linear(*arguments)
    assert called == ["conv_linear"]  # auto without entries takes PyTorch's own operators


@pytest.mark.parametrize(
    ("images", "tokens", "channels", "in_parts"),
    [
        (256, 3136, 64, False),
        (8, 784, 192, False),
        (32, 784, 192, True),
        (256, 784, 192, True),
        (1, 197, 384, True),
    ],
)
def test_a_gpu_takes_the_parts_where_they_are_faster(images, tokens, channels, in_parts):
    x = types.SimpleNamespace(is_cuda=True, shape=torch.Size((images, tokens, channels)))
    call = types.SimpleNamespace(x=x)
    with ck.use_backend("auto"):
        assert (family._instead(call) is family._compose) == in_parts
    with ck.use_backend("triton"):
        assert family._instead(call) is None
