"""A folder with small models, images and other files, and the run of a command line in it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import io
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from cvt import create_model, save_huggingface
from cvt.card import ModelCard
from cvt.factory import randomize
from cvt.tools.commands import _parse, main, paths
from cvt_kernels import backends
from cvt_kernels.tuning import choices
from tests.checks import remember_entry
from tests.cvt.models import SMALL

from .worker import Answer, limited_memory

_SECONDS, _CPU_SECONDS = 100, 20  # after which a command is interrupted, as by the user
_INTERRUPTED = 130  # the exit code of such a command
_MEMORY = 8 * 2**30  # bytes that a command may take beside what the process has
#: Commands that say by exit code 1 that something was found.
_MAY_RETURN_1 = ("compile", "tune", "quantize", "doctor")
#: Makes the folder ``run``.
TRAIN = (
    "train --data data --output run --model cvt_nano --image-size 16 --batch-size 4 --workers 0 --device cpu"
)
#: A pattern that the file of the entries of this machine matches.
ENTRIES = "cache/cvt_kernels/entries/*.json"


@functools.cache
def template() -> Path:
    """Makes the folder that every run gets a copy of; returns its path."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / "world"
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / "data" / split / name).mkdir(parents=True)
            for i in range(3):
                _photo(generator, (16, 16)).save(folder / "data" / split / name / f"{i}.png")
    for name in ("photo.png", "photo.jpg"):
        _photo(generator, (20, 24)).save(folder / name)
    model = create_model(SMALL, num_classes=2, activation="gelu").eval()
    randomize(model)
    card = ModelCard(model.config, ["cat", "dog"], 16, 1.0)
    torch.save({"state_dict": model.state_dict(), "card": card.to_dict()}, folder / "model.pth")
    save_huggingface(model, folder / "model", labels=["cat", "dog"], image_size=16)
    (folder / "labels.json").write_text('{"0": "cat", "1": "dog"}')
    (folder / "labels.txt").write_text("cat\ndog\n")
    with copied(folder) as place:
        for line in (
            "quantize --checkpoint model.pth --calibrate data --output quantized.safetensors --images 2",
            "prune --checkpoint model.pth --mlp 0.5 --output pruned.safetensors",
        ):
            answer = run(place, line.split())
            assert not answer.flaws, answer
        with _bounded(place):
            remember_entry("reference", "gelu", torch.zeros(2), approximate="none")
        shutil.copytree(place, folder, dirs_exist_ok=True)
    return folder


@functools.cache
def template_with_run() -> Path:
    """Makes the same folder with ``run``, of a training of one epoch; returns its path."""
    folder = template().parent / "with_run" / "world"
    with copied(template()) as place:
        answer = run(place, f"{TRAIN} --epochs 1".split())
        assert not answer.flaws, answer
        shutil.copytree(place, folder)
    return folder


def _photo(generator: torch.Generator, size: tuple[int, int]) -> Image.Image:
    pixels = torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """Yields a copy of a folder, alone in another, in which the block runs; deletes it afterwards."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        place = Path(name) / "world"
        shutil.copytree(folder, place)
        os.chdir(place)
        try:
            yield place
        finally:
            os.chdir(before)


def run(place: Path, argv: list[str], *, may_last: bool = False) -> Answer:
    """Runs a command line of ``cvt`` in a folder, and says what is wrong with how it ends.

    Args:
        place: The folder.
        argv: The words after ``cvt``.
        may_last: Whether it may be interrupted because it takes long, as a training of many epochs does.
    """
    out, err = io.StringIO(), io.StringIO()
    before = _contents(place.parent)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _bounded(place):
            code = main(argv)
    except SystemExit as ended:  # of argparse
        code = ended.code
    except BaseException as error:
        return Answer([f"raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"])
    if may_last and code == _INTERRUPTED:
        code = 0
    flaws = list(_flaws(argv, code, err.getvalue()))
    changed = sorted({path for path, _ in _contents(place.parent).items() ^ before.items()})
    if code == 2 and changed:
        flaws.append(f"has failed, but changed {changed[0]}")
    if code == 0 and changed:
        inputs = {str(path.relative_to(place.parent)) for path in _inputs_of(argv, place)}
        flaws += [f"changed {path}, which it reads" for path in changed if path in inputs]
    return Answer(flaws)


def _inputs_of(argv: list[str], place: Path) -> Iterator[Path]:
    """Yields the files in a folder that a command line reads."""
    for argument, given in paths._of_kind(_parse(argv), paths.InputPath):
        folders = (
            [place / given / split for split in ("train", "val")] if argument == "data" else [place / given]
        )
        for path in folders:
            yield from (each.resolve() for each in (path.rglob("*") if path.is_dir() else [path]))


def _flaws(argv: list[str], code: Any, err: str) -> Iterator[str]:
    if "Traceback" in err:
        yield f"prints a traceback: {err.strip().splitlines()[-1][:200]}"
    errors = [line for line in err.splitlines() if "error:" in line]
    command = argv[0] if argv else ""
    if code == 2 and (len(errors) != 1 or errors[0] != err.splitlines()[-1]):
        yield f"ends with exit code 2 and {len(errors)} lines that say why: {err[-200:]!r}"
    if code not in (0, 2) and not (code == 1 and command in _MAY_RETURN_1):
        yield f"ends with exit code {code}: {err[-200:]!r}"


@contextlib.contextmanager
def _bounded(place: Path) -> Iterator[None]:
    """Lets the block run for a limited time in limited memory, offline, with a cache of its own."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    environment = {"XDG_CACHE_HOME": f"{place}/cache", "HF_HUB_OFFLINE": "1", "HF_HOME": f"{place}/hub"}
    previous = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
    try:
        with warnings.catch_warnings(), limited_memory(_MEMORY):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(threads)
        choices.forget()
        backends.forget()
        for name, value in previous.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _contents(folder: Path) -> dict[str, str]:
    """Returns the files of a folder and what is in them; without the caches, which a failure may fill."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
        if not {"cache", "hub"} & {*path.relative_to(folder).parts}
    }
