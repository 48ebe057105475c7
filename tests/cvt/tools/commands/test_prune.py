"""``cvt prune``: its files and figures, what takes the files, and what it rejects."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from cvt import create_model, read_checkpoint
from cvt.checkpoints import PACKAGED
from cvt.tools.commands import main
from cvt.tools.evaluation import cost
from tests.checks import bad, python_blocks, run, run_blocks, section_of
from tests.cvt.models import small

PAGE = section_of("pruning.md", "## Prune a model's weights")
DIGITS = ["--checkpoint", "digits", "--calibrate", "digits"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Prunes the model of digits; returns the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("pruned")
    files = ["--output", folder / "p.safetensors", "--json", folder / "p.json"]
    return folder, *run(main, "prune", *DIGITS, "--mlp", 0.25, *files)


def test_files_and_figures(digits):
    folder, out, err = digits
    assert err == ""
    assert sorted(file.name for file in folder.iterdir()) == ["p.json", "p.safetensors"]
    content = json.loads((folder / "p.json").read_text())
    before, after = content["before"], content["after"]
    assert (content["held_out_images"], content["mlp"], content["heads"]) == (360, 0.25, 0.0)
    assert (before["hidden_units"], before["heads"]) == ([64, 128], [1, 2])
    assert (after["hidden_units"], after["heads"]) == ([48, 96], [1, 2])
    assert before["top1"] - after["top1"] <= 0.003
    assert before["bytes"] > after["bytes"] == (folder / "p.safetensors").stat().st_size
    models = create_model(checkpoint="digits"), create_model(checkpoint=folder / "p.safetensors")
    for figures, model in zip((before, after), models, strict=True):
        assert (figures["parameters"], figures["multiply_adds"]) == cost(model.config, 16)
        assert figures["images_per_second"] > 0
    lines = out.splitlines()
    transcript = PAGE.partition("$ cvt prune ")[2].partition("```")[0].splitlines()[1:]
    assert lines[0] == f"{folder}/{transcript[0]}"
    assert lines[1:-1] == transcript[1:-1]
    assert [lines[-1].split()[0], transcript[-1].split()[0]] == ["images/s"] * 2


def test_the_file_says_all(digits):
    checkpoint, original = read_checkpoint(digits[0] / "p.safetensors"), read_checkpoint("digits")
    assert checkpoint.card == original.card._replace(config=checkpoint.config)
    assert checkpoint.config.mlp_ratio == (1.5, 1.5)


def test_the_python_of_the_page():
    smaller = run_blocks(python_blocks(PAGE))["smaller"]
    assert smaller(torch.zeros(1, 3, 16, 16)).shape == (1, 10)


def test_without_data(tmp_path):
    small().save_pretrained(tmp_path / "model")
    options = ["--mlp", "0.25", "--image-size", "32", "--batch-size", "1", "--output"]
    for checkpoint, output in (("model", "1.safetensors"), ("1.safetensors", "2.safetensors")):
        output = str(tmp_path / output)
        out, _ = run(main, "prune", "--checkpoint", tmp_path / checkpoint, *options, output)
        assert f"{output}: {tmp_path / checkpoint}, pruned by the magnitude of its weights\n" in out
        assert "top-1" not in out
        assert read_checkpoint(output).labels is None
        assert read_checkpoint(output).preprocessing.image_size == 32
    assert create_model(checkpoint=tmp_path / "2.safetensors").config.mlp_ratio == (2.0, 2.5, 56 / 24)


def test_the_saliency_that_is_chosen(tmp_path):
    out, _ = run(
        main,
        "prune",
        *DIGITS,
        "--saliency",
        "magnitude",
        "--heads",
        0.5,
        "--output",
        tmp_path / "p.safetensors",
    )
    assert "pruned by the magnitude of its weights, measured on 360 held-out" in out


def test_a_packaged_file_is_not_replaced(capsys, tmp_path, monkeypatch):
    packaged = Path(shutil.copy(PACKAGED["digits"], tmp_path))
    monkeypatch.setitem(PACKAGED, "digits", packaged)
    before = packaged.read_bytes()
    arguments = ["prune", "--checkpoint", "digits", "--mlp", "0.5", "--output", packaged]
    assert "expected a file that is no part of --checkpoint" in bad(capsys, main, *arguments)
    assert packaged.read_bytes() == before
