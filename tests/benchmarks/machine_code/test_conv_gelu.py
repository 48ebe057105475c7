"""The kernels of depthwise_conv_gelu: budgets, and what is counted for them."""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.machine_code import budgets, work
from cvt.commands.compile import launches
from cvt_kernels.machine import Chip
from cvt_kernels.ops.depthwise_conv_gelu.triton import common

#: Compiles a kernel without bias too, of which the interpreter would take what the compiler does not.
COMMAND = """
import functools, sys, torch
from benchmarks.machine_code.__main__ import main
from cvt.commands.compile import launches
from cvt_kernels import machine
from cvt_kernels.ops.depthwise_conv_gelu.triton import forward

listed = launches.TRITON_OPERATORS["depthwise_conv_gelu"]

def both(stage, dtype, chip, *, batch, training):
    with machine.recorded_launches(chip) as others:
        if not training:
            x = torch.empty(batch, 128 * 128, stage.channels, dtype=dtype, device="meta")
            forward.conv_gelu_forward(x, stage.grid, x.new_empty(stage.channels, 1, 3, 3), None, "tanh")
    return listed(stage, dtype, chip, batch=batch, training=training) + others

launches.TRITON_OPERATORS["depthwise_conv_gelu"] = both
sys.exit(main(sys.argv[1:]))
"""


def test_budgets_and_work():
    """A unit is read and one is written; the backward reads two and writes one, and then as the forward."""
    stage = launches.stages_of("pvt_v2_b2", 224)[0]
    own, backward, _, dx = launches.depthwise_conv_gelu_launches(stage, torch.bfloat16, Chip(90, 132))
    unit = 256 * 56 * 56 * 512
    for launch, units in ((own, 2), (backward, 3), (dx, 2)):
        described = work.work_of(launch)
        partial = launch.arguments.get("partial_ptr")
        sums = 0 if partial is None else partial.numel() * 4
        assert (described.outputs, described.bytes) == (unit, 2 * units * unit + sums)
        assert described.trips == (256 / launch.arguments["groups"], 28 / launch.arguments["strips"])
    assert backward.arguments["partial_ptr"].shape[0] == 10
    for kernel, budget in common.BUDGETS[90].items():
        assert budgets.budget_of("depthwise_conv_gelu", f"depthwise_conv_gelu_{kernel}", 90) is budget
        assert kernel in common.CONFIGS
    assert budgets.is_budgeted("segformer_b0", 512, 256, "bfloat16")
    assert not budgets.is_budgeted("segformer_b0", 224, 256, "bfloat16")


@pytest.mark.slow
def test_it_compiles_for_a_gpu_within_its_budgets(tmp_path):
    """Runs the command in a process of its own: the other tests import the kernels for the interpreter."""
    report = tmp_path / "report.json"
    arguments = ["--operator", "depthwise_conv_gelu", "--arch", "sm_90", "--dtype", "bfloat16", "--jobs", "1"]
    result = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments, "--model", "segformer_b0", "--stage", "1",
         "--json", str(report)],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(report.read_text())["kernels"]
    assert sorted(row["kernel"] for row in rows) == [
        "conv_projection_walk_bwd_input",
        "depthwise_conv_gelu_bwd_conv",
        "depthwise_conv_gelu_fwd",
        "depthwise_conv_gelu_fwd",
        "sum_regions",
    ]
    for row in rows:
        assert row["flaws"] == []
        assert row["resources"]["stack"] == 0
        if row["kernel"].startswith("depthwise_conv_gelu"):
            (analysis,) = row["analyses"]
            assert "LDG.E.64" in row["instructions"]["loads"], "a lane's channels are one access"
            assert set(row["instructions"]["stores"]) <= {"STG.E.64", "STG.E"}
            assert analysis["predicted"]["share_of_floor"] > 0.9
