"""Names of classes, settings, and figures before and after, for ``cvt prune`` and ``cvt quantize``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm

from cvt.card import ModelCard
from cvt.config import CvTConfig
from cvt.huggingface import made_up_labels
from cvt_kernels.messages import aligned

from ..evaluation import Evaluation, evaluate
from .common import LoadedModel

if TYPE_CHECKING:
    from ..datasets import Batches

SUFFIX = ".safetensors"
_UNTOLD = ("command", "run", "json")  # arguments that are no settings


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


def settings(arguments: argparse.Namespace, loaded: LoadedModel, device: torch.device) -> dict[str, Any]:
    """Returns the settings of a command for its JSON."""
    given = {name: value for name, value in vars(arguments).items() if name not in _UNTOLD}
    return given | {"image_size": loaded.image_size, "device": str(device)}


def table(*columns: dict[str, str]) -> list[str]:
    """Returns the lines of a table of the figures before and after."""
    rows = [("", "before", "after"), *((name, *(each[name] for each in columns)) for name in columns[0])]
    return aligned(rows, right=(1, 2))


def accuracy(evaluation: Evaluation) -> dict[str, str]:
    """Returns the accuracy and the loss for :func:`table`."""
    return {
        "top-1": f"{evaluation.top1:.2%}",
        "top-5": f"{evaluation.top5:.2%}",
        "loss": f"{evaluation.loss:.4f}",
    }
