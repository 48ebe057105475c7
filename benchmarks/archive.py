"""The archive of a stage: its results, and what it built and tuned, for a later stage on another machine.

These are the extension with a digest of its sources, the choices that were tuned and the kernels that Triton
compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection
from pathlib import Path

from cvt.files import replacing
from cvt_kernels.tuning import choices

ROOT = Path(__file__).resolve().parent.parent
#: Bytes of an archive, from which on kernels are left out: they can be compiled again.
LIMIT = 15 * 2**20
RESULTS, CHOICES, KERNELS, EXTENSION = "results", "choices", "triton", "extension"
#: The file beside the extension with the digest of the sources that it was built of.
SOURCES = "sources.txt"


def choices_directory() -> Path:
    """Returns the folder of the files of choices."""
    return choices.cache_directory() / "choices"


def kernels_directory() -> Path:
    """Returns the folder of Triton's cache, with a folder for each compiled kernel."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def kernels() -> set[str]:
    """Returns the names of the folders there."""
    directory = kernels_directory()
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def digest_of_sources() -> str:
    """Returns a digest of what the extension is built of."""
    digest = hashlib.sha256()
    for path in sorted([ROOT / "setup.py", *(p for p in (ROOT / "csrc").rglob("*") if p.is_file())]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def built() -> list[Path]:
    """Returns the extensions that are built in this checkout."""
    return sorted((ROOT / "cvt_kernels").glob("_C*.so"))


def note_sources() -> None:
    """Notes that the extension has just been built of the sources as they are."""
    path = ROOT / "build" / "gpu" / SOURCES
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(digest_of_sources(), encoding="utf-8")


def is_built() -> bool:
    """Returns whether an extension is here that was built of the sources as they are."""
    path = ROOT / "build" / "gpu" / SOURCES
    return bool(built()) and path.is_file() and path.read_text(encoding="utf-8") == digest_of_sources()


def write(path: Path, results: Path, known: Collection[str] = (), limit: int = LIMIT) -> int:
    """Writes the archive.

    Args:
        path: The file, a ``.tar.gz``.
        results: The folder of the stage's results.
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
        if choices_directory().is_dir():
            archive.add(choices_directory(), CHOICES)
        if is_built():
            for part in (*built(), ROOT / "build" / "gpu" / SOURCES):
                archive.add(part, f"{EXTENSION}/{part.name}")
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
    """Puts to use what an archive holds, or a folder that has been made of one.

    Existing files stay, but entries are added to those of the same machine, and an extension that was built
    of other sources is not taken.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = path
        if path.is_file():
            source = Path(scratch)
            try:
                with tarfile.open(path) as archive:
                    files, used = filter(tarfile.TarInfo.isreg, archive), {CHOICES, KERNELS, EXTENSION}
                    members = [each for each in files if each.name.split("/")[0] in used]
                    archive.extractall(source, members, filter="data")
            except (tarfile.TarError, EOFError) as error:
                raise ValueError(f"{path}: is no archive of a stage") from error
        elif not path.is_dir():
            raise FileNotFoundError(f"{path}: is no archive of a stage, and no folder")
        adopt(source / CHOICES, source / KERNELS)
        sources = source / EXTENSION / SOURCES
        if not is_built() and sources.is_file() and sources.read_text("utf-8") == digest_of_sources():
            for file in sources.parent.glob("_C*.so"):
                shutil.copy2(file, ROOT / "cvt_kernels" / file.name)
            note_sources()


def adopt(entries: Path, compiled: Path) -> None:
    """Adds entries and compiled kernels to the caches."""
    for file in entries.glob("*.json"):
        known = choices_directory() / file.name
        known.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = json.loads(file.read_text(encoding="utf-8"))
        if known.exists():
            content["choices"] |= json.loads(known.read_text(encoding="utf-8"))["choices"]
        with replacing(known) as scratch:
            scratch.write_text(json.dumps(content), encoding="utf-8")
    for file in compiled.rglob("*"):
        copy = kernels_directory() / file.relative_to(compiled)
        if not file.is_file() or copy.exists():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not file.name.startswith("__grp__"):
            shutil.copy2(file, copy)
            continue
        group = json.loads(file.read_text(encoding="utf-8"))  # the paths of the files of a kernel
        paths = {name: str(copy.with_name(Path(path).name)) for name, path in group["child_paths"].items()}
        copy.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
