"""``cvt compile``: compiles every Triton kernel for given GPUs, on a machine that need not have one."""

from __future__ import annotations

import argparse
import os
from typing import Any

from cvt.config import DTYPES, PRESETS
from cvt.extras import require

from ..common import batch_size, image_size, integer, naming_options, print_result
from ..paths import add_json_argument, reporting
from .gpus import LIMITS
from .launches import PYRAMIDS, TRITON_OPERATORS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    archs = {f"sm_{number}": number for number in LIMITS}
    options: dict[str, tuple[Any, list[Any], str]] = {
        "arch": (tuple(archs), ["sm_90"], f"GPU architectures: {', '.join(archs)} (default: sm_90)"),
        "model": (
            (*PRESETS, *PYRAMIDS),
            ["cvt_13", "segformer_b0", "pvt_v2_b2"],
            "cvt_13, cvt_21, cvt_w24; for depthwise_conv_gelu also segformer_b0, segformer_b5, pvt_v2_b2 "
            "(default: cvt_13, segformer_b0, pvt_v2_b2)",
        ),
        "dtype": (tuple(DTYPES), list(DTYPES), f"{', '.join(DTYPES)} (default: all)"),
        "operator": (
            tuple(TRITON_OPERATORS),
            [*TRITON_OPERATORS],
            f"{', '.join(TRITON_OPERATORS)} (default: all)",
        ),
    }
    for name, (choices, default, text) in options.items():
        parser.add_argument(
            f"--{name}",
            dest=f"{name}s",
            nargs="+",
            choices=choices,
            metavar=name.upper(),
            default=default,
            help=text,
        )
    numbers: dict[str, tuple[Any, list[Any], str]] = {
        "stage": (
            integer(1, 4),
            [1, 2, 3, 4],
            "stages of the model: 1, 2, 3; for segformer and pvt_v2 also 4 (default: all)",
        ),
        "image-size": (
            image_size,
            [None],
            "sides of the input images in pixels (default: 224; 384 for cvt_w24, 512 for segformer)",
        ),
        "batch-size": (batch_size, [256], "one or more batch sizes (default: 256)"),
    }
    for name, (kind, default, text) in numbers.items():
        dest = f"{name.replace('-', '_')}s"
        parser.add_argument(
            f"--{name}", dest=dest, nargs="+", type=kind, metavar=name.upper(), default=default, help=text
        )
    parser.add_argument("--jobs", type=integer(1, 256), help="parallel processes (default: one per core)")
    add_json_argument(parser, "the report")
    parser.set_defaults(run=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    """Compiles and prints a table; returns 1 if a kernel has a flaw such as a register spill, else 0."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    require("triton", "gpu")
    from . import jobs, report

    with naming_options("image_size"):
        plan = jobs.triton_jobs(arguments)
    if not plan:
        raise ValueError("--model, --operator, --stage: none of these models has such an operator or stage")
    rows = jobs.compile_all(plan, arguments.jobs)
    with reporting(arguments.json, indent=1) as report_json:
        report_json(report.as_json(rows))
    print_result(arguments, [*report.table(rows), "", *report.entry(rows)])
    return int(any(row.flaws for row in rows))
