"""Layers of SegFormer, PVT, PVT v2 and GLPN that are served as one: accelerate(freeze=True)."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import cvt_kernels as ck
from cvt_kernels import backends, graphs
from cvt_kernels.acceleration import freezing, stages
from cvt_kernels.ops import programs
from cvt_kernels.ops.linear_int8.modules import LinearInt8
from tests.checks import assert_accurate
from tests.cvt_kernels.test_graphs import FakeCapture
from tests.upstream import glpn, images, logits, pvt, pvt_v2, pvt_v2_linear, relative, segformer

#: The makers of models, and the numbers of their layers.
LAYERS = {segformer: 3, pvt: 3, pvt_v2: 3, glpn: 4}

calls = []


@pytest.fixture(autouse=True)
def _counted(monkeypatch):
    """Runs tests without gradients; counts the layers that are served as one, in ``calls``."""
    calls.clear()

    def transformer_block(*args, **settings):
        calls.append(args)
        return ck.transformer_block(*args, **settings)

    def run(self, *args):
        out = own_run(self, *args)
        if out is not None:
            calls.append(args)
        return out

    own_run = programs.Programs.run
    monkeypatch.setattr(programs.Programs, "run", run)
    monkeypatch.setattr(stages, "transformer_block", transformer_block)
    with torch.no_grad():
        yield


def frozen(model):
    """Returns a frozen copy of a model."""
    return ck.accelerate(copy.deepcopy(model), freeze=True)


def layers_of(model):
    return [layer for _, layer, _ in freezing.find_stages(model)]


def rows_of_layers(model, inputs=None):
    paths = {path for path, _, _ in freezing.find_stages(model)}
    return [row for row in ck.coverage(model, inputs) if row.path in paths]


def served(model, x, **settings):
    """Returns what a model computes, and how many of its layers were served as one."""
    before = len(calls)
    out = model(x, **settings)
    return out, len(calls) - before


def images_for(make, batch=2, height=32, width=48):
    """Returns images; those of PVT have the one size that it computes, and GLPN halves sizes five times."""
    return images(batch, *{pvt: (70, 70), glpn: (32, 64)}.get(make, (height, width)))


# The same results ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 48), (45, 70)], ids=str)
@pytest.mark.parametrize("make", LAYERS)
def test_results_are_as_accurate(make, size):
    own = make()
    x = images_for(make, 3, *size)
    exact = logits(copy.deepcopy(own).double()(x.double()))
    out, count = served(frozen(own), x)
    assert count == LAYERS[make]
    assert_accurate(logits(out), logits(own(x)), exact)


@pytest.mark.parametrize("make", LAYERS)
def test_a_layer_is_one_operator(make):
    own, asked = make(), []
    x = images_for(make)
    exact = logits(copy.deepcopy(own).double()(x.double()))

    def noting(operator, backend, implementation):
        def serve(call):
            asked.append((operator, backend))
            return implementation.load().function(call)

        return dataclasses.replace(implementation, function=serve)

    with backends.replaced(noting), ck.use_backend("composed", "native", "sdpa", "reference"):
        out = logits(frozen(own)(x))
    assert asked.count(("transformer_block", "composed")) == LAYERS[make]
    assert_accurate(out, logits(own(x)), exact)


def test_bfloat16():
    own = pvt_v2().to(torch.bfloat16)
    x = images(dtype=torch.bfloat16)
    exact = logits(copy.deepcopy(own).double()(x.double()))
    out, count = served(frozen(own), x)
    assert count == 3
    assert_accurate(logits(out), logits(own(x)), exact)


def test_images_whose_channels_come_last_and_inference_mode():
    own = segformer()
    fused = frozen(own)
    x = images(2, 32, 48)
    expected = logits(fused(x))
    with torch.inference_mode():
        out, count = served(fused, x.contiguous(memory_format=torch.channels_last))
    assert count == 3
    assert relative(logits(out), expected) < 1e-5


@pytest.mark.parametrize("make", LAYERS)
def test_results_have_the_form_of_upstream_and_nothing_is_overwritten(make):
    own = make()
    fused = frozen(own)
    x = images_for(make)
    given = x.clone()
    out, count = served(fused, x, output_hidden_states=True)
    kept = [state.clone() for state in out.hidden_states]
    fused(x + 1)
    assert count == LAYERS[make]
    assert torch.equal(x, given)
    assert all(map(torch.equal, out.hidden_states, kept))
    expected = own(x, output_hidden_states=True).hidden_states
    assert all(relative(a, b) < 1e-5 for a, b in zip(kept, expected, strict=True))
    layer, same = layers_of(fused)[0], layers_of(own)[0]
    tokens = torch.randn(1, 30, next(layer.parameters()).shape[0])
    assert type(layer(tokens, 5, 6)) is type(same(tokens, height=5, width=6))


@pytest.mark.parametrize("make", [pvt, pvt_v2, glpn])
def test_attention_maps_come_from_the_layers_own_forward(make):
    own = make()
    x = images_for(make)
    out, count = served(frozen(own), x, output_attentions=True)
    assert count == 0
    maps, expected = (tree_leaves(each.attentions) for each in (out, own(x, output_attentions=True)))
    assert len(maps) == LAYERS[make]
    assert all(relative(a, b) < 1e-5 for a, b in zip(maps, expected, strict=True))


def test_a_segmenter_is_served_after_its_hidden_states_were_recorded():
    """Each call of it in transformers 5 records some, and leaves hooks on its attentions."""
    own = segformer()
    fused = frozen(own)
    x = images(2, 32, 48)
    for _ in range(2):
        out, count = served(fused, x)
        assert count == 3
        assert relative(out.logits, own(x).logits) < 1e-4
    assert all(row.fused for row in rows_of_layers(fused))
    for model in (own, fused):
        model.config._attn_implementation = "eager"
    out, expected = fused(x, output_attentions=True), own(x, output_attentions=True)
    assert len(out.attentions) == 3
    assert all(relative(a, b) < 1e-4 for a, b in zip(out.attentions, expected.attentions, strict=True))
    assert served(fused, x)[1] == (0 if hasattr(layers_of(own)[0].attention, "q_proj") else 3)


def test_attention_that_was_asked_for_by_name():
    own = segformer()
    own.config._attn_implementation = "eager"
    if not hasattr(layers_of(own)[0].attention, "q_proj"):
        pytest.skip("transformers 4 has one way of attention")
    with pytest.raises(ValueError, match=r"none of the 3 layers of SegformerFor\w+ can be frozen.*'eager'"):
        frozen(own)
    own.config._attn_implementation = "sdpa"
    fused = frozen(own)
    fused.config._attn_implementation = "eager"
    assert served(fused, images(2, 32, 48))[1] == 0
    assert "'eager'" in rows_of_layers(fused)[0].reason


# What is watched -------------------------------------------------------------------------------------------


def weight_in_place(layer):
    layer.mlp.dense1.weight.mul_(2)


def convolution_in_place(layer):
    layer.mlp.dwconv.dwconv.weight.mul_(2)


def another_parameter(layer):
    layer.attention.key.weight = nn.Parameter(layer.attention.key.weight * 2)


def narrowed_data(layer):
    hidden = layer.mlp.dense1.out_features // 2
    conv = layer.mlp.dwconv.dwconv
    for parameter in (layer.mlp.dense1.weight, layer.mlp.dense1.bias, conv.weight, conv.bias):
        parameter.data = parameter.data[:hidden]
    layer.mlp.dense2.weight.data = layer.mlp.dense2.weight.data[:, :hidden]
    conv.groups = conv.in_channels = conv.out_channels = hidden


def another_module(layer):
    layer.attention.proj = copy.deepcopy(layer.attention.value)


def another_eps(layer):
    layer.layer_norm_1.eps = 1.0


def loaded(layer):
    layer.load_state_dict({name: tensor * 1.1 for name, tensor in layer.state_dict().items()})


@pytest.mark.parametrize(
    "change",
    [
        weight_in_place,
        convolution_in_place,
        narrowed_data,
        another_parameter,
        another_module,
        another_eps,
        loaded,
    ],
)
def test_changes_are_noticed(change):
    own = pvt_v2()
    fused = frozen(own)
    x = images(2, 32, 48)
    with ck.use_backend("onednn", "native", "sdpa", "reference"):  # of packed weights, where there are any
        before = logits(fused(x))
        for model in (own, fused):
            change(layers_of(model)[1])
        out, count = served(fused, x)
    assert count == 3
    assert relative(before, logits(own(x))) > 1e-3
    assert relative(logits(out), logits(own(x))) < 1e-5


def attention_of(layer):
    return getattr(layer.attention, "self", layer.attention)  # before and after transformers 5


def another_scale(layer):
    attention_of(layer).scaling = 0.9


def another_ratio(layer):
    name = "sequence_reduction_ratio" if hasattr(layer, "layernorm_before") else "sr_ratio"
    setattr(attention_of(layer), name, 1)


def another_padding(layer):
    layer.mlp.dwconv.dwconv.padding_mode = "reflect"


def another_function(layer):
    (activation,) = (module for module in layer.modules() if type(module).__name__ == "GELUActivation")
    activation.act = torch.relu


@pytest.mark.parametrize(
    ("change", "expected"),
    [(another_scale, 3), (another_ratio, 2), (another_padding, 2), (another_function, 2)],
)
def test_changed_settings_are_noticed(change, expected):
    own = segformer()
    if change is another_scale and not hasattr(attention_of(layers_of(own)[0]), "scaling"):
        pytest.skip("transformers 4 makes the scale of the size of a head")
    fused = frozen(own)
    x = images(2, 32, 48)
    before = logits(fused(x))
    for model in (own, fused):
        change(layers_of(model)[0])
    out, count = served(fused, x)
    assert count == expected
    assert relative(before, logits(own(x))) > 1e-3
    assert relative(logits(out), logits(own(x))) < 1e-5


def test_moving_to_another_dtype_is_noticed():
    fused = frozen(pvt_v2())
    x = images(2, 32, 48)
    before = logits(fused(x))
    out, count = served(fused.double(), x.double())
    assert count == 3
    assert (logits(out) - before).abs().max() < 1e-4


def hook_inside(layer):
    layer.mlp.dwconv.register_forward_hook(lambda *args: None)


def own_forward_inside(layer):
    linear = layer.attention.query
    linear.forward = lambda x: nn.Linear.forward(linear, x) * 2


def adapter_inside(layer):
    layer.mlp.dense1 = nn.Sequential(layer.mlp.dense1, nn.Identity())


def adapter_of_peft(layer):
    layer.attention.query.__class__ = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})


def norm_of_the_same_name(layer):
    layer.layer_norm_2.__class__ = type("LayerNorm", (nn.LayerNorm,), {"__module__": "apex"})


def parametrized(layer):
    parametrize.register_parametrization(layer.attention.value, "weight", nn.Identity())


def rounded(layer):
    layer.mlp.dense2 = LinearInt8.from_float(layer.mlp.dense2)


def another_activation(layer):
    layer.mlp.intermediate_act_fn = nn.ReLU()


def another_stride(layer):
    layer.attention.spatial_reduction.stride = (1, 1)


def dropout_in_training(layer):
    layer.mlp.dropout.train()


def norm_of_another_kind(layer):
    layer.layer_norm_2 = nn.Identity()


def work_in_another_place(layer):
    layer.drop_path = nn.LayerNorm(16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook_inside, "mlp.dwconv has forward hooks"),
        (own_forward_inside, "attention.query has a forward of its own"),
        (adapter_inside, "the first layer of the MLP is a Sequential, expected a plain nn.Linear"),
        (
            adapter_of_peft,
            "attention.query is a peft.tuners.lora.layer.Linear; merge_and_unload() of the model",
        ),
        (norm_of_the_same_name, "layer_norm_2 is a apex.LayerNorm"),
        (parametrized, "attention.value is a ParametrizedLinear"),
        (rounded, "the second layer of the MLP is a LinearInt8, expected a plain nn.Linear"),
        (another_activation, "mlp.intermediate_act_fn is a ReLU"),
        (another_stride, "the reduction has stride (1, 1)"),
        (dropout_in_training, "a module within it is in training mode"),
        (norm_of_another_kind, "layer_norm_2 is a Identity, expected LayerNorm"),
        (work_in_another_place, "drop_path is a LayerNorm, which upstream does not have there"),
    ],
)
def test_a_layer_whose_modules_matter_runs_them(change, reason):
    own = pvt_v2()
    fused = frozen(own)
    x = images(2, 32, 48)
    fused(x)
    for model in (own, fused):
        change(layers_of(model)[0])
    out, count = served(fused, x)
    assert count == 3 - 1
    assert relative(logits(out), logits(own(x))) < 1e-3  # a difference may decide what is rounded
    row = rows_of_layers(fused)[0]
    assert not row.fused
    assert reason in row.reason


def test_hooks_on_a_layer_and_on_all_modules():
    fused = frozen(glpn())
    x = images_for(glpn)
    seen = []
    layers_of(fused)[1].register_forward_hook(lambda module, args, out: seen.append(module))
    assert served(fused, x)[1] == LAYERS[glpn]
    assert len(seen) == 1
    with nn.modules.module.register_module_forward_hook(lambda module, *rest: seen.append(module)):
        assert served(fused, x)[1] == 0
        assert "hook on all modules" in rows_of_layers(fused)[0].reason
    assert len(seen) > 50


def test_the_key_of_a_graph_is_that_of_a_state():
    fused = frozen(pvt_v2())
    first, second, _ = layers_of(fused)
    keys = [layer._cvt_kernels_graph_key() for layer in (first, second)]
    fused(images(2, 32, 48))
    weight_in_place(first)  # a graph reads the live tensors
    assert [layer._cvt_kernels_graph_key() for layer in (first, second)] == keys
    another_eps(first)
    assert first._cvt_kernels_graph_key() != keys[0] != second._cvt_kernels_graph_key() == keys[1]
    hook_inside(first)
    assert "has forward hooks" in first._cvt_kernels_graph_key()


def test_a_segmenter_is_replayed_as_a_graph(monkeypatch):
    """The attentions have hooks, once hidden states were recorded."""
    monkeypatch.setattr(graphs, "_CudaCapture", FakeCapture)
    monkeypatch.setattr(FakeCapture, "tapes", [])
    fused = frozen(segformer())
    model, x = ck.graphed(copy.deepcopy(fused)), images(2, 32, 48)
    for given in (x, x + 1, x):
        assert torch.equal(logits(model(given)), logits(fused(given)))
    for each in (model, fused):
        next(layers_of(each)[0].children()).eps = 1.0
    for _ in range(2):
        assert torch.equal(logits(model(x)), logits(fused(x)))
    assert [tape.replays for tape in FakeCapture.tapes] == [3, 1]
    assert graphs.why_not_graphed(model, x) is None
    layers_of(model)[0].attention.register_forward_hook(lambda *args: None)
    assert graphs.why_not_graphed(model, x) == "a module of the model has forward hooks"


# Not for training, and not for everything ------------------------------------------------------------------


@pytest.mark.parametrize("make", LAYERS)
def test_it_refuses_to_train(make):
    fused = frozen(make())
    fused.train()
    x = images_for(make)
    with pytest.raises(RuntimeError, match=r"is frozen for serving and cannot train.*restore"):
        fused(x)
    assert {row.reason for row in rows_of_layers(fused)} == {"is in training mode"}
    assert served(fused.eval(), x)[1] == LAYERS[make]
    with pytest.raises(ValueError, match=r"model: is in training mode, expected model.eval\(\)"):
        frozen(make().train())


def test_gradients_are_those_of_the_layers_own_forwards():
    own = segformer()
    fused = frozen(own)
    x = images(2, 32, 48)
    with torch.enable_grad():
        with pytest.warns(RuntimeWarning, match="gradients are recorded"):
            logits(fused(x)).sum().backward()
        logits(own(x)).sum().backward()
    assert calls == []
    for mine, theirs in zip(fused.parameters(), own.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 1e-3 * max(theirs.grad.abs().max(), 1)
    with torch.enable_grad():
        assert served(fused.requires_grad_(False), x)[1] == 3


def test_under_autocast_the_layers_own_forwards_run():
    fused, own = frozen(pvt_v2()), pvt_v2()
    x = images(2, 32, 48)
    with torch.autocast("cpu", torch.bfloat16):
        out, count = served(fused, x)
    assert count == 0
    assert relative(logits(out).float(), logits(own(x))) < 0.1


def test_wrong_tokens_get_the_errors_of_the_layer():
    own = ck.accelerate(pvt_v2())
    fused = frozen(own)
    wrong = (torch.randn(1, 30, 16), 7, 6), (torch.randn(1, 30, 24), 5, 6), (torch.randn(30, 16), 5, 6)
    for args in (*wrong, (torch.randn(1, 30, 16).double(), 5, 6), (torch.randn(1, 3, 16), 1, 3)):
        errors = []
        for model in (own, fused):
            with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
                layers_of(model)[0](*args)
            errors.append((caught.type, str(caught.value)))
        assert errors[0] == errors[1]
    assert calls == []


def test_linear_attention_is_refused():
    model = pvt_v2_linear()
    with pytest.raises(
        ValueError, match=r"none of the 3 layers .*: its attention is linear, which no operator"
    ):
        ck.accelerate(model, freeze=True)
    assert not any(row.fused for row in ck.coverage(model))


def test_a_block_without_its_layer_is_refused():
    with pytest.raises(
        ValueError, match="PvtV2SelfAttention has no block of a CvT, SegFormer, PVT, PVT v2 or GLPN"
    ):
        ck.accelerate(layers_of(pvt_v2())[0].attention, freeze=True)


# The model stays what it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", LAYERS)
def test_restore_undoes_it(make):
    model = make()
    classes = [type(module) for module in model.modules()]
    ck.accelerate(model, freeze=False)
    x = images_for(make)
    assert served(model, x)[1] == 0
    ck.accelerate(model, freeze=True)
    assert served(model, x)[1] == LAYERS[make]
    assert [cls.__name__ for cls in classes] == [type(module).__name__ for module in model.modules()]
    assert all(row.fused for row in ck.coverage(model))
    ck.restore(model)
    assert [type(module) for module in model.modules()] == classes
    logits(model.train()(x))


@pytest.mark.parametrize("make", LAYERS)
def test_copies_and_pickles_are_frozen(make):
    fused = frozen(make())
    x = images_for(make)
    others = copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))
    expected = logits(fused(x))
    for other in others:
        out, count = served(other, x)
        assert count == LAYERS[make]
        assert torch.equal(logits(out), expected)
        assert other.state_dict().keys() == fused.state_dict().keys()
        ck.restore(other)
        assert not any(row.fused for row in ck.coverage(other))


def test_coverage_names_the_operators():
    fused = frozen(pvt())
    rows = ck.coverage(fused)
    assert len({row.path for row in rows}) == len(rows)
    with ck.use_backend("reference"):
        rows = rows_of_layers(fused, images_for(pvt))
        assert [row.backends for row in rows] == 3 * [{"transformer_block": "reference"}]
    with ck.use_backend("composed", "reference"):
        row = rows_of_layers(frozen(glpn()), images_for(glpn))[0]
    composed = {"transformer_block": "composed", "depthwise_conv_gelu": "reference"}
    assert composed.items() <= row.backends.items()
    assert {"layer_norm", "attention"} <= row.backends.keys()


@pytest.mark.parametrize("make", [segformer, pvt_v2])
def test_verify_compares_frozen_layers(make):
    report = ck.verify(frozen(make()), images(2, 32, 48), rounds=1)
    assert report.passed, report
    paths = [layer.path for layer in report.layers]
    assert len(set(paths)) == len(paths)
    assert calls


def test_verify_finds_a_wrong_frozen_layer(monkeypatch):
    model = frozen(pvt_v2())
    monkeypatch.setattr(stages, "transformer_block", lambda *args: 1.01 * ck.transformer_block(*args))
    failures = ck.verify(model, images(2, 32, 48), rounds=1).failures
    assert any(failure.startswith("pvt_v2.encoder.layers.0.blocks.0, evaluation") for failure in failures)
    assert not any("training" in failure for failure in failures)


# torch.compile ----------------------------------------------------------------------------------------------


OPERATOR = "cvt_kernels.frozen_layer.default"


class Compiled:
    """A compiled module, with the number of frozen layers in each of its graphs."""

    def __init__(self, model, **settings):
        torch.compiler.reset()
        self.counts = []
        self.model = torch.compile(model, fullgraph=True, backend=self._note, **settings)

    def _note(self, graph, inputs):
        self.counts.append([str(node.target) for node in graph.graph.nodes].count(OPERATOR))
        return graph.forward

    def __call__(self, *args):
        return self.model(*args)


def test_a_graph_serves_images_of_several_sizes():
    layer = layers_of(frozen(pvt_v2()))[0]
    compiled = Compiled(layer, dynamic=True)
    for height, width in ((5, 6), (8, 4)):
        x = torch.randn(2, height * width, 16)
        assert torch.equal(compiled(x, height, width)[0], layer(x, height, width)[0])
    assert (compiled.counts, len(calls)) == ([1], 4)


def test_a_segmenter_is_compiled_after_its_hidden_states_were_recorded():
    fused = frozen(segformer())
    x = images(2, 32, 48)
    expected = fused(x).logits
    compiled = Compiled(fused)
    assert relative(compiled(x).logits, expected) < 1e-5
    assert compiled.counts == [3]


def test_the_operator_is_as_pytorch_expects():
    layer = layers_of(frozen(pvt_v2()))[0]
    operator = torch.ops.cvt_kernels.frozen_layer.default
    torch.library.opcheck(operator, (torch.randn(2, 30, 16), layer._cvt_kernels_number, 5, 6))


def test_changes_after_it_was_compiled():
    own = pvt_v2()
    fused = frozen(own)
    layer, same, x = layers_of(fused)[0], layers_of(own)[0], torch.randn(2, 30, 16)
    compiled = Compiled(layer)
    before = compiled(x, 5, 6)[0]
    for change in (weight_in_place, another_parameter, another_eps):
        for each in (layer, same):
            change(each)
        out, expected = compiled(x, 5, 6)[0], same(x, 5, 6)[0]
        assert relative(out, expected) < 1e-5
        assert relative(before, expected) > 1e-3
    assert (compiled.counts, len(calls)) == ([1], 4)
    layer.train()
    with pytest.raises(RuntimeError, match="cannot train"):
        compiled(x, 5, 6)
    layer.eval()
    seen = []
    layer.mlp.register_forward_hook(lambda module, args, out: seen.append(module))
    assert relative(compiled(x, 5, 6)[0], expected) < 1e-5
    assert (len(calls), len(seen)) == (4, 1)


@pytest.mark.slow
def test_compiled_where_the_modules_of_a_layer_are_traced():
    fused = frozen(pvt_v2())
    layer, x = layers_of(fused)[0], torch.randn(2, 30, 16)
    compiled = Compiled(layer)
    with torch.enable_grad():
        compiled(x, 5, 6)
    adapter_inside(layer)
    compiled(x, 5, 6)
    assert (compiled.counts, calls) == ([0, 0], [])


def test_an_exported_program_holds_the_modules():
    layer, x = layers_of(frozen(pvt_v2()))[0], torch.randn(1, 30, 16)
    program = torch.export.export(layer, (x, 5, 6), strict=False)
    assert OPERATOR not in {str(node.target) for node in program.graph.nodes}
    assert relative(program.module()(x, 5, 6)[0], layer(x, 5, 6)[0]) < 1e-5
