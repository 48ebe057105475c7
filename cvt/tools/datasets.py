"""Data sets of labeled images, and batches of them."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from cvt.card import check_names
from cvt.config import MOST_IMAGES, MOST_SEED
from cvt.extras import folder_of
from cvt.images import ImageError, naming_image, preprocess, read_image, to_tensor
from cvt_kernels import checks
from cvt_kernels.messages import stacklevel_of_caller

SPLITS = ("train", "val")
DIGITS = "digits"
_HELD_OUT = 5  # of so many images one, where a data set does not say which

Corrupt = Literal["error", "skip"]
_Image = str | os.PathLike[str] | Image.Image


@dataclass(frozen=True)
class RandomCrop:
    """A resized crop (Szegedy et al. 2015), then a flip, of photographs of any size.

    The crop has at least ``min_scale`` of the image's area, a width over its height between ``1 / ratio`` and
    ``ratio``, and ``flip`` is the probability of a horizontal flip.
    """

    min_scale: float = 0.08
    ratio: float = 4 / 3
    flip: float = 0.5

    def box(self, width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Draws the crop: left, top, right and bottom; the largest central one if ten draws do not fit."""
        for _ in range(10):
            area = width * height * rng.uniform(self.min_scale, 1)
            ratio = math.exp(rng.uniform(-math.log(self.ratio), math.log(self.ratio)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = (int(rng.integers(0, free, endpoint=True)) for free in (width - w, height - h))
                return left, top, left + w, top + h
        w = min(width, round(height * self.ratio))
        h = min(height, round(width * self.ratio))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h

    def __call__(
        self, images: Sequence[Image.Image], image_size: int, rng: np.random.Generator
    ) -> list[Image.Image]:
        """Crops images of one size alike: RGB by bicubic interpolation, others by the nearest pixel."""
        box = self.box(*images[0].size, rng)
        sizes, ways = (image_size, image_size), {"RGB": Image.Resampling.BICUBIC}
        cropped = [
            image.resize(sizes, ways.get(image.mode, Image.Resampling.NEAREST), box=box) for image in images
        ]
        if rng.random() < self.flip:
            cropped = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in cropped]
        return cropped


class ImageDataset(Dataset["tuple[Tensor, int | Tensor] | Exception"]):
    """Labeled images as tensors, for training or evaluation.

    ``images`` are paths, or images in memory; ``labels`` their classes, indices into ``classes``, the names.
    Tensors have ``image_size`` pixels a side, and are made by :func:`preprocess` with ``crop_fraction``, of
    small images too. In its place ``random_crop`` depends only on ``seed``, ``epoch`` and index of the image,
    the first two of which :class:`Batches` sets. An unusable image is returned as an exception, which
    :class:`Batches` raises or skips.

    Raises:
        TypeError: A class has a name that is no string.
        ValueError: There is no image, fewer than two classes, or a name that no card of a model can have.
    """

    def __init__(
        self,
        images: Sequence[_Image],
        labels: Sequence[Any],
        classes: Sequence[str],
        image_size: int,
        *,
        crop_fraction: float | None = None,
        random_crop: RandomCrop | None = None,
    ):
        if len(classes) < 2:
            raise ValueError(f"classes: got {list(classes)}, expected at least two")
        check_names("classes", list(classes), len(classes))
        if len(images) != len(labels) or not images:
            raise ValueError(f"labels: got {len(labels)} for {len(images)} images, expected one for each")
        self.images, self.labels, self.classes = images, labels, list(classes)
        self.image_size, self.crop_fraction, self.random_crop = image_size, crop_fraction, random_crop
        self.epoch = self.seed = 0

    def part(self, indices: Sequence[int]) -> ImageDataset:
        """Returns a data set of some of the images, in the order of their indices."""
        images, labels = ([all_of[i] for i in indices] for all_of in (self.images, self.labels))
        options: dict[str, Any] = {"crop_fraction": self.crop_fraction, "random_crop": self.random_crop}
        return type(self)(images, labels, self.classes, self.image_size, **options)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor] | Exception:
        image = self.images[index]
        try:
            image = image if isinstance(image, Image.Image) else read_image(image)
            return self._sample(index, image)
        except (ImageError, OSError) as error:
            return error

    def _sample(self, index: int, image: Image.Image) -> tuple[Tensor, int | Tensor]:
        """Returns the tensor of an image, and its label."""
        with naming_image(self._name(index)):
            if self.random_crop is None:
                tensor = preprocess(image, self.image_size, crop_fraction=self.crop_fraction, upscale=True)
            else:
                tensor = to_tensor(self.random_crop([image], self.image_size, self.rng(index))[0])
        return tensor, self.labels[index]

    def _name(self, index: int) -> str:
        """Returns what errors call an image: its path, or its index."""
        image = self.images[index]
        return f"images[{index}]" if isinstance(image, Image.Image) else str(image)

    def rng(self, index: int) -> np.random.Generator:
        """Returns the generator of the random numbers of an image in this epoch."""
        return np.random.default_rng((self.seed, self.epoch, index))


def open_dataset(
    source: str | os.PathLike[str],
    split: Literal["train", "val"],
    image_size: int,
    *,
    crop_fraction: float | None = None,
    random_crop: RandomCrop | None = None,
) -> ImageDataset:
    """Opens the digits of scikit-learn, or a folder of images, as a data set.

    The source is ``"digits"``, the 1797 scanned digits of scikit-learn, where every fifth is held out, or a
    folder with ``train/CLASS/IMAGE`` and ``val/CLASS/IMAGE``. The rest is as in :class:`ImageDataset`. Digits
    are never cropped in evaluation.

    Raises:
        ModuleNotFoundError: scikit-learn is needed and not installed.
        FileNotFoundError: There is no such folder.
        ValueError: A wrong split, an empty class folder, or fewer than two.
    """
    checks.check_choice("split", split, SPLITS)
    if source == DIGITS:
        return ImageDataset(*_digits(split), image_size, crop_fraction=1.0, random_crop=random_crop)
    options: dict[str, Any] = {"crop_fraction": crop_fraction, "random_crop": random_crop}
    return ImageDataset(*_image_folder(Path(source, split)), image_size, **options)


def open_parts(
    source: str | os.PathLike[str], image_size: int, *, crop_fraction: float | None = None
) -> tuple[ImageDataset, ImageDataset]:
    """Opens the images for calibration and the held-out images, both preprocessed as for evaluation.

    The arguments and errors are those of :func:`open_dataset`. A folder may also have ``CLASS/IMAGE``, where
    every fifth image of each class, sorted by name, is held out. ValueError is also raised if none is left,
    or the parts are of different classes.
    """
    if source == DIGITS or any(Path(source, split).is_dir() for split in SPLITS):
        fitted = open_dataset(source, "train", image_size, crop_fraction=crop_fraction)
        held_out = open_dataset(source, "val", image_size, crop_fraction=crop_fraction)
        if fitted.classes != held_out.classes:
            raise ValueError(f"data: {source} has train/ and val/ of different classes")
        return fitted, held_out
    whole = ImageDataset(*_image_folder(Path(source)), image_size, crop_fraction=crop_fraction)
    groups = (group for _, group in itertools.groupby(whole.labels))
    is_held_out = [i % _HELD_OUT == 0 for group in groups for i, _ in enumerate(group)]
    if all(is_held_out):
        raise ValueError(f"data: {source} has no images besides those that are held out")
    fitted, held_out = (
        whole.part([i for i, held in enumerate(is_held_out) if held == wanted]) for wanted in (False, True)
    )
    return fitted, held_out


def _digits(split: str) -> tuple[Sequence[Image.Image], list[int], list[str]]:
    # As load_digits() of sklearn.datasets reads them, whose import takes as long as many a command.
    file = folder_of("sklearn", "train") / "datasets" / "data" / "digits.csv.gz"
    rows = np.loadtxt(file, delimiter=",", dtype=np.int64)  # 64 pixels, 0 to 16, white on black; the digit
    chosen = rows[(np.arange(len(rows)) % _HELD_OUT == 0) == (split == "val")]
    pixels = (chosen[:, :-1].reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    images = [Image.fromarray(image).convert("RGB") for image in pixels]
    return images, chosen[:, -1].tolist(), [str(digit) for digit in range(10)]


def save_digits(folder: str | os.PathLike[str]) -> list[Path]:
    """Writes the last held-out digit of each class as ``0.png`` to ``9.png``, and returns the files."""
    images, labels, classes = _digits("val")
    last = dict(zip(labels, images, strict=True))
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = [Path(folder, f"{name}.png") for name in classes]
    for label, file in enumerate(files):
        last[label].resize((128, 128), Image.Resampling.BICUBIC).save(file)  # as large as people like
    return files


# Folders --------------------------------------------------------------------------------------------------


def _image_folder(folder: Path) -> tuple[Sequence[_Image], list[int], list[str]]:
    """Lists the images of each class folder, sorted by name, as torchvision's ``ImageFolder`` does."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"data: {folder} does not exist, expected train/ and val/ with a folder per class"
        )
    images: list[Path] = []
    labels: list[int] = []
    classes = sorted(path for path in folder.glob("[!.]*") if path.is_dir())
    for label, path in enumerate(classes):
        if not (files := list_files(path)):
            raise ValueError(f"data: {path} has no images")
        images += files
        labels += [label] * len(files)
    if len(classes) < 2:
        raise ValueError(f"data: {folder} has {len(classes)} class folders, expected at least two")
    return images, labels, [path.name for path in classes]


def list_files(folder: Path) -> list[Path]:
    """Lists the files of a folder and its subfolders, sorted by name, without hidden ones; follows links.

    Files that cannot be read are among them; OSError is raised for a subfolder that cannot be listed.
    """

    def refused(error: OSError) -> None:
        raise error

    files: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True, onerror=refused):
        folders[:] = [name for name in folders if name[0] != "."]
        files += [Path(place, name) for name in names if name[0] != "."]
    return sorted(files)


# Batches --------------------------------------------------------------------------------------------------


class Batches:
    """The batches of one process's share of a data set.

    With ``shuffle`` the order depends on seed and epoch only, every process gets as many images, and an
    incomplete last batch is dropped. Otherwise every image comes exactly once.

    A batch has ``batch_size`` images of this process, which is number ``rank`` of ``world_size``. Order and
    crops follow ``seed`` and epoch, which are set in the data set. ``workers`` are processes that decode
    images; 0 decodes in this one. ``corrupt="error"`` raises for an unusable file, ``"skip"`` leaves it out
    with a warning.

    Raises:
        ValueError: A wrong argument, or fewer images than a batch with ``shuffle``.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        corrupt: Corrupt = "error",
    ):
        checks.check_choice("corrupt", corrupt, get_args(Corrupt))
        checks.check_int("batch_size", batch_size, 1, MOST_IMAGES)
        checks.check_int("seed", seed, 0, MOST_SEED)
        if shuffle and len(dataset) < batch_size * world_size:
            raise ValueError(
                f"batch_size: {batch_size * world_size} images at a time are more than the data set has, "
                f"{len(dataset)}"
            )
        self.dataset, self._corrupt = dataset, corrupt
        dataset.seed = seed
        share: Dataset[object] = dataset
        self._sampler: DistributedSampler[object] | None = None
        if shuffle:
            self._sampler = DistributedSampler(dataset, world_size, rank, seed=seed, drop_last=True)
        elif world_size > 1:
            share = Subset(dataset, range(rank, len(dataset), world_size))
        self._loader = DataLoader(
            share,
            batch_size,
            sampler=self._sampler,
            drop_last=shuffle,
            num_workers=workers,
            collate_fn=_collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else the loader draws its own seed from the global one
        )

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which the order and the crops of the next iteration depend on."""
        self.dataset.epoch = epoch
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields images (B, 3, H, W), uint8 if cropped at random, else normalized, and labels (B, …)."""
        for images, labels, errors in self._loader:
            for error in errors:
                if self._corrupt == "error":
                    raise error
                warnings.warn(f"skipped: {error}", stacklevel=stacklevel_of_caller())
            if len(labels):
                yield images, labels
            elif self._sampler is not None:  # the other processes would wait for this one for ever
                raise ImageError("data: a whole batch of images cannot be used")


def _collate(
    samples: list[tuple[Tensor, int | Tensor] | Exception],
) -> tuple[Tensor, Tensor, list[Exception]]:
    good = [sample for sample in samples if not isinstance(sample, Exception)]
    errors = [sample for sample in samples if isinstance(sample, Exception)]
    images = torch.stack([image for image, _ in good]) if good else torch.empty(0)
    labels = torch.stack([torch.as_tensor(label) for _, label in good]) if good else torch.empty(0)
    return images, labels, errors
