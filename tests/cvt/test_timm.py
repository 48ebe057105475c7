"""Registration with timm, where timm can be imported: it needs torchvision, which this project does not."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import cvt
from cvt.factory import randomize
from cvt.hub import MICROSOFT, PRETRAINED
from tests.checks import python_blocks, run_blocks, section_of

ROOT = Path(__file__).parents[2]
TINY = {"embed_dims": (16, 32, 48), "num_heads": (1, 2, 3), "depths": (1, 2, 3)}


def test_without_timm_the_error_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "cvt.timm", raising=False)
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.models", None)
    with pytest.raises(ModuleNotFoundError, match=r"^timm is not installed; "):
        importlib.import_module("cvt.timm")


@pytest.fixture(scope="module")
def timm():
    reason = "timm is not installed, or lacks torchvision"
    module = pytest.importorskip("timm", reason=reason, exc_type=ImportError)
    importlib.import_module("cvt.timm")
    return module


@pytest.fixture
def images():
    return torch.randn(2, 3, 64, 96)


def test_names(timm):
    assert timm.list_models("cvt*") == sorted(cvt.PRESETS)
    published = timm.list_models("cvt*", pretrained=True)
    assert len(published) == len(MICROSOFT)
    assert {"cvt_21.msft_in1k", "cvt_13.msft_in22k_ft_in1k_384"} <= {*published}
    for name, hub_id in PRETRAINED.items():
        assert timm.get_pretrained_cfg(name).hf_hub_id == hub_id


def test_a_classifier(timm, images):
    model = timm.create_model(
        "cvt_13", num_classes=10, in_chans=1, global_pool="avg", drop_path_rate=0.2, drop_rate=None, **TINY
    )
    assert isinstance(model, cvt.CvT)
    assert (model.config.pool, model.config.drop_path_rate) == ("avg", (0.2, 0.2, 0.2))
    assert model.get_submodule(model.pretrained_cfg["first_conv"]) is model.stage0.patch_embed.proj
    assert model.get_submodule(model.default_cfg["classifier"]) is model.get_classifier()
    assert model(images[:, :1]).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "size", "crop", "mode"),
    [("cvt_13", 224, 0.875, "center"), ("cvt_13.msft_in1k_384", 384, 1.0, "squash")],
)
def test_the_data_config(timm, name, size, crop, mode):
    config = timm.data.resolve_model_data_config(timm.create_model(name, **TINY))
    assert config["input_size"] == (3, size, size)
    assert (config["crop_pct"], config["crop_mode"], config["interpolation"]) == (crop, mode, "bicubic")
    assert config["mean"] == (0.485, 0.456, 0.406)


def test_features(timm, images):
    every = timm.create_model("cvt_13", features_only=True, **TINY)
    assert every.feature_info.channels() == [16, 32, 48]
    last = timm.create_model("cvt_13", features_only=True, out_indices=(1, 2), **TINY)
    assert isinstance(last, cvt.CvTFeatures)
    assert last.feature_info.channels() == [32, 48]
    assert last.feature_info.reduction() == [8, 16]
    assert [tuple(m.shape) for m in last(images)] == [(2, 32, 8, 12), (2, 48, 4, 6)]


@pytest.mark.parametrize("kind", ["Microsoft's names", "Hugging Face's names"])
@pytest.mark.filterwarnings("ignore:Hugging Face's CvT always computes exact GELU")
def test_weights(timm, images, tmp_path, kind):
    """Published weights have Hugging Face's names; files may have Microsoft's, too."""
    own = cvt.create_model("cvt_13", **TINY).eval()
    randomize(own)
    cvt.save_huggingface(own, tmp_path)
    file = tmp_path / "model.safetensors"
    if kind == "Microsoft's names":
        file = tmp_path / "own.pth"
        torch.save(own.state_dict(), file)
    weights = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(file)}}
    assert torch.equal(timm.create_model("cvt_13", **weights, **TINY).eval()(images), own(images))
    tuned = timm.create_model("cvt_13", num_classes=7, **weights, **TINY).eval()
    assert torch.equal(tuned.forward_features(images), own.forward_features(images))
    assert tuned(images).shape == (2, 7)
    backbone = timm.create_model("cvt_13", features_only=True, **weights, **TINY).eval()
    reference = cvt.create_model("cvt_13", features_only=True, checkpoint=file, **TINY).eval()
    assert all(map(torch.equal, backbone(images), reference(images)))


def test_the_page(timm):
    names = run_blocks(python_blocks(section_of("model.md", "### timm")))
    assert names["model"].num_classes == 10
    assert names["backbone"].feature_info.channels() == [192, 384]
    assert callable(names["transform"])


def test_wrong_arguments(timm):
    with pytest.raises(ValueError, match="global_pool: got 'max', expected one of token, avg"):
        timm.create_model("cvt_13", global_pool="max", **TINY)
    with pytest.raises(ValueError, match=r"out_indices: got \(0, 7\), expected indices of 3"):
        timm.create_model("cvt_13", features_only=True, out_indices=(0, 7), **TINY)
