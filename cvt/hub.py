"""Models on the Hugging Face Hub, downloaded and cached by ``huggingface_hub``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from .extras import require
from .huggingface import CONFIGS, INDEX, WEIGHTS, CheckpointError

#: The published weights, trained by Microsoft with QuickGELU: the image size is 224 or in the name, and
#: ``22k`` stands for a first training on ImageNet-22k.
MICROSOFT = (
    "microsoft/cvt-13",
    "microsoft/cvt-13-384",
    "microsoft/cvt-13-384-22k",
    "microsoft/cvt-21",
    "microsoft/cvt-21-384",
    "microsoft/cvt-21-384-22k",
    "microsoft/cvt-w24-384-22k",
)
#: The weights of ``create_model(name, pretrained=True)``.
PRETRAINED = {
    "cvt_13": "microsoft/cvt-13",
    "cvt_21": "microsoft/cvt-21",
    "cvt_w24": "microsoft/cvt-w24-384-22k",
}

_PREFIX = "hf-hub:"
_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^\s@]+))?")
#: The ends of names that certainly mean a local file.
WEIGHT_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors")
# The errors of huggingface_hub where there is no such model, or none in the cache.
_ABSENT = ("RepositoryNotFoundError", "RevisionNotFoundError", "LocalEntryNotFoundError")


class HubModel(NamedTuple):
    """A model on the Hub.

    Attributes:
        name: ``"owner/name"``.
        revision: A branch, a tag or a commit; None for the main branch.
    """

    name: str
    revision: str | None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def parse(text: str) -> HubModel | None:
    """Returns the model that ``owner/name``, ``owner/name@revision`` or ``hf-hub:…`` names, or None."""
    match = _NAME.fullmatch(text.removeprefix(_PREFIX))
    if text.startswith(_PREFIX):
        if match is None:
            raise ValueError(f"checkpoint: got {text!r}, expected {_PREFIX}owner/name or …@revision")
    elif match is None or text.endswith(WEIGHT_SUFFIXES):
        return None
    return HubModel(match["name"], match["revision"])


class _Bar(tqdm):
    """A bar that is drawn on a terminal alone."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"disable": None})


def fetch(model: HubModel, **options: Any) -> Path:
    """Downloads a model into the cache; returns the folder of its configuration and weights.

    Cached files are not downloaded again. Without a network the last downloaded revision is used.
    ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` apply.

    Args:
        model: Its ``preprocessor_config.json`` may be missing.
        **options: Arguments of ``huggingface_hub.snapshot_download``, such as ``token`` and ``cache_dir``.

    Raises:
        FileNotFoundError: There is no such model, or no network and nothing in the cache.
        CheckpointError: It cannot be read: it is gated, say, or ``huggingface_hub`` is not installed.
    """
    try:
        hub = require("huggingface_hub", "hf")
        for weights in WEIGHTS:  # the better format first
            stem, suffix = weights.split(".")
            files = [*CONFIGS, weights, weights + INDEX, f"{stem}-*.{suffix}"]
            wanted = {"revision": model.revision, "allow_patterns": files, "tqdm_class": _Bar}
            folder = hub.snapshot_download(model.name, **wanted, **options)
            if any(Path(folder, name).exists() for name in (weights, weights + INDEX)):
                return Path(folder)
        reason: Exception = CheckpointError(f"it has neither {' nor '.join(WEIGHTS)}")
        kind: type[Exception] = CheckpointError
    except Exception as error:  # its HTTP libraries have errors of their own
        reason, kind = error, FileNotFoundError if type(error).__name__ in _ABSENT else CheckpointError
    line = " ".join(str(reason).split())
    raise kind(
        f"checkpoint: {model} is no path here and cannot be loaded from the Hugging Face Hub: {line:.600}"
    ) from reason
