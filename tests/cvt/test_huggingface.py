"""Directories that transformers reads, and those that it wrote."""

import json
import os

import pytest
import torch
from PIL import Image

from cvt import create_model, read_checkpoint, save_huggingface
from cvt.huggingface import Preprocessing, preprocessing_of_huggingface
from cvt.images import preprocess
from tests.cvt.models import SMALL, equal, small, two_stages


def test_to_hugging_face_and_back(tmp_path):
    from transformers import CvtForImageClassification

    labels = [f"animal {i}" for i in range(10)]
    ours = small(activation="gelu").eval()
    save_huggingface(ours, tmp_path / "new" / "folder", labels=labels)
    peer = CvtForImageClassification.from_pretrained(tmp_path / "new" / "folder").eval()
    x = torch.randn(2, 3, 64, 96)
    with torch.inference_mode():
        torch.testing.assert_close(peer(x).logits, ours(x), rtol=1e-4, atol=1e-5)
    assert list(peer.config.id2label.values()) == labels
    peer.save_pretrained(tmp_path / "back")
    assert equal(create_model(SMALL, checkpoint=tmp_path / "back").state_dict(), ours.state_dict())
    (tmp_path / "back" / "config.json").write_text('{"model_type": "cvt", "id2label": 5}')
    assert read_checkpoint(tmp_path / "back").labels is None
    peer.save_pretrained(tmp_path / "back")
    checkpoint = read_checkpoint(tmp_path / "back")
    assert checkpoint.labels == labels
    assert checkpoint.num_classes == 10
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]


def test_saving_says_that_hugging_face_runs_another_activation(tmp_path):
    with pytest.warns(UserWarning, match="always computes exact GELU and this model quick_gelu"):
        save_huggingface(small(), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scale": "head_dim"}, "has no scale='head_dim'"),
        (
            {"layer_scale": 0.1, "embed_norm": "batch_layer_norm"},
            "has no embed_norm='batch_layer_norm', no layer_scale",
        ),
        ({"pool": "avg"}, "has no pool='avg'"),
        ({"depths": (1, 1, 2)}, "has no stage of so few blocks"),
        ({"cls_token": True}, "has no class token before the last stage"),
    ],
)
def test_models_that_hugging_face_cannot_express(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        save_huggingface(small(**overrides), tmp_path / "out")
    with pytest.raises(TypeError, match=r"labels: got .* expected one string per class"):
        save_huggingface(small(), tmp_path / "out", labels=[object()] * 10)
    for name in ("x" * 1001, "\ud800"):  # which no checkpoint is read with
        with pytest.raises(
            ValueError, match=f"of {len(name)} characters among the labels, expected text of at "
        ):
            save_huggingface(small(), tmp_path / "out", labels=[*"012345678", name])
    with pytest.raises(ValueError, match="labels: got 3 names, expected 10"):
        save_huggingface(small(), tmp_path / "out", labels=["a", "b", "c"])
    for model in (create_model(SMALL, features_only=True), small(num_classes=0), torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="expected a CvT with a classification head"):
            save_huggingface(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_configuration_is_as_long_as_it_may_be_read(tmp_path, monkeypatch):
    model = small(activation="gelu")
    save_huggingface(model, tmp_path)
    size = (tmp_path / "config.json").stat().st_size
    monkeypatch.setattr("cvt.huggingface.MOST_JSON", size)
    save_huggingface(model, tmp_path)
    monkeypatch.setattr("cvt.huggingface.MOST_JSON", size - 1)
    with pytest.raises(ValueError, match=rf"labels: take {size} bytes in config.json, expected at most"):
        save_huggingface(model, tmp_path)


def test_a_model_of_two_stages(tmp_path):
    from transformers import CvtForImageClassification

    ours = create_model(two_stages()).eval()
    save_huggingface(ours, tmp_path)
    peer = CvtForImageClassification.from_pretrained(tmp_path).eval()
    x = torch.randn(2, 3, 64, 96)
    with torch.inference_mode():
        torch.testing.assert_close(peer(x).logits, ours(x), rtol=1e-4, atol=1e-5)
    peer.save_pretrained(tmp_path / "back")
    back = create_model(checkpoint=tmp_path / "back", activation="gelu").eval()
    assert back.config == ours.config
    assert equal(back.state_dict(), ours.state_dict())


def test_files_have_the_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        save_huggingface(small(activation="gelu"), tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_the_activation_is_remembered_until_transformers_writes(tmp_path):
    from transformers import CvtForImageClassification

    with pytest.warns(UserWarning, match="always computes exact GELU"):
        save_huggingface(small(), tmp_path)
    assert create_model(checkpoint=tmp_path).config == SMALL
    peer = CvtForImageClassification.from_pretrained(tmp_path)
    peer.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="runs exact GELU"):
        create_model(checkpoint=tmp_path)


PHOTO = Image.linear_gradient("L").convert("RGB").resize((500, 400))


@pytest.mark.parametrize(
    ("image_size", "crop_fraction"), [(64, None), (32, 1.0), (48, 0.9), (384, None), (384, 0.9)]
)
def test_the_pipeline_of_transformers(tmp_path, image_size, crop_fraction):
    from transformers import pipeline

    model = small(activation="gelu").eval()
    labels = [f"thing {i}" for i in range(10)]
    save_huggingface(model, tmp_path, labels=labels, image_size=image_size, crop_fraction=crop_fraction)
    found = pipeline("image-classification", model=str(tmp_path))(PHOTO, top_k=10)
    with torch.inference_mode():
        expected = model(preprocess(PHOTO, image_size, crop_fraction=crop_fraction)[None])[0].softmax(0)
    for row in found:
        assert row["score"] == pytest.approx(expected[labels.index(row["label"])].item(), abs=1e-4)
    read = read_checkpoint(tmp_path).preprocessing
    assert read.image_size == image_size
    assert torch.equal(
        preprocess(PHOTO, image_size, crop_fraction=crop_fraction),
        preprocess(PHOTO, image_size, crop_fraction=read.crop_fraction),
    )


def test_images_that_the_model_was_loaded_with_are_written_again(tmp_path):
    for size, folder in ((48, "a"), (None, "b")):
        model = create_model(checkpoint=tmp_path / "a") if size is None else small(activation="gelu")
        labels = None if size is None else [f"thing {i}" for i in range(10)]
        save_huggingface(model, tmp_path / folder, image_size=size, labels=labels)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in ("a", "b")
    )
    assert first == second
    model.reset_classifier(10)
    save_huggingface(model, tmp_path / "c")
    assert json.loads((tmp_path / "c" / "config.json").read_text())["id2label"]["3"] == "LABEL_3"
    assert read_checkpoint(tmp_path / "c").labels is None


NORMAL = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (NORMAL | {"size": 224, "crop_pct": 0.875}, (224, None)),
        (NORMAL | {"size": {"shortest_edge": 384}, "crop_pct": 0.875}, (384, None)),
        (NORMAL | {"size": {"shortest_edge": 224}, "crop_pct": 0.95}, (224, 0.95)),
        (NORMAL | {"size": 224, "feature_extractor_type": "ViTFeatureExtractor"}, (224, 1.0)),
        (
            NORMAL | {"size": {"height": 96, "width": 96}, "image_processor_type": "ViTImageProcessor"},
            (96, 1.0),
        ),
        (NORMAL | {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": 224}, (224, 0.875)),
        ({}, (None, None)),
    ],
)
def test_preprocessor_configs(content, expected):
    found = preprocessing_of_huggingface(content)
    assert found == Preprocessing(expected[0], pytest.approx(expected[1]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_mean": [0.5, 0.5, 0.5]}, "image_mean [0.5, 0.5, 0.5]"),
        ({"resample": 2, "do_normalize": False}, "do_normalize False, resample 2"),
        ({"size": {"height": 96, "width": 64}}, "size {'height': 96, 'width': 64}"),
        ({"size": {"longest_edge": 96}}, "size {'longest_edge': 96}"),
        ({"size": 96, "crop_pct": 3}, "size 96, crop_pct 3"),
        ({"size": 10**9}, "size 1000000000"),
        ({"size": 96, "crop_pct": 1e-9}, "size 96, crop_pct 1e-09"),
        ({"size": True}, "size True"),
        (
            {"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": 24},
            "size {'shortest_edge': 20}, crop_size 24",
        ),
    ],
)
def test_what_images_cannot_do_is_said(changes, words):
    (remark,) = preprocessing_of_huggingface(NORMAL | {"size": 224} | changes).remarks
    assert f"asks for {words}, which cvt does not do" in remark
