"""Stages of a CvT, and layers of other models, served as one: what they return, and for which calls."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import cvt_kernels as ck
from cvt import create_model
from cvt.factory import randomize
from cvt_kernels.models import served as served_module
from tests import microsoft_cvt, upstream
from tests.checks import assert_accurate
from tests.cvt_kernels.models.served import (
    CVTS,
    LAYERED,
    MODELS,
    frozen,
    inputs,
    noted_backends,
    outermost_of,
    rows_of_stages,
    stages_of,
)
from tests.upstream import images, in_float64, logits, relative

pytestmark = pytest.mark.usefixtures("without_gradients")
every_model = pytest.mark.parametrize("make", MODELS)


# The same results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("freeze", "size"), [(True, (64, 64)), (True, (45, 70)), (None, (45, 70))], ids=str)
@every_model
def test_results_are_as_accurate(make, freeze, size, served):
    own, x = make().eval(), inputs(make, 3, *size)
    exact = logits(in_float64(copy.deepcopy(own))(x.double()))
    out = logits(ck.accelerate(copy.deepcopy(own), freeze=freeze)(x))
    assert len(served) == len(outermost_of(own))
    assert_accurate(out, logits(own(x)), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "make", [upstream.huggingface, upstream.microsoft_plain, upstream.ours, upstream.pvt_v2]
)
def test_dtypes(make, dtype, served):
    own, x = make().eval().to(dtype), images(dtype=dtype)
    exact = logits(in_float64(copy.deepcopy(own))(x.double()))
    out, usual = logits(frozen(own)(x)), logits(own(x))
    assert len(served) == len(outermost_of(own))
    assert out.dtype == dtype
    # A stream that has its biases early rounds them with other numbers.
    error, of_own = (out.double() - exact).abs().max(), (usual.double() - exact).abs().max()
    assert error <= 3 * of_own + 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_everything_that_cvt_can_be_is_folded(served):
    model = create_model(
        "cvt_13",
        embed_dims=(16, 80, 96),
        num_heads=(1, 5, 6),
        depths=(2, 2, 2),
        num_classes=10,
        layer_scale=0.3,
        embed_norm="batch_layer_norm",
        cls_token=(False, True, True),
        stride_kv=(1, 2, 3),
        qkv_bias=False,
        pool="avg",
        activation="gelu_tanh",
    ).eval()
    randomize(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            module.eps = 0.1
    x = images()
    exact = logits(copy.deepcopy(model).double()(x.double()))
    assert relative(logits(frozen(model)(x)).double(), exact) < 1e-5
    assert len(served) == 3


def test_microsofts_stage_returns_the_class_token_and_a_map():
    own, x = upstream.microsoft().eval(), images()
    for mine, theirs in zip(stages_of(frozen(own)), stages_of(own), strict=True):
        (a, token), (b, expected) = mine(x), theirs(x)
        assert relative(a, b) < 1e-5
        assert a.stride() == b.stride()
        assert (token is None) == (expected is None)
        x = b
    assert relative(token, expected) < 1e-5


@pytest.mark.parametrize("make", [upstream.huggingface, *LAYERED])
def test_nothing_of_the_users_is_overwritten(make, served):
    own, x = make().eval(), inputs(make)
    fused, given = frozen(own), x.clone()
    hidden = fused(x, output_hidden_states=True).hidden_states
    assert len(served) == len(outermost_of(own))
    kept = [state.clone() for state in hidden]
    fused(x + 1)
    assert torch.equal(x, given)
    assert all(map(torch.equal, hidden, kept))
    expected = own(x, output_hidden_states=True).hidden_states
    assert all(relative(a, b) < 1e-5 for a, b in zip(hidden, expected, strict=True))
    state = fused.state_dict()
    assert all(torch.equal(state[name], value) for name, value in own.state_dict().items())


@pytest.mark.parametrize("make", LAYERED)
def test_a_layer_returns_the_form_of_upstream(make):
    layer, same = stages_of(frozen(make()))[0], stages_of(make())[0]
    tokens = torch.randn(1, 30, next(layer.parameters()).shape[0])
    assert type(layer(tokens, 5, 6)) is type(same(tokens, height=5, width=6))


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("make", [upstream.pvt, upstream.pvt_v2, upstream.glpn])
def test_attention_maps_come_from_the_layers_own_forward(make, freeze, served):
    own, x = make(), inputs(make)
    model = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    with noted_backends() as asked:
        out, expected = (each(x, output_attentions=True) for each in (model, own))
    assert not served
    assert "attention" not in {operator for operator, _ in asked}
    maps, own_maps = tree_leaves(out.attentions), tree_leaves(expected.attentions)
    assert len(maps) == MODELS[make][1]
    assert all(relative(a, b) < 1e-5 for a, b in zip(maps, own_maps, strict=True))


@pytest.mark.parametrize("level", ["stage", "layer"])
def test_layers_are_served_where_their_stage_cannot_be(level, served):
    """Beside one that has a hook; what they compute then is in tests/changes.py."""
    fused, x = frozen(upstream.pvt_v2()), inputs(upstream.pvt_v2)
    first, second = fused.pvt_v2.encoder.layers
    watched = second.patch_embedding if level == "stage" else second.blocks[0].mlp
    watched.register_forward_hook(lambda *_: None)
    fused(x)
    assert [call[0] for call in served] == [first, *second.blocks[level == "layer" :]]


# Not for training, and not for everything ------------------------------------------------------------------


@pytest.mark.parametrize("make", [*CVTS, upstream.segformer])
def test_gradients_are_those_of_the_blocks(make, served):
    own, x = make().eval(), inputs(make)
    fused = frozen(own)
    with torch.enable_grad():
        with pytest.warns(RuntimeWarning, match="gradients are recorded") as caught:
            logits(fused(x)).sum().backward()
        # No file of transformers; Microsoft's model is a file of one's own.
        assert {warning.filename for warning in caught} <= {__file__, microsoft_cvt.__file__}
        logits(own(x)).sum().backward()
        assert not served
        for mine, theirs in zip(fused.parameters(), own.parameters(), strict=True):
            assert (mine.grad - theirs.grad).abs().max() <= 1e-3 * max(theirs.grad.abs().max(), 1)
        fused.requires_grad_(False)(x)
    assert len(served) == len(outermost_of(own))


@pytest.mark.parametrize("freeze", [None, True])
@pytest.mark.parametrize("make", [upstream.huggingface, upstream.pvt_v2])
def test_under_autocast_the_blocks_run(make, freeze, served):
    own, x = make().eval(), inputs(make)
    with torch.autocast("cpu", torch.bfloat16):
        out = logits(ck.accelerate(copy.deepcopy(own), freeze=freeze)(x))
    assert not served
    assert relative(out.float(), logits(own(x))) < 0.1


WRONG_IMAGES = [torch.randn(2, 4, 64, 64), torch.randn(2, 3, 64, 64).double(), images().byte()]
WRONG_TOKENS = [
    *((torch.randn(1, 30, 16), 7, 6), (torch.randn(1, 30, 24), 5, 6), (torch.randn(30, 16), 5, 6)),
    *((torch.randn(1, 30, 16).double(), 5, 6), (torch.randn(1, 3, 16), 1, 3)),
]


def errors_of(module, arguments):
    """Returns the errors that wrong arguments get."""
    for args in arguments:
        with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
            module(*args)
        yield caught.type, str(caught.value)


@pytest.mark.parametrize("make", [*CVTS, upstream.pvt_v2])
def test_wrong_arguments_get_the_errors_of_the_model(make, served):
    own = make().eval() if make in CVTS else ck.accelerate(make(), freeze=False)
    arguments = [(x,) for x in WRONG_IMAGES] if make in CVTS else WRONG_TOKENS
    modules = [model if make in CVTS else stages_of(model)[0] for model in (own, frozen(own))]
    errors = [list(errors_of(module, arguments)) for module in modules]
    assert errors[0] == errors[1]
    assert not served


@pytest.mark.parametrize("make", CVTS)
def test_an_empty_batch(make, served):
    own, x = make().eval(), torch.empty(0, 3, 64, 64)
    assert frozen(own)(x) is not None
    assert len(served) == 3
    assert logits(frozen(own)(x)).shape == logits(own(x)).shape == (0, 10)


@pytest.mark.parametrize("make", [upstream.ours, upstream.segformer])
def test_inference_mode_and_channels_that_come_last(make, served):
    fused, x = frozen(make()), inputs(make)
    expected = logits(fused(x))
    with torch.inference_mode():
        assert torch.equal(logits(fused(x)), expected)
        out = fused(x.contiguous(memory_format=torch.channels_last))
    assert len(served) == 3 * len(outermost_of(fused))
    assert relative(logits(out), expected) < 1e-5


# Reports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "of_embedding", "composed"),
    [
        (upstream.ours, {"layer_norm"}, {"layer_norm", "conv_projection", "attention", "gelu"}),
        (upstream.pvt, set(), {"layer_norm", "attention"}),
        (upstream.glpn, set(), {"layer_norm", "attention", "depthwise_conv_gelu"}),
    ],
)
def test_coverage_names_the_operators(make, of_embedding, composed):
    fused, x = frozen(make()), inputs(make)
    rows = ck.coverage(fused)
    assert len({row.path for row in rows}) == len(rows)
    assert len(rows_of_stages(fused)) == MODELS[make][0]
    with ck.use_backend("reference"):
        assert rows_of_stages(fused, x)[0].backends.keys() == {"transformer_block"} | of_embedding
    with ck.use_backend("composed", "reference"):
        found = rows_of_stages(fused, x)[0].backends
    assert found["transformer_block"] == "composed"
    assert composed <= found.keys()


@pytest.mark.parametrize(
    ("make", "path"),
    [(upstream.ours, "stage0"), (upstream.pvt_v2, "pvt_v2.encoder.layers.0")],
    ids=["ours", "pvt_v2"],
)
def test_verify_finds_what_is_frozen_and_wrong(make, path, monkeypatch):
    model, serve = frozen(make()), served_module.tokens_served

    def wrong(*args):
        out = serve(*args)
        return None if out is None else (out[0] * 1.01, out[1])

    monkeypatch.setattr(served_module, "tokens_served", wrong)
    failures = ck.verify(model, inputs(make), rounds=1).failures
    assert any(failure.startswith(f"{path}, evaluation") for failure in failures)
    assert not any("training" in failure for failure in failures)
