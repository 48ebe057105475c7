"""Attention on a CPU: softmax that is sharp or flat, and sums over wide heads."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import assert_accurate, needs_extension

DTYPES = "float32", "bfloat16", "float16", "float64"

pytestmark = needs_extension


@pytest.fixture(autouse=True)
def _cpu():
    with ck.use_backend("cpu"), torch.no_grad():
        yield


def make(batch, queries, keys, heads, dim, dtype=torch.float32):
    """Returns q, k and v, laid out as linear layers leave them."""
    return [torch.randn(batch, n, heads, dim).to(dtype) for n in (queries, keys, keys)]


@pytest.mark.parametrize("factor", [30.0, -30.0, 0.0])
def test_sharp_and_flat_softmax(factor):
    """Scores of hundreds, where one key of some block takes nearly all; or all alike."""
    q, k, v = make(1, 50, 600, 2, 64)
    exact = reference.attention(q.double(), k.double(), v.double(), scale=factor)
    ours, theirs = (f.attention(q, k, v, scale=factor) for f in (ck, reference))
    assert_accurate(ours, theirs, exact, floor=100.0)


def test_wide_heads_are_summed_in_parts():
    """Products of one sign, whose roundings do not cancel, are as accurate as sums of 32 channels each."""
    q, k = (torch.rand(1, n, 2, 1).add(0.5).expand(-1, -1, -1, 256) for n in (20, 60))
    v = torch.randn(1, 60, 2, 256)
    parts = zip(q.transpose(1, 2).split(32, -1), k.permute(0, 2, 3, 1).split(32, -2), strict=True)
    scores = sum(queries @ keys for queries, keys in parts) / 16
    in_parts = (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)
    exact = reference.attention(q.double(), k.double(), v.double(), scale=1 / 16)
    assert_accurate(ck.attention(q, k, v, scale=1 / 16), in_parts, exact)
