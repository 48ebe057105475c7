"""Tests of what ``make gpu``, ``make bench`` and ``make results`` run: parts, limits, tables."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks import archive, run, sweep

ROOT = Path(__file__).parents[2]
BUSY = """
import os, time
print("busy", flush=True)
try:
    started = open(os.environ["STARTED"], "w")  # an interrupt while it is finalized would be lost
    time.sleep(1000)
except KeyboardInterrupt:
    print("report")
"""
DEAF = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid, flush=True)
open(os.environ["STARTED"], "w").close()
time.sleep(1000)
"""


def python(code, name="part", seconds=30.0, **options):
    return run.Part(name, [sys.executable, "-c", code], seconds, **options)


# Parts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _short_grace(monkeypatch):
    monkeypatch.setattr(run, "GRACE", 0.5)


def outcome(part, seconds=30.0):
    return run.run_part(part, seconds, dict(os.environ))


def test_a_part_that_passes_and_one_that_fails():
    passed = outcome(python("import os; print('fine', os.environ['EXTRA'])", environment={"EXTRA": "é"}))
    assert (passed["status"], passed["lines"]) == ("passed", ["fine é"])
    failed = outcome(python("print('so far'); raise SystemExit('no good')"))
    assert (failed["status"], sorted(failed["lines"])) == ("failed", ["no good", "so far"])


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Lets the time of a part be up as soon as it has made this file, however long its start takes."""
    file = tmp_path / "started"

    class Part(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is None or file.exists():
                return super().wait(timeout)
            while not file.exists():
                assert self.poll() is None, "the part has ended before its time"
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(run.subprocess, "Popen", Part)
    return {"STARTED": str(file)}


def test_a_part_that_hangs_is_interrupted_and_reports(monkeypatch, started):
    monkeypatch.setattr(run, "GRACE", 300.0)  # it ends by itself
    hung = outcome(python(BUSY, environment=started), 1000.0)
    assert (hung["status"], hung["lines"]) == ("timed out", ["busy", "report"])


@pytest.mark.usefixtures("_short_grace")
def test_what_ignores_the_interrupt_is_killed_with_its_children(started):
    killed = outcome(python(DEAF, environment=started), 1000.0)
    assert killed["status"] == "timed out"
    deadline = time.monotonic() + 300
    while alive(killed["lines"][0]):  # a moment, where the machine is busy
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_part_that_cannot_start():
    skipped = outcome(python("", needs=("torch", "no_such_module")))
    assert (skipped["status"], skipped["lines"]) == ("skipped", ["not installed: no_such_module"])
    missing = run.Part("memcheck", ["no-such-program", "--help"], 30.0)
    assert outcome(missing)["lines"] == ["not installed: no-such-program"]
    assert outcome(python(""), run.GRACE)["lines"] == ["no time is left"]


@pytest.fixture
def known(tmp_path, monkeypatch):
    """The parts of each stage."""
    monkeypatch.setattr(run, "capability", lambda: "9.0")
    return run.stages("cuda", tmp_path) | run.stages("cpu", tmp_path)


def test_every_part_has_its_script_and_a_name_of_its_own(known):
    for stage, parts in known.items():
        names = [part.name for part in parts]
        assert len(names) == len(set(names))
        assert names[0] == "build"  # a stage may run on a machine of its own
        for part in parts:
            for word in part.command:
                if word.startswith("benchmarks."):
                    assert (ROOT / f"{word.replace('.', '/')}.py").is_file()
            if stage != "cpu":  # what comes later gets what is left
                assert part.seconds <= 240
        assert stage == "cpu" or sum(part.seconds for part in parts[:3]) <= run.LIMIT - run.RESERVE


def test_every_sweep_is_of_known_kernels():
    assert {space.part for space in sweep.SPACES.values() if space.stages} == {*run.SWEEPS}
    for name, stage in sweep.jobs_of(list(run.SWEEPS)):
        assert sweep.launched(name, stage, 1, None), (name, stage)
    assert sweep.jobs_of(["attention fwd:2", "mlp"]) == [("attention fwd", 2), *sweep.jobs_of(["mlp"])]


def test_gpu_tests_are_found_by_their_marks():
    named = {word for word in run.gpu_tests().command if word.startswith("tests/")}
    for path in (ROOT / "tests").rglob("test_*.py"):
        marked = re.search("^@pytest.mark.gpu$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert marked is None or str(path.relative_to(ROOT)) in named
    assert "tests/contract/test_contract.py" in named


def test_a_build_that_fails_is_tried_without_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "capability", lambda: "9.0")
    assert run.build("cpu").otherwise is None
    built = run.build("cuda")
    assert built.environment == {"CVT_KERNELS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
    assert built.otherwise.environment == {"CVT_KERNELS_CUDA": "0"}
    plain = python("print('plain')", "without_cuda")
    parts = [
        python("raise SystemExit('nvcc: no')", "built", otherwise=plain),
        python("print('tested')", "tests", otherwise=python("", "never")),
    ]
    summary = {"parts": {}}
    assert not run.run(parts, summary, tmp_path / "summary.json", seconds=60.0, device="cpu")
    statuses = {name: part["status"] for name, part in summary["parts"].items()}
    assert statuses == {"built": "failed", "without_cuda": "passed", "tests": "passed"}


# Archives -------------------------------------------------------------------------------------------------


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Returns a function that runs parts as a stage, and returns whether they passed and the archive."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(archive, "ROOT", tmp_path)  # with no extension
    results = tmp_path / "a-gpu" / "2026-01-01-0000"
    results.mkdir(parents=True)
    for folder in ("cache/cvt_kernels/choices", "triton/known"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cache/cvt_kernels/choices/key.json").write_text('{"choices": {"a": 2, "c": 2}}')
    (tmp_path / "triton/known/kernel.cubin").write_text("carried")

    def run_stage(*parts, limit=run.LIMIT):
        monkeypatch.setattr(run, "BEGAN", time.monotonic())
        monkeypatch.setattr(run, "LIMIT", limit)
        monkeypatch.setattr(run, "RESERVE", 0.5)
        path = tmp_path / "stage1.tar.gz"
        passed = run.run_stage(list(parts), {"parts": {}}, results, path, device="cpu")
        with tarfile.open(path) as archive:
            return passed, {
                member.name: archive.extractfile(member).read() for member in archive if member.isreg()
            }

    return run_stage


COMPILES = """
import os, pathlib
folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"], "new")
folder.mkdir(parents=True)
(folder / "kernel.cubin").write_text("compiled")
(folder / "__grp__kernel.json").write_text('{"child_paths": {"kernel.cubin": "/gone/kernel.cubin"}}')
"""


def test_an_archive_has_results_choices_and_new_kernels(stage, tmp_path, monkeypatch):
    passed, files = stage(python(COMPILES))
    assert passed
    assert sorted(files) == [
        "choices/key.json",
        "results/a-gpu/2026-01-01-0000/summary.json",
        "triton/new/__grp__kernel.json",
        "triton/new/kernel.cubin",
    ]
    # Another machine takes over what it lacks, and Triton finds the files of a kernel where they are now.
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(elsewhere))
    known = elsewhere / "cvt_kernels" / "choices" / "key.json"
    known.parent.mkdir(parents=True)
    known.write_text('{"choices": {"a": 1, "b": 1}}')
    archive.restore(tmp_path / "stage1.tar.gz")
    assert (elsewhere / "new/kernel.cubin").read_text() == "compiled"
    assert json.loads(known.read_text()) == {"choices": {"a": 1, "b": 1, "c": 2}}
    group = json.loads((elsewhere / "new/__grp__kernel.json").read_text())
    assert group == {"child_paths": {"kernel.cubin": str(elsewhere / "new/kernel.cubin")}}
    with pytest.raises(ValueError, match=r"key.json: is no archive of a stage"):
        archive.restore(tmp_path / "cache/cvt_kernels/choices/key.json")


def test_an_archive_brings_the_extension_for_the_same_sources(stage, tmp_path):
    package, sources = tmp_path / "cvt_kernels", tmp_path / "csrc" / "loops.cpp"
    for path in (package / "_C.so", sources, tmp_path / "setup.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("first")
    assert not archive.is_built()  # of who knows what
    _, files = stage(python("", "build"))
    assert archive.is_built()
    assert {"extension/_C.so", f"extension/{archive.SOURCES}"} < set(files)
    for text, taken in (("second", False), ("first", True)):
        (package / "_C.so").unlink(missing_ok=True)
        sources.write_text(text)
        archive.restore(tmp_path / "stage1.tar.gz")
        assert archive.is_built() == (package / "_C.so").exists() == taken


@pytest.mark.usefixtures("_short_grace")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_archive_is_left_at_a_signal(stage, number, capsys):
    ends = f"import os, time; os.kill(os.getppid(), {int(number)}); time.sleep(1000)"
    passed, files = stage(
        python("print('fine')", "first"), python(ends, "second", 1000.0), python("", "third")
    )
    assert not passed
    summary = json.loads(files["results/a-gpu/2026-01-01-0000/summary.json"])
    assert list(summary["parts"]) == ["first"]
    assert f"ended by {number.name}" in capsys.readouterr().out
    assert signal.getsignal(number) is not signal.SIG_IGN


def test_what_run_complains_of_in_one_line(tmp_path, monkeypatch, capsys):
    def complaint(*arguments):
        assert run.main([*arguments]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        return printed.err

    blocked = tmp_path / "file"
    blocked.touch()
    assert "expected some of build, operators" in complaint("--stage", "cpu", "--parts", "build", "nonsense")
    assert str(blocked) in complaint("--stage", "cpu", "--parts", "models", "--results", str(blocked))
    assert "is no archive of a stage" in complaint("--stage", "cpu", "--from", str(blocked))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is no NVIDIA GPU" in complaint("--stage", "1")
    monkeypatch.setattr(run, "REQUIRED", ("torch", "no_such_module"))
    assert "no_such_module" in complaint("--stage", "1")
