"""Data sets of images, folders in which some cannot be used, and batches."""

import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from cvt.images import IMAGENET_MEAN, IMAGENET_STD, ImageError, preprocess, read_image, to_tensor
from cvt.tools.datasets import Batches, ImageDataset, RandomCrop, open_dataset, open_parts

#: The gray and the label of every image of ``folder``.
ALL = [*((10 * i, 0) for i in range(5)), *((100 + 10 * i, 1) for i in range(4))]


@pytest.fixture
def folder(tmp_path):
    """Makes a data set of two classes, five and four images of a gray of their own."""
    for split in ("train", "val"):
        for gray, label in ALL:
            place = tmp_path / split / ("cat", "dog")[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.new("L", (20, 20), gray).save(place / f"{gray % 100 // 10}.png")
    return tmp_path


def grays(batches):
    """Returns the gray and the label of every image."""
    return [
        (round((float(image[0, 0, 0]) * 0.229 + 0.485) * 255), label)
        for images, labels in batches
        for image, label in zip(images, labels.tolist(), strict=True)
    ]


def test_a_folder_of_class_folders(folder):
    (folder / "val" / "dog" / ".hidden").write_text("no image")
    dataset = open_dataset(folder, "val", 64)
    assert dataset.classes == ["cat", "dog"]
    assert grays(Batches(dataset, 4)) == ALL
    assert grays(Batches(dataset, 4, workers=2)) == ALL
    image = read_image(folder / "val" / "cat" / "0.png")
    with pytest.raises(ImageError, match="smaller than the 64×64 crop"):
        preprocess(image, 64)
    assert torch.equal(dataset[0][0], preprocess(image, 64, upscale=True))


def test_digits_are_scikit_learns():
    digits = load_digits()
    train, val = (open_dataset("digits", split, 8) for split in ("train", "val"))
    assert (len(train), len(val)) == (1437, 360)
    assert train.classes == [str(i) for i in range(10)]
    assert val.labels == digits.target[::5].tolist()
    assert {*train.labels} == {*val.labels} == {*range(10)}
    image, label = val[3]
    assert label == digits.target[15]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    pixels = (image * std + mean) * 16
    np.testing.assert_allclose(pixels.numpy(), np.stack([digits.images[15]] * 3), atol=0.05)
    held_out = {image.tobytes() for image in val.images}
    assert sum(image.tobytes() in held_out for image in train.images) == 0


def test_parts_of_data_sets(folder):
    assert [(len(part), part.crop_fraction) for part in open_parts("digits", 8)] == [(1437, 1), (360, 1)]
    fitted, held_out = open_parts(folder / "val", 16)
    assert grays(Batches(held_out, 4)) == [ALL[0], ALL[5]]
    assert grays(Batches(fitted, 4)) == [*ALL[1:5], *ALL[6:]]
    fitted, held_out = open_parts(folder, 16, crop_fraction=0.5)
    assert [part.images[0].parts[-3] for part in (fitted, held_out)] == ["train", "val"]
    assert fitted.crop_fraction == held_out.crop_fraction == 0.5
    (folder / "val").rename(folder / "whole")
    with pytest.raises(FileNotFoundError, match="val does not exist, expected train/ and val/"):
        open_parts(folder, 16)


# Batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_of_processes(world_size):
    """Each image comes once in evaluation; in training, the processes' n-th batches are the joined n-th."""
    images = [Image.new("RGB", (8, 8), (i, i, i)) for i in range(50)]
    labels = [i % 2 for i in range(50)]
    val = ImageDataset(images, labels, ["a", "b"], 8)
    options = {"world_size": world_size}
    shares = [grays(Batches(val, 4, rank=rank, **options)) for rank in range(world_size)]
    assert sorted(itertools.chain(*shares)) == [(i, i % 2) for i in range(50)]

    def epoch(number, rank, world_size, seed=0):
        train = ImageDataset(images, labels, ["a", "b"], 8, random_crop=RandomCrop())
        batches = Batches(train, 12 // world_size, shuffle=True, seed=seed, rank=rank, world_size=world_size)
        batches.set_epoch(number)
        assert len(batches) == 4
        return [images[:, 0, 0, 0].tolist() for images, _ in batches]

    joined = epoch(1, 0, 1)
    parts = [epoch(1, rank, world_size) for rank in range(world_size)]
    for n in range(4):
        assert sorted(itertools.chain(*(part[n] for part in parts))) == sorted(joined[n])
    assert len({x for batch in joined for x in batch}) == 48
    assert joined == epoch(1, 0, 1)
    assert joined != epoch(2, 0, 1)
    assert joined != epoch(1, 0, 1, seed=1)


def test_random_crops_depend_on_seed_epoch_and_index_only():
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)) for _ in range(12)]

    def crops(seed=0, epoch=0, **options):
        dataset = ImageDataset(images, [0, 1] * 6, ["a", "b"], 16, random_crop=RandomCrop())
        batches = Batches(dataset, 4, seed=seed, **options)
        batches.set_epoch(epoch)
        return torch.cat([images for images, _ in batches])

    first = crops()
    assert first.dtype == torch.uint8
    assert torch.equal(first, crops(workers=2))
    assert torch.equal(first[1::2], crops(rank=1, world_size=2))
    assert not torch.equal(first, crops(epoch=1))
    assert not torch.equal(first, crops(seed=1))


def test_boxes_of_random_crops():
    crop, rng = RandomCrop(min_scale=0.2, ratio=1.5), np.random.default_rng(0)
    boxes = np.array([crop.box(300, 200, rng) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    width, height = right - left, bottom - top
    assert 0 == left.min() == top.min() and right.max() <= 300 and bottom.max() <= 200  # noqa: PT018
    area, ratio = width * height / 60000, width / height
    assert 0.195 < area.min() < 0.22 < 0.95 < area.max() <= 1
    assert 0.65 < ratio.min() < 0.69 < 1.45 < ratio.max() < 1.53
    assert abs((left + right).mean() / 2 - 150) < 5 > abs((top + bottom).mean() / 2 - 100)
    # Nothing of a very long image fits: the largest central crop.
    assert RandomCrop(min_scale=1.0).box(1000, 10, rng) == (493, 0, 506, 10)
    assert RandomCrop(min_scale=1.0, ratio=1.0).box(10, 10, rng) == (0, 0, 10, 10)


def test_random_crops_are_resized_and_flipped():
    rng, halves = np.random.default_rng(0), Image.new("RGB", (16, 16))
    halves.paste((255, 255, 255), (8, 0, 16, 16))
    crops = [to_tensor(RandomCrop(min_scale=1.0, ratio=1.0)([halves], 8, rng)[0]) for _ in range(100)]
    sides = [(int(crop[0, 4, 1] > 128), int(crop[0, 4, 6] > 128)) for crop in crops]
    assert crops[0].shape == (3, 8, 8)
    assert {*sides} == {(0, 1), (1, 0)}
    assert 30 < sides.count((1, 0)) < 70
    unflipped = [to_tensor(RandomCrop(1.0, 1.0, 0.0)([halves], 8, rng)[0]) for _ in range(20)]
    assert all(crop[0, 4, 1] < 128 for crop in unflipped)


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_images_are_an_error_or_reported(folder, workers):
    (folder / "val" / "cat" / "2.png").write_text("hello")
    dataset = open_dataset(folder, "val", 16)
    with pytest.raises(ImageError, match=r"val/cat/2.png: is not a readable image"):
        list(Batches(dataset, 2, workers=workers))
    with pytest.warns(UserWarning, match=r"^skipped: .*val/cat/2.png: is not a readable image") as caught:
        assert grays(Batches(dataset, 2, workers=workers, corrupt="skip")) == [x for x in ALL if x != (20, 0)]
    assert len(caught) == 1


def test_a_batch_without_any_image(folder):
    for path in (folder / "val" / "cat").iterdir():
        path.write_text("hello")
    with pytest.warns(UserWarning, match="skipped"):
        assert grays(Batches(open_dataset(folder, "val", 16), 1, corrupt="skip")) == ALL[5:]
    train = open_dataset(folder, "val", 16, random_crop=RandomCrop())
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(ImageError, match="data: a whole batch of images cannot be used"),
    ):
        list(Batches(train, 1, shuffle=True, corrupt="skip"))


# Folders --------------------------------------------------------------------------------------------------


def test_links_are_followed_and_hidden_files_left_out(folder):
    cat = folder / "val" / "cat"
    (folder / "more" / "deep").mkdir(parents=True)
    Image.new("L", (20, 20)).save(folder / "more" / "deep" / "9.png")
    (cat / "linked").symlink_to(folder / "more")
    (cat / ".hidden").symlink_to(folder / "nowhere")
    (folder / "val" / "fox").symlink_to(folder / "train" / "dog")
    dataset = open_dataset(folder, "val", 16)
    assert dataset.classes == ["cat", "dog", "fox"]
    assert [path.name for path in dataset.images[:6]] == [f"{i}.png" for i in (0, 1, 2, 3, 4, 9)]
    assert dataset.labels == [0] * 6 + [1] * 4 + [2] * 4


def test_a_folder_that_cannot_be_listed_is_an_error(folder, monkeypatch):
    (folder / "val" / "cat" / "private").mkdir()
    scandir = os.scandir

    def refusing(path):
        if Path(path).name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match=r"Permission denied: .*val/cat/private"):
        open_dataset(folder, "val", 16)


# Wrong arguments ------------------------------------------------------------------------------------------

ONE = Image.new("RGB", (8, 8))


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "labels: got 2 for 1 images", {"labels": [0, 1]}),
        (ValueError, r"classes: got \['a'\], expected at least two", {"classes": ["a"]}),
        (ValueError, "corrupt: got 'ignore', expected one of error, skip", {"corrupt": "ignore"}),
        (ValueError, "batch_size: got 0", {"batch_size": 0}),
        (ValueError, "batch_size: got 1048577", {"batch_size": 2**20 + 1}),
        (ValueError, "batch_size: 2 images at a time are more than", {"batch_size": 2, "shuffle": True}),
        (TypeError, "seed: got 'a', expected an integer", {"seed": "a"}),
        (ValueError, "seed: got 9223372036854775808, expected", {"seed": 2**63}),
    ],
)
def test_wrong_arguments(error, message, options):
    labels, classes = options.pop("labels", [0]), options.pop("classes", ["a", "b"])
    with pytest.raises(error, match=message):
        Batches(ImageDataset([ONE], labels, classes, 8), **{"batch_size": 1, **options})


def test_bad_data_sets(tmp_path, monkeypatch):
    def fails(message, folder, error=ValueError, **options):
        with pytest.raises(error, match=message):
            open_dataset(folder, **{"split": "train", "image_size": 16, **options})

    fails(r"none/train does not exist, expected train/ and val/", tmp_path / "none", FileNotFoundError)
    fails(r"split: got 'test', expected one of train, val", "digits", split="test")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    fails(r"data: .*train/cat has no images", tmp_path)
    ONE.save(tmp_path / "train" / "cat" / "0.png")
    fails(r"data: .*train has 1 class folders, expected at least two", tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    fails(r"scikit-learn is not installed; .*'\.\[train\]'", "digits", ModuleNotFoundError)
