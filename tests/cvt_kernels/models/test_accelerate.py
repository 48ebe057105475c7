"""Accelerated models compute what they did, by our operators: accelerate() and restore()."""

import copy
import functools
import inspect
import json
import pickle
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import cvt_kernels as ck
from cvt_kernels import modes
from cvt_kernels.models import families, forward, matching
from cvt_kernels.ops import autograd
from cvt_kernels.tuning import choices
from tests import microsoft_cvt
from tests.checks import assert_accurate, record_calls
from tests.conftest import DATA
from tests.timm_models import importable
from tests.upstream import (
    ENCODERS,
    PYRAMIDS,
    RANDOM,
    TIMMS,
    UPSTREAMS,
    assert_same_step,
    glpn,
    huggingface,
    images,
    in_float64,
    logits,
    microsoft,
    microsoft_numbers,
    microsoft_plain,
    ours,
    pair,
    pvt,
    pvt_v2,
    pvt_v2_linear,
    relative,
    segformer,
    step,
    timm_pvt_v2,
    timm_vit,
    vit,
    with_right_gradients,
)

every_upstream = pytest.mark.parametrize("make", UPSTREAMS)
every_model = pytest.mark.parametrize("make", [*UPSTREAMS, *PYRAMIDS])


def inputs(make, batch=2, dtype=torch.float32):
    """Returns images: of a CvT in a size for each batch, of a pyramid in its own, odd where possible."""
    sizes = {pvt: (70, 70), pvt_v2_linear: (86, 62), glpn: (96, 64)} | dict.fromkeys(
        [segformer, pvt_v2], (70, 54)
    )
    of_cvt = {1: (224, 224), 2: (160, 256), 3: (96, 64)}[batch]
    return images(batch, *sizes.get(make, of_cvt), dtype=dtype)


# The stand-in for Microsoft's repository -------------------------------------------------------------------


def test_the_stand_in_has_microsofts_state_dict():
    expected = json.loads((DATA / "microsoft_state_dict_shapes.json").read_text())["cvt_13"]
    with torch.device("meta"):
        state = microsoft_cvt.ConvolutionalVisionTransformer().state_dict()
    assert [(key, list(tensor.shape)) for key, tensor in state.items()] == list(expected.items())


@pytest.mark.parametrize("prepare", [lambda model: model, ck.accelerate], ids=["stand-in", "accelerated"])
def test_microsofts_numbers(prepare):
    recorded, model = microsoft_numbers(), microsoft()
    model.load_state_dict({k.removeprefix("sd/"): t for k, t in recorded.items() if k.startswith("sd/")})
    model = prepare(model)
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


@pytest.mark.parametrize("batch", [1, 2, 3])
@every_model
def test_evaluation(make, batch):
    own, fused = pair(make)
    x = inputs(make, batch)
    # Of few logits the larger error of two equally exact sums is luck.
    mirrored = [x, x.flip(2), x.flip(3), x.flip(2, 3)]

    def outputs(model, dtype=torch.float32):
        return torch.cat([logits(model(each.to(dtype))) for each in mirrored])

    with torch.no_grad():
        expected, exact = outputs(own), outputs(in_float64(copy.deepcopy(own)), torch.float64)
        assert_accurate(outputs(fused), expected, exact)
        with ck.use_backend("reference"):
            assert_accurate(outputs(fused), expected, exact)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("make", [huggingface, microsoft_plain, *PYRAMIDS])
def test_steps_in_float64_are_the_same_but_for_rounding(make, batch, mode):
    """Dropout and drop path included: the same random numbers go to the same places."""
    own, fused = pair(make, mode, **RANDOM)
    x = inputs(make, batch, torch.float64)
    own, fused = with_right_gradients(own).double(), fused.double()
    if make in PYRAMIDS:
        with_right_gradients(fused)
    assert_same_step(own, fused, x, 1e-11)
    for model in (own, fused):
        torch.optim.SGD(model.parameters(), 1e-3).step()
    assert_same_step(own, fused, x, 1e-10)


@every_model
def test_training_step_in_float32(make):
    own, fused = pair(make, "train", **RANDOM)
    if make in PYRAMIDS:
        with_right_gradients(own), with_right_gradients(fused)
    assert_same_step(own, fused, inputs(make), 5e-5 if make in PYRAMIDS else 2e-5)
    states = []
    for model in (own, fused):
        step(model, inputs(make))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert relative(step(fused, inputs(make), seed=4), step(own, inputs(make), seed=3)) > 0.01  # they matter


@every_model
def test_active_attention_dropout_is_left_to_the_block(make):
    own = make(attention_drop=0.3, **RANDOM).train()
    fused = ck.accelerate(copy.deepcopy(own), freeze=False)
    attention_calls, projection_calls = record_calls("attention"), record_calls("conv_projection")
    x = inputs(make)
    assert_same_step(own, fused, x, 5e-5)
    assert not attention_calls
    assert not projection_calls
    unfused = [row for row in ck.coverage(fused) if not row.fused]
    assert {row.reason for row in unfused} == {
        "dropout of attention probabilities is active (p = 0.3, training)"
    }
    with torch.no_grad():
        assert relative(logits(fused.eval()(x)), logits(own.eval()(x))) < 1e-4
    assert len(attention_calls) == len(unfused)
    assert all(row.fused for row in ck.coverage(fused))


def test_images_on_a_gpu_become_channels_last():
    conv = nn.Conv2d(3, 4, 3)
    with FakeTensorMode():
        for dtype, expected in ((torch.bfloat16, True), (torch.float32, False)):
            image = torch.empty(2, 3, 8, 8, dtype=dtype, device="cuda")
            made = forward._channels_last(conv, image)
            assert made.is_contiguous(memory_format=torch.channels_last) == expected
        conv.register_forward_hook(lambda *_: None)
        assert forward._channels_last(conv, image.bfloat16()).is_contiguous()
    assert forward._channels_last(nn.Conv2d(3, 4, 3), x := torch.ones(1, 3, 8, 8, dtype=torch.bfloat16)) is x


@every_upstream
def test_weights_of_a_block_are_cast_together(make, monkeypatch):
    """On a GPU; here the dtype of autocast is taken for that of the layers, too."""
    own, fused = pair(make, "train")
    calls, cast = [], autograd._cast_all
    monkeypatch.setattr(autograd, "_cast_all", lambda *args: calls.append(len(args[0])) or cast(*args))
    monkeypatch.setattr(modes, "dtype_for_layers", modes.autocast_dtype)
    gradients = []
    for model in (own, fused):
        with torch.autocast("cpu", torch.bfloat16):
            logits(model(images())).float().square().mean().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters()})
    blocks = 6 if make is huggingface else 4
    # Six layers with their biases and three convolutions, in the forward and in the backward.
    assert calls == 2 * blocks * [15]
    for name, expected in gradients[0].items():
        assert gradients[1][name].dtype == torch.float32
        torch.testing.assert_close(gradients[1][name], expected, rtol=0.1, atol=0.05)


@every_upstream
def test_auto_computes_the_same_and_writes_nothing(make):
    ck.use_backend("auto")
    own, fused = pair(make, "train", **RANDOM)
    assert_same_step(own, fused, images(), 2e-5)
    with torch.no_grad():
        assert relative(logits(fused.eval()(images())), logits(own.eval()(images()))) < 1e-5
    assert not choices.cache_directory().exists()


@pytest.mark.parametrize(
    "config",
    [
        {"qkv_bias": 3 * [False]},
        {"kernel_qkv": [1, 5, 7], "padding_kv": [0, 2, 3], "padding_q": [0, 2, 3]},
        {"stride_kv": [1, 4, 1]},
        {"mlp_ratio": [2.0, 1.0, 3.0]},
        {"cls_token": 3 * [False]},
        {},
    ],
    ids=str,
)
def test_compositions_follow_the_configuration(config):
    from transformers import CvtModel

    own, fused = pair(huggingface, model_class=CvtModel, **config)
    with torch.no_grad():
        expected, out = own(images()), fused(images())
    assert relative(out.last_hidden_state, expected.last_hidden_state) < 1e-5
    if not config:
        assert relative(out.cls_token_value, expected.cls_token_value) < 1e-5


def test_a_models_part_and_a_model_that_contains_one():
    both = nn.ModuleDict({"a": nn.Sequential(microsoft()), "b": huggingface(), "head": nn.LayerNorm(4)})
    ck.accelerate(both, freeze=False)
    assert {row.path.split(".")[0] for row in ck.coverage(both)} == {"a", "b"}
    layer = ck.accelerate(huggingface().cvt.encoder.stages[2].layers[0], freeze=False)
    assert [row.path for row in ck.coverage(layer)] == [""]


# In place --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*UPSTREAMS, ours, *PYRAMIDS])
def test_everything_but_the_classes_stays(make):
    model = make()
    before = dict(model.named_modules())
    attributes = {name: set(vars(module)) for name, module in before.items()}
    names, text = [type(m).__name__ for m in model.modules()], repr(model)
    state = {key: id(value) for key, value in model.state_dict(keep_vars=True).items()}
    classes = [type(m) for m in model.modules()]
    assert ck.accelerate(model, freeze=False) is model
    assert dict(model.named_modules()) == before
    assert {key: id(value) for key, value in model.state_dict(keep_vars=True).items()} == state
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert ([type(m).__name__ for m in model.modules()], repr(model)) == (names, text)
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
    fused = [type(m) for m in model.modules()]
    assert (fused == classes) == (make is ours)
    ck.accelerate(model, freeze=False)  # twice is harmless
    assert [type(m) for m in model.modules()] == fused
    for _ in range(2):
        assert ck.restore(model) is model
        assert [type(m) for m in model.modules()] == classes
    ck.accelerate(model.eval())
    with torch.no_grad():
        model(inputs(make))
    assert not any("cvt_kernels" in name for module in ck.restore(model).modules() for name in vars(module))


@pytest.mark.parametrize("make", [*UPSTREAMS, ours])
def test_a_block_is_examined_once_until_it_changes(make, monkeypatch):
    model, examined = ck.accelerate(make(), freeze=False), []
    examine = matching.examine
    monkeypatch.setattr(matching, "examine", lambda *args: examined.append(args[0]) or examine(*args))
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


@pytest.mark.parametrize("freeze", [False, None, True])
@pytest.mark.parametrize("make", [*UPSTREAMS, segformer, pvt, pvt_v2, glpn, *ENCODERS, *TIMMS])
@importable()
def test_copies_look_the_same(make, freeze):
    own = make().eval()
    model = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    # Pickles do not find the stand-ins for timm's classes.
    pickled = [] if make in TIMMS else [pickle.loads(pickle.dumps(model))]
    for twin in (copy.deepcopy(model), *pickled):
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        assert ck.coverage(twin) == ck.coverage(model)
        assert all(map(isinstance, twin.modules(), map(type, own.modules())))
        assert repr(twin) == repr(own)
        state, expected = twin.state_dict(), own.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert [type(m) for m in ck.restore(twin).modules()] == [type(m) for m in own.modules()]


def test_save_pretrained(tmp_path):
    from transformers import CvtForImageClassification

    own, fused = pair(huggingface)
    for model, name in ((own, "own"), (fused, "fused")):
        model.save_pretrained(tmp_path / name)
    config, expected = ((tmp_path / name / "config.json").read_text() for name in ("fused", "own"))
    assert config == expected
    loaded = CvtForImageClassification.from_pretrained(tmp_path / "fused").eval()
    assert torch.equal(loaded(images()).logits, own(images()).logits)


# Bad input -------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("freeze", [False, None, True])
def test_images_that_are_none(make, freeze):
    if freeze and make is pvt_v2_linear:
        return  # it has nothing to freeze
    model, x = ck.accelerate(make().eval(), freeze=freeze), images()
    for wrong, error, got in (
        (x[0], ValueError, r"shape \(.*3, 64, 64\)"),
        (x[None], ValueError, r"shape \(.*3, 64, 64\)"),
        (x.numpy(), TypeError, "ndarray"),
        ([x], TypeError, "list"),
    ):
        message = rf"^(x|pixel_values): got {got}, expected (a tensor )?\(batch, 3, height, width\)$"
        with pytest.raises(error, match=message), torch.no_grad():
            model(wrong)


def test_errors_of_the_operators_reach_the_caller():
    model = ck.accelerate(microsoft(), freeze=False).train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(images(1, 16, 16))


def test_an_unknown_model_is_told_of_every_family_with_its_project():
    """So that timm's DINOv3, whose blocks are others, is not told that it has none of a ViT of timm."""
    timms = type("Eva", (nn.Module,), {"__module__": "timm.models.eva"})
    message = "^model: got Eva of timm, expected a model with blocks of one of these: "
    with pytest.raises(ValueError, match=message) as caught:
        ck.accelerate(timms())
    for family in families.FAMILIES:
        assert family.models
        for model in family.models:
            assert "(of " in model
            assert model in str(caught.value)
    for ask in (ck.coverage, ck.quantize):
        with pytest.raises(ValueError, match=re.escape(families.MODELS)):
            ask(timms().eval())


def test_what_nobody_reads_may_differ():
    model = microsoft().eval()
    model.stage1.blocks[0].attn.__class__ = type("Relative", (microsoft_cvt.Attention,), {})
    model.stage2.blocks[0].attn.table = nn.Parameter(torch.zeros(3))
    assert all(row.fused for row in ck.coverage(ck.accelerate(model, freeze=False)))


@pytest.mark.parametrize(
    ("patched", "wraps", "beginning"),
    [
        (microsoft_cvt.Mlp, False, f"forward, patched by {__name__}."),
        (microsoft_cvt.Mlp, True, f"forward, patched by {__name__}."),
        (microsoft_cvt.QuickGELU, False, f"the forward of mlp.act is patched by {__name__}."),
    ],
)
def test_a_patched_class_is_left_alone(monkeypatch, patched, wraps, beginning):
    original = patched.forward

    def patch(self, x):
        return 2 * original(self, x)

    monkeypatch.setattr(patched, "forward", functools.wraps(original)(patch) if wraps else patch)
    own = microsoft().eval()
    fused = ck.accelerate(copy.deepcopy(own), freeze=False)
    assert relative(fused(images()), own(images())) < 1e-5
    (reason,) = {row.reason for row in ck.coverage(fused) if not row.fused}
    assert reason.startswith(beginning)


@torch.no_grad()
def test_a_compiled_model_runs_the_patch_of_a_class(monkeypatch):
    own, x, original = microsoft().eval(), images(), microsoft_cvt.Block.forward
    fused = ck.accelerate(copy.deepcopy(own), freeze=False)
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    before = compiled(x)
    monkeypatch.setattr(microsoft_cvt.Block, "forward", lambda *args: 1.5 * original(*args))
    for _ in range(2):
        assert relative(compiled(x), own(x)) < 1e-5 < relative(before, own(x))
        torch.compiler.reset()


def of_another_home(module):
    """Gives a module's class another one of its name, with a forward of its own, somebody else's."""
    kind = type(module)

    def forward(self, *args, **kwargs):
        return pytree.tree_map(lambda out: 1.5 * out, kind.forward(self, *args, **kwargs))

    forward.__signature__ = inspect.signature(kind.forward)
    members = {"forward": forward, "__module__": "theirs", "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), members)


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "path", "of_row"),
    [
        (huggingface, "cvt.encoder.stages.0.layers.0", ""),
        (huggingface, "cvt.encoder.stages.0.layers.0.intermediate", "intermediate is a CvtIntermediate"),
        (huggingface, "cvt.encoder.stages.2", None),
        (segformer, "segformer.stages.0.blocks.0", ""),
        (segformer, "decode_head.linear_projections.0", "linear_projections.0 is a SegformerMLP"),
        (glpn, "decoder.stages.3", "decoder.stages.3 is a GLPNDecoderStage"),
        (vit, "vit.layers.0", ""),
        (vit, "vit.layers.0.mlp", "mlp is a ViTMLP"),
        (timm_vit, "blocks.0", ""),
        (timm_vit, "blocks.0.mlp", "mlp is a Mlp"),
        (timm_pvt_v2, "stages.1", None),
    ],
)
def test_a_class_of_the_same_name_elsewhere_is_left_alone(make, path, of_row):
    """Its arithmetic is another one. A part is of the row of a block, which says so."""
    own, x = make().eval(), images(2, 32, 32) if make in (vit, timm_vit) else inputs(make)
    of_another_home(own.get_submodule(path))
    for freeze in (None, False):
        fused = ck.accelerate(copy.deepcopy(own), freeze=freeze)
        assert relative(logits(fused(x)), logits(own(x))) < 1e-5
        if of_row is None:
            continue
        row = next(row for row in ck.coverage(fused) if path.startswith(row.path) and not row.fused)
        assert row.reason.startswith(of_row or f"theirs.{type(own.get_submodule(path)).__qualname__} has a ")
