"""``cvt doctor``: what is installed, which backend each operator takes on this machine, and why."""

from __future__ import annotations

import argparse
from typing import Any

import cvt_kernels as ck
from cvt_kernels import diagnosis

from .common import print_lines
from .paths import add_json_argument, reporting


def add_parser(commands: Any) -> None:
    """Adds the command to those of ``cvt``."""
    parser = commands.add_parser(
        "doctor", help="what is installed, which backend each operator takes on this machine, and why"
    )
    add_json_argument(parser, "the same as data")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> None:
    with reporting(arguments.json, indent=1) as report_json:
        print_lines(arguments, [ck.doctor()])
        report_json(diagnosis.as_json())
