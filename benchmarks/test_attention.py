"""Attention at the shapes of CvT-13 at 224×224: PyTorch's SDPA, the reference, the kernels where they run."""

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import runtime

CUDA = torch.cuda.is_available()
DEVICE, DTYPE, BATCH = ("cuda", torch.bfloat16, 256) if CUDA else ("cpu", torch.float32, 2)
STAGES = {"stage1": (3136, 784, 1), "stage2": (784, 196, 3), "stage3": (197, 50, 6)}  # queries, keys, heads


def sdpa(q, k, v, scale):
    """With the copy that brings its output (B, h, N, D) back to tokens."""
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=scale)
    return out.transpose(1, 2).contiguous()


def triton(q, k, v, scale):
    with ck.use_backend("triton"):
        return ck.attention(q, k, v, scale=scale)


CONTENDERS = {"sdpa": sdpa, "reference": lambda q, k, v, scale: ck.reference.attention(q, k, v, scale=scale)}
with ck.use_backend("triton"):
    if runtime.unavailable("attention", "triton", DEVICE) is None:
        CONTENDERS["triton"] = triton


def make(stage):
    """Q, k and v as linear layers leave them, and the gradient of the output."""
    queries, keys, heads = STAGES[stage]
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [
        torch.randn(BATCH, tokens, heads * 64, generator=generator, device=DEVICE, dtype=DTYPE).unflatten(
            2, (heads, 64)
        )
        for tokens in (queries, keys, keys, queries)
    ]


def gradients(function, tensors, dout, scale):
    live = [t.detach().requires_grad_() for t in tensors]
    out = function(*live, scale)
    return out, *torch.autograd.grad(out, live, dout)


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CONTENDERS)
def test_attention(benchmark, name, stage, direction):
    queries, keys, heads = STAGES[stage]
    *tensors, dout = make(stage)
    scale = (heads * 64) ** -0.5

    exact = gradients(CONTENDERS["reference"], [t[:2].double() for t in tensors], dout[:2].double(), scale)
    found = gradients(CONTENDERS[name], tensors, dout, scale)
    for ours, expected in zip(found, exact, strict=True):
        atol = 16 * torch.finfo(DTYPE).eps * expected.abs().max().item()
        torch.testing.assert_close(ours[:2].double(), expected, rtol=0, atol=atol)

    def run():
        if direction == "forward":
            with torch.inference_mode():
                CONTENDERS[name](*tensors, scale)
        else:
            gradients(CONTENDERS[name], tensors, dout, scale)
        if CUDA:
            torch.cuda.synchronize()

    benchmark.group = (
        f"attention {stage}, {queries}×{keys}×{heads}, {DTYPE}, {DEVICE}, batch {BATCH}, {direction}"
    )
    benchmark.pedantic(run, rounds=10, warmup_rounds=2)
    if benchmark.stats is not None:  # None under --benchmark-disable
        products = 2 if direction == "forward" else 7  # of 2·Nq·Nkv·D operations per head
        seconds = benchmark.stats.stats.median
        operations = 2 * products * BATCH * queries * keys * heads * 64
        benchmark.extra_info["teraflop_per_second"] = operations / seconds / 1e12
        benchmark.extra_info["images_per_second"] = BATCH / seconds
        benchmark.extra_info["threads"] = torch.get_num_threads()
