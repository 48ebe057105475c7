"""``cvt compile``: compiles every Triton kernel for given GPUs, on a machine that need not have one."""

from __future__ import annotations

import argparse
import os
from typing import Any

from cvt.config import DTYPES, PRESETS
from cvt.extras import require

from ..common import batch_size, image_size, integer, naming_options, option, print_result
from ..paths import add_json_argument, reporting
from .gpus import LIMITS
from .launches import PYRAMIDS, TRITON_OPERATORS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    archs, operators = [f"sm_{number}" for number in LIMITS], list(TRITON_OPERATORS)
    models = ["cvt_13", "segformer_b0", "pvt_v2_b2"]

    def several(name: str, text: str, default: list[Any], **settings: Any) -> None:
        settings |= {"dest": f"{name.replace('-', '_')}s", "metavar": name.upper(), "default": default}
        option(parser, f"--{name}", text, nargs="+", **settings)

    text = f"GPU architectures: {', '.join(archs)} (default: sm_90)"
    several("arch", text, ["sm_90"], choices=archs)
    text = "cvt_13, cvt_21, cvt_w24; for depthwise_conv_gelu also segformer_b0, segformer_b5, pvt_v2_b2"
    text += f" (default: {', '.join(models)})"
    several("model", text, models, choices=(*PRESETS, *PYRAMIDS))
    several("dtype", f"{', '.join(DTYPES)} (default: all)", list(DTYPES), choices=tuple(DTYPES))
    several("operator", f"{', '.join(operators)} (default: all)", operators, choices=operators)
    text = "stages of the model: 1, 2, 3; for segformer and pvt_v2 also 4 (default: all)"
    several("stage", text, [1, 2, 3, 4], type=integer(1, 4))
    text = "sides of the input images in pixels (default: 224; 384 for cvt_w24, 512 for segformer)"
    several("image-size", text, [None], type=image_size)
    several("batch-size", "one or more batch sizes (default: 256)", [256], type=batch_size)
    option(parser, "--jobs", "parallel processes (default: one per core)", type=integer(1, 256))
    add_json_argument(parser, "the report")
    parser.set_defaults(run=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    """Compiles and prints a table; returns 1 if a kernel has a flaw such as a register spill, else 0."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    require("triton", "gpu")
    from . import jobs

    with naming_options("image_size"):
        plan = jobs.triton_jobs(arguments)
    if not plan:
        raise ValueError("--model, --operator, --stage: none of these models has such an operator or stage")
    rows = jobs.compile_all(plan, arguments.jobs)
    with reporting(arguments.json, indent=1) as report_json:
        report_json(jobs.as_json(rows))
    print_result(arguments, [*jobs.table(rows), "", *jobs.entry(rows)])
    return int(any(row["flaws"] for row in rows))
