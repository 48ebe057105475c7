"""Files of entries: atomic writes, reading, permissions, and removal of leftovers."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import locks
from .entries import Entry, Measurement

_SCHEMA, _VERSION = "cvt-kernels entries", 2
_NUMBERS = ("error", "allowed", "seconds", "host_seconds")
_MOST_BYTES = 2**24  # of a file; an entry takes about a thousand
_OLD_SECONDS = 3600.0  # the age from which a temporary file or a lock is a leftover
_IS_POSIX = hasattr(os, "geteuid")

# Writing --------------------------------------------------------------------------------------------------


def write(path: Path, key: Mapping[str, object], entries: Mapping[str, Entry]) -> None:
    """Writes a file atomically, and removes what killed processes have left."""
    content = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "machine": key,
        "entries": {
            cache_key: {
                **entry._asdict(),
                "measurements": {
                    name: measurement._asdict() for name, measurement in entry.measurements.items()
                },
            }
            for cache_key, entry in entries.items()
        },
    }
    text = json.dumps(content, sort_keys=True, indent=1, allow_nan=False)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(8).hex()}")
    try:
        scratch.touch(0o644, exist_ok=False)  # or it would not be trusted where the umask is 0
        scratch.write_text(text + "\n", encoding="utf-8")
        os.replace(scratch, path)
        _remove_leftovers(path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def storable(entry: Entry) -> Entry:
    """Returns an entry as its file has it: without NaN and infinity, which JSON lacks."""
    measurements = {}
    for name, measurement in entry.measurements.items():
        flaw = measurement.flaw
        if flaw is None and measurement.error is not None and not math.isfinite(measurement.error):
            flaw = f"wrong: its error is {measurement.error}"
        values = {each: getattr(measurement, each) for each in _NUMBERS}
        numbers: dict[str, Any] = {
            each: None if value is None or not math.isfinite(value) else float(value)
            for each, value in values.items()
        }
        measurements[name] = measurement._replace(**numbers, flaw=flaw)
    return entry._replace(measurements=measurements)


def make_folder(folder: Path) -> None:
    """Creates a folder unless it exists.

    Raises:
        OSError: It cannot be created, or is not trusted.
    """
    folder.mkdir(0o755, parents=True, exist_ok=True)
    if (reason := _why_not_trusted(os.stat(folder))) is not None:
        raise PermissionError(errno.EPERM, reason, str(folder))


def why_not_writable(folder: Path) -> str | None:
    """Returns why files cannot be written in a folder, or None; creates it and a file in it to find out."""
    try:
        make_folder(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".tried.{os.getpid()}.") as file:
            file.write(b"1")
            file.flush()
    except OSError as error:
        return reason(error)
    return None


def why_not_permitted(folder: Path) -> str | None:
    """Returns why files may not be written in a folder, or None, by permissions alone.

    If the folder does not exist, the nearest existing one above it counts.
    """
    nearest = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)
    if not nearest.is_dir():
        return f"{nearest}: {os.strerror(errno.ENOTDIR)}"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest}: {os.strerror(errno.EACCES)}"
    return why_folder_not_trusted(folder)


def why_folder_not_trusted(folder: Path) -> str | None:
    """Returns why files in a folder are not trusted, since other users may write there, or None."""
    try:
        reason = _why_not_trusted(os.stat(folder))
    except OSError:  # it does not exist, or cannot be read
        return None
    return None if reason is None else f"{folder}: {reason}"


def _why_not_trusted(status: os.stat_result) -> str | None:
    """Returns why users other than this process's and root may have written a file, or None."""
    if not _IS_POSIX:
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, but this process to user {os.geteuid()}"
    if status.st_mode & stat.S_IWOTH:
        return "every user may write it"
    return None


def reason(error: OSError) -> str:
    """Returns the message of an error, with the name of its file."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


# Leftovers ------------------------------------------------------------------------------------------------

#: The names of temporary files, with their process ID, and of locks.
_SCRATCH = re.compile(r"\.(?:tried|\w+\.json)\.(?:(\d+)\.)?\w+")
_LOCK = re.compile(r"(\w+)\.(?:tuning|writing)")


def _remove_leftovers(path: Path) -> None:
    """Removes what killed processes have left in the folder of a file that was just written."""
    with contextlib.suppress(OSError):
        newest_left = path.stat().st_mtime - _OLD_SECONDS  # by the clock of the disk
        with os.scandir(path.parent) as entries:
            for entry in entries:
                if entry.stat(follow_symlinks=False).st_mtime < newest_left:
                    _remove_if_left(Path(entry.path))


def _remove_if_left(path: Path) -> None:
    """Removes an old file if it is a temporary one, or the lock of a file that was never written."""
    with contextlib.suppress(OSError):
        if (scratch := _SCRATCH.fullmatch(path.name)) and not _runs(int(scratch[1] or 0)):
            path.unlink()
        elif (lock := _LOCK.fullmatch(path.name)) and not path.with_name(f"{lock[1]}.json").exists():
            locks.remove_unless_held(path)


def _runs(process: int) -> bool:
    """Returns whether a process runs; False on Windows, where its open files cannot be removed anyway."""
    if not (_IS_POSIX and process):
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        pass
    return True


# Reading --------------------------------------------------------------------------------------------------


def read(path: Path, key: Mapping[str, object], *, may_be_missing: bool = False) -> dict[str, Entry] | str:
    """Reads the entries of a file, for a machine key.

    Returns:
        Cache key → entry, or why the file cannot be used. It is empty for a file of another type of device,
        and for a missing file if ``may_be_missing``.
    """
    try:
        return _parse(_text(path), key)
    except (FileNotFoundError, NotADirectoryError) as error:
        return {} if may_be_missing else error.strerror or str(error)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeDecodeError as error:
        return f"it is not text: {error}"
    except (json.JSONDecodeError, RecursionError) as error:
        return f"it is not JSON: {error}"
    except ValueError as error:
        return str(error)


def _text(path: Path) -> str:
    """Returns the text of a file; never blocks, as a pipe would, and reads at most 16 MiB.

    Raises:
        ValueError: It is not a regular file, too large, not trusted, or not text.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if (reason := _why_not_trusted(status)) is not None:
            raise ValueError(reason)
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return content.decode("utf-8")


def _open_at_once(name: str, flags: int) -> int:
    """Opens a file without blocking, as a pipe would until somebody writes."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _parse(text: str, key: Mapping[str, object]) -> dict[str, Entry]:
    """Returns the entries in a file's text, none if they are for another type of device.

    Raises:
        ValueError: It is not a file of entries, or one for another machine.
    """
    content = _checked(json.loads(text), dict, "file")
    found = _fields(content, {"schema": str, "version": int}, "")
    for name, expected in (("schema", _SCHEMA), ("version", _VERSION)):
        if found[name] != expected:
            raise ValueError(f"{name}: got {found[name]!r}, expected {expected!r}")
    theirs, entries = _fields(content, {"machine": dict, "entries": dict}, "").values()
    if theirs.get("device") != key.get("device"):
        return {}
    differences = [
        f"{name}: {_told(theirs.get(name))} in the file, {_told(key.get(name))} here"
        for name in sorted({*theirs, *key})
        if theirs.get(name) != key.get(name)
    ]
    if differences:
        raise ValueError(f"it was made for another machine or installation: {'; '.join(differences)}")
    return {cache_key: _parse_entry(value, repr(cache_key)) for cache_key, value in entries.items()}


def _told(fact: object) -> str:
    return "none" if fact in (None, "") else str(fact)


_KINDS_OF_ENTRY = {"chosen": str, "chosen_in_graphs": str, "measurements": dict, "timings": int}
_KINDS_OF_MEASUREMENT = dict.fromkeys(_NUMBERS, float | int | None) | {
    "flaw": str | None,
    "is_disturbed": bool,
}


def _parse_entry(content: object, where: str) -> Entry:
    entry = Entry(**_fields(content, _KINDS_OF_ENTRY, f"{where}, "))
    measurements = {
        name: _parse_measurement(measurement, f"{where}, {name}")
        for name, measurement in entry.measurements.items()
    }
    return entry._replace(measurements=measurements)


def _parse_measurement(content: object, where: str) -> Measurement:
    fields = _fields(content, _KINDS_OF_MEASUREMENT, f"{where}, ")
    for name in _NUMBERS:
        value = fields[name]
        if value is not None:
            if isinstance(value, bool) or not abs(value) <= sys.float_info.max:
                raise ValueError(f"{where}, {name}: got {value!r:.60}, expected a finite number or null")
            fields[name] = float(value)
    return Measurement(**fields)


def _fields(content: object, kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields in ``kinds`` of a JSON object; raises ValueError if one has another type."""
    found = _checked(content, dict, where.removesuffix(", "))
    for name, kind in kinds.items():
        if name not in found:
            raise ValueError(f"{where}{name}: is missing")
        _checked(found[name], kind, f"{where}{name}")
    return {name: found[name] for name in kinds}


def _checked(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind):
        expected = getattr(kind, "__name__", kind)
        raise ValueError(f"{where}: got {value!r:.60}, expected {expected}")
    return value
