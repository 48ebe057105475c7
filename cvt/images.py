"""Reading of photographs, their transform to the tensors that CvT takes, and class names."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .config import check_images
from .extras import require

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CROP_FRACTION = 0.875
#: From this size on the official evaluation resizes to the square instead of cropping one.
UNCROPPED_SIZE = 384

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


class ImageError(ValueError):
    """A file is not an image that can be used."""


def read_image(path: str | os.PathLike[str]) -> Image.Image:
    """Reads an image file as a person sees it: 8-bit RGB, upright.

    EXIF orientation is applied; grayscale (8 and 16 bits), palette and CMYK are converted; transparency is
    shown on white.

    Raises:
        FileNotFoundError: Nothing is there.
        ImageError: The file is not an image, or is damaged.
    """
    try:
        with Image.open(path) as file:
            # Only the tag that matters: exif_transpose would also rewrite all others and fail on an odd one.
            turn = _UPRIGHT.get(file.getexif().get(_EXIF_ORIENTATION, 1))
            image = file.copy() if turn is None else file.transpose(turn)
            if image.mode.startswith("I;16"):  # grayscale, which convert("RGB") would clip
                image = _to_8_bits(image)
            if image.mode in ("I", "F"):
                raise ImageError(f"{path}: has 32-bit pixels of unknown range, expected 8 or 16 bits")
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
    """Resizes, crops and normalizes an image as the evaluation of Microsoft's CvT does.

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
        ValueError: One out of range; or an :class:`ImageError`: the image is smaller than the crop.
    """
    check_images(image_size, crop_fraction)
    width, height = image.size
    if min(width, height) < image_size and not upscale:
        raise ImageError(f"is {width}×{height} pixels, smaller than the {image_size}×{image_size} crop")
    if crop_fraction is None:
        crop_fraction = CROP_FRACTION if image_size < UNCROPPED_SIZE else 1.0
    if crop_fraction == 1.0:
        image = image.resize((image_size, image_size), Image.Resampling.BICUBIC)
    else:
        shorter = int(image_size / crop_fraction)
        width, height = (int(shorter * side / min(width, height)) for side in (width, height))
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        left, top = (round((side - image_size) / 2) for side in (width, height))
        image = image.crop((left, top, left + image_size, top + image_size))
    return normalize(to_tensor(image) / 255)


def normalize(pixels: Tensor) -> Tensor:
    """Returns pixels (..., 3, H, W) from 0 to 1, less ImageNet's mean, over its standard deviation."""
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
    """Reads and preprocesses image files; the arguments are those of :func:`preprocess`.

    Returns:
        float32 (len(paths), 3, image_size, image_size).

    Raises:
        FileNotFoundError: A file does not exist.
        ImageError: A file is not an image, is damaged, or is smaller than the crop.
    """
    tensors = []
    for path in paths:
        image = read_image(path)
        try:
            tensors.append(preprocess(image, image_size, crop_fraction=crop_fraction, upscale=upscale))
        except ImageError as error:
            raise ImageError(f"{path}: {error}") from None
    return torch.stack(tensors)


def read_labels(path: str | os.PathLike[str], count: int) -> list[str]:
    """Reads class names: one per line, or in a ``.json`` file a list or an object {index: name}.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: The file is not text or JSON of that form, or does not name exactly ``count`` classes.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"labels: {path} does not exist")
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text) if path.suffix == ".json" else text.splitlines()
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"labels: {path} is not {'JSON' if path.suffix == '.json' else 'UTF-8 text'}: {error}"
        ) from error
    if isinstance(content, dict):
        content = [content[key] for key in map(str, range(len(content))) if key in content]
    if not isinstance(content, list) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"labels: {path} has no list of names and no object of index: name")
    if len(content) != count:
        raise ValueError(f"labels: {path} names {len(content)} classes, expected {count}")
    return content


def sample_photos() -> list[Path]:
    """Returns the paths of the two photographs that come with scikit-learn.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    folder = Path(require("sklearn.datasets", "bench").__file__).parent / "images"
    return [folder / "china.jpg", folder / "flower.jpg"]
