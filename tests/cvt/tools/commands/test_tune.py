"""``cvt tune``: the table, the JSON, the exit code, and what serves afterwards."""

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cvt import PRESETS
from cvt.tools.commands import main, tune
from cvt_kernels import backends
from cvt_kernels.tuning import choices, run, worker
from cvt_kernels.tuning.key import machine_key
from tests.checks import Terminal, bad
from tests.cvt_kernels.tuning import broken_kernels

CPU = torch.device("cpu")
SMALL = ["tune", "--device", "cpu", "--image-size", "32", "--batch-size", "2", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def _few_blocks(monkeypatch):
    """Leaves out seven blocks of CvT-13's last stage, which have the same cache keys as the other three."""
    monkeypatch.setitem(PRESETS, "cvt_13", dataclasses.replace(PRESETS["cvt_13"], depths=(1, 2, 3)))


@pytest.fixture
def gelu_alone(monkeypatch):
    """Lets the command tune the calls of one operator only."""
    calls_of = run.calls_of

    def few(model, *args):
        return [call for call in calls_of(model, *args) if call.operator == "gelu"]

    monkeypatch.setattr(run, "calls_of", few)


def test_a_table_a_file_and_choices(gelu_alone, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main([*SMALL, "--json", str(report)]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar where nobody sees it
    content = json.loads(report.read_text())
    assert (content["schema"], content["version"]) == (tune.SCHEMA, tune.VERSION)
    assert content["machine"] == machine_key(CPU)
    assert content["workload"]["batch_size"] == [2]
    rows = content["calls"]
    assert len(rows) == 8  # of three stages and a class token, for Microsoft's GELU and Hugging Face's
    for row in rows:
        assert row["chosen"] in row["measurements"]
        for measurement in row["measurements"].values():
            assert measurement["flaw"] is None
            assert measurement["seconds"] > 0
            assert measurement["error"] <= measurement["allowed"]
    choices.forget()
    known = {key: entry.chosen for key, entry in choices.entries(CPU).items()}
    assert known == {row["cache_key"]: row["chosen"] for row in rows}

    lines, summary = (block.splitlines() for block in out.split("\n\n"))
    assert [line.split(": ")[0] for line in lines] == [row["cache_key"] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        assert re.match(rf"{row['chosen']} \(.*{row['chosen']} \d+ µs", line.split(": ")[1])
    assert summary[0].startswith("8 calls, 8 tuned in ")
    assert summary[1] == f"remembered in {choices.path(CPU)}"


def test_every_operator_of_the_model_is_asked_for(tmp_path):
    arguments = tune_arguments("--train")
    calls = tune._calls(arguments, CPU)
    asked = {(call.operator, call.cache_key.split(", ")[1]) for call in calls.values()}
    for operator in ("attention", "conv_projection", "layer_norm", "linear", "conv_embedding"):
        assert (operator, "forward") in asked
    for operator in ("attention", "conv_projection", "layer_norm", "linear"):
        assert (operator, "forward+backward") in asked
    assert ("transformer_block", "forward") in asked
    halves = tune._calls(tune_arguments("--train", "--dtype", "bfloat16"), CPU)
    autocast = {call.autocast for call in halves.values() if "backward" in call.cache_key}
    assert autocast == {torch.bfloat16}


def tune_arguments(*words):
    import argparse

    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args([*SMALL[1:], *words])


def test_a_wrong_kernel_fails_the_command(gelu_alone, monkeypatch, tmp_path, capsys):
    wrong = functools.partial(worker.Worker, setup=broken_kernels.register_wrong_gelu)
    monkeypatch.setattr(run, "Worker", wrong)
    assert main(SMALL) == 1
    out = capsys.readouterr().out
    assert "triton wrong" in out.split("\n\n")[0]
    cache_key = "gelu, forward, float32, quick, 16384+ elements, 256 channels"
    assert f"\ntriton, {cache_key}: wrong: output 0 is off by " in out
    assert "Please report the lines of gluon, triton, cuda, cpu and of `cvt doctor`." in out
    assert choices.entries(CPU)[cache_key].chosen != "triton"


def test_it_replaces_what_is_remembered_and_shows_a_bar(gelu_alone, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    key = next(iter(tune._calls(tune_arguments(), CPU)))
    choices.remember(CPU, {key: choices.Entry("triton", {})})
    assert main(SMALL) == 0
    assert choices.entries(CPU)[key].chosen != "triton"
    assert "tune:   0%|" in sys.stderr.getvalue()
    assert not sys.stderr.getvalue().split("\r")[-1].strip()


def test_settings_that_keep_the_choices_from_serving_are_said(gelu_alone, monkeypatch, tmp_path, capsys):
    choices.remember(CPU, {"a cache key": choices.Entry("cpu", {})})
    given = choices.path(CPU).rename(tmp_path / "given.json")
    choices.forget()
    monkeypatch.setenv("CVT_KERNELS_TUNED", str(given))
    with backends.use_backend("cpu", "reference"):
        assert main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"CVT_KERNELS_TUNED is set: the choices in {given} go before them" in lines
    assert lines[-1].startswith("CVT_KERNELS_BACKEND is cpu,reference")


def test_a_process_that_does_not_start_is_one_line(gelu_alone, capsys, monkeypatch):
    monkeypatch.setattr(run, "Worker", functools.partial(worker.Worker, setup=broken_kernels.die))
    assert "does not start (dies: exit code 5)" in bad(capsys, main, *SMALL)


def processes_of(words):
    """Returns the numbers of the processes whose command line has some words, and that have not ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and words in (place / "cmdline").read_text():
                found.append(int(place.name))
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_interrupted_it_leaves_no_process(number):
    process = subprocess.Popen(
        [sys.executable, "-m", "cvt", *SMALL],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    words = "from cvt_kernels.tuning.worker import main"
    deadline = time.monotonic() + 120
    while not processes_of(words) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    time.sleep(1.0)  # so that it is at work
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert out == ""
    assert "Traceback" not in err
    while processes_of(words) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(words) == []
