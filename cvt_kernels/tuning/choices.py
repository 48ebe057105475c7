"""The file of choices: which backend serves each class of calls, by what ``cvt_kernels.tune`` measured here.

A cache key is a string that names an operator and a class of its calls; its :class:`Entry` names the backend
that serves them. Each machine has one JSON file in the user's cache directory, named by a hash of everything
that its choices depend on (:func:`~.key.machine_key`). ``CVT_KERNELS_TUNED`` names other such files, which
are read before it and never written. A process reads them once; ``tune`` writes, merges and reads again.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from ..messages import stacklevel_of_caller
from .key import digest, machine_key

_SCHEMA, _VERSION = "cvt-kernels choices", 2
_LOCK_SECONDS = 10.0  # that a process waits while another one writes

#: The beginning of a flaw that may pass, such as a full disk or a killed compiler.
FAILS_HERE = "fails here: "


class Entry(NamedTuple):
    """The choice for a cache key.

    Attributes:
        chosen: The backend that serves.
        flaws: Backend → why it cannot serve; none for those that are right.
    """

    chosen: str
    flaws: Mapping[str, str]

    @property
    def is_lasting(self) -> bool:
        """False if a flaw may pass, so that the choice must not be written down."""
        return not any(flaw.startswith(FAILS_HERE) for flaw in self.flaws.values())


# In memory ------------------------------------------------------------------------------------------------

_known: dict[torch.device, dict[str, Entry]] = {}


def numbered(device: torch.device) -> torch.device:
    """Returns a device by its number; ``cuda`` without one is the current GPU."""
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


def entries(device: torch.device) -> Mapping[str, Entry]:
    """Returns the choices for a device, cache key → entry; the files are read at the first call."""
    device = numbered(device)
    known = _known.get(device)
    return _read(device) if known is None else known


def use(device: torch.device, new: Mapping[str, Entry]) -> None:
    """Adds choices to this process alone."""
    _known[numbered(device)] = {**entries(device), **new}


def forget() -> None:
    """Drops what this process has read."""
    _known.clear()


def _read(device: torch.device) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    given, folder = given_files(), _folder()
    if given or folder.is_dir():  # else the machine key, which takes 20 ms, is not needed
        files = [path(device)] if os.path.exists(path(device)) else []
        for file in (*files, *reversed(given)):
            found |= _read_or_warn(file, machine_key(device))
    _known[device] = found
    return found


def _read_or_warn(file: Path, key: Mapping[str, object]) -> dict[str, Entry]:
    """Returns the entries of a file; if it cannot be used, warns and returns none."""
    try:
        return read_file(file, key)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        source = "CVT_KERNELS_TUNED: " if file in given_files() else ""
        message = f"{source}{file}: this file of choices is ignored: {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel_of_caller())
        return {}


# Files ----------------------------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Returns this package's folder in ``XDG_CACHE_HOME`` or ``~/.cache``; it need not exist.

    Without a home directory, it is a path that cannot be created, so that nothing is written anywhere.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the XDG specification says to ignore it
        cache = Path(os.path.expanduser("~"), ".cache")
    if not cache.is_absolute():
        cache = Path(os.path.abspath(os.devnull))
    return cache / "cvt_kernels"


def path(device: torch.device) -> Path:
    """Returns the file of a device in the user's cache directory."""
    return _folder() / f"{digest(machine_key(device))}.json"


def _folder() -> Path:
    return cache_directory() / "choices"


def given_files() -> list[Path]:
    """Returns the files that ``CVT_KERNELS_TUNED`` names; the first one that has a cache key decides."""
    return [Path(name) for name in os.environ.get("CVT_KERNELS_TUNED", "").split(os.pathsep) if name]


def remember(device: torch.device, new: Mapping[str, Entry]) -> str | None:
    """Adds choices, in place of those of the same cache keys: to this process, and to the file if lasting.

    The file is replaced in one piece.

    Returns:
        Why the file could not be written, or None.
    """
    use(device, new)
    lasting = {cache_key: entry for cache_key, entry in new.items() if entry.is_lasting}
    if not lasting:
        return None
    file, key = path(device), machine_key(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_suffix(".lock")):
            known = _read_or_warn(file, key) if os.path.exists(file) else {}
            _write(file, key, {**known, **lasting})
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return None


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds a file lock within a block; where there is none, the file stays whole, but may lose entries."""
    from filelock import FileLock, Timeout

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(Timeout, OSError, NotImplementedError):
            stack.enter_context(FileLock(file).acquire(timeout=_LOCK_SECONDS))
        yield


def _write(file: Path, key: Mapping[str, object], known: Mapping[str, Entry]) -> None:
    choices = {cache_key: entry._asdict() for cache_key, entry in known.items()}
    content = {"schema": _SCHEMA, "version": _VERSION, "machine": key, "choices": choices}
    scratch = file.with_name(f".{file.name}.{os.getpid()}.{os.urandom(8).hex()}")
    try:
        scratch.write_text(json.dumps(content, sort_keys=True, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, file)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def read_file(file: Path, key: Mapping[str, object]) -> dict[str, Entry]:
    """Reads a file of choices, for a machine key; none if it is for another type of device.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no file of choices, or is for another machine or installation.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if (content["schema"], content["version"]) != (_SCHEMA, _VERSION):
            raise ValueError("it is no file of choices of this version")
        theirs, choices = dict(content["machine"]), dict(content["choices"])
        found = {cache_key: Entry(**fields) for cache_key, fields in choices.items()}
        texts = [text for chosen, flaws in found.values() for text in (chosen, *flaws.values())]
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("it is damaged: a choice or a flaw is no text")
    if theirs.get("device") != key.get("device"):
        return {}
    differences = [
        f"{name}: {theirs.get(name)} in the file, {key.get(name)} here"
        for name in sorted({*theirs, *key})
        if theirs.get(name) != key.get(name)
    ]
    if differences:
        raise ValueError(f"it was made for another machine or installation: {'; '.join(differences)}")
    return found
