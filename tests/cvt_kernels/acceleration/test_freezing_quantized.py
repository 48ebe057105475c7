"""Frozen stages whose linear layers are LinearInt8, all or some."""

import copy
import pickle

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt.factory import randomize
from cvt_kernels.acceleration import freezing, stages
from cvt_kernels.ops.linear_int8.modules import LinearInt8
from tests.checks import not_built
from tests.cvt_kernels.ops.transformer_block.test_quantized import decibels
from tests.upstream import huggingface, images, logits, microsoft, ours

KERNELS = ("reference",) if not_built() else ("native", "reference")
#: The least ratio of the logits to what may differ. Where the backend is the same, float32 has the last word.
#: With another, a number that is another in its last bit may be rounded to another integer, then others are
#: too, and in the end the logits differ by as much as rounding has changed them (33 dB of a CvT-13).
LEAST_DECIBELS, LEAST_OF_REFERENCE = 25.0, 80.0
SCALE = 0.05


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Counts the stages that are served as one."""
    calls = []

    def serve(*args):
        calls.append(args)
        return stages.serve(*args)

    monkeypatch.setattr(freezing, "serve", serve)
    return calls


def quantized(model, scale=None, kept=()):
    """Returns a model in evaluation whose linear layers in blocks are quantized, but those of some names."""
    for path, stage, _ in freezing.find_stages(model):
        for name, linear in list(stage.named_modules()):
            if type(linear) is nn.Linear and not name.endswith(tuple(kept)):
                parent, _, own = f"{path}.{name}".rpartition(".")
                setattr(model.get_submodule(parent), own, LinearInt8.from_float(linear, input_scale=scale))
    return model.eval()


def frozen(model):
    return ck.accelerate(copy.deepcopy(model), freeze=True)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, LinearInt8)]


def stage_of(model, i):
    return freezing.find_stages(model)[i][1]


def reasons(model):
    paths = {path for path, _, _ in freezing.find_stages(model)}
    return [row.reason for row in ck.coverage(model) if row.path in paths]


def assert_served_alike(fused, own, x, counted, count=3, least_of_reference=LEAST_OF_REFERENCE):
    for backends, least in ((("reference",), least_of_reference), (KERNELS, LEAST_DECIBELS)):
        before = len(counted)
        with ck.use_backend(*backends):
            out, expected = logits(fused(x)), logits(own(x))
        assert len(counted) - before == count
        assert decibels(expected, out) >= least


# The same results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, SCALE])
@pytest.mark.parametrize("make", [huggingface, microsoft, ours])
def test_results_are_those_of_the_modules(make, scale, counted):
    own = quantized(make(), scale)
    fused = frozen(own)
    assert len(layers_of(fused)) == len(layers_of(own)) >= 24
    assert reasons(fused) == [None] * 3
    assert_served_alike(fused, own, images(3), counted)


@pytest.mark.parametrize(
    "kept",
    [("proj", "output.dense", "fc2"), ("proj_q", "projection_query", "fc1", "intermediate.dense")],
    ids=["proj", "fc1"],
)
@pytest.mark.parametrize("make", [huggingface, ours])
def test_layers_kept_in_float(make, kept, counted):
    own = quantized(make(), kept=kept)
    assert any(type(module) is nn.Linear for module in stage_of(own, 0).modules())
    assert_served_alike(frozen(own), own, images(), counted)


@pytest.mark.parametrize("backend", ["composed", "onednn"])
def test_backends_that_call_other_operators(backend, counted):
    own = quantized(ours())
    fused, x = frozen(own), images()
    with ck.use_backend(backend, "composed", "reference"):
        out = fused(x)
    assert len(counted) == 3
    with ck.use_backend("reference"):
        assert decibels(own(x), out) >= LEAST_DECIBELS


@pytest.mark.parametrize("scale", [None, SCALE])
def test_layer_scales_are_folded(scale, counted):
    config = CvTConfig(embed_dims=(16, 80, 96), num_heads=(1, 5, 6), depths=(1, 1, 2), num_classes=10)
    model = create_model(config, layer_scale=0.3, cls_token=(False, True, True), qkv_bias=False)
    randomize(model)
    for name, parameter in model.named_parameters():
        if name.endswith("gamma"):
            parameter.copy_(torch.randn_like(parameter))
    own = quantized(model, scale)
    # The product of two scales is rounded once more.
    assert_served_alike(frozen(own), own, images(), counted, least_of_reference=LEAST_DECIBELS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype, counted):
    own = quantized(ours()).to(dtype)
    assert {layer.weight_scale.dtype for layer in layers_of(own)} == {torch.float32}
    x = images(dtype=dtype)
    fused = frozen(own)
    out = fused(x)
    assert len(counted) == 3
    assert out.dtype == dtype
    assert decibels(own(x), out) >= (20 if dtype == torch.bfloat16 else LEAST_OF_REFERENCE)


# What is watched -------------------------------------------------------------------------------------------


def scales_in_place(model):
    layers_of(model)[5].weight_scale.mul_(2)


def scales_of_the_scaled(model):
    stage_of(model, 1).get_submodule("blocks.0.attn.proj").weight_scale.mul_(2)


def weight_in_place(model):
    layers_of(model)[4].weight.neg_()


def input_scale_in_place(model):
    layers_of(model)[0].input_scale.mul_(8)


def input_scale_taken(model):
    layers_of(model)[0].input_scale = None


def another_buffer(model):
    layers_of(model)[1].weight_scale = layers_of(model)[1].weight_scale * 2


def bias_data(model):
    layer = stage_of(model, 2).get_submodule("blocks.1.mlp.fc2")
    layer.bias.data = layer.bias.data + torch.arange(48) % 3


def another_module(model):
    mlp = stage_of(model, 0).get_submodule("blocks.0.mlp")
    mlp.fc1 = LinearInt8.from_float(nn.Linear(16, 64), input_scale=SCALE)
    mlp.fc1.bias.fill_(0.5)
    mlp.fc1.weight.fill_(1)
    model.eval()


def back_to_float(model):
    attn = stage_of(model, 1).get_submodule("blocks.0.attn")
    layer, attn.proj_v = attn.proj_v, nn.Linear(32, 32)
    attn.proj_v.weight.copy_(layer.dequantized_weight().roll(1))
    model.eval()


CHANGES = [scales_in_place, scales_of_the_scaled, weight_in_place, input_scale_in_place, input_scale_taken,
           another_buffer, bias_data, another_module, back_to_float]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "layer_scale"),
    [*((change, None) for change in CHANGES), (scales_of_the_scaled, 0.3), (bias_data, 0.3)],
)
def test_changes_are_noticed(change, layer_scale, counted):
    config = CvTConfig(embed_dims=(16, 32, 48), num_heads=(1, 2, 3), depths=(1, 1, 2), num_classes=10)
    model = create_model(config, layer_scale=layer_scale)
    randomize(model)
    own = quantized(model, SCALE)
    fused, x = frozen(own), images()
    with ck.use_backend(*KERNELS):
        before = fused(x)
        for each in (own, fused):
            torch.manual_seed(1)
            change(each)
        counted.clear()
        out = fused(x)
        assert len(counted) == 3
        assert torch.equal(out, frozen(own)(x))
    assert decibels(out, before) < LEAST_OF_REFERENCE


class Subclass(LinearInt8):
    pass


def test_a_layer_that_somebody_watches_is_called(counted):
    own = quantized(ours())
    fused, seen = frozen(own), []
    mlp = stage_of(fused, 1).get_submodule("blocks.0.mlp")
    handle = mlp.fc1.register_forward_hook(lambda *args: seen.append(args))
    assert_served_alike(fused, own, images(), counted, count=2)
    assert len(seen) == 2
    assert reasons(fused)[1] == "blocks.0.mlp.fc1 has forward hooks"
    handle.remove()
    assert_served_alike(fused, own, images(), counted)
    mlp.fc1.__class__ = Subclass
    assert_served_alike(fused, own, images(), counted, count=2)
    assert reasons(fused)[1] == "blocks.0.mlp.fc1 is a Subclass"


def test_a_quantized_layer_in_another_place_is_called(counted):
    own = quantized(ours())
    fused = frozen(own)
    for model in (own, fused):
        torch.manual_seed(2)
        stage_of(model, 1).get_submodule("blocks.0.attn").proj_drop = LinearInt8.from_float(nn.Linear(32, 32))
    assert_served_alike(fused, own, images(), counted, count=2)
    assert reasons(fused)[1].startswith(
        "blocks.0.attn.proj_drop is a LinearInt8, which upstream does not have"
    )


# The model stays what it is ---------------------------------------------------------------------------------


def test_restore_copies_and_pickles(counted):
    own = quantized(huggingface(), SCALE)
    fused, x = frozen(own), images()
    with ck.use_backend(*KERNELS):
        expected = logits(fused(x))
        for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            before = len(counted)
            assert torch.equal(logits(other(x)), expected)
            assert len(counted) - before == 3
            assert other.state_dict().keys() == own.state_dict().keys()
    restored = ck.restore(fused)
    before = len(counted)
    restored(x)
    assert len(counted) == before


def test_gradients_are_those_of_the_modules(counted):
    own = quantized(ours())
    fused, x = frozen(own), images()
    with torch.enable_grad():
        with pytest.warns(RuntimeWarning, match="gradients are recorded"):
            fused(x).sum().backward()
        own(x).sum().backward()
    assert counted == []
    for mine, theirs in zip(fused.parameters(), own.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 0.05 * max(theirs.grad.abs().max(), 1)


def test_compiled_stages_are_one_operator(counted):
    torch.compiler.reset()
    fused, x = frozen(quantized(ours(), SCALE)), images()
    with ck.use_backend(*KERNELS):
        compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
        out = compiled(x)
        assert len(counted) == 3
        assert decibels(fused(x), out) >= LEAST_OF_REFERENCE
        layers_of(fused)[3].weight_scale.mul_(2)
        assert decibels(fused(x), compiled(x)) >= LEAST_OF_REFERENCE
        assert decibels(fused(x), out) < LEAST_OF_REFERENCE
    torch.compiler.reset()


def test_coverage_names_the_operators():
    rows = [row for row in ck.coverage(frozen(quantized(ours()))) if row.path == "stage1"]
    assert rows[0].fused
    with ck.use_backend("composed", "reference"):
        rows = ck.coverage(frozen(quantized(ours())), images())
    row = next(row for row in rows if row.path == "stage1")
    assert row.backends["transformer_block"] == "composed"
    assert {"linear_int8", "layer_norm_quantize", "attention"} <= row.backends.keys()
    assert not {"gelu", "linear_gelu"} & row.backends.keys()


def test_the_embedding_and_the_norms_stay_watched(counted):
    own = quantized(ours())
    fused, x = frozen(own), images()
    for model in (own, fused):
        stage_of(model, 0).get_submodule("blocks.0.norm2").eps = 1.0
        stage_of(model, 1).get_parameter("patch_embed.norm.bias").add_(1)
    assert_served_alike(fused, own, x, counted)
