"""Models of the Hugging Face Hub, from a server on this machine."""

import json
import sys

import pytest
import torch

from cvt import CheckpointError, create_model, read_checkpoint
from cvt.hub import MICROSOFT, PRETRAINED, HubModel, parse
from tests.cvt.models import equal, small
from tests.hub_server import serving
from tests.processes import run_python

NAME = "someone/small-cvt"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("microsoft/cvt-13", ("microsoft/cvt-13", None)),
        ("hf-hub:microsoft/cvt-13", ("microsoft/cvt-13", None)),
        ("a/b@v1.0", ("a/b", "v1.0")),
        ("hf-hub:a/b@refs/pr/1", ("a/b", "refs/pr/1")),
        *((path, None) for path in ("weights/best.pth", "weights/model.safetensors", "./weights/best")),
        *((path, None) for path in ("../best", "/weights/best", "a/b/c", "best", "~/best")),
    ],
)
def test_what_is_a_name(text, expected):
    assert parse(text) == (expected and HubModel(*expected))


def test_names_of_this_package():
    assert set(PRETRAINED.values()) <= set(MICROSOFT)
    with pytest.raises(ValueError, match="checkpoint: got 'hf-hub:cvt', expected hf-hub:owner/name"):
        read_checkpoint("hf-hub:cvt")


def test_a_model_is_fetched_once_and_serves_without_the_hub(hub, monkeypatch):
    model, labels = small(activation="gelu"), [f"thing {i}" for i in range(10)]
    hub.publish(NAME, model, labels=labels, image_size=48)
    checkpoint = read_checkpoint(NAME)
    assert (checkpoint.path, checkpoint.labels) == (NAME, labels)
    assert checkpoint.preprocessing.image_size == 48
    assert equal(checkpoint.tensors, model.state_dict())
    assert len(hub.downloads()) == 3
    hub.requests.clear()
    read_checkpoint(f"{NAME}@v1")
    assert not hub.downloads()
    hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert equal(read_checkpoint(f"hf-hub:{NAME}").tensors, model.state_dict())
    assert not hub.requests


def test_a_model_in_the_cache_serves_while_the_hub_is_down(hub):
    folder = hub.publish(NAME, small())
    (folder / "preprocessor_config.json").unlink()
    first = read_checkpoint(NAME)
    hub.stop()
    assert equal(read_checkpoint(NAME).tensors, first.tensors)
    with pytest.raises(FileNotFoundError, match=r"a/b is no path .*: Got: ConnectError: "):
        read_checkpoint("a/b")


def test_the_environment_is_honored_and_nothing_else_is_written(tmp_path):
    code = "import cvt; print(cvt.read_checkpoint('someone/small-cvt').num_classes)"
    home = tmp_path / "home"
    home.mkdir()
    with serving(tmp_path / "served") as hub:
        hub.publish(NAME, small())
        hub.gated.append(NAME)
        environment = {"HOME": str(home), "HF_HOME": str(tmp_path / "hf")}
        environment |= {"HF_ENDPOINT": hub.address, "HF_TOKEN": hub.token}
        found = run_python(code, **environment)
        assert found.stdout == "10\n", found.stderr
    found = run_python(code, **environment, HF_HUB_OFFLINE="1")
    assert found.stdout == "10\n", found.stderr
    assert not list(home.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"home", "hf", "served"}


@pytest.mark.parametrize("layout", ["pytorch_model.bin", "shards", "both"])
def test_layouts(hub, layout):
    model = small(activation="gelu")
    folder = hub.publish(NAME, model)
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if layout == "shards":
        weights.rename(folder / "model-1-of-1.safetensors")
        index.write_text(json.dumps({"weight_map": {"classifier.bias": "model-1-of-1.safetensors"}}))
    else:
        torch.save(small(seed=1 if layout == "both" else 0).state_dict(), folder / "pytorch_model.bin")
        if layout != "both":
            weights.unlink()
    assert equal(read_checkpoint(NAME).tensors, model.state_dict())
    assert ("pytorch_model.bin" in " ".join(hub.requests)) == (layout == "pytorch_model.bin")
    if layout == "shards":
        index.write_text(json.dumps({"weight_map": {"classifier.weight": "model-2-of-2.safetensors"}}))
        with pytest.raises(CheckpointError, match=r"model-2-of-2.safetensors: is not a safetensors file"):
            read_checkpoint(NAME)


def test_what_the_hub_refuses(hub, monkeypatch):
    folder = hub.publish(NAME, small())

    def refused(name, error, words):
        with pytest.raises(error) as caught:
            read_checkpoint(name)
        message = str(caught.value)
        assert message.startswith(f"checkpoint: {name} is no path here and cannot be loaded from the Hugging")
        assert words in message
        assert "\n" not in message

    refused("a/b", FileNotFoundError, "Repository Not Found")
    refused(f"{NAME}@v9", FileNotFoundError, "Revision Not Found")
    refused("a/b--c", CheckpointError, "Cannot have -- or .. in repo_id")
    hub.gated.append(NAME)
    refused(NAME, CheckpointError, "Cannot access gated repo")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(NAME, CheckpointError, "Cannot access gated repo")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    (folder / "model.safetensors").unlink()
    refused(NAME, CheckpointError, "it has neither model.safetensors nor pytorch_model.bin")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("a/b", FileNotFoundError, "HF_HUB_OFFLINE=0")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(NAME, CheckpointError, "huggingface_hub is not installed")
    with pytest.raises(ModuleNotFoundError, match="huggingface_hub is not installed"):
        small().push_to_hub(NAME)


def test_a_path_wins_over_a_name(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.publish(NAME, small(activation="gelu"))
    (tmp_path / "someone").mkdir()
    torch.save(small(seed=1).state_dict(), NAME)
    assert equal(read_checkpoint(NAME).tensors, small(seed=1).state_dict())
    assert not hub.requests
    assert equal(read_checkpoint(f"hf-hub:{NAME}").tensors, small().state_dict())


def test_the_activation_of_microsofts_weights_and_of_others(hub):
    for name in ("microsoft/cvt-21-384-22k", NAME):
        hub.publish(name, small())
    assert create_model(checkpoint="microsoft/cvt-21-384-22k").config.activation == "quick_gelu"
    with pytest.warns(
        UserWarning, match=rf"{NAME} is .* exact GELU, and so does this one; .*'quick_gelu'$"
    ) as warned:
        assert create_model(checkpoint=NAME).config.activation == "gelu"
    assert [each.filename for each in warned] == [__file__]
    assert create_model(checkpoint=NAME, activation="gelu_tanh").config.activation == "gelu_tanh"
