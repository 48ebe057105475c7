"""Attention of few tokens with the layer behind it, in Triton's interpreter; the emulator runs it too."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import machine
from tests.checks import assert_accurate
from tests.cvt_kernels.ops.test_accesses import attend_and_add

pytestmark = pytest.mark.skipif(not machine.INTERPRETING, reason="the emulator runs what is compiled")


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "dim", "outputs", "block_m"),
    [(21, 5, 3, 7, 67, 16), (1, 50, 6, 64, 384, 16), (40, 130, 2, 32, 64, 32), (1, 1, 1, 1, 1, 16)],
    ids=str,
)
def test_attention_layer_and_residual(queries, keys, heads, dim, outputs, block_m):
    q, k, v, weight, bias, before, out, sums = attend_and_add(
        queries, keys, heads, dim, outputs, block_m=block_m
    )
    same, exact = (
        before.to(dtype)
        + torch.nn.functional.linear(
            ck.reference.attention(q.to(dtype), k.to(dtype), v.to(dtype), scale=-(dim**-0.5)).reshape(
                len(before), -1
            ),
            weight.to(dtype),
            bias.to(dtype),
        )
        for dtype in (torch.float16, torch.float64)
    )
    assert_accurate(out, same, exact)
    parts = out.double().split(64, dim=1)
    torch.testing.assert_close(
        sums[0].double(), torch.stack([part.sum(1) for part in parts]), rtol=1e-5, atol=1e-4
    )
    squares = torch.stack([part.var(1, correction=0) * part.shape[1] for part in parts])
    torch.testing.assert_close(sums[1].double(), squares, rtol=1e-4, atol=1e-4)
