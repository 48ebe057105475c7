"""``cvt doctor``: installed components, and the backend of each operator on this machine with the reason."""

from __future__ import annotations

import argparse

import cvt_kernels as ck
from cvt_kernels import diagnosis

from .common import print_lines
from .paths import add_json_argument, reporting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_json_argument(parser, "the same report as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> None:
    with reporting(arguments.json, indent=1) as report_json:
        print_lines(arguments, [ck.doctor()])
        report_json(diagnosis.as_json())
