"""``cvt bench``, as a person runs it."""

import dataclasses

import pytest
import torch

from cvt import PRESETS, create_model
from cvt.card import ModelCard
from cvt.factory import randomize
from cvt.tools.commands import main
from cvt.tools.training.recipe import MODELS
from cvt_kernels.tuning import clock

#: What is measured without being asked for, besides Hugging Face's model.
OURS = ("cvt", "accelerate")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Leaves the machine's ceiling out, and seven blocks of CvT-13's last stage: they are as the others."""
    monkeypatch.setitem(clock.PRODUCT_SIZE, "cpu", 64)
    monkeypatch.setitem(PRESETS, "cvt_13", dataclasses.replace(PRESETS["cvt_13"], depths=(1, 2, 3)))


def test_bench_compares_on_real_photographs(capsys):
    small = ["--batch-size", "1", "--rounds", "2", "--image-size", "96"]
    assert main(["bench", *small]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cvt_13, random weights (seed 0), 96×96, float32 on ")
    starts = [i for i, line in enumerate(lines) if line.startswith(("batch", "parity"))]
    speed, parity = ([line.split() for line in lines[start + 1 : start + 6]] for start in starts)
    served = [f"{name}-{'graphed' if torch.cuda.is_available() else 'frozen'}" for name in OURS]
    assert [row[0] for row in speed] == [row[0] for row in parity] == ["hf", *OURS, *served]
    # Images per second: the median of the rounds, the slowest and the fastest of them.
    rates = [[float(cell) for cell in row[1:4]] for row in speed]
    assert all(0 < slowest <= median <= fastest for median, slowest, fastest in rates)
    for row, (_, slowest, fastest) in zip(speed[1:], rates[1:], strict=True):
        times_as_fast = float(row[7])  # as Hugging Face's model in the same rounds
        assert slowest / rates[0][2] - 0.01 < times_as_fast < fastest / rates[0][1] + 0.01
    assert all(float(row[1]) <= float(row[2]) < 1e-4 < 1 < float(row[3]) for row in parity)
    assert all(row[4] == "10/10" for row in parity)


@pytest.mark.rest
def test_bench_of_a_trained_model(capsys, tmp_path, photos):
    model = create_model(MODELS["cvt_nano"], num_classes=10)
    randomize(model)
    card = ModelCard(model.config, [str(i) for i in range(10)], 16, 1.0)
    path = tmp_path / "digits.pth"
    torch.save({"state_dict": model.state_dict(), "card": card.to_dict()}, path)
    arguments = ["bench", "--checkpoint", str(path), "--images", photos[0], "--batch-size", "1"]
    assert main([*arguments, "--rounds", "1", "--image-size", "32"]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith(f"a CvT of cvt train, {path}, 32×32, float32")
    assert out.splitlines()[-1].split()[-1] == "5/5"
