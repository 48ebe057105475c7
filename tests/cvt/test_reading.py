"""Files that anybody may have written: no code of them is run, and what cannot be read is named in a line."""

import json
import os
import pickle
from collections import deque

import pytest
import torch

from cvt import CheckpointError, read_checkpoint
from cvt.checkpoints import save_safetensors
from cvt.reading import load_pickle, read_json


def refused(path, message, read=load_pickle):
    """Checks that a file is refused by an error that names it in one short line."""
    with pytest.raises(CheckpointError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300 + len(str(path))


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(3)}, path)
    return path


# Archives and pickles -------------------------------------------------------------------------------------


def test_archives_that_are_read(weights):
    link = weights.with_name("link.pth")
    link.symlink_to(weights)
    assert torch.equal(load_pickle(link)["a"], torch.arange(1000.0))
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(9)}, weights)
    finally:
        torch.serialization.set_crc32_options(computed)
    assert torch.equal(load_pickle(weights)["a"], torch.ones(9))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:700] + bytes([content[700] ^ 4]) + content[701:], "wrong checksum of "),
        (lambda content: content[:-30], "is not a file of torch.save, or damaged; it begins with"),
        (lambda content: b"", "is not a file of torch.save, or damaged; it begins with b''"),
        (lambda content: pickle.dumps(deque(), 2), "is not a file of torch.save|holds pickled code"),
    ],
)
def test_damaged_files(weights, damage, message):
    weights.write_bytes(damage(weights.read_bytes()))
    refused(weights, message)


@pytest.mark.parametrize("new", [True, False])
def test_no_code_of_a_file_is_run(weights, new):
    class Allocation:
        def __reduce__(self):
            return os.system, ("exit 1",)

    torch.save({"a": torch.ones(2), "b": Allocation()}, weights, _use_new_zipfile_serialization=new)
    refused(weights, r"holds pickled code or objects \(posix.system\)")


# Tensors, and files beside them ---------------------------------------------------------------------------


def test_a_module_in_several_places_is_saved_once(tmp_path):
    shared, path = torch.randn(100, 100), tmp_path / "w.pth"
    torch.save({f"stage0.blocks.{i}.mlp.fc1.weight": shared for i in range(4)}, path)
    checkpoint = read_checkpoint(path)
    assert all(torch.equal(tensor, shared) for tensor in checkpoint.tensors.values())
    save_safetensors(checkpoint, tmp_path / "w.safetensors")


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "config.json"])
def test_pipes_and_devices_are_not_read(tmp_path, name):
    path = tmp_path / name
    os.mkfifo(path)
    place = tmp_path if name == "config.json" else path
    for _ in range(2):
        refused(place, f"{name}: is no regular file", read_checkpoint)
        path.unlink()
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"a": "x" * 1000}), "has 1009 bytes, expected at most 1000"),
        ("9" * 900, "got a JSON int, expected an object"),
        ("[" * 990, "is not JSON"),
        ('{"a": "\xff"}', "is not JSON"),
        ("", "is not JSON"),
        (None, "Permission denied|No such file"),
    ],
)
def test_json_of_absurd_sizes(tmp_path, monkeypatch, text, message):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    monkeypatch.setattr("cvt.reading.MOST_JSON", 1000)
    refused(path, message, read_json)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a\\b", "", ["x"], "x" * 10**5])
def test_an_index_names_no_files_elsewhere(tmp_path, name):
    (tmp_path / "config.json").write_text('{"model_type": "cvt"}')
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "fine.bin", "b": name}}))
    refused(tmp_path, r"names .*, expected a file of weights in the same folder", read_checkpoint)
