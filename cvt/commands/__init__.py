"""The command ``cvt``; each of its commands is a module of this package."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from cvt_kernels import __version__

from . import bench, classify, compile, doctor, evaluate, explain, export, prove, train  # noqa: A004 (their names)
from .common import run_command

_COMMANDS = (classify, evaluate, explain, export, train, doctor, prove, bench, compile)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``cvt``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="cvt", description="Convolutional vision Transformers.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    return run_command(f"cvt {arguments.command}", lambda: arguments.run(arguments))
