"""Augmentation of batches, pixel by pixel."""

import sys

import pytest
import torch

from cvt.tools.training.augment import Augment, cut_side, cutmix, mixup
from cvt.tools.training.recipe import DIGITS_OPTIONS, TrainConfig
from tests.cvt.tools.training.test_trainer import batch

OFF = {"mixup": 0.0, "cutmix": 0.0, "color_jitter": 0.0, "rand_augment": 0, "random_erasing": 0.0}


def test_mixup_and_cutmix_pixel_by_pixel():
    images, targets = torch.randn(3, 2, 4, 5), torch.eye(3)
    mixed, soft = mixup(images, targets, 0.3)
    cut, cut_soft = cutmix(images, targets, slice(1, 3), slice(2, 5))
    for i in range(3):
        torch.testing.assert_close(mixed[i], 0.3 * images[i] + 0.7 * images[2 - i])
        torch.testing.assert_close(soft[i], 0.3 * targets[i] + 0.7 * targets[2 - i])
        torch.testing.assert_close(cut_soft[i], 0.7 * targets[i] + 0.3 * targets[2 - i])  # 6 of 20 pixels
        for y in range(4):
            for x in range(5):
                source = 2 - i if y in (1, 2) and x in (2, 3, 4) else i
                assert torch.equal(cut[i, :, y, x], images[source, :, y, x])


def test_boxes_of_cutmix_cover_what_is_left_of_lam():
    for lam in (0.0, 0.4, 0.9, 1.0):
        sides = [(cut_side(40, lam), cut_side(60, lam)) for _ in range(300)]
        boxes = [(rows.start, rows.stop, columns.start, columns.stop) for rows, columns in sides]
        assert all(0 <= t <= b <= 40 and 0 <= left <= r <= 60 for t, b, left, r in boxes)
        largest = max((b - t) * (r - left) for t, b, left, r in boxes)
        assert largest == pytest.approx(2400 * (1 - lam), rel=0.1)
        assert lam in (0.0, 1.0) or min((b - t) * (r - left) for t, b, left, r in boxes) < largest


def test_augmentation_is_what_its_options_say():
    images, labels = batch()
    normalized, same = Augment(TrainConfig(**OFF), 3, 16)(images, labels)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (images[2, :, 4, 5] / 255 - mean) / std
    torch.testing.assert_close(normalized[2, :, 4, 5], expected)
    assert same is labels
    erased, _ = Augment(TrainConfig(**{**OFF, "random_erasing": 1.0}), 3, 16)(images, labels)
    changed = (erased != normalized).any(dim=1)
    assert all(0.01 < part < 0.4 for part in changed.float().mean(dim=(1, 2)))
    assert (erased[changed[:, None].expand_as(erased)] == 0).all()
    jittered, _ = Augment(TrainConfig(**{**OFF, "color_jitter": 0.4}), 3, 16)(images, labels)
    assert ((jittered - normalized).abs().amax(dim=(1, 2, 3)) > 0.1).all()
    for options in ({"mixup": 1.0}, {"cutmix": 1.0}):
        mixed, targets = Augment(TrainConfig(**{**OFF, **options}), 3, 16)(images, labels)
        assert not torch.equal(mixed, normalized)
        torch.testing.assert_close(targets.sum(1), torch.ones(8))
        # The same part of the other image in pixels as in targets.
        lam = (targets[0, labels[0]]).item()
        if options == {"cutmix": 1.0} and labels[0] != labels[7]:
            own = (mixed[0] == normalized[0]).all(dim=0).float().mean().item()
            assert own == pytest.approx(lam, abs=1e-6)


def test_rand_augment_is_off_below_128_and_reproducible():
    config = TrainConfig(**{**OFF, "rand_augment": 9})
    images, labels = batch()
    small, _ = Augment(config, 3, 127)(images, labels)
    assert torch.equal(small, Augment(TrainConfig(**OFF), 3, 127)(images, labels)[0])
    large = Augment(config, 3, 128)
    images = images.repeat_interleave(8, 2).repeat_interleave(8, 3)
    outs = []
    for seed in (0, 0, 1, 2):
        torch.manual_seed(seed)
        outs.append(large(images, labels)[0])
    assert torch.equal(outs[0], outs[1])
    assert not (torch.equal(outs[0], outs[2]) and torch.equal(outs[0], outs[3]))


def test_kornia_is_needed_only_for_what_it_does(monkeypatch):
    monkeypatch.setitem(sys.modules, "kornia.augmentation", None)
    Augment(TrainConfig(**DIGITS_OPTIONS), 10, 16)
    with pytest.raises(
        ModuleNotFoundError, match=r"kornia is not installed; pip install kornia, .*'\.\[train\]'"
    ):
        Augment(TrainConfig(), 10, 16)
