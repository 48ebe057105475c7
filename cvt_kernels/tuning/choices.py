"""The file of choices: which backend serves each class of calls, by what ``cvt_kernels.tune`` measured here.

A cache key is a string that names an operator and a class of its calls; its :class:`Entry` names the backend
that serves them. Each machine has one JSON file in the user's cache directory, named by a hash of everything
that its choices depend on (:func:`~.key.machine_key`). ``CVT_KERNELS_TUNED`` names other such files, which
are read before it and never written. A process reads them once; ``tune`` writes, merges and reads again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..messages import stacklevel_of_caller
from .key import digest, machine_key

_SCHEMA, _VERSION = "cvt-kernels choices", 1
_MOST_BYTES = 2**24  # of a file; an entry takes about five hundred
_LOCK_SECONDS = 10.0  # that a process waits while another one writes

#: The beginning of a flaw that may pass, such as a full disk or a killed compiler.
FAILS_HERE = "fails here: "


class Measurement(NamedTuple):
    """The error and the time of one candidate.

    Attributes:
        error: Its largest error against float64; None if there is no number.
        allowed: The largest allowed error.
        seconds: The fastest run, with a cold L2: on a GPU of the device, on a CPU of the call. None if it was
            not timed.
        flaw: Why it cannot serve, or None: ``wrong: …``, ``fails: …``, ``fails here: …``, ``hangs: …`` or
            ``dies: …``.
    """

    error: float | None
    allowed: float | None
    seconds: float | None
    flaw: str | None

    @property
    def is_lasting(self) -> bool:
        """False if its flaw may pass, so that it must not be remembered."""
        return self.flaw is None or not self.flaw.startswith(FAILS_HERE)


class Entry(NamedTuple):
    """The choice for a cache key.

    Attributes:
        chosen: The backend that serves.
        measurements: Backend → its measurement.
    """

    chosen: str
    measurements: dict[str, Measurement]

    @property
    def is_lasting(self) -> bool:
        """True if all measurements are lasting; otherwise it holds for this process only."""
        return all(measurement.is_lasting for measurement in self.measurements.values())


# In memory ------------------------------------------------------------------------------------------------

_guard = threading.RLock()
_known: dict[torch.device, dict[str, Entry]] = {}
_warned: set[str] = set()


def entries(device: torch.device) -> Mapping[str, Entry]:
    """Returns the choices for a device, cache key → entry; the files are read at the first call."""
    known = _known.get(device)
    return _read(device) if known is None else known


def forget() -> None:
    """Drops what this process has read, and lets it warn again."""
    with _guard:
        _known.clear()
        _warned.clear()


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


def _read(device: torch.device) -> dict[str, Entry]:
    with _guard:
        found: dict[str, Entry] = {}
        given, folder = given_files(), _folder()
        if given or folder.is_dir():  # else the machine key, which takes 20 ms, is not needed
            key = machine_key(device)
            found |= _read_or_warn(path(device), key) if folder.is_dir() else {}
            for each in reversed(given):
                found |= _read_or_warn(each, key, is_given=True)
        _known[device] = found
        return found


def _read_or_warn(file: Path, key: Mapping[str, object], *, is_given: bool = False) -> dict[str, Entry]:
    """Returns the entries of a file; if it cannot be used, warns once and returns none."""
    if not is_given and not os.path.lexists(file):
        return {}
    try:
        return read_file(file, key)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        source = "CVT_KERNELS_TUNED: " if is_given else ""
        message = f"{source}{file}: this file of choices is ignored: {reason}"
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=stacklevel_of_caller())
        return {}


# Files ----------------------------------------------------------------------------------------------------


def remember(device: torch.device, new: Mapping[str, Entry]) -> str | None:
    """Adds choices, in place of those of the same cache keys: to this process, and to the file if lasting.

    The file is replaced in one piece. Numbers that are not finite are written as null.

    Returns:
        Why the file could not be written, or None.
    """
    lasting = {cache_key: _storable(entry) for cache_key, entry in new.items() if entry.is_lasting}
    use(device, new)
    with _guard:
        if not lasting:
            return None
        file = path(device)
        try:
            file.parent.mkdir(0o755, parents=True, exist_ok=True)
            if (reason := _why_not_trusted(os.stat(file.parent))) is not None:
                return f"{file.parent}: {reason}"
            # Without the lock, the file stays whole all the same, but entries may be lost.
            with _locked(file.with_suffix(".lock")):
                key = machine_key(device)
                _write(file, key, {**_read_or_warn(file, key), **lasting})
        except OSError as error:
            return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return None


def use(device: torch.device, new: Mapping[str, Entry]) -> None:
    """Adds choices to this process alone."""
    with _guard:
        _known[device] = {**entries(device), **new}


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds a file lock within a block, or goes on without it where it cannot be had."""
    from filelock import FileLock, Timeout

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(Timeout, OSError, NotImplementedError):
            stack.enter_context(FileLock(file).acquire(timeout=_LOCK_SECONDS))
        yield


def _storable(entry: Entry) -> Entry:
    """Returns an entry as JSON has it, without NaN and infinity."""

    def finite(value: float | None) -> float | None:
        return None if value is None or not math.isfinite(value) else float(value)

    measurements = {
        name: Measurement(finite(each.error), finite(each.allowed), finite(each.seconds), each.flaw)
        for name, each in entry.measurements.items()
    }
    return entry._replace(measurements=measurements)


def _write(file: Path, key: Mapping[str, object], known: Mapping[str, Entry]) -> None:
    content = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "machine": key,
        "choices": {
            cache_key: {
                "chosen": entry.chosen,
                "measurements": {name: each._asdict() for name, each in entry.measurements.items()},
            }
            for cache_key, entry in known.items()
        },
    }
    text = json.dumps(content, sort_keys=True, indent=1, allow_nan=False)
    scratch = file.with_name(f".{file.name}.{os.getpid()}.{os.urandom(8).hex()}")
    try:
        scratch.touch(0o644, exist_ok=False)  # or it would not be trusted where the umask is 0
        scratch.write_text(text + "\n", encoding="utf-8")
        os.replace(scratch, file)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def read_file(file: Path, key: Mapping[str, object]) -> dict[str, Entry]:
    """Reads a file of choices, for a machine key; none if it is for another type of device.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no file of choices, is for another machine or installation, or is not trusted, since
            other users may write it.
    """
    try:
        content = _checked(json.loads(_text(file)), dict, "file")
    except RecursionError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    for name, expected in (("schema", _SCHEMA), ("version", _VERSION)):
        if content.get(name) != expected:
            raise ValueError(f"{name}: got {content.get(name)!r:.60}, expected {expected!r}")
    theirs = _checked(content.get("machine"), dict, "machine")
    if theirs.get("device") != key.get("device"):
        return {}
    differences = [
        f"{name}: {theirs.get(name)} in the file, {key.get(name)} here"
        for name in sorted({*theirs, *key})
        if theirs.get(name) != key.get(name)
    ]
    if differences:
        raise ValueError(f"it was made for another machine or installation: {'; '.join(differences)}")
    known = _checked(content.get("choices"), dict, "choices")
    return {cache_key: _parse(value, repr(cache_key)) for cache_key, value in known.items()}


def _text(file: Path) -> str:
    """Returns the text of a file; never blocks, as a pipe would, and reads at most 16 MiB."""
    with open(
        file, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
    ) as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if (reason := _why_not_trusted(status)) is not None:
            raise ValueError(reason)
        content = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return content.decode("utf-8")


def _why_not_trusted(status: os.stat_result) -> str | None:
    """Returns why users other than this process's and root may have written a file, or None."""
    if not hasattr(os, "geteuid"):  # Windows
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, but this process to user {os.geteuid()}"
    return "every user may write it" if status.st_mode & stat.S_IWOTH else None


def _parse(content: object, where: str) -> Entry:
    fields = _checked(content, dict, where)
    chosen = _checked(fields.get("chosen"), str, f"{where}, chosen")
    measurements = _checked(fields.get("measurements"), dict, f"{where}, measurements")
    return Entry(
        chosen, {name: _parse_measurement(each, f"{where}, {name}") for name, each in measurements.items()}
    )


def _parse_measurement(content: object, where: str) -> Measurement:
    fields = _checked(content, dict, where)
    error, allowed, seconds = (
        _checked(fields.get(name), float | int | None, f"{where}, {name}")
        for name in ("error", "allowed", "seconds")
    )
    return Measurement(error, allowed, seconds, _checked(fields.get("flaw"), str | None, f"{where}, flaw"))


def _checked(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind):
        expected = getattr(kind, "__name__", kind)
        raise ValueError(f"{where}: got {value!r:.60}, expected {expected}")
    return value
