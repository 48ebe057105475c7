"""``cvt bench``, as a person runs it."""

import dataclasses
import re

import pytest
import torch

from cvt import PRESETS
from cvt.tools.commands import main
from cvt_kernels.tuning import ceilings

#: What is measured without being asked for, besides Hugging Face's model.
OURS = ("cvt", "accelerate")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Leaves the machine's ceiling out, and seven blocks of CvT-13's last stage: they are as the others."""
    monkeypatch.setitem(ceilings.PRODUCT_SIZE, "cpu", 64)
    monkeypatch.setitem(PRESETS, "cvt_13", dataclasses.replace(PRESETS["cvt_13"], depths=(1, 2, 3)))


def test_bench_compares_on_real_photographs(capsys):
    small = ["--batch-size", "1", "--rounds", "2", "--image-size", "96"]
    assert main(["bench", *small]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("cvt_13, random weights (seed 0), 2 photographs of 96×96, float32 on ")
    (start,) = [i for i, line in enumerate(lines) if line.startswith("batch 1")]
    head, *rows = (re.split(r"  +", line) for line in lines[start : start + 6])
    served = [f"{name}-{'graphed' if torch.cuda.is_available() else 'frozen'}" for name in OURS]
    assert [row[0] for row in rows] == ["hf", *OURS, *served]
    for row in rows:
        told = dict(zip(head, row, strict=True))
        assert float(told["images/s"]) == pytest.approx(1e3 / float(told["ms"]), rel=0.01)
        assert float(told["max |Δ logit|"]) <= float(told["allowed"]) < 1e-4
        assert told["top-5 agreement"] == "10/10"
