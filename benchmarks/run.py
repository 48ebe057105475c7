"""Builds, proves, tests, measures, profiles or tunes here, in parts, and leaves the results as JSON.

``make gpu`` is this script, run by a python3 that has torch and triton already; no network is needed. Each
part is a process of its own with a time limit; one that fails or takes too long costs the others nothing.
Right after the build ``cvt prove`` proves the kernels, and the other parts find its verdicts where every
process looks for them, in the user's cache. Into ``benchmarks/results/<device>/<date>/`` go
``summary.json`` (how each part went) and a file from each part that proves or measures.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
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
#: Written into every summary. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "benchmarks summary", 1
#: The parts, in the order in which they run.
NAMES = (
    "build",
    "prove",
    "gpu_tests",
    "triton_tests",
    "ceilings",
    "auto",
    "conv_projection",
    "attention",
    "layer_norm_gelu",
    "linear",
    "fused",
    "host",
    "bench",
    "bench_bfloat16",
    "bench_training",
    "profile",
    "model",
    "bench_segformer_b0",
    "bench_pvt_v2_b2",
    "bench_pvt_v2_b2_training",
    "quantization",
    "variants",
    "tune",
)
#: The parts of ``--tune``, which takes all the time that there is.
TUNING = ("build", "ceilings", "tune")
#: The beginnings of commands. Warnings are errors elsewhere; here they would cost measurements.
MODULE = (sys.executable, "-m")
PYTEST = (*MODULE, "pytest", "-W", "default", "--tb=short", "-q")
#: What the project itself imports.
REQUIRED = ("torch", "triton", "numpy", "PIL", "safetensors", "tabulate", "tqdm")
#: Seconds from the interrupt, after which pytest still reports what it has, to the end.
GRACE = 5.0


class Part(NamedTuple):
    """A process with a time limit.

    Attributes:
        name: Its name in the summary.
        command: The program and its arguments; ``{seconds}`` stands for the time that it may plan with.
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
    """Returns every part by name, in the order of ``NAMES``.

    Limits are for a GPU: nine minutes suffice for every part before ``model``, which takes what is left. The
    longest are those of ``build`` and of ``prove``, which compiles the Triton kernels for the parts after it.
    On a CPU each part may take all the time that there is.
    """
    cvt_benches, pyramid_benches = benches(device, results, tiny=tiny)
    parts = [
        build(device),
        prove(device, results, tiny=tiny),
        *kernel_tests(),
        script("ceilings", "ceilings", 15, results, tiny=tiny),
        auto(results, tiny=tiny),
        suite("conv_projection", 25, results, tiny=tiny),
        suite("attention", 25, results, tiny=tiny),
        suite("layer_norm_gelu", 25, results, tiny=tiny),
        suite("linear", 15, results, tiny=tiny),
        suite("fused", 20, results, tiny=tiny),
        suite("host", 15, results, tiny=tiny),
        *cvt_benches,
        script("profile", "profile_model", 15, results, tiny=tiny),
        suite("model", 240, results, tiny=tiny),
        *pyramid_benches,
        script("quantization", "quantization", 60, results, tiny=tiny)._replace(needs=("sklearn",)),
        script("variants", "variants", 60, results, tiny=tiny)._replace(needs=("sklearn",)),
        tuning(device, results, tiny=tiny, minutes=minutes),
    ]
    on_gpu = device == "cuda"
    return {part.name: part if on_gpu else part._replace(seconds=60 * minutes) for part in parts}


def build(device: str) -> Part:
    """Returns the part that builds the extension, on a GPU with CUDA kernels for that GPU."""
    environment = {"CVT_KERNELS_CUDA": "0"}
    if device == "cuda":
        environment = {"CVT_KERNELS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability()}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return Part("build", command, seconds=105, needs=("setuptools",), environment=environment)


def prove(device: str, results: Path, *, tiny: bool) -> Part:
    """Returns the part that proves what CvT-13 needs in inference and in training."""
    cuda = device == "cuda"
    dtypes = ["float32"] if tiny else ["bfloat16", "float32"] if cuda else ["float32", "bfloat16"]
    batches = ["2"] if tiny else ["1", "256"] if cuda else ["1", "8"]
    command = [*MODULE, "cvt", "prove", "--device", device, "--json", str(results / "prove.json")]
    command += ["--model", "cvt_13", "--dtype", *dtypes, "--batch-size", *batches, "--train"]
    # A kernel that hangs must leave time for the others.
    command += [*(["--seconds", "30"] if cuda else []), *(["--image-size", "64"] if tiny else [])]
    return Part("prove", command, seconds=100)


def auto(results: Path, *, tiny: bool) -> Part:
    """Returns the part that times ``auto`` beside PyTorch's own forms."""
    part = script("auto", "auto", 20, results, tiny=tiny)
    return part._replace(command=[*part.command, "--seconds={seconds}"], needs=("pytest",))


def kernel_tests() -> list[Part]:
    """Returns the parts that test: what needs a GPU, and the Triton kernels."""
    workers = [] if importlib.util.find_spec("xdist") is None else ["-n", str(min(8, cpus()))]
    files = [
        "tests/cvt_kernels/ops/conv_projection/test_triton.py",
        "tests/cvt_kernels/ops/attention/test_triton.py",
    ]
    needs = ("pytest", "hypothesis")
    return [
        Part("gpu_tests", [*PYTEST, "-m", "gpu", "tests"], seconds=40, needs=needs),
        Part("triton_tests", [*PYTEST, *workers, "-m", "not gpu", *files], seconds=40, needs=needs),
    ]


def script(name: str, module: str, seconds: float, results: Path, *, tiny: bool) -> Part:
    """Returns the part that runs a module of ``benchmarks/``, which writes a file of results."""
    command = [*MODULE, f"benchmarks.{module}", str(results / f"{name}.json")]
    return Part(name, [*command, *(["--tiny"] if tiny else [])], seconds=seconds)


def suite(name: str, seconds: float, results: Path, *, tiny: bool) -> Part:
    """Returns the part that runs ``benchmarks/test_<name>.py``."""
    output = f"--benchmark-json={results / name}.json"
    options = [output, "--benchmark-columns=median", "--seconds={seconds}", *(["--tiny"] if tiny else [])]
    command = [*PYTEST, f"benchmarks/test_{name}.py", *options]
    return Part(name, command, seconds=seconds, needs=("pytest", "pytest_benchmark"))


def benches(device: str, results: Path, *, tiny: bool) -> tuple[list[Part], list[Part]]:
    """Returns the parts that run ``cvt bench``: those of CvT-13, and those of other models."""
    cuda = device == "cuda"
    batches = ["2"] if tiny else ["1", "256"] if cuda else ["1", "8", "32"]
    trained = ["2"] if tiny else ["256"] if cuda else ["8"]
    # torch.compile takes a minute or more for each batch size: too much for the nine of a run on a GPU.
    peers = "hf" if tiny or cuda else "compile,eager"
    smaller = ["--image-size", "64", "--rounds", "4"] if tiny else []

    def bench(name: str, *options: str) -> Part:
        output = str(results / f"{name}.json")
        command = [*MODULE, "cvt", "bench", "--device", device, "--json", output, *options, *smaller]
        return Part(name, command, seconds=25, needs=("transformers", "sklearn"))

    of_cvt = [
        bench("bench", "--batch-size", *batches, "--peers", peers),
        bench("bench_bfloat16", "--batch-size", *batches, "--peers", peers, "--dtype", "bfloat16"),
        bench("bench_training", "--batch-size", *trained, "--train"),
    ]
    pyramid = "--model", "pvt_v2_b2", "--batch-size"
    few, several = (["2"], ["2"]) if tiny else (["1"], ["1", "256"] if cuda else ["1", "8"])
    peers = "hf" if tiny or cuda else "compile"
    of_pyramids = [
        bench("bench_segformer_b0", "--model", "segformer_b0", "--batch-size", *few, "--peers", peers),
        bench("bench_pvt_v2_b2", *pyramid, *several, "--peers", peers),
        bench("bench_pvt_v2_b2_training", *pyramid, *trained, "--train"),
    ]
    return of_cvt, of_pyramids


def tuning(device: str, results: Path, *, tiny: bool, minutes: float) -> Part:
    """Returns the part that tunes, which takes all the time that there is."""
    part = script("tune", "tune", 60 * minutes, results, tiny=tiny)
    return part._replace(
        command=[*part.command, "--seconds={seconds}"],
        needs=("pytest",),
        environment={} if device == "cuda" else {"TRITON_INTERPRET": "1"},
    )


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
    for name in ("TRITON_INTERPRET", "CVT_KERNELS_BACKEND", "CVT_KERNELS_PROVE", "CVT_KERNELS_VERDICTS"):
        environment.pop(name, None)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    from cvt.files import replacing, write_json

    for part in parts:
        print(f"{part.name:<26}", end="", flush=True)
        outcome = run_part(part, min(part.seconds, deadline - time.monotonic()), environment)
        summary["parts"][part.name] = outcome
        with replacing(path) as file:
            write_json(file, summary, indent=1)
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
    from cvt_kernels import __version__, machine

    cuda = device == "cuda"
    name = torch.cuda.get_device_name() if cuda else machine.cpu_name()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "schema": SCHEMA,
        "version": VERSION,
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
        sys.path.insert(0, str(ROOT))  # the project itself need not be installed
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
