"""Attention at the shapes of CvT-13: the reference, PyTorch's SDPA, the kernels where they run."""

import functools

import pytest

from . import suites

pytestmark = pytest.mark.benchmark(**suites.TIMER)


def make(stage, dtype, images):
    """Returns q, k and v as linear layers leave them, and the gradient of the output."""
    (height, width), channels, class_tokens = suites.stages()[stage]
    queries = height * width + class_tokens
    keys = -(-height // 2) * -(-width // 2) + class_tokens
    shapes = enumerate((queries, keys, keys, queries))
    return [
        suites.randn(images, tokens, channels, dtype=dtype, seed=i).unflatten(2, (-1, 64))
        for i, tokens in shapes
    ]


def contender(function, q):
    """Returns an implementation as a function of q, k and v, scaled by C^-0.5."""
    return functools.partial(function, scale=q.shape[2:].numel() ** -0.5, bias=None, dropout_p=0.0)


@pytest.mark.parametrize("dtype", suites.dtypes(), ids=suites.short)
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("stage", suites.stages())
@pytest.mark.parametrize("name", suites.contenders("attention"))
def test_attention(benchmark, stage, direction, dtype, name):
    *leaves, dout = make(stage, dtype, suites.batch())
    batch, queries, heads, _ = leaves[0].shape
    keys = leaves[1].shape[1]
    call, reference = (
        contender(suites.implementation("attention", which), leaves[0]) for which in (name, "reference")
    )
    case = f"{stage}, {queries}×{keys}×{heads}, {direction}"
    # Products of Nq × Nkv × D; tensors of Nq + Nkv tokens.
    products, tensors, douts = (2, 2, None) if direction == "forward" else (7, 6, [dout])
    suites.compare(
        benchmark,
        {"suite": "attention", "case": case, "contender": name},
        call, reference, leaves, douts, images=2,
        moved=tensors * batch * (queries + keys) * heads * 64 * leaves[0].element_size(),
        operations=2 * products * batch * queries * keys * heads * 64,
    )  # fmt: skip
