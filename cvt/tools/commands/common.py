"""The arguments, the loading of models and the output that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from cvt import config
from cvt.checkpoints import Checkpoint, read_checkpoint
from cvt.factory import create_model
from cvt.hub import PRETRAINED
from cvt.huggingface import Preprocessing
from cvt.images import load_images, read_labels
from cvt.model import CvT
from cvt.segmentation import CvTSegmenter
from cvt_kernels.messages import printable

from ..datasets import DIGITS, Batches, Corrupt, ImageDataset, RandomCrop, open_dataset, open_parts
from ..label_maps import has_label_maps, open_label_maps
from .paths import STDOUT, InputPath

# Arguments ------------------------------------------------------------------------------------------------


def integer(least: int, most: int) -> Callable[[str], int]:
    """Returns the ``type`` of an argument of argparse: an integer within bounds."""
    kind = f"a positive integer of at most {most}" if least == 1 else f"an integer from {least} to {most}"

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"got {text!r:.40}, expected {kind}")
        return number

    return parse


positive_int = integer(1, 10**9)
image_size = integer(1, config.LARGEST_IMAGE)
batch_size = integer(1, config.MOST_IMAGES)


def token_keep(text: str) -> config.TokenKeep | tuple[config.TokenKeep, ...]:
    """Parses an argument of argparse for the field ``token_keep`` of :class:`CvTConfig`, which checks it."""
    try:
        values = tuple("entropy" if part == "entropy" else float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a fraction, entropy, or several with commas between"
        ) from error
    return cast(Any, values if len(values) > 1 else values[0])


#: The help of ``--checkpoint``.
CHECKPOINT = (
    "weights to load: an official .pth, a .safetensors file, a directory written by Hugging Face or cvt "
    "train, owner/name on the Hub, or digits (a small bundled model)"
)
# The arguments that several commands have: their help, and the rest.
_ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "photos": ("image file (JPEG, PNG, WebP, …)", {"nargs": "+", "type": InputPath, "metavar": "PHOTO"}),
    "--checkpoint": (CHECKPOINT, {"type": InputPath, "required": True}),
    "--model": ("architecture (default: detected from the checkpoint)", {"choices": tuple(config.PRESETS)}),
    "--activation": (
        "activation of the MLPs (default: quick_gelu for the published weights, gelu for other models on the "
        "Hub)",
        {"choices": tuple(config.ACTIVATIONS)},
    ),
    "--image-size": (
        "side of the input images in pixels (default: as trained, or else 224, 384 for cvt_w24); no center "
        "crop from 384 up",
        {"type": image_size},
    ),
    "--token-keep": (
        "prune unimportant tokens in the last stage: fraction to keep, such as 0.7, or entropy to decide per "
        "image; comma-separated for one per block (default: as in the checkpoint, or keep all)",
        {"type": token_keep, "metavar": "KEEP"},
    ),
    "--labels": (
        "file of class names: one per line, or JSON: a list or {index: name}",
        {"type": InputPath, "metavar": "FILE"},
    ),
    "--batch-size": ("images per batch", {"type": batch_size, "default": 32}),
    "--workers": ("worker processes that load images", {"type": integer(0, 256), "default": 0}),
    "--corrupt": (
        "stop at an unreadable image, or skip it",
        {"choices": ("error", "skip"), "default": "error"},
    ),
    "--calibrate": (
        "calibration data: digits, or a folder with train/CLASS/IMAGE for calibration and val/CLASS/IMAGE "
        "for measuring accuracy; in a folder with only CLASS/IMAGE, every fifth image is held out",
        {"type": InputPath, "metavar": "DATA"},
    ),
    "--seed": (
        "seed for choosing the calibration images",
        {"type": integer(0, config.MOST_SEED), "default": 0},
    ),
    "--device": ("cpu, cuda, cuda:1, … (default: cuda if available)", {}),
}
MODEL = ("--checkpoint", "--model", "--activation", "--image-size")
BATCHES = ("--batch-size", "--workers", "--corrupt")


def add(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Adds arguments that several commands have, with changes for all of them."""
    for name in names:
        text, settings = _ARGUMENTS[name]
        option(parser, name, **{"help": text, **settings, **changes})


def option(parser: argparse.ArgumentParser, name: str, help: str, **settings: Any) -> None:  # noqa: A002
    """Adds an argument; its help gets the default, unless it says so itself."""
    default = settings.get("default")
    if default is not None and not isinstance(default, bool | list) and "(default" not in help:
        help += f" (default: {default})"  # noqa: A001
    parser.add_argument(name, help=help, **settings)


def resolve_device(name: str | None) -> torch.device:
    """Returns the device of that name, or the default; raises ValueError if it cannot be used."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:
        said = f"but torch {torch.__version__} says: {str(error).splitlines()[0]}"
        raise ValueError(f"--device: got {name!r}, expected cpu, cuda or cuda:N, {said}") from error
    if device.type == "meta":
        raise ValueError("--device: got 'meta', which computes nothing; expected cpu, cuda or cuda:N")
    return device


@contextlib.contextmanager
def naming_options(*names: str) -> Iterator[None]:
    """Lets a ValueError of the block that begins with some of these arguments name their options instead."""
    try:
        yield
    except ValueError as error:
        begin, colon, rest = str(error).partition(":")
        named = begin.split(", ")
        if not colon or not set(named) <= set(names):
            raise
        options = ", ".join(f"--{name.replace('_', '-')}" for name in named)
        raise ValueError(f"{options}:{rest}") from error


# Models ---------------------------------------------------------------------------------------------------


class LoadedModel(NamedTuple):
    """A model in evaluation mode, the size of its images, and its device."""

    model: CvT | CvTSegmenter
    checkpoint: Checkpoint
    image_size: int
    device: torch.device

    @property
    def classifier(self) -> CvT:
        """The model; it raises ValueError if that is not a classifier."""
        if not isinstance(self.model, CvT):
            path, head = self.checkpoint.path, self.model.config.head
            raise ValueError(
                f"{path} is a model of head={head!r}, which is for pixels; expected a classifier"
            )
        if not self.model.num_classes:
            raise ValueError(f"{self.checkpoint.path} is a model without classes; expected a classifier")
        return self.model

    @property
    def crop_fraction(self) -> float | None:
        """The crop fraction of the images that the model was trained with, or None for the default."""
        preprocessing = self.checkpoint.preprocessing
        return preprocessing.crop_fraction if preprocessing else None

    def read(self, photos: list[str]) -> Tensor:
        """Reads photographs as the model takes them: float32 (len(photos), 3, image_size, image_size)."""
        upscale = self.checkpoint.preprocessing is not None
        return load_images(photos, self.image_size, crop_fraction=self.crop_fraction, upscale=upscale)

    def labels(self, file: str | None) -> list[str] | None:
        """Returns the class names from a file, or else the checkpoint's, or None."""
        return self.checkpoint.labels if file is None else read_labels(file, self.model.num_classes)

    def check_classes(self, classes: list[str], data: str) -> None:
        """Raises ``ValueError`` unless the classes of a data set, which ``data`` names, are the model's."""
        if len(classes) != self.model.num_classes:
            raise ValueError(f"{data}: has {len(classes)} classes, the model {self.model.num_classes}")
        card = self.checkpoint.card
        known = None if card is None else card.folders or self.checkpoint.labels
        if known is not None and known != classes:
            raise ValueError(f"{data}: its classes have other names than those of {self.checkpoint.path}")


def load_model(arguments: argparse.Namespace) -> LoadedModel:
    """Loads the model that the arguments of ``MODEL`` and ``--token-keep`` name onto ``--device``.

    It raises FileNotFoundError or CheckpointError where that cannot be loaded.
    """
    device = resolve_device(getattr(arguments, "device", "cpu"))
    checkpoint = read_checkpoint(arguments.checkpoint or f"hf-hub:{PRETRAINED[arguments.model or 'cvt_13']}")
    chosen = {"token_keep": getattr(arguments, "token_keep", None), "activation": arguments.activation}
    overrides: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    with naming_options("token_keep"):
        model = create_model(arguments.model, checkpoint=checkpoint, **overrides)
    preprocessing = checkpoint.preprocessing or Preprocessing(None)
    for remark in preprocessing.remarks:
        warnings.warn(remark, stacklevel=2)
    usual = config.default_image_size(arguments.model or checkpoint.architecture())
    size = arguments.image_size or preprocessing.image_size or usual
    return LoadedModel(model.to(device).eval(), checkpoint, size, device)


def open_calibration(
    arguments: argparse.Namespace, loaded: LoadedModel, images: int
) -> tuple[Batches, Batches]:
    """Opens ``--calibrate``: that many images, drawn by ``--seed``, and the held-out images."""
    source = arguments.calibrate
    fitted, held_out = open_parts(source, loaded.image_size, crop_fraction=loaded.crop_fraction)
    loaded.check_classes(fitted.classes, f"--calibrate {source}")
    drawn = random.Random(arguments.seed).sample(range(len(fitted)), min(images, len(fitted)))
    options: dict[str, Any] = {"workers": arguments.workers, "corrupt": arguments.corrupt}
    chosen = Batches(fitted.part(sorted(drawn)), arguments.batch_size, **options)
    return chosen, Batches(held_out, arguments.batch_size, **options)


def open_split(
    source: str,
    split: Literal["train", "val"],
    image_size: int,
    head: config.Head,
    *,
    classes: Sequence[str] | None = None,
    crop_fraction: float | None = None,
    random_crop: RandomCrop | None = None,
    corrupt: Corrupt = "error",
) -> ImageDataset:
    """Opens a split of ``--data``: images with a class each, or for the head ``"segment"`` label maps.

    The arguments and errors are ``open_dataset``'s and ``open_label_maps``'s; data of the other kind raise
    ValueError.
    """
    if head == "segment":
        if source == DIGITS:
            raise ValueError(
                f"--data: got digits, which have no label maps; expected a folder with {split}/images and "
                f"{split}/labels for head='segment'"
            )
        options: dict[str, Any] = {"random_crop": random_crop, "corrupt": corrupt}
        return open_label_maps(source, split, image_size, classes=classes, **options)
    if has_label_maps(source, split):
        raise ValueError(
            f"--data: {source} has label maps, which are for models of train --task segment; expected "
            f"{split}/CLASS/IMAGE for a classifier"
        )
    return open_dataset(source, split, image_size, crop_fraction=crop_fraction, random_crop=random_crop)


# Output ---------------------------------------------------------------------------------------------------


def print_result(arguments: argparse.Namespace, lines: Iterable[str]) -> None:
    """Prints a result on stdout, or on stderr where ``--json -`` takes it, when everything is done."""
    stream = sys.stderr if getattr(arguments, "json", None) == STDOUT else sys.stdout
    print(printable("\n".join(lines)), file=stream, flush=True)
