"""Cards and configurations beside weights: bounds of every field, and agreement with the weights."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from cvt import CheckpointError, CvTConfig, create_model, read_checkpoint
from cvt.card import ModelCard
from cvt.checkpoints import Checkpoint, save_safetensors
from cvt_kernels.checks import shown
from tests.cvt.models import SMALL, small

NAMES = [f"class {i}" for i in range(10)]
CARD = ModelCard(SMALL, NAMES, 32, 0.9).to_dict()
ODD = (None, "x", float("nan"), -1, 10**12, 10**5000, {"a": 1}, [[1]], True, torch.ones(2))
NUMBERS = [
    field.name
    for field in dataclasses.fields(CvTConfig)
    if field.name not in ("token_keep", "head_dim", "layer_scale")
]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_field_of_a_configuration_is_checked(name):
    """A single value, one for each stage and one of a stage only: each error names the field."""
    for odd in ODD:
        if isinstance(odd, bool) and isinstance(getattr(CvTConfig(), name), bool):
            continue
        for value in (odd, [odd] * 3, (1, odd, 1)):
            if isinstance(odd, bool) and name in ("qkv_bias", "cls_token") and value != (1, odd, 1):
                continue
            with pytest.raises((TypeError, ValueError), match=f"^{name}: ") as caught:
                CvTConfig(**{name: value})
            assert len(str(caught.value)) < 300
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depths": (1, 10**8, 1)}, "depths: got 100000000, expected at least 1 and below 1001"),
        ({"depths": (400, 400, 400)}, r"depths: got \(400, 400, 400\), expected at most 1000 blo"),
        ({"embed_dims": (64,) * 9}, "embed_dims: got 9 stages, expected at most 8"),
        ({"embed_dims": (1 << 17,) * 3}, "embed_dims: got 131072, expected at least 1 and below 65537"),
        ({"num_classes": 10**8}, r"num_classes: got 100000000, expected at least 0 and below 1e\+07"),
        ({"token_keep": {"a": 1}}, "token_keep: got {'a': 1}, expected a number"),
        ({"token_keep": (0.5,) * 10**6}, "token_keep: got 1000000 values"),
        ({"token_keep_bounds": [0.5, float("nan")]}, "token_keep_bounds: got nan"),
        ({"activation": ["gelu"]}, r"activation: got \['gelu'\], expected one of"),
    ],
)  # fmt: skip
def test_bounds(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        CvTConfig(**fields)


@pytest.mark.parametrize("content", [None, 3, [], "config", {"x" * 10**5: 1}, {3: 1}])
def test_what_is_no_configuration(content):
    with pytest.raises((TypeError, ValueError), match=r"^config: got ") as caught:
        CvTConfig.from_dict(content)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": 3}, "config: got 3, expected an object"),
        ({"config": {"depths": 10**8}}, "depths: got 100000000"),
        ({"labels": "0123456789"}, "got labels '0123456789', expected a list of strings"),
        ({"labels": 10}, "got labels 10, expected a list of strings"),
        ({"labels": ["a"] * 10**6}, "got 1000000 labels for 10 classes"),
        ({"labels": [*NAMES[:9], 3]}, "got labels .*, with 3, expected a list of strings"),
        ({"labels": [*NAMES[:9], "x" * 1001]}, r"got 'xx.*x' of 1001 characters among the labels"),
        ({"folders": [*NAMES[:9], "\ud800"]}, "of 1 characters among the folders, expected text"),
        ({"image_size": True}, "image_size: got True, expected int"),
        ({"image_size": "32"}, "image_size: got '32', expected int"),
        ({"crop_fraction": float("nan")}, "crop_fraction: got nan"),
        ({"crop_fraction": 10**400}, "crop_fraction: got 1000"),
        ({"other": 1}, "card: has the field 'other', which is not known"),
    ],
)
def test_cards(changes, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        ModelCard.from_dict({**CARD, **changes})
    assert len(str(caught.value)) < 300


def test_cards_that_are_whole_or_none():
    assert ModelCard.from_dict(CARD) == ModelCard(SMALL, NAMES, 32, 0.9)
    folders = [*NAMES[:9], "\udce9t\udce9"]  # of a folder whose name is in Latin-1
    assert ModelCard.from_dict({**CARD, "folders": folders}).folders == folders
    for name in ("config", "labels", "image_size"):
        with pytest.raises(ValueError, match=f"card: has no {name}"):
            ModelCard.from_dict({key: value for key, value in CARD.items() if key != name})
    with pytest.raises(TypeError, match="card: got 3, expected an object of fields"):
        ModelCard.from_dict(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": (1, 2, 4)}, r"is said to have depths \(1, 2, 4\), but its weights \(1, 2, 3\)"),
        ({"mlp_ratio": 1024}, "does not fit this model: .* of another shape"),
        ({"decoder_dim": 65536, "head": "segment"}, "is said to have head segment, but its weights classify"),
        # Tables of 3 GB for each head, which a model gets that has none yet, but not from a card.
        ({"position_bias": True, "position_bias_size": 16384}, r"6 missing \(first: .*position_bias\)"),
        ({"mixing": "hybrid"}, r"missing \(first: .*dilated_"),
        ({"head_dim": (65536,) * 3}, "of another shape"),
        ({"in_chans": 65536, "patch_sizes": 1024, "kernel_size": 1023}, "of another shape"),
    ],
)
def test_a_card_that_is_not_of_its_weights(tmp_path, changes, message):
    card = ModelCard(dataclasses.replace(SMALL, **changes), NAMES, 32)
    save_safetensors(Checkpoint("x", small().state_dict(), card=card), tmp_path / "w.safetensors")
    for model in (None, "cvt_13"):
        with pytest.raises(CheckpointError, match=message if model is None else "w.safetensors: "):
            create_model(model, checkpoint=tmp_path / "w.safetensors")


def test_tables_of_a_card_are_resized_for_other_images_only(tmp_path):
    model = small(position_bias=True, position_bias_size=32)
    state = model.state_dict()
    name = next(name for name in state if name.endswith("position_bias"))
    card = ModelCard(model.config, NAMES, 32)
    path = tmp_path / "w.safetensors"
    save_safetensors(Checkpoint("x", {**state, name: state[name][:, :-1]}, card=card), path)
    with pytest.raises(CheckpointError, match="1 of another shape"):
        create_model(checkpoint=path)
    save_safetensors(Checkpoint("x", state, card=card), path)
    larger = create_model(checkpoint=path, position_bias_size=64)
    assert larger.state_dict()[name].shape[1] > state[name].shape[1]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_no_numbers(tmp_path, value, dtype):
    state = small().state_dict()
    state["norm.weight"] = state["norm.weight"].to(dtype)
    state["norm.weight"][3] = value
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"w.pth: norm.weight: has numbers that are NaN or infinite"):
        read_checkpoint(tmp_path / "w.pth")


# Hugging Face's ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    small(activation="gelu").save_pretrained(folder, labels=NAMES)
    return folder


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"depth": [1, 10**8]}, "depths: got 2 values"),
        ("config.json", {"depth": [1, 10**8, 3]}, "depths: got 100000000"),
        ("config.json", {"embed_dim": "x" * 10**6}, "embed_dims: got 'x"),
        ("config.json", {"model_type": "x" * 10**6}, "is a model of type 'x"),
        ("config.json", {"model_type": [[[[[[1]]]]]]}, "is a model of type "),
        ("config.json", {"num_channels": True}, "in_chans: got True, expected int"),
        ("config.json", {"padding_q": ["x" * 10**6]}, "config.json has padding_q"),
        ("config.json", {"id2label": {str(i): {"a": i} for i in range(10)}}, "got id2label .*, expected a"),
        ("config.json", {"id2label": {str(i): "x" * 1001 for i in range(10)}}, "of 1001 characters among"),
        ("preprocessor_config.json", {"image_mean": [0.4, float("nan"), 0.4]}, "image_mean: got nan"),
        ("preprocessor_config.json", {"image_mean": "x"}, "image_mean: got 'x', expected float"),
        ("preprocessor_config.json", {"image_std": [0.2, 0, 0.2]}, "image_std: got 0, expected at least"),
        ("preprocessor_config.json", {"crop_pct": 1.5}, "crop_pct: got 1.5, expected at least 0 and below 1"),
        ("preprocessor_config.json", {"do_resize": 1}, "do_resize: got 1, expected bool"),
        ("preprocessor_config.json", {"rescale_factor": float("inf")}, "rescale_factor: got inf"),
    ],
)  # fmt: skip
def test_files_of_hugging_face(saved, tmp_path, file, changes, message):
    for each in saved.iterdir():
        content = each.read_bytes()
        if each.suffix == ".json":
            whole = json.loads(content)
            whole.pop("cvt_config", None)
            content = json.dumps(whole | (changes if each.name == file else {})).encode()
        (tmp_path / each.name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        create_model(checkpoint=tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_names_of_hugging_face_that_are_integers(saved):
    """Transformers takes these, too; ``True`` is none."""
    tensors = read_checkpoint(saved).tensors
    names = {str(i): i * 10 for i in range(10)}
    assert Checkpoint("x", tensors, {"id2label": names}).labels == [str(i * 10) for i in range(10)]
    for other in (None, 5, [], dict(list(names.items())[:9])):
        assert Checkpoint("x", tensors, {"id2label": other}).labels is None
    with pytest.raises(CheckpointError, match=r"got id2label .*, with True, expected a list of strings"):
        _ = Checkpoint("x", tensors, {"id2label": names | {"3": True}}).labels


def test_a_configuration_of_millions_of_classes_makes_no_names(saved, tmp_path):
    """The weights are asked before a name is made up for each."""
    (tmp_path / "config.json").write_text(
        json.dumps({"cvt_config": {**dataclasses.asdict(SMALL), "num_classes": 10**7}})
    )
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    for model in (None, "cvt_13"):
        with pytest.raises(CheckpointError, match="is said to have num_classes 10000000, but its weights 10"):
            create_model(model, checkpoint=tmp_path)


def test_texts_of_values():
    assert [shown(value) for value in (None, 1, 1.5, True, "x")] == ["None", "1", "1.5", "True", "'x'"]
    assert shown(np.int64(32)) == repr(np.int64(32))
    assert shown(np.zeros(2)) == "ndarray"
    nested = "x"
    for _ in range(60):
        nested = (nested, nested)
    wide = [[["x" * 100] * 9] * 9] * 9
    odd_type = type("X" * 10**5, (), {})()
    for value in (nested, wide, "x" * 10**6, [10**5000], {"a": [list(range(10**5))]}, odd_type, ODD):
        assert len(shown(value)) <= 80
