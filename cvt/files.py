"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PathLike = str | os.PathLike[str]


@contextmanager
def filling(directory: _PathLike) -> Iterator[Path]:
    """An empty folder; its files replace those in ``directory`` when the block ends, unless by an exception.

    Args:
        directory: Must exist.

    Raises:
        OSError: Nothing can be written there; before the block starts.
    """
    try:
        scratch = tempfile.TemporaryDirectory(dir=directory)
    except OSError as error:
        raise OSError(f"{directory}: cannot be written to: {error.strerror}") from error
    with scratch:
        yield Path(scratch.name)
        for file in sorted(Path(scratch.name).iterdir()):
            os.replace(file, Path(directory, file.name))


@contextmanager
def replacing(path: _PathLike) -> Iterator[Path]:
    """Where to write a file that replaces ``path`` when the block ends, unless by an exception.

    Raises:
        OSError: It cannot be written; before the block starts.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a directory, expected a file")
    with filling(path.parent) as scratch:
        yield scratch / path.name
