"""``cvt compile``: every kernel compiled for named GPUs, without one, and what it takes of them."""

from __future__ import annotations

import argparse
from typing import Any

from ..common import positive_int


def add_parser(commands: Any) -> None:
    """Adds the command to those of ``cvt``."""
    parser = commands.add_parser(
        "compile", help="every kernel compiled for a GPU that need not be here, and what it takes of it"
    )
    for option, name, kind, text in (
        ("--arch", "archs", str, "sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 (default: sm_90)"),
        ("--model", "models", str, "cvt_13, cvt_21, cvt_w24 (default: cvt_13)"),
        ("--dtype", "dtypes", str, "bfloat16, float16, float32 (default: all)"),
        ("--operator", "operators", str, "attention_with_bias, conv_projection, attention, layer_norm_gelu "
         "(default: the last three)"),
        ("--stage", "only_stages", positive_int, "1, 2, 3 (default: all)"),
        ("--image-size", "image_sizes", positive_int, "default: 224; 384 for cvt_w24"),
        ("--batch-size", "batch_sizes", positive_int, "default: 256"),
    ):  # fmt: skip
        metavar = option.removeprefix("--").upper()
        parser.add_argument(
            option, dest=name, nargs="+", type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text
        )
    parser.add_argument(
        "--jobs", type=positive_int, default=argparse.SUPPRESS, help="processes (default: one per core)"
    )
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="fail where there are no CUDA kernels for a GPU: not in the extension, and no nvcc for csrc",
    )
    parser.add_argument(
        "--json", dest="report", default=argparse.SUPPRESS, metavar="FILE", help="write the report"
    )
    parser.set_defaults(run=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    from .kernels import run  # needs Triton

    options = vars(arguments)
    return run(**{name: options[name] for name in options if name not in ("command", "run")})
