"""``cvt tune``: the table, the JSON, the exit code, and what a later process makes of it."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from cvt.tools.commands import main, pyramids
from cvt.tools.commands.tune import cache_keys, tuning, worker
from cvt.tools.commands.tune.report import SCHEMA, VERSION
from cvt_kernels import autotune, backends
from tests.checks import Terminal, bad, operators_asked_on_a_cpu
from tests.cvt.tools.commands.tune import broken_kernels
from tests.processes import run_python

CPU = torch.device("cpu")
SMALL = ["tune", "--device", "cpu", "--image-size", "32", "--batch-size", "2", "--dtype", "float32"]


@pytest.fixture
def few_cache_keys(monkeypatch, quick_start):
    """Lets the command tune the cache keys of one operator only."""
    collect = cache_keys.collect

    def collect_few(workload, device):
        return [q for q in collect(workload, device) if q.operator == "bias_gelu"]

    monkeypatch.setattr(cache_keys, "collect", collect_few)


@pytest.fixture
def wrong_gelu(monkeypatch, few_cache_keys):
    broken = functools.partial(worker.Worker, setup=broken_kernels.register_wrong_gelu)
    monkeypatch.setattr(worker, "Worker", broken)


def test_tunes_a_model_for_later_processes(cache, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main([*SMALL, "--json", str(report)]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no progress bar where nobody sees it
    content = json.loads(report.read_text())
    assert (content["schema"], content["version"]) == (SCHEMA, VERSION)
    assert content["machine"] == autotune.machine_key(CPU)
    assert content["workload"]["batch_sizes"] == [2]
    assert content["why_not_remembered"] is None
    rows = content["cache_keys"]
    assert {row["cache_key"].split(", ")[0] for row in rows} == operators_asked_on_a_cpu()
    for row in rows:
        measurements = row["measurements"]
        assert len(measurements) > 1
        assert "triton" not in measurements  # its interpreter serves by request only
        assert all(
            measurement["flaw"] is None and measurement["seconds"] > 0
            for measurement in measurements.values()
        )
        assert all(measurement["error"] <= measurement["allowed"] for measurement in measurements.values())
        assert {row["chosen"], row["chosen_in_graphs"]} <= set(measurements)
    (path,) = cache.rglob("*.json")
    fields = ("chosen", "chosen_in_graphs", "measurements")
    expected = {row["cache_key"]: {"timings": 1} | {name: row[name] for name in fields} for row in rows}
    assert json.loads(path.read_text())["entries"] == expected

    *blocks, (count, place, *_) = (block.splitlines() for block in out.split("\n\n"))
    headings = [block[0] for block in blocks]
    operators = operators_asked_on_a_cpu()
    assert sorted(headings) == sorted(f"{operator}, forward, float32 (times in µs)" for operator in operators)
    assert max(len(line) for block in blocks for line in block) <= 110
    lines = [line for _, _, *lines in blocks for line in lines]
    assert len(lines) == len(rows)
    assert [line.split()[-1] for line in lines] == [row["chosen"] for row in rows]
    assert count.startswith(f"{len(rows)} cache keys, {len(rows)} tuned; chosen: cpu ")
    assert place == f"remembered in {path}"

    code = (
        "import torch; from cvt import create_model; from cvt_kernels import backends\n"
        "with torch.no_grad(): create_model('cvt_13').eval()(torch.randn(2, 3, 32, 32))\n"
        "print(*backends.fallbacks().values(), sep='\\n')"
    )
    later = run_python(code)
    assert "has no entry" not in later.stdout
    assert "measured here" in later.stdout
    assert "has no entry" in run_python(code, XDG_CACHE_HOME=str(tmp_path / "other")).stdout


def test_a_wrong_kernel_fails_the_command(cache, wrong_gelu, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main([*SMALL, "--json", str(report)]) == 1
    out = capsys.readouterr().out
    assert " wrong " in out.split("\n\n")[0]
    cache_key = "bias_gelu, forward, float32, quick, 16384+ elements, 256 channels"
    assert f"\ntriton, {cache_key}: wrong: output is off by " in out
    assert "Please report the lines of gluon, triton, cuda, cpu with the output of `cvt doctor`." in out
    row = next(row for row in json.loads(report.read_text())["cache_keys"] if row["cache_key"] == cache_key)
    assert row["measurements"]["triton"]["flaw"].startswith("wrong: ")
    assert row["chosen"] != "triton"
    assert autotune.cache_for(CPU).get(cache_key).chosen == row["chosen"]


def test_with_a_time_limit_what_is_known_comes_last(cache, few_cache_keys, capsys, monkeypatch):
    assert main(SMALL) == 0
    asked = cache_keys.collect(cache_keys.Workload("cvt_13", 32, [2], ["float32"], train=False), CPU)
    cache = autotune.cache_for(CPU)
    entry = cache.get(asked[-1].text)
    cache.path.unlink()
    cache.remember({asked[0].text: entry}, replace=True)
    seen = []

    def tune_all(progress, *others):
        seen.extend(cache_key.text for cache_key in progress)
        return []

    monkeypatch.setattr(tuning, "tune_all", tune_all)
    main([*SMALL, "--time-limit", "60"])
    assert seen == [*(cache_key.text for cache_key in asked[1:]), asked[0].text]


def test_tunes_a_model_of_transformers(cache, quick_start, monkeypatch, tmp_path):
    collect, report = cache_keys.collect, tmp_path / "report.json"
    known = pyramids.PYRAMIDS["segformer_b0"]
    small = known._replace(sizes={**known.sizes, "depths": [1, 1, 1, 1]})
    monkeypatch.setitem(pyramids.PYRAMIDS, "segformer_b0", small)
    monkeypatch.setattr(
        cache_keys, "collect", lambda *how: [q for q in collect(*how) if q.operator == "segmentation_head"]
    )
    options = ["--model", "segformer_b0", "--image-size", "64", "--json", str(report)]
    assert main([*SMALL, *options]) == 0
    [row] = json.loads(report.read_text())["cache_keys"]
    assert row["cache_key"].startswith("segmentation_head, forward, float32, 1+ images of 256+ pixels")
    assert len(row["measurements"]) == 2
    assert autotune.cache_for(CPU).get(row["cache_key"]).chosen == row["chosen"]


def test_it_replaces_what_is_remembered(cache, few_cache_keys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    cache_key = cache_keys.collect(cache_keys.Workload("cvt_13", 32, [2], ["float32"], train=False), CPU)[0]
    cache = autotune.cache_for(CPU)
    cache.remember({cache_key.text: autotune.Entry("triton", "triton", {})})
    assert main(SMALL) == 0
    assert len(cache.get(cache_key.text).measurements) > 1
    assert "tune:   0%|" in sys.stderr.getvalue()
    assert not sys.stderr.getvalue().split("\r")[-1].strip()


def test_where_nothing_can_be_remembered(monkeypatch, tmp_path, few_cache_keys, capsys, recwarn):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    autotune.forget()
    report = tmp_path / "report.json"
    assert main([*SMALL, "--json", str(report)]) == 0
    assert f"\nnot remembered in {tmp_path}" in capsys.readouterr().out
    assert "Not a directory" in json.loads(report.read_text())["why_not_remembered"]
    assert not recwarn.list


def test_settings_that_keep_the_entries_from_serving_are_reported(
    cache, few_cache_keys, monkeypatch, tmp_path, capsys
):
    cache = autotune.cache_for(CPU)
    cache.remember({"a cache key": autotune.Entry("cpu", "cpu", {})})
    shipped = cache.path.rename(tmp_path / "shipped.json")
    autotune.forget()
    monkeypatch.setenv("CVT_KERNELS_TUNED", str(shipped))
    with backends.use_backend("cpu", "reference"):
        assert main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"CVT_KERNELS_TUNED is set: the entries in {shipped} go before them" in lines
    assert lines[-1].startswith("CVT_KERNELS_BACKEND is cpu,reference")


def processes_of_group(group):
    """Returns the numbers of the processes of a group that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if fields[0] not in "ZX" and int(fields[2]) == group:
            found.append(int(status.parent.name))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_interrupted_it_leaves_its_entries_and_no_process(cache, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "cvt", *SMALL],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not list(cache.rglob("*.json")) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as the terminal does
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        assert out == ""
        assert "Traceback" not in err
        while processes_of_group(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_of_group(process.pid) == []
    finally:
        for left in processes_of_group(process.pid):
            os.kill(left, signal.SIGKILL)
    assert autotune.cache_for(CPU).entries()


def test_bad_arguments(cache, capsys, monkeypatch):
    assert "--token-keep: got it with pvt_tiny, expected a CvT" in bad(
        capsys, main, "tune", "--model", "pvt_tiny", "--token-keep", "0.5"
    )
    assert "--image-size: got 8, which GLPNForDepthEstimation does not take" in bad(
        capsys, main, "tune", "--model", "glpn", "--image-size", "8", "--dtype", "float32"
    )
    assert "1×1 pixels are too few" in bad(capsys, main, "tune", "--image-size", "1")
    assert "--json: /no/x.json cannot be written" in bad(capsys, main, "tune", "--json", "/no/x.json")
    monkeypatch.setattr(backends, "_requested", ("gpu",))
    assert "CVT_KERNELS_BACKEND: got 'gpu'" in bad(capsys, main, "tune")
    assert not list(cache.rglob("*"))


def test_a_process_that_does_not_start_is_one_line(cache, few_cache_keys, capsys, monkeypatch):
    monkeypatch.setattr(worker, "Worker", functools.partial(worker.Worker, setup=broken_kernels.die))
    assert "does not start (dies: exit code 5)" in bad(capsys, main, *SMALL)
