"""``cvt doctor``: what is installed, which backend each operator takes on this machine, and why."""

from __future__ import annotations

import argparse
from typing import Any

import cvt_kernels as ck

from .common import print_lines


def add_parser(commands: Any) -> None:
    """Adds the command to those of ``cvt``."""
    commands.add_parser(
        "doctor", help="what is installed, which backend each operator takes on this machine, and why"
    ).set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> None:
    print_lines([ck.doctor()])
