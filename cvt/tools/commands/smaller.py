"""The files of ``cvt prune`` and ``cvt quantize``, their settings, and figures before and after."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from cvt.card import ModelCard
from cvt.checkpoints import Checkpoint, save_safetensors
from cvt.config import CvTConfig
from cvt.huggingface import made_up_labels
from cvt_kernels.messages import aligned

from ..datasets import Batches
from ..evaluation import Evaluation, evaluate
from .common import BATCHES, MODEL, LoadedModel, add, option
from .paths import OutputPath, add_json_argument

_SUFFIX = ".safetensors"
_UNTOLD = ("command", "run", "json")  # arguments that are no settings
# Of a table: the name of a figure, how it is written, and what it is multiplied by.
_FORMS = {
    "top1": ("top-1", "{:.2%}", 1),
    "top5": ("top-5", "{:.2%}", 1),
    "loss": ("loss", "{:.4f}", 1),
    "parameters": ("parameters", "{:.2f} M", 1e-6),
    "multiply_adds": ("multiply-adds", "{:.2f} M", 1e-6),
    "bytes": ("size", "{:.2f} MB", 1e-6),
    "images_per_second": ("images/s", "{:.1f}", 1),
}


def add_shared_arguments(parser: argparse.ArgumentParser, report: str, *, calibrate: bool) -> None:
    """Adds the arguments that both commands have; ``calibrate`` says whether they need images."""
    add(parser, *MODEL)
    add(parser, "--calibrate", required=calibrate)
    text = f"{_SUFFIX} file to write"
    option(parser, "--output", text, type=OutputPath, required=True, metavar="FILE")
    add(parser, "--seed", "--labels", *BATCHES, "--device")
    add_json_argument(parser, report)


def check_output(output: str) -> None:
    """Raises ValueError for an output of another kind, or of a name that safetensors does not read."""
    if Path(output).suffix != _SUFFIX:
        raise ValueError(f"--output: got {output!r}, expected a name that ends with {_SUFFIX}")
    try:
        str(Path(output).resolve()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"--output: got {output!r}, expected a name in UTF-8") from error


def write(path: Path, tensors: Mapping[str, Tensor], card: ModelCard) -> int:
    """Writes weights and their card; returns the bytes of the file."""
    on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    save_safetensors(Checkpoint(str(path), on_cpu, card=card), path)
    return path.stat().st_size


def card_of(
    loaded: LoadedModel, config: CvTConfig, labels: list[str] | None, folders: list[str] | None
) -> ModelCard:
    """Returns the card of a smaller model; ``folders`` are the classes of the data, if there are data."""
    card = loaded.checkpoint.card
    if folders is None and card is not None:
        folders = card.folders or loaded.checkpoint.labels
    labels = labels or folders or made_up_labels(loaded.model.num_classes)
    other_names = None if labels == folders else folders
    return ModelCard(config, labels, loaded.image_size, loaded.crop_fraction, other_names)


def evaluated(model: Any, batches: Batches, title: str) -> Evaluation:
    """Returns the figures of a model, and shows progress."""
    return evaluate(model, tqdm(batches, desc=title, unit="batch", leave=False, disable=None))


def size_of(model: nn.Module) -> int:
    """Returns the bytes of all tensors of a model."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def settings(arguments: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """Returns the settings of a command for its JSON."""
    given = {name: value for name, value in vars(arguments).items() if name not in _UNTOLD}
    return given | {"image_size": loaded.image_size, "device": str(loaded.device)}


def accuracy(evaluation: Evaluation | None) -> dict[str, float | None]:
    """Returns the accuracy and the loss as numbers, None without images."""
    return {name: getattr(evaluation, name, None) for name in ("top1", "top5", "loss")}


def table(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the lines of a table of figures before and after, without those that are None."""
    rows = [("", "before", "after")]
    for name, (title, form, factor) in _FORMS.items():
        if before.get(name) is not None:
            rows.append((title, form.format(before[name] * factor), form.format(after[name] * factor)))
    return aligned(rows, right=(1, 2))
