"""A folder of label maps, for tests of segmentation."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def label_maps(tmp_path):
    """Returns a folder of images whose colors tell the labels of their pixels, 0 to 2 or 255."""
    folder = tmp_path / "data"
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 3)):
        for kind in ("images", "labels"):
            (folder / split / kind).mkdir(parents=True)
        for i in range(count):
            labels = np.kron(rng.integers(0, 3, (4, 6)), np.ones((12, 12), int)).astype(np.uint8)
            labels[:12, :12] = 255
            colors = np.stack([labels, np.full_like(labels, 100), labels], axis=-1)
            Image.fromarray(colors * np.array([80, 1, 0], np.uint8)).save(
                folder / split / "images" / f"{i}.png"
            )
            Image.fromarray(labels).save(folder / split / "labels" / f"{i}.png")
    return folder
