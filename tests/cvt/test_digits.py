"""The trained model of digits that comes with the package."""

import dataclasses
import os

import pytest
import torch

from cvt import CheckpointError, create_model, read_checkpoint
from cvt.checkpoints import PACKAGED, save_safetensors
from cvt.tools.commands import main
from cvt.tools.datasets import Batches, open_dataset, save_digits
from cvt.tools.evaluation import evaluate
from cvt.tools.training.recipe import MODELS

DIGITS = PACKAGED["digits"]


def test_the_package_has_a_small_model_that_says_what_it_is():
    assert DIGITS.stat().st_size <= 2**20
    checkpoint = read_checkpoint("digits")
    assert checkpoint.path == str(DIGITS)
    assert checkpoint.labels == [str(i) for i in range(10)]
    card = checkpoint.card
    assert (card.image_size, card.crop_fraction) == (16, 1.0)
    assert card.config == dataclasses.replace(MODELS["cvt_nano"], num_classes=10)


def test_it_knows_digits_that_it_has_not_seen():
    checkpoint = read_checkpoint("digits")
    model = create_model(checkpoint.architecture(), checkpoint=checkpoint)
    held_out = open_dataset("digits", "val", 16)
    assert evaluate(model, Batches(held_out, 360)).top1 >= 0.99


def test_the_commands_know_it_by_name(capsys, tmp_path):
    files = save_digits(tmp_path / "digits")
    assert [file.name for file in files] == [f"{i}.png" for i in range(10)]
    assert main(["classify", *map(str, files), "--checkpoint", "digits", "--top", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[-1] for line in out.splitlines()[1::2]] == [str(i) for i in range(10)]
    assert all(float(line.split()[0].rstrip("%")) > 50 for line in out.splitlines()[1::2])


def test_a_path_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = read_checkpoint("digits")
    (tmp_path / "digits").mkdir()
    with pytest.raises(CheckpointError, match=r"^digits: is a directory with neither config.json nor"):
        read_checkpoint("digits")
    torch.save({"model": checkpoint.tensors}, tmp_path / "digits" / "best.pth")
    assert read_checkpoint("digits").path == os.path.join("digits", "best.pth")


def test_safetensors_keep_the_card(tmp_path):
    checkpoint, path = read_checkpoint("digits"), tmp_path / "copy.safetensors"
    save_safetensors(checkpoint, path, description="a copy")
    copy = read_checkpoint(path)
    assert copy.card == checkpoint.card
    assert copy.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(copy.tensors[name], tensor) for name, tensor in checkpoint.tensors.items())
    save_safetensors(checkpoint._replace(card=None), path)
    assert read_checkpoint(path).card is None
    with pytest.raises(ValueError, match=r"path: got '.*copy.pth', expected a name that ends with .safetens"):
        save_safetensors(checkpoint, tmp_path / "copy.pth")
