"""The Python of the README runs as it stands, and the commands that it names exist."""

import re
from pathlib import Path

import pytest
import torch

import cvt_kernels as ck
from cvt.tools.commands import main
from tests.checks import python_blocks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks(capsys, monkeypatch):
    """They run one after the other, on a machine without a GPU and, but for the tuning, with one."""
    monkeypatch.setattr(ck, "tune", lambda *_: None)
    names = {}
    accelerating, on_a_gpu, training = python_blocks(README)
    exec(accelerating, names)
    assert "blocks fused\n" in capsys.readouterr().out
    assert names["same"] > 0.99
    exec(on_a_gpu, names)
    exec(training, names)
    assert torch.isfinite(names["loss"])


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
    assert len(README.splitlines()) <= 110


def test_the_changes_stay_short():
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 80
