"""Augmentation of whole batches, on their device: what comes after the random crop of each image."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..extras import require
from ..images import normalize
from .recipe import TrainConfig

#: Below this RandAugment's geometry destroys more than it teaches.
RAND_AUGMENT_SIZE = 128


def mixup(images: Tensor, targets: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Each image and target (Zhang et al. 2018) with 1 − lam of the one at the other end of the batch."""
    return lam * images + (1 - lam) * images.flip(0), lam * targets + (1 - lam) * targets.flip(0)


def cutmix(images: Tensor, targets: Tensor, box: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """The box (top, bottom, left, right) (Yun et al. 2019) from the image at the other end of the batch."""
    top, bottom, left, right = box
    inside = torch.zeros(images.shape[2:], dtype=torch.bool, device=images.device)
    inside[top:bottom, left:right] = True
    lam = 1 - (bottom - top) * (right - left) / inside.numel()
    return torch.where(inside, images.flip(0), images), lam * targets + (1 - lam) * targets.flip(0)


def cut_box(height: int, width: int, lam: float) -> tuple[int, int, int, int]:
    """A box of 1 − lam of the area around a random centre, clipped to the image."""
    half = math.sqrt(1 - lam) / 2
    edges = []
    for side in (height, width):
        centre = torch.rand(()).item() * side
        edges += [round(max(centre - half * side, 0)), round(min(centre + half * side, side))]
    return edges[0], edges[1], edges[2], edges[3]


class Augment:
    """Batches of uint8 images and labels to normalised images and targets, on their device.

    Colour jitter, RandAugment (the same two operations for a whole batch) and erasing are kornia's, imported
    only if one of them is on.

    Raises:
        ModuleNotFoundError: kornia is needed and not installed.
    """

    def __init__(self, config: TrainConfig, classes: int, image_size: int):
        self._config, self._classes = config, classes
        rand_augment = config.rand_augment if image_size >= RAND_AUGMENT_SIZE else 0
        jitter = 0.0 if rand_augment else config.color_jitter
        self._pixels: nn.Module = nn.Identity()
        self._erase: nn.Module = nn.Identity()
        if not (rand_augment or jitter or config.random_erasing):
            return
        augmentation = require("kornia.augmentation", "train")
        if rand_augment:
            self._pixels = require("kornia.augmentation.auto", "train").RandAugment(n=2, m=rand_augment)
        elif jitter:
            self._pixels = augmentation.ColorJitter(jitter, jitter, jitter)
        if config.random_erasing:
            self._erase = augmentation.RandomErasing(p=config.random_erasing)

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Targets are labels (B,), or with Mixup or CutMix probabilities (B, classes)."""
        images = self._erase(normalize(self._pixels(images / 255)))
        alphas = {mixup: self._config.mixup, cutmix: self._config.cutmix}
        chosen = [mix for mix, alpha in alphas.items() if alpha]
        if not chosen:
            return images, labels
        mix = chosen[int(torch.randint(len(chosen), ()))]
        lam = torch.distributions.Beta(alphas[mix], alphas[mix]).sample().item()
        targets = F.one_hot(labels, self._classes).to(images.dtype)
        if mix is mixup:
            return mixup(images, targets, lam)
        height, width = images.shape[2:]
        return cutmix(images, targets, cut_box(height, width, lam))
