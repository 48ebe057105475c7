"""The Python of the README runs as it stands."""

import re
from pathlib import Path

import torch
from torch import nn

from cvt import create_model, save_huggingface
from cvt.factory import randomize
from tests.upstream import huggingface

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_python_blocks(tmp_path, monkeypatch, recwarn):
    monkeypatch.chdir(tmp_path)
    model = create_model("cvt_13", activation="gelu")
    randomize(model)
    torch.save(model.state_dict(), "CvT-13-224x224-IN-1k.pth")
    save_huggingface(model, "microsoft-cvt-13")
    dim, grid = 64, (6, 8)
    names = {
        "hf_model": huggingface(),
        "images": torch.randn(2, 3, 64, 96),
        "x": torch.randn(2, grid[0] * grid[1], dim),
        "B": 2,
        "C": dim,
        "H": grid[0],
        "W": grid[1],
        "heads": 4,
        "fc": nn.Linear(dim, 4 * dim),
        "weight": torch.ones(dim),
        "bias": torch.zeros(dim),
        "modules": [
            (nn.Conv2d(dim, dim, 3, stride, 1, groups=dim, bias=False), nn.BatchNorm2d(dim))
            for stride in (1, 2, 2)
        ],
    }
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    assert [str(w.message).split(":")[0] for w in recwarn] == [
        "microsoft-cvt-13 has a head of 1000 classes and the model one of 10"
    ]
    assert names["logits"].shape == (2, 1000)
    assert [tuple(m.shape) for m in names["maps"]] == [(2, 64, 16, 24), (2, 192, 8, 12), (2, 384, 4, 6)]
    assert names["z"].shape == (2, 48, 64)
    assert names["w"].shape == (2, 48, 256)
    for override in re.findall(r"`(create_model\(.*?\))`", README):
        assert exec(override, names) is None
