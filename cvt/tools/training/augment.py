"""Augmentation of whole batches, on their device, after the random crop of each image.

Mixup and CutMix are our own: kornia draws a λ for each image, for Mixup evenly and without an alpha, and
returns pairs of labels instead of targets.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cvt.extras import require
from cvt.images import normalize

from .recipe import TrainConfig

#: Below this RandAugment's geometry destroys more than it teaches.
RAND_AUGMENT_SIZE = 128


def mixup(images: Tensor, targets: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Mixes lam of each image and target with the one at the batch's other end (Zhang et al. 2018)."""
    return lam * images + (1 - lam) * images.flip(0), lam * targets + (1 - lam) * targets.flip(0)


def cutmix(images: Tensor, targets: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """Copies into each image a box of the one at the batch's other end (Yun et al. 2019)."""
    cut = images.clone()
    cut[..., rows, columns] = images.flip(0)[..., rows, columns]
    lam = 1 - cut[0, 0, rows, columns].numel() / cut[0, 0].numel()
    return cut, lam * targets + (1 - lam) * targets.flip(0)


def cut_side(side: int, lam: float) -> slice:
    """Draws a side of a box that has 1 − lam of the area, around a random center, clipped to the image."""
    half, center = math.sqrt(1 - lam) / 2 * side, torch.rand(()).item() * side
    return slice(round(max(center - half, 0)), round(min(center + half, side)))


class Augment:
    """The transform of batches of uint8 images and labels to normalized images and targets, on their device.

    Color jitter, RandAugment (the same two operations for a whole batch) and erasing are kornia's, imported
    only if one of them is on; ModuleNotFoundError is raised where it is not installed.
    """

    def __init__(self, config: TrainConfig, classes: int, image_size: int):
        self._config, self._classes = config, classes
        self._pixels: nn.Module = nn.Identity()
        self._erase: nn.Module = nn.Identity()
        magnitude, jitter = config.rand_augment, config.color_jitter
        if magnitude and image_size >= RAND_AUGMENT_SIZE:
            self._pixels = require("kornia.augmentation.auto", "train").RandAugment(n=2, m=magnitude)
        elif jitter:
            self._pixels = require("kornia.augmentation", "train").ColorJitter(jitter, jitter, jitter)
        if config.random_erasing:
            erasing = require("kornia.augmentation", "train").RandomErasing
            self._erase = erasing(p=config.random_erasing)

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns images and targets: labels (B,), or with Mixup or CutMix probabilities (B, classes)."""
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
        return cutmix(images, targets, *(cut_side(side, lam) for side in images.shape[2:]))
