"""``python -m benchmarks.machine_code``: compiles kernels for named GPUs and checks their machine code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cvt.commands.common import naming_options, print_lines
from cvt.commands.compile import NOTHING, OPERATORS, add_selection_arguments, selection_of
from cvt.commands.compile.jobs import triton_jobs
from cvt.commands.compile.launches import TRITON_OPERATORS
from cvt.commands.paths import add_json_argument, reporting
from cvt.commands.process import run_command

from . import jobs, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 1 if a kernel has a flaw or is over its budget."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.machine_code",
        description="Compile every kernel for a GPU model; list registers, spills, instructions per output "
        "and predicted bounds; fail where one is over its budget.",
    )
    add_selection_arguments(parser, (*OPERATORS, jobs.CUDA_OPERATOR))
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="fail where there are no CUDA kernels for a GPU: not in the extension, and no nvcc for csrc",
    )
    add_json_argument(parser, "the report")
    parsed = parser.parse_args(arguments)
    return run_command(parser.prog, parsed, lambda: _compile(parsed))


def _compile(arguments: argparse.Namespace) -> int:
    """Compiles and prints tables; returns 1 if a kernel has a flaw, such as a spill, else 0."""
    selection = selection_of(arguments, (*TRITON_OPERATORS, jobs.CUDA_OPERATOR))
    cuda, notes = jobs.cuda_sources(selection, required=arguments.cuda)
    with naming_options("image_size"):
        plan = triton_jobs(selection)
    if not cuda and not plan:
        raise ValueError(NOTHING)
    rows = jobs.compile_all(cuda, plan, arguments.jobs)
    with reporting(arguments.json, indent=1) as report_json:
        report_json(report.as_json(rows, notes))
    predicted = report.predicted_table(rows)
    tables = [*report.table(rows), "", *predicted, *[""] * bool(predicted)]
    print_lines(arguments, [*tables, *notes, *report.entry(rows)])
    return int(any(row.flaws for row in rows))


if __name__ == "__main__":
    sys.exit(main())
