"""Small models whose weights tests write and read."""

import dataclasses

import numpy as np
import torch
from PIL import Image

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt.factory import randomize

SMALL = CvTConfig(embed_dims=(8, 16, 24), num_heads=(1, 2, 3), depths=(1, 2, 3), num_classes=10)


def small(seed=0, **overrides):
    model = create_model(SMALL, **overrides)
    randomize(model, seed)
    return model


def two_stages():
    """Returns a configuration with two of the three stages of ``SMALL``, and with exact GELU."""
    stages = len(SMALL.embed_dims)
    is_per_stage = {name: isinstance(v, tuple) and len(v) == stages for name, v in vars(SMALL).items()}
    per_stage = {name: value[1:] for name, value in vars(SMALL).items() if is_per_stage[name]}
    return dataclasses.replace(SMALL, activation="gelu", **per_stage)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def huggingface_twin(**changes):
    from transformers import CvtConfig, CvtForImageClassification

    settings = {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 3], "depth": [1, 2, 3], "num_labels": 10}
    config = CvtConfig(**settings | changes)
    model = CvtForImageClassification(config).eval()
    randomize(model)
    return model


def quantized(model, **settings):
    """Returns a model, quantized on random images."""
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    ck.quantize(model.eval(), images, **settings)
    return model


def save_label_maps(folder):
    """Writes images whose colors tell the labels of their pixels, 0 to 2 or 255, and the label maps."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 3)):
        for kind in ("images", "labels"):
            (folder / split / kind).mkdir(parents=True)
        for i in range(count):
            labels = np.kron(rng.integers(0, 3, (4, 6)), np.ones((12, 12), int)).astype(np.uint8)
            labels[:12, :12] = 255
            colors = np.stack([labels, np.full_like(labels, 100), labels], axis=-1)
            image = Image.fromarray(colors * np.array([80, 1, 0], np.uint8))
            image.save(folder / split / "images" / f"{i}.png")
            Image.fromarray(labels).save(folder / split / "labels" / f"{i}.png")
    return folder
