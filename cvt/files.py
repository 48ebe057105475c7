"""Files that are written completely or not at all, whenever the process or the machine dies."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PathLike = str | os.PathLike[str]


@contextmanager
def filling(directory: _PathLike) -> Iterator[Path]:
    """Yields an empty folder; its files replace those in ``directory`` when the block ends without an error.

    Args:
        directory: Must exist.

    Raises:
        OSError: Nothing can be written there; before the block starts.
    """
    try:
        scratch = tempfile.TemporaryDirectory(dir=directory, prefix=".unfinished.")
    except OSError as error:
        raise _unwritable(directory, error) from error
    with scratch:
        yield Path(scratch.name)
        for file in sorted(Path(scratch.name).iterdir()):
            _move(file, Path(directory, file.name))


@contextmanager
def replacing(path: _PathLike) -> Iterator[Path]:
    """Yields where to write a file, which replaces ``path`` when the block ends without an error.

    That place is always the same file beside ``path``: the next writer overwrites what a killed one left. A
    device or a pipe is not replaced but written to.

    Raises:
        OSError: It cannot be written; before the block starts.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a directory, expected a file")
    if path.exists() and not path.is_file():
        yield path
        return
    scratch = path.with_name(f".unfinished.{path.name}")  # the suffix stays: some writers go by it
    try:
        open(scratch, "wb").close()
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    try:
        yield scratch
        _move(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_json(path: _PathLike, content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Writes an object as JSON, without what JSON does not have: NaN and infinity raise ``ValueError``."""
    text = json.dumps(content, indent=indent, allow_nan=False)
    Path(path).write_text(text + "\n", encoding="utf-8")


def check_writable(option: str, path: _PathLike, *, directory: bool) -> None:
    """Checks that a file can be written at ``path``, or files below it if it is a directory; makes nothing.

    Missing parents are allowed above a directory, not above a file. A device or a pipe, which
    :func:`replacing` writes to, need only be writable itself.

    Raises:
        OSError: None can; the message begins with ``option``.
    """
    path = Path(path).absolute()
    if not directory and path.is_dir():
        raise OSError(f"{option}: {path} is a directory, expected a file")
    if not directory and path.exists() and not path.is_file() and os.access(path, os.W_OK):
        return
    folder = path if directory else path.parent
    while directory and not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"{option}: {path} cannot be written: {folder} is no directory that takes files")


def _unwritable(directory: _PathLike, error: OSError) -> OSError:
    return OSError(f"{directory}: cannot be written to: {error.strerror}")


def _move(source: Path, target: Path) -> None:
    """Replaces ``target`` once ``source`` is on the disk, and waits until the folder says so too."""
    with open(source, "r+b") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    if os.name == "nt":  # Windows opens no folders
        return
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
