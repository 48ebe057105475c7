"""Builds, tests, measures, profiles or tunes on this machine, in parts, and leaves the results as JSON.

``make gpu`` is this script, run by a python3 that has torch and triton already; no network is needed. Each
part is a process of its own with a time limit; one that fails or takes too long costs the others nothing.
Into ``benchmarks/results/<device>/<date>/`` go ``summary.json`` (how each part went) and a file from each
part that measures.
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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1
#: The parts, in the order in which they run.
NAMES = (
    "build",
    "gpu_tests",
    "triton_tests",
    "ceilings",
    "bench",
    "bench_bfloat16",
    "bench_training",
    "conv_projection",
    "attention",
    "layer_norm_gelu",
    "linear",
    "profile",
    "model",
    "tune",
)
#: Those of ``--tune``, which takes all the time that there is.
TUNING = ("build", "ceilings", "tune")
#: The command ``cvt bench`` of this checkout.
BENCH = "import sys; from cvt.commands import main; sys.exit(main(['bench', *sys.argv[1:]]))"
#: What the project itself imports.
REQUIRED = ("torch", "triton", "numpy", "PIL", "safetensors", "tqdm")
#: Seconds from the interrupt, after which pytest still reports what it has, to the end.
GRACE = 10.0


class Part(NamedTuple):
    """One process.

    Attributes:
        name: For the summary.
        command: Its arguments; ``{seconds}`` stands for the time that it may plan with.
        seconds: Its limit, if that much is left.
        needs: Modules without which it is skipped.
        environment: Variables besides those that all parts get.
    """

    name: str
    command: list[str]
    seconds: float
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


def plan(device: str, results: Path, *, tiny: bool, minutes: float) -> dict[str, Part]:
    """Returns every part by name. Limits are for a GPU; a CPU may take all the time that there is."""
    cuda = device == "cuda"
    module, size = [sys.executable, "-m"], ["--tiny"] if tiny else []
    # Warnings are errors elsewhere; here they would cost measurements.
    pytest = [*module, "pytest", "-W", "default", "--tb=short", "-q"]
    workers = [] if importlib.util.find_spec("xdist") is None else ["-n", str(min(8, cpus()))]
    kernels = [
        "tests/cvt_kernels/ops/conv_projection/test_triton.py",
        "tests/cvt_kernels/ops/attention/test_triton.py",
    ]
    for_tests = ("pytest", "hypothesis")
    for_build = {"CVT_KERNELS_CUDA": "0"}
    if cuda:
        for_build = {"CVT_KERNELS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability()}

    def output(name: str) -> str:
        return str(results / f"{name}.json")

    def suite(name: str, seconds: float) -> Part:
        options = [f"--benchmark-json={output(name)}", "--benchmark-columns=median", "--seconds={seconds}"]
        command = [*pytest, f"benchmarks/test_{name}.py", *options, *size]
        return Part(name, command, seconds, ("pytest", "pytest_benchmark"))

    def bench(name: str, *options: str) -> Part:
        command = [sys.executable, "-c", BENCH, "--device", device, "--json", output(name), *options]
        command += ["--image-size", "64", "--rounds", "4"] if tiny else []
        return Part(name, command, 40, ("transformers", "sklearn"))

    batches = ["2"] if tiny else ["1", "256"] if cuda else ["1", "8", "32"]
    trained = ["2"] if tiny else ["256"] if cuda else ["8"]
    # torch.compile takes minutes for each batch size, more than a GPU is lent for.
    peers = ["--peers", "hf" if tiny or cuda else "compile"]
    parts = [
        Part(
            "build", [sys.executable, "setup.py", "build_ext", "--inplace"], 150, ("setuptools",), for_build
        ),
        Part("gpu_tests", [*pytest, "-m", "gpu", "tests"], 70, for_tests),
        Part("triton_tests", [*pytest, *workers, "-m", "not gpu", *kernels], 90, for_tests),
        Part("ceilings", [*module, "benchmarks.ceilings", output("ceilings"), *size], 30),
        bench("bench", "--batch-size", *batches, *peers),
        bench("bench_bfloat16", "--batch-size", *batches[:2], "--dtype", "bfloat16"),
        bench("bench_training", "--batch-size", *trained, "--train"),
        suite("conv_projection", 50),
        suite("attention", 50),
        suite("layer_norm_gelu", 50),
        suite("linear", 30),
        Part("profile", [*module, "benchmarks.profile_model", output("profile"), *size], 60),
        suite("model", 240),
        Part(
            "tune",
            [*module, "benchmarks.tune", output("tune"), "--seconds={seconds}", *size],
            60 * minutes,
            ("pytest",),
            {} if cuda else {"TRITON_INTERPRET": "1"},
        ),
    ]
    return {part.name: part if cuda else part._replace(seconds=60 * minutes) for part in parts}


def cpus() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def capability() -> str:
    """Returns the compute capability of the GPU, as in ``9.0``."""
    import torch

    return "{}.{}".format(*torch.cuda.get_device_capability())


def run_part(part: Part, seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """Runs a part within ``seconds``, then interrupts it and whatever it started, and at last kills them.

    Returns:
        ``status`` (``passed``, ``failed``, ``timed out`` or ``skipped``), ``seconds``, and the last ``lines``
        of its output.
    """
    lacking = [name for name in part.needs if importlib.util.find_spec(name) is None]
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


def run(parts: list[Part], summary: dict[str, Any], path: Path, *, minutes: float, device: str) -> bool:
    """Runs parts one after the other, and returns whether none failed; ``path`` holds the summary so far."""
    deadline = time.monotonic() + 60 * minutes
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("TRITON_INTERPRET", "CVT_KERNELS_BACKEND"):
        environment.pop(name, None)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    for part in parts:
        print(f"{part.name:<16}", end="", flush=True)
        outcome = run_part(part, min(part.seconds, deadline - time.monotonic()), environment)
        summary["parts"][part.name] = outcome
        path.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{outcome['status']:<10} {outcome['seconds']:>6.1f} s  {''.join(outcome['lines'][-1:])[:100]}")
    return all(outcome["status"] in ("passed", "skipped") for outcome in summary["parts"].values())


def describe(device: str) -> dict[str, Any]:
    """Returns what the summary says before any part has run.

    Raises:
        ValueError: There is no such device.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no NVIDIA GPU that torch can use here (--device cpu measures the CPU)")
    sys.path.insert(0, str(ROOT))
    from cvt_kernels import __version__, machine

    cuda = device == "cuda"
    name = torch.cuda.get_device_name() if cuda else machine.facts().cpu.rpartition(",")[0]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "schema": SCHEMA,
        "device": name,
        "device_type": device,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M"),
        "commit": commit.stdout.strip(),
        "cvt_kernels": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "cuda": torch.version.cuda if cuda else None,
        "threads": None if cuda else torch.get_num_threads(),
        "parts": {},
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the parts; returns 1 if one failed, 2 if this machine or the arguments are not up to it."""
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="only these, of: " + ", ".join(NAMES))
    parser.add_argument("--tune", action="store_true", help="time launch configurations instead of the rest")
    parser.add_argument("--tiny", action="store_true", help="shapes of a smoke test: a rehearsal")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default: 9)")
    options = parser.parse_args(argv)
    try:
        chosen = options.parts or (TUNING if options.tune else [name for name in NAMES if name != "tune"])
        unknown = sorted(set(chosen) - set(NAMES))
        if unknown:
            raise ValueError(f"--parts: got {', '.join(unknown)}, expected some of {', '.join(NAMES)}")
        lacking = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
        if lacking:
            raise ValueError(f"not installed for {sys.executable}: {', '.join(lacking)}")
        summary = describe(options.device) | {"tiny": options.tiny}
        slug = re.sub(r"[^a-z0-9]+", "-", summary["device"].lower()).strip("-")
        results = options.results.resolve() / slug / summary["date"]
        results.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"benchmarks/run.py: error: {error}", file=sys.stderr)
        return 2
    known = plan(options.device, results, tiny=options.tiny, minutes=options.minutes)
    passed = run(
        [known[name] for name in NAMES if name in chosen],
        summary,
        results / "summary.json",
        minutes=options.minutes,
        device=options.device,
    )
    print(f"results: {results}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
