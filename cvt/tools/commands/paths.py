"""Paths among a command's arguments, with a check that no output overwrites an input."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cvt.checkpoints import local_place
from cvt.files import check_writable, replacing, write_json
from cvt.hub import WEIGHT_SUFFIXES
from cvt.huggingface import CONFIGS, INDEX

from ..datasets import list_files

STDOUT = "-"


class _Path(str):
    def __new__(cls, text: str) -> _Path:
        if not text:
            raise argparse.ArgumentTypeError("got '', expected a path")
        return super().__new__(cls, text)


class InputPath(_Path):
    """The ``type`` of an argument that is a path, or the name of something, that a command reads."""


class OutputPath(_Path):
    """The ``type`` of an argument that is a path to which a command writes."""


def add_json_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds ``--json``, for :func:`reporting`."""
    text = f"write {what}; {STDOUT} is standard output"
    parser.add_argument("--json", type=OutputPath, metavar="FILE", help=text)


@contextlib.contextmanager
def reporting(
    path: str | None, *, indent: int | None = None
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields a function that takes the report of a command; the report is written when the block ends.

    The path is a file, ``-`` for standard output, or None for nowhere.
    """
    if path is not None and path != STDOUT:
        with replacing(path) as file:
            yield lambda report: write_json(file, report, indent=indent)
        return
    reports: list[Mapping[str, Any]] = []
    yield reports.append
    for report in reports if path == STDOUT else ():
        print(json.dumps(report, indent=indent, allow_nan=False), flush=True)


@contextlib.contextmanager
def staged(arguments: argparse.Namespace) -> Iterator[tuple[Path, Callable[[Mapping[str, Any]], None]]]:
    """Yields the file for ``--output`` and what takes the report; after the block both are there, or none."""
    # The report ends first: where it cannot be written, --output stays as it was.
    with replacing(arguments.output) as file, reporting(arguments.json) as report_json:
        yield file, report_json


def check_outputs(arguments: argparse.Namespace) -> None:
    """Checks, before a long run, that outputs can be written and are neither inputs nor the same file.

    ``arguments.written``, if there, returns the names of the files that go into folders, by argument.
    OSError and ValueError name the options.
    """
    written = vars(arguments).pop("written", None)
    names = {} if written is None else written(arguments)
    outputs: dict[Any, str] = {}
    for argument, path in _of_kind(arguments, OutputPath):
        if path == STDOUT:
            continue
        option = _option(argument)
        check_writable(option, path, directory=argument in names)
        for file in [os.path.join(path, name) for name in names.get(argument, [])] or [path]:
            if os.path.exists(file) and not os.path.isfile(file):  # a device or a pipe
                continue
            if (other := outputs.setdefault(_place(file), option)) != option:
                raise ValueError(f"{option}: got {path!r} as {other}, expected another file")
    is_any_there = any(isinstance(place, tuple) for place in outputs)
    for argument, source in _of_kind(arguments, InputPath) if is_any_there else ():
        for read in _files_of(argument, source):
            if _place(read) in outputs:
                raise ValueError(
                    f"{outputs[_place(read)]}: got {str(read)!r}, expected a file that is no part of "
                    f"{_option(argument)}"
                )


def _of_kind(arguments: argparse.Namespace, kind: type[str]) -> Iterator[tuple[str, str]]:
    for argument, value in vars(arguments).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, kind):
                yield argument, str(each)


def _option(argument: str) -> str:
    return argument if argument == "photos" else f"--{argument.replace('_', '-')}"


def _place(path: str | Path) -> Any:
    """Returns what is the same for all names of a file, links too."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


def _files_of(argument: str, source: str) -> Iterator[Path]:
    """Yields the files that an argument names: itself, those of a model's folder, or images."""
    if argument in ("data", "calibrate"):
        files = list_files(Path(source)) if os.path.isdir(source) else []
        yield from (file for file in files if file.parent != Path(source))  # in folders of splits or classes
    elif argument not in ("checkpoint", "teacher"):
        yield Path(source)
    elif isinstance(place := local_place(source), Path):  # not of the Hub
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        weights = (INDEX, *WEIGHT_SUFFIXES)
        yield from (file for file in files if file == place or file.name.endswith((*weights, *CONFIGS)))
