"""The report of ``doctor``: what serves every operator, what is tuned, and why not another."""

import re

import torch

import cvt_kernels as ck
from cvt_kernels import backends, choose, machine
from cvt_kernels.launch import launching
from cvt_kernels.tuning import choices
from cvt_kernels.tuning.choices import Entry
from tests.checks import add_marked_backend, not_built, remember_entry
from tests.processes import run_python

CPU = torch.device("cpu")
KEY = "gelu, forward, float32, exact, 1+ elements, 2 channels"


def table(report, device_type="cpu"):
    """Returns what a report says of a device: operator → (what serves, why)."""
    lines = [*report.splitlines(), ""]
    header = lines.index(f"on {device_type}:")
    rows, server = {}, ("", "")
    for line in lines[header + 1 : lines.index("", header)]:
        if line.startswith("    "):
            rows |= dict.fromkeys(re.findall(r"\w+", line), server)
        else:
            served, _, why = line.strip().partition(": ")
            server = served, why
    return rows


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


def test_doctor_answers_every_operator_and_gives_every_reason():
    add_marked_backend("triton", 10.0, operator="attention", why_unavailable=lambda device_type: "no GPU")
    assert "passed over" not in ck.doctor()
    remember_entry("reference", "gelu", torch.ones(2), approximate="none")
    add_marked_backend("cpu", 10.0, operator="gelu")
    ck.gelu(torch.ones(2))
    report = ck.doctor()
    reason = "gelu, cpu: reference was the fastest when this machine was tuned"
    assert reason in section(report, "passed over")
    rows = table(report)
    assert set(rows) == set(backends.operators)
    assert rows["gelu"][0] == "reference, cpu"
    assert rows["gelu"][1] == "tuned on this machine; ours are ahead on CPUs"
    assert rows["linear_add"] == ("reference", "PyTorch's own")
    assert "triton" not in rows["attention"][0]
    assert "triton: no GPU (attention)" in section(report, "not available here")
    if not not_built():
        assert rows["attention"] == ("cpu", "ours are ahead on CPUs")
    assert torch.__version__ in report
    assert len(ck.doctor().splitlines()) <= 40


def test_doctor_shows_requests():
    add_marked_backend("cpu", 10.0, operator="gelu")
    with ck.use_backend("cpu", "reference"):
        report = ck.doctor()
    assert fact(report, "backend") == ["cpu, reference requested"]
    assert table(report)["gelu"] == ("cpu", "requested")
    assert table(report)["linear"][0] == "reference"
    with ck.use_backend("sdpa"):
        rows = table(ck.doctor())
    assert (rows["attention"][0], rows["gelu"][0]) == ("sdpa", "none")


def test_doctor_says_what_was_tuned_and_tunes_nothing(monkeypatch, tmp_path):
    report = ck.doctor()
    assert fact(report, "tuned") == ["cpu: nothing; the table of this release decides"]
    assert not choices.cache_directory().exists()
    choices.remember(CPU, {KEY: Entry("reference", {})})
    assert fact(ck.doctor(), "tuned") == [f"cpu: 1 choices in {choices.path(CPU)}"]
    given = choices.path(CPU).rename(tmp_path / "given.json")
    monkeypatch.setenv("CVT_KERNELS_TUNED", str(given))
    choices.forget()
    assert fact(ck.doctor(), "tuned") == [f"cpu: 1 choices in {choices.path(CPU)} and {given}"]
    code = "import sys, cvt_kernels as ck; ck.doctor(); print('cvt_kernels.tuning.worker' in sys.modules)"
    assert run_python(code).stdout == "False\n"


def test_doctor_names_kernels_at_fault():
    assert "failed their check" not in ck.doctor()
    wrong = "wrong: output 0 is off by 1.0e+00, allowed are 1.0e-06"
    choices.use(CPU, {KEY: Entry("reference", {"cpu": wrong, "sdpa": "fails: RuntimeError: no"})})
    assert section(ck.doctor(), "failed their check") == [f"{KEY}, cpu on cpu: {wrong}"]


def test_doctor_of_a_machine_with_a_gpu(monkeypatch):
    facts = machine.facts()._replace(gpus=("NVIDIA H200, sm_90, 140 GiB",))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(machine, "facts", lambda: facts)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(backends, "_gpu_lacks", lambda backend, device: None)
    monkeypatch.setattr(launching, "_cuda_chip", lambda index: launching.Chip(90, 132))
    monkeypatch.setattr(choices, "path", lambda device: f"{device.type}.json")
    monkeypatch.setitem(choices._known, gpu, {"linear, forward, half, x": Entry("triton", {})})
    lacks = {"cpu": None, "cuda": "built without CUDA"}
    add_marked_backend("triton", 1.0, operator="attention", devices=("cuda",))
    add_marked_backend("triton", 1.0, operator="linear", devices=("cuda",))
    add_marked_backend("cuda", 1.0, devices=("cuda",), why_unavailable=lacks.get)
    add_marked_backend("cuda", 1.0, operator="layer_norm", devices=("cuda",))
    report = ck.doctor()
    rows = table(report, "cuda")
    assert rows["attention"][0] == "triton, sdpa"
    assert rows["attention"][1].startswith("ahead on an H200; no GPU like this one has run it yet: cvt_kern")
    assert rows["layer_norm"][0] == "cuda, reference"
    assert rows["linear"][0] == "triton, reference"
    assert rows["linear"][1].startswith("tuned on this machine; ")
    assert rows["gelu"][0] == "reference"
    lacking = section(report, "not available here")
    assert "cuda: built without CUDA (gelu)" in lacking
    assert not any("(attention)" in line for line in lacking)
    assert fact(report, "tuned")[0].startswith("cpu: nothing")
    assert choose.chosen_backends("linear", gpu)[0] == ("triton", "tuned on this machine")
