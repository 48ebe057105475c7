"""Attention at the shapes of CvT-13: PyTorch's SDPA, the reference, the kernels where they run."""

import pytest
from torch.nn import functional as F

from . import suites

pytestmark = pytest.mark.benchmark(**suites.TIMER)


def sdpa(q, k, v, scale):
    """Computes attention by PyTorch, with the copy that brings its output (B, h, N, D) back to tokens."""
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), scale=scale)
    return out.transpose(1, 2).contiguous()


def make(stage, dtype):
    """Returns q, k and v as linear layers leave them, and the gradient of the output."""
    (height, width), channels, class_tokens = suites.stages()[stage]
    queries = height * width + class_tokens
    keys = -(-height // 2) * -(-width // 2) + class_tokens
    shapes = enumerate((queries, keys, keys, queries))
    return [
        suites.randn(suites.batch(), tokens, channels, dtype=dtype, seed=i).unflatten(2, (-1, 64))
        for i, tokens in shapes
    ]


def contender(name, q):
    """Returns a function of q, k and v, scaled by C^-0.5."""
    scale = q.shape[2:].numel() ** -0.5
    if name == "sdpa":
        return lambda q, k, v: sdpa(q, k, v, scale)
    function = suites.implementation("attention", name)
    return lambda q, k, v: function(q, k, v, scale=scale)


@pytest.mark.parametrize("dtype", suites.dtypes(), ids=suites.short)
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("stage", suites.stages())
@pytest.mark.parametrize("name", suites.contenders("attention", "sdpa"))
def test_attention(benchmark, stage, direction, dtype, name):
    *leaves, dout = make(stage, dtype)
    batch, queries, heads, _ = leaves[0].shape
    keys = leaves[1].shape[1]
    douts = [dout] if direction == "forward+backward" else None
    call, reference = contender(name, leaves[0]), contender("reference", leaves[0])
    outputs = suites.served(call, leaves, douts)

    few = [t[:2] for t in leaves], douts and [dout[:2]]
    exact = [t[:2].double() for t in leaves], douts and [dout[:2].double()]
    suites.check(
        [t[:2] for t in outputs], suites.results(reference, *few), suites.results(reference, *exact), dtype
    )

    products, tensors = (2, 2) if douts is None else (7, 6)  # of Nq × Nkv × D; of Nq + Nkv tokens
    suites.record(
        benchmark,
        lambda: suites.results(call, leaves, douts),
        {
            "suite": "attention",
            "case": f"{stage}, {queries}×{keys}×{heads}, {direction}",
            "contender": name,
            "dtype": suites.short(dtype),
            "batch": batch,
        },
        moved=tensors * batch * (queries + keys) * heads * 64 * leaves[0].element_size(),
        operations=2 * products * batch * queries * keys * heads * 64,
    )
