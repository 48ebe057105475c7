"""The models of hubconf.py, as torch.hub loads them from a folder."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import cvt
from tests.checks import python_blocks, run_blocks, section_of
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
TINY = {"embed_dims": (16, 32, 48), "num_heads": (1, 2, 3), "depths": 1}


@pytest.fixture
def hubconf():
    """Returns the names that hubconf.py defines."""
    return runpy.run_path(str(ROOT / "hubconf.py"))


def test_its_public_functions_are_the_presets(hubconf):
    functions = [name for name, value in hubconf.items() if callable(value) and not name.startswith("_")]
    assert sorted(functions) == sorted(cvt.PRESETS)


@pytest.mark.parametrize("name", sorted(cvt.PRESETS))
def test_every_preset_can_be_loaded(name, monkeypatch):
    model = torch.hub.load(str(ROOT), name, source="local", num_classes=10, **TINY)
    assert isinstance(model, cvt.CvT)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)
    monkeypatch.setattr(cvt, "create_model", lambda *arguments, **options: (arguments, options))
    loaded = torch.hub.load(str(ROOT), name, source="local", pretrained=True, activation="gelu")
    assert loaded == ((name,), {"pretrained": True, "activation": "gelu"})


def test_the_page(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = run_blocks(python_blocks(section_of("model.md", "### torch.hub")))
    assert names["model"].num_classes == 10
    assert names["backbone"].feature_info.channels() == [64, 192, 384]


def test_dependencies_are_those_of_the_project(hubconf):
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, flags=re.DOTALL | re.MULTILINE)[1]
    needed = set(re.findall(r'^ +"([a-z]+)>=[\d.]+",$', listed, flags=re.MULTILINE))  # those without a marker
    assert {{"PIL": "pillow"}.get(name, name) for name in hubconf["dependencies"]} == needed


def test_without_the_extension():
    """A copy of the repository, which is what torch.hub makes, has no compiled extension."""
    code = f"""
import sys
import torch
sys.modules["cvt_kernels._C"] = None
model = torch.hub.load({str(ROOT)!r}, "cvt_13", source="local", num_classes=10, **{TINY!r}).eval()
with torch.inference_mode():
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)
import cvt_kernels as ck
try:
    ck.use_backend("cpu")
    ck.gelu(torch.randn(2, 8))
except ck.BackendUnavailable as error:
    print(error)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert "gelu: backend 'cpu' is unavailable" in result.stdout
