"""The Python of the README runs as it stands, and the commands that it names exist."""

import re
from pathlib import Path

import pytest
import torch

import cvt_kernels as ck
from cvt import create_model
from cvt.factory import randomize
from cvt.tools.commands import main
from tests.checks import python_blocks
from tests.upstream import huggingface

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks(capsys, hub):
    official = create_model("cvt_13")
    randomize(official)
    hub.publish("microsoft/cvt-13", official)
    names = {"model": huggingface(), "images": torch.randn(2, 3, 64, 96)}
    accelerating, reporting, loading = python_blocks(README)
    exec(accelerating, names)
    assert any(row.fused for row in ck.coverage(names["model"]))
    exec(reporting, names)
    out = capsys.readouterr().out
    assert "blocks fused\n" in out
    assert out.endswith("as accurate as it was\n")
    assert not any(row.fused for row in ck.coverage(names["model"]))  # restored
    exec(loading, names)
    assert names["logits"].shape == (2, 1000)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`cvt ([a-z]+)", README))))
def test_commands(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: cvt {command}" in capsys.readouterr().out


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\bmake ([a-z]+)", README))))
def test_make_targets(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_it_stays_short():
    assert len(README.splitlines()) <= 120
