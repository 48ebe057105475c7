"""The methods that huggingface_hub's PyTorchModelHubMixin has too."""

import json

import pytest
import torch

from cvt import CheckpointError, CvT, CvTConfig, create_model
from cvt.factory import randomize
from tests.cvt.models import SMALL, equal, small, two_stages
from tests.processes import run_python

NAME = "someone/small-cvt"
SIZES = {"embed_dims": (8, 16, 24), "num_heads": (1, 2, 3), "num_classes": 10}
#: The first two are those that Hugging Face's CvT can express.
CONFIGS = {
    "quick_gelu": SMALL,
    "two stages": two_stages(),
    "avg": CvTConfig(**SIZES, depths=1, pool="avg", scale="head_dim", drop_path_schedule="depth"),
    "scaled": CvTConfig(**SIZES, depths=1, layer_scale=0.1, embed_norm="batch_layer_norm", stride_kv=1),
    "headless": CvTConfig(**SIZES | {"num_classes": 0}, in_chans=4, activation="gelu_tanh"),
}


def model_of(name):
    model = create_model(CONFIGS[name])
    randomize(model)
    return model.eval()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_directory_rebuilds_exactly_the_model(tmp_path, name):
    model = model_of(name)
    model.save_pretrained(tmp_path)
    back = CvT.from_pretrained(tmp_path)
    assert back.config == model.config
    assert equal(back.state_dict(), model.state_dict())
    assert not back.training
    x = torch.randn(2, model.config.in_chans, 64, 64)
    with torch.inference_mode():
        assert torch.equal(back(x), model(x))
    assert create_model(checkpoint=tmp_path).config == model.config
    content = json.loads((tmp_path / "config.json").read_text())
    assert ("model_type" in content) == (name in ("quick_gelu", "two stages"))  # else transformers refuses
    if name == "scaled":
        with pytest.raises(CheckpointError, match=r"config.json has stride_kv \[1, 1, 1\], this"):
            create_model(checkpoint=tmp_path, stride_kv=2)


def test_labels_and_images_come_along(tmp_path):
    labels = [f"thing {i}" for i in range(10)]
    model_of("avg").save_pretrained(tmp_path / "a", labels=labels, image_size=48, crop_fraction=0.9)
    back = CvT.from_pretrained(tmp_path / "a", drop_path_rate=0.2)
    assert back.config.drop_path_rate == (0.2, 0.2, 0.2)
    assert (back.labels, back.preprocessing) == (labels, (48, 0.9, ()))
    back.save_pretrained(tmp_path / "b")
    again = CvT.from_pretrained(tmp_path / "b")
    assert (again.labels, again.preprocessing) == (back.labels, back.preprocessing)
    with pytest.warns(UserWarning, match="the head was not loaded") as caught:
        assert CvT.from_pretrained(tmp_path / "a", num_classes=3).labels is None
    assert [each.filename for each in caught] == [__file__]


def test_push_and_load(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    model = small()
    address = model.push_to_hub(NAME, private=True, labels=[f"thing {i}" for i in range(10)])
    assert address == f"{hub.address}/{NAME}/commit/{hub.commit(NAME)}"
    files = sorted(path.name for path in (hub.root / NAME).iterdir())
    assert files == ["config.json", "model.safetensors", "preprocessor_config.json"]
    hub.gated.append(NAME)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(CheckpointError, match="Cannot access gated repo"):
        CvT.from_pretrained(NAME)
    back = CvT.from_pretrained(NAME, token=hub.token, revision="v1")
    assert equal(back.state_dict(), model.state_dict())
    assert (back.config, back.labels[3]) == (model.config, "thing 3")
    cached = CvT.from_pretrained(NAME, local_files_only=True, revision="v1")
    assert equal(cached.state_dict(), back.state_dict())
    with pytest.raises(FileNotFoundError, match="Cannot find an appropriate cached snapshot"):
        CvT.from_pretrained("a/b", local_files_only=True)


def test_importing_cvt_imports_neither_library():
    code = "import sys, cvt; print({'huggingface_hub', 'transformers'} & set(sys.modules))"
    assert run_python(code).stdout == "set()\n"


def test_a_directory_that_had_another_model(tmp_path):
    small().save_pretrained(tmp_path, image_size=96)
    model = model_of("headless")  # of four channels, for which there is no preprocessing
    model.save_pretrained(tmp_path)
    assert CvT.from_pretrained(tmp_path).preprocessing is None
    (tmp_path / "best.pth").touch()
    with pytest.raises(ValueError, match=r"has the best.pth of a training, which would be read in place of"):
        model.save_pretrained(tmp_path)
