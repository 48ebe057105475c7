"""Accelerated SegFormer, PVT, PVT v2 and GLPN compute what they did, by our operators."""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels.acceleration import matching
from tests.checks import (
    assert_accurate,
    python_blocks,
    record_all_calls,
    record_calls,
    run_blocks,
    section_of,
)
from tests.upstream import (
    PYRAMIDS,
    RANDOM,
    assert_same_step,
    glpn,
    images,
    logits,
    pair,
    pvt,
    pvt_v2,
    pvt_v2_linear,
    relative,
    segformer,
    step,
    with_right_gradients,
)

ROOT = Path(__file__).parents[3]

#: An image size of each, odd where upstream takes it.
SIZES = {segformer: (70, 54), pvt: (70, 70), pvt_v2: (70, 54), pvt_v2_linear: (86, 62), glpn: (96, 64)}

#: What a layer whose keys are fewer calls, and one whose keys are all tokens.
FEED_FORWARD = ["add_layer_norm", "linear", "depthwise_conv_gelu", "linear"]
ATTENTION = ["layer_norm", *3 * ["linear"], "attention", "linear"]
REDUCING = ["layer_norm", "linear", "layer_norm", *ATTENTION[1:]]


def inputs(make, batch=2, dtype=torch.float32):
    return images(batch, *SIZES[make], dtype=dtype)


every_pyramid = pytest.mark.parametrize("make", PYRAMIDS)


@pytest.mark.parametrize("batch", [1, 2])
@every_pyramid
def test_evaluation(make, batch):
    own, fused = pair(make)
    x = inputs(make, batch)
    with torch.no_grad():
        expected, actual = logits(own(x)), logits(fused(x))
        exact = logits(copy.deepcopy(own).double()(x.double()))
        assert_accurate(actual, expected, exact)
        with ck.use_backend("reference"):
            assert_accurate(logits(fused(x)), expected, exact)


@pytest.mark.parametrize("batch", [1, 2])
@every_pyramid
def test_training_steps_in_float64_are_the_same_but_for_rounding(make, batch):
    """Dropout and drop path included: the same random numbers go to the same places."""
    own, fused = pair(make, "train", **RANDOM)
    own, fused = with_right_gradients(own).double(), with_right_gradients(fused).double()
    assert_same_step(own, fused, inputs(make, batch, torch.float64), 1e-11)


@pytest.mark.parametrize("batch", [1, 2])
@every_pyramid
def test_training_step_in_float32(make, batch):
    own, fused = pair(make, "train", **RANDOM)
    own, fused = with_right_gradients(own), with_right_gradients(fused)
    assert_same_step(own, fused, inputs(make, batch), 5e-5)
    states = []
    for model in (own, fused):
        step(model, inputs(make))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@every_pyramid
def test_gradients_in_evaluation_mode(make):
    own, fused = pair(make)
    assert_same_step(own.double(), fused.double(), inputs(make, dtype=torch.float64), 1e-11)


@pytest.mark.parametrize("make", [segformer, pvt_v2])
def test_half_precision(make):
    own, fused = pair(make)
    x = inputs(make)
    with torch.no_grad():
        exact = logits(copy.deepcopy(own).double()(x.double()))
        x = x.bfloat16()
        assert_accurate(logits(fused.bfloat16()(x)), logits(own.bfloat16()(x)), exact)
        with torch.autocast("cpu"):
            x = x.float()
            assert_accurate(logits(fused.float()(x)), logits(own.float()(x)), exact)


# The operators that are called ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [segformer, pvt_v2])
def test_every_layer_calls_the_operators(make):
    _, fused = pair(make)
    called = record_all_calls()
    with torch.no_grad():
        fused(inputs(make))
    first = ["conv_embedding", *REDUCING, *FEED_FORWARD]
    second = ["conv_embedding", *2 * (ATTENTION + FEED_FORWARD)]
    stages = [i for i, operator in enumerate(called) if operator == "conv_embedding"]
    assert len(stages) == 2
    assert called[: len(first)] == first
    assert called[stages[1] : stages[1] + len(second)] == second
    called.clear()
    ck.restore(fused)(inputs(make))
    assert called == []


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (pvt, {"conv_embedding", "layer_norm", "linear", "attention", "add_layer_norm", "linear_gelu"}),
        (pvt_v2_linear, {"conv_embedding", "layer_norm_gelu", "attention", "depthwise_conv_gelu"}),
        (glpn, {"conv_embedding", "layer_norm", "attention", "add_layer_norm", "depthwise_conv_gelu"}),
    ],
    ids=["pvt", "pvt_v2_linear", "glpn"],
)
def test_the_operators_of_others(make, expected):
    _, fused = pair(make)
    called = record_all_calls()
    with torch.no_grad():
        fused(inputs(make))
    assert expected <= set(called)
    assert ck.coverage(fused, inputs(make)).called.keys() == set(called)


@every_pyramid
def test_verify_passes(make):
    report = ck.verify(make(**RANDOM), inputs(make), rounds=1)
    assert report.passed, str(report)
    assert all(layer.fused for layer in report.layers)


# In place -------------------------------------------------------------------------------------------------


@every_pyramid
def test_everything_but_the_classes_stays(make):
    model = make()
    classes = [type(module) for module in model.modules()]
    text, state = repr(model), {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
    ck.accelerate(ck.accelerate(model, freeze=False), freeze=False)
    assert repr(model) == text
    assert {key: id(value) for key, value in model.state_dict(keep_vars=True).items()} == state
    assert [type(module) for module in model.modules()] != classes
    ck.restore(model)
    assert [type(module) for module in model.modules()] == classes


@every_pyramid
def test_copies_and_pickles_are_accelerated(make):
    _, fused = pair(make)
    buffer = io.BytesIO()
    torch.save(fused, buffer)
    buffer.seek(0)
    x = inputs(make)
    with torch.no_grad():
        for twin in (copy.deepcopy(fused), torch.load(buffer, weights_only=False)):
            assert all(row.fused for row in ck.coverage(twin))
            assert torch.equal(logits(twin(x)), logits(fused(x)))


@pytest.mark.parametrize("make", [segformer, pvt_v2])
def test_compiled_as_one_graph(make):
    _, fused = pair(make)
    x = inputs(make)
    with torch.no_grad(), ck.use_backend("reference"):
        expected = logits(fused(x))  # transformers installs hooks in the first call, under a lock
        compiled = torch.compile(fused, fullgraph=True, backend="eager")
        assert relative(logits(compiled(x)), expected) < 1e-5


def test_the_parts_are_those_of_the_block():
    """The operator of a whole block, given the parts, computes the layer."""
    for make in (segformer, pvt, pvt_v2, glpn):
        layers = [(layer, entry) for _, layer, entry in matching.find_blocks(make()) if entry.is_layer]
        assert layers
        for layer, entry in layers:
            parts = entry.parts(layer)
            x = torch.randn(2, 20, parts.norm1.weight.shape[0])
            with torch.no_grad():
                expected = layer(x, 5, 4)
                expected = expected[0] if isinstance(expected, tuple) else expected
                assert relative(ck.transformer_block(x, (5, 4), parts.as_operator()), expected) < 1e-5


# What a fused forward leaves to the block -----------------------------------------------------------------


@every_pyramid
def test_active_attention_dropout_is_left_to_the_block(make):
    own = make(attention_drop=0.3, **RANDOM).train()
    fused = ck.accelerate(copy.deepcopy(own), freeze=False)
    calls = record_calls("attention")
    assert_same_step(own, fused, inputs(make), 5e-5)
    assert not calls
    reasons = {row.reason for row in ck.coverage(fused) if not row.fused}
    assert reasons == {"dropout of attention probabilities is active (p = 0.3, training)"}
    assert all(row.fused for row in ck.coverage(fused.eval()))


def flat(attentions):
    """Returns attentions one after the other; PVT v2 has a tuple for each stage."""
    return [each for item in attentions for each in (item if isinstance(item, tuple) else (item,))]


@pytest.mark.parametrize("make", [pvt, pvt_v2, glpn])
def test_attentions_are_those_of_the_block(make):
    own, fused = pair(make)
    calls = record_calls("attention")
    with torch.no_grad():
        expected, actual = (model(inputs(make), output_attentions=True) for model in (own, fused))
    assert not calls
    assert len(actual.attentions) == len(expected.attentions) > 0
    for ours, theirs in zip(*map(flat, (actual.attentions, expected.attentions)), strict=True):
        assert relative(ours, theirs) < 1e-5
    assert relative(logits(actual), logits(expected)) < 1e-5


@every_pyramid
def test_hidden_states_are_those_of_the_model(make):
    own, fused = pair(make)
    with torch.no_grad():
        expected, actual = (model(inputs(make), output_hidden_states=True) for model in (own, fused))
    assert len(actual.hidden_states) == len(expected.hidden_states) > 1
    for ours, theirs in zip(actual.hidden_states, expected.hidden_states, strict=True):
        assert relative(ours, theirs) < 1e-5


@pytest.mark.parametrize("make", [segformer, pvt, pvt_v2, glpn])
def test_an_image_that_upstream_refuses_is_refused(make):
    own, fused = pair(make)
    for model in (own, fused):
        with pytest.raises((RuntimeError, ValueError)):
            model(images(1, 3, 3))


LAYERS = ("SegformerLayer", "PvtLayer", "PvtV2BlockLayer", "GLPNLayer")


def first_layer(model):
    return next(module for module in model.modules() if type(module).__name__ in LAYERS)


def activation_of(layer):
    return "activation_fn" if hasattr(layer.mlp, "activation_fn") else "intermediate_act_fn"


def another_activation(layer):
    setattr(layer.mlp, activation_of(layer), nn.ReLU())


def hooked_activation(layer):
    getattr(layer.mlp, activation_of(layer)).register_forward_hook(lambda m, args, out: 1.5 * out)


def wider_convolution(layer):
    channels = layer.mlp.dwconv.dwconv.in_channels
    layer.mlp.dwconv.dwconv = nn.Conv2d(channels, channels, 5, 1, 2, groups=channels)


def overlapping_reduction(layer):
    path, conv = next(
        (path, module)
        for path, module in layer.named_modules()
        if isinstance(module, nn.Conv2d) and module.groups == 1
    )
    layer.set_submodule(path, nn.Conv2d(conv.in_channels, conv.in_channels, 2, 1))


def another_function(layer):
    getattr(layer.mlp, activation_of(layer)).act = torch.relu


def norm_without_eps(layer):
    next(module for module in layer.children() if isinstance(module, nn.LayerNorm)).eps = 0.0


CHANGES = [
    (another_function, "the function of GELUActivation has been replaced"),
    (norm_without_eps, "LayerNorm has eps = 0, expected more than 0"),
    (another_activation, "is a ReLU, expected GELU or "),
    (hooked_activation, "has forward hooks"),
    (wider_convolution, "the convolution is not one of 3×3"),
    (overlapping_reduction, "the reduction has stride (1, 1), expected its kernel size, (2, 2)"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
@pytest.mark.parametrize("make", [segformer, pvt_v2, glpn])
def test_a_changed_inner_module_takes_effect(make, change, reason):
    own = make()
    change(first_layer(own))
    fused = ck.accelerate(copy.deepcopy(own), freeze=False)
    with torch.no_grad():
        assert relative(logits(fused(inputs(make))), logits(own(inputs(make)))) < 1e-5
    (row,) = [row for row in ck.coverage(fused) if not row.fused]
    assert reason in row.reason


@pytest.mark.parametrize("make", [segformer, pvt])
def test_a_forward_of_another_version_is_refused(make):
    """The names are upstream's, the arguments are not."""
    model = make()
    kind = type(first_layer(model))

    def forward(self, hidden_states, height, width, tokens_to_keep):
        raise NotImplementedError

    forward.__qualname__ = f"{kind.__name__}.forward"
    changed = type(kind.__name__, (nn.Module,), {"forward": forward, "__module__": __name__})
    for module in model.modules():
        if type(module) is kind:
            module.__class__ = changed
    reasons = {
        row.reason
        for row in ck.coverage(ck.accelerate(model, freeze=False))
        if row.class_name == kind.__name__
    }
    (reason,) = reasons
    assert reason.startswith("forward takes hidden_states, height, width, tokens_to_keep; expected")


@pytest.mark.parametrize("hidden_act", ["gelu_new", "gelu_pytorch_tanh", "quick_gelu", "gelu_python"])
def test_every_gelu_of_transformers(hidden_act):
    own, fused = pair(pvt_v2, hidden_act=hidden_act)
    with torch.no_grad():
        assert relative(logits(fused(inputs(pvt_v2))), logits(own(inputs(pvt_v2)))) < 1e-5


def test_the_page():
    (block,) = python_blocks(section_of("accelerate.md", "## SegFormer, PVT, PVT v2 and GLPN"))
    assert run_blocks([block])["after"].shape == (1, 2, 24, 16)
