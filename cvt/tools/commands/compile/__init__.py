"""``cvt compile``: compiles every Triton kernel for given GPUs, on a machine that need not have one."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cvt.config import DTYPES, PRESETS
from cvt.extras import require
from cvt.files import check_writable

from ..common import batch_size, image_size, integer, naming_options, positive_int, print_lines
from ..paths import STDOUT, add_json_argument, reporting
from .gpus import LIMITS
from .launches import PYRAMIDS, TRITON_OPERATORS

if TYPE_CHECKING:
    from . import jobs

_ARCHS = {f"sm_{number}": number for number in LIMITS}
_NOT_BY_DEFAULT = tuple(name for name, each in TRITON_OPERATORS.items() if not each.by_default)
#: The operators that are compiled by default.
OPERATORS = tuple(name for name in TRITON_OPERATORS if name not in _NOT_BY_DEFAULT)
#: The most names that an error lists.
_LISTED = 12
NOTHING = "--model, --operator, --stage: none of these models has such an operator or stage"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_selection_arguments(parser, OPERATORS)
    add_json_argument(parser, "the report")
    parser.set_defaults(run=_compile)


def add_selection_arguments(parser: argparse.ArgumentParser, operators: Sequence[str]) -> None:
    """Adds the options that select kernels, by default of the given operators, and ``--jobs``."""
    for option, name, kind, default, text in (
        ("--arch", "archs", str, ["sm_90"],
         f"GPU architectures: {', '.join(_ARCHS)} (default: sm_90)"),
        ("--model", "models", str, ["cvt_13", "segformer_b0", "pvt_v2_b2"],
         "cvt_13, cvt_21, cvt_w24; for depthwise_conv_gelu also segformer_b0, segformer_b5, pvt_v2_b2 "
         "(default: cvt_13, segformer_b0, pvt_v2_b2)"),
        ("--dtype", "dtypes", str, list(DTYPES), f"{', '.join(DTYPES)} (default: all)"),
        ("--operator", "operators", str, list(operators),
         f"{', '.join((*_NOT_BY_DEFAULT, *operators))} "
         "(default: all but the first three)"),
        ("--stage", "stages", positive_int, [1, 2, 3, 4],
         "stages of the model: 1, 2, 3; for segformer and pvt_v2 also 4 (default: all)"),
        ("--image-size", "image_sizes", image_size, [None],
         "sides of the input images in pixels (default: 224; 384 for cvt_w24, 512 for segformer)"),
        ("--batch-size", "batch_sizes", batch_size, [256], "one or more batch sizes (default: 256)"),
    ):  # fmt: skip
        metavar = option.removeprefix("--").upper()
        parser.add_argument(
            option, dest=name, nargs="+", type=kind, metavar=metavar, default=default, help=text
        )
    parser.add_argument("--jobs", type=integer(1, 256), help="parallel processes (default: one per core)")


def selection_of(arguments: argparse.Namespace, operators: Collection[str]) -> jobs.Selection:
    """Returns the selection; raises ValueError for unknown names, or if nothing can be compiled here."""
    _check_names("--arch", arguments.archs, _ARCHS)
    _check_names("--model", arguments.models, (*PRESETS, *PYRAMIDS))
    _check_names("--dtype", arguments.dtypes, DTYPES)
    _check_names("--operator", arguments.operators, operators)
    _check_names("--stage", arguments.stages, (1, 2, 3, 4))
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    if arguments.json not in (None, STDOUT):
        check_writable("--json", arguments.json, directory=False)  # fails now rather than after minutes
    require("triton", "gpu")
    from . import jobs

    return jobs.Selection(
        archs=[_ARCHS[name] for name in dict.fromkeys(arguments.archs)],
        models=arguments.models,
        dtypes=arguments.dtypes,
        operators=arguments.operators,
        stages=arguments.stages,
        image_sizes=arguments.image_sizes,
        batch_sizes=arguments.batch_sizes,
    )


def _compile(arguments: argparse.Namespace) -> int:
    """Compiles and prints a table; returns 1 if a kernel has a flaw such as a register spill, else 0."""
    selection = selection_of(arguments, TRITON_OPERATORS)
    from . import jobs, report

    with naming_options("image_size"):
        plan = jobs.triton_jobs(selection)
    if not plan:
        raise ValueError(NOTHING)
    rows = jobs.compile_all(plan, arguments.jobs)
    with reporting(arguments.json, indent=1) as report_json:
        report_json(report.as_json(rows))
    print_lines(arguments, [*report.table(rows), "", *report.entry(rows)])
    return int(any(row.flaws for row in rows))


def _check_names(option: str, given: Iterable[Any], known: Collection[Any]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{option}: got {name!r}, expected {_expected(name, known)}")


def _expected(name: Any, known: Collection[Any]) -> str:
    """Returns all known names, or of many those that contain a name or are like it."""
    if len(known) <= _LISTED:
        return ", ".join(map(str, known))
    alike = [each for each in known if name and name in each] or difflib.get_close_matches(name, known)
    names = (alike or list(known))[:_LISTED]
    return f"{', '.join(names)}, or another of {len(known)} names (cvt compile --help lists all)"
