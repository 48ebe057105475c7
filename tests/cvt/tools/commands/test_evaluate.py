"""``cvt evaluate``: its table, its JSON, and what it rejects."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn import metrics
from torch import nn

from cvt import create_model
from cvt.card import ModelCard
from cvt.factory import randomize
from cvt.tools.commands import main
from cvt.tools.commands.evaluate import as_json, report
from cvt.tools.datasets import open_dataset
from cvt.tools.evaluation import Cost, Evaluation
from cvt.tools.training.recipe import MODELS
from tests.checks import bad, section_of

ROOT = Path(__file__).parents[4]


def test_report_and_json():
    confusion = torch.tensor([[3, 0, 1], [0, 0, 0], [0, 0, 4]])
    figures = Evaluation(0.875, 1.0, 0.25, confusion, 12.34, 2**20), Cost(1500000, 2340000000)
    names = ["cat", "dog", "weasel"]
    assert report(*figures, names).splitlines() == [
        "images               8",
        "top-1           87.50%",
        "top-5          100.00%",
        "loss            0.2500",
        "parameters      1.50 M",
        "multiply-adds   2.34 G",
        "images/s          12.3",
        "peak memory      1 MiB",
        "",
        "class   images    right  most often taken for",
        "cat          4   75.00%  weasel (1)",
        "weasel       4  100.00%",
    ]
    content = json.loads(json.dumps(as_json(*figures, names), allow_nan=False))
    assert content["per_class"] == [0.75, None, 1.0]
    assert content["confusion"] == confusion.tolist()
    assert (content["images"], content["multiply_adds"], content["labels"]) == (8, 2340000000, names)
    many = Evaluation(1.0, 1.0, 0.0, torch.eye(30, dtype=torch.int64), None, 2**20)
    told = report(many, figures[1], list(map(str, range(30))))
    assert len(told.splitlines()) == 20
    assert "images/s       too few batches" in told


def save_digits_model(path, labels=tuple("0123456789"), scale=1.0, **settings):
    """Writes a checkpoint as ``cvt train`` does, of a model for digits; returns the model."""
    model = create_model(MODELS["cvt_nano"], num_classes=10, **settings).eval()
    randomize(model)
    model.norm.weight.data.mul_(scale)
    model.head.weight.data.mul_(scale)
    card = ModelCard(model.config, list(labels), 16, 1.0)
    torch.save({"state_dict": model.state_dict(), "card": card.to_dict()}, path)
    return model


@pytest.fixture
def trained(tmp_path):
    """Returns the path of a checkpoint, and its model."""
    return tmp_path / "digits.pth", save_digits_model(tmp_path / "digits.pth")


def test_command_on_digits(capsys, trained, tmp_path):
    path, model = trained
    options = ["--data", "digits", "--checkpoint", str(path)]
    outputs = []
    for batch in ("50", "360"):
        json_file = tmp_path / f"{batch}.json"
        assert main(["evaluate", *options, "--batch-size", batch, "--json", str(json_file)]) == 0
        outputs.append((capsys.readouterr(), json.loads(json_file.read_text())))
    held_out = open_dataset("digits", "val", 16)
    labels = torch.tensor(held_out.labels)
    with torch.no_grad():
        logits = model(torch.stack([held_out[i][0] for i in range(360)]))
    for (out, err), content in outputs:
        assert err == ""
        assert content["images"] == 360
        assert content["top1"] == metrics.accuracy_score(labels, logits.argmax(-1))
        assert content["loss"] == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
        assert content["confusion"] == metrics.confusion_matrix(labels, logits.argmax(-1)).tolist()
        assert content["labels"] == [str(i) for i in range(10)]
        assert f"{content['top1']:.2%}" in out
        assert "digits.pth on digits, 16×16 pixels, fp32 on c" in out
    assert outputs[0][1]["top5"] == outputs[1][1]["top5"]


def test_command_on_a_folder_with_a_file_that_is_no_image(capsys, trained, tmp_path):
    path, _ = trained
    for i in range(10):
        folder = tmp_path / "data" / "val" / str(i)
        folder.mkdir(parents=True)
        Image.new("RGB", (20, 30), (25 * i, 0, 0)).save(folder / "a.png")
    (tmp_path / "data" / "val" / "3" / "b.png").write_text("hello")
    options = ["evaluate", "--data", str(tmp_path / "data"), "--checkpoint", str(path)]
    assert "b.png: is not a readable image" in bad(capsys, main, *options)
    assert main([*options, "--corrupt", "skip", "--precision", "bf16"]) == 0
    out, err = capsys.readouterr()
    assert ["images", "10"] in [line.split() for line in out.splitlines()]
    assert err.startswith("cvt evaluate: skipped: ")
    assert err.count("\n") == 1


def test_the_page_has_the_figures_of_the_package_s_model(capsys):
    page = section_of("evaluation.md", "### With fewer tokens")
    rows = re.findall(r"^\| (none|[0-9.]+|entropy) \| (\S+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for keep, top1, multiply_adds in rows:
        options = [] if keep == "none" else ["--token-keep", keep]
        assert (
            main(["evaluate", "--data", "digits", "--checkpoint", "digits", "--device", "cpu", *options]) == 0
        )
        lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        assert ["top-1", top1] in lines
        assert ["multiply-adds", multiply_adds] in lines
