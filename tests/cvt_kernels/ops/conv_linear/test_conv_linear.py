"""conv_linear: what it accepts and what it refuses, and its composition of other operators, on the CPU."""

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import dispatch
from tests.checks import assert_accurate, record_all_calls
from tests.cvt_kernels.test_reference import random_conv

GRID = (4, 5)
STRIDES = (1, 2, 2)


def make(batch=2, grid=GRID, channels=6, class_tokens=0, *, outputs=(6, 6, 6), strides=STRIDES, bias=True):
    x = torch.randn(batch, class_tokens + grid[0] * grid[1], channels)
    convs = [random_conv(channels, dtype=torch.float32, stride=s, padding=1) for s in strides]
    linears = [(torch.randn(n, channels) * channels**-0.5, torch.randn(n) if bias else None) for n in outputs]
    return x, grid, convs, linears


def by_hand(x, grid, convs, linears):
    """Computes every branch in float64, by PyTorch's operators on maps."""
    results = []
    class_tokens = x.shape[1] - grid[0] * grid[1]
    for conv, (weight, bias) in zip(convs, linears, strict=True):
        image = x[:, class_tokens:].double().transpose(1, 2).unflatten(2, grid)
        y = F.conv2d(image, conv.weight.double(), None, conv.stride, conv.padding, groups=x.shape[2])
        statistics = (conv.running_mean, conv.running_var, conv.bn_weight, conv.bn_bias)
        y = F.batch_norm(y, *(t.double() for t in statistics), eps=conv.eps)
        tokens = torch.cat([x[:, :class_tokens].double(), y.flatten(2).transpose(1, 2)], dim=1)
        results.append(F.linear(tokens, weight.double(), None if bias is None else bias.double()))
    return results


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("class_tokens", [0, 1])
def test_values(class_tokens, bias, backend):
    arguments = make(class_tokens=class_tokens, bias=bias, outputs=(3, 6, 8))
    with ck.use_backend(backend):
        outs = ck.conv_linear(*arguments)
    theirs = ck.reference.conv_linear(*arguments)
    tokens = [20 + class_tokens, 6 + class_tokens, 6 + class_tokens]
    assert [out.shape for out in outs] == [(2, t, n) for t, n in zip(tokens, (3, 6, 8), strict=True)]
    for out, same_dtype, exact in zip(outs, theirs, by_hand(*arguments), strict=True):
        assert out.is_contiguous()
        assert_accurate(out, same_dtype, exact, floor=4)


def test_without_a_kernel_it_is_composed():
    """Then each part is dispatched by itself."""
    arguments = make()
    called = record_all_calls()
    with ck.use_backend("native"), torch.no_grad():
        ck.conv_linear(*arguments)
    assert called == ["conv_linear"]
    assert not dispatch.may_be_ours("conv_linear", "meta")
    with torch.no_grad():
        ck.conv_linear(*arguments)
    assert called == ["conv_linear"]  # auto without verdicts takes PyTorch's own operators
