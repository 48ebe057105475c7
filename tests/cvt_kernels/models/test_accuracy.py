"""Served models of every family beside upstream's: the root mean square of the errors against float64."""

import copy

import pytest
import torch

import cvt_kernels as ck
from tests.checks import instruction_sets_here, needs_extension
from tests.upstream import (
    KERNELS_FIRST,
    clip,
    dinov2,
    glpn,
    huggingface,
    images,
    logits,
    pvt,
    pvt_v2,
    segformer,
    timm_pvt_v2,
    timm_vit,
    vit,
)

_SEEDS = 12
#: The makers of models of every family, with channels as wide as published ones: errors grow with long sums.
FAMILIES = {
    huggingface: {"embed_dim": [64, 192, 384], "num_heads": [1, 3, 6], "num_labels": 200},
    segformer: {"hidden_sizes": [64, 320], "num_attention_heads": [1, 5], "mlp_ratios": [4, 4]},
    pvt: {"hidden_sizes": [64, 512], "num_attention_heads": [1, 8], "mlp_ratios": [8, 4], "num_labels": 200},
    pvt_v2: {
        "hidden_sizes": [64, 512],
        "num_attention_heads": [1, 8],
        "mlp_ratios": [8, 4],
        "num_labels": 200,
    },
    vit: {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_labels": 200},
    clip: {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "projection_dim": 200},
    dinov2: {"hidden_size": 384, "num_attention_heads": 6, "mlp_ratio": 4},
    timm_vit: {"embed_dim": 384, "num_heads": 6, "mlp_ratio": 4, "num_classes": 200},
    timm_pvt_v2: {"embed_dims": (64, 512), "num_heads": (1, 8), "mlp_ratios": (8, 4), "num_classes": 200},
    glpn: {"hidden_sizes": [64, 128, 320, 512], "num_attention_heads": [1, 2, 5, 8], "mlp_ratios": [4] * 4},
}


@torch.no_grad()
def mean_square_error(model, x, exact):
    """Returns the mean of the squares of a model's errors, over the mean of the squares of exact outputs."""
    error = logits(model(x)).double() - exact
    return (error.square().mean() / exact.square().mean()).item()


#: bfloat16 on CPUs that multiply it; without that, kernels and PyTorch compute in float32 and only round.
_BFLOAT16 = pytest.param(
    torch.bfloat16,
    id="bfloat16",
    marks=pytest.mark.skipif(
        "avx512_bf16" not in instruction_sets_here(), reason="this CPU has no products of bfloat16"
    ),
)


@needs_extension
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="float32"), _BFLOAT16])
@pytest.mark.parametrize("make", FAMILIES)
def test_served_models_are_as_accurate_as_upstreams(make, dtype):
    ours = upstreams = 0.0
    for seed in range(_SEEDS):
        torch.manual_seed(seed)
        model = make(**FAMILIES[make]).eval().to(dtype)
        size = {pvt: 70, vit: 32, clip: 32, timm_vit: 32}.get(make, 64)
        x = (images(2, size, size) + 0.1 * torch.randn(2, 3, size, size)).to(dtype)
        with torch.no_grad():
            exact = logits(copy.deepcopy(model).double()(x.double()))
        upstreams += mean_square_error(model, x, exact)
        with ck.use_backend(*KERNELS_FIRST):
            served = ck.accelerate(model, freeze=True)
            ours += mean_square_error(served, x, exact)
            assert all(row.fused for row in ck.coverage(served))
    assert ours <= 1.05**2 * upstreams, f"{(ours / upstreams) ** 0.5:.2f} times upstream's"


@pytest.mark.parametrize("make", [segformer, pvt_v2, glpn])
def test_embeddings_in_training_are_as_accurate_as_upstreams(make):
    """Each gets the map of the stage before, which has its channels last where no copy is made of it."""
    threads, errors = torch.get_num_threads(), {}
    torch.set_num_threads(2)  # with one, PyTorch takes no oneDNN for small convolutions
    try:
        for seed in range(3):
            torch.manual_seed(seed)
            model = make(**FAMILIES[make]).train()
            fused = ck.accelerate(copy.deepcopy(model), freeze=False)
            for name, module in model.named_modules():
                if not type(module).__name__.endswith("PatchEmbeddings"):
                    continue
                tokens = torch.randn(2, 32, 32, module.proj.in_channels)
                ours, upstreams, exact = (
                    embedded(block, x)
                    for block, x in (
                        (fused.get_submodule(name), tokens.permute(0, 3, 1, 2)),
                        (module, tokens.permute(0, 3, 1, 2).contiguous()),
                        (copy.deepcopy(module).double(), tokens.permute(0, 3, 1, 2).double()),
                    )
                )
                pair = [(t.double() - exact).square().sum().item() for t in (ours, upstreams)]
                errors[name] = [a + b for a, b in zip(errors.get(name, (0, 0)), pair, strict=True)]
    finally:
        torch.set_num_threads(threads)
    assert errors
    assert all(ours <= 1.05**2 * upstreams for ours, upstreams in errors.values()), errors


def embedded(module, x):
    """Returns the tokens of an embedding, in training."""
    return module(x)[0].detach()
