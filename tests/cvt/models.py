"""Small models whose weights tests write and read."""

import dataclasses

import torch

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
