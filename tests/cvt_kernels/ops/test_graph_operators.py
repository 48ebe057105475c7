"""The operators that graphs of torch.compile call."""

import math
import sys

import torch

import cvt_kernels.ops.attention.triton.autograd
import cvt_kernels.ops.conv_projection.triton.autograd
import cvt_kernels.ops.depthwise_conv_gelu.triton
import cvt_kernels.ops.linear.triton.autograd  # noqa: F401
from cvt_kernels.ops import graph_operators

ops = torch.ops.cvt_kernels

C, GRID = 8, (6, 5)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def of_channels():
    return [[normal(C).abs() + 0.5 for _ in range(2)] for _ in range(2)]


def statistics():
    weights, running_means, running_variances = [normal(C, 1, 3, 3) for _ in range(2)], *of_channels()
    tracked = [torch.tensor(3), torch.tensor(5)]
    shared = running_means, running_variances, tracked, [0.1, 0.2], [1.1, 1.2]
    return (normal(2, math.prod(GRID), C), list(GRID), [1, 2], weights, [0, 1], *shared)


def attention(*, is_merged=True):
    shape = (2, 5, 16) if is_merged else (2, 5, 2, 8)
    return normal(*shape), normal(2, 4, 16), normal(2, 4, 16), None, 0.3, 2


def test_changes_are_counted():
    """Autograd detects what an operator writes over; inference tensors count nothing."""
    given = statistics()
    written = [each for column in given[5:8] for each in column]
    before = [each._version for each in written]
    ops.conv_projection_statistics(*given)
    assert all(each._version > n for each, n in zip(written, before, strict=True))
    with torch.inference_mode():
        x, weight, residual = normal(6, 8), normal(4, 8), normal(6, 4)
        expected = residual + x @ weight.t()
        ops.linear_add(x, weight, None, None, residual)
        torch.testing.assert_close(residual, expected)


def test_a_call_takes_the_host_little():
    """``torch.library.custom_op`` makes about thirty calls of Python and C for one."""
    operator = graph_operators.graph_operator(
        "of_a_test", schema="(Tensor x, Tensor[] others, int[] settings) -> (Tensor, Tensor)"
    )(lambda x, others, settings: (x, x))
    given, calls = (torch.ones(2), [torch.ones(2)] * 3, [1] * 9), []
    with torch.no_grad():
        operator(*given)
        sys.setprofile(lambda frame, event, called: calls.append(event))
        try:
            operator(*given)
        finally:
            sys.setprofile(None)
    assert sum(event in ("call", "c_call") for event in calls) <= 6
