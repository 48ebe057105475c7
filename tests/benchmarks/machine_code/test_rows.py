"""The kernels on rows of tokens: budgets, and what is counted for them."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.machine_code import budgets, work
from cvt.commands.compile import launches
from cvt_kernels.machine import Chip
from cvt_kernels.ops.rows.triton import common

OPERATORS = ("gather_rows", "gather_add_layer_norm", "scatter_rows")
STAGE = launches.stages("cvt_13")[2]
TOKENS, KEPT = 256 * 197 * 384, 256 * 138 * 384  # elements


def launches_of(operator, training):
    return launches.TRITON_OPERATORS[operator](STAGE, torch.bfloat16, Chip(90, 132), training=training)


def test_every_kernel_but_that_of_the_index_has_a_budget():
    used = set()
    for operator in OPERATORS:
        for launch in (*launches_of(operator, True), *launches_of(operator, False)):
            name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
            budget = budgets.budget_of(name.removesuffix("_backward").removesuffix("_inplace"), name, 90)
            assert (budget is None) == name.endswith("_places")
            used |= {id(budget)} - {id(None)}
    assert used == {id(budget) for budget in common.BUDGETS[90].values()}


def test_each_row_is_moved_once():
    index, places = 8 * 256 * 138, 4 * 256 * 197
    expected = {
        "_gather_rows_kernel": index + 2 * 2 * KEPT,
        "_gather_add_layer_norm_kernel": index + 4 * 2 * KEPT,
        "_scatter_rows_places_kernel": index + places,
        "_scatter_rows_kernel": places + 2 * (TOKENS - KEPT + 2 * KEPT + TOKENS),
        "_scatter_rows_inplace_kernel": index + 3 * 2 * KEPT,
    }
    found = {}
    for operator in OPERATORS:
        for launch in launches_of(operator, training=False):
            found[launch.kernel.__name__] = work.work_of(launch).bytes
    assert found == expected


@pytest.mark.slow
def test_they_compile_for_a_gpu_within_their_budgets(tmp_path):
    """Runs the command in a process of its own: the other tests import the kernels for the interpreter."""
    report = tmp_path / "report.json"
    arguments = ["--operator", *OPERATORS, "--arch", "sm_90", "--dtype", "bfloat16", "--stage", "3"]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.machine_code", *arguments, "--jobs", "1", "--json", str(report)],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(report.read_text())["kernels"]
    assert {row["kernel"] for row in rows} == {
        *OPERATORS, "gather_add_layer_norm_backward", "scatter_rows_places", "scatter_rows_inplace",
    }  # fmt: skip
    for row in rows:
        assert row["flaws"] == []
        if row["kernel"] != "scatter_rows_places":
            assert {analysis["predicted"]["bound"] for analysis in row["analyses"]} == {"DRAM"}
