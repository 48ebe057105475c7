"""``cvt compile``: compiles every kernel for named GPUs, which need not be here, and reports on it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterable
from typing import Any

from ...config import DTYPES, PRESETS
from ...extras import require
from ...files import check_writable
from ..common import batch_size, image_size, integer, naming_options, positive_int, print_lines
from ..paths import STDOUT, add_json_argument, reporting

#: The operators that are compiled by default. Those of ``launches`` cannot be asked without importing Triton.
_OPERATORS = (
    "conv_projection",
    "conv_linear",
    "depthwise_conv_gelu",
    "conv_embedding",
    "attention",
    "layer_norm_mlp",
    "linear_gelu",
    "linear_add",
    "linear_add_layer_norm",
    "quantize_rows",
    "layer_norm_quantize",
    "gelu_quantize",
    "linear_int8",
    "linear_float8",
    "gather_rows",
    "gather_add_layer_norm",
    "scatter_rows",
    "layer_norm_gelu",
)


def add_parser(commands: Any) -> None:
    """Adds the command to those of ``cvt``."""
    parser = commands.add_parser(
        "compile",
        help="compile every kernel for a GPU model, even on a machine without one; list registers, spills, "
        "instructions per output and predicted bounds",
    )
    for option, name, kind, default, text in (
        ("--arch", "archs", str, ["sm_90"],
         "sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 (default: sm_90)"),
        ("--model", "models", str, ["cvt_13", "segformer_b0", "pvt_v2_b2"],
         "cvt_13, cvt_21, cvt_w24; of depthwise_conv_gelu alone, segformer_b0, segformer_b5, pvt_v2_b2 "
         "(default: cvt_13, segformer_b0, pvt_v2_b2)"),
        ("--dtype", "dtypes", str, list(DTYPES), f"{', '.join(DTYPES)} (default: all)"),
        ("--operator", "operators", str, list(_OPERATORS),
         f"attention_with_bias, attention_by_position, conv_projection_hybrid, {', '.join(_OPERATORS)} "
         "(default: all but the first three)"),
        ("--stage", "stages", positive_int, [1, 2, 3, 4],
         "1, 2, 3; of the models of depthwise_conv_gelu, 4 (default: all)"),
        ("--image-size", "image_sizes", image_size, [None],
         "default: 224; 384 for cvt_w24, 512 for segformer_b0 and segformer_b5"),
        ("--batch-size", "batch_sizes", batch_size, [256], "default: 256"),
    ):  # fmt: skip
        metavar = option.removeprefix("--").upper()
        parser.add_argument(
            option, dest=name, nargs="+", type=kind, metavar=metavar, default=default, help=text
        )
    parser.add_argument("--jobs", type=integer(1, 256), help="processes (default: one per core)")
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="fail where there are no CUDA kernels for a GPU: not in the extension, and no nvcc for csrc",
    )
    add_json_argument(parser, "the report")
    parser.set_defaults(run=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    """Compiles and prints tables; returns 1 if a kernel has a flaw, such as a spill, else 0."""
    from .gpus import LIMITS
    from .launches import CUDA_OPERATOR, PYRAMIDS, TRITON_OPERATORS

    archs = {f"sm_{number}": number for number in LIMITS}
    _check_names("--arch", arguments.archs, archs)
    _check_names("--model", arguments.models, (*PRESETS, *PYRAMIDS))
    _check_names("--dtype", arguments.dtypes, DTYPES)
    _check_names("--operator", arguments.operators, (*TRITON_OPERATORS, CUDA_OPERATOR))
    _check_names("--stage", arguments.stages, (1, 2, 3, 4))
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    if arguments.json not in (None, STDOUT):
        check_writable("--json", arguments.json, directory=False)  # fails now rather than after minutes
    require("triton", "gpu")
    from . import jobs, report

    selection = jobs.Selection(
        archs=[archs[name] for name in dict.fromkeys(arguments.archs)],
        models=arguments.models,
        dtypes=arguments.dtypes,
        operators=arguments.operators,
        stages=arguments.stages,
        image_sizes=arguments.image_sizes,
        batch_sizes=arguments.batch_sizes,
    )
    cuda_jobs, notes = jobs.cuda_jobs(selection, required=arguments.cuda)
    with naming_options("image_size"):
        plan = [*cuda_jobs, *jobs.triton_jobs(selection)]  # nvcc takes longest, so it comes first
    if not plan:
        raise ValueError("--model, --operator, --stage: none of these models has such an operator or stage")
    rows = jobs.compile_all(plan, arguments.jobs or len(os.sched_getaffinity(0)))
    rows.sort(key=lambda row: row.operator == CUDA_OPERATOR)
    with reporting(arguments.json, indent=1) as report_json:
        report_json(report.as_json(rows, notes))
    predicted = report.predicted_table(rows)
    tables = [*report.table(rows), "", *predicted, *[""] * bool(predicted)]
    print_lines(arguments, [*tables, *notes, *report.verdict(rows)])
    return int(any(row.flaws for row in rows))


def _check_names(option: str, given: Iterable[Any], known: Collection[Any]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{option}: got {name!r}, expected one of {', '.join(map(str, known))}")
