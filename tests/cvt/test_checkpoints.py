"""Weights from everywhere, and what is refused."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from cvt import CheckpointError, create_model, load_checkpoint, read_checkpoint, save_huggingface
from cvt.card import ModelCard
from cvt.checkpoints import Checkpoint, save_safetensors
from tests.cvt.models import SMALL, equal, huggingface_twin, small

NAMES = [f"class {i}" for i in range(10)]


def prefixed(prefix, state):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


FLAT = [
    lambda state: state,
    lambda state: prefixed("module.", state),
    lambda state: prefixed("_orig_mod.module.", state),
]
NESTED = [
    lambda state: {"state_dict": state},
    lambda state: {"model": state, "epoch": 3},
    lambda state: {"state_dict": prefixed("module.model._orig_mod.", state)},
    # Lightning's
    lambda state: {"state_dict": prefixed("net.", state), "hyper_parameters": {"model": "cvt_13"}},
]


@pytest.mark.parametrize(
    ("save", "wrap"), [*((torch.save, wrap) for wrap in FLAT + NESTED), *((save_file, wrap) for wrap in FLAT)]
)
def test_files_of_torch_save_and_safetensors(tmp_path, save, wrap):
    source, target = small(), small(seed=1)
    path = tmp_path / ("weights.pth" if save is torch.save else "weights.safetensors")
    save(wrap(source.state_dict()), path)
    assert load_checkpoint(target, path) == (False, ())
    assert equal(target.state_dict(), source.state_dict())
    assert equal(create_model(SMALL, checkpoint=str(path)).state_dict(), source.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_converted(tmp_path, dtype):
    state = small().state_dict()
    rounded = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    torch.save(rounded, tmp_path / "w.pth")
    loaded = create_model(SMALL, checkpoint=tmp_path / "w.pth")
    assert loaded.head.weight.dtype == torch.float32
    torch.testing.assert_close(loaded.state_dict(), state, rtol=1e-3, atol=1e-3)


# Hugging Face ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", ["safetensors", "shards", "pytorch_model.bin", "a single file", "base model"]
)
def test_from_hugging_face(tmp_path, layout):
    peer = huggingface_twin()
    path = tmp_path
    if layout == "base model":
        peer.cvt.save_pretrained(tmp_path)
    else:
        peer.save_pretrained(tmp_path, max_shard_size="40KB" if layout == "shards" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (layout == "shards")
    if layout == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(peer.state_dict(), tmp_path / "pytorch_model.bin")
    if layout == "a single file":
        path = tmp_path / "model.safetensors"
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected = peer(x, output_hidden_states=True)
        if layout == "base model":
            with pytest.raises(CheckpointError, match=r"4 missing \(first: norm.weight\)"):
                create_model(SMALL, checkpoint=path)
        else:
            model = create_model(SMALL, activation="gelu", checkpoint=path).eval()
            torch.testing.assert_close(model(x), expected.logits, rtol=1e-4, atol=1e-5)
        features = create_model(SMALL, activation="gelu", checkpoint=path, features_only=True).eval()
        torch.testing.assert_close(features(x), list(expected.hidden_states), rtol=1e-4, atol=1e-5)


def test_wrappers_around_a_hugging_face_model(tmp_path):
    peer = huggingface_twin()
    for part, prefix in ((peer, "model."), (peer.cvt, "encoder."), (peer, "module._orig_mod.")):
        torch.save(prefixed(prefix, part.state_dict()), tmp_path / "w.ckpt")
        tensors = read_checkpoint(tmp_path / "w.ckpt").tensors
        assert tensors.keys() <= create_model(SMALL).state_dict().keys()
        assert len(tensors) == len(part.state_dict())


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": [2, 3, 4], "embed_dim": [24, 16, 32], "num_heads": [2, 4, 1]},
        {"mlp_ratio": [2.0, 2.0, 2.0], "qkv_bias": [False] * 3, "stride_kv": [2, 2, 1], "num_channels": 1},
    ],
)
def test_hugging_face_models_of_any_sizes(tmp_path, changes):
    peer = huggingface_twin(**changes)
    peer.save_pretrained(tmp_path)
    model = create_model(checkpoint=tmp_path, activation="gelu").eval()
    x = torch.randn(2, model.config.in_chans, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), peer(x).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["cvt_13", None])
def test_a_hugging_face_directory_says_which_activation_runs(tmp_path, model):
    save_huggingface(create_model(model or SMALL, activation="gelu"), tmp_path)
    assert create_model(model, checkpoint=tmp_path).config.activation == "gelu"
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"transformers_version": "5.0.0"}))
    with pytest.warns(UserWarning, match="runs exact GELU; this one runs quick_gelu.*activation='gelu'"):
        assert create_model(model, checkpoint=tmp_path).config.activation == "quick_gelu"
    create_model(model, checkpoint=tmp_path, activation="gelu")


def test_names_of_hugging_face_that_are_integers():
    """Transformers takes these, too; ``True`` is none."""
    tensors = small().state_dict()
    names = {str(i): i * 10 for i in range(10)}
    assert Checkpoint("x", tensors, {"id2label": names}).labels == [str(i * 10) for i in range(10)]
    for other in (None, 5, [], dict(list(names.items())[:9])):
        assert Checkpoint("x", tensors, {"id2label": other}).labels is None
    with pytest.raises(CheckpointError, match=r"got id2label .*, with True, expected a list of strings"):
        _ = Checkpoint("x", tensors, {"id2label": names | {"3": True}}).labels


# What is written beside weights ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "changes", "message"),
    [
        ("given", {"stride_kv": [1, 1, 1]}, r"has stride_kv \[1, 1, 1\], this model \[2, 2, 2\]"),
        ("given", {"num_heads": [1, 1, 1]}, "has num_heads"),
        ("config.json", {"padding_kv": [0] * 3}, r"has padding_kv \[0, 0, 0\], this model \[1, 1, 1\]"),
        ("config.json", {"qkv_projection_method": ["avg"] * 3}, "config.json has qkv_projection_method"),
        ("given", {"model_type": "vit"}, "is a model of type 'vit', expected 'cvt'"),
        ("config.json", {"embed_dim": "x" * 10**6}, "config.json: embed_dims: got 'x"),
        ("config.json", {"depth": [1, 10**8, 3]}, "depths: got 100000000"),
        ("config.json", {"id2label": {str(i): {"a": i} for i in range(10)}}, "got id2label "),
        ("config.json", {"id2label": {str(i): "x" * 1001 for i in range(10)}}, "of 1001 characters among"),
        ("cvt_config", {"widths": 3}, "cvt_config is not of this version"),
    ],
)  # fmt: skip
def test_files_of_json_that_no_model_can_have(tmp_path, place, changes, message):
    """Passes the configuration of a model beside the file in the rows of ``given``."""
    small(activation="gelu").save_pretrained(tmp_path, labels=NAMES)
    whole = json.loads((tmp_path / "config.json").read_text())
    if place == "cvt_config":
        whole[place] |= changes
    else:
        whole.pop("cvt_config", None)
        whole |= changes
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match=message) as caught:
        create_model(SMALL if place == "given" else None, checkpoint=tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": (1, 2, 4)}, r"is said to have depths \(1, 2, 4\), but its weights \(1, 2, 3\)"),
        ({"mlp_ratio": 1024}, "does not fit this model: .* of another shape"),
        ({"num_classes": 10**7}, "is said to have num_classes 10000000, but its weights 10"),
        ({"decoder_dim": 65536, "head": "segment"}, "is said to have head segment, but its weights classify"),
        # Tables of 3 GB for each head, which a model gets that has none yet, but not from a card.
        ({"position_bias": True, "position_bias_size": 16384}, r"6 missing \(first: .*position_bias\)"),
        ({"mixing": "hybrid"}, r"missing \(first: .*dilated_"),
        ({"head_dim": (65536,) * 3}, "of another shape"),
        ({"in_chans": 65536, "patch_sizes": 1024, "kernel_size": 1023}, "of another shape"),
    ],
)
def test_a_configuration_that_is_not_of_its_weights(tmp_path, changes, message):
    """No memory is taken for such a model, and no name is made up for each of its classes."""
    config, path = dataclasses.replace(SMALL, **changes), tmp_path / "model.safetensors"
    if "num_classes" in changes:
        save_file(small().state_dict(), path)
        path = tmp_path
        (path / "config.json").write_text(json.dumps({"cvt_config": dataclasses.asdict(config)}))
    else:
        save_safetensors(Checkpoint("x", small().state_dict(), card=ModelCard(config, NAMES, 32)), path)
    for model in (None, "cvt_13"):
        with pytest.raises(CheckpointError, match=message if model is None else str(path)):
            create_model(model, checkpoint=path)


# Other heads ----------------------------------------------------------------------------------------------


def test_another_number_of_classes_replaces_the_head_and_says_so(tmp_path):
    source, target = small(), small(seed=1, num_classes=3)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    head = target.head.weight.clone()
    with pytest.warns(UserWarning, match=r"w.pth has a head of 10 classes and the model one of 3: the head"):
        report = load_checkpoint(target, tmp_path / "w.pth")
    assert report.head_replaced
    assert torch.equal(target.head.weight, head)
    assert torch.equal(target.norm.weight, source.norm.weight)


def test_the_checkpoint_decides_the_number_of_classes_unless_told(tmp_path):
    torch.save(small(num_classes=6).state_dict(), tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="head of 6 classes and the model one of 10"):
        assert create_model(SMALL, checkpoint=tmp_path / "w.pth").num_classes == 10  # a configuration tells
    torch.save(create_model("cvt_13", num_classes=6).state_dict(), tmp_path / "w.pth")
    assert create_model("cvt_13", checkpoint=tmp_path / "w.pth").num_classes == 6


def test_parts_that_the_model_lacks_are_left_out(tmp_path):
    source = small()
    torch.save(source.state_dict(), tmp_path / "w.pth")
    headless = small(seed=1, num_classes=0)
    assert load_checkpoint(headless, tmp_path / "w.pth").unused == ("head.weight", "head.bias")
    first = create_model(SMALL, features_only=True, out_indices=(0,), checkpoint=tmp_path / "w.pth")
    assert equal(first.state_dict(), {k: t for k, t in source.state_dict().items() if k.startswith("stage0")})


# Bad files ------------------------------------------------------------------------------------------------

FC1 = "stage2.blocks.0.mlp.fc1.weight"


def changed(name, change):
    return lambda state: state | {name: change(state[name])}


def with_one(value, dtype):
    return lambda t: t.to(dtype).index_fill(0, torch.tensor([1]), value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda good: good[: len(good) * 2 // 3], "w.* is not a "),
        (lambda good: b"", "w.* is not a "),
        (lambda good: b"these are not\nthe weights you look for\n", "w.* is not a "),
        (lambda good: bytes(len(good)), "w.* is not a "),
        (
            lambda state: small(depths=(1, 3, 3), embed_dims=(16, 16, 24)).state_dict(),
            r"not fit this model: .*unexpected \(first: stage1.blocks.2.*, \d+ of another shape",
        ),
        (lambda state: {k: t for k, t in state.items() if k != "norm.bias"}, r"1 missing \(first: norm.bias"),
        (lambda state: state | {"stage2.pos_embed": torch.ones(3)}, r"1 unexpected \(first: stage2.pos_emb"),
        (changed("head.weight", torch.sum), "of another shape"),
        (changed("stage0.patch_embed.proj.weight", torch.sum), "of another shape"),
        (changed(FC1, torch.Tensor.long), rf"1 of another kind \(first: {FC1}, "),
        (changed(FC1, lambda t: t + 1j), rf"1 of another kind \(first: {FC1}, "),
        (changed(FC1, lambda t: t > 0), rf"1 of another kind \(first: {FC1}, "),
        (changed(FC1, lambda t: t.to("meta")), rf"1 of another kind \(first: {FC1}, "),
        (changed(FC1, lambda t: t * float("nan")), f"{FC1}: has numbers that are NaN or infinite"),
        (changed("norm.weight", with_one(float("-inf"), torch.float16)), "norm.weight: has numbers"),
        (changed("norm.weight", with_one(float("inf"), torch.bfloat16)), "norm.weight: has numbers"),
    ],
)  # fmt: skip
def test_bad_files_leave_the_model_as_it_was(tmp_path, damage, message):
    model = small(seed=1)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for save, path in ((torch.save, tmp_path / "w.pth"), (save_file, tmp_path / "w.safetensors")):
        state = small().state_dict()
        if message.startswith("w"):
            save(state, path)
            path.write_bytes(damage(path.read_bytes()))
        else:
            state = damage(state)
            if save is save_file and any(t.is_meta for t in state.values()):
                continue  # which it cannot write
            save(state, path)
        with pytest.raises(CheckpointError, match=message) as caught:
            load_checkpoint(model, path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
        assert equal(model.state_dict(), before)


def test_a_model_without_memory_cannot_be_loaded_into(tmp_path):
    torch.save(small().state_dict(), tmp_path / "w.pth")
    with torch.device("meta"):
        model = create_model(SMALL)
    with pytest.raises(CheckpointError, match="of another kind"):
        load_checkpoint(model, tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "got a list, expected a state_dict"),
        ({}, "got a dict, expected a state_dict"),
        ({"epoch": 3, "weights": {}}, "got int under 'epoch', expected tensors only"),
        (torch.ones(3), "got a Tensor, expected a state_dict"),
    ],
)
def test_files_without_a_state_dict(tmp_path, content, message):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "w.pth")


def test_bad_directories(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoint: .*nothing does not exist"):
        read_checkpoint(tmp_path / "nothing")
    for name, content, message in (
        (None, None, "is a directory with neither config.json nor best.pth"),
        ("config.json", "{", "config.json: is not JSON"),
        ("config.json", '{"model_type": "cvt"}', "has neither model.safetensors nor pytorch_model.bin"),
        ("model.safetensors.index.json", '{"weight_map": ["a"]}', "index.json: has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "m-1.safetensors"}}', "m-1.safetensors: is "),
    ):
        if name is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(tmp_path)


def test_the_error_names_the_model_that_it_looks_like():
    with torch.device("meta"):
        names = create_model("cvt_21").state_dict()
    weights = Checkpoint("w.pth", {k: torch.zeros(()).expand(t.shape) for k, t in names.items()})
    with pytest.raises(CheckpointError, match=r"does not fit this model: .*; it looks like cvt_21"):
        create_model("cvt_13", checkpoint=weights)
