"""The product in Gluon: its tiles, what it refuses, and its launches; the emulator runs it."""

import json
from pathlib import Path

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, machine
from cvt_kernels.launch import launching

gluon = pytest.importorskip("cvt_kernels.ops.linear.gluon", reason="this Triton has no Gluon")

#: Microseconds of every tile at 47 sizes, on an H200.
MEASURED = json.loads(Path(__file__).with_name("products_h200.json").read_text())["rows"]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['epilogue']}, {row['rows']} rows")
def test_the_tile_is_near_the_best_one(row):
    tile = gluon.tile_for(row["rows"], row["outputs"], row["inputs"], 132)
    times = {name.partition(",")[0]: time for name, time in row["tiles"].items()}
    assert times[f"{tile.rows}x{tile.columns}"] <= 1.16 * min(times.values())


def call(dtype=torch.bfloat16, rows=197, inputs=384, outputs=384, operator="linear_add", device="meta"):
    x, weight, bias, residual = (
        torch.empty(shape, dtype=dtype, device=device)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    )
    arguments = (x, weight, bias, residual) if operator == "linear_add" else (x, weight, bias)
    return backends.operators[operator].bind(*arguments)


@pytest.mark.parametrize(
    ("settings", "capability", "reason"),
    [
        ({}, 90, None),
        ({"dtype": torch.float16, "operator": "linear_gelu"}, 90, None),
        ({}, 80, "compute capability 9.0 only"),
        ({}, 100, "compute capability 9.0 only"),
        ({"dtype": torch.float32}, 90, "not float32"),
        ({"inputs": 100}, 90, "rows do not begin at multiples of 16 bytes"),
        ({"outputs": 100}, 90, "rows do not begin at multiples of 16 bytes"),
        ({"outputs": 16}, 90, "fewer than 32 outputs"),
        ({"rows": 0}, 90, "the batch is empty"),
    ],
)
def test_what_it_refuses(settings, capability, reason):
    with launching.recorded_launches(launching.Chip(capability, 132)):
        found = gluon.why_unsupported(call(**settings))
    assert found is None if reason is None else reason in found


def test_gradients_are_refused():
    record = call(operator="linear_gelu")
    record.weight.requires_grad_()
    with launching.recorded_launches(launching.Chip(90, 132)):
        assert gluon.why_unsupported(record) == "has no gradients"


def test_tensors_that_tma_cannot_read_are_copied():
    x = torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(64, 64)
    record = call(rows=64, inputs=64, outputs=64, device="cpu")
    with launching.recorded_launches(launching.Chip(90, 132)) as launches:
        gluon._product(x, *record[1:3], record.residual, None)
    (launch,) = launches
    assert launch.arguments["x"].base.data_ptr() % 16 == 0


def test_a_request_says_why_it_cannot_be_served():
    x, weight = torch.ones(2, 64), torch.ones(64, 64)
    if machine.why_gluon_unavailable("cuda") is None:
        pytest.skip("there is a GPU that runs it")
    with ck.use_backend("gluon"), pytest.raises(ck.BackendUnavailable, match="'gluon' is unavailable"):
        ck.linear_gelu(x, weight)
