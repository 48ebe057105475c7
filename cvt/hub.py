"""Weights by name: models of the Hugging Face Hub, which ``huggingface_hub`` fetches into its cache."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .extras import require
from .huggingface import INDEX, WEIGHTS, CheckpointError, shards

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
# What is certainly meant to be a file of one's own.
_FILES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors")


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
    """Returns the model that ``owner/name``, ``owner/name@revision`` or ``hf-hub:…`` names.

    None stands for what must be a path.

    Raises:
        ValueError: ``hf-hub:`` is followed by anything else.
    """
    match = _NAME.fullmatch(text.removeprefix(_PREFIX))
    if text.startswith(_PREFIX):
        if match is None:
            raise ValueError(f"checkpoint: got {text!r}, expected {_PREFIX}owner/name or …@revision")
    elif match is None or text.endswith(_FILES):
        return None
    return HubModel(match["name"], match["revision"])


def fetch(model: HubModel, **options: Any) -> Path:
    """Returns a folder of the cache with ``config.json``, ``preprocessor_config.json`` and the weights.

    What the cache has of the revision is not fetched again. Without a network the last revision that was
    fetched serves. ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` hold.

    Args:
        model: Its ``preprocessor_config.json`` may be missing.
        **options: Arguments of ``huggingface_hub.hf_hub_download``, such as ``token`` and ``cache_dir``.

    Raises:
        FileNotFoundError: There is no such model, or no network and nothing in the cache.
        CheckpointError: It cannot be read: it is gated, say, or ``huggingface_hub`` is not installed.
    """
    with _in_one_line(model):
        hub = require("huggingface_hub", "hf")
        config = Path(hub.hf_hub_download(model.name, "config.json", revision=model.revision, **options))
        # The folder is named by the commit: what follows is of the same one, whatever happens to the branch.
        source = _Source(hub, model.name, config.parent.name, options)
        try:
            source.get("preprocessor_config.json")
        except hub.utils.LocalEntryNotFoundError:
            warnings.warn(
                f"{model}: its preprocessor_config.json is neither in the cache nor to be had now; "
                "images are prepared as for Microsoft's weights",
                stacklevel=2,
            )
        source.get_weights()
    return config.parent


class _Source(NamedTuple):
    """A commit of a model on the Hub."""

    hub: Any
    name: str
    commit: str
    options: dict[str, Any]

    def cached(self, file: str) -> Any:
        """Returns the path of a file in the cache, None, or the mark for a file that does not exist."""
        cache_dir = self.options.get("cache_dir")
        return self.hub.try_to_load_from_cache(self.name, file, cache_dir=cache_dir, revision=self.commit)

    def get(self, file: str) -> Path | None:
        """Returns a file in the cache, once it is there; None if the commit has none of this name."""
        if self.cached(file) is self.hub._CACHED_NO_EXIST:
            return None
        errors = self.hub.utils
        try:
            return Path(self.hub.hf_hub_download(self.name, file, revision=self.commit, **self.options))
        except errors.LocalEntryNotFoundError:  # which is an EntryNotFoundError too
            raise
        except errors.EntryNotFoundError:
            return None

    def get_weights(self) -> None:
        """Fetches the weights in the best format that there is, unless the cache has them in any."""
        files = [name + suffix for name in WEIGHTS for suffix in ("", INDEX)]
        files.sort(key=lambda file: not isinstance(self.cached(file), str))
        found = next((path for path in map(self.get, files) if path is not None), None)
        if found is None:
            raise CheckpointError(f"it has none of {', '.join(files)}")
        if found.name.endswith(INDEX):
            for shard in shards(found):
                if self.get(shard) is None:
                    raise CheckpointError(f"it has no {shard}, which {found.name} names")


@contextlib.contextmanager
def _in_one_line(model: HubModel) -> Iterator[None]:
    """Turns every error into one that says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{_unavailable(model)}: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint: {model} of the Hugging Face Hub: {error}") from error
    except Exception as error:  # its HTTP libraries have errors of their own
        kind, reason = _explain(error, model)
        raise kind(f"{_unavailable(model)}: {reason}") from error


def _unavailable(model: HubModel) -> str:
    return f"checkpoint: {model} is no path here and cannot be fetched from the Hugging Face Hub"


def _explain(error: Exception, model: HubModel) -> tuple[type[Exception], str]:
    """Returns the error that the user shall see, and the reason."""
    hub = require("huggingface_hub", "hf")
    address, errors = hub.constants.ENDPOINT, hub.utils
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError, (
            f"access is restricted; ask for it at {address}/{model.name}, "
            "then set HF_TOKEN to a token of yours"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            FileNotFoundError,
            f"{address} has no such model, or a private one, for which HF_TOKEN must be set",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return FileNotFoundError, f"it has no revision {model.revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if hub.constants.HF_HUB_OFFLINE else f"{address} cannot be reached"
        return FileNotFoundError, (
            f"{why}, and the cache {hub.constants.HF_HUB_CACHE} does not have it; "
            "fetch it with a network, or give the path of a file"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return CheckpointError, "it has no config.json"
    return CheckpointError, f"{type(error).__name__}: {' '.join(str(error).split())}"
