"""Cards and configurations that anybody may have written: bounds of every field."""

import json

import pytest
import torch
from safetensors.torch import save_file

from cvt import CheckpointError, CvTConfig, read_checkpoint
from cvt.card import ModelCard
from tests.cvt.models import SMALL

NAMES = [f"class {i}" for i in range(10)]
CARD = ModelCard(SMALL, NAMES, 32, 0.9).to_dict()


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
)
def test_bounds(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        CvTConfig(**fields)


@pytest.mark.parametrize("content", [None, [], "config", {"x" * 10**5: 1}, {3: 1}])
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
        ({"labels": ["a"] * 10**6}, "got 1000000 labels for 10 classes"),
        ({"labels": [*NAMES[:9], 3]}, "got labels .*, with 3, expected a list of strings"),
        ({"labels": dict.fromkeys(NAMES, "")}, r"got labels \{'class 0': "),
        ({"labels": [*NAMES[:9], "x" * 1001]}, r"got 'xx.*x' of 1001 characters among the labels"),
        ({"folders": ["0"]}, "got 1 folders for 10 classes"),
        ({"folders": [*NAMES[:9], "\ud800"]}, "of 1 characters among the folders, expected text"),
        ({"image_size": None}, "image_size: got None, expected int"),
        ({"image_size": 10**9}, "image_size: got 1000000000"),
        ({"crop_fraction": "all"}, "crop_fraction: got 'all', expected float"),
        ({"crop_fraction": float("nan")}, "crop_fraction: got nan"),
        ({"crop_fraction": 10**400}, "crop_fraction: got 1000"),
        ({"other": 1}, "card: has the field 'other', which is not known"),
        *(({name: ...}, f"card: has no {name}") for name in ("config", "labels", "image_size")),
        (None, "card: got None, expected an object of fields"),
    ],
)
def test_damaged_cards(changes, message):
    content = changes and {key: value for key, value in {**CARD, **changes}.items() if value is not ...}
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        ModelCard.from_dict(content)
    assert len(str(caught.value)) < 300


def test_cards_that_are_whole(tmp_path):
    assert ModelCard.from_dict(CARD) == ModelCard(SMALL, NAMES, 32, 0.9)
    folders = [*NAMES[:9], "\udce9t\udce9"]  # of a folder whose name is in Latin-1
    assert ModelCard.from_dict({**CARD, "folders": folders}).folders == folders
    path = tmp_path / "odd.safetensors"
    for card, reason in (("{", "Expecting property"), (json.dumps(CARD | {"labels": ["0"]}), "got 1 labels")):
        save_file({"x": torch.ones(1)}, path, metadata={"card": card})
        with pytest.raises(CheckpointError, match=f"odd.safetensors: is not of this version .*: {reason}"):
            read_checkpoint(path)
