"""conv_linear as a composition of other operators, on the CPU."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import choose
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
    assert not choose.may_be_ours("conv_linear", "meta")
