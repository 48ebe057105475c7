"""Frozen stages whose linear layers are LinearInt8, all or some."""

import copy

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt.factory import randomize
from cvt_kernels.ops.linear_int8.modules import LinearInt8
from tests.checks import not_built
from tests.cvt_kernels.models.served import (
    MODELS,
    decibels,
    frozen,
    inputs,
    outermost_of,
    rows_of_stages,
    stages_of,
)
from tests.upstream import huggingface, images, in_float64, logits, ours, segformer

pytestmark = pytest.mark.usefixtures("without_gradients")

KERNELS = ("reference",) if not_built() else ("cpu", "reference")
#: The least ratio of the logits to what may differ. A number of float32 that is another in its last bit may
#: be rounded to another integer, then others are too, and in the end the logits differ by as much as
#: rounding has changed them (33 dB of a CvT-13); which numbers are such depends on the CPU. In float64 none
#: is rounded.
LEAST_DECIBELS, LEAST_IN_FLOAT64 = 25.0, 80.0


def quantized(model, kept=()):
    """Returns a model in evaluation whose blocks' linear layers are quantized, except for some names."""
    for stage in stages_of(model):
        for name, linear in list(stage.named_modules()):
            if type(linear) is nn.Linear and not name.endswith(tuple(kept)):
                stage.set_submodule(name, LinearInt8.from_float(linear))
    return model.eval()


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, LinearInt8)]


def reasons(model):
    return [row.reason for row in rows_of_stages(model)]


def small(channels=(16, 32, 48), heads=(1, 2, 3), **settings):
    """Returns a model whose layer scales, if it has some, are random."""
    config = CvTConfig(embed_dims=channels, num_heads=heads, depths=(1, 1, 2), num_classes=10)
    model = create_model(config, **settings)
    randomize(model)
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):
            parameter.copy_(torch.randn_like(parameter))
    return model


def assert_served_alike(fused, own, x, served, count=None, least_in_float64=LEAST_IN_FLOAT64):
    count = len(outermost_of(own)) if count is None else count
    wide = (in_float64(copy.deepcopy(model)) for model in (fused, own))
    for (actual, wanted), given, backends, least in (
        (wide, x.double(), ["reference"], least_in_float64),
        ((fused, own), x, ["reference"], LEAST_DECIBELS),
        ((fused, own), x, KERNELS, LEAST_DECIBELS),
    ):
        before = len(served)
        with ck.use_backend(*backends):
            out, expected = logits(actual(given)), logits(wanted(given))
        assert len(served) - before == count
        assert decibels(expected, out) >= least


# The same results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
def test_results_are_those_of_the_modules(make, served):
    own, (count, blocks) = quantized(make()), MODELS[make]
    fused = frozen(own)
    assert len(layers_of(fused)) == len(layers_of(own)) == 6 * blocks
    assert reasons(fused) == [None] * count
    assert_served_alike(fused, own, inputs(make, 3, 64, 64), served)


@pytest.mark.parametrize(
    "kept",
    [("proj", "output.dense", "fc2"), ("proj_q", "projection_query", "q_proj", "fc1", "intermediate.dense")],
    ids=["proj", "fc1"],
)
@pytest.mark.parametrize("make", [huggingface, ours, segformer])
def test_layers_kept_in_float(make, kept, served):
    own = quantized(make(), kept=kept)
    assert any(type(module) is nn.Linear for module in stages_of(own)[0].modules())
    assert_served_alike(frozen(own), own, images(), served)


def test_layer_scales_are_folded(served):
    own = quantized(
        small((16, 80, 96), (1, 5, 6), layer_scale=0.3, cls_token=(False, True, True), qkv_bias=False)
    )
    # The product of two scales is rounded once more.
    assert_served_alike(frozen(own), own, images(), served, least_in_float64=LEAST_DECIBELS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("make", [ours, segformer])
def test_other_dtypes(make, dtype, served):
    own = quantized(make()).to(dtype)
    assert {layer.weight_scale.dtype for layer in layers_of(own)} == {torch.float32}
    x = images(dtype=dtype)
    fused = frozen(own)
    out = logits(fused(x))
    assert len(served) == len(outermost_of(own))
    assert out.dtype == dtype
    assert decibels(logits(own(x)), out) >= (20 if dtype == torch.bfloat16 else LEAST_IN_FLOAT64)
