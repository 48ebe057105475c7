"""A bias of the scores, by PyTorch's scaled_dot_product_attention on a CPU."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import accuracy
from tests.checks import assert_accurate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 9, 17), (1, 3, 9, 17), (2, 1, 1, 17), (3, 9, 17), (9, 17), (17,)])
@pytest.mark.parametrize("learned", [False, True])
def test_a_bias_that_may_exclude_every_key(shape, dtype, learned):
    tensors = [torch.randn(2, n, 3, 16).to(dtype) for n in (9, 17, 17)]
    bias = torch.randn(shape).to(dtype)
    bias[..., 4] = -torch.inf
    if len(shape) > 1:
        bias[(0,) * (len(shape) - 1)] = -torch.inf  # a row of nothing
    results = []
    for backend, convert in (("sdpa", dtype), ("reference", dtype), ("reference", torch.float64)):
        leaves = [x.to(convert).detach().clone().requires_grad_(learned) for x in (*tensors, bias)]
        with ck.use_backend(backend):
            out = ck.attention(*leaves[:3], bias=leaves[3], scale=0.3)
        grads = torch.autograd.grad(out.float().square().sum(), leaves) if learned else ()
        results.append((out, *grads))
    factors = accuracy.VALUE_FACTOR, *4 * (accuracy.GRADIENT_FACTOR,)
    for actual, own, exact, factor in zip(*results, factors, strict=False):
        assert_accurate(actual, own, exact, factor=factor, floor=2.0)


def test_a_bias_and_a_bias_by_position():
    q, k = torch.randn(2, 17, 3, 8), torch.randn(2, 5, 3, 8)
    position = ck.PositionBias(torch.randn(3, 6, 6), (4, 4), (2, 2), 2)
    bias = torch.randn(17, 5)
    with ck.use_backend("sdpa"):
        out = ck.attention(q, k, k, bias=bias, position=position)
    torch.testing.assert_close(out, ck.reference.attention(q, k, k, bias=bias, position=position))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_forward_mode_is_left_to_the_reference():
    q, step = torch.randn(2, 1, 8, 2, 4)
    out, change = torch.func.jvp(lambda q: ck.attention(q, q, q), (q,), (step,))
    expected = torch.func.jvp(lambda q: ck.reference.attention(q, q, q), (q,), (step,))
    torch.testing.assert_close((out, change), expected)
