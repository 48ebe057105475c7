"""The command ``cvt``; each of its commands is a module of this package."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from cvt_kernels import __version__
from cvt_kernels.missing import warn_of_missing_kernels

from . import bench, classify, compile, doctor, evaluate, explain, export, prune, quantize, train, tune  # noqa: A004 (their names)
from .common import print_remarks
from .paths import check_outputs
from .process import Parser, orderly, run_command

_COMMANDS = (classify, evaluate, explain, quantize, prune, export, train, doctor, tune, bench, compile)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``cvt``; returns the exit code."""
    with orderly():
        arguments = _parse(argv)
        return run_command(f"cvt {arguments.command}", arguments, lambda: _run(arguments))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="cvt", description="Convolutional vision Transformers.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    words = sys.argv[1:] if argv is None else [*argv]
    if words[:1] == ["prove"]:  # the former name of cvt tune, for one more release
        words[0] = "tune"
    arguments = parser.parse_args(words)
    if arguments.command is None:
        parser.error_with_help("a command is missing")
    return arguments


def _run(arguments: argparse.Namespace) -> int | None:
    """Runs a command, after a one-line warning if compiled kernels are missing.

    ``arguments.written``, if there, returns the names of the files that the command writes into folders.
    """
    written = vars(arguments).pop("written", None)
    check_outputs(arguments, {} if written is None else written(arguments))
    if arguments.command != "doctor":  # whose report says so anyway
        with warnings.catch_warnings(record=True) as caught:
            warn_of_missing_kernels()
        print_remarks(arguments, [str(warning.message) for warning in caught])
    return arguments.run(arguments)
