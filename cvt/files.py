"""Atomic writes: a file is written completely or not at all, even if the process or the machine dies.

A symbolic link is followed: its target is replaced, and the link stays. A device or a pipe, such as
``/dev/stdout``, is written to at the end.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PathLike = str | os.PathLike[str]

# A disk, a quota or a limit of this process is full.
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_LONGEST_NAME = 143  # bytes that every file system takes; most take 255


@contextmanager
def making(directory: _PathLike) -> Iterator[None]:
    """Makes a folder and its parents; after an error, new folders are removed again if empty."""
    new = [folder for folder in (Path(directory), *Path(directory).parents) if not folder.exists()]
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in new:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def filling(directory: _PathLike) -> Iterator[Path]:
    """Yields an empty folder; its files replace those in ``directory`` when the block ends without an error.

    The directory must exist. OSError is raised before the block starts where nothing can be written there.
    """
    try:
        scratch = tempfile.TemporaryDirectory(dir=directory, prefix=".unfinished.")
    except OSError as error:
        raise _UnwritableError(directory, error) from error
    with scratch, _naming(Path(directory), Path(scratch.name)):
        yield Path(scratch.name)
        for file in sorted(Path(scratch.name).iterdir()):
            with replacing(Path(directory, file.name)) as place:
                shutil.move(file, place)


@contextmanager
def replacing(path: _PathLike) -> Iterator[Path]:
    """Yields a temporary path to write to; the file replaces ``path`` when the block ends without an error.

    The temporary file is always the same one beside ``path``: the next writer overwrites a killed one's.
    A device or a pipe gets the content of a temporary file at the end.

    Raises:
        OSError: It cannot be written; before the block starts, or where a disk is full, which names ``path``.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a directory, expected a file")
    if path.exists() and not path.is_file():
        with tempfile.TemporaryDirectory() as folder, _naming(path, Path(folder)):
            content = Path(folder, f"content{path.suffix}")
            content.touch()
            yield content
            try:
                with open(content, "rb") as source, open(path, "wb") as file:
                    shutil.copyfileobj(source, file)
            except OSError as error:
                raise _UnwritableError(path, error) from error
        return
    place = Path(os.path.realpath(path))
    if place.is_symlink():
        raise OSError(f"{path}: is a link that leads back to itself, expected a file")
    scratch = place.with_name(_scratch_name(place.stem, path.suffix))
    try:
        open(scratch, "wb").close()
    except OSError as error:
        raise _UnwritableError(path.parent if place.parent.is_dir() else place.parent, error) from error
    try:
        with _naming(path, scratch):
            yield scratch
            _move(scratch, place)
    finally:
        scratch.unlink(missing_ok=True)


def _scratch_name(stem: str, suffix: str) -> str:
    """Returns the name of an unfinished file, with the suffix of the whole one: some writers go by it."""
    name = f".unfinished.{stem}{suffix}"
    if len(os.fsencode(name)) <= _LONGEST_NAME:
        return name
    return f".unfinished.{hashlib.sha256(os.fsencode(name)).hexdigest()}{suffix[:16]}"


def write_json(path: _PathLike, content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Writes an object as strict JSON: NaN and infinity raise ``ValueError``."""
    text = json.dumps(content, indent=indent, allow_nan=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        error.filename = os.fspath(path)  # of several files that are being written, which one
        raise


def check_writable(option: str, path: _PathLike, *, directory: bool) -> None:
    """Raises OSError, which begins with ``option``, where a file or files in a folder cannot be written.

    Nothing is created. Missing parents are allowed above a directory, not above a file.
    """
    path = Path(path).absolute()
    if not directory and path.is_dir():
        raise OSError(f"{option}: {path} is a directory, expected a file")
    if not directory and path.exists() and not path.is_file():
        if not os.access(path, os.W_OK):
            raise OSError(f"{option}: {path} cannot be written to: permission denied")
        return
    if path.is_symlink() and not path.exists() and (directory or Path(os.path.realpath(path)).is_symlink()):
        raise OSError(f"{option}: {path} is a link that leads nowhere")
    folder = path if directory else Path(os.path.realpath(path)).parent
    while directory and not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"{option}: {path} cannot be written: {folder} is no directory that takes files")


# Errors, and what replaces --------------------------------------------------------------------------------


@contextmanager
def _naming(path: Path, scratch: Path) -> Iterator[None]:
    """Lets an error of a full disk name ``path``, if it is about ``scratch`` or about no file at all."""
    try:
        yield
    except OSError as error:
        name = error.filename
        if error.errno in _FULL and (name is None or Path(str(name)).is_relative_to(scratch)):
            raise _UnwritableError(path, error) from error
        raise


class _UnwritableError(OSError):
    """An error with its number and file, by which those around it may name the file that a user knows."""

    def __init__(self, path: _PathLike, error: OSError) -> None:
        super().__init__(error.errno, error.strerror, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: cannot be written to: {self.strerror}"


def _move(source: Path, target: Path) -> None:
    """Replaces ``target`` once ``source`` is on the disk, and waits until the folder says so too."""
    with open(source, "r+b") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
