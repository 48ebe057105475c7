"""``cvt evaluate --check``."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from cvt.tools.commands import check, main
from tests import upstream

PROCESSORS = {
    upstream.pvt: ("PvtImageProcessor", {"size": {"height": 70, "width": 70}}),
    upstream.glpn: ("GLPNImageProcessor", {}),
}


@pytest.fixture
def photo(tmp_path):
    noise = torch.randint(256, (64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(noise.numpy()).save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


def saved(make, folder):
    """Saves a model with what prepares its images; returns the directory."""
    make().save_pretrained(folder)
    kind, settings = PROCESSORS[make]
    content = json.dumps({"image_processor_type": kind, **settings})
    Path(folder, "preprocessor_config.json").write_text(content, encoding="utf-8")
    return str(folder)


def checked(folder, *options):
    """Runs the command; returns its exit code and its JSON."""
    report = Path(folder).parent / "report.json"
    code = main(["evaluate", "--check", "--checkpoint", str(folder), "--json", str(report), *options])
    return code, json.loads(report.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "make",
    [upstream.pvt, pytest.param(upstream.glpn, marks=pytest.mark.rest)],
    ids=lambda make: make.__name__,
)
def test_a_model_against_published_values(make, tmp_path, photo, monkeypatch, capsys):
    folder = saved(make, tmp_path / "model")
    code, report = checked(folder, "--photo", photo)
    assert code == 0
    assert not report["expected"]
    assert "as accurate as it was" in capsys.readouterr().out

    values = report["first_values"]
    monkeypatch.setitem(check.FIRST_VALUES, folder, tuple(values))
    assert checked(folder, "--photo", photo)[0] == 0
    if make is not upstream.glpn:  # this small one takes multiples of 64 pixels
        assert not checked(folder)[1]["expected"]  # of random numbers nothing is known

    monkeypatch.setitem(check.FIRST_VALUES, folder, (values[0] + 0.1, *values[1:]))
    code, report = checked(folder, "--photo", photo)
    assert code == 1
    assert len(report["failures"]) == 1
    assert f"expected the first values {values[0] + 0.1:.4f}" in report["failures"][0]


def test_damaged_weights(tmp_path):
    model = upstream.pvt()
    model.pvt.encoder.block[0][0].layer_norm_1.weight.data[3] = torch.nan
    state = model.state_dict()
    del state["classifier.bias"]
    model.save_pretrained(tmp_path / "model", state_dict=state | {"other": torch.ones(2)})
    code, report = checked(tmp_path / "model")
    assert code == 1
    assert report["missing"] == ["classifier.bias"]
    assert report["unused"] == ["other"]
    assert [key.endswith("layer_norm_1.weight") for key in report["not_finite"]] == [True]
