"""The archive of a run: its results, the autotuning cache and the compiled Triton kernels.

It also carries cache entries and compiled kernels over to a run on another machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from cvt.files import replacing
from cvt_kernels import autotune

#: Bytes of an archive, from which on kernels are left out: they can be compiled again.
LIMIT = 15 * 2**20
RESULTS, ENTRIES, KERNELS = "results", "entries", "triton"


def entries_directory() -> Path:
    """Returns the folder of the autotuning cache."""
    return autotune.cache_directory() / "entries"


def kernels_directory() -> Path:
    """Returns the folder of Triton's cache, with a folder for each compiled kernel."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def kernels() -> set[str]:
    """Returns the names of the folders there."""
    directory = kernels_directory()
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def write(path: Path, results: Path, known: Collection[str] = (), limit: int = LIMIT) -> int:
    """Writes the archive.

    Args:
        path: The file, a ``.tar.gz``.
        results: The folder of the run's results.
        known: Folders of kernels that need not come along.
        limit: Bytes of the file, from which on no kernel is added.

    Returns:
        The number of kernels that are left out.
    """
    directory = kernels_directory()
    made = sorted(kernels() - set(known), key=lambda name: _changed(directory / name))
    left_out = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        replacing(path) as scratch,
        scratch.open("wb") as file,
        tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive,
    ):
        archive.add(results, f"{RESULTS}/{results.parent.name}/{results.name}")
        if entries_directory().is_dir():
            archive.add(entries_directory(), ENTRIES)
        for name in made:
            if file.tell() > limit:
                left_out += 1
                continue
            with contextlib.suppress(FileNotFoundError):  # what killed processes left, others take away
                archive.add(directory / name, f"{KERNELS}/{name}")
    return left_out


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # a process may be at it
        return 0.0


def restore(path: Path) -> None:
    """Puts the entries and kernels of an archive, or of a folder like one, into the caches.

    Existing files stay. Entries apply to machines with the same machine key as the one they come from.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = path
        if path.is_file():
            source = Path(scratch)
            try:
                with tarfile.open(path) as archive:
                    archive.extractall(source, members=_to_restore(archive), filter="data")
            except (tarfile.TarError, EOFError) as error:
                raise ValueError(f"{path}: is no archive of a stage: {error}") from error
        for name, target in ((ENTRIES, entries_directory()), (KERNELS, kernels_directory())):
            for file in (source / name).rglob("*"):
                copy = target / file.relative_to(source / name)
                if file.is_file() and not copy.exists():
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(file, copy)


def _to_restore(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        if member.isreg() and member.name.startswith((f"{ENTRIES}/", f"{KERNELS}/")):
            yield member
