"""The product in Gluon: its tiles, what it refuses, and its launches; the emulator runs it."""

import json
from pathlib import Path

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, launching, machine
from tests.processes import run_python

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


@pytest.mark.parametrize(
    ("rows", "programs"), [(1, 24), (197, 96), (50432, 132)], ids=["one row", "an image", "256 images"]
)
def test_programs_fill_the_chip_and_stay(rows, programs):
    record = call(rows=rows, outputs=1536, operator="linear_gelu")
    with launching.recorded_launches(launching.Chip(90, 132)) as launches:
        gluon._product(*record[:3], None, "none")
    (launch,) = launches
    assert launch.grid == (programs,)


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


#: proj + residual with the statistics of its rows, then fc1 with LayerNorm folded, in the emulator.
FOLDED = """
import os
import torch
from torch.nn import functional as F
from cvt_kernels import launching
from cvt_kernels.ops.linear import gluon
from tests.emulator.launches import Runner

torch.manual_seed(0)
mean, rows, channels, programs, dtype = eval(os.environ["CASE"])
y, stream = torch.randn(rows, channels).to(dtype), (torch.randn(rows, channels) + mean).to(dtype)
proj, fc1 = ((torch.randn(n, channels) / channels**0.5).to(dtype) for n in (channels, 4 * channels))
gamma, beta, bias = torch.rand(channels) + 0.5, torch.randn(channels), torch.randn(4 * channels)
folded = (fc1.double() * gamma.double()).to(dtype)
hidden = torch.full((rows, 4 * channels), float("nan"), dtype=dtype)
before, runner = stream.clone(), Runner(90)
with launching.intercepted_launches(runner.run, launching.Chip(90, programs)):
    statistics = gluon.product(y, proj, None, stream, residual=stream, has_statistics=True)
    norm = gluon.FoldedNorm(statistics, folded.double().sum(1).float(), 1e-5)
    shifted = (fc1.double() @ beta.double() + bias.double()).float()
    gluon.product(stream, folded, shifted, hidden, approximate="none", norm=norm)
assert not any(ran.result.faults for ran in runner.ran)
exact = y.double() @ proj.double().T + before.double()
assert ((stream.double() - exact).abs() / (exact.abs() + 1)).max() < 2**-8
parts = stream.double().split(statistics.width, dim=1)
for part, (total, squares) in zip(parts, statistics.sums.double().unbind(1), strict=True):
    torch.testing.assert_close(total, part.sum(1), rtol=1e-5, atol=1e-4)
    deviations = part - part.mean(1, keepdim=True)
    torch.testing.assert_close(squares, deviations.square().sum(1), rtol=1e-4, atol=0)
normed = F.layer_norm(stream.double(), (channels,), gamma.double(), beta.double(), 1e-5)
exact = F.gelu(normed @ fc1.double().T + bias.double())
rounded = F.layer_norm(stream.float(), (channels,), gamma, beta, 1e-5).to(dtype).double()
plain = F.gelu(rounded @ fc1.double().T + bias.double()).to(dtype).double()
assert (hidden.double() - exact).norm() <= 1.2 * (plain - exact).norm()
"""


@pytest.mark.parametrize(
    "case",
    [
        "0.5, 197, 192, 3, torch.bfloat16",
        "100.0, 65, 384, 5, torch.bfloat16",
        "-100.0, 130, 136, 132, torch.float16",
    ],
    ids=["usual", "mean of 100 deviations", "float16, mean of 100 deviations"],
)
def test_layer_norm_is_folded_into_products(case):
    child = run_python(FOLDED, CASE=case, TRITON_INTERPRET="0")
    assert child.returncode == 0, child.stderr
