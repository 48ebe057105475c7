"""Data sets of images, and batches of them."""

import itertools
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from cvt.datasets import Batches, ImageDataset, RandomCrop, open_dataset, open_parts
from cvt.images import IMAGENET_MEAN, IMAGENET_STD, ImageError, preprocess, read_image

RED, BLUE = (200, 30, 40), (20, 40, 220)


def two_halves(size=(40, 20)):
    """Returns an image that is red on the left and blue on the right."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image


def near(actual, expected, tolerance):
    return np.abs(np.array(actual, dtype=int) - np.array(expected)).max() <= tolerance


def painted(folder, counts=(5, 4), size=(20, 20)):
    """Makes a data set with as many images of each class as ``counts`` says, each of a gray of its own."""
    for split in ("train", "val"):
        for name, count in zip(("cat", "dog"), counts, strict=True):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("L", size, 100 * (name == "dog") + 10 * i).save(folder / split / name / f"{i}.png")
    return folder


def grays(batches):
    """Returns the gray and the label of every image."""
    return [
        (round((float(image[0, 0, 0]) * 0.229 + 0.485) * 255), label)
        for images, labels in batches
        for image, label in zip(images, labels.tolist(), strict=True)
    ]


ALL = [*((10 * i, 0) for i in range(5)), *((100 + 10 * i, 1) for i in range(4))]


def test_a_folder_of_class_folders(tmp_path):
    painted(tmp_path)
    (tmp_path / "val" / "dog" / ".hidden").write_text("no image")
    dataset = open_dataset(tmp_path, "val", 16)
    assert dataset.classes == ["cat", "dog"]
    assert grays(Batches(dataset, 4)) == ALL
    assert grays(Batches(dataset, 4, workers=2)) == ALL


def test_digits_are_scikit_learns():
    digits = load_digits()
    train, val = (open_dataset("digits", split, 8) for split in ("train", "val"))
    assert (len(train), len(val)) == (1437, 360)
    assert train.classes == [str(i) for i in range(10)]
    assert val.labels == digits.target[::5].tolist()
    assert {*train.labels} == {*val.labels} == {*range(10)}
    image, label = val[3]
    assert label == digits.target[15]
    pixels = (
        image * torch.tensor(IMAGENET_STD).view(3, 1, 1) + torch.tensor(IMAGENET_MEAN).view(3, 1, 1)
    ) * 16
    np.testing.assert_allclose(pixels.numpy(), np.stack([digits.images[15]] * 3), atol=0.05)
    held_out = {image.tobytes() for image in val.images}
    assert sum(image.tobytes() in held_out for image in train.images) == 0


def test_parts_of_data_sets(tmp_path):
    assert [len(part) for part in open_parts("digits", 8)] == [1437, 360]
    assert all(part.crop_fraction == 1 for part in open_parts("digits", 8))
    painted(tmp_path)
    fitted, held_out = open_parts(tmp_path / "val", 16)  # of five and four images
    assert grays(Batches(held_out, 4)) == [ALL[0], ALL[5]]
    assert grays(Batches(fitted, 4)) == [*ALL[1:5], *ALL[6:]]
    fitted, held_out = open_parts(tmp_path, 16, crop_fraction=0.5)
    assert [part.images[0].parts[-3] for part in (fitted, held_out)] == ["train", "val"]
    assert fitted.crop_fraction == held_out.crop_fraction == 0.5
    (tmp_path / "val").rename(tmp_path / "whole")
    with pytest.raises(FileNotFoundError, match="val does not exist, expected train/ and val/"):
        open_parts(tmp_path, 16)


def test_small_images_are_enlarged_in_data_sets_only(tmp_path):
    dataset = open_dataset(painted(tmp_path), "val", 64)
    assert dataset[0][0].shape == (3, 64, 64)
    image = read_image(tmp_path / "val" / "cat" / "0.png")
    with pytest.raises(ImageError, match="smaller than the 64×64 crop"):
        preprocess(image, 64)
    assert torch.equal(dataset[0][0], preprocess(image, 64, upscale=True))


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
    assert (left >= 0).all() and (top >= 0).all() and (right <= 300).all() and (bottom <= 200).all()  # noqa: PT018
    area, ratio = width * height / 60000, width / height
    assert 0.195 < area.min() < 0.22 < 0.95 < area.max() <= 1
    assert 0.65 < ratio.min() < 0.69 < 1.45 < ratio.max() < 1.53
    assert left.min() == top.min() == 0
    assert abs((left + right).mean() / 2 - 150) < 5 > abs((top + bottom).mean() / 2 - 100)
    # Nothing of a very long image fits: the largest central crop.
    assert RandomCrop(min_scale=1.0).box(1000, 10, rng) == (493, 0, 506, 10)
    assert RandomCrop(min_scale=1.0, ratio=1.0).box(10, 10, rng) == (0, 0, 10, 10)


def test_random_crops_are_resized_and_flipped():
    rng, whole = np.random.default_rng(0), two_halves((16, 16))
    crops = [RandomCrop(min_scale=1.0, ratio=1.0, flip=0.5)(whole, 8, rng) for _ in range(100)]
    assert all(crop.shape == (3, 8, 8) for crop in crops)
    red = [near(crop[:, 4, 1].numpy(), RED, 12) for crop in crops]
    assert all(
        near(crop[:, 4, 6].numpy(), BLUE if is_red else RED, 12)
        for crop, is_red in zip(crops, red, strict=True)
    )
    assert 30 < sum(red) < 70
    assert all(near(RandomCrop(1.0, 1.0, 0.0)(whole, 8, rng)[:, 4, 1].numpy(), RED, 12) for _ in range(20))


@pytest.mark.parametrize("workers", [0, 1])
def test_corrupt_images_are_an_error_or_reported(tmp_path, workers):
    painted(tmp_path)
    (tmp_path / "val" / "cat" / "2.png").write_text("hello")
    dataset = open_dataset(tmp_path, "val", 16)
    with pytest.raises(ImageError, match=r"val/cat/2.png: is not a readable image: expected one of JPEG"):
        list(Batches(dataset, 2, workers=workers))
    with pytest.warns(UserWarning, match=r"^skipped: .*val/cat/2.png: is not a readable image") as caught:
        assert grays(Batches(dataset, 2, workers=workers, corrupt="skip")) == [x for x in ALL if x != (20, 0)]
    assert len(caught) == 1


def test_a_batch_without_any_image(tmp_path):
    painted(tmp_path)
    for path in (tmp_path / "val" / "cat").iterdir():
        path.unlink()
    (tmp_path / "val" / "cat" / "0.png").write_text("hello")
    with pytest.warns(UserWarning, match="skipped"):
        assert grays(Batches(open_dataset(tmp_path, "val", 16), 1, corrupt="skip")) == ALL[5:]
    train = open_dataset(tmp_path, "val", 16, random_crop=RandomCrop())
    with (
        pytest.warns(UserWarning, match="skipped"),
        pytest.raises(ImageError, match="data: a whole batch of images cannot be used"),
    ):
        list(Batches(train, 1, shuffle=True, corrupt="skip"))


def test_bad_data_sets(tmp_path, monkeypatch):
    def fails(message, folder, error=ValueError, split="train"):
        with pytest.raises(error, match=message):
            open_dataset(folder, split, 16)

    fails(r"none/train does not exist, expected train/ and val/", tmp_path / "none", FileNotFoundError)
    fails(r"split: got 'test', expected one of train, val", "digits", split="test")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    fails(r"data: .*train/cat has no images", tmp_path)
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "cat" / "0.png")
    fails(r"data: .*train has 1 class folders, expected at least two", tmp_path)
    image = Image.new("RGB", (8, 8))
    for labels, message in (
        ([0, 2], "got 2, expected 0 to 1"),
        ([-1, 0], "got -1"),
        ([0], "got 1 for 2 images"),
    ):
        with pytest.raises(ValueError, match=f"labels: {message}"):
            ImageDataset([image] * 2, labels, ["a", "b"], 8)
    with pytest.raises(ValueError, match=r"classes: got \['a'\], expected at least two"):
        ImageDataset([image], [0], ["a"], 8)
    with pytest.raises(ValueError, match="corrupt: got 'ignore', expected 'error' or 'skip'"):
        Batches(ImageDataset([image], [0], ["a", "b"], 8), 1, corrupt="ignore")
    for error, message, options in (
        (ValueError, "batch_size: got 0, expected an integer of at least 1", {"batch_size": 0}),
        (ValueError, "batch_size: got 1048577, expected", {"batch_size": 2**20 + 1}),
        (TypeError, "seed: got 'a', expected an integer", {"seed": "a"}),
        (ValueError, "seed: got 9223372036854775808, expected", {"seed": 2**63}),
    ):
        with pytest.raises(error, match=message):
            Batches(ImageDataset([image], [0], ["a", "b"], 8), **{"batch_size": 1, **options})
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    fails(r"scikit-learn is not installed; .*'\.\[train\]'", "digits", ModuleNotFoundError)
