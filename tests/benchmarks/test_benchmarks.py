"""Tests of what ``make gpu``, ``make bench`` and ``make results`` run: parts, limits, tables."""

import functools
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

import cvt_kernels as ck
from benchmarks import archive, auto, run, suites, tune
from benchmarks import tabulate_results as tabulate
from cvt.commands.bench import results as bench_results
from cvt_kernels import backends, machine

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
SUITE = """
import functools, pytest, time
from benchmarks import conftest, suites
facts = {"suite": "suite", "case": "case", "contender": "ours", "dtype": "float32", "batch": 1}
facts["peak_memory_bytes"] = 1  # known, so not measured
def test_quick(benchmark):
    suites.record(benchmark, int, facts)
@pytest.fixture
def time_is_short():
    conftest._deadline = time.monotonic() + 0.5
def test_slow(time_is_short, benchmark):
    suites.record(benchmark, functools.partial(time.sleep, 1000.0), facts)
def test_later(benchmark):
    suites.record(benchmark, int, facts)
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
    assert outcome(python(""), run.GRACE)["lines"] == ["no time is left"]


@pytest.mark.usefixtures("_short_grace")
def test_no_part_costs_another_its_results(tmp_path, capsys):
    path, summary = tmp_path / "summary.json", {"parts": {}}
    hang = "import time; time.sleep(60)"
    parts = [
        python("raise SystemExit(1)", "bad"),
        python(hang, "slow", 1.0),
        python(f"print(len(__import__('json').load(open({str(path)!r}))['parts']))", "good"),
    ]
    assert not run.run(parts, summary, path, seconds=60.0, device="cpu")
    statuses = {name: part["status"] for name, part in json.loads(path.read_text())["parts"].items()}
    assert statuses == {"bad": "failed", "slow": "timed out", "good": "passed"}
    assert summary["parts"]["good"]["lines"] == ["2"]  # what came before was on disk by then
    assert capsys.readouterr().out.count("\n") == 3
    # What is left of all the time bounds a part too.
    summary = {"parts": {}}
    assert not run.run([python(hang, "a"), python(hang, "b")], summary, path, seconds=1.2, device="cpu")
    assert [part["status"] for part in summary["parts"].values()] == ["timed out", "skipped"]


def test_every_part_has_its_script_and_few_files_come_out(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "capability", lambda: "9.0")
    parts = run.plan("cuda", tmp_path, tiny=False, minutes=9.0)
    assert tuple(parts) == run.NAMES
    assert parts["build"].environment == {"CVT_KERNELS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
    words = [word for part in parts.values() for word in part.command]
    for word in words:
        if word.endswith(".py"):
            assert (ROOT / word).is_file()
        if word.startswith("benchmarks."):
            assert (ROOT / f"{word.replace('.', '/')}.py").is_file()
    files = [word for word in words if word.endswith(".json")]
    assert len(files) == len(set(files)) == 22
    assert all(part.seconds <= 540 for part in parts.values())


def test_stages_keep_to_their_time_and_prove_before_anything_else_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "capability", lambda: "9.0")
    parts = run.plan("cuda", tmp_path, tiny=False, minutes=9.0)
    assert list(run.STAGES) == [1, 2, 3, 4]
    chosen = [name for names in run.STAGES.values() for name in names if name != "build"]
    assert sorted(["build", *chosen]) == sorted(run.NAMES)  # each part in one stage
    assert all(names[0] == "build" for names in run.STAGES.values())
    assert run.STAGES[1][1:] == ("memcheck", "prove_bfloat16")
    assert run.STAGES[2][1] == "prove"
    assert run.LIMIT <= 570
    for names in run.STAGES.values():
        assert sum(parts[name].seconds for name in names if name != "build") <= run.LIMIT - run.RESERVE
    # What serves all of CvT is measured before what other models take, and before the longest suite.
    assert run.STAGES[3][-1] == "model"


@pytest.mark.parametrize(
    ("device", "first", "both", "batches"),
    [("cuda", "bfloat16", "bfloat16 float32", "1 256"), ("cpu", "bfloat16", "float32 bfloat16", "1 8")],
)
def test_what_is_proven(device, first, both, batches, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "capability", lambda: "9.0")
    parts = run.plan(device, tmp_path, tiny=False, minutes=9.0)
    for name, dtypes in (("prove_bfloat16", first), ("prove", f"{both}")):
        command = " ".join(parts[name].command)
        assert f"-m cvt prove --device {device} --json {tmp_path}/{name}.json" in command
        assert f"--model cvt_13 --dtype {dtypes} --batch-size {batches}" in command
        assert (" --train " in command) == (name == "prove")
        assert command.endswith(" --time-limit={seconds}")
    # make bench proves first too; parts run in the order of NAMES.
    (bench,) = re.findall(r"--parts (.*)", (ROOT / "Makefile").read_text().replace("\\\n", " "))
    assert {"prove", "auto"} < set(bench.split()) < set(run.NAMES)


def test_a_build_that_fails_is_tried_without_cuda(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "capability", lambda: "9.0")
    built = run.build("cuda")
    assert built.environment["CVT_KERNELS_CUDA"] == "1"
    assert (built.otherwise.name, built.otherwise.environment) == (
        "build_without_cuda",
        {"CVT_KERNELS_CUDA": "0"},
    )
    assert run.build("cpu").otherwise is None
    parts = [
        python(
            "raise SystemExit('nvcc: no')", "build", otherwise=python("print('plain')", "build_without_cuda")
        ),
        python("print('tested')", "tests", otherwise=python("", "never")),
    ]
    summary = {"parts": {}}
    assert not run.run(parts, summary, tmp_path / "summary.json", seconds=60.0, device="cpu")
    assert {name: part["status"] for name, part in summary["parts"].items()} == {
        "build": "failed",
        "build_without_cuda": "passed",
        "tests": "passed",
    }
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(summary["parts"])


def test_tests_for_a_gpu_are_found_by_their_marks():
    gpu, kernels = run.kernel_tests()
    named = {word for word in gpu.command if word.startswith("tests/")}
    for path in (ROOT / "tests").rglob("test_*.py"):
        marked = re.search("^@pytest.mark.gpu$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert (str(path.relative_to(ROOT)) in named) == (marked is not None)
    assert 8 <= len(named) <= 30
    assert "tests/cvt_kernels/ops/linear/test_triton.py" in kernels.command


def test_the_commit_is_known_without_git(monkeypatch, tmp_path):
    monkeypatch.delenv("CVT_KERNELS_COMMIT", raising=False)
    assert re.fullmatch("[0-9a-f]{40}|", run.commit({}))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run.commit({}) == ""
    assert run.commit({"commit": "of the pack"}) == "of the pack"
    monkeypatch.setenv("CVT_KERNELS_COMMIT", "of the environment")
    assert run.commit({"commit": "of the pack"}) == "of the environment"
    assert run.driver() is None  # nor nvidia-smi


def test_a_part_whose_program_is_missing_is_skipped():
    part = run.Part("memcheck", ["no-such-program", "--help"], 30.0)
    assert outcome(part)["lines"] == ["not installed: no-such-program"]


# Archives -------------------------------------------------------------------------------------------------


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Returns a function that runs parts as a stage, and returns whether they passed and the archive."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    results = tmp_path / "a-gpu" / "2026-01-01-0000"
    results.mkdir(parents=True)
    for folder in ("cache/cvt_kernels/verdicts", "triton/known"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "cache/cvt_kernels/verdicts/key.json").write_text("{}")
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
folder.mkdir()
(folder / "kernel.cubin").write_text("compiled")
"""


def test_an_archive_has_results_verdicts_and_new_kernels(stage, tmp_path, monkeypatch):
    passed, files = stage(python(COMPILES))
    assert passed
    assert sorted(files) == [
        "results/a-gpu/2026-01-01-0000/summary.json",
        "triton/new/kernel.cubin",
        "verdicts/key.json",
    ]
    # Another machine takes over what it lacks.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    archive.restore(tmp_path / "stage1.tar.gz")
    assert (tmp_path / "elsewhere/new/kernel.cubin").read_text() == "compiled"
    assert (tmp_path / "elsewhere/cvt_kernels/verdicts/key.json").read_text() == "{}"
    with pytest.raises(ValueError, match=r"key.json: is no archive of a stage"):
        archive.restore(tmp_path / "cache/cvt_kernels/verdicts/key.json")


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


@pytest.mark.usefixtures("_short_grace")
def test_an_archive_is_left_when_time_is_up_and_by_an_exception(stage, monkeypatch):
    passed, files = stage(python("import time; time.sleep(1000)", "slow", 1000.0), limit=2.5)
    assert not passed
    summary = json.loads(files["results/a-gpu/2026-01-01-0000/summary.json"])
    assert summary["parts"]["slow"]["status"] == "timed out"

    def broken(*arguments):
        raise RuntimeError("no good")

    monkeypatch.setattr(run, "run_part", broken)
    with pytest.raises(RuntimeError, match="no good"):
        stage(python(""))


def test_kernels_for_which_an_archive_has_no_room_are_left_out(stage, tmp_path):
    stage()
    path = tmp_path / "small.tar.gz"
    assert archive.write(path, tmp_path / "a-gpu" / "2026-01-01-0000", limit=0) == 1
    with tarfile.open(path) as content:
        assert "verdicts/key.json" in content.getnames()


def test_parts_run_as_if_nothing_had_been_requested(tmp_path, monkeypatch):
    names = ("CVT_KERNELS_BACKEND", "CVT_KERNELS_PROVE", "CVT_KERNELS_VERDICTS")
    for name in names:
        monkeypatch.setenv(name, "0")
    part = python(f"import os; print(sorted(set({names}) & set(os.environ)))")
    summary = {"parts": {}}
    assert run.run([part], summary, tmp_path / "summary.json", seconds=60.0, device="cpu")
    assert summary["parts"]["part"]["lines"] == ["[]"]


def test_cpu_rehearsal_of_the_ceilings(tmp_path, capsys):
    arguments = ["--device", "cpu", "--tiny", "--parts", "ceilings", "--results", str(tmp_path)]
    assert run.main(arguments) == 0, capsys.readouterr().out
    (path,) = tmp_path.glob("*/*/summary.json")
    summary = json.loads(path.read_text())
    assert (summary["schema"], summary["version"]) == (tabulate.SCHEMA, tabulate.VERSION)
    assert (summary["device_type"], summary["tiny"]) == ("cpu", True)
    assert summary["parts"]["ceilings"]["status"] == "passed"
    ceilings = json.loads((path.parent / "ceilings.json").read_text())
    assert set(ceilings) == {"copy", "matmul_float32", "matmul_bfloat16"}
    assert min(ceilings.values()) > 0


def test_what_run_complains_of_in_one_line(tmp_path, monkeypatch, capsys):
    def complaint(*arguments):
        assert run.main([*arguments]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        return printed.err

    blocked = tmp_path / "file"
    blocked.touch()
    assert "'nonsense'" not in complaint("--parts", "build", "nonsense")
    assert str(blocked) in complaint("--device", "cpu", "--parts", "ceilings", "--results", str(blocked))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is no NVIDIA GPU" in complaint("--stage", "1")
    monkeypatch.setattr(run, "REQUIRED", ("torch", "no_such_module"))
    assert "no_such_module" in complaint("--stage", "1")


def test_suites_keep_to_their_time(tmp_path):
    """A test that takes too long is interrupted, those after it are skipped, those before it are written."""
    suite, target = tmp_path / "test_suite.py", tmp_path / "suite.json"
    suite.write_text(SUITE)
    # As a child of one of several workers pytest-benchmark would measure nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = [
        "-p",
        "benchmarks.conftest",
        "-W",
        "default",
        "-rs",
        "--seconds=1000",
        f"--benchmark-json={target}",
        f"--basetemp={tmp_path / 'temporary'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(suite), *options],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 2 skipped" in done.stdout
    assert "SKIPPED [2]" in done.stdout
    results = json.loads(target.read_text())
    assert [benchmark["name"] for benchmark in results["benchmarks"]] == ["test_quick"]
    assert results["machine_info"]["torch"] == torch.__version__
    assert "node" not in results["machine_info"]


# Measuring ------------------------------------------------------------------------------------------------


def test_rates_are_shares_of_the_ceilings(monkeypatch):
    monkeypatch.setattr(suites, "copy_bandwidth", lambda: 2e9)
    monkeypatch.setattr(suites, "product_rate", {"float32": 4e12}.__getitem__)
    assert suites.rates(2.0, "float32", 10**9, 10**12) == {
        "gigabytes_per_second": 0.5,
        "share_of_copy": 0.25,
        "teraflop_per_second": 0.5,
        "share_of_matmul": 0.125,
        "share_of_ceiling": 0.25,
    }


def test_a_wrong_result_is_not_timed():
    right = torch.linspace(-1, 1, 64, dtype=torch.float64)
    same = right.bfloat16()
    suites.check([same], [same], [right], torch.bfloat16)
    with pytest.raises(AssertionError):
        suites.check([same + 0.05], [same], [right], torch.bfloat16)
    with pytest.raises(AssertionError):
        suites.check([same * torch.nan], [same], [right], torch.bfloat16)


@pytest.fixture
def _on_cpu(monkeypatch):
    """Measures the CPU at tiny shapes, whatever the machine has and the test sets."""
    monkeypatch.setattr(suites, "TINY", True)
    monkeypatch.setattr(suites, "CUDA", False)
    monkeypatch.setattr(suites, "DEVICE", "cpu")


@pytest.mark.usefixtures("_on_cpu")
def test_contenders_are_the_backends_that_run_here(monkeypatch):
    assert suites.contenders("linear") == ["reference", "float32", "convolution"]
    assert suites.contenders("attention")[:2] == ["reference", "sdpa"]
    assert not {"sdpa", "convolution"} & set(suites.contenders("layer_norm"))
    monkeypatch.setattr(suites, "TINY", False)
    assert "compiled" in suites.contenders("linear")


def test_backends_that_served():
    q, x = torch.randn(1, 4, 2, 8), torch.randn(4, 8)

    def call():
        ck.attention(q, q, q)
        ck.layer_norm(x)

    before = backends.registered("attention", "sdpa")
    with ck.use_backend("sdpa", "reference"):
        assert suites.backends_serving(call) == {"attention": ["sdpa"], "layer_norm": ["reference"]}
    assert backends.registered("attention", "sdpa") is before


# auto -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _few_calls(monkeypatch, _on_cpu):
    """Leaves ``auto`` one stage, two operators and two settings."""
    makers = [
        ("stage3", functools.partial(auto.attention, "stage3")),
        ("stage3, fc1", functools.partial(auto.linear, "stage3", "fc1")),
    ]
    settings = [auto.Setting(torch.bfloat16, 2, False), auto.Setting(torch.float32, 2, True)]
    monkeypatch.setattr(auto, "makers", lambda: iter(makers))
    monkeypatch.setattr(auto, "settings", lambda: settings)


def run_auto(monkeypatch, path, *options):
    monkeypatch.setattr(sys, "argv", ["benchmarks.auto", str(path), *options])
    return auto.main()


@pytest.mark.usefixtures("_few_calls")
def test_auto_is_timed_beside_pytorchs_own(tmp_path, monkeypatch, capsys, proving):
    path = tmp_path / "auto.json"
    assert run_auto(monkeypatch, path, "--tiny") == 0
    report = json.loads(path.read_text())
    assert (report["schema"], report["version"]) == (tabulate.AUTO_SCHEMA, tabulate.AUTO_VERSION)
    assert [(row["operator"], row["dtype"], row["direction"]) for row in report["rows"]] == [
        ("attention", "bfloat16", "forward"),
        ("linear", "bfloat16", "forward"),
        ("attention", "float32", "forward+backward"),
        ("linear", "float32", "forward+backward"),
    ]
    assert [list(row["seconds"]) for row in report["rows"]] == [
        ["auto", "sdpa", "reference"],
        ["auto", "convolution", "float32", "reference"],
        ["auto", "sdpa", "reference"],
        ["auto", "convolution", "reference"],  # float32 has no gradients
    ]
    for row in report["rows"]:
        seconds = row["seconds"]
        assert row["chosen"] in backends.BACKENDS
        assert seconds[row["best_of_pytorch"]] == min(s for name, s in seconds.items() if name != "auto")
        assert row["ratio"] == pytest.approx(seconds[row["best_of_pytorch"]] / seconds["auto"])  # one round
    assert list((proving / "cvt_kernels" / "verdicts").glob("*.json"))  # the first runs have proven
    assert "4 of 4 calls measured" in capsys.readouterr().out


@pytest.mark.usefixtures("_on_cpu")
def test_all_calls_of_the_model_are_there():
    cases = [(make(auto.settings()[0]).operator, name) for name, make in auto.makers()]
    assert {operator for operator, _ in cases} == set(backends.operators)
    assert len(cases) == len(set(cases)) == len(suites.stages()) * (2 + 7 + 2 * 3 + len(auto.FUSED) + 3 + 3)
    with_backward = {case.make(case.setting).operator for case in auto.cases() if case.setting.backward}
    assert set(backends.operators) - with_backward == {"linear_int8", *auto.OF_8_BITS}
    kinds = {(s.dtype, s.images, s.backward) for s in auto.settings()}
    assert len(kinds) == 5
    assert {images for _, images, backward in kinds if not backward} == {1, suites.batch()}


@pytest.mark.usefixtures("_on_cpu")
def test_every_call_has_the_gradients_that_it_is_timed_with():
    for case in auto.cases():
        if case.setting.backward:
            call = case.make(case.setting)
            gradients = call.runner(getattr(ck.reference, call.operator))()[-len(call.leaves) :]
            assert [g.shape for g in gradients] == [t.shape for t in call.leaves]


@pytest.mark.usefixtures("_few_calls")
def test_a_call_that_raises_costs_no_other_its_row(tmp_path, monkeypatch, capsys):
    def raising(stage, setting):
        raise RuntimeError("no good\nat all")

    makers = list(auto.makers())
    makers.insert(1, ("stage3", functools.partial(raising, "stage3")))
    monkeypatch.setattr(auto, "makers", lambda: iter(makers))
    path = tmp_path / "auto.json"
    assert run_auto(monkeypatch, path, "--tiny") == 1
    report = json.loads(path.read_text())
    assert [row["operator"] for row in report["rows"]] == ["attention", "linear"] * 2
    assert [row["error"] for row in report["failures"]] == ["RuntimeError: no good\nat all"] * 2
    assert "failed: raising stage3, bfloat16, 2, forward: RuntimeError: no good\n" in capsys.readouterr().out


@pytest.mark.usefixtures("_few_calls")
def test_a_call_that_looks_slow_is_measured_again(tmp_path, monkeypatch, capsys):
    """A ratio that recovers passes, one that stays below the tolerance fails."""

    def timed(ours):
        def measured(call, seconds):
            mine = ours.pop(0)
            share = 1e-3 / mine
            seconds = {"auto": mine, "reference": 1e-3}
            return auto.Measurement("native", seconds, "reference", share, (share, share), 11)

        monkeypatch.setattr(auto, "measured", measured)

    path = tmp_path / "auto.json"
    timed([1e-3, 2e-3, 1.05e-3, 0.5e-3, 1e-3])
    assert run_auto(monkeypatch, path) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["ratio"] for row in rows] == pytest.approx([1, 1, 1 / 1.05, 2])
    assert [row.get("first_ratio") for row in rows] == [None, 0.5, None, None]
    assert "4 of 4 calls measured: 0 slower" in capsys.readouterr().out
    timed([1e-3, 2e-3, 1e-3, 1e-3, 2e-3])
    assert run_auto(monkeypatch, path) == 1
    printed = capsys.readouterr().out
    assert "4 of 4 calls measured: 1 slower" in printed
    assert [line.split()[-1] for line in printed.splitlines()[1:5]].count("slow") == 1
    timed([])
    assert run_auto(monkeypatch, path, "--seconds", "0") == 0
    assert "0 of 4 calls measured" in capsys.readouterr().out


def test_dispatch_is_not_taken_for_a_wrong_choice():
    def row(ours, theirs):
        return {
            "seconds": {"auto": ours, "reference": theirs},
            "best_of_pytorch": "reference",
            "ratio": theirs / ours,
        }

    assert auto.is_slow(row(1.2e-3, 1e-3))
    assert not auto.is_slow(row(1.05e-3, 1e-3))
    assert not auto.is_slow(row(30e-6, 20e-6))
    assert auto.is_slow(row(50e-6, 20e-6))


# Tuning ---------------------------------------------------------------------------------------------------


def test_candidates_and_their_combination():
    LaunchConfig = tune.configuration_module("attention").LaunchConfig
    config = LaunchConfig(block_q=64, block_kv=128, num_warps=4, num_stages=2)
    others = tune.neighbors(config)
    assert len(others) == len(set(others)) == 2 + 3 + 2 + 3
    assert config not in others
    for other in others:
        assert len(vars(other).items() - vars(config).items()) == 1
    times = dict.fromkeys(others, 3.0) | {config: 2.0}
    assert tune.combination(config, times) == config
    for better in (("block_q", 32), ("num_warps", 8)):
        times[next(c for c in others if getattr(c, better[0]) == better[1])] = 1.0
    assert tune.combination(config, times) == LaunchConfig(
        block_q=32, block_kv=128, num_warps=8, num_stages=2
    )


def test_the_kernel_of_a_job_is_told_by_its_name():
    def _attention_bwd_kernel():
        pass

    launch = machine.Launch(_attention_bwd_kernel, (1,), {}, {})
    assert tune.is_of(tune.Job("attention", "stage1", "bwd"), launch)
    assert not tune.is_of(tune.Job("attention", "stage1", "bwd_dq"), launch)


# Tables ---------------------------------------------------------------------------------------------------


def row(contender, seconds, **facts):
    facts = {"suite": "attention", "case": "stage1", "dtype": "bfloat16", "batch": 256} | facts
    return {"extra_info": facts | {"contender": contender, "seconds": seconds, "share_of_ceiling": 0.5}}


def write_results(root, *, date="2026-01-02-0304", **changes):
    folder = root / "some-gpu" / date
    folder.mkdir(parents=True)
    summary = {
        "schema": tabulate.SCHEMA,
        "version": tabulate.VERSION,
        "device": "Some GPU",
        "device_type": "cuda",
        "date": date,
        "torch": "2.11.0",
        "triton": "3.6.0",
        "cuda": "13.0",
        "threads": None,
        "commit": 40 * "a",
        "tiny": False,
        "parts": {"build": {"status": "passed"}, "gpu_tests": {"status": "failed"}},
    }
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    model = {"suite": "model", "case": "cvt_13", "images_per_second": 1234.0, "peak_memory_bytes": 2**30}
    suites = {
        "attention": [row("sdpa", 3e-4), row("triton", 2e-4), {"extra_info": {}}],
        "model": [
            row("hf", 1e-3, **model),
            row("compile", 2e-3, **model | {"batch": 1}),
        ],
    }
    for name, benchmarks in suites.items():
        ceilings = {"copy": 4e12, "matmul_bfloat16": 7e14}
        (folder / f"{name}.json").write_text(json.dumps({"ceilings": ceilings, "benchmarks": benchmarks}))
    return folder


def test_the_page_of_results_is_what_the_json_says():
    runs = tabulate.load(tabulate.RESULTS)
    pyramids = tabulate.pyramids_by_device(tabulate.RESULTS)
    others = [*map(tabulate.pyramids_of, pyramids.values()), *tabulate.variants_by_device(tabulate.RESULTS)]
    page = tabulate.page(runs, others)
    assert tabulate.PAGE.read_text(encoding="utf-8") == page
    readme = tabulate.README.read_text(encoding="utf-8")
    assert tabulate.fill_readme(readme, runs, pyramids) == readme
    quantize = tabulate.QUANTIZE.read_text(encoding="utf-8")
    assert tabulate.fill_quantize(quantize, tabulate.RESULTS) == quantize


def test_tables_of_8_bit_layers(tmp_path):
    page = f"before\n{tabulate.BEGIN}old\n{tabulate.END}after\n"
    assert tabulate.fill_quantize(page, tmp_path) == page
    folder = tmp_path / "some-cpu" / "2026-01-02-0304"
    folder.mkdir(parents=True)
    content = {
        "schema": tabulate.QUANTIZATION_SCHEMA,
        "version": tabulate.QUANTIZATION_VERSION,
        "device": "Some CPU",
        "torch": "2.13.0",
        "threads": 2,
        "speed": [
            {"set": None, "batch": 8, "model": "float32", "seconds": [0.2, 0.4, 0.3]},
            {"set": None, "batch": 8, "model": "int8 dynamic", "seconds": [0.1, 0.15, 0.2]},
            {"set": "avx2", "batch": 8, "model": "float32", "seconds": [0.5]},
        ],
        "accuracy": [
            {"model": "a", "scheme": "static", "sqnr": 33.14, "bytes": [4000, 1000]},
            {"model": "b", "scheme": "dynamic", "sqnr": 48.0, "top1": [0.9, 0.875], "top5": [1.0, 1.0]},
        ],
    }
    (folder / "quantization.json").write_text(json.dumps(content))
    assert tabulate.fill_quantize(page, tmp_path).splitlines()[2:-2] == [
        "",
        "Some CPU, 2 threads, torch 2.13.0, 2026-01-02-0304:",
        "",
        "| instructions | batch | float32, images/s | int8 dynamic |",
        "|---|---|---|---|",
        "| newest | 8 | 26.7 | 2.00 × |",
        "| `avx2` | 8 | 16 | – |",
        "",
        "| model | scheme | logits, dB | top-1 before and after | top-5 before and after | file |",
        "|---|---|---|---|---|---|",
        "| a | static | 33.1 | – | – | 0.250 of float32 |",
        "| b | dynamic | 48.0 | 90.00%, 87.50% | 100.00%, 100.00% | – |",
        "",
    ]
    with pytest.raises(ValueError, match=r"docs/quantize.md: has no <!-- measured"):
        tabulate.fill_quantize("", tmp_path)


def test_tables(tmp_path):
    write_results(tmp_path, date="2025-12-31-0000", device="Older run")
    write_results(tmp_path)
    text = tabulate.page(tabulate.load(tmp_path))
    assert "Older run" not in text
    assert "There are no GPU results" not in text
    assert "**There are no CPU results yet.**" in text
    for line in (
        "## Some GPU",
        "2026-01-02-0304, torch 2.11.0, triton 3.6.0, CUDA 13.0, commit aaaaaaaaa.",
        "Ceilings: copy 4,000 GB/s, bfloat16 products 700 TFLOP/s.",
        "Parts that did not pass: gpu_tests: failed.",
        "| case | dtype | batch | sdpa | triton | gain |",
        "| stage1 | bfloat16 | 256 | 300 (50%) | 200 (50%) | 1.50× |",
        "| cvt_13 | bfloat16 | 256 | 1,234 (1,024 MiB) | – | – |",
        "| cvt_13 | bfloat16 | 1 | – | 1,234 (1,024 MiB) | – |",
    ):
        assert line in text.splitlines()
    assert "### Linear layers" not in text


def test_host_time_is_told_per_operator():
    facts = {"suite": "host", "seconds": 1.5e-3}
    assert tabulate.cell(facts) == "1,500"
    assert tabulate.cell(facts | {"operators": 30}) == "1,500 (30 operators, 50 each)"


def test_table_of_auto(tmp_path):
    folder = write_results(tmp_path)
    row = {"operator": "linear", "dtype": "float32", "direction": "forward", "batch": 8}
    rows = [
        row | {"case": "stage1", "chosen": "reference", "ratio": 0.98},
        row | {"case": "stage1, fc2", "chosen": "convolution", "ratio": 1.5},
        row | {"case": "stage2, fc1", "chosen": "convolution", "ratio": 1.1},
        row | {"case": "stage1", "chosen": "native", "ratio": 2.0, "operator": "attention"},
    ]
    report = {"schema": tabulate.AUTO_SCHEMA, "version": tabulate.AUTO_VERSION, "calls": 5, "rows": rows}
    (folder / "auto.json").write_text(json.dumps(report))
    lines = tabulate.page(tabulate.load(tmp_path)).splitlines()
    at = lines.index("### `auto` beside PyTorch's own")
    assert lines[at + 2].startswith("4 of 5 calls")
    assert lines[at + 4 : at + 8] == [
        "| operator | dtype | calls | `auto` took | median | worst |",
        "|---|---|---|---|---|---|",
        "| `attention` | float32 | 1 | native 1 | 2.00 | 2.00 (stage1, forward, batch 8) |",
        "| `linear` | float32 | 3 | convolution 2, reference 1 | 1.10 | 0.98 (stage1, forward, batch 8) |",
    ]
    (folder / "auto.json").write_text(json.dumps(report | {"version": 0}))
    with pytest.raises(ValueError, match="got version 0, expected 1"):
        tabulate.load(tmp_path)


def bench_file(path, **peaks):
    """Writes a file of ``cvt bench``: hf, and cvt, which is twice as fast."""
    rows = [
        {
            "contender": key,
            "seconds": seconds,
            "peak_bytes": peaks.get(key),
            "parity": {"error": 0.0, "largest": 1.0, "top5": 5, "of": 5, "gradient_error": None},
        }
        for key, seconds in {"hf": [2.0, 4.0, 6.0, 8.0], "cvt": [1.0, 2.0, 3.0, 4.0]}.items()
    ]
    config = {
        "model": "cvt_13",
        "weights": "random weights",
        "image_size": 224,
        "dtype": "float32",
        "device": "cpu",
        "threads": 2,
        "train": False,
        "rounds": 4,
    }
    results = {
        "schema": bench_results.SCHEMA,
        "version": bench_results.VERSION,
        "date": "2026-01-02T03:04:05+00:00",
        "config": config,
        "machine": {"cpu": "Some CPU", "gpus": []},
        "versions": {"torch": "2.13.0"},
        "contenders": {key: {"about": key, "ours": key == "cvt", "note": None} for key in ("hf", "cvt")},
        "batches": [{"batch_size": 8, "rows": rows}],
    }
    bench_results.write(results, path)


def test_tables_of_cvt_bench(tmp_path, capsys):
    folder = write_results(tmp_path, device_type="cpu", cuda=None, threads=2)
    bench_file(folder / "bench.json", hf=1000, cvt=410)
    bench_file(folder / "bench_bfloat16.json")
    lines = tabulate.page(tabulate.load(tmp_path)).splitlines()
    assert "### Beside Hugging Face's model" in lines
    heading = "cvt_13, random weights, 224×224, float32 on cpu, 2 threads, forward, 4 rounds:"
    assert lines.count(heading) == 2
    for line in (
        "| batch | contender | images/s | × hf | memory, of hf's |",
        "| 8 | `hf` | 1.6 | 1 | 1.00 |",
        "| 8 | `cvt` | 3.2 | 2.00 (2.00–2.00) | 0.41 |",
        "| 8 | `cvt` | 3.2 | 2.00 (2.00–2.00) | – |",
    ):
        assert line in lines
    readme, page = tmp_path / "README.md", tmp_path / "page.md"
    arguments = ["--results", str(tmp_path), "--page", str(page), "--readme", str(readme)]
    readme.write_text(f"before\n{tabulate.BEGIN}old\n{tabulate.END}after\n")
    assert tabulate.main(arguments) == 0
    assert readme.read_text().splitlines() == [
        "before",
        tabulate.BEGIN.strip(),
        "|  | batch | Hugging Face's, images/s | `torch.compile` | accelerated | with `freeze=False` "
        "| `cvt` | memory of `cvt` |",
        "|---|---|---|---|---|---|---|---|",
        "| float32, inference | 8 | 1.6 | – | – | – | 2.00 × | 0.41 |",
        "| float32, inference | 8 | 1.6 | – | – | – | 2.00 × | – |",
        tabulate.END.strip(),
        "after",
    ]
    bench = json.loads((folder / "bench.json").read_text())
    rows, product = bench["batches"][0]["rows"], {"n": 8, "operations": 1024, "seconds": [1.0, 2.0, 3.0, 4.0]}
    bench["batches"][0] |= {"operations": 512, "product": product}
    rows += [{**rows[1], "contender": name} for name in ("compile", "accelerate-frozen")]
    bench["contenders"] |= dict.fromkeys(("compile", "accelerate-frozen"), bench["contenders"]["cvt"])
    (folder / "bench.json").write_text(json.dumps(bench))
    (run,) = tabulate.load(tmp_path)
    lines = tabulate.page([run]).splitlines()
    assert "| batch | contender | images/s | × hf | × compile | % of product | memory, of hf's |" in lines
    assert "| 8 | `hf` | 1.6 | 1 | 0.50 (0.50–0.50) | 25 | 1.00 |" in lines
    assert "| 8 | `compile` | 3.2 | 2.00 (2.00–2.00) | 1 | 50 | 0.41 |" in lines
    assert any(line.startswith("% of product: of the rate of a matrix product of 8×8×8") for line in lines)
    assert " with `freeze=False` |" in tabulate.readme_table(run)
    alone = {"hf": {"seconds": [1.0], "peak_bytes": 1000}}  # another failed
    assert tabulate.share_of_memory(alone, "cvt") == tabulate.times_as_fast(alone, "cvt") == "–"
    readme.write_text("no marks\n")
    assert tabulate.main(arguments) == 2
    assert "README.md: has no <!-- measured" in capsys.readouterr().err


def test_a_damaged_file_of_cvt_bench(tmp_path, capsys):
    folder = write_results(tmp_path)
    (folder / "bench.json").write_text("{}")
    assert tabulate.main(["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 2
    assert "bench.json has schema None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"version": 2}, "got version 2, expected 1"), ({"tiny": True}, "rehearsal"), (None, "is not JSON")],
)
def test_results_that_cannot_be_used(tmp_path, capsys, changes, complaint):
    folder = write_results(tmp_path, **changes or {})
    if changes is None:
        (folder / "attention.json").write_text("[")
    page = tmp_path / "results.md"
    assert tabulate.main(["--results", str(tmp_path), "--page", str(page)]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert str(folder) in error
    assert error.count("\n") == 1
    assert not page.exists()
