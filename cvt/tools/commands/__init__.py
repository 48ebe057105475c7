"""The command ``cvt``; each of its commands is a module of this package."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from .process import Parser, ended_by_signals, run_command

#: The commands, and what they do. A command's module is imported once it is chosen.
COMMANDS = {
    "classify": "print the most probable classes of photographs",
    "evaluate": "measure accuracy, loss and speed on a data set; count parameters and multiply-adds",
    "explain": "draw attention maps over photos; measure the entropy and attention distance of each head",
    "quantize": "quantize a model's linear layers to 8 bits, and report the loss of accuracy",
    "prune": "remove a model's least important hidden units and heads, and report the loss of accuracy",
    "export": "export a model by torch.export or to ONNX, and check the file's outputs",
    "train": "train or fine-tune a CvT; on several devices under torchrun",
    "doctor": "show what is installed, and which backend each operator uses on this machine and why",
    "tune": "check every kernel of a model against float64, time it, and remember the fastest backends",
    "bench": "compare accuracy, speed and memory with Hugging Face's model on real photos",
    "compile": "compile every Triton kernel for given GPUs, even on a machine without one; report registers, "
    "spills and shared memory",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``cvt``; returns the exit code. What stdout cannot encode is escaped."""
    with contextlib.suppress(AttributeError, OSError):  # of other streams, as in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    with ended_by_signals():
        arguments = _parse(argv)
        return run_command(f"cvt {arguments.command}", lambda: _run(arguments))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="cvt", description="Convolutional vision Transformers.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", parser_class=_CommandParser, required=True
    )
    for command, what in COMMANDS.items():
        commands.add_parser(command, help=what)
    return parser.parse_args(argv)


class _CommandParser(Parser):
    """The parser of a command, which gets its arguments when it parses: ``cvt --help`` needs none."""

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        name = self.prog.rpartition(" ")[2]
        importlib.import_module(f".{name}", __name__).add_arguments(self)
        return super().parse_known_args(*args, **options)


class _Version(argparse.Action):
    """Prints the version, and imports what has it only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from cvt_kernels import __version__

        print(f"{parser.prog} {__version__}")
        parser.exit()


def _run(arguments: argparse.Namespace) -> int | None:
    """Runs a command, after a warning if compiled kernels are missing, but for ``doctor``, which says so."""
    from cvt_kernels.machine import warn_of_missing_kernels  # lazy: --help needs none of it

    from .paths import check_outputs

    check_outputs(arguments)
    if arguments.command != "doctor":
        warn_of_missing_kernels()
    return arguments.run(arguments)
