"""The report of ``doctor``: what serves every operator, and why not another."""

import subprocess
import sys

import torch

import cvt_kernels as ck
from cvt_kernels import backends
from tests.checks import add_marked_backend, not_built


def test_doctor_answers_every_operator_and_gives_every_reason():
    add_marked_backend("native", 10.0, operator="gelu")
    add_marked_backend("triton", 10.0, operator="attention", why_unavailable=lambda device_type: "no GPU")
    lines = ck.doctor().splitlines()
    header = lines.index(next(line for line in lines if line.startswith("operator")))
    rows = (line.split() for line in lines[header + 1 : lines.index("", header)])
    table = {operator: answers for operator, *answers in rows}
    assert set(table) == set(backends.OPERATORS)
    reasons = [line for line in lines if line.startswith("(")]
    numbers = {reason.split(") ")[1]: reason.split()[0] for reason in reasons}
    assert table["attention"][:2] == ["no", numbers["triton: no GPU"]]
    assert table["layer_norm"][:2] == ["no", numbers["triton: not implemented in this version"]]
    assert table["gelu"][2:] == ["yes", "yes", "native"][: len(table["gelu"]) - 2]
    assert table["conv_projection"][-1] == ("reference" if not_built() else "native")
    assert torch.__version__ in ck.doctor()


def test_doctor_tells_what_was_passed_over():
    assert "passed over" not in ck.doctor()
    ck.gelu(torch.ones(2))
    assert "gelu, triton: not implemented in this version" in ck.doctor().split("passed over")[1]


def test_the_package_run_as_a_module_prints_it():
    result = subprocess.run([sys.executable, "-m", "cvt_kernels"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("python   ")
    assert "linear layers, inference on the CPU: float32 by " in result.stdout
