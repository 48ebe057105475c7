"""Reading of images, their preprocessing for CvT, and class names."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from .card import check_texts
from .config import check_images
from .extras import folder_of
from .huggingface import CROP_FRACTION, IMAGENET_MEAN, IMAGENET_STD, UNCROPPED_SIZE

#: The formats that are read, by Pillow's names. Pillow goes by the content of a file, not by its name, and
#: starts other programs for some formats, as Ghostscript for EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")

_MOST = 2**27  # pixels of a resized image, whose crop is taken: half a gibibyte
_LONGEST = 2**20  # pixels of a side; Pillow's filters take 32 bytes for each, and some places are of 24 bits
_EXIF_ORIENTATION = 0x0112
#: EXIF orientation → what turns the stored picture upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


# Pillow warns of what cameras of 108 megapixels make; of twice as many as it warns of, it raises an error.
# Once and for all threads: to change the filters around each image would be neither.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class ImageError(ValueError):
    """The file is not a usable image."""


@contextlib.contextmanager
def naming_image(name: object) -> Iterator[None]:
    """Prefixes errors about an image with its name; running out of memory is one of them."""
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{name}: {error}") from None
    except MemoryError as error:
        raise ImageError(f"{name}: needs more memory than there is") from error


@contextlib.contextmanager
def open_image(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Yields what Pillow's ``Image.open`` returns; nothing else in this project calls it."""
    try:
        file = Image.open(path, formats=_formats())
    except Image.DecompressionBombError:
        most = 2 * cast(int, Image.MAX_IMAGE_PIXELS)
        raise ImageError(
            f"has more than {most} pixels, the most that Pillow opens: twice PIL.Image.MAX_IMAGE_PIXELS"
        ) from None
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"expected one of {', '.join(_formats())}") from None
    with file:
        if max(file.size) > _LONGEST:
            width, height = file.size
            raise ImageError(f"is {width}×{height} pixels, expected at most {_LONGEST} on each side")
        yield file


@functools.cache
def _formats() -> tuple[str, ...]:
    """Returns the FORMATS that this Pillow knows: AVIF is newer than the others."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """Reads an image file as upright 8-bit RGB.

    EXIF orientation is applied; grayscale (8 and 16 bits), palette and CMYK are converted; transparency is
    shown on white.

    Raises:
        FileNotFoundError: Nothing is there.
        ImageError: The file is not an image, or is damaged.
    """
    try:
        with naming_image(path), open_image(path) as file:
            # Only the tag that matters: exif_transpose would also rewrite all others and fail on an odd one.
            turn = _UPRIGHT.get(file.getexif().get(_EXIF_ORIENTATION, 1))
            image = file.copy() if turn is None else file.transpose(turn)
            if image.mode.startswith("I;16"):  # grayscale, which convert("RGB") would clip
                image = _to_8_bits(image)
            if image.mode in ("I", "F"):
                raise ImageError("has 32-bit pixels of unknown range, expected 8 or 16 bits")
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")
    except FileNotFoundError:
        raise FileNotFoundError(f"image: {path} does not exist") from None
    except ImageError:
        raise
    except Exception as error:  # decoding damaged bytes can raise anything
        raise ImageError(f"{path}: is not a readable image: {error}") from error


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Converts 16-bit grayscale to 8 bits, with alpha where one value stands for transparent."""
    values = np.asarray(image)
    gray = Image.fromarray((values / 257).round().astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is None:
        return gray
    return Image.merge(
        "LA", (gray, Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    )


def preprocess(
    image: Image.Image, image_size: int = 224, *, crop_fraction: float | None = None, upscale: bool = False
) -> Tensor:
    """Resizes, crops and normalizes an image as Microsoft's evaluation of CvT does.

    Below 384 the shorter side is resized to ``image_size / 0.875`` (256 for 224) and the center is cropped;
    from 384 on the whole image is resized to the square. Bicubic; ImageNet's mean and standard deviation.

    Args:
        image: RGB, at least ``image_size`` wide and high.
        image_size: Pixels of each side of the result.
        crop_fraction: In place of 0.875, or of 1 from 384 on; 1 resizes the whole image to the square.
        upscale: Take smaller images too.

    Returns:
        float32 (3, image_size, image_size).

    Raises:
        TypeError: A size or a fraction of the wrong type.
        ValueError: One out of range; or an :class:`ImageError`: the image is smaller than the crop, or would
            take more than half a gibibyte after resizing.
    """
    check_images(image_size, crop_fraction)
    width, height = image.size
    if min(width, height) < image_size and not upscale:
        raise ImageError(f"is {width}×{height} pixels, smaller than the {image_size}×{image_size} crop")
    if crop_fraction is None:
        crop_fraction = CROP_FRACTION if image_size < UNCROPPED_SIZE else 1.0
    if crop_fraction == 1.0:
        resized = [image_size, image_size]
    else:
        shorter = int(image_size / crop_fraction)
        resized = [int(shorter * side / min(image.size)) for side in image.size]
    if resized[0] * max(height, resized[1]) > max(_MOST, image_size**2):  # the width changes first
        raise ImageError(f"is {width}×{height} pixels, too long to be resized to {resized[0]}×{resized[1]}")
    image = image.resize((resized[0], resized[1]), Image.Resampling.BICUBIC)
    left, top = (round((side - image_size) / 2) for side in resized)
    image = image.crop((left, top, left + image_size, top + image_size))
    return normalize(to_tensor(image) / 255)


def normalize(pixels: Tensor) -> Tensor:
    """Normalizes pixels (..., 3, H, W) from 0 to 1 by ImageNet's mean and standard deviation."""
    mean, std = (pixels.new_tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (pixels - mean) / std


def to_tensor(image: Image.Image) -> Tensor:
    """Returns an RGB image as uint8 (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def load_images(
    paths: Sequence[str | os.PathLike[str]],
    image_size: int = 224,
    *,
    crop_fraction: float | None = None,
    upscale: bool = False,
) -> Tensor:
    """Reads and preprocesses image files; the arguments are as for :func:`preprocess`.

    Returns:
        float32 (len(paths), 3, image_size, image_size).

    Raises:
        TypeError: A single path.
        FileNotFoundError: A file does not exist.
        ImageError: A file is not an image, is damaged, or is smaller than the crop or too long.
    """
    if isinstance(paths, str | os.PathLike):
        raise TypeError(f"paths: got {os.fspath(paths)!r}, expected a sequence of paths")
    tensors = []
    for path in paths:
        image = read_image(path)
        with naming_image(path):
            tensors.append(preprocess(image, image_size, crop_fraction=crop_fraction, upscale=upscale))
    return torch.stack(tensors)


def read_labels(path: str | os.PathLike[str], count: int) -> list[str]:
    """Reads class names: one per line, or in a ``.json`` file a list or an object {index: name}.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: The file is of another form, does not name each of ``count`` classes once, or has a name
            that is no text of moderate length.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"labels: {path} does not exist")
    is_json = path.suffix == ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text, object_pairs_hook=_object) if is_json else text.splitlines()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"labels: {path} is not {'JSON' if is_json else 'UTF-8 text'}: {error}") from error
    if isinstance(content, dict):
        keys, expected = set(content), set(map(str, range(count)))
        if keys != expected:
            missing, others = (
                ", ".join(sorted(map(repr, rest))[:3]) or "none"
                for rest in (expected - keys, keys - expected)
            )
            raise ValueError(
                f"labels: {path} has other keys than 0 to {count - 1}, each once: missing are {missing}, "
                f"not expected {others}"
            )
        content = [content[str(i)] for i in range(count)]
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"labels: {path} has no list of names and no object of index: name")
    if len(content) != count:
        raise ValueError(f"labels: {path} names {len(content)} classes, expected {count}")
    check_texts(f"labels of {path}", content)
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON; raises ValueError for a key that stands in it twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("an object has a key twice")
    return content


def sample_photos() -> list[Path]:
    """Returns the paths of the two photographs that come with scikit-learn."""
    folder = folder_of("sklearn", "bench") / "datasets" / "images"
    return [folder / "china.jpg", folder / "flower.jpg"]
