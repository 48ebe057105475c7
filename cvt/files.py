"""Atomic writes: a file is written completely or not at all, even if the process or the machine dies.

A symbolic link is followed: its target is replaced, and the link stays. A device or a pipe, such as
``/dev/stdout``, is written to at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PathLike = str | os.PathLike[str]


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
        raise _unwritable(directory, error) from error
    with scratch:
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
        OSError: It cannot be written; as a rule before the block starts.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a directory, expected a file")
    if path.exists() and not path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            content = Path(folder, f"content{path.suffix}")
            content.touch()
            yield content
            try:
                with open(content, "rb") as source, open(path, "wb") as file:
                    shutil.copyfileobj(source, file)
            except OSError as error:
                raise _unwritable(path, error) from error
        return
    place = Path(os.path.realpath(path))
    if place.is_symlink():
        raise OSError(f"{path}: is a link that leads back to itself, expected a file")
    scratch = place.with_name(f".unfinished.{place.stem}{path.suffix}")  # some writers go by the suffix
    try:
        open(scratch, "wb").close()
    except OSError as error:
        raise _unwritable(path.parent if place.parent.is_dir() else place.parent, error) from error
    try:
        yield scratch
        _move(scratch, place)
    finally:
        scratch.unlink(missing_ok=True)


def write_json(path: _PathLike, content: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Writes an object as strict JSON: NaN and infinity raise ``ValueError``."""
    Path(path).write_text(json.dumps(content, indent=indent, allow_nan=False) + "\n", encoding="utf-8")


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


def _unwritable(path: _PathLike, error: OSError) -> OSError:
    return OSError(f"{os.fspath(path)}: cannot be written to: {error.strerror}")


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
