"""``cvt doctor``: installed components, and the backend of each operator on this machine with the reason."""

from __future__ import annotations

import argparse

import torch

import cvt_kernels as ck
from cvt_kernels.tuning import diagnosis

from .common import option, print_result
from .paths import add_json_argument, reporting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    text = (
        "also check every kernel that may serve here against float64, in a process of its own, in about a "
        "minute; exit code 1: one is wrong, fails, hangs or crashes"
    )
    option(parser, "--check", text, action="store_true")
    add_json_argument(parser, "the same report as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    flaws: dict[str, str] = {}
    lines = [ck.doctor()]
    if arguments.check:
        from cvt_kernels.tuning.run import check_kernels

        devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
        checked = {name: each for device in devices for name, each in check_kernels(device).items()}
        flaws = {name: each.flaw for name, each in checked.items() if each.flaw is not None}
        lines += ["", f"{len(checked)} checks against float64, {len(flaws)} failed"]
        lines += [f"  {name}: {flaw}" for name, flaw in flaws.items()]
        lines += ["Please report these lines."] if flaws else []
    with reporting(arguments.json, indent=1) as report_json:
        print_result(arguments, lines)
        report_json({**diagnosis.as_json(), **({"check": flaws} if arguments.check else {})})
    return int(bool(flaws))
