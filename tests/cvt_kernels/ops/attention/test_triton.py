"""Attention in Triton: views without copies, large scores, tiles of keys, and launches."""

import math

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.launch import launching
from cvt_kernels.ops.attention.triton import forward
from cvt_kernels.ops.attention.triton.autograd import why_unsupported
from tests.checks import WIDEST, precision_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = launching.Chip(90, 132)


def make(queries, keys, heads=2, dim=16, *, batch=2, dtype=WIDEST):
    """Returns [q, k, v]."""
    shapes = [(batch, n, heads, dim) for n in (queries, keys, keys)]
    return [torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype) for shape in shapes]


def run(backend, tensors, *, scale=None, double=False):
    """Returns the output, and the gradients of all tensors for a fixed pattern of output gradients."""
    live = [t.detach().to(torch.float64 if double else t.dtype).requires_grad_() for t in tensors]
    with ck.use_backend(backend):
        out = ck.attention(*live, scale=scale)
    pattern = torch.linspace(-1, 1, 7, device=DEVICE).repeat(out.numel() // 7 + 1)[: out.numel()]
    return [out.detach(), *torch.autograd.grad(out, live, pattern.view_as(out).to(out.dtype))]


# Results and gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [5, 66])
def test_strided_views_need_no_copy(keys, monkeypatch):
    """Takes views of one fused linear layer, other strides of heads, tokens and batch, and broadcasts."""
    q, k, v = make(keys, keys)
    with ck.use_backend("triton"):
        expected = ck.attention(q, k, v)
        broadcast = ck.attention(q, k[:1].expand_as(k), v)
        assert torch.equal(broadcast, ck.attention(q, k[:1].repeat(2, 1, 1, 1), v))
        spread = [torch.stack([t, t], dim=4).flatten(3)[..., ::2] for t in (q, k, v)]
        assert torch.equal(ck.attention(*spread), expected)  # copied: the last dimension is not adjacent
        monkeypatch.setattr(torch.Tensor, "contiguous", None)
        fused = torch.stack([q, k, v], dim=2).unbind(2)
        wide = [torch.cat([t, t], dim=3)[..., :16] for t in (q, k, v)]
        heads_first = [torch.stack(t.unbind(2), dim=1).transpose(1, 2) for t in (q, k, v)]
        every_other = [torch.stack([t, t], dim=1).flatten(0, 1)[::2] for t in (q, k, v)]
        for views in (fused, wide, heads_first, every_other):
            assert not views[0].is_contiguous()
            assert torch.equal(ck.attention(*views), expected)


@pytest.mark.parametrize("keys", [30, 150])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_logits(dtype, keys):
    """Takes scores of integers, with a scale that keeps them exact in base 2: their rounding is no excuse."""
    q, k, v = make(20, keys, dtype=dtype)
    q, k = (q * 60).round(), (k * 60).round()
    scale = math.log(2) / 4
    assert torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()).abs().max() * scale > 7e3
    results = (run(b, [q, k, v], scale=scale, double=b == "reference") for b in ("triton", "reference"))
    for ours, expected in zip(*results, strict=True):
        units = 16 if dtype == torch.float32 else 64  # ds and the probabilities are rounded to 16 bits
        # Gradients all but cancel, from terms of some 20.
        atol = units * torch.finfo(dtype).eps * max(expected.abs().max().item(), 20)
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=atol)


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    """Takes the same image throughout, hence the same output; the last one lies beyond 32 bits."""
    q, k, v = (t.expand(700, -1, -1, -1) for t in make(3136, 784, 16, 64, batch=1, dtype=torch.float16))
    with ck.use_backend("triton"):
        out = ck.attention(q, k, v)
    assert out.numel() > 2**31
    assert torch.equal(out[-1], out[0])


# Launches -------------------------------------------------------------------------------------------------


def test_programs_that_take_more_work_give_the_same(monkeypatch):
    """Lets a program take several tiles of queries."""
    tensors = make(100, 20, dtype=torch.float32)
    expected = run("triton", tensors)
    monkeypatch.setattr(forward, "ENOUGH_PROGRAMS", 1)
    assert all(map(torch.equal, run("triton", tensors), expected))


def test_float32_takes_tensor_cores_where_pytorch_allows_tf32():
    def precision(dtype):
        with launching.recorded_launches(H200) as launches, ck.use_backend("triton"):
            ck.attention(*make(5, 4, dtype=dtype))
        return [launch.arguments["SPEC"].precision for launch in launches]

    assert precision(torch.float32) == ["ieee"]
    with precision_of(torch.backends.cuda.matmul, "tf32"):
        assert precision(torch.float32) == ["tf32x3"]
        assert precision(torch.float16) == ["ieee"]


# What is left to others -----------------------------------------------------------------------------------


def test_images_beyond_32_bit_offsets_are_unsupported():
    q, k = torch.empty(1, 2**18, 64, 128, device="meta"), torch.empty(1, 4, 64, 128, device="meta")
    bind = backends.operators["attention"].bind
    assert why_unsupported(bind(q, k, k)) == "one image has 2³¹ elements or more"
    q, k = torch.empty(1, 2**16, 1, 16, device="meta"), torch.empty(1, 2**15, 1, 16, device="meta")
    assert why_unsupported(bind(q, k, k)) is None
