"""``cvt explain``: its files, and what it rejects."""

import json

import pytest
import torch

from cvt import CvTConfig, create_model
from cvt.card import ModelCard
from cvt.factory import randomize
from cvt.images import load_images, read_image, sample_photos
from cvt.tools.commands import main
from cvt.tools.explanation import explain

SMALL = CvTConfig(embed_dims=(16, 32, 48), num_heads=(1, 2, 3), depths=(1, 1, 2), num_classes=10)


@pytest.fixture
def trained(tmp_path):
    """Writes a checkpoint as ``cvt train`` does; returns its path and the model."""
    model = create_model(SMALL).eval()
    randomize(model)
    card = ModelCard(model.config, [f"thing {i}" for i in range(10)], 64)
    torch.save({"state_dict": model.state_dict(), "card": card.to_dict()}, tmp_path / "small.pth")
    return tmp_path / "small.pth", model


def test_command(capsys, trained, tmp_path):
    path, model = trained
    photos = [str(photo) for photo in sample_photos()]
    output = tmp_path / "new" / "output"
    assert main(["explain", *photos, "--checkpoint", str(path), "--output", str(output)]) == 0
    out, err = capsys.readouterr()
    names = [f"{photo}.{kind}.png" for photo in ("china", "flower") for kind in ("attention", "rollout")]
    names = sorted([*names, "explain.json"])
    assert out.splitlines() == [str(output / name) for name in names]
    assert sorted(file.name for file in output.iterdir()) == names
    assert err == ""
    images = load_images(photos, 64)
    explanation = explain(model, images)
    content = json.loads((output / "explain.json").read_text())["photos"]
    for i, (photo, entry) in enumerate(zip(photos, content, strict=True)):
        assert entry["photo"] == photo
        best = explanation.logits[i].softmax(-1).max(0)
        first = entry["classes"][0]
        assert (first["index"], first["label"]) == (best.indices.item(), f"thing {best.indices}")
        assert first["probability"] == pytest.approx(best.values.item(), rel=1e-4)
        torch.testing.assert_close(torch.tensor(entry["rollout"]), explanation.rollout[i])
        torch.testing.assert_close(torch.tensor(entry["attention"]), explanation.attention[i].mean(0))
        for block, expected in zip(entry["blocks"], explanation.blocks, strict=True):
            torch.testing.assert_close(torch.tensor(block["distance"]), expected.distance[i])
        for kind in ("attention", "rollout"):
            picture = read_image(output / f"{photo.rsplit('/')[-1][:-4]}.{kind}.png")
            assert picture.size == (1500, 700)
            assert len(picture.getcolors(2**21)) > 1000
