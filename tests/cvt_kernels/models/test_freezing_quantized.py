"""Frozen stages whose linear layers are LinearInt8, all or some."""

import copy
import pickle

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
from tests.upstream import huggingface, images, in_float64, logits, ours, pvt_v2, segformer

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


def test_the_backend_that_calls_other_operators(served):
    own = quantized(ours())
    fused, x = frozen(own), images()
    with ck.use_backend("composed", "reference"):
        out = fused(x)
    assert len(served) == 3
    with ck.use_backend("reference"):
        assert decibels(own(x), out) >= LEAST_DECIBELS


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


# What is watched -------------------------------------------------------------------------------------------


def in_stage(model, i, name):
    return stages_of(model)[i].get_submodule(f"blocks.{name}")


def bias_data(model):
    layer = in_stage(model, 2, "1.mlp.fc2")
    layer.bias.data = layer.bias.data + torch.arange(48) % 3


def another_module(model):
    mlp = in_stage(model, 0, "0.mlp")
    mlp.fc1 = LinearInt8.from_float(nn.Linear(16, 64)).eval()
    mlp.fc1.bias.fill_(0.5)
    mlp.fc1.weight.fill_(1)


def back_to_float(model):
    attn = in_stage(model, 1, "0.attn")
    layer, attn.proj_v = attn.proj_v, nn.Linear(32, 32).eval()
    attn.proj_v.weight.copy_(layer.dequantized_weight().roll(1))


CHANGES = {
    "scales": lambda m: layers_of(m)[5].weight_scale.mul_(2),
    "scales of the scaled": lambda m: in_stage(m, 1, "0.attn.proj").weight_scale.mul_(2),
    "weight": lambda m: layers_of(m)[4].weight.neg_(),
    "buffer": lambda m: setattr(layers_of(m)[1], "weight_scale", layers_of(m)[1].weight_scale * 2),
    "bias": bias_data,
    "module": another_module,
    "float": back_to_float,
    "eps": lambda m: setattr(in_stage(m, 0, "0.norm2"), "eps", 1.0),
    "embedding": lambda m: stages_of(m)[1].patch_embed.norm.bias.add_(torch.arange(32) % 3),
}


@pytest.mark.parametrize(
    ("name", "layer_scale"),
    [*((name, None) for name in CHANGES), ("scales of the scaled", 0.3), ("bias", 0.3)],
)
def test_changes_are_noticed(name, layer_scale, served):
    own = quantized(small(layer_scale=layer_scale))
    fused, x = frozen(own), images()
    with ck.use_backend(*KERNELS):
        before = fused(x)
        for each in (own, fused):
            torch.manual_seed(1)
            CHANGES[name](each)
        served.clear()
        out = fused(x)
        assert len(served) == 3
        assert torch.equal(out, frozen(own)(x))
    assert decibels(out, before) < LEAST_IN_FLOAT64


class Subclass(LinearInt8):
    pass


def test_a_layer_that_somebody_watches_is_called(served):
    own = quantized(ours())
    fused, seen = frozen(own), []
    mlp = stages_of(fused)[1].get_submodule("blocks.0.mlp")
    handle = mlp.fc1.register_forward_hook(lambda *args: seen.append(args))
    assert_served_alike(fused, own, images(), served, count=2)
    assert len(seen) == 3
    assert reasons(fused)[1] == "blocks.0.mlp.fc1 has forward hooks"
    handle.remove()
    assert_served_alike(fused, own, images(), served)
    mlp.fc1.__class__ = Subclass
    assert_served_alike(fused, own, images(), served, count=2)
    assert reasons(fused)[1] == "blocks.0.mlp.fc1 is a Subclass"


def test_a_quantized_layer_in_another_place_is_called(served):
    own = quantized(ours())
    fused = frozen(own)
    layer = LinearInt8.from_float(nn.Linear(32, 32))
    for model in (own, fused):
        in_stage(model, 1, "0.attn").proj_drop = layer
    assert_served_alike(fused, own, images(), served, count=2)
    reason = "blocks.0.attn.proj_drop is a LinearInt8, which upstream does not have"
    assert reasons(fused)[1].startswith(reason)


# Reports --------------------------------------------------------------------------------------------------


def test_coverage_names_the_operators():
    fused = frozen(quantized(ours()))
    assert reasons(fused) == [None] * 3
    with ck.use_backend("composed", "reference"):
        found = rows_of_stages(fused, images())[1].backends
    assert found["transformer_block"] == "composed"
    assert {"linear_int8", "layer_norm_quantize", "attention"} <= found.keys()
    assert not {"gelu", "linear_gelu"} & found.keys()


@pytest.mark.parametrize("make", [huggingface, pvt_v2])
def test_copies_pickles_and_restored_models(make, served):
    own = quantized(make())
    fused, x = frozen(own), images()
    with ck.use_backend(*KERNELS):
        expected = logits(fused(x))
        for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            served.clear()
            assert torch.equal(logits(other(x)), expected)
            assert len(served) == len(outermost_of(own))
            assert other.state_dict().keys() == own.state_dict().keys()
        served.clear()
        ck.restore(fused)(x)
        assert not served
