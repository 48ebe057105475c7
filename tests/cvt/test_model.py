"""The thin CvT is faithful to both originals, and does what users of PyTorch models expect."""

import copy
import dataclasses
import json
import re
import warnings

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import PRESETS, CvT, CvTConfig, create_model
from cvt.factory import randomize
from cvt.model import DropPath, tokens_to_map
from cvt.tools.training.recipe import MODELS
from tests.checks import assert_accurate, record_all_calls
from tests.conftest import DATA
from tests.upstream import KERNELS_FIRST, assert_same_step, microsoft_numbers, relative

SMALL = CvTConfig(
    embed_dims=(16, 32, 48), num_heads=(1, 2, 3), depths=(1, 1, 2), num_classes=10, drop_path_rate=0.0
)
OF_SIX = dataclasses.replace(SMALL, depths=(1, 2, 3))

#: A model of few operators, for what takes long per operator.
TWO_BLOCKS = dataclasses.replace(MODELS["cvt_nano"], embed_dims=(16, 32), depths=1, num_classes=10)


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


@pytest.mark.parametrize("name", PRESETS)
def test_state_dict_is_microsofts_key_for_key(name):
    expected = json.loads((DATA / "microsoft_state_dict_shapes.json").read_text())[name]
    with torch.device("meta"):
        state = create_model(name).state_dict()
    assert [(key, list(tensor.shape)) for key, tensor in state.items()] == list(expected.items())


def test_microsofts_evaluation_and_training_step():
    microsoft, tiny = microsoft_numbers(), create_model(SMALL).eval()
    tiny.load_state_dict({name[3:]: t for name, t in microsoft.items() if name.startswith("sd/")})
    for i in "01":
        assert relative(tiny(microsoft[f"x{i}"]), microsoft[f"eval{i}"]) < 1e-5
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


def test_logits_and_every_stage_equal_hugging_face(tmp_path):
    from transformers import CvtConfig, CvtForImageClassification

    peer = CvtForImageClassification(CvtConfig(num_labels=1000)).eval()
    randomize(peer, seed=1)
    peer.save_pretrained(tmp_path)
    ours, features = (
        create_model("cvt_13", activation="gelu", checkpoint=tmp_path, features_only=only).eval()
        for only in (False, True)
    )
    for shape in ((1, 3, 224, 224), (1, 3, 384, 384), (2, 3, 96, 160)):
        x = torch.randn(shape)
        with torch.inference_mode():
            expected = peer(x, output_hidden_states=True)
            logits, maps = ours(x), features(x)
        assert expected.logits.std() > 0.5  # weights for which the test could fail
        torch.testing.assert_close(logits, expected.logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(tuple(maps), expected.hidden_states, rtol=0, atol=1e-4)
    x = torch.randn(2, 3, 96, 96)
    with torch.inference_mode():
        exact = copy.deepcopy(peer).double()(x.double()).logits
        assert_accurate(ours.bfloat16()(x.bfloat16()), peer.bfloat16()(x.bfloat16()).logits, exact)


# Shapes and configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 32), (33, 47), (32, 200), (97, 64)])
def test_any_size_from_32(size):
    model = small().eval()
    x = torch.randn(3, 3, *size)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)
    grid = [(n - 3) // 4 + 1 for n in size]
    for feature_map in create_model(SMALL, features_only=True).eval()(x):
        assert list(feature_map.shape[2:]) == grid
        grid = [(n - 1) // 2 + 1 for n in grid]


@pytest.mark.parametrize(
    "overrides",
    [
        {"kernel_size": (1, 5, 7)},
        {"stride_kv": (4, 2, 1)},
        {"pool": "avg", "cls_token": False},
        {"cls_token": (True, False, True)},
        {"embed_norm": "batch_layer_norm"},
        {"layer_scale": 1e-4},
        {"position_bias": True, "position_bias_size": 64},
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


def test_layer_scale_starts_at_its_value_and_zero_makes_blocks_identities():
    model = create_model(SMALL, layer_scale=0.25).eval()
    gammas = [parameter for name, parameter in model.named_parameters() if name.endswith("gamma")]
    assert len(gammas) == 8
    assert all((gamma == 0.25).all() for gamma in gammas)
    for gamma in gammas:
        nn.init.zeros_(gamma)
    x = torch.randn(2, 16, 16)
    assert torch.equal(model.stage0.blocks[0](x, (4, 4)), x)


def test_average_pooling_leaves_the_class_token_out():
    model = small(pool="avg").eval()
    tokens = torch.randn(2, 17, 48)
    expected = model.head(tokens[:, 1:].sum(1) / 16)
    torch.testing.assert_close(model.forward_head(tokens), expected)


def test_dropouts_are_where_the_configuration_puts_them():
    """``tests/cvt/test_model_modules.py`` counts their calls."""
    config = dataclasses.replace(
        SMALL, drop_rate=(0.1, 0.2, 0.3), attn_drop_rate=(0.4, 0.5, 0.6), drop_path_rate=0.3
    )
    model = create_model(config)
    for i, stage in enumerate((model.stage0, model.stage1, model.stage2)):
        assert tuple(block.drop_path.rate for block in stage.blocks) == config.stages[i].drop_path_rates
        assert stage.pos_drop.p == config.drop_rate[i]
        for block in stage.blocks:
            assert block.attn.attn_drop.p == config.attn_drop_rate[i]
            assert block.attn.proj_drop.p == block.mlp.drop.p == config.drop_rate[i]


def test_drop_path_drops_samples_and_keeps_the_mean():
    drop = DropPath(0.25)
    out = drop(torch.ones(4000, 2, 3))
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert torch.equal(out, out[:, :1, :1].expand_as(out))
    assert abs(out.mean() - 1) < 0.05
    assert torch.equal(drop.eval()(out), out)


# timm's conventions ---------------------------------------------------------------------------------------


def test_features_and_head_make_the_model():
    model = small().eval()
    x = torch.randn(2, 3, 64, 64)
    tokens = model.forward_features(x)
    assert tokens.shape == (2, 17, 48)
    assert torch.equal(model.forward_head(tokens), model(x))
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, 0])
    assert model.num_features == 48


def test_reset_classifier():
    model = small().double().eval()
    x = torch.randn(2, 3, 32, 32).double()
    tokens = model.forward_features(x)
    model.reset_classifier(5, pool="avg")
    assert (model(x).shape, model.num_classes, model.config.pool) == ((2, 5), 5, "avg")
    assert model.get_classifier().weight.dtype == torch.float64
    model.reset_classifier(0)
    assert (model(x).shape, model.num_classes, model.config.pool) == ((2, 48), 0, "avg")
    model.reset_classifier(7, pool="cls")
    assert torch.equal(model.forward_features(x), tokens)
    head = model.head
    with pytest.raises(ValueError, match="pool: got 'max'"):
        model.reset_classifier(3, "max")
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
    with ck.use_backend("cpu"):
        assert torch.equal(model(x), expected)  # record_all_calls lets the reference serve
    attention = ["add_layer_norm", "conv_projection", *3 * ["linear"], "attention", "linear"]
    block = [*attention, "add_layer_norm", "mlp_add"]
    stages = [["layer_norm", *depth * block] for depth in SMALL.depths]
    assert called == [operator for stage in stages for operator in stage] + ["layer_norm"]
    called.clear()
    with ck.use_backend("reference"):
        model(x)
    assert called == []
    assert relative(compiled, expected) < 1e-5


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


def test_autocast_trains_in_bfloat16_with_float32_weights():
    model = small().train()
    exact, x, gradients = copy.deepcopy(model).double(), torch.randn(4, 3, 64, 64), []
    for names in (("reference",), KERNELS_FIRST):
        with ck.use_backend(*names), torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        assert logits.dtype == torch.bfloat16
        gradients.append(torch.autograd.grad(logits.float().square().sum(), list(model.parameters())))
    expected = torch.autograd.grad(exact(x.double()).square().sum(), list(exact.parameters()))
    reference, ours, exact = (torch.cat([g.flatten() for g in each]) for each in (*gradients, expected))
    assert ours.dtype == torch.float32
    assert_accurate(ours, reference, exact, factor=3)


def test_a_step_of_distributed_data_parallel(tmp_path):
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
    ("images", "message"),
    [
        (torch.zeros(2, 3, 64, 64, dtype=torch.uint8), "have dtype torch.uint8, expected torch.float32"),
        (torch.randn(2, 3, 64, 64, device="meta"), "are on meta, expected cpu"),
        (torch.randn(1, 3, 32, 32), "one of 32×32 leaves BatchNorm a single value"),
        (torch.randn(2, 3, 2, 64), "2×64 pixels are too few"),
    ],
    ids=["dtype", "device", "one value", "size"],
)
def test_bad_images(images, message):
    for model in (small(), create_model(SMALL, features_only=True)):
        with pytest.raises((TypeError, ValueError), match=f"images: {message}"):
            model(images)
        assert all(b == 0 for name, b in model.named_buffers() if name.endswith("num_batches_tracked"))


def test_groups_by_depth():
    """Groups as timm does: 99999 joins the group before, and what matches nothing is last."""
    model = create_model(OF_SIX)
    patterns = model.group_matcher()
    groups = {}
    for name, _ in model.named_parameters():
        found = re.match(patterns["stem"], name) and (-1,)
        for pattern, suffix in patterns["blocks"]:
            if found is None and (match := re.match(pattern, name)):
                found = *map(int, match.groups()), *(suffix or ())
        groups.setdefault(found or (100000,), []).append(name)
    # The first embedding, six blocks, the norm, and the head.
    assert sorted(groups) == [(-1,), (0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (99999,), (100000,)]
    assert groups[100000,] == ["head.weight", "head.bias"]
    assert "stage2.cls_token" in groups[2, 0]
    assert model.group_matcher(coarse=True)["blocks"] == r"^stage(\d+)"


@pytest.mark.parametrize("drop_path_rate", [0.0, 0.3])
def test_checkpointing_changes_no_step(drop_path_rate):
    own = create_model(OF_SIX, drop_path_rate=drop_path_rate).train()
    checkpointed, x, seen = copy.deepcopy(own), torch.randn(2, 3, 64, 64), []
    checkpointed.set_grad_checkpointing()
    block = checkpointed.stage1.blocks[0]
    block.register_forward_pre_hook(lambda *_: seen.append(1))
    own.stage1.blocks[0].register_forward_pre_hook(lambda *_: None)
    for model in (own, checkpointed):
        torch.manual_seed(0)
        model(x).sin().sum().backward()
    assert len(seen) == 2
    largest = max(each.grad.abs().max() for each in own.parameters())
    for a, b in zip(checkpointed.parameters(), own.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-5 * largest
    for (name, a), b in zip(checkpointed.named_buffers(), own.buffers(), strict=True):
        assert torch.equal(a, b), name
    checkpointed.set_grad_checkpointing(False)
    seen.clear()
    checkpointed(x).sum().backward()
    assert len(seen) == 1


@torch.no_grad()
def test_intermediate_maps():
    model, x = create_model(OF_SIX).eval(), torch.randn(2, 3, 64, 96)
    tokens, maps = model.forward_intermediates(x)
    assert torch.equal(tokens, model.forward_features(x))
    assert all(map(torch.equal, maps, model.maps(x)))
    assert all(each.is_contiguous() for each in maps)
    first, last = model.forward_intermediates(x, [0, -1], norm=True, intermediates_only=True)
    assert torch.equal(first, maps[0])
    assert torch.equal(last.flatten(2).transpose(1, 2), tokens[:, 1:])
    (middle,) = model.forward_intermediates(
        x, [1], output_fmt="NHWC", intermediates_only=True, stop_early=True
    )
    assert torch.equal(middle.permute(0, 3, 1, 2), maps[1])
    assert len(model.forward_intermediates(x, 2, intermediates_only=True)) == 2
    for indices in (4, 0, [3], [-4]):
        with pytest.raises(ValueError, match="indices: got"):
            model.forward_intermediates(x, indices)
    with pytest.raises(ValueError, match="output_fmt: got 'NLC'"):
        model.forward_intermediates(x, output_fmt="NLC")
