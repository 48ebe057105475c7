"""The thin CvT is faithful to both originals, and does what users of PyTorch models expect."""

import copy
import io
import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import PRESETS, CvT, CvTConfig, CvTFeatures, create_model
from cvt.factory import randomize
from cvt.model import Block, DropPath, Stage, tokens_to_map
from cvt_kernels import backends, checks, dispatch
from tests.checks import assert_accurate, record_all_calls
from tests.conftest import DATA
from tests.upstream import KERNELS_FIRST, assert_same_step, microsoft_numbers, relative

SMALL = CvTConfig(
    embed_dims=(16, 32, 48), num_heads=(1, 2, 3), depths=(1, 1, 2), num_classes=10, drop_path_rate=0.0
)

#: A model of few operators, for what takes long per operator.
TWO_BLOCKS = CvTConfig(
    embed_dims=(16, 32),
    depths=1,
    num_heads=(1, 2),
    patch_sizes=(7, 3),
    patch_strides=(4, 2),
    patch_paddings=(2, 1),
    mlp_ratio=2.0,
    qkv_bias=True,
    kernel_size=3,
    stride_q=1,
    stride_kv=2,
    cls_token=(False, True),
    drop_rate=0.0,
    attn_drop_rate=0.0,
    drop_path_rate=0.0,
    num_classes=10,
)


def small(**overrides):
    model = create_model(SMALL, **overrides)
    randomize(model)
    return model


@pytest.fixture(autouse=True)
def _kernels_first():
    """Lets kernels of this project serve whatever they can."""
    with ck.use_backend(*KERNELS_FIRST):
        yield


# Microsoft's numbers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def microsoft():
    return microsoft_numbers()


@pytest.fixture
def tiny(microsoft):
    model = create_model(SMALL)
    state = {name.removeprefix("sd/"): t for name, t in microsoft.items() if name.startswith("sd/")}
    model.load_state_dict(state, strict=True)
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_state_dict_is_microsofts_key_for_key(name):
    expected = json.loads((DATA / "microsoft_state_dict_shapes.json").read_text())[name]
    with torch.device("meta"):
        state = create_model(name).state_dict()
    assert [(key, list(tensor.shape)) for key, tensor in state.items()] == list(expected.items())


@pytest.mark.parametrize(("name", "millions"), [("cvt_13", 20), ("cvt_21", 32), ("cvt_w24", 277)])
def test_parameter_counts_of_the_paper(name, millions):
    with torch.device("meta"):
        model = create_model(name)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


def test_microsoft_evaluation(microsoft, tiny):
    tiny.eval()
    for i in "01":
        assert relative(tiny(microsoft[f"x{i}"]), microsoft[f"eval{i}"]) < 1e-5


def test_microsoft_training_step(microsoft, tiny):
    logits = tiny.train()(microsoft["x1"])
    assert relative(logits, microsoft["train1"]) < 1e-5
    logits.sin().sum().backward()
    largest = max(norm.item() for name, norm in microsoft.items() if name.startswith("gradnorm/"))
    for name, parameter in tiny.named_parameters():
        expected = microsoft[f"gradnorm/{name}"].item()
        # What norm1 scales and shifts, the BatchNorms behind it mostly take out again. So its gradients are
        # small sums of large terms, and roundings show: on inputs that differ by them, Microsoft's own code
        # is up to 2.7e-5 off float64 there and 2.4e-6 elsewhere; the expected numbers are 1.3e-5 off.
        tolerance = 1e-4 if ".norm1." in name else 1e-5
        # Some gradients are zero but for rounding: softmax ignores what shifts all keys alike.
        near = pytest.approx(expected, rel=tolerance, abs=1e-9 * largest)
        assert parameter.grad.norm().item() == near, name
    after = {name.removeprefix("after/"): t for name, t in microsoft.items() if name.startswith("after/")}
    state = tiny.state_dict()
    assert len(after) == 24
    for name, expected in after.items():
        assert relative(state[name], expected) < 1e-5, name
    assert all(t == 1 for name, t in state.items() if name.endswith("num_batches_tracked"))


# Hugging Face's model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Returns Hugging Face's CvT-13, and ours with the same random weights by way of a saved directory."""
    from transformers import CvtConfig, CvtForImageClassification

    peer = CvtForImageClassification(CvtConfig(num_labels=1000)).eval()
    randomize(peer, seed=1)
    directory = tmp_path_factory.mktemp("hf")
    peer.save_pretrained(directory)
    return peer, create_model("cvt_13", activation="gelu", checkpoint=directory).eval()


@pytest.mark.parametrize("shape", [(2, 3, 224, 224), (1, 3, 384, 384), (2, 3, 160, 256)])
def test_logits_and_every_stage_equal_hugging_face(pair, shape):
    peer, ours = pair
    features = create_model("cvt_13", activation="gelu", features_only=True).eval()
    features.load_state_dict(
        {k: t for k, t in ours.state_dict().items() if k.startswith("stage")}, strict=True
    )
    x = torch.randn(shape)
    with torch.inference_mode():
        expected = peer(x, output_hidden_states=True)
        logits, maps = ours(x), features(x)
    assert expected.logits.std() > 0.5  # weights for which the test could fail
    torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-4)
    assert len(maps) == len(expected.hidden_states) == 3
    for actual, hidden in zip(maps, expected.hidden_states, strict=True):
        torch.testing.assert_close(actual, hidden, rtol=0, atol=1e-4)


def test_bfloat16_is_as_accurate_as_hugging_face(pair):
    peer, ours = pair
    x = torch.randn(2, 3, 96, 96)
    with torch.inference_mode():
        exact = copy.deepcopy(peer).double()(x.double()).logits
        theirs = copy.deepcopy(peer).bfloat16()(x.bfloat16()).logits
        assert_accurate(copy.deepcopy(ours).bfloat16()(x.bfloat16()), theirs, exact)


def test_the_presets_activation_is_quick_gelu(pair):
    peer, ours = pair
    quick = create_model("cvt_13").eval()
    quick.load_state_dict(ours.state_dict())
    x = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        assert (quick(x) - peer(x).logits).abs().max() > 1e-2


# Shapes and configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (32, 200), (97, 64)])
@pytest.mark.parametrize("batch", [1, 3])
def test_any_size_from_32(size, batch):
    model = small().eval()
    x = torch.randn(batch, 3, *size)
    assert model(x).shape == (batch, 10)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)
    grid = [(n - 3) // 4 + 1 for n in size]
    for feature_map in create_model(SMALL, features_only=True).eval()(x):
        assert list(feature_map.shape[2:]) == grid
        grid = [(n - 1) // 2 + 1 for n in grid]


@pytest.mark.parametrize(
    "overrides",
    [
        {"activation": "gelu_tanh"},
        {"scale": "head_dim"},
        {"kernel_size": (1, 5, 7)},
        {"stride_kv": (4, 2, 1)},
        {"pool": "avg"},
        {"pool": "avg", "cls_token": False},
        {"cls_token": (True, False, True)},
        {"embed_norm": "batch_layer_norm"},
        {"layer_scale": 1e-4},
        {"qkv_bias": False},
        {"mlp_ratio": (2, 3.5, 1)},
        {"in_chans": 1},
        {"num_classes": 0},
        {"drop_rate": 0.1, "attn_drop_rate": 0.1, "drop_path_rate": 0.2},
    ],
    ids=str,
)
def test_every_configuration_trains_all_its_parameters(overrides):
    model = create_model(SMALL, **overrides).train()
    out = model(torch.randn(4, overrides.get("in_chans", 3), 64, 48))
    assert out.shape == (4, 48 if overrides.get("num_classes") == 0 else 10)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(b == 1 for name, b in model.named_buffers() if name.endswith("num_batches_tracked"))


def test_configuration_changes_what_is_computed():
    x = torch.randn(2, 3, 64, 64)

    def logits(**overrides):
        return small(**overrides).eval()(x)

    base = logits()
    assert torch.equal(base, logits())
    for overrides in (
        {"activation": "gelu"},
        {"activation": "gelu_tanh"},
        {"scale": "head_dim"},
        {"pool": "avg"},
        {"stride_kv": 1},
    ):
        assert not torch.allclose(base, logits(**overrides), atol=1e-3), overrides


def test_average_pooling_leaves_the_class_token_out():
    model = small(pool="avg").eval()
    tokens = torch.randn(2, 17, 48)
    expected = model.head(tokens[:, 1:].sum(1) / 16)
    torch.testing.assert_close(model.forward_head(tokens), expected)


def test_layer_scale_starts_at_its_value_and_zero_makes_blocks_identities():
    model = small(layer_scale=0.5)
    gammas = [t for name, t in model.state_dict().items() if name.endswith("gamma")]
    assert len(gammas) == 8
    for gamma in gammas:
        nn.init.zeros_(gamma)
    block = model.stage0.blocks[0].eval()
    x = torch.randn(2, 16, 16)
    assert torch.equal(block(x, (4, 4)), x)
    fresh = create_model(SMALL, layer_scale=0.25).named_parameters()
    assert all((gamma == 0.25).all() for name, gamma in fresh if name.endswith("gamma"))


def test_batch_norm_in_the_embedding_comes_before_the_layer_norm():
    embed = small(embed_norm="batch_layer_norm").stage0.patch_embed.eval()
    x = torch.randn(2, 3, 32, 32)
    expected = embed.norm(embed.bn(embed.proj(x)).permute(0, 2, 3, 1).reshape(2, 64, 16))
    torch.testing.assert_close(embed(x)[0], expected)


def test_every_kind_of_dropout_acts_in_training_and_only_there():
    x = torch.randn(8, 3, 64, 64)
    for overrides in (
        {"drop_rate": 0.2},
        {"attn_drop_rate": 0.2},
        {"drop_path_rate": 0.3, "drop_path_schedule": "constant"},
    ):
        model = small(**overrides, cls_token=True)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.0
        assert not torch.equal(model.train()(x), model(x)), overrides
        assert torch.equal(model.eval()(x), model(x)), overrides
    plain = small().train()
    assert torch.equal(plain(x), plain(x))


def test_dropouts_are_where_the_configuration_puts_them():
    model = create_model(SMALL, drop_rate=(0.1, 0.2, 0.3), attn_drop_rate=(0.4, 0.5, 0.6), drop_path_rate=0.3)
    called = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout | DropPath):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    model(torch.randn(4, 3, 64, 64))
    for i, stage in enumerate((model.stage0, model.stage1, model.stage2)):
        assert [block.drop_path.rate for block in stage.blocks] == list(
            model.config.stages[i].drop_path_rates
        )
        assert stage.pos_drop.p == (0.1, 0.2, 0.3)[i]
        assert called.count(f"stage{i}.pos_drop") == 1
        for j, block in enumerate(stage.blocks):
            assert block.attn.attn_drop.p == (0.4, 0.5, 0.6)[i]
            assert block.attn.proj_drop.p == block.mlp.drop.p == (0.1, 0.2, 0.3)[i]
            calls = {
                part: called.count(f"stage{i}.blocks.{j}.{part}")
                for part in ("attn.proj_drop", "mlp.drop", "drop_path")
            }
            assert calls == {"attn.proj_drop": 1, "mlp.drop": 2, "drop_path": 2}


def test_drop_path_drops_samples_and_keeps_the_mean():
    drop = DropPath(0.25)
    out = drop(torch.ones(4000, 2, 3))
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert torch.equal(out, out[:, :1, :1].expand_as(out))
    assert abs(out.mean() - 1) < 0.05
    assert torch.equal(drop.eval()(out), out)


def test_drop_path_acts_on_both_branches_and_not_on_the_stream():
    block = Block(CvTConfig(drop_path_rate=0.5, drop_path_schedule="constant").stages[0], 0.5).train()
    x = torch.randn(64, 16, 64)
    with torch.no_grad():
        unchanged = [torch.equal(a, b) for a, b in zip(block(x, (4, 4)), x, strict=True)]
    assert 4 <= sum(unchanged) <= 32  # a quarter, with both branches dropped; none is zeroed
    assert block(x, (4, 4)).flatten(1).any(dim=1).all()


def kinds_of_calls(images: int, size: int) -> set[str]:
    """Returns the questions of a forward of CvT-13, whose tensors have no numbers."""
    questions = set()

    def choose(operator, call):
        questions.add(dispatch.question(operator, **call._asdict()))
        plain = backends.registered(operator, "reference")
        return dispatch.Choice(plain, plain, lasts=False)

    with pytest.MonkeyPatch.context() as patch, torch.device("meta"), torch.no_grad():
        patch.setattr(dispatch, "choose", choose)
        create_model("cvt_13").eval()(torch.empty(images, 3, size, size))
    return questions


def test_batches_of_about_the_same_size_are_of_the_same_kinds():
    kinds = kinds_of_calls(16, 224)
    assert len(kinds) == 31
    assert kinds_of_calls(20, 180) == kinds


# timm's conventions ---------------------------------------------------------------------------------------


def test_features_and_head_make_the_model():
    model = small().eval()
    x = torch.randn(2, 3, 64, 64)
    tokens = model.forward_features(x)
    assert tokens.shape == (2, 17, 48)
    assert torch.equal(model.forward_head(tokens), model(x))
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, 0])
    assert model.feature_info.channels() == [16, 32, 48]
    assert model.feature_info.reduction() == [4, 8, 16]
    assert model.num_features == 48


def test_reset_classifier():
    model = small().double()
    x = torch.randn(2, 3, 32, 32).double()
    backbone = {name: t.clone() for name, t in model.state_dict().items() if not name.startswith("head")}
    model.reset_classifier(5, pool="avg")
    assert (model(x).shape, model.num_classes, model.config.pool) == ((2, 5), 5, "avg")
    assert model.get_classifier().weight.dtype == torch.float64
    model.reset_classifier(0)
    assert (model(x).shape, model.num_classes, model.config.pool) == ((2, 48), 0, "avg")
    model.reset_classifier(7, pool="cls")
    assert all(
        torch.equal(model.state_dict()[name].double(), t.double())
        for name, t in backbone.items()
        if "bn" not in name
    )
    head = model.head
    for arguments, error in (((-1,), ValueError), ((2.5,), TypeError), ((3, "max"), ValueError)):
        with pytest.raises(error):
            model.reset_classifier(*arguments)
    assert model.head is head
    assert model.num_classes == 7


@pytest.mark.parametrize(
    ("indices", "expected"), [(None, (0, 1, 2)), ((0,), (0,)), ((1, -1), (1, 2)), ((2, 0), (2, 0))]
)
def test_features_only(indices, expected):
    full = small().eval()
    model = create_model(SMALL, features_only=True, out_indices=indices).eval()
    kept = model.load_state_dict(full.state_dict(), strict=False)
    assert kept.missing_keys == []
    x = torch.randn(2, 3, 64, 96)
    maps, image = [], x
    for stage in (full.stage0, full.stage1, full.stage2):
        image = tokens_to_map(*stage(image))
        maps.append(image)
    outs = model(x)
    assert [tuple(out.shape) for out in outs] == [(2, 16 * (i + 1), 16 >> i, 24 >> i) for i in expected]
    assert all(torch.equal(out, maps[i]) for out, i in zip(outs, expected, strict=True))
    assert model.feature_info.channels() == [out.shape[1] for out in outs]
    assert model.feature_info.reduction() == [64 // out.shape[2] for out in outs]
    assert model.feature_info.module_name() == [f"stage{i}" for i in expected]


@pytest.mark.parametrize("indices", [2, "12", (i for i in range(2)), (0.0,)])
def test_out_indices_of_the_wrong_type(indices):
    with pytest.raises(TypeError, match=r"out_indices: got .* expected a tuple of integers"):
        create_model(SMALL, features_only=True, out_indices=indices)


@pytest.mark.parametrize("indices", [(), (3,), (0, -4)])
def test_bad_out_indices(indices):
    with pytest.raises(ValueError, match=r"out_indices: got .* expected indices of 3 stages"):
        create_model(SMALL, features_only=True, out_indices=indices)
    with pytest.raises(ValueError, match="out_indices: is for features_only"):
        create_model(SMALL, out_indices=(0,))


def test_no_weight_decay_names_live_parameters():
    assert small().no_weight_decay() == {"stage2.cls_token"}
    assert small(cls_token=True).no_weight_decay() == {f"stage{i}.cls_token" for i in range(3)}
    assert CvTFeatures(SMALL, out_indices=(0,)).no_weight_decay() == set()


def test_initialization_is_microsofts():
    model = CvT(SMALL)
    for name, p in model.named_parameters():
        if name.endswith(("bias",)) and "patch_embed.proj" not in name:
            assert not p.any(), name
        if p.ndim == 2:
            assert 0.015 < p.std() < 0.025, name
    assert 0.01 < model.stage2.cls_token.std() < 0.03
    assert (model.norm.weight == 1).all()


# PyTorch's conventions ------------------------------------------------------------------------------------


def test_blocks_use_the_public_operators():
    """Every block goes through the backend choice, so that a faster backend reaches all of it."""
    model, x = small().eval(), torch.randn(2, 3, 32, 32)
    with ck.use_backend("reference"):
        expected = model(x)
    compiled = model(x)
    called = record_all_calls()
    with ck.use_backend("native"):
        assert torch.equal(model(x), expected)  # record_all_calls lets the reference serve
    attention = ["layer_norm", "conv_projection", *3 * ["linear"], "attention", "linear"]
    block = [*attention, "add_layer_norm", "linear_gelu", "linear"]
    stages = [["layer_norm", *depth * block] for depth in SMALL.depths]
    assert called == [operator for stage in stages for operator in stage] + ["layer_norm"]
    called.clear()
    with ck.use_backend("reference"):
        model(x)
    assert called == []
    assert relative(compiled, expected) < 1e-5


@pytest.mark.usefixtures("proving")
def test_auto_proves_at_first_use_and_computes_the_same():
    model, x = small().train(), torch.randn(2, 3, 32, 32)
    expected = copy.deepcopy(model)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            with ck.use_backend("reference"):
                reference = expected.train(training)(x)
            with ck.use_backend("auto"):
                assert relative(model.train(training)(x), reference) < 1e-5
                assert all("not proven yet" not in row.backends.values() for row in ck.coverage(model))
    for (name, ours), theirs in zip(expected.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(theirs, ours, msg=name)


def test_partly_frozen_batch_norm():
    """Every linear layer reads what the branch's own modules compute, in the modes in which they are."""
    attn = small().train().stage0.blocks[0].attn
    attn.conv_proj_k.bn.eval()
    own = copy.deepcopy(attn)
    projected = {}
    for letter in "qkv":
        getattr(attn, f"proj_{letter}").register_forward_pre_hook(
            lambda module, args, letter=letter: projected.__setitem__(letter, args[0])
        )
    x = torch.randn(2, 64, 16)
    attn(x, (8, 8))
    for letter in "qkv":
        branch, own_branch = (getattr(parent, f"conv_proj_{letter}") for parent in (attn, own))
        before = own_branch.bn.running_mean.clone()
        expected = own_branch.bn(own_branch.conv(x.unflatten(1, (8, 8)).permute(0, 3, 1, 2)))
        torch.testing.assert_close(projected[letter], expected.flatten(2).transpose(1, 2))
        torch.testing.assert_close(branch.bn.state_dict(), own_branch.bn.state_dict())
        assert torch.equal(branch.bn.running_mean, before) == (letter == "k")


def test_compiles_without_graph_breaks():
    model = create_model(TWO_BLOCKS)
    randomize(model)
    model.train()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 48, 64)
    torch.testing.assert_close(compiled(x), model(x))
    assert_same_step(model, compiled, x, 2e-5)
    for (name, ours), theirs in zip(model.named_buffers(), compiled.buffers(), strict=True):
        torch.testing.assert_close(theirs, ours, msg=name)


@torch.no_grad()
@pytest.mark.slow
def test_compiles_with_dynamic_shapes():
    stage = Stage(CvTConfig(cls_token=True).stages[0]).eval()
    compiled = torch.compile(stage, fullgraph=True, backend="eager", dynamic=True)
    for size in ((2, 3, 48, 64), (3, 3, 64, 80)):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x)[0], stage(x)[0])


def test_exports():
    model = small().eval()
    x = torch.randn(2, 3, 48, 64)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


def test_autocast_trains_in_bfloat16_with_float32_weights():
    model = small().train()
    exact = copy.deepcopy(model).double()
    x = torch.randn(4, 3, 64, 64)
    gradients = []
    for names in (("reference",), KERNELS_FIRST):
        with ck.use_backend(*names), torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        assert logits.dtype == torch.bfloat16
        model.zero_grad()
        logits.float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(logits.float(), model(x), rtol=0.1, atol=0.1)
    exact(x.double()).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in exact.parameters()])
    assert_accurate(gradients[1], gradients[0], expected, factor=3)


def test_copies_and_pickles():
    model = small().eval()
    x = torch.randn(1, 3, 32, 32)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x), model(x))
        assert twin.config == model.config


def test_data_parallel_training_step(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = small().train()
        x = torch.randn(2, 3, 32, 32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DDP's own deprecations
            wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
            wrapped(x).sin().sum().backward()
        model(x).sin().sum().backward()
        for ours, theirs in zip(model.parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(theirs.grad, ours.grad)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (
            torch.randn(3, 64, 64),
            ValueError,
            r"images: got shape \(3, 64, 64\), expected \(batch, 3, height, width\)",
        ),
        (torch.randn(2, 1, 64, 64), ValueError, r"images: got shape \(2, 1, 64, 64\)"),
        (
            torch.randn(2, 3, 64, 64).double(),
            TypeError,
            "images: have dtype torch.float64, expected torch.float32",
        ),
        (torch.zeros(2, 3, 64, 64, dtype=torch.uint8), TypeError, "images: have dtype torch.uint8"),
        (
            torch.randn(2, 3, 64, 64, device="meta"),
            ValueError,
            "images: are on meta, expected cpu as the model",
        ),
        (
            torch.randn(1, 3, 32, 32),
            ValueError,
            "images: one of 32×32 leaves BatchNorm a single value per channel",
        ),
        (torch.randn(2, 3, 2, 64), ValueError, "images: 2×64 pixels are too few"),
        (np.zeros((2, 3, 64, 64)), TypeError, "images: got ndarray, expected a tensor"),
    ],
)
def test_bad_images(images, error, message):
    for model in (small(), create_model(SMALL, features_only=True)):
        with pytest.raises(error, match=message):
            model(images)
        assert all(b == 0 for name, b in model.named_buffers() if name.endswith("num_batches_tracked"))


class OwnNorm(nn.LayerNorm):
    """A LayerNorm of a class that no fused operator stands for."""


@pytest.mark.parametrize("norm", [None, OwnNorm], ids=["own", "replaced"])
def test_under_autocast_a_gpus_norms_write_what_their_layers_read(monkeypatch, norm):
    """On a CPU, with a GPU's choice of dtype; a norm that someone put in its place is called as a module."""
    monkeypatch.setattr(checks, "dtype_for_layers", checks.autocast_dtype)
    block = Block(PRESETS["cvt_13"].stages[0], 0.0)
    if norm is not None:
        block.norm1 = norm(block.norm1.normalized_shape)
    seen = {}
    for name in ("proj_q", "fc1"):
        layer = block.attn.proj_q if name == "proj_q" else block.mlp.fc1
        layer.register_forward_hook(lambda module, args, out, name=name: seen.update({name: args[0].dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        out = block(torch.randn(2, 16, 64), (4, 4))
    own = torch.float32 if norm is not None else torch.bfloat16
    assert (seen["fc1"], out.dtype) == (own, torch.float32)
    assert seen["proj_q"] == torch.bfloat16
