"""The arguments, the loading of models and the output that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from cvt.checkpoints import Checkpoint, read_checkpoint
from cvt.config import (
    ACTIVATIONS,
    LARGEST_IMAGE,
    MOST_IMAGES,
    MOST_SEED,
    PRESETS,
    CvTConfig,
    Head,
    TokenKeep,
    default_image_size,
)
from cvt.factory import create_model
from cvt.hub import PRETRAINED
from cvt.huggingface import Preprocessing
from cvt.model import CvT
from cvt.segmentation import CvTSegmenter
from cvt_kernels.messages import printable

from .paths import STDOUT, input_path
from .process import why_not_written

if TYPE_CHECKING:
    from ..datasets import Batches, Corrupt, ImageDataset, RandomCrop


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
image_size = integer(1, LARGEST_IMAGE)
batch_size = integer(1, MOST_IMAGES)


def token_keep(text: str) -> TokenKeep | tuple[TokenKeep, ...]:
    """Parses an argument of argparse for the field ``token_keep`` of :class:`CvTConfig`, which checks it."""
    try:
        values = tuple("entropy" if part == "entropy" else float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a fraction, entropy, or several with commas between"
        ) from error
    return cast(tuple[TokenKeep, ...], values) if len(values) > 1 else cast(TokenKeep, values[0])


#: The help of ``--checkpoint``.
CHECKPOINT = (
    "weights to load: an official .pth, a .safetensors file, a directory written by Hugging Face or cvt "
    "train, owner/name on the Hub, or digits (a small bundled model)"
)
# The arguments that several commands have, and the groups of them that go together.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "photos": {
        "nargs": "+",
        "type": input_path,
        "metavar": "PHOTO",
        "help": "image file (JPEG, PNG, WebP, …)",
    },
    "--checkpoint": {"type": input_path, "required": True, "help": CHECKPOINT},
    "--model": {
        "choices": tuple(PRESETS),
        "help": "architecture (default: detected from the checkpoint)",
    },
    "--activation": {
        "choices": tuple(ACTIVATIONS),
        "help": "activation of the MLPs (default: quick_gelu for the published weights, gelu for other "
        "models on the Hub)",
    },
    "--image-size": {
        "type": image_size,
        "help": "side of the input images in pixels (default: as trained, or else 224, 384 for cvt_w24); no "
        "center crop from 384 up",
    },
    "--token-keep": {
        "type": token_keep,
        "metavar": "KEEP",
        "help": "prune unimportant tokens in the last stage: fraction to keep, such as 0.7, or entropy to "
        "decide per image; comma-separated for one per block (default: as in the checkpoint, or keep all)",
    },
    "--labels": {
        "type": input_path,
        "metavar": "FILE",
        "help": "file of class names: one per line, or JSON: a list or {index: name}",
    },
    "--batch-size": {"type": batch_size, "default": 32, "help": "images per batch (default: 32)"},
    "--workers": {
        "type": integer(0, 256),
        "default": 0,
        "help": "worker processes that load images (default: 0)",
    },
    "--corrupt": {
        "choices": ("error", "skip"),
        "default": "error",
        "help": "stop at an unreadable image, or skip it (default: error)",
    },
    "--calibrate": {
        "type": input_path,
        "metavar": "DATA",
        "help": "calibration data: digits, or a folder with train/CLASS/IMAGE for calibration and "
        "val/CLASS/IMAGE for measuring accuracy; in a folder with only CLASS/IMAGE, every fifth image is "
        "held out for accuracy",
    },
    "--seed": {
        "type": integer(0, MOST_SEED),
        "default": 0,
        "help": "seed for choosing the calibration images (default: 0)",
    },
    "--device": {"help": "cpu, cuda, cuda:1, … (default: cuda if available)"},
}
MODEL = ("--checkpoint", "--model", "--activation", "--image-size")
BATCHES = ("--batch-size", "--workers", "--corrupt")


def add(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Adds arguments that several commands have, with changes for all of them."""
    for name in names:
        parser.add_argument(name, **_ARGUMENTS[name] | changes)


def resolve_device(name: str | None) -> torch.device:
    """Returns the device of that name, or the default; raises ValueError if it cannot be used."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_cuda = name.partition(":")[0] == "cuda"
    if is_cuda and not torch.backends.cuda.is_built():
        raise ValueError(f"--device: got {name!r}, but this torch ({torch.__version__}) has no CUDA")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ImportError) as error:
        said = f"but torch says: {str(error).splitlines()[0]}" if is_cuda else "expected cpu, cuda or cuda:N"
        raise ValueError(f"--device: got {name!r}, {said}") from error
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
    """A model in evaluation mode, the size of its images, and the warnings of its loading."""

    model: CvT | CvTSegmenter
    checkpoint: Checkpoint
    image_size: int
    remarks: list[str]

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
        from cvt.images import load_images  # lazy: Pillow would slow down --help

        upscale = self.checkpoint.preprocessing is not None
        return load_images(photos, self.image_size, crop_fraction=self.crop_fraction, upscale=upscale)

    def labels(self, file: str | None) -> list[str] | None:
        """Returns the class names from a file, or else the checkpoint's, or None."""
        from cvt.images import read_labels

        return self.checkpoint.labels if file is None else read_labels(file, self.model.num_classes)

    def check_classes(self, classes: list[str], data: str) -> None:
        """Raises ``ValueError`` unless the classes of a data set, which ``data`` names, are the model's."""
        if len(classes) != self.model.num_classes:
            raise ValueError(f"{data}: has {len(classes)} classes, the model {self.model.num_classes}")
        card = self.checkpoint.card
        known = None if card is None else card.folders or self.checkpoint.labels
        if known is not None and known != classes:
            raise ValueError(f"{data}: its classes have other names than those of {self.checkpoint.path}")


def load_model(arguments: argparse.Namespace, device: torch.device | str) -> LoadedModel:
    """Loads the model that the arguments of ``MODEL`` and ``--token-keep`` name.

    It raises FileNotFoundError or CheckpointError where that cannot be loaded.
    """
    with recorded_warnings() as remarks:
        given = arguments.checkpoint or f"hf-hub:{PRETRAINED[arguments.model or 'cvt_13']}"
        checkpoint = read_checkpoint(given)
    keep = getattr(arguments, "token_keep", None)
    overrides = {} if keep is None else {"token_keep": keep}
    with naming_options("token_keep"):
        model, more = build_model(checkpoint, arguments.model, activation=arguments.activation, **overrides)
    preprocessing = checkpoint.preprocessing or Preprocessing(None)
    size = (
        arguments.image_size
        or preprocessing.image_size
        or default_image_size(arguments.model or checkpoint.architecture())
    )
    return LoadedModel(model.to(device).eval(), checkpoint, size, [*remarks, *more, *preprocessing.remarks])


def build_model(
    checkpoint: Checkpoint,
    model: str | CvTConfig | None,
    *,
    activation: str | None,
    option: str = "--activation",
    **overrides: Any,
) -> tuple[CvT | CvTSegmenter, list[str]]:
    """Builds a model as :func:`create_model` does; returns it and the warnings of its loading.

    ``activation`` is the user's choice or None, ``option`` the option for it, which the warnings name.
    """
    chosen = activation or checkpoint.activation
    if chosen is not None:
        overrides["activation"] = chosen
    with recorded_warnings() as remarks:
        built = create_model(model, checkpoint=checkpoint, **overrides)
    reason = None if activation else checkpoint.why_choose_activation()
    if reason is not None:
        remarks.append(reason + (f"; choose by {option} gelu or quick_gelu" if option else ""))
    return built, remarks


def open_calibration(
    arguments: argparse.Namespace, loaded: LoadedModel, images: int
) -> tuple[Batches, Batches]:
    """Opens ``--calibrate``: that many images, drawn by ``--seed``, and the held-out images."""
    from ..datasets import Batches, open_parts  # lazy: Pillow would slow down --help

    source = arguments.calibrate
    with recorded_warnings() as unread:
        fitted, held_out = open_parts(
            source, loaded.image_size, crop_fraction=loaded.crop_fraction, corrupt=arguments.corrupt
        )
    loaded.remarks.extend(unread)
    loaded.check_classes(fitted.classes, f"--calibrate {source}")
    drawn = random.Random(arguments.seed).sample(range(len(fitted)), min(images, len(fitted)))
    parts = (fitted.part(sorted(drawn)), held_out)
    first, second = (
        Batches(part, arguments.batch_size, workers=arguments.workers, corrupt=arguments.corrupt)
        for part in parts
    )
    return first, second


def open_split(
    source: str,
    split: Literal["train", "val"],
    image_size: int,
    head: Head,
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
    from ..datasets import DIGITS, open_dataset  # lazy: Pillow would slow down --help
    from ..label_maps import has_label_maps, open_label_maps

    options: dict[str, Any] = {"random_crop": random_crop, "corrupt": corrupt}
    if head == "segment":
        if source == DIGITS:
            raise ValueError(
                f"--data: got digits, which have no label maps; expected a folder with {split}/images and "
                f"{split}/labels for head='segment'"
            )
        return open_label_maps(source, split, image_size, classes=classes, **options)
    if has_label_maps(source, split):
        raise ValueError(
            f"--data: {source} has label maps, which are for models of train --task segment; expected "
            f"{split}/CLASS/IMAGE for a classifier"
        )
    return open_dataset(source, split, image_size, crop_fraction=crop_fraction, **options)


# Output ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Yields a list that holds the messages of all warnings of the block once the block has ended."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Image size .* decompression bomb")  # as cvt.images does
        yield messages
    messages += [str(warning.message) for warning in caught]


@contextlib.contextmanager
def printed_warnings(arguments: argparse.Namespace) -> Iterator[None]:
    """Prints every warning of the block on stderr at once, as a line after the name of the command."""
    from tqdm import tqdm

    def show(message: Any, *details: Any, **more: Any) -> None:
        line = f"cvt {arguments.command}: {printable(str(message))}"
        tqdm.write(line, file=sys.stderr)  # above a bar, if there is one

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def print_remarks(arguments: argparse.Namespace, remarks: Iterable[str]) -> None:
    """Prints remarks on stderr, each after the name of the command."""
    for remark in remarks:
        print(f"cvt {arguments.command}: {printable(remark)}", file=sys.stderr)


def print_result(arguments: argparse.Namespace, lines: Iterable[str], remarks: Iterable[str] = ()) -> None:
    """Prints a result on stdout, or on stderr where ``--json -`` takes it, after the remarks on stderr.

    It is called when everything is done.
    """
    print_remarks(arguments, remarks)
    stream = sys.stderr if getattr(arguments, "json", None) == STDOUT else sys.stdout
    try:
        print(printable("\n".join(lines)), file=stream, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(why_not_written(error)) from error
