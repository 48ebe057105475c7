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

LABELS = [f"thing {i}" for i in range(10)]


@pytest.mark.parametrize("config", [{"activation": "gelu"}, None], ids=["three stages", "two stages"])
def test_to_hugging_face_and_back(tmp_path, config):
    from transformers import AutoModelForImageClassification

    ours = (small(**config) if config else create_model(two_stages())).eval()
    folder = tmp_path / "new" / "folder"
    save_huggingface(ours, folder, labels=LABELS)
    files = ["config.json", "model.safetensors", "preprocessor_config.json"]
    assert sorted(file.name for file in folder.iterdir()) == files
    peer = AutoModelForImageClassification.from_pretrained(folder).eval()
    x = torch.randn(2, 3, 64, 96)
    with torch.inference_mode():
        torch.testing.assert_close(peer(x).logits, ours(x), rtol=1e-4, atol=1e-5)
    assert list(peer.config.id2label.values()) == LABELS
    peer.save_pretrained(tmp_path / "back")
    checkpoint = read_checkpoint(tmp_path / "back")
    assert (checkpoint.labels, checkpoint.num_classes) == (LABELS, 10)
    back = create_model(checkpoint=tmp_path / "back", activation="gelu").eval()
    assert back.config == ours.config
    assert equal(back.state_dict(), ours.state_dict())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scale": "head_dim"}, "has no scale='head_dim'"),
        ({"layer_scale": 0.1, "embed_norm": "batch_layer_norm"}, "'batch_layer_norm', no layer_scale"),
        ({"pool": "avg"}, "has no pool='avg'"),
        ({"depths": (1, 1, 2)}, "has no stage of so few blocks"),
        ({"cls_token": True}, "has no class token before the last stage"),
    ],
)
def test_models_that_hugging_face_cannot_express(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        save_huggingface(small(**overrides), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, "got labels '0123456789', expected a list", {"labels": "0123456789"}),
        (ValueError, "of 1001 characters among the labels", {"labels": [*"012345678", "x" * 1001]}),
        (ValueError, "of 1 characters among the labels", {"labels": [*"012345678", "\ud800"]}),
        (ValueError, "got 3 labels for 10 classes", {"labels": ["a", "b", "c"]}),
        (ValueError, "image_size: got 0, expected at least 1", {"image_size": 0}),
        (ValueError, "crop_fraction: got 1e-09", {"image_size": 224, "crop_fraction": 1e-9}),
    ],
)
def test_nothing_is_written_of_what_could_not_be_read(tmp_path, error, message, options):
    model = small()
    for save in (model.save_pretrained, lambda path, **options: save_huggingface(model, path, **options)):
        with pytest.raises(error, match=message):
            save(tmp_path / "out", **options)
    for other in (create_model(SMALL, features_only=True), small(num_classes=0), torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="expected a CvT with a classification head"):
            save_huggingface(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_configuration_is_as_long_as_it_may_be_read(tmp_path, monkeypatch):
    model, before = small(activation="gelu"), os.umask(0o027)
    try:
        save_huggingface(model, tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}
    size = (tmp_path / "config.json").stat().st_size
    monkeypatch.setattr("cvt.huggingface.MOST_JSON", size)
    save_huggingface(model, tmp_path)
    monkeypatch.setattr("cvt.huggingface.MOST_JSON", size - 1)
    with pytest.raises(ValueError, match=rf"labels: take {size} bytes in config.json, expected at most"):
        save_huggingface(model, tmp_path)


def test_the_activation_is_remembered_until_transformers_writes(tmp_path):
    from transformers import CvtForImageClassification

    with pytest.warns(UserWarning, match="always computes exact GELU and this model quick_gelu"):
        save_huggingface(small(), tmp_path)
    assert create_model(checkpoint=tmp_path).config == SMALL
    CvtForImageClassification.from_pretrained(tmp_path).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="runs exact GELU"):
        create_model(checkpoint=tmp_path)


PHOTO = Image.linear_gradient("L").convert("RGB").resize((500, 400))


@pytest.mark.parametrize(
    ("image_size", "crop_fraction"), [(64, None), (32, 1.0), (48, 0.9), (384, None), (384, 0.9)]
)
def test_the_pipeline_of_transformers(tmp_path, image_size, crop_fraction):
    from transformers import pipeline

    model = small(activation="gelu").eval()
    save_huggingface(model, tmp_path, labels=LABELS, image_size=image_size, crop_fraction=crop_fraction)
    found = pipeline("image-classification", model=str(tmp_path))(PHOTO, top_k=10)
    pixels = preprocess(PHOTO, image_size, crop_fraction=crop_fraction)
    with torch.inference_mode():
        expected = model(pixels[None])[0].softmax(0)
    for row in found:
        assert row["score"] == pytest.approx(expected[LABELS.index(row["label"])].item(), abs=1e-4)
    read = read_checkpoint(tmp_path).preprocessing
    assert read.image_size == image_size
    assert torch.equal(pixels, preprocess(PHOTO, image_size, crop_fraction=read.crop_fraction))


def test_images_that_the_model_was_loaded_with_are_written_again(tmp_path):
    save_huggingface(small(activation="gelu"), tmp_path / "a", image_size=48, labels=LABELS)
    model = create_model(checkpoint=tmp_path / "a")
    save_huggingface(model, tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    model.reset_classifier(10)
    save_huggingface(model, tmp_path / "c")
    assert json.loads((tmp_path / "c" / "config.json").read_text())["id2label"]["3"] == "LABEL_3"
    assert read_checkpoint(tmp_path / "c").labels is None


NORMAL = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3}
SQUARE = {"size": {"height": 96, "width": 96}, "image_processor_type": "ViTImageProcessor"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (NORMAL | {"size": 224, "crop_pct": 0.875}, (224, None)),
        (NORMAL | {"size": {"shortest_edge": 384}, "crop_pct": 0.875}, (384, None)),
        (NORMAL | {"size": {"shortest_edge": 224}, "crop_pct": 0.95}, (224, 0.95)),
        (NORMAL | {"size": 224, "feature_extractor_type": "ViTFeatureExtractor"}, (224, 1.0)),
        (NORMAL | SQUARE, (96, 1.0)),
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
        ({"size": 96, "crop_pct": 3}, "size 96, crop_pct 3"),
        ({"size": 10**9}, "size 1000000000"),
        ({"size": 96, "crop_pct": 1e-9}, "size 96, crop_pct 1e-09"),
        ({"size": True}, "size True"),
        ({"image_mean": "x", "rescale_factor": None}, "image_mean 'x'"),
        ({"image_std": [0.2, float("nan"), 0]}, "image_std [0.2, nan, 0]"),
        ({"size": {"shortest_edge": 20}, "do_center_crop": True, "crop_size": 24}, ", crop_size 24"),
    ],
)
def test_what_images_cannot_do_is_said(changes, words):
    (remark,) = preprocessing_of_huggingface(NORMAL | {"size": 224} | changes).remarks
    assert "asks for " in remark
    assert f"{words}, which cvt does not do" in remark
