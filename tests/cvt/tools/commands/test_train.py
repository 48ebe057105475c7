"""``cvt train`` from the command line to a checkpoint that classifies."""

import csv
import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cvt import create_model, read_checkpoint
from cvt.card import ModelCard
from cvt.images import sample_photos
from cvt.tools.commands import main, train
from cvt.tools.datasets import open_dataset
from cvt.tools.training.recipe import DIGITS_OPTIONS, MODELS
from cvt.tools.training.trainer import LAST
from tests.checks import Terminal, bad, python_blocks, run, run_blocks


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Returns the directory of a short run of ``cvt train --data digits``."""
    output = tmp_path_factory.mktemp("digits")
    options = ("--epochs", 4, "--batch-size", 32, "--lr", 6e-3, "--warmup-epochs", 0.5)
    run(main, "train", "--data", "digits", "--output", output, "--device", "cpu", *options)
    return output


@pytest.mark.slow
def test_digits_are_learned(digits):
    log = list(csv.DictReader((digits / "log.csv").read_text().splitlines()))
    assert [row["epoch"] for row in log] == ["1", "2", "3", "4"]
    assert float(log[-1]["top1"]) >= 0.9
    (events,) = digits.glob("events.out.tfevents.*")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = EventAccumulator(str(events)).Reload().Scalars
    assert len(scalars("loss")) == 4 * 44
    assert scalars("top1")[-1].value == pytest.approx(float(log[-1]["top1"]))


def test_the_trained_checkpoint_says_what_it_is(digits):
    checkpoint = read_checkpoint(digits)
    labels = [str(i) for i in range(10)]
    config = dataclasses.replace(MODELS["cvt_nano"], num_classes=10)
    assert checkpoint.card == ModelCard(config, labels, image_size=16, crop_fraction=1.0)
    assert checkpoint.labels == labels
    model = create_model(checkpoint.card.config, checkpoint=checkpoint).eval()
    held_out = open_dataset("digits", "val", 16)
    images, targets = (torch.stack([held_out[i][0] for i in range(360)]), torch.tensor(held_out.labels))
    with torch.no_grad():
        top1 = (model(images).argmax(1) == targets).double().mean()
    best = torch.load(digits / "best.pth", weights_only=True)
    assert top1 == pytest.approx(best["metrics"]["top1"])


@pytest.mark.rest
def test_the_python_of_the_page(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "digits").symlink_to(digits)
    page = Path(__file__).parents[4] / "docs" / "evaluation.md"
    names = run_blocks(python_blocks(page.read_text(encoding="utf-8")))
    assert read_checkpoint("digits.safetensors").card == read_checkpoint(digits).card
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert names["history"][1]["top1"] > 0.5


def test_it_classifies_image_files(capsys, digits, tmp_path):
    held_out = open_dataset("digits", "val", 16)
    files = []
    for i in range(40):
        files.append(tmp_path / f"{i}.png")
        held_out.images[i].resize((8, 8) if i % 2 else (120, 120)).save(files[-1])
    for checkpoint in (digits, digits / "best.pth", digits / LAST):
        out, _ = run(main, "classify", *files, "--checkpoint", checkpoint, "--top", 1)
        answers = [int(line.split()[-1]) for line in out.splitlines()[1::2]]
        assert sum(a == b for a, b in zip(answers, held_out.labels, strict=False)) >= 34
    content = torch.load(digits / "best.pth", weights_only=True)
    content["card"]["labels"].pop()
    torch.save(content, tmp_path / "odd.pth")
    line = bad(capsys, main, "classify", files[0], "--checkpoint", tmp_path / "odd.pth")
    assert "odd.pth: is not of this version of cvt train: got 9 labels for 10 classes" in line


def test_a_bar_and_an_activation(tmp_path, monkeypatch):
    """On a terminal the bar shows the loss."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    options = (
        "--device cpu --batch-size 60 --epochs 1 --warmup-epochs 0 --checkpoint digits --activation gelu"
    )
    assert main(["train", "--data", "digits", "--output", str(tmp_path), *options.split()]) == 0
    drawn = sys.stderr.getvalue()
    assert "epoch 1:   0%|" in drawn
    assert len(set(re.findall(r"loss=(\d\.\d+)", drawn))) == 2  # of 20 steps, and of the last 3
    assert read_checkpoint(tmp_path).card.config.activation == "gelu"


@pytest.mark.parametrize(
    ("given", "warmup"),
    [({"epochs": 1}, 0.5), ({"epochs": 4}, 1.0), ({"epochs": 1, "warmup_epochs": 0}, 0), ({}, 1.0)],
)
def test_a_short_training_has_a_short_warm_up(given, warmup):
    assert train._recipe(DIGITS_OPTIONS, given)["warmup_epochs"] == warmup


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Pieces of scikit-learn's two photographs, in the layout of ImageNet."""
    folder = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for path in sample_photos():
        image = Image.open(path)
        for split, count in (("train", 32), ("val", 8)):
            (folder / split / path.stem).mkdir(parents=True)
            for i in range(count):
                left, top = (int(rng.integers(0, side - 200)) for side in image.size)
                piece = image.crop((left, top, left + 200, top + 200)).resize((48, 40))
                piece.save(folder / split / path.stem / f"{i}.jpg")
    return folder


@pytest.mark.filterwarnings("default:skipped")
def test_from_a_folder_of_photographs_to_a_classified_one(capsys, digits, photographs, tmp_path):
    """Fine-tuned from digits with a new head, with augmentation, workers, EMA, and a file of no image."""
    (photographs / "train" / "china" / "note.jpg").write_text("hello")
    settings = (
        "--device=cpu --image-size=32 --epochs=6 --warmup-epochs=1 --lr=5e-3 --batch-size=16 --workers=1 "
        "--layer-decay=0.8 --ema-decay=0.8 --min-scale=0.3 --drop-path-rate=0.05"
    )
    arguments = ["train", "--data", photographs, "--checkpoint", digits, *settings.split()]
    line = bad(capsys, main, *arguments, "--output", tmp_path / "run")
    assert "china/note.jpg: is not a readable image: expected one of JPEG" in line
    out, err = run(main, *arguments, "--output", tmp_path / "skipped", "--corrupt", "skip")
    head, *skipped = err.splitlines()
    assert "has a head of 10 classes and the model one of 2" in head
    assert re.match(r"cvt train: skipped: .*china/note.jpg: is not a readable image", skipped[0])
    assert out.splitlines()[-1].startswith(f"{tmp_path / 'skipped'}: top-1 ")
    out, _ = run(main, "classify", *sample_photos(), "--checkpoint", tmp_path / "skipped", "--top", 1)
    assert [line.split()[-1] for line in out.splitlines()[1::2]] == ["china", "flower"]


def test_distilled_on_the_command_line_and_resumed(capsys, digits, tmp_path):
    arguments = ("train", "--data", "digits", "--output", tmp_path / "run", "--device", "cpu")
    arguments += ("--teacher", digits, "--epochs", 1, "--warmup-epochs", 0.2, "--no-sync-bn")
    line = bad(capsys, main, *arguments)
    assert "teacher: expected one with distillation soft or hard only, not none" in line
    arguments += ("--distillation", "soft")
    out, err = run(main, *arguments)
    assert err == ""  # no bar where nobody sees it
    line, last = out.splitlines()
    number = r"\d+\.\d{4}"
    expected = (
        rf"epoch 1/1  loss {number}  validation loss {number}  top-1 +\d+\.\d\d%  \d+ images/s  00:00 left"
    )
    assert re.fullmatch(expected, line)
    assert last.startswith(f"{tmp_path / 'run'}: top-1 ")
    assert "exists; go on with --resume" in bad(capsys, main, *arguments)
    assert run(main, *arguments, "--resume")[0] == f"{last}\n"  # nothing is left to do
    line = bad(capsys, main, *arguments, "--resume", "--lr", 1.0)
    assert line.endswith("last.pth was trained with lr 0.005, now 1.0")
    (tmp_path / "run" / LAST).write_bytes(b"hello")
    line = bad(capsys, main, *arguments, "--resume")
    assert "last.pth: is not a file of torch.save, or damaged" in line
