"""Models on the Hugging Face Hub, downloaded and cached by ``huggingface_hub``."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from cvt_kernels.messages import stacklevel_of_caller

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
#: Prefixes of names that certainly mean a local file.
WEIGHT_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors")


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

    None means that it must be a path.

    Raises:
        ValueError: ``hf-hub:`` is followed by anything else.
    """
    match = _NAME.fullmatch(text.removeprefix(_PREFIX))
    if text.startswith(_PREFIX):
        if match is None:
            raise ValueError(f"checkpoint: got {text!r}, expected {_PREFIX}owner/name or …@revision")
    elif match is None or text.endswith(WEIGHT_SUFFIXES):
        return None
    return HubModel(match["name"], match["revision"])


def fetch(model: HubModel, **options: Any) -> Path:
    """Downloads a model into the cache; returns the folder of its configuration and weights.

    Cached files are not downloaded again. Without a network the last downloaded revision is used.
    ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` apply.

    Args:
        model: Its ``preprocessor_config.json`` may be missing.
        **options: Arguments of ``huggingface_hub.hf_hub_download``, such as ``token`` and ``cache_dir``.

    Raises:
        FileNotFoundError: There is no such model, or no network and nothing in the cache.
        CheckpointError: It cannot be read: it is gated, say, or ``huggingface_hub`` is not installed.
    """
    try:
        source = _Source(model, options)
        config = source.get("config.json")
        if config is None:
            raise CheckpointError("it has no config.json")
        # The folder is named by the commit; what follows is of the same one, whatever happens to the branch.
        source.revision = config.parent.name
        source.get_weights()
        is_complete = True
        try:
            source.get("preprocessor_config.json")
        except _UnreachableError:
            is_complete = source.lacks("preprocessor_config.json")
    except Exception as error:  # its HTTP libraries have errors of their own
        kind, reason = _explain(error, model)
        line = " ".join(reason.split())
        raise kind(
            f"checkpoint: {model} is no path here and cannot be loaded from the Hugging Face Hub: {line}"
        ) from error
    if not is_complete:
        warnings.warn(
            f"{model}: its preprocessor_config.json is neither in the cache nor to be had now; "
            "images are prepared as for Microsoft's weights",
            stacklevel=stacklevel_of_caller(),
        )
    return config.parent


class _UnreachableError(Exception):
    """The Hub cannot be reached."""


class _Source:
    """A revision of a model on the Hub, whose files are downloaded unless cached."""

    def __init__(self, model: HubModel, options: dict[str, Any]):
        self.hub = require("huggingface_hub", "hf")
        self.name = model.name
        self.revision = model.revision
        self.options = options
        self._is_reachable = False

    def get(self, file: str) -> Path | None:
        """Returns the cached path of a file, downloaded if need be; None if the revision has no such file.

        Raises:
            _UnreachableError: The cache does not have it, and there is no network.
        """
        errors = require("huggingface_hub.utils", "hf")
        try:
            if not isinstance(self._in_cache(file), str):
                self._check_connection()
            path = self.hub.hf_hub_download(self.name, file, revision=self.revision, **self.options)
        except errors.LocalEntryNotFoundError as error:  # an EntryNotFoundError too
            raise _UnreachableError("local_files_only is set") from error
        except errors.EntryNotFoundError:
            return None
        return Path(path)

    def lacks(self, file: str) -> bool:
        """Returns whether the cache knows that the revision has no such file."""
        return self._in_cache(file) is self.hub._CACHED_NO_EXIST

    def get_weights(self) -> None:
        """Downloads the weights in the best available format, unless cached in any format."""
        files = [name + suffix for name in WEIGHTS for suffix in ("", INDEX)]
        files.sort(key=lambda file: not isinstance(self._in_cache(file), str))
        found = next((path for path in map(self.get, files) if path is not None), None)
        if found is None:
            raise CheckpointError(f"it has none of {', '.join(files)}")
        for shard in shards(found) if found.name.endswith(INDEX) else ():
            if self.get(shard) is None:
                raise CheckpointError(f"it has no {shard}, which {found.name} names")

    def _in_cache(self, file: str) -> Any:
        """Returns the path of a file in the cache, None, or the mark for what the commit does not have."""
        cache_dir = self.options.get("cache_dir")
        return self.hub.try_to_load_from_cache(self.name, file, cache_dir=cache_dir, revision=self.revision)

    def _check_connection(self) -> None:
        """Fails at once where ``hf_hub_download`` would try again for half a minute."""
        if self._is_reachable or self.options.get("local_files_only"):
            return
        url = self.hub.hf_hub_url(self.name, "config.json", revision=self.revision)
        try:
            self.hub.get_hf_file_metadata(url, token=self.options.get("token"))
        except require("huggingface_hub.utils", "hf").HfHubHTTPError:
            raise
        except Exception as error:  # its HTTP libraries have errors of their own
            address = require("huggingface_hub.constants", "hf").ENDPOINT
            raise _UnreachableError(f"{address} is not reached ({type(error).__name__})") from error
        self._is_reachable = True


def _explain(error: Exception, model: HubModel) -> tuple[type[Exception], str]:
    """Returns the class and the message of the error to raise to the user."""
    if isinstance(error, ModuleNotFoundError | CheckpointError):
        return CheckpointError, str(error)
    constants, errors = (require(f"huggingface_hub.{name}", "hf") for name in ("constants", "utils"))
    address = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError, (
            f"access is restricted; ask for it at {address}/{model.name}, "
            "then set HF_TOKEN to a token of yours"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return FileNotFoundError, f"{address} has no such model, or a private one, which needs HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return FileNotFoundError, f"it has no revision {model.revision}"
    if isinstance(error, _UnreachableError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else error
        return FileNotFoundError, (
            f"{why} and the cache {constants.HF_HUB_CACHE} does not have it; "
            "fetch it with a network, or give the path of a file"
        )
    return CheckpointError, f"{type(error).__name__}: {error}"
