"""Segmentation from the command line: train, resume, evaluate, export; and commands for classifiers alone."""

import json

import pytest
import torch

from cvt import CvTSegmenter, create_model, read_checkpoint
from cvt.tools.commands import main
from cvt.tools.training.recipe import SEGMENT_OPTIONS
from tests.checks import bad, run


@pytest.fixture
def training(label_maps, tmp_path):
    """Returns the words of ``cvt train`` on the label maps."""
    words = (
        "train",
        "--data",
        label_maps,
        "--output",
        tmp_path / "run",
        "--image-size",
        16,
        "--batch-size",
        8,
    )
    return *words, "--model", "cvt_nano", "--device", "cpu", "--task", "segment", "--epochs", 1


def test_train_and_evaluate(training, label_maps, tmp_path):
    (label_maps / "classes.txt").write_text("sky\nsea\nland\n")
    out, err = run(main, *training)
    assert err == ""
    assert "  mIoU " in out
    assert out.splitlines()[-1].startswith(f"{tmp_path / 'run'}: mIoU ")
    checkpoint = read_checkpoint(tmp_path / "run")
    assert checkpoint.labels == ["sky", "sea", "land"]
    assert checkpoint.card.image_size == 16
    assert isinstance(create_model(checkpoint=tmp_path / "run"), CvTSegmenter)

    figures = tmp_path / "figures.json"
    source = ("--checkpoint", tmp_path / "run", "--device", "cpu")
    (label_maps / "classes.txt").unlink()  # the checkpoint knows the names
    out, err = run(main, "evaluate", *source, "--data", label_maps, "--json", figures)
    assert err == ""
    content = json.loads(figures.read_text())
    log = torch.load(tmp_path / "run" / "best.pth", weights_only=True)["metrics"]
    assert content["miou"] == pytest.approx(log["miou"], rel=1e-6)
    assert content["labels"] == ["sky", "sea", "land"]
    assert content["iou"][1] == pytest.approx(log["iou/sea"], rel=1e-6)
    confusion = torch.tensor(content["confusion"])
    assert content["pixel_accuracy"] == pytest.approx((confusion.diag().sum() / confusion.sum()).item())
    lines = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[2:10])
    assert lines["mIoU"] == f"{content['miou']:.2%}"
    assert any(line.startswith("sea ") and f"{content['iou'][1]:.2%}" in line for line in out.splitlines())

    output = tmp_path / "model.pt2"
    out, _ = run(main, "export", *source[:2], "--format", "pt2", "--output", output)
    assert "(batch, 3, 16, 16) to logits (batch, 3, 16, 16), within" in out


def test_a_backbone_is_tuned(training, tmp_path):
    """The weights of the digits in the package have a head for classes of images."""
    _, err = run(main, *training, "--checkpoint", "digits", "--lr", 1e-9)
    assert "has a head to classify and the model one to segment: the head was not loaded" in err
    tuned, digits = (read_checkpoint(source).tensors for source in (tmp_path / "run", "digits"))
    name = "stage1.blocks.1.mlp.fc1.weight"
    torch.testing.assert_close(tuned[name], digits[name], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("classes", [True, False], ids=["named", "numbered"])
def test_a_broken_label_map_is_skipped(training, label_maps, classes):
    if classes:
        (label_maps / "classes.txt").write_text("sky\nsea\nland\n")
    (label_maps / "val" / "labels" / "1.png").write_bytes(b"no image")
    _, err = run(main, *training, "--corrupt", "skip")
    assert err.count("cvt train: skipped: ") == 1
    assert err.count("cvt train: data: no classes are known of ") == (not classes)


def test_a_training_that_fails_at_once_leaves_no_log(training, label_maps, tmp_path, capsys):
    (label_maps / "classes.txt").write_text("sky\nsea\nland\n")
    for file in (label_maps / "train" / "labels").iterdir():
        file.write_bytes(b"no image")
    assert "is not a readable label map" in bad(capsys, main, *training)
    assert [file.name for file in (tmp_path / "run").iterdir()] == [".lock"]


def test_the_help_has_the_defaults_of_the_task(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    own = text.partition("Defaults with --task segment: ")[2].partition(". ")[0].split(", ")
    assert own == [f"--{name.replace('_', '-')} {value:g}" for name, value in SEGMENT_OPTIONS.items()]
    assert "Defaults with --data digits: --epochs 30, " in text
    assert "class tokens and position_bias (default: 0.05)" in text
