"""The report of ``doctor``: what serves every operator, what is tuned, and why not another."""

import json
import subprocess
import sys

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import autotune, backends, machine
from tests.checks import add_marked_backend, not_built, remember_entry
from tests.processes import run_python

CPU = torch.device("cpu")
KEY = "gelu, forward, float32, exact, 1+ elements, 2 channels"


def table(report, device_type="cpu"):
    """Returns the rows of a device's table: operator → (backends, what serves)."""
    lines = report.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith(f"on {device_type} "))
    starts = [lines[header].index(name) for name in ("backends", "served by")]
    rows = lines[header + 1 : [*lines, ""].index("", header)]
    return {row.split()[0]: (row[starts[0] : starts[1]].rstrip(), row[starts[1] :]) for row in rows}


def section(report, heading):
    """Returns the indented lines below a heading, without their indentation; none if it is not there."""
    lines = iter(report.splitlines())
    for line in lines:
        if line.startswith(heading):
            return [line.strip() for line in iter(lambda: next(lines, ""), "")]
    return []


def fact(report, name):
    """Returns what the lines of a name at the head of the report say."""
    return [line[9:] for line in report.splitlines() if line.startswith(f"{name:9}")]


def measurement(flaw=None):
    return autotune.Measurement(error=None, allowed=None, seconds=None, host_seconds=None, flaw=flaw)


def test_doctor_answers_every_operator_and_gives_every_reason():
    add_marked_backend("cpu", 10.0, operator="gelu")
    add_marked_backend("triton", 10.0, operator="attention", why_unavailable=lambda device_type: "no GPU")
    assert "passed over" not in ck.doctor()
    ck.gelu(torch.ones(2))
    report = ck.doctor()
    assert section(report, "passed over")[-1].startswith("gelu, cpu: has no entry")
    assert fact(report, "autotune")[0].startswith("off (CVT_KERNELS_AUTOTUNE=0)")
    rows = table(report)
    assert set(rows) == set(backends.operators)
    assert rows["gelu"] == ("cpu, reference", "PyTorch's own operator")
    assert rows["linear"][0] == "convolution, float32, reference"
    assert "triton" not in rows["attention"][0]
    lacking = section(report, "not available here")
    assert lacking[lacking.index("triton: no GPU") + 1] == "(attention)"
    if not not_built():
        assert rows["attention"][0] == "cpu, sdpa, reference"
    assert torch.__version__ in report


def test_doctor_counts_the_entries_of_every_backend(tuning, monkeypatch):
    add_marked_backend("cpu", 10.0, operator="gelu")
    assert table(ck.doctor())["gelu"][1] == "not used yet"
    for channels in (2, 3):
        remember_entry("cpu", "gelu", torch.ones(channels), approximate="none")
    remember_entry("reference", "gelu", torch.ones(4), approximate="none")
    report = ck.doctor()
    assert table(report)["gelu"][1] == "cpu 2, reference 1"
    on = "on: auto checks and times the backends at the first calls of each kind, "
    assert fact(report, "autotune") == [on + "without a limit"]
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", "0.5")
    assert fact(ck.doctor(), "autotune") == [on + "for 0.5 s per call"]
    assert fact(report, "entries") == [
        f"cpu: 3 known, 3 of them in the cache; new ones go to {autotune.cache_for(CPU).path}"
    ]
    assert str(tuning) in report


def test_doctor_says_which_choices_are_unsure(tuning):
    remember_entry("reference", "gelu", torch.ones(2), approximate="none", is_disturbed=True)
    _, line = fact(ck.doctor(), "entries")
    assert line == (
        "cpu: 1 choice was timed while other programs kept this machine busy: run `cvt tune` when it is "
        f"idle, or remove {autotune.cache_for(CPU).path} and start again"
    )


def test_doctor_shows_requests():
    add_marked_backend("cpu", 10.0, operator="gelu")
    with ck.use_backend("cpu", "reference"):
        report = ck.doctor()
    assert fact(report, "backend") == ["cpu, reference requested"]
    assert table(report)["gelu"][1] == "cpu"
    assert table(report)["linear"][1] == "reference"
    with ck.use_backend("sdpa"):
        rows = table(ck.doctor())
    assert (rows["attention"][1], rows["gelu"][1]) == ("sdpa", "none")


def test_doctor_tunes_nothing(tuning):
    report = ck.doctor()
    assert fact(report, "entries") == [f"cpu: 0 known; new ones go to {autotune.cache_for(CPU).path}"]
    assert not tuning.exists()  # it makes no folders either
    assert not autotune.cache_for(CPU).entries()
    code = "import sys, cvt_kernels as ck; ck.doctor(); print('cvt_kernels.tuning.tuner' in sys.modules)"
    assert run_python(code).stdout == "False\n"


def test_doctor_says_why_entries_cannot_be_remembered(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    [line] = fact(ck.doctor(), "entries")
    assert line.startswith("cpu: 0 known; new ones hold for one process only: ")
    assert line.endswith("Not a directory")


@pytest.mark.filterwarnings("ignore:CVT_KERNELS_TUNED")
def test_doctor_reads_shipped_files(monkeypatch, tmp_path):
    add_marked_backend("cpu", 10.0, operator="gelu")
    remember_entry("reference", "gelu", torch.ones(2), approximate="none")
    good, foreign, missing = (tmp_path / name for name in ("good.json", "foreign.json", "missing.json"))
    content = json.loads(autotune.cache_for(CPU).path.read_text())
    good.write_text(json.dumps(content))
    content["machine"]["torch"] = "1.0"
    foreign.write_text(json.dumps(content))
    monkeypatch.setenv("CVT_KERNELS_TUNED", f"{good}:{foreign}:{missing}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    autotune.forget()
    report = ck.doctor()
    known, *shipped = fact(report, "entries")
    assert known == f"cpu: 1 known, none of them in the cache; new ones go to {autotune.cache_for(CPU).path}"
    assert shipped[0] == f"{good}: 1 of them, read only"
    assert shipped[1].startswith(
        f"{foreign}: ignored: it was made for another machine or installation: torch: 1.0 in the file, "
    )
    assert shipped[2] == f"{missing}: ignored: No such file or directory"
    assert table(report)["gelu"][1] == "reference 1"


def test_doctor_names_kernels_at_fault(tuning):
    assert "failed their check" not in ck.doctor()
    wrong = "wrong: output is off by 1.0e+00, allowed are 1.0e-06"
    measurements = {
        "cpu": measurement(wrong),
        "sdpa": measurement("fails: RuntimeError: no"),
        "reference": measurement(),
    }
    autotune.cache_for(CPU).remember({KEY: autotune.Entry("reference", "reference", measurements)})
    assert section(ck.doctor(), "failed their check") == [f"{KEY}, cpu on cpu: {wrong}"]


def test_doctor_of_a_machine_with_a_gpu(monkeypatch, tuning):
    gpu = "NVIDIA H200, sm_90, 140 GiB"
    facts = machine.facts()._replace(gpus=(gpu,))
    monkeypatch.setattr(machine, "facts", lambda: facts)
    caches = {"cpu": autotune.cache_for(CPU), "cuda": autotune.Cache({"device": "cuda", "name": gpu})}
    monkeypatch.setattr(autotune, "cache_for", lambda device: caches[device.type])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    lacks = {"cpu": None, "cuda": "built without CUDA"}
    add_marked_backend("triton", 1.0, operator="attention", devices=("cuda",))
    add_marked_backend("cpu", 1.0, operator="attention", devices=("cpu",))
    add_marked_backend("cpu", 1.0, devices=("cpu",), why_unavailable=lacks.get)
    add_marked_backend("cuda", 1.0, devices=("cuda",), why_unavailable=lacks.get)
    entry = autotune.Entry("triton", "triton", {"triton": measurement(), "reference": measurement()})
    caches["cuda"].remember({"attention, forward, bfloat16, 1+ heads": entry})
    report = ck.doctor()
    assert table(report)["attention"][1] == "not used yet"
    assert table(report, "cuda")["attention"] == ("triton, sdpa, reference", "triton 1")
    assert table(report, "cuda")["linear"] == ("triton, reference", "not used yet")
    assert table(report)["gelu"][0] == "cpu, reference"
    assert table(report, "cuda")["gelu"] == ("reference", "reference")
    lacking = section(report, "not available here")
    assert "(gelu)" in lacking[lacking.index("cuda: built without CUDA") + 1 :]
    assert not any("attention" in line for line in lacking)
    assert [line.split("; ")[0] for line in fact(report, "entries")] == [
        "cpu: 0 known",
        "cuda: 1 known, 1 of them in the cache",
    ]
    assert "Triton compiles its kernel" in report


def test_the_package_run_as_a_module_prints_it():
    result = subprocess.run([sys.executable, "-m", "cvt_kernels"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("python   ")
    assert "served by (number of entries)" in result.stdout
