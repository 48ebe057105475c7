"""Tests of Triton's interpreter as the tests use it."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _copy_kernel(of, to, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(to + lane, tl.load(of + lane).to(to.dtype.element_ty))


def test_float32_rounds_to_the_nearest_bfloat16():
    eps = torch.finfo(torch.bfloat16).eps
    ties = 1 + eps * (torch.arange(16) + 0.5)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-40])
    x = torch.cat((torch.randn(232), ties, special))
    got, back = torch.empty(256, dtype=torch.bfloat16), torch.empty(256)
    _copy_kernel[(1,)](x, got, 256)
    torch.testing.assert_close(got, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    _copy_kernel[(1,)](got, back, 256)
    torch.testing.assert_close(back, got.float(), rtol=0, atol=0, equal_nan=True)
