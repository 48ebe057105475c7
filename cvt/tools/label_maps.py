"""Data sets with a class per pixel, and a synthetic one of scanned digits on photos."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cvt.config import LARGEST_IMAGE
from cvt.images import ImageError, naming_image, open_image, preprocess, read_image, sample_photos, to_tensor
from cvt.segmentation import IGNORED
from cvt_kernels import checks
from cvt_kernels.messages import stacklevel_of_caller

from .datasets import DIGITS, SPLITS, Corrupt, ImageDataset, RandomCrop, list_files, open_dataset

_INDEX_MODES = ("L", "P")  # of Pillow, whose pixels are numbers of 8 bits: gray, and with a palette
# What Pillow multiplies gray pixels of fewer bits by, so that the largest becomes 255, by its raw mode.
_STRETCHED = {"1": 255, "L;2": 85, "L;4": 17}
_SUFFIX = ".png"
_CLASSES = "classes.txt"
_SMALLEST_SCENE = 16
_LAYOUT = "train/images/NAME.jpg, train/labels/NAME.png, and the same in val/"


class LabelMapDataset(ImageDataset):
    """Images with label maps as tensors, for training or evaluating a segmenter.

    A label map is as large as its image; its pixels are indices of ``classes``, or 255 for those that are
    ignored. A random crop is the same for both. Without it, both are resized to the square as a whole.

    The arguments are as of :class:`ImageDataset`, with files of images and of label maps, gray or with a
    palette. Labels are int64 (image_size, image_size). ValueError is also raised for more than 255 classes.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **{"crop_fraction": 1.0, **options})
        if (count := len(self.classes)) > IGNORED:
            raise ValueError(f"classes: got {count}, expected at most {IGNORED}; {IGNORED} is no class")

    def _sample(self, index: int, image: Image.Image) -> tuple[Tensor, Tensor]:
        label_map = self._label_map(self.labels[index], image.size)
        size = self.image_size
        with naming_image(self._name(index)):
            if self.random_crop is None:
                pixels = preprocess(image, size, crop_fraction=1.0, upscale=True)
                label_map = label_map.resize((size, size), Image.Resampling.NEAREST)
            else:
                image, label_map = self.random_crop([image, label_map], size, self.rng(index))
                pixels = to_tensor(image)
        return pixels, torch.from_numpy(np.array(label_map)).long()

    def _label_map(self, path: Path, size: tuple[int, int]) -> Image.Image:
        """Reads the label map of an image of that size."""
        label_map = read_label_map(path)
        if label_map.size != size:
            theirs, ours = (f"{width}×{height}" for width, height in (size, label_map.size))
            raise ImageError(f"{path}: has {ours} pixels, its image {theirs}")
        count = len(self.classes)
        wrong = [label for label in _labels_in(label_map) if count <= label != IGNORED]
        if wrong:
            raise ImageError(
                f"{path}: has label {wrong[0]}, expected 0 to {count - 1} for {count} classes, or {IGNORED}, "
                "which is ignored"
            )
        return label_map


def read_label_map(path: str | os.PathLike[str]) -> Image.Image:
    """Reads an image file whose pixels are class indices of at most 8 bits."""
    try:
        with naming_image(path), open_image(path) as file:
            stretched = _STRETCHED.get(str(file.tile[0][3])) if file.format == "PNG" else None
            label_map = file.copy()
        if stretched is not None:
            label_map = label_map.convert("L").point([value // stretched for value in range(256)])
    except ImageError:
        raise
    except Exception as error:  # decoding damaged bytes can raise anything
        raise ImageError(f"{path}: is not a readable label map: {error}") from error
    if label_map.mode not in _INDEX_MODES:
        raise ImageError(
            f"{path}: has pixels of mode {label_map.mode}, expected a class index of at most 8 bits for "
            "each, in gray or with a palette"
        )
    return label_map


def _labels_in(label_map: Image.Image) -> list[int]:
    """Returns the labels that a map has, the smallest first."""
    return [label for label, count in enumerate(label_map.histogram()[:256]) if count]


# Folders --------------------------------------------------------------------------------------------------


def open_label_maps(
    source: str | os.PathLike[str],
    split: Literal["train", "val"],
    image_size: int,
    *,
    classes: Sequence[str] | None = None,
    random_crop: RandomCrop | None = None,
    corrupt: Corrupt = "error",
) -> LabelMapDataset:
    """Opens a folder of images and label maps as a data set.

    The folder has ``train/images/NAME.jpg``, ``train/labels/NAME.png`` and the same in ``val/``. Its
    ``classes.txt``, if it has one, names a class in each line; without it ``classes`` does, or None for
    numbers up to the largest in all label maps, which are all read for that: for one that cannot be read
    ``corrupt="error"`` raises, ``"skip"`` warns. The rest is as in :class:`LabelMapDataset`.

    Raises:
        FileNotFoundError: There is no such folder, or an image has no label map.
        ValueError: A wrong split, no images, fewer than two classes, or an :class:`ImageError`.
    """
    checks.check_choice("split", split, SPLITS)
    source = Path(source)
    images, labels = _files(source / split)
    file = source / _CLASSES
    if file.is_file():
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        classes = [line.strip() for line in lines if line.strip()]
    elif classes is None:
        classes = _numbered(source, corrupt)
    return LabelMapDataset(images, labels, classes, image_size, random_crop=random_crop)


def has_label_maps(source: str | os.PathLike[str], split: Literal["train", "val"]) -> bool:
    """Returns whether a split of a folder is one that :func:`open_label_maps` takes."""
    try:
        _files(Path(source, split))
    except (OSError, ValueError):
        return False
    return True


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Lists the images of a folder, sorted by name, and the label map of each."""
    if not (folder / "images").is_dir():
        raise FileNotFoundError(f"data: {folder / 'images'} does not exist, expected {_LAYOUT}")
    images = list_files(folder / "images")
    if not images:
        raise ValueError(f"data: {folder / 'images'} has no images")
    labels = [folder / "labels" / f"{path.stem}{_SUFFIX}" for path in images]
    for image, label_map in zip(images, labels, strict=True):
        if not label_map.is_file():
            raise FileNotFoundError(f"data: {image} has no label map, expected {label_map}")
    return images, labels


def _numbered(source: Path, corrupt: Corrupt) -> list[str]:
    """Returns a name for each class up to the largest in the label maps of a folder."""
    largest = 0
    for file in sorted(source.glob(f"*/labels/[!.]*{_SUFFIX}")):
        try:
            labels = _labels_in(read_label_map(file))
        except ImageError as error:
            if corrupt == "error":
                raise
            warnings.warn(f"data: no classes are known of {error}", stacklevel=stacklevel_of_caller())
        else:
            largest = max([largest, *(label for label in labels if label != IGNORED)])
    return [f"class {label}" for label in range(largest + 1)]


# Scenes of digits -----------------------------------------------------------------------------------------


def save_digit_scenes(
    folder: str | os.PathLike[str],
    *,
    train: int = 256,
    val: int = 64,
    image_size: int = 64,
    seed: int = 0,
) -> Path:
    """Writes scanned digits on photographs, with their label maps, in the layout of :func:`open_label_maps`.

    The photographs are the two of scikit-learn, and validation has digits that training has not. Label 0 is
    the photograph, 1 to 10 are the ink of 0 to 9. The folder is made if it does not exist, and returned.
    ``train`` and ``val`` are numbers of images of ``image_size`` pixels a side, each with three digits at
    most. The same seed makes the same images.
    """
    for name, count in (("train", train), ("val", val)):
        checks.check_int(name, count, 1)
    checks.check_int("image_size", image_size, _SMALLEST_SCENE, LARGEST_IMAGE)
    photos = [read_image(path) for path in sample_photos()]
    rng = np.random.default_rng(seed)
    for split, count in (("train", train), ("val", val)):
        digits = open_dataset(DIGITS, "train" if split == "train" else "val", image_size)
        images, labels = (Path(folder, split, name) for name in ("images", "labels"))
        images.mkdir(parents=True, exist_ok=True)
        labels.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            photo = photos[i % len(photos)]
            side = int(rng.integers(photo.height // 3, photo.height * 2 // 3))
            left, top = (int(rng.integers(0, size - side)) for size in photo.size)
            box = (left, top, left + side, top + side)
            background = photo.resize((image_size, image_size), Image.Resampling.BICUBIC, box=box)
            image, label_map = _scene(background, digits, rng)
            image.save(images / f"{i:05}.jpg", quality=95)
            label_map.save(labels / f"{i:05}{_SUFFIX}")
    names = "\n".join(["photograph", *digits.classes])
    Path(folder, _CLASSES).write_text(f"{names}\n", encoding="utf-8")
    return Path(folder)


def _scene(
    image: Image.Image, digits: ImageDataset, rng: np.random.Generator
) -> tuple[Image.Image, Image.Image]:
    """Returns an image with up to three digits on it, and its label map."""
    size = image.width
    label_map = Image.new("L", image.size, 0)
    for _ in range(int(rng.integers(1, 4))):
        chosen = int(rng.integers(len(digits)))
        side = int(rng.integers(size * 3 // 8, size * 5 // 8))
        place = int(rng.integers(size - side)), int(rng.integers(size - side))
        drawn: Any = digits.images[chosen]
        ink = drawn.convert("L").resize((side, side), Image.Resampling.BICUBIC)
        image.paste(tuple(int(n) for n in rng.integers(160, 256, 3)), place, ink)
        label_map.paste(digits.labels[chosen] + 1, place, ink.point(lambda value: 255 * (value > 127)))
    return image, label_map
