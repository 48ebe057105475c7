"""Measures this machine in parts: what users compare with first, then why.

``make gpu`` is this script with ``--stage 1`` to ``5``, run by a python3 that has torch, triton, transformers
and pytest-benchmark already; no network is needed. A stage takes at most 570 seconds, its most valuable parts
come first, and each part is a process of its own with a time limit, so that one that fails costs the others
nothing. However a stage ends, one archive holds what its parts have written, the built extension, the
choices and the kernels that Triton compiled; ``--from`` gives these to a later stage.
``make bench`` is ``--stage cpu``, which has no limit of time and no archive, and prints a report.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
#: Written into every summary. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "benchmarks summary", 1
#: Seconds that a stage may take, and the part of them for its archive.
LIMIT, RESERVE = 570.0, 15.0
#: What the project itself imports.
REQUIRED = ("torch", "triton", "numpy", "safetensors", "tabulate", "tqdm")
#: Seconds between the interrupt, on which pytest reports its results so far, and the kill.
GRACE = 5.0
#: The caches that a part with ``fresh`` ones has to itself.
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


class Part(NamedTuple):
    """A process with a time limit.

    Attributes:
        name: Its name in the summary.
        command: The program and its arguments; ``{seconds}`` stands for the time that it may plan with.
        seconds: Its limit, if that much is left.
        needs: Modules without which it is skipped.
        environment: Variables besides those that all parts get.
        fresh: Whether its caches are empty at its start, as a newcomer's are.
        otherwise: What runs if it fails.
    """

    name: str
    command: Sequence[str]
    seconds: float
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    fresh: bool = False
    otherwise: Part | None = None


# Stages ---------------------------------------------------------------------------------------------------

#: What times launch configurations: the ``part`` of ``Sweep`` in the operators' cards.
SWEEPS = ("gelu", "add", "add_layer_norm", "conv_linear", "attention", "projection", "mlp")
#: What else is measured of models: the model with its dtype, and the contenders.
OTHERS = {
    "segformer_b0-bfloat16": ("accelerate-graphed", "compile", "accelerate", "hf"),
    "pvt_v2_b2-bfloat16": ("accelerate-graphed", "compile", "accelerate", "hf"),
    "cvt_w24-bfloat16": ("accelerate-graphed", "compile", "hf", "accelerate-int8-graphed"),
    "cvt_13-bfloat16": ("accelerate-int8-graphed", "accelerate-float8-graphed"),
    "cvt_13-float16": ("accelerate-graphed",),
    "cvt_13-tf32": ("accelerate-graphed", "hf", "compile"),
}
#: Each tensor gets memory of its own, so that what is written beside it is found.
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def stages(
    device: str, results: Path, *, tiny: bool = False, only: str | None = None
) -> dict[str, list[Part]]:
    """Returns the parts of each stage of a device, the most valuable first.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        results: Where their files go.
        tiny: Whether this is a rehearsal, with the shapes of a smoke test.
        only: What ``-k`` of pytest selects on a CPU; None for all.
    """

    def suite(name: str, files: str, seconds: float, words: str | None, **settings: Any) -> Part:
        """Returns the part that runs suites, selected by the words of ``-k``."""
        # Warnings are errors in the tests; here they would cost figures.
        command = [sys.executable, "-m", "pytest", *files.split(), "-q", "--tb=short", "-W", "default"]
        command += ["-p", "no:cacheprovider", "--benchmark-only", "--benchmark-quiet"]
        command += [f"--benchmark-json={results / name}.json"]
        command += [*(["-k", words] if words else []), *(["--tiny"] if tiny else [])]
        return Part(name, command, seconds, ("pytest", "pytest_benchmark", "transformers"), **settings)

    if device == "cpu":
        if only is not None:
            return {"cpu": [build(device), suite("only", "benchmarks", float("inf"), only)]}
        names = ("operators", "models", "training")
        of_suites = [suite(name, f"benchmarks/test_{name}.py", float("inf"), None) for name in names]
        return {"cpu": [build(device), *of_suites]}

    def model(
        name: str, contender: str, seconds: float, of: str = "cvt_13-bfloat16", **settings: Any
    ) -> Part:
        """Returns the part that times a contender, in all batch sizes."""
        file = "training" if name.startswith("train_") else "models"
        words = f"{of}- and -{contender}]" + (" and not slow" if contender == "compile" else "")
        words = "tiny-" if tiny else words  # a smoke test has contenders of its own
        return suite(name, f"benchmarks/test_{file}.py", seconds, words, **settings)

    def kernels(name: str, contender: str, batch: int, seconds: float, *options: str) -> Part:
        """Returns the part that lists every kernel of a step, or reads the counters of those listed."""
        file = str(results / f"kernels_{name.split('_', 1)[1]}.json")
        size = ["--image-size", "64"] if tiny else []
        options = "--contender", contender, "--batch-size", str(2 if tiny else batch), *size, *options
        command = [sys.executable, "-m", "benchmarks.kernels", file, *options]
        return Part(name, command, seconds, ("transformers",))

    def tune() -> Part:
        """Returns the part that checks and times every kernel of CvT-13, in a process that may die."""
        sizes = ["1", "--image-size", "32"] if tiny else ["1", "8", "32", "256"]
        command = [sys.executable, "-m", "cvt", "tune", "--dtype", "bfloat16", "--batch-size", *sizes]
        return Part("tune", [*command, "--json", str(results / "tune.json")], 150, ("tqdm",))

    def sweep(name: str) -> Part:
        file = str(results / f"sweep_{name}.json")
        command = [sys.executable, "-m", "benchmarks.sweep", file, "--seconds={seconds}", name]
        return Part(f"sweep_{name}", command, 140)

    def sanitizer(tool: str) -> Part:
        """Returns the part that makes a call of every operator under NVIDIA's compute-sanitizer."""
        places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
        program = shutil.which("compute-sanitizer", path=places) or "compute-sanitizer"
        command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20", sys.executable]
        command += ["-m", "pytest", "benchmarks/test_operators.py", "-q", "--benchmark-disable"]
        return Part(tool, command, 200, ("pytest", "pytest_benchmark"), environment=ALONE)

    graphed, trained = "accelerate-graphed", "accelerate-live-graphed"
    return {
        "1": [
            build(device),
            model("graphed", graphed, 170, fresh=True),
            model("compile", "compile", 170, fresh=True),
            model("train_graphed", trained, 130, fresh=True),
            model("train_compile", "compile", 140, fresh=True),
            model("eager", "hf", 60),
            model("train_live", "accelerate", 130),
            model("train_eager", "hf", 60),
            model("live", "accelerate", 70),
            model("train_live_compile", "accelerate-compile", 140),
        ],
        "2": [
            build(device),
            tune(),
            model("graphed_tuned", graphed, 100),
            kernels("kernels_256", "accelerate-frozen", 256, 100),
            kernels("kernels_1", "accelerate-frozen", 1, 60),
            suite("operators", "benchmarks/test_operators.py", 200, "cvt_13 and not backward"),
            kernels("kernels_train", "accelerate", 256, 130, "--train"),
            kernels("counters_256", "accelerate-frozen", 256, 100, "--counters"),
            kernels("counters_train", "accelerate", 256, 100, "--train", "--counters"),
            kernels("kernels_train_compile", "compile", 256, 130, "--train"),
            kernels("kernels_256_compile", "compile", 256, 70),
            kernels("kernels_1_compile", "compile", 1, 70),
            kernels("counters_1", "accelerate-frozen", 1, 60, "--counters"),
            suite("operators_train", "benchmarks/test_operators.py", 200, "cvt_13 and backward"),
        ],
        "3": [build(device), *map(sweep, SWEEPS)],
        "4": [
            build(device),
            *(
                model(f"{of}_{contender}".replace("-", "_"), contender, 70, of)
                for of, contenders in OTHERS.items()
                for contender in contenders
            ),
        ],
        "5": [build(device), gpu_tests(), *map(sanitizer, ("memcheck", "racecheck"))],
    }


def gpu_tests() -> Part:
    """Returns the part that runs the tests that need a GPU."""
    workers = [] if importlib.util.find_spec("xdist") is None else ["-n", "8"]
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "@pytest.mark.gpu" in path.read_text("utf-8") or path.parent.name == "contract"
    ]
    # Warnings are errors elsewhere; here they would cost results, as would a file that cannot be imported.
    options = ["-W", "default", "--tb=short", "-q", "--continue-on-collection-errors", "-m", "gpu", *workers]
    return Part("gpu_tests", [sys.executable, "-m", "pytest", *options, *marked], 160, ("pytest",))


def build(device: str) -> Part:
    """Returns the part that builds the extension, on a GPU with CUDA kernels for it, or else without any."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    plain = Part("build", command, seconds=150, needs=("setuptools",), environment={"CVT_KERNELS_CUDA": "0"})
    if device != "cuda":
        return plain
    environment = {"CVT_KERNELS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability()}
    return plain._replace(environment=environment, otherwise=plain._replace(name="build_without_cuda"))


def capability() -> str:
    """Returns the compute capability of the GPU, as in ``9.0``."""
    import torch

    return "{}.{}".format(*torch.cuda.get_device_capability())


# Running --------------------------------------------------------------------------------------------------


def run_part(part: Part, seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """Runs a part within ``seconds``, then interrupts it and whatever it started, and at last kills them.

    Returns:
        ``status`` (``passed``, ``failed``, ``timed out`` or ``skipped``), ``seconds``, and the last ``lines``
        of its output.
    """
    lacking = [name for name in part.needs if importlib.util.find_spec(name) is None]
    lacking += [name for name in part.command[:1] if shutil.which(name) is None]
    if lacking or seconds <= GRACE:
        reason = f"not installed: {', '.join(lacking)}" if lacking else "no time is left"
        return {"status": "skipped", "seconds": 0.0, "lines": [reason]}
    # It plans with a little less, for its start and for writing its results.
    command = [word.replace("{seconds}", f"{0.85 * (seconds - GRACE):.0f}") for word in part.command]
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:  # no pipe, which a grandchild could keep open
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, **part.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds - GRACE)
            status = "failed" if code else "passed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            end(process)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    kept = lines[-20:] if status == "passed" else lines[-200:]
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "lines": kept}


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the processes of a part: by an interrupt, which lets pytest report, or else by force."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):  # where all are gone
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_fresh(part: Part, seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """Runs a part with caches of its own, whose choices and kernels later parts use."""
    from benchmarks import archive

    with tempfile.TemporaryDirectory() as folder:
        own = {name: str(Path(folder, name)) for name in CACHES}
        outcome = run_part(part, seconds, environment | own)
        archive.adopt(Path(own[CACHES[0]], "cvt_kernels", "choices"), Path(own[CACHES[1]]))
    return outcome


def run(
    parts: list[Part],
    summary: dict[str, Any],
    path: Path,
    *,
    seconds: float,
    device: str,
    keep: Callable[[], None] = lambda: None,
) -> bool:
    """Runs parts one after the other within ``seconds``, and returns whether none failed.

    ``path`` holds the summary so far; ``keep`` is called whenever it has changed.
    """
    deadline = time.monotonic() + seconds
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("TRITON_INTERPRET", "CVT_KERNELS_BACKEND", "CVT_KERNELS_TUNED"):
        environment.pop(name, None)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    from benchmarks import archive
    from cvt.files import replacing, write_json

    waiting = list(reversed(parts))
    while waiting:
        part = waiting.pop()
        print(f"{part.name:<26}", end="", flush=True)
        start = run_fresh if part.fresh else run_part
        outcome = start(part, min(part.seconds, deadline - time.monotonic()), environment)
        if part.name.startswith("build") and outcome["status"] == "passed":
            archive.note_sources()
        summary["parts"][part.name] = outcome
        with replacing(path) as file:
            write_json(file, summary, indent=1)
        print(f"{outcome['status']:<10} {outcome['seconds']:>6.1f} s  {''.join(outcome['lines'][-1:])[:160]}")
        keep()
        if part.otherwise is not None and outcome["status"] == "failed":
            waiting.append(part.otherwise)
    return all(outcome["status"] in ("passed", "skipped") for outcome in summary["parts"].values())


class EndedError(Exception):
    """A signal ends the run, or the time is up."""


@contextlib.contextmanager
def ended_by_signals(seconds: float) -> Iterator[None]:
    """Raises :class:`EndedError` at the first signal that would end this process, or after ``seconds``."""

    def end(number: int, frame: object) -> None:
        for each in numbers:  # what follows writes the archive
            signal.signal(each, signal.SIG_IGN)
        raise EndedError(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    previous = {number: signal.signal(number, end) for number in numbers}
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_stage(
    parts: list[Part], summary: dict[str, Any], results: Path, archive_path: Path, *, device: str
) -> bool:
    """Runs the parts of a stage, and writes the archive after each of them and however the stage ends."""
    from benchmarks import archive

    known = archive.kernels()

    def keep() -> None:
        left_out = archive.write(archive_path, results, known)
        if left_out:
            print(f"{'':<26}the archive has no room for {left_out} kernels")

    seconds = LIMIT - RESERVE - (time.monotonic() - BEGAN)
    try:
        with ended_by_signals(seconds + GRACE):
            return run(parts, summary, results / "summary.json", seconds=seconds, device=device, keep=keep)
    except EndedError as error:
        print(f"ended by {error}", flush=True)
        return False
    finally:
        keep()
        print(f"archive: {archive_path}, {archive_path.stat().st_size / 2**20:.1f} MiB")


# This machine ---------------------------------------------------------------------------------------------


def commit() -> str:
    """Returns the commit of these sources, by the environment or git; ``""`` if neither knows."""
    told = os.environ.get("CVT_KERNELS_COMMIT")
    if told:
        return told
    with contextlib.suppress(OSError):  # there may be no git
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        return asked.stdout.strip()
    return ""


def driver() -> str | None:
    """Returns what ``nvidia-smi`` says of the GPUs: name, driver, memory, clocks; None if there is none."""
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,compute_mode"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip() or None
    return None


def describe(device: str) -> dict[str, Any]:
    """Returns what the summary says before any part has run.

    Raises:
        ValueError: There is no such device.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no NVIDIA GPU that torch can use here (--stage cpu measures the CPU)")
    from cvt_kernels import __version__, machine

    cuda = device == "cuda"
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "device": torch.cuda.get_device_name() if cuda else machine.cpu_device(),
        "device_type": device,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M"),
        "commit": commit(),
        "cvt_kernels": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "cuda": torch.version.cuda if cuda else None,
        "threads": None if cuda else torch.get_num_threads(),
        "driver": driver() if cuda else None,
        "parts": {},
    }


# The command ----------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__)
    parser.add_argument("--stage", required=True, metavar="STAGE", help="1 to 5 on a GPU, or cpu")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these of its parts")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="default: build/gpu/stage<N>.tar.gz")
    parser.add_argument(
        "--from",
        dest="earlier",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="archives of earlier stages: what they built and tuned is put to use",
    )
    parser.add_argument("--only", metavar="WORDS", help="on a CPU, the tests that -k of pytest selects")
    parser.add_argument("--tiny", action="store_true", help="shapes of a smoke test: a rehearsal")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the parts; returns 1 if one failed, 2 if this machine or the arguments are not up to it."""
    options = arguments(argv)
    device = "cpu" if options.stage == "cpu" else "cuda"
    try:
        lacking = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
        if lacking:
            raise ValueError(f"not installed for {sys.executable}: {', '.join(lacking)}")
        sys.path.insert(0, str(ROOT))  # the project itself need not be installed
        summary = describe(device) | {"tiny": options.tiny, "stage": options.stage}
        slug = re.sub(r"[^a-z0-9]+", "-", summary["device"].lower()).strip("-")
        results = options.results.resolve() / slug / summary["date"]
        known = stages(device, results, tiny=options.tiny, only=options.only)
        parts = chosen(known, options.stage, options.parts)
        from benchmarks import archive

        for path in options.earlier:
            archive.restore(path)
        results.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"benchmarks/run.py: error: {error}", file=sys.stderr)
        return 2
    if archive.is_built():
        parts = [part for part in parts if part.name != "build"]
    if device == "cuda":
        path = options.archive or ROOT / "build" / "gpu" / f"stage{options.stage}.tar.gz"
        passed = run_stage(parts, summary, results, path, device=device)
    else:
        passed = run(parts, summary, results / "summary.json", seconds=float("inf"), device=device)
        report(results)
    print(f"results: {results}")
    return 0 if passed else 1


def report(results: Path) -> None:
    """Prints the tables of a run on a CPU, and draws them."""
    from benchmarks import report as tables

    files = [path for path in sorted(results.glob("*.json")) if path.name != "summary.json"]
    for path in files:  # the times of every round are many, and only those of models in turns are compared
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in content["benchmarks"]:
            if row["extra_info"].get("suite") == "operators":
                row["stats"].pop("data", None)
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    if files:
        tables.main([*map(str, files), "--plot", str(ROOT / "build" / "bench" / "operators.png")])


def chosen(known: Mapping[str, list[Part]], stage: str, names: Sequence[str] | None) -> list[Part]:
    """Returns the parts of a stage, or those with these names.

    Raises:
        ValueError: There is no such stage or part.
    """
    if stage not in known:
        raise ValueError(f"--stage: got {stage!r}, expected one of {', '.join(known)}")
    parts = {part.name: part for part in known[stage]}
    if unknown := sorted({*(names or ())} - set(parts)):
        raise ValueError(f"--parts: got {', '.join(unknown)}, expected some of {', '.join(parts)}")
    return [part for part in parts.values() if names is None or part.name in names]


if __name__ == "__main__":
    sys.exit(main())
