"""Accelerated models compute what they did, by our operators: accelerate(), coverage() and restore()."""

import copy
import functools
import io
import json
import re
from threading import Thread
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import cvt_kernels as ck
from cvt.factory import randomize
from cvt_kernels import backends, dispatch, proofs
from cvt_kernels.acceleration import matching
from cvt_kernels.acceleration.coverage import BlockCoverage, Coverage
from tests import microsoft_cvt
from tests.checks import (
    assert_accurate,
    implementation,
    not_built,
    record_all_calls,
    record_calls,
)
from tests.conftest import DATA
from tests.upstream import (
    PYRAMIDS,
    RANDOM,
    UPSTREAMS,
    assert_same_step,
    huggingface,
    images,
    logits,
    microsoft,
    microsoft_numbers,
    microsoft_plain,
    ours,
    pair,
    pvt_v2_linear,
    relative,
    step,
    with_right_gradients,
)

SIZES = [(1, 224, 224), (2, 160, 256), (3, 96, 64)]

#: The operators of one block, in the order in which they are called.
BLOCK = [
    *["layer_norm", "conv_projection", *3 * ["linear"], "attention", "linear"],
    *["add_layer_norm", "linear_gelu", "linear"],
]


# The stand-in for Microsoft's repository -------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    return microsoft_numbers()


def tiny(recorded):
    model = microsoft()
    state = {name.removeprefix("sd/"): t for name, t in recorded.items() if name.startswith("sd/")}
    model.load_state_dict(state, strict=True)
    return model


def test_the_stand_in_has_microsofts_state_dict():
    expected = json.loads((DATA / "microsoft_state_dict_shapes.json").read_text())["cvt_13"]
    with torch.device("meta"):
        state = microsoft_cvt.ConvolutionalVisionTransformer().state_dict()
    assert [(key, list(tensor.shape)) for key, tensor in state.items()] == list(expected.items())


@pytest.mark.parametrize("prepare", [lambda model: model, ck.accelerate], ids=["stand-in", "accelerated"])
def test_microsofts_numbers(recorded, prepare):
    model = prepare(tiny(recorded))
    for i in "01":
        assert relative(model.eval()(recorded[f"x{i}"]), recorded[f"eval{i}"]) < 1e-5
    assert relative(step(model.train(), recorded["x1"]), recorded["train1"]) < 1e-5
    largest = max(norm.item() for name, norm in recorded.items() if name.startswith("gradnorm/"))
    for name, parameter in model.named_parameters():
        expected = recorded[f"gradnorm/{name}"].item()
        assert parameter.grad.norm().item() == pytest.approx(expected, rel=5e-5, abs=1e-9 * largest), name
    for name, buffer in model.named_buffers():
        if not name.endswith("tracked"):
            assert relative(buffer, recorded[f"after/{name}"]) < 1e-5, name


# The model's own function ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("make", UPSTREAMS)
def test_evaluation(make, size):
    own, fused = pair(make)
    x = images(*size)
    with torch.no_grad():
        assert relative(logits(fused(x)), logits(own(x))) < 1e-5


@pytest.mark.parametrize("make", UPSTREAMS)
def test_evaluation_of_cvt_13(make):
    own, fused = pair(make, size="cvt_13")
    x = images(1, 224, 224)
    with torch.inference_mode():
        assert relative(logits(fused(x)), logits(own(x))) < 1e-5


@pytest.mark.parametrize("size", SIZES[:2], ids=str)
@pytest.mark.parametrize("make", [huggingface, microsoft_plain])
def test_training_steps_in_float64_are_the_same_but_for_rounding(make, size):
    """Dropout and drop path included: the same random numbers go to the same places."""
    own, fused = pair(make, "train", **RANDOM)
    x = images(*size, dtype=torch.float64)
    own, fused = with_right_gradients(own).double(), fused.double()
    assert_same_step(own, fused, x, 1e-11)
    for model in (own, fused):
        torch.optim.SGD(model.parameters(), 1e-3).step()
    assert_same_step(own, fused, x, 1e-10)


@pytest.mark.xfail(
    reason="torch 2.13's CPU batch_norm is wrong for upstream's strides at B = 1", strict=False
)
@pytest.mark.parametrize("make", [huggingface, microsoft_plain])
def test_upstream_gradients_of_one_image(make):
    own, right = make().double().train(), with_right_gradients(make().double().train())
    assert_same_step(right, own, images(1, dtype=torch.float64), 1e-11)


@pytest.mark.parametrize("make", UPSTREAMS)
def test_training_step_in_float32(make):
    own, fused = pair(make, "train", **RANDOM)
    assert_same_step(own, fused, images(2, 160, 256), 2e-5)
    states = []
    for model in (own, fused):
        step(model, images())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_random_numbers_matter_to_the_training_tests():
    own, fused = pair(huggingface, "train", **RANDOM)
    assert relative(step(fused, images(), seed=4), step(own, images(), seed=3)) > 0.01


@pytest.mark.parametrize("make", UPSTREAMS)
def test_active_attention_dropout_is_left_to_the_block(make):
    own = make(attention_drop=0.3, **RANDOM).train()
    fused = ck.accelerate(copy.deepcopy(own), freeze=False)
    attention_calls, projection_calls = record_calls("attention"), record_calls("conv_projection")
    assert_same_step(own, fused, images(), 2e-5)
    assert not attention_calls
    assert not projection_calls
    unfused = [row for row in ck.coverage(fused) if not row.fused]
    assert {row.class_name for row in unfused} == {"Block" if make is microsoft else "CvtLayer"}
    assert "dropout of attention probabilities is active (p = 0.3, training)" in unfused[0].reason
    with torch.no_grad():
        assert relative(logits(fused.eval()(images())), logits(own.eval()(images()))) < 1e-5
    assert len(attention_calls) == len(unfused)
    assert all(row.fused for row in ck.coverage(fused))


@pytest.mark.parametrize("make", UPSTREAMS)
def test_partly_frozen_batch_norm(make):
    own, fused = pair(make, "train")
    for model in (own, fused):
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        norms[1].eval()
    assert_same_step(own, fused, images(), 2e-5)


@pytest.mark.parametrize("make", UPSTREAMS)
def test_every_block_calls_the_operators(make):
    _, fused = pair(make)
    called = record_all_calls()
    fused(images())
    depths = (1, 2, 3) if make is huggingface else (1, 1, 2)  # blocks of each stage
    assert called == [operator for depth in depths for operator in ["layer_norm", *depth * BLOCK]]
    called.clear()
    ck.restore(fused)(images())
    assert called == []


@pytest.mark.parametrize("make", UPSTREAMS)
def test_without_a_compiled_gelu_the_linear_layer_adds_its_bias(make):
    own, fused = pair(make)
    x = images()
    called = []
    backends.register(
        "gelu",
        "native",
        implementation("gelu", lambda x, **kw: called.append(1) or ck.reference.gelu(x, **kw)),
    )
    absent = backends.Implementation(ck.reference.bias_gelu, why_unavailable=lambda device_type: "not here")
    backends.register("bias_gelu", "native", absent)
    with torch.no_grad():
        assert relative(logits(fused(x)), logits(own(x))) < 1e-5
    assert len(called) == len([row for row in ck.coverage(fused, x) if "gelu" in row.backends])


def test_compositions_follow_the_configuration():
    """Hugging Face's configuration can change more than sizes."""
    from transformers import CvtModel

    for config in (
        {"qkv_bias": 3 * [False]},
        {"kernel_qkv": [1, 5, 7], "padding_kv": [0, 2, 3], "padding_q": [0, 2, 3]},
        {"stride_kv": [1, 4, 1]},
        {"mlp_ratio": [2.0, 1.0, 3.0]},
        {"cls_token": 3 * [False]},
    ):
        own, fused = pair(huggingface, model_class=CvtModel, **config)
        with torch.no_grad():
            expected = own(images()).last_hidden_state
            assert relative(fused(images()).last_hidden_state, expected) < 1e-5, config


def test_a_models_part_and_a_model_that_contains_one():
    from transformers import CvtModel

    own, fused = pair(huggingface, model_class=CvtModel)
    with torch.no_grad():
        ours, theirs = fused(images()), own(images())
    assert relative(ours.last_hidden_state, theirs.last_hidden_state) < 1e-5
    assert relative(ours.cls_token_value, theirs.cls_token_value) < 1e-5
    both = nn.ModuleDict({"a": nn.Sequential(microsoft()), "b": huggingface(), "head": nn.LayerNorm(4)})
    ck.accelerate(both, freeze=False)
    assert {row.path.split(".")[0] for row in ck.coverage(both)} == {"a", "b"}
    layer = ck.accelerate(huggingface().cvt.encoder.stages[2].layers[0], freeze=False)
    assert [row.path for row in ck.coverage(layer)] == [""]


# In place --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*UPSTREAMS, ours])
def test_everything_but_the_classes_stays(make):
    model = make()
    before = dict(model.named_modules())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    attributes = {name: set(vars(module)) for name, module in before.items()}
    names, text, keys = [type(m).__name__ for m in model.modules()], repr(model), list(model.state_dict())
    classes = [type(m) for m in model.modules()]
    assert ck.accelerate(model, freeze=False) is model
    after = dict(model.named_modules())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert {**dict(model.named_parameters()), **dict(model.named_buffers())}.items() == tensors.items()
    assert {name: set(vars(module)) for name, module in after.items()} == attributes
    assert ([type(m).__name__ for m in model.modules()], repr(model)) == (names, text)
    assert list(model.state_dict()) == keys
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
    assert ([type(m) for m in model.modules()] == classes) == (make is ours)
    fused = [type(m) for m in model.modules()]
    ck.accelerate(model, freeze=False)  # twice is harmless
    assert [type(m) for m in model.modules()] == fused
    assert ck.restore(model) is model
    assert [type(m) for m in model.modules()] == classes
    ck.restore(model)
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("make", UPSTREAMS)
def test_hooks_on_blocks_fire(make):
    own, fused = pair(make)
    fired, outputs = [], []
    rows = ck.coverage(fused)
    for model in (own, fused):
        seen = []
        for row in rows:
            block = model.get_submodule(row.path)
            block.register_forward_pre_hook(
                lambda m, args, seen=seen, path=row.path: seen.append((path, len(args)))
            )
            block.register_forward_hook(lambda m, args, out, seen=seen: seen.append(out.shape))
        outputs.append(logits(model(images())))
        fired.append(seen)
    assert relative(outputs[1], outputs[0]) < 1e-5
    assert fired[1] == fired[0]
    assert len(fired[0]) == 2 * len(rows)
    assert all(row.fused for row in ck.coverage(fused))


class Place(NamedTuple):
    """A module's place in a model: its parent and its name there."""

    parent: nn.Module
    name: str

    @property
    def module(self):
        return getattr(self.parent, self.name)

    def replace(self, module):
        setattr(self.parent, self.name, module)


class Inner(NamedTuple):
    """Modules of one block that its fused forward does not call."""

    projection: nn.Module
    conv: Place
    bn: Place
    norm: Place
    act: Place


def inner(model):
    if hasattr(model, "cvt"):
        layer = model.cvt.encoder.stages[1].layers[0]
        projection = layer.attention.attention.convolution_projection_key.convolution_projection
        names = "convolution", "normalization"
        norm, act = Place(layer, "layernorm_after"), Place(layer.intermediate, "activation")
    else:
        block = model.stage1.blocks[0]
        projection, names = block.attn.conv_proj_k, ("conv", "bn")
        norm, act = Place(block, "norm2"), Place(block.mlp, "act")
    conv, bn = (Place(projection, name) for name in names)
    return Inner(projection, conv, bn, norm, act)


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


def hook_inner(model, calls, place):
    chosen = getattr(inner(model), place)
    module = chosen.module if isinstance(chosen, Place) else chosen
    module.register_forward_hook(lambda m, args, out: calls.append(place) or 1.5 * out)


def prehook(model, calls):
    inner(model).conv.module.register_forward_pre_hook(lambda m, args: calls.append(1) or (args[0] + 1,))


def backward_hook(model, calls):
    inner(model).bn.module.register_full_backward_hook(lambda m, grad_in, grad_out: calls.append(1))


def parametrization(model, calls):
    parametrize.register_parametrization(inner(model).conv.module, "weight", Doubling())
    calls.append(1)


def replace_convolution(model, calls):
    conv = inner(model).conv
    old = conv.module
    new = nn.Conv2d(old.in_channels, old.in_channels, 3, 2, 1, groups=old.groups, bias=True)
    randomize(new)
    conv.replace(new)
    calls.append(1)


def replace_batch_norm(model, calls):
    inner(model).bn.replace(Doubling())
    calls.append(1)


def replace_norm(model, calls):
    inner(model).norm.replace(Doubling())
    calls.append(1)


def replace_activation(model, calls):
    inner(model).act.replace(nn.SiLU())
    calls.append(1)


def own_forward(model, calls):
    module = inner(model).bn.module
    original = module.forward
    module.forward = lambda x: calls.append(1) or 3 * original(x)


CHANGES = [
    (lambda model, calls: hook_inner(model, calls, "conv"), "has forward hooks"),
    (lambda model, calls: hook_inner(model, calls, "bn"), "has forward hooks"),
    (lambda model, calls: hook_inner(model, calls, "norm"), "has forward hooks"),
    (lambda model, calls: hook_inner(model, calls, "act"), "has forward hooks"),
    (lambda model, calls: hook_inner(model, calls, "projection"), "has forward hooks"),
    (prehook, "has forward hooks"),
    (backward_hook, "has backward hooks"),
    (parametrization, "is a ParametrizedConv2d, expected Conv2d"),
    (replace_convolution, "a convolution has a bias"),
    (replace_batch_norm, "is a Doubling, expected BatchNorm2d or SyncBatchNorm"),
    (replace_norm, "is a Doubling, expected LayerNorm"),
    (replace_activation, "is a SiLU, expected GELU"),
    (own_forward, "has a forward of its own"),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("change", "reason"), CHANGES, ids=[c[0].__name__ + str(i) for i, c in enumerate(CHANGES)]
)
@pytest.mark.parametrize("make", UPSTREAMS)
def test_a_changed_inner_module_takes_effect(make, change, reason, when):
    """Somebody changes a module that a fused forward would pass over, before or after ``accelerate``."""
    own = make().train()
    fused, own_calls, fused_calls = copy.deepcopy(own), [], []
    change(own, own_calls)
    if when == "after":
        ck.accelerate(fused, freeze=False)
    change(fused, fused_calls)
    ck.accelerate(fused, freeze=False)
    assert_same_step(own, fused, images(), 2e-5)
    assert fused_calls == own_calls != []
    (row,) = [row for row in ck.coverage(fused) if not row.fused]
    assert reason in row.reason


@pytest.mark.parametrize("make", UPSTREAMS)
def test_linear_layers_may_become_anything(make):
    """Adapters (LoRA) and quantization replace them: they are called as modules."""

    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = (
                base,
                nn.Linear(base.in_features, 2),
                nn.Linear(2, base.out_features),
            )

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    own, fused = pair(make, "train")
    for model in (own, fused):
        torch.manual_seed(5)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and not isinstance(parent, Adapter):
                    setattr(parent, name, Adapter(child))
    assert_same_step(own, fused, images(), 2e-5)
    assert all(row.fused for row in ck.coverage(fused))


@pytest.mark.parametrize("make", [*UPSTREAMS, ours])
def test_a_block_is_examined_once_until_it_changes(make, monkeypatch):
    model, examined = ck.accelerate(make(), freeze=False), []
    examine = matching._examine
    monkeypatch.setattr(matching, "_examine", lambda *args: examined.append(args[0]) or examine(*args))
    blocks = matching.find_blocks(model)
    for training in (True, False, True):
        model.train(training)
        logits(model(images()))
    assert len(examined) == len(set(examined)) <= len(blocks)
    block = examined[-1]
    linear = next(module for module in block.modules() if type(module) is nn.Linear)
    for change in (lambda: linear.register_forward_hook(lambda *args: None), linear._forward_hooks.clear):
        examined.clear()
        change()
        for _ in range(2):
            logits(model(images()))
        assert examined == [block]
    assert all(row.fused for row in ck.coverage(model))


def test_a_hook_on_all_modules_sees_all_of_them():
    own, fused = pair(huggingface)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, args, out: seen.append(type(m).__name__)
    )
    try:
        own(images())
        expected = list(seen)
        seen.clear()
        fused(images())
        assert seen == expected
        assert "is seen by a hook on all modules" in ck.coverage(fused)[0].reason
    finally:
        handle.remove()
    assert ck.coverage(fused)[0].fused


@pytest.mark.parametrize("make", UPSTREAMS)
def test_copies_and_pickles_are_accelerated(make):
    own, fused = pair(make)
    x = images()
    buffer = io.BytesIO()
    torch.save(fused, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(fused), torch.load(buffer, weights_only=False)):
        assert [row.fused for row in ck.coverage(twin)] == [row.fused for row in ck.coverage(fused)]
        assert torch.equal(logits(twin(x)), logits(fused(x)))
        assert [type(m) for m in ck.restore(twin).modules()] == [type(m) for m in own.modules()]
    assert all(row.fused for row in ck.coverage(fused))


@pytest.mark.parametrize("make", UPSTREAMS)
def test_states_go_to_and_from_the_upstream_model(make):
    own, fused = pair(make)
    other = make()
    with torch.no_grad():
        other_parameters = [p.mul_(1.5) for p in other.parameters()]
    assert len(other_parameters) > 20
    fused.load_state_dict(other.state_dict(), strict=True)
    own.load_state_dict(fused.state_dict(), strict=True)
    other.eval()
    with torch.no_grad():
        for model in (own, fused):
            assert relative(logits(model(images())), logits(other(images()))) < 1e-4


def test_save_pretrained(tmp_path):
    from transformers import CvtForImageClassification

    own, fused = pair(huggingface)
    assert fused.config.to_dict() == own.config.to_dict()
    for model, name in ((own, "own"), (fused, "fused")):
        model.save_pretrained(tmp_path / name)
    config, expected = ((tmp_path / name / "config.json").read_text() for name in ("fused", "own"))
    assert config == expected
    loaded = CvtForImageClassification.from_pretrained(tmp_path / "fused").eval()
    assert torch.equal(loaded(images()).logits, own(images()).logits)


@pytest.mark.parametrize("make", UPSTREAMS)
def test_dtype_may_change_before_and_after(make):
    x = images(dtype=torch.bfloat16)
    own = make().eval()
    if make is microsoft:
        own = (
            microsoft_plain().eval()
        )  # with its own LayerNorm, bfloat16 weights fail in Microsoft's model too
    before = ck.accelerate(copy.deepcopy(own).bfloat16(), freeze=False)
    after = ck.accelerate(copy.deepcopy(own), freeze=False).bfloat16()
    with torch.no_grad():
        exact = logits(copy.deepcopy(own).double()(x.double()))
        eager = logits(copy.deepcopy(own).bfloat16()(x))
        assert torch.equal(logits(before(x)), logits(after(x)))
        assert_accurate(logits(after(x)), eager, exact)
    assert all(row.fused for row in ck.coverage(ck.accelerate(copy.deepcopy(own).to("meta"), freeze=False)))


# coverage --------------------------------------------------------------------------------------------------


def test_coverage_tells_reasons_without_running_anything():
    model = microsoft()
    assert {(row.fused, row.reason) for row in ck.coverage(model)} == {
        (False, "accelerate() has not been called")
    }
    called = record_all_calls()
    rows = ck.coverage(ck.accelerate(model, freeze=False))
    assert [row.path for row in rows][:3] == ["stage0.patch_embed", "stage0.blocks.0", "stage1.patch_embed"]
    assert [row.class_name for row in rows][:3] == ["ConvEmbed", "Block", "ConvEmbed"]
    assert all(row.fused and row.backends == {} for row in rows)
    assert rows.called == {}
    assert called == []


def test_coverage_tells_which_backends_served_each_block():
    model = ck.accelerate(microsoft(), freeze=False)
    record_calls("attention")
    backends.register("bias_gelu", "native", implementation("bias_gelu", ck.reference.bias_gelu))
    for training in (True, False):
        rows = ck.coverage(model.train(training), images())
        built = "reference" if not_built() else "native"
        ours = ("layer_norm", "conv_projection", "add_layer_norm")
        expected = {"linear": "reference", "attention": "native", "bias_gelu": "native"}
        assert rows[0].backends == {"layer_norm": built}
        assert rows[1].backends == dict.fromkeys(ours, built) | expected
        assert rows.called["attention"] == {"native": 4}
    with ck.use_backend("reference"):
        rows = ck.coverage(model, images())
    assert set(rows[1].backends) >= {"linear", "gelu"}
    assert {name for row in rows for name in row.backends.values()} == {"reference"}
    with ck.use_backend("triton"), pytest.raises(ck.BackendUnavailable):
        ck.coverage(model, images())


def test_coverage_under_auto_tells_what_the_verdicts_chose(proving):
    model = ck.accelerate(microsoft(), freeze=False)
    with ck.use_backend("auto"):
        evaluation = ck.coverage(model.eval(), images())
        training = ck.coverage(model.train(), images())
        assert {"attention", "conv_projection", "layer_norm"} <= evaluation.called.keys()
        for rows in (evaluation, training):
            for operator, counts in rows.called.items():
                assert counts.keys() <= dispatch.chosen_backends(operator, "cpu").keys(), operator
    assert evaluation.called.keys() == training.called.keys()


def test_coverage_counts_no_calls_of_proofs(proving):
    model = ck.accelerate(microsoft(), freeze=False).eval()
    with ck.use_backend("auto"):
        first, second = (ck.coverage(model, images()).called for _ in range(2))
    assert {name: sum(counts.values()) for name, counts in first.items()} == {
        name: sum(counts.values()) for name, counts in second.items()
    }


@pytest.mark.parametrize("make", UPSTREAMS)
@pytest.mark.parametrize("training", [False, True])
def test_coverage_runs_a_copy(make, training):
    model = ck.accelerate(make(), freeze=None).train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    generator = torch.get_rng_state()
    own_call = nn.Module.__call__
    ck.coverage(model, {"pixel_values": images()} if make is huggingface else (images(),))
    assert nn.Module.__call__ is own_call
    assert torch.equal(torch.get_rng_state(), generator)
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_coverage_looks_into_wrappers():
    model = ck.accelerate(microsoft(), freeze=False).eval()
    expected = [row.backends for row in ck.coverage(model, images())]
    for wrapper in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        rows = ck.coverage(wrapper, images())
        assert [row.backends for row in rows] == expected
        assert rows[1].path.endswith(".stage0.blocks.0")
    assert [row.backends for row in ck.coverage(nn.Sequential(model), images())] == expected


def test_coverage_in_two_threads_counts_the_calls_of_each():
    model, own_call = ck.accelerate(microsoft(), freeze=False).eval(), nn.Module.__call__
    found = []

    def observe():
        with ck.use_backend("reference"):
            found.append(ck.coverage(model, images()).called)

    observe()
    (expected,) = found
    threads = [Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        with torch.no_grad():
            model(images())
    for thread in threads:
        thread.join()
    assert found == [expected] * 5
    assert nn.Module.__call__ is own_call
    compiled = torch.compile(lambda x: torch.compiler.is_compiling(), backend="eager")
    assert compiled(images())  # threads have left torch.compile as it was


def test_coverage_puts_everything_back_after_an_error():
    model, own_call = ck.accelerate(microsoft(), freeze=False), nn.Module.__call__
    known = backends.implementations
    with pytest.raises(ValueError, match="x: got shape"):
        ck.coverage(model, torch.ones(3))
    assert nn.Module.__call__ is own_call
    assert backends.implementations is known


@pytest.mark.parametrize("make", UPSTREAMS)
def test_auto_proves_at_first_use_and_computes_the_same(make, proving, monkeypatch):
    """Proofs draw no random numbers and leave gradients and statistics alone; a second model needs none."""
    ck.use_backend("auto")
    own, fused = pair(make, "train", **RANDOM)
    expected = copy.deepcopy(fused)
    assert_same_step(own, fused, images(), 2e-5)
    with torch.no_grad():
        assert relative(logits(fused.eval()(images())), logits(own.eval()(images()))) < 1e-5
    assert list((proving / "cvt_kernels" / "verdicts").glob("*.json"))
    monkeypatch.setattr(proofs, "prove", lambda proof: pytest.fail(f"proves {proof.question} again"))
    backends.forget()
    step(expected, images())
    for (name, a), b in zip(expected.named_buffers(), fused.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_coverage_prints_an_aligned_table():
    model = ck.accelerate(microsoft(), freeze=False)
    model.stage1.blocks[0].attn.conv_proj_k.bn.register_forward_hook(lambda *_: None)
    lines = str(ck.coverage(model, images())).splitlines()
    table = lines[: lines.index("")]
    assert table[0].split()[:4] == ["block", "class", "fused", "operators,"]
    for start in (table[0].index(word) for word in ("class", "fused", "operators")):
        assert all(line[start - 2 : start] == "  " and line[start] != " " for line in table)
    assert len(table) == 1 + 6  # stage2 has two blocks, which are one row
    assert table[2].split()[:5] == ["stage0.blocks.0", "Block", "yes", "layer_norm,", "conv_projection,"]
    assert lines[-1] == "6 of 7 blocks fused"
    (no,) = [line for line in table if " no " in line]
    assert " ".join(no.split()) == "stage1.blocks.0 Block no attn.conv_proj_k.bn has forward hooks"


def test_coverage_prints_equal_rows_of_consecutive_blocks_as_one():
    model = microsoft(depths=(1, 1, 6))
    assert [row.path for row in ck.coverage(model) if row.path.startswith("stage2.blocks.5")]
    ck.accelerate(model, freeze=False)
    model.stage2.blocks[3].attn.attn_drop.register_forward_hook(lambda *_: None)
    lines = str(ck.coverage(model)).splitlines()
    paths = [line.split()[0] for line in lines[1 : lines.index("")] if line.startswith("stage2")]
    assert paths == ["stage2.patch_embed", "stage2.blocks.0–2", "stage2.blocks.3", "stage2.blocks.4–5"]
    assert lines[-1] == "10 of 11 blocks fused"
    with_number = [("fc.0", True), ("fc.1", False), ("0", True), ("1", True), ("a1", True), ("a2", True)]
    rows = [BlockCoverage(path, "Mlp", fused, {}, None) for path, fused in with_number]
    assert [line.split()[0] for line in str(Coverage(rows, {})).splitlines()[1:6]] == [
        "fc.0", "fc.1", "0–1", "a1", "a2",
    ]  # fmt: skip


def test_coverage_prints_the_backends_of_every_operator_once():
    model = ck.accelerate(microsoft(), freeze=False).eval()
    with ck.use_backend("reference"):
        _, served, _ = str(ck.coverage(model, images())).split("\n\n")
    heading, *lines = served.splitlines()
    assert heading == "served by"
    assert "  attention: reference (4 calls)" in lines
    assert len(lines) == len({line.split(":")[0] for line in lines}) == 6
    rows = Coverage([], {"gelu": {"native": 9, "reference": 3}, "attention": {"sdpa": 1}})
    assert "  gelu: native (9 calls), reference (3)\n  attention: sdpa (1 call)\n" in str(rows)


def test_coverage_prints_a_dash_for_a_block_that_calls_no_operator():
    model = ck.accelerate(huggingface()).eval()
    lines = str(ck.coverage(model, images())).splitlines()
    rows = [line.split() for line in lines if "CvtLayer" in line]  # within stages that are served as one
    assert rows
    assert all(row[2:] == ["yes", "–"] for row in rows)


def test_coverage_without_inputs_prints_reasons_alone():
    lines = str(ck.coverage(ck.accelerate(microsoft(), freeze=False))).splitlines()
    assert lines[0].split() == ["block", "class", "fused", "why", "not"]
    assert lines[-2:] == ["", "7 of 7 blocks fused"]
    assert "served by" not in lines


def test_our_own_blocks_are_fused_as_they_are():
    rows = ck.coverage(ck.accelerate(ours(), freeze=False))
    assert all(row.fused for row in rows)
    assert [row.class_name for row in rows][:3] == ["ConvEmbed", "Block", "ConvEmbed"]
    model, called = ours(), record_all_calls()
    model(images())
    assert {operator for row in ck.coverage(model, images()) for operator in row.backends} == set(called)


# Bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [ck.accelerate, ck.coverage, ck.restore])
def test_not_a_module(function):
    with pytest.raises(TypeError, match=r"model: got OrderedDict, expected a torch\.nn\.Module"):
        function(microsoft().state_dict())


@pytest.mark.parametrize("make", [*UPSTREAMS, *PYRAMIDS])
def test_images_without_a_batch(make):
    model = ck.accelerate(make().eval(), freeze=False)
    for shape in ((3, 64, 64), (1, 1, 3, 64, 64)):
        message = (
            rf"^(x|pixel_values): got shape {re.escape(str(shape))}, expected \(batch, 3, height, width\)$"
        )
        with pytest.raises(ValueError, match=message), torch.no_grad():
            model(torch.ones(shape))
    if make is not pvt_v2_linear:  # which has nothing to freeze
        ck.accelerate(model, freeze=True)
        with pytest.raises(ValueError, match=message), torch.no_grad():
            model(torch.ones(shape))


class Attention(nn.Module):
    """An attention as in most transformers, which has the same name."""

    def __init__(self):
        super().__init__()
        self.proj_q = self.proj_k = self.proj_v = self.proj = nn.Linear(4, 4)
        self.num_heads, self.scale = 1, 1.0


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2, self.drop = nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Dropout()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(4), Attention(), nn.LayerNorm(4), Mlp()


@pytest.mark.parametrize("function", [ck.accelerate, ck.coverage])
def test_nothing_to_accelerate(function):
    """A transformer that is no CvT has classes of the same names."""
    model = nn.Sequential(Block(), nn.LayerNorm(4))
    with pytest.raises(
        ValueError, match="Sequential has no block of a CvT, SegFormer, PVT, PVT v2 or GLPN; "
    ):
        function(model)
    assert [type(m) for m in model.modules()][1] is Block


def test_nothing_that_is_supported():
    block = microsoft(method="linear").stage0.blocks[0]
    with pytest.raises(
        ValueError, match=r"none of the 1 blocks .* itself: conv_proj_q is not a Sequential of convolution, "
    ):
        ck.accelerate(block, freeze=False)
    assert type(block) is microsoft_cvt.Block


@pytest.mark.parametrize("method", ["avg", "linear"])
def test_other_projections_are_left_alone_and_reported(method):
    own = microsoft(method=method).eval()
    fused = ck.accelerate(copy.deepcopy(own), freeze=False)
    called = record_all_calls()
    assert relative(fused(images()), own(images())) < 1e-5
    assert called == 3 * ["layer_norm"]  # of the embeddings
    rows = [row for row in ck.coverage(fused) if row.class_name == "Block"]
    assert {(row.fused, row.reason) for row in rows} == {
        (False, "conv_proj_q is not a Sequential of convolution, BatchNorm and Rearrange")
    }
    assert all(type(fused.get_submodule(row.path)) is microsoft_cvt.Block for row in rows)


class Louder(microsoft_cvt.Mlp):
    def forward(self, x):
        return 2 * super().forward(x)


class Relative(microsoft_cvt.Attention):
    pass


class Shifted(microsoft_cvt.Attention):
    def forward_conv(self, x, h, w):
        return super().forward_conv(x + 1, h, w)


def test_derived_classes():
    model = microsoft().eval()
    model.stage0.blocks[0].mlp.__class__ = Louder
    model.stage1.blocks[0].attn.__class__ = Relative
    model.stage2.blocks[0].attn.table = nn.Parameter(torch.zeros(3))
    model.stage2.blocks[1].attn.__class__ = Shifted
    own = copy.deepcopy(model)
    rows = {row.path: row for row in ck.coverage(ck.accelerate(model, freeze=False))}
    assert relative(model(images()), own(images())) < 1e-5
    assert rows["stage0.blocks.0"].reason == "mlp is a Louder"
    assert rows["stage1.blocks.0"].fused
    assert rows["stage2.blocks.0"].fused  # nobody reads the table
    assert rows["stage2.blocks.1"].reason == "forward_conv of attn is not that of Microsoft's Attention"
    assert type(model.stage0.blocks[0]) is microsoft_cvt.Block


@pytest.mark.parametrize("wraps", [False, True])
def test_a_patched_class_is_left_alone(monkeypatch, wraps):
    original = microsoft_cvt.Mlp.forward

    def patch(self, x):
        return 2 * original(self, x)

    monkeypatch.setattr(microsoft_cvt.Mlp, "forward", functools.wraps(original)(patch) if wraps else patch)
    own = microsoft().eval()
    fused = ck.accelerate(copy.deepcopy(own), freeze=False)
    assert relative(fused(images()), own(images())) < 1e-5
    (reason,) = {row.reason for row in ck.coverage(fused) if not row.fused}
    assert reason.startswith(f"forward, patched by {__name__}.")
    assert "of mlp is not that of Microsoft's Mlp" in reason


def test_a_patched_inner_class_is_left_alone(monkeypatch):
    original = microsoft_cvt.QuickGELU.forward
    monkeypatch.setattr(microsoft_cvt.QuickGELU, "forward", lambda self, x: 2 * original(self, x))
    own = microsoft().eval()
    fused = ck.accelerate(copy.deepcopy(own), freeze=False)
    assert relative(fused(images()), own(images())) < 1e-5
    (reason,) = {row.reason for row in ck.coverage(fused) if not row.fused}
    assert reason.startswith(f"the forward of mlp.act is patched by {__name__}.")


class OtherBlock(microsoft_cvt.Block):
    def forward(self, x, size):
        return super().forward(x, *size)


OtherBlock.__name__ = "Block"


def test_another_signature():
    block = microsoft().stage0.blocks[0]
    block.__class__ = OtherBlock
    with pytest.raises(ValueError, match="forward takes x, size; expected x, h, w"):
        ck.accelerate(block, freeze=False)


@pytest.mark.parametrize("make", UPSTREAMS)
def test_a_foreign_state_dict_fails_as_it_does_upstream(make):
    own, fused = pair(make)
    foreign = ours().state_dict() if make is huggingface else {**own.state_dict(), "more": torch.ones(1)}
    messages = []
    for model in (own, fused):
        with pytest.raises(RuntimeError, match="Error") as error:
            model.load_state_dict(foreign)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_coverage_of_blocks_without_parameters():
    """Quantized layers leave such blocks."""
    model = ck.accelerate(huggingface(), freeze=False)
    for name, module in list(model.named_modules()):
        if name.endswith("intermediate"):
            module.dense = nn.Identity()
    assert all(row.fused for row in ck.coverage(model))


def test_errors_of_the_operators_reach_the_caller():
    model = ck.accelerate(microsoft(), freeze=False).train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(images(1, 16, 16))
