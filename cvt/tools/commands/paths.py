"""Paths among a command's arguments, with a check that no output overwrites an input."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cvt.checkpoints import local_place
from cvt.files import replacing, write_json
from cvt.hub import WEIGHT_SUFFIXES
from cvt.huggingface import CONFIGS, INDEX

STDOUT = "-"

#: The arguments that name folders of images, and models.
_DATA, _MODELS = ("data", "calibrate"), ("checkpoint", "teacher")


class InputPath(str):
    """A path, or the name of something, that a command reads."""


class OutputPath(str):
    """A path to which a command writes."""


def input_path(text: str) -> InputPath:
    """Parses an argument of argparse for what a command reads: anything but nothing."""
    return InputPath(_something(text))


def output_path(text: str) -> OutputPath:
    """Parses an argument of argparse for where a command writes: anything but nothing."""
    return OutputPath(_something(text))


def _something(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("got '', expected a path")
    return text


def add_json_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds ``--json``, for :func:`reporting`."""
    parser.add_argument(
        "--json", type=output_path, metavar="FILE", help=f"write {what}; {STDOUT} is standard output"
    )


@contextlib.contextmanager
def reporting(
    path: str | None, *, indent: int | None = None
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yields a function that takes the report of a command; the report is written when the block ends.

    The path is a file, ``-`` for standard output, or None for nowhere.
    """
    reports: list[Mapping[str, Any]] = []
    if path is None:
        yield reports.append
    elif path == STDOUT:
        yield reports.append
        for report in reports:
            print(json.dumps(report, indent=indent, allow_nan=False), flush=True)
    else:
        with replacing(path) as file:
            yield lambda report: write_json(file, report, indent=indent)


# Outputs that are inputs ----------------------------------------------------------------------------------


def check_outputs(arguments: argparse.Namespace, names: Mapping[str, Iterable[str]]) -> None:
    """Raises ValueError, naming the options, if an output is an input, or two outputs are the same file.

    Args:
        arguments: The command's. Images are listed only if an output exists already.
        names: The names of the files that it writes into folders, by the arguments for these.
    """
    outputs = [(option, path) for option, path in _of_kind(arguments, OutputPath) if path != STDOUT]
    inputs = list(_of_kind(arguments, InputPath))
    for index, (argument, path) in enumerate(outputs):
        for other, another in outputs[:index]:
            if os.path.realpath(path) == os.path.realpath(another) and not _is_special(path):
                raise ValueError(
                    f"{_option(argument)}: got {path!r} as {_option(other)}, expected another file"
                )
        files = [os.path.join(path, name) for name in names[argument]] if argument in names else [path]
        for other, source in inputs:
            if argument in names and other in _MODELS and _is_within(source, path, names[argument]):
                raise ValueError(
                    f"{_option(argument)}: got {path!r}, which has {_option(other)}, expected another place"
                )
            if any(_is_read(file, other, source) for file in files):
                raise ValueError(
                    f"{_option(argument)}: got {path!r}, expected a file that is no part of {_option(other)}"
                )


def _of_kind(arguments: argparse.Namespace, kind: type[str]) -> Iterator[tuple[str, str]]:
    for argument, value in vars(arguments).items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, kind):
                yield argument, str(each)


def _option(argument: str) -> str:
    return argument if argument == "photos" else f"--{argument.replace('_', '-')}"


def _is_read(output: str, argument: str, source: str) -> bool:
    """Returns whether a file is what an argument names, or one of its files."""
    if argument in _DATA:
        return os.path.isfile(output) and any(_is_same(output, file) for file in _images(source))
    place = local_place(source) if argument in _MODELS else Path(source)
    if not isinstance(place, Path):  # of the Hub
        return False
    if argument in _MODELS and os.path.isdir(place) and _is_of_model(os.path.basename(output)):
        return _is_same(os.path.dirname(output) or ".", place)
    return _is_same(output, place) and not _is_special(output)


def _is_within(source: str, folder: str, names: Iterable[str]) -> bool:
    """Returns whether a file of weights lies in the folder into which another model is written."""
    place = local_place(source)
    if not isinstance(place, Path) or not place.is_file() or not any(map(_is_of_model, names)):
        return False
    return _is_same(place.parent, folder)


def _is_of_model(name: str) -> bool:
    """Returns whether a folder with a model may be read by a file of this name."""
    return name in CONFIGS or name.endswith((INDEX, *WEIGHT_SUFFIXES))


def _images(source: str) -> Iterator[Path]:
    """Yields the files of a folder of images; only the files of its splits, if it has any."""
    from ..datasets import SPLITS, list_files  # Pillow, which the check of a new file need not wait for

    folders = [Path(source, split) for split in SPLITS if os.path.isdir(Path(source, split))]
    if not folders and os.path.isdir(source):
        folders = [Path(entry.path) for entry in os.scandir(source) if entry.is_dir()]
    for folder in folders:
        yield from list_files(folder)[0]


def _is_same(one: str | Path, another: str | Path) -> bool:
    try:
        return os.path.samefile(one, another)
    except OSError:
        return False


def _is_special(path: str) -> bool:
    """Returns whether something is neither a file nor a folder, but such as ``/dev/null``."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))
