"""The operators that graphs of torch.compile call."""

import sys

import pytest
import torch
from torch.library import opcheck

import cvt_kernels.ops.attention.triton.autograd
import cvt_kernels.ops.conv_projection.triton.autograd
import cvt_kernels.ops.depthwise_conv_gelu.triton.autograd
import cvt_kernels.ops.linear.triton.autograd  # noqa: F401
from cvt_kernels.ops import graph_operators

ops = torch.ops.cvt_kernels

C, GRID = 8, (6, 5)
GEOMETRY, EPSS = [*GRID, *(3, 3), *(1, 2), *(1, 1), *(1, 1), *(1, 1)], [1e-5, 1e-5]


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def of_channels():
    return [[normal(C).abs() + 0.5 for _ in range(2)] for _ in range(4)]


def projection():
    weights = [normal(C, 1, 3, 3) for _ in range(2)]
    return (normal(2, 30, C), weights, *of_channels(), GEOMETRY, EPSS, True)


def projection_backward():
    x, weights, gammas, _, means, variances, *constants = projection()
    return (x, weights, gammas, means, variances, [normal(2, 30, C), normal(2, 9, C)], *constants)


def update():
    means, variances, running_means, running_variances = of_channels()
    tracked = [torch.tensor(3), torch.tensor(5)]
    shared = running_means, running_variances, tracked, [0.1, 0.2], [1.1, 1.2]
    return (torch.stack(means), torch.stack(variances), [0, 1], *shared)


def mix_backward(has_bias=True, needs_dx=True):
    bias = normal(C) if has_bias else None
    return normal(2, 30, C), normal(2, 30, C), list(GRID), normal(C, 1, 3, 3), bias, "none", needs_dx


def attention(*, is_merged=True):
    shape = (2, 5, 16) if is_merged else (2, 5, 2, 8)
    return normal(*shape), normal(2, 4, 16), normal(2, 4, 16), None, 0.3, 2


def attention_backward(*, is_merged=True):
    q, k, v, bias, scale, heads = attention(is_merged=is_merged)
    out, stats = ops.attention(q, k, v, bias, scale, heads)
    return q, k, v, bias, out, stats, normal(*out.shape), scale, heads, False


CALLS = {
    "conv_projection": projection,
    "conv_projection_backward": projection_backward,
    "conv_projection_statistics": lambda: (*projection()[:2], GEOMETRY, EPSS, *update()[2:]),
    "conv_projection_statistics_alone": lambda: (*projection()[:2], GEOMETRY, EPSS, *[[]] * 6),
    "update_running_statistics": update,
    "triton_depthwise_conv_gelu": lambda: (*mix_backward()[1:-1],),
    "triton_depthwise_conv_gelu_backward": mix_backward,
    "attention": attention,
    "attention_backward": attention_backward,
    "attention_of_heads": lambda: attention(is_merged=False),
    "attention_backward_of_heads": lambda: attention_backward(is_merged=False),
    "linear_gelu": lambda: (normal(6, 8), normal(4, 8), normal(4), "none"),
    "linear_starts": lambda: (
        *(normal(6, 8), torch.float32, torch.float32, normal(6, 8)), "none", True, None, False,
    ),
    "linear_ends": lambda: (normal(6, 8), normal(8), normal(6, 8), normal(3).abs(), True, torch.float32),
    "linear_add_": lambda: (normal(6, 8), normal(4, 8), None, normal(6, 4)),
    "cast_together": lambda: ([normal(3, 2), normal(4, 2)], torch.bfloat16, [2]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_operators_are_what_graphs_take_them_for(name):
    """They write to what their schema says, return memory of their own, and tell shapes as they are."""
    operator = getattr(ops, name.removesuffix("_of_heads").removesuffix("_alone")).default
    for _ in range(2):  # the second call has a plan
        opcheck(operator, CALLS[name](), test_utils=("test_schema", "test_faketensor"))


def test_depthwise_gradients_without_a_bias_or_those_of_x():
    for given in (mix_backward(False), mix_backward(True, False), mix_backward(False, False)):
        opcheck(
            ops.triton_depthwise_conv_gelu_backward.default,
            given,
            test_utils=("test_schema", "test_faketensor"),
        )


def test_changes_are_counted():
    """Autograd detects what an operator writes over; inference tensors count nothing."""
    given = update()
    written = [each for column in given[3:6] for each in column]
    before = [each._version for each in written]
    ops.update_running_statistics(*given)
    assert all(each._version > n for each, n in zip(written, before, strict=True))
    with torch.inference_mode():
        x, weight, _, residual = CALLS["linear_add_"]()
        expected = residual + x @ weight.t()
        ops.linear_add_(x, weight, None, residual)
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
