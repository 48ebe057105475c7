"""Scores of −∞, scores that overflow, scales of all sizes: NaN where the reference has it, and only there."""

import math

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from cvt_kernels.records import PositionBias
from tests.checks import needs_extension

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = 230  # two blocks of the CPU kernels, several tiles of the Triton kernels
# NumPy, in which Triton's interpreter computes, tells of every NaN.
ignores_nan = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def make(keys=KEYS, dtype=torch.float32, queries=3, device="cpu"):
    """Returns positive q, so that keys of −∞ have scores of −∞, and any k and v."""
    q = torch.rand(1, queries, 2, 16).add(0.1).to(device, dtype)
    return q, *(torch.randn(1, keys, 2, 16).to(device, dtype) for _ in range(2))


def lowered(k, begin, end):
    k = k.clone()
    k[:, begin:end] = -math.inf
    return k


def assert_close(ours, expected, dtype=torch.float32):
    for a, b in zip(ours, expected, strict=True):
        largest = b.nan_to_num(0.0).abs().max().item()
        units = 50 * torch.finfo(dtype).eps
        torch.testing.assert_close(a.double(), b, rtol=units, atol=units * largest, equal_nan=True)


# On a CPU -------------------------------------------------------------------------------------------------


def check_forward(q, k, v, **settings):
    with torch.no_grad(), ck.use_backend("cpu"):
        out = ck.attention(q, k, v, **settings)
    expected = reference.attention(q.double(), k.double(), v.double(), **settings)
    assert_close([out], [expected], q.dtype)


@needs_extension
def test_blocks_without_finite_scores_on_a_cpu():
    check_blocks()


def check_blocks():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        q, k, v = make(dtype=dtype)
        for begin, end in ((0, 150), (150, KEYS), (0, KEYS)):
            check_forward(q, lowered(k, begin, end), v)
            check_forward(q, -lowered(k, begin, end), v, scale=-0.3)
        check_forward(q, -lowered(k, 7, 8), v)  # a score of +∞ makes a row NaN


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("scale", "of_q", "of_k"),
    [
        (3e38, 1e-30, 1e-8),
        (-3e38, 1e-38, 1.0),
        (1e-20, 1e15, 1e25),
        (1e-38, 1.0, 1e37),
        (0.0, 1e30, 1e30),
    ],
)
def test_scales_on_a_cpu(scale, of_q, of_k, dtype):
    q, k, v = make(dtype=dtype)
    check_forward(q * of_q, k * of_k, v, scale=scale)


@needs_extension
def test_a_bias_by_position_of_minus_infinity_on_a_cpu():
    table = torch.zeros(2, 31, 29)
    table[:, 15:] = -math.inf  # keys of rows above the query's
    check_forward(*make(16 * 15, queries=16 * 15), position=PositionBias(table, (16, 15), (16, 15), 1))


# In Triton ------------------------------------------------------------------------------------------------


def run(backend, tensors, **settings):
    """Returns the output and the gradients; the reference's in float64."""
    live = [(t.double() if backend == "reference" else t.clone()).requires_grad_() for t in tensors]
    with ck.use_backend(backend):
        out = ck.attention(*live, **settings)
    pattern = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, live, pattern)]


@ignores_nan
@pytest.mark.parametrize(("keys", "end"), [(60, 40), (60, 60), (100, 40), (100, 100)])
def test_tiles_without_finite_scores_in_triton(keys, end):
    """One launch for all gradients, or one for each; the queries do not fill their tile."""
    q, k, v = make(keys, device=DEVICE)
    tensors = q, lowered(k, 0, end), v
    assert_close(run("triton", tensors), run("reference", tensors))


@ignores_nan
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scales_in_triton(sign):
    q, k, v = make(100, device=DEVICE)
    tensors = q * 1e-30, k * 1e-8, v
    with torch.no_grad(), ck.use_backend("triton"):
        inference = ck.attention(*tensors, scale=sign * 3e38)
    expected = run("reference", tensors, scale=sign * 3e38)
    assert_close([inference, *run("triton", tensors, scale=sign * 3e38)], [expected[0], *expected])


def test_an_attention_map_without_finite_scores():
    """It is 0 where the bias excludes all keys, and NaN where the scores do, as the output of attention."""
    q, k, _ = make(5)
    assert ck.attention_map(q, k, bias=torch.full((3, 5), -math.inf)).probabilities.eq(0).all()
    assert ck.attention_map(q, lowered(k, 0, 5)).probabilities.isnan().all()
