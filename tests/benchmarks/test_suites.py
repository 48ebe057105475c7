"""The suites over the operators' cards, as users of pytest-benchmark run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import operators, report
from cvt_kernels.ops.cards import all_cards

ROOT = Path(__file__).parents[2]


def case_of(name):
    return next(case for case in operators.cases(tiny=True) if str(case) == name)


@pytest.mark.parametrize("tiny", [False, True])
def test_every_operator_with_a_card_has_cases(tiny):
    cases = list(operators.cases(tiny=tiny))
    assert {case.operator for case in cases} == {*all_cards()}
    assert len({str(case) for case in cases}) == len(cases)
    for operator, card in all_cards().items():
        directions = {case.training for case in cases if case.operator == operator}
        # What a card calls in training alone, or in inference alone, has no other.
        assert directions <= ({False} if card.rounds else {False, True})
    if not tiny:
        assert {case.model for case in cases} == {*operators.MODELS}


def test_a_wrong_kernel_fails_and_is_not_timed():
    name = "layer_norm-cvt_13-stage1-float32-forward+backward"
    made, right = operators.Prepared(case_of(name)), operators.function("layer_norm", "reference")
    with pytest.raises(AssertionError) as raised:
        made.check(lambda record: right(record) * 1.001, "cpu")
    told = str(raised.value)
    assert told.startswith(f"{name}: cpu: wrong: output 0 is off by")
    assert "allowed are" in told
    assert told.endswith("it was not timed")
    errors = made.check(right, "reference")
    assert errors["error"] == errors["error_of_pytorch"] <= errors["error_allowed"]


def test_what_a_call_moves_and_multiplies():
    made = operators.Prepared(case_of("linear_gelu-cvt_13-stage1-float32-forward"))
    rows, inputs, outputs = 2 * 13, 64, 256
    assert made.moved == 4 * (rows * (inputs + outputs) + outputs * inputs + outputs)
    assert made.flops == 2 * rows * inputs * outputs
    # The backward reads what the forward has and the gradient of its result, and writes the gradients.
    both = operators.Prepared(case_of("linear_gelu-cvt_13-stage1-float32-forward+backward"))
    read = 4 * (rows * inputs + outputs * inputs + outputs)
    assert both.moved == made.moved + 2 * read + 4 * rows * outputs
    assert both.flops == 3 * made.flops


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Returns the output and the JSON of a run that times a few operators in the smallest shapes."""
    folder = tmp_path_factory.mktemp("run")
    words = "layer_norm-cvt_13-stage1-float32-forward- or layer_norm-cuda"
    options = "-m pytest benchmarks/test_operators.py -q -rs -p no:cacheprovider --tiny --benchmark-only"
    command = [sys.executable, *options.split(), "-k", words, f"--benchmark-json={folder / 'a.json'}"]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    settings |= {"XDG_CACHE_HOME": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    return done.stdout + done.stderr, folder / "a.json"


def test_the_json_of_a_run_has_rates_and_errors(ran):
    output, path = ran
    content = json.loads(path.read_text())
    contenders = {each["extra_info"]["contender"] for each in content["benchmarks"]}
    assert "reference" in contenders, output
    for each in content["benchmarks"]:
        facts = each["extra_info"]
        assert facts["operator"] in each["group"]
        assert facts["gigabytes_per_second"] > 0
        assert 0 <= facts["error"] <= facts["error_allowed"]
        assert {"bytes", "flops", "percent_of_ceiling", "teraflop_per_second", "peak_bytes", "clock"} <= {
            *facts
        }
    assert "node" not in content["machine_info"]
    with pytest.raises(ValueError, match="holds a smoke test"):
        report.read(path)
    content["machine_info"]["tiny"] = False
    path.write_text(json.dumps(content))
    assert {row["contender"] for row in report.read(path)} == contenders
    if not torch.cuda.is_available():
        assert "serves cuda tensors, not cpu" in output
