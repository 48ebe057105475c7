"""Weights from everywhere, and what is refused."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import save_file

from cvt import CheckpointError, CvT, create_model, load_checkpoint, read_checkpoint, save_huggingface
from cvt.checkpoints import Checkpoint
from tests.cvt.models import SMALL, equal, huggingface_twin, small


class Intruder:
    """An object whose unpickling makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("intruder-was-here",)


FLAT = [
    lambda state: state,
    lambda state: {f"module.{name}": t for name, t in state.items()},
    lambda state: {f"_orig_mod.module.{name}": t for name, t in state.items()},
]
NESTED = [
    lambda state: {"state_dict": state},
    lambda state: {"model": state, "epoch": 3},
    lambda state: {"state_dict": {f"module._orig_mod.{name}": t for name, t in state.items()}},
    lambda state: {  # Lightning's
        "state_dict": {f"net.{name}": t for name, t in state.items()},
        "hyper_parameters": {"lr": 0.1, "model": "cvt_13"},
    },
    lambda state: {"state_dict": {f"module.model._orig_mod.{name}": t for name, t in state.items()}},
]


@pytest.mark.parametrize(
    ("save", "wrap"),
    [*((torch.save, wrap) for wrap in FLAT + NESTED), *((save_file, wrap) for wrap in FLAT)],
)
def test_files_of_torch_save_and_safetensors(tmp_path, save, wrap):
    source, target = small(), small(seed=1)
    path = tmp_path / ("weights.pth" if save is torch.save else "weights.safetensors")
    save(wrap(source.state_dict()), path)
    assert load_checkpoint(target, path) == (False, ())
    assert equal(target.state_dict(), source.state_dict())
    assert equal(create_model(SMALL, checkpoint=str(path)).state_dict(), source.state_dict())


@pytest.mark.parametrize("bits", ["float16", "float64"])
def test_other_dtypes_are_converted(tmp_path, bits):
    source = small()
    torch.save(
        {
            k: t.to(getattr(torch, bits)) if t.is_floating_point() else t
            for k, t in source.state_dict().items()
        },
        tmp_path / "w.pth",
    )
    loaded = create_model(SMALL, checkpoint=tmp_path / "w.pth")
    assert loaded.head.weight.dtype == torch.float32
    torch.testing.assert_close(loaded.state_dict(), source.state_dict(), rtol=1e-3, atol=1e-3)


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
    files = {file.name for file in tmp_path.iterdir()}
    assert ("model.safetensors.index.json" in files) == (layout == "shards")
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stride_kv": [1, 1, 1]}, r"config.json has stride_kv \[1, 1, 1\], this model \[2, 2, 2\]"),
        ({"num_heads": [1, 1, 1]}, "config.json has num_heads"),
        (
            {"kernel_qkv": [5, 5, 5], "padding_q": [2, 2, 2], "padding_kv": [2, 2, 2]},
            "config.json has kernel_qkv",
        ),
    ],
)
def test_a_hugging_face_model_with_other_settings(tmp_path, changes, message):
    huggingface_twin(**changes).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        create_model(SMALL, checkpoint=tmp_path)


def test_a_hugging_face_model_of_another_kind(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    for model in (SMALL, None):
        with pytest.raises(CheckpointError, match="is a model of type 'vit', expected 'cvt'"):
            create_model(model, checkpoint=tmp_path)


def test_wrappers_around_a_hugging_face_model(tmp_path):
    peer = huggingface_twin()
    for part, prefix in ((peer, "model."), (peer.cvt, "encoder."), (peer, "module._orig_mod.")):
        torch.save({f"{prefix}{name}": t for name, t in part.state_dict().items()}, tmp_path / "w.ckpt")
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padding_kv": [0, 0, 0]}, r"config.json has padding_kv \[0, 0, 0\], this model \[1, 1, 1\]"),
        ({"qkv_projection_method": ["avg"] * 3}, "config.json has qkv_projection_method"),
        ({"embed_dim": "wide"}, "config.json: embed_dims: got 'wide'"),
        ({"cvt_config": {"widths": 3}}, "config.json: cvt_config is not of this version"),
    ],
)
def test_a_config_of_which_no_model_can_be_built(tmp_path, changes, message):
    save_file(small().state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cvt", **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        create_model(checkpoint=tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dims": [60000] * 3}, r"is said to have embed_dims \(60000, .*, but its weights \(8, "),
        ({"depths": 300}, r"is said to have depths \(300, "),
        ({"num_classes": 9000000}, "is said to have num_classes 9000000, but its weights 10"),
        ({"mlp_ratio": 1000}, r"does not fit this model: .* of another shape"),
        ({"in_chans": 60000, "patch_sizes": 1000}, "does not fit this model: "),
    ],
)
def test_no_memory_is_taken_for_a_model_that_weights_do_not_fit(tmp_path, changes, message):
    small().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["cvt_config"] |= {"num_heads": [1, 1, 1], **changes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    for build in (CvT.from_pretrained, lambda path: create_model(checkpoint=path, features_only=True)):
        with pytest.raises(CheckpointError, match=message):
            build(tmp_path)


# Other heads ----------------------------------------------------------------------------------------------


def test_another_number_of_classes_replaces_the_head_and_says_so(tmp_path):
    source, target = small(), small(seed=1, num_classes=3)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    head = target.head.weight.clone()
    with pytest.warns(
        UserWarning, match=r"w.pth has a head of 10 classes and the model one of 3: the head was not"
    ):
        report = load_checkpoint(target, tmp_path / "w.pth")
    assert report.head_replaced
    assert torch.equal(target.head.weight, head)
    assert torch.equal(target.norm.weight, source.norm.weight)
    with pytest.warns(UserWarning, match="model one of 4"):
        assert create_model(SMALL, num_classes=4, checkpoint=tmp_path / "w.pth").num_classes == 4


def test_the_checkpoint_decides_the_number_of_classes_unless_told(tmp_path):
    torch.save(small(num_classes=6).state_dict(), tmp_path / "w.pth")
    with pytest.warns(UserWarning, match="head of 6 classes and the model one of 10"):
        assert create_model(SMALL, checkpoint=tmp_path / "w.pth").num_classes == 10  # a configuration tells
    model = create_model("cvt_13", num_classes=6)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    assert create_model("cvt_13", checkpoint=tmp_path / "w.pth").num_classes == 6


@pytest.mark.parametrize("model", ["cvt_13", None])
def test_a_hugging_face_directory_says_which_activation_runs(tmp_path, model):
    save_huggingface(create_model(model or SMALL, activation="gelu"), tmp_path)
    assert create_model(model, checkpoint=tmp_path).config.activation == "gelu"
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"transformers_version": "5.0.0"}))
    with pytest.warns(UserWarning, match="runs exact GELU; this one runs quick_gelu.*activation='gelu'"):
        assert create_model(model, checkpoint=tmp_path).config.activation == "quick_gelu"
    create_model(model, checkpoint=tmp_path, activation="gelu")


def test_parts_that_the_model_lacks_are_left_out(tmp_path):
    source = small()
    torch.save(source.state_dict(), tmp_path / "w.pth")
    headless = small(seed=1, num_classes=0)
    assert load_checkpoint(headless, tmp_path / "w.pth").unused == ("head.weight", "head.bias")
    first = create_model(SMALL, features_only=True, out_indices=(0,), checkpoint=tmp_path / "w.pth")
    assert equal(first.state_dict(), {k: t for k, t in source.state_dict().items() if k.startswith("stage0")})


# Bad files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [lambda t: t.to("meta"), torch.Tensor.long, lambda t: t + 1j, lambda t: t > 0],
)
def test_tensors_of_another_kind_leave_the_model_as_it_was(tmp_path, change):
    state = small().state_dict()
    name = "stage2.blocks.0.mlp.fc1.weight"
    torch.save(state | {name: change(state[name])}, tmp_path / "w.pth")
    model = small(seed=1)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"1 of another kind \(first: stage2.blocks.0.mlp.fc1.weight, "):
        load_checkpoint(model, tmp_path / "w.pth")
    assert equal(model.state_dict(), before)


@pytest.mark.parametrize("name", ["head.weight", "stage0.patch_embed.proj.weight"])
def test_scalars_in_place_of_weights(tmp_path, name):
    torch.save(small().state_dict() | {name: torch.tensor(1.0)}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="of another shape"):
        create_model(SMALL, checkpoint=tmp_path / "w.pth")


def test_only_our_models_are_loaded_into(tmp_path):
    torch.save(small().state_dict(), tmp_path / "w.pth")
    with pytest.raises(TypeError, match="model: got Linear, expected a CvT or CvTFeatures"):
        load_checkpoint(torch.nn.Linear(2, 2), tmp_path / "w.pth")


def test_a_model_without_memory_is_refused(tmp_path):
    torch.save(small().state_dict(), tmp_path / "w.pth")
    with torch.device("meta"):
        model = create_model(SMALL)
    with pytest.raises(CheckpointError, match="of another kind"):
        load_checkpoint(model, tmp_path / "w.pth")


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def good_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "w"
    torch.save(small().state_dict(), path)
    pth = path.read_bytes()
    save_file(small().state_dict(), path)
    return {".pth": pth, ".safetensors": path.read_bytes()}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "text", "zeros", "another model", "one key less", "one more"]
)
def test_bad_files_leave_the_model_as_it_was(tmp_path, good_bytes, suffix, damage):
    good = good_bytes[suffix]
    path = tmp_path / f"w{suffix}"
    state = small().state_dict()
    content = {
        "truncated": good[: len(good) * 2 // 3],
        "empty": b"",
        "text": b"these are not\nthe weights you look for\n",
        "zeros": bytes(len(good)),
    }
    if damage in content:
        write(path, content[damage])
    else:
        changed = {
            "another model": lambda: small(depths=(1, 3, 3), embed_dims=(16, 16, 24)).state_dict(),
            "one key less": lambda: {k: t for k, t in state.items() if k != "norm.bias"},
            "one more": lambda: state | {"stage2.pos_embed": torch.ones(3)},
        }[damage]()
        torch.save(changed, path) if suffix == ".pth" else save_file(changed, path)
    messages = {
        "another model": r"not fit this model: .*unexpected \(first: stage1.blocks.2.*, \d+ of another shape",
        "one key less": r"1 missing \(first: norm.bias\)",
        "one more": r"1 unexpected \(first: stage2.pos_embed\)",
    }
    model = small(seed=1)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=messages.get(damage, re.escape(str(path)))) as caught:
        load_checkpoint(model, path)
    assert "\n" not in str(caught.value)
    assert equal(model.state_dict(), before)


def test_pickled_code_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": small().state_dict(), "extra": Intruder()}, "w.pth")
    with pytest.raises(CheckpointError, match=r"w.pth: holds pickled code or objects \(posix.mkdir\)"):
        read_checkpoint("w.pth")
    assert [path.name for path in tmp_path.iterdir()] == ["w.pth"]


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
    with pytest.raises(CheckpointError, match=r"is a directory with neither config.json nor best.pth"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: is not JSON"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config.json: got a JSON list, expected an object"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "cvt"}')
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor pytorch_model.bin"):
        read_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": ["a"]}')
    with pytest.raises(CheckpointError, match=r"index.json: has no weight_map"):
        read_checkpoint(tmp_path)
    index.write_text('{"weight_map": {"a": "model-1-of-1.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"model-1-of-1.safetensors: is not a safetensors file"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100000)
    with pytest.raises(CheckpointError, match=r"config.json: is not JSON"):
        read_checkpoint(tmp_path)


def test_the_error_names_the_model_that_it_looks_like():
    with torch.device("meta"):
        names = create_model("cvt_21").state_dict()
    weights = Checkpoint("w.pth", {k: torch.zeros(()).expand(t.shape) for k, t in names.items()})
    with pytest.raises(CheckpointError, match=r"does not fit this model: .*; it looks like cvt_21"):
        create_model("cvt_13", checkpoint=weights)
