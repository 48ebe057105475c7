"""Builds, autotunes, tests, measures and profiles here, in parts, and leaves the results as JSON.

``make gpu`` is this script, run by a python3 that has torch and triton already; no network is needed. On a
GPU it takes four commands, ``--stage 1`` to ``4``, each of at most 570 seconds. Each part is a process of its
own with a time limit; one that fails or takes too long costs the others nothing. What ``cvt tune`` caches
is used by the later parts, from the user's cache. ``summary.json`` (how each part went) and a file from each
part that autotunes or measures go into ``benchmarks/results/<device>/<date>/``. However a stage ends,
``build/gpu/stage<N>.tar.gz`` holds these, the entries and the kernels that Triton compiled; ``--from`` gives
them to a later stage on another machine. With the pack of ``make gpu-pack`` nothing needs to be compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import hashlib
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
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
#: What ``make gpu-pack`` puts into its pack: these facts of it, packages, and kernels compiled ahead.
PACK = ROOT / "build" / "gpu-pack"
#: Written into every summary. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "benchmarks summary", 1
#: The parts, in the order in which they run.
NAMES = (
    *("build", "memcheck", "autotune_bfloat16", "autotune", "gpu_tests", "triton_tests", "ceilings", "auto"),
    *("conv_projection", "attention", "layer_norm_gelu", "linear", "fused", "host"),
    *("bench", "bench_bfloat16", "bench_training", "profile", "model"),
    *(
        "bench_segformer_b0",
        "bench_segformer_b0_bfloat16",
        "bench_pvt_v2_b2",
        "bench_pvt_v2_b2_bfloat16",
        "bench_pvt_v2_b2_training",
        "quantization",
        "variants",
        "tune",
    ),
)
#: The commands of a session on a GPU, and their parts, the most valuable ones first. Each command
#: builds, since it may run on another machine than the last one.
STAGES = {
    1: ("build", "memcheck", "autotune_bfloat16"),
    2: ("build", "autotune", "gpu_tests", "triton_tests"),
    3: (
        *("build", "ceilings", "bench_bfloat16", "bench_training", "bench", "auto", "attention"),
        *("conv_projection", "fused", "linear", "layer_norm_gelu", "host", "model"),
    ),
    4: (
        *("build", "profile", "tune", "bench_segformer_b0", "bench_pvt_v2_b2", "bench_pvt_v2_b2_training"),
        *("quantization", "variants"),
    ),
}
#: The parts that no stage has: what they measure is not worth the time on a GPU.
ON_CPU = ("bench_segformer_b0_bfloat16", "bench_pvt_v2_b2_bfloat16")
#: Seconds that a stage may take, and the part of them for its archive.
LIMIT, RESERVE = 570.0, 15.0
#: The beginnings of commands. Warnings are errors elsewhere; here they would cost measurements.
MODULE = (sys.executable, "-m")
PYTEST = (*MODULE, "pytest", "-W", "default", "--tb=short", "-q")
#: What the project itself imports.
REQUIRED = ("torch", "triton", "numpy", "PIL", "safetensors", "tabulate", "tqdm")
#: Seconds between the interrupt, on which pytest reports its results so far, and the kill.
GRACE = 5.0


class Part(NamedTuple):
    """A process with a time limit.

    Attributes:
        name: Its name in the summary.
        command: The program and its arguments; ``{seconds}`` stands for the time that it may plan with.
        seconds: Its limit, if that much is left.
        needs: Modules without which it is skipped.
        environment: Variables besides those that all parts get.
        otherwise: What runs if it fails.
    """

    name: str
    command: list[str]
    seconds: float
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    otherwise: Part | None = None


def plan(
    device: str, results: Path, *, tiny: bool, minutes: float, peers: str | None = None
) -> dict[str, Part]:
    """Returns every part by name, in the order of ``NAMES``.

    Limits are for a GPU: within a stage they leave time for the archive and a build, except for the last
    parts. The longest are ``autotune`` and ``autotune_bfloat16``, which compile the Triton kernels for the
    parts after them. On a CPU each part may take all the time that there is.
    """
    cvt_benches, pyramid_benches = benches(device, results, tiny=tiny, peers=peers)
    on_gpu = device == "cuda"
    suite = functools.partial(_suite, results=results, tiny=tiny)
    script = functools.partial(_script, results=results, tiny=tiny)
    planned = "--seconds={seconds}"
    parts = [
        build(device),
        memcheck(results),
        *autotuned(device, results, tiny=tiny),
        *kernel_tests(),
        script("ceilings", "ceilings", 15),
        script("auto", "auto", 50, planned, needs=("pytest",)),
        suite("conv_projection", 35),
        suite("attention", 35),
        suite("layer_norm_gelu", 25),
        suite("linear", 25),
        suite("fused", 35),
        suite("host", 20),
        *cvt_benches,
        script("profile", "profile_model", 40),
        suite("model", 60),
        *pyramid_benches,
        script("quantization", "quantization", 60, needs=("sklearn",)),
        script("variants", "variants", 60, needs=("sklearn",)),
        script("tune", "tune", 270, planned, needs=("pytest",))._replace(
            environment={} if on_gpu else {"TRITON_INTERPRET": "1"}
        ),
    ]
    return {part.name: part if on_gpu else part._replace(seconds=60 * minutes) for part in parts}


def build(device: str) -> Part:
    """Returns the part that builds the extension, on a GPU with CUDA kernels for it, or else without any."""
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    plain = Part("build", command, seconds=105, needs=("setuptools",), environment={"CVT_KERNELS_CUDA": "0"})
    if device != "cuda":
        return plain
    environment = {"CVT_KERNELS_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability()}
    return plain._replace(environment=environment, otherwise=plain._replace(name="build_without_cuda"))


def memcheck(results: Path) -> Part:
    """Returns the part that calls every kernel once, at small shapes, under NVIDIA's checker of memory.

    Each tensor gets memory of its own, so that what is written beside it is found.
    """
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    program = shutil.which("compute-sanitizer", path=places) or "compute-sanitizer"
    checker = [program, "--tool", "memcheck", "--error-exitcode", "9", "--print-limit", "20"]
    command = [*checker, *MODULE, "benchmarks.calls", str(results / "calls.json")]
    return Part("memcheck", command, 170, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def autotuned(device: str, results: Path, *, tiny: bool) -> list[Part]:
    """Returns the parts that autotune CvT-13: in bfloat16 inference, and in all the rest."""
    cuda = device == "cuda"
    dtypes = ["float32"] if tiny else ["bfloat16", "float32"] if cuda else ["float32", "bfloat16"]
    batches = ["2"] if tiny else ["1", "256"] if cuda else ["1", "8"]

    def autotune(name: str, seconds: float, dtypes: list[str], *options: str) -> Part:
        command = [*MODULE, "cvt", "tune", "--device", device, "--json", str(results / f"{name}.json")]
        command += ["--model", "cvt_13", "--dtype", *dtypes, "--batch-size", *batches, *options]
        command += ["--time-limit={seconds}"]
        return Part(name, [*command, *(["--image-size", "64"] if tiny else [])], seconds)

    return [
        autotune("autotune_bfloat16", 380, ["bfloat16"]),
        autotune("autotune", 300, dtypes, "--train"),
    ]


def kernel_tests() -> list[Part]:
    """Returns the parts that test: what needs a GPU, and the Triton kernels."""
    workers = [] if importlib.util.find_spec("xdist") is None else ["-n", str(min(8, cpus()))]
    marked = sorted(
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "\n@pytest.mark.gpu\n" in path.read_text("utf-8")
    )
    kernels = sorted((ROOT / "tests" / "cvt_kernels" / "ops").glob("*/test_triton.py"))

    def tests(name: str, seconds: float, mark: str, files: list[Path]) -> Part:
        names = [str(path.relative_to(ROOT)) for path in files]
        # A file that cannot be imported here must not cost the others.
        options = ["--continue-on-collection-errors", "-m", mark, *workers]
        return Part(name, [*PYTEST, *options, *names], seconds=seconds, needs=("pytest",))

    return [tests("gpu_tests", 110, "gpu", marked), tests("triton_tests", 140, "not gpu", kernels)]


def _script(
    name: str,
    module: str,
    seconds: float,
    *options: str,
    results: Path,
    tiny: bool,
    needs: tuple[str, ...] = (),
) -> Part:
    """Returns the part that runs a module of ``benchmarks/``, which writes a file of results."""
    command = [*MODULE, f"benchmarks.{module}", str(results / f"{name}.json"), *options]
    return Part(name, [*command, *(["--tiny"] if tiny else [])], seconds, needs)


def _suite(name: str, seconds: float, *, results: Path, tiny: bool) -> Part:
    """Returns the part that runs ``benchmarks/test_<name>.py``."""
    output = f"--benchmark-json={results / name}.json"
    options = [output, "--benchmark-columns=median", "--seconds={seconds}", *(["--tiny"] if tiny else [])]
    return Part(
        name, [*PYTEST, f"benchmarks/test_{name}.py", *options], seconds, ("pytest", "pytest_benchmark")
    )


def benches(
    device: str, results: Path, *, tiny: bool, peers: str | None = None
) -> tuple[list[Part], list[Part]]:
    """Returns the parts that run ``cvt bench``, for CvT-13 and for other models, on a CPU with ``peers``."""
    cuda = device == "cuda"
    batches = ["2"] if tiny else ["1", "256"] if cuda else ["1", "8", "32"]
    trained = ["2"] if tiny else ["256"] if cuda else ["8"]
    # torch.compile takes a minute or more for each batch size: too much for the nine of a run on a GPU.
    others = [name for name in ("openvino", "onnxruntime") if importlib.util.find_spec(name) is not None]
    peers = "hf" if tiny or cuda else peers or ",".join(["compile", *others])
    smaller = ["--image-size", "64", "--rounds", "4"] if tiny else []
    # Fewer than by default, since steps on a CPU are long.
    rounds = [] if tiny or cuda else ["--rounds", "6"]

    def bench(name: str, *options: str, seconds: float = 40) -> Part:
        output = str(results / f"{name}.json")
        command = [*MODULE, "cvt", "bench", "--device", device, *rounds, "--json", output, *options, *smaller]
        return Part(name, command, seconds=seconds, needs=("transformers", "sklearn"))

    of_cvt = [
        bench("bench", "--batch-size", *batches, "--peers", peers, seconds=85),
        bench(
            "bench_bfloat16", "--batch-size", *batches, "--peers", peers, "--dtype", "bfloat16", seconds=85
        ),
        bench("bench_training", "--batch-size", *trained, "--train", seconds=85),
    ]
    pyramid = "--model", "pvt_v2_b2", "--batch-size"
    few = ["2"] if tiny else ["1"] if cuda else ["1", "8"]
    half = "--peers", peers, "--dtype", "bfloat16"
    segformer = "--model", "segformer_b0", "--batch-size"
    of_pyramids = [
        bench("bench_segformer_b0", *segformer, *few, "--peers", peers),
        bench("bench_segformer_b0_bfloat16", *segformer, *few, *half),
        bench("bench_pvt_v2_b2", *pyramid, *batches, "--peers", peers),
        bench("bench_pvt_v2_b2_bfloat16", *pyramid, *batches, *half),
        bench("bench_pvt_v2_b2_training", *pyramid, *trained, "--train"),
    ]
    return of_cvt, of_pyramids


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
    for name in ("TRITON_INTERPRET", "CVT_KERNELS_BACKEND", "CVT_KERNELS_AUTOTUNE", "CVT_KERNELS_TUNED"):
        environment.pop(name, None)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    from cvt.files import replacing, write_json

    waiting = list(reversed(parts))
    while waiting:
        part = waiting.pop()
        print(f"{part.name:<26}", end="", flush=True)
        outcome = run_part(part, min(part.seconds, deadline - time.monotonic()), environment)
        summary["parts"][part.name] = outcome
        with replacing(path) as file:
            write_json(file, summary, indent=1)
        print(f"{outcome['status']:<10} {outcome['seconds']:>6.1f} s  {''.join(outcome['lines'][-1:])[:100]}")
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

    spent = time.monotonic() - BEGAN
    try:
        with ended_by_signals(LIMIT - RESERVE - spent + GRACE):
            seconds = LIMIT - RESERVE - spent
            return run(parts, summary, results / "summary.json", seconds=seconds, device=device, keep=keep)
    except EndedError as error:
        print(f"ended by {error}", flush=True)
        return False
    finally:
        keep()
        print(f"archive: {archive_path}, {archive_path.stat().st_size / 2**20:.1f} MiB")


def pack() -> dict[str, Any]:
    """Returns the facts of the pack that lies here; none if there is none."""
    path = PACK / "pack.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def use_pack(facts: Mapping[str, Any]) -> None:
    """Lets this process and those that it starts import the packages of the pack.

    Raises:
        ValueError: The pack is for another Python.
    """
    here = platform.python_version().rpartition(".")[0]
    if facts["python"] != here:
        raise ValueError(f"{PACK} is for Python {facts['python']}, and this is {here}")
    packages = str(PACK / "site")
    sys.path.insert(0, packages)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"  # as the kernels of the pack, whose folders are small


def commit(facts: Mapping[str, Any]) -> str:
    """Returns the commit of these sources, by the environment, the pack or git; ``""`` if none knows."""
    told = os.environ.get("CVT_KERNELS_COMMIT") or facts.get("commit")
    if told:
        return told
    with contextlib.suppress(OSError):  # there may be no git
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        return asked.stdout.strip()
    return ""


def digests() -> dict[str, str]:
    """Returns the SHA-256 of the files that decide what a GPU runs: the extension, and Triton's compilers."""
    found = importlib.util.find_spec("triton")
    folder = Path(found.origin).parent if found is not None and found.origin else ROOT
    files = [
        *(ROOT / "cvt_kernels").glob("_C*.so"),
        folder / "_C/libtriton.so",
        folder / "backends/nvidia/bin/ptxas",
    ]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def driver() -> str | None:
    """Returns what ``nvidia-smi`` says of the GPUs: name, driver, memory, clocks; None if there is none."""
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,compute_mode"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip() or None
    return None


def describe(device: str, facts: Mapping[str, Any]) -> dict[str, Any]:
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
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "device": name,
        "device_type": device,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d-%H%M"),
        "commit": commit(facts),
        "cvt_kernels": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "cuda": torch.version.cuda if cuda else None,
        "threads": None if cuda else torch.get_num_threads(),
        "driver": driver() if cuda else None,
        "sha256": digests() if cuda else None,
        "parts": {},
    }


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/run.py", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--stage", type=int, choices=tuple(STAGES), help="one of the commands for a GPU")
    which.add_argument("--parts", nargs="+", metavar="PART", help="only these, of: " + ", ".join(NAMES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="default: build/gpu/stage<N>.tar.gz")
    parser.add_argument(
        "--from",
        dest="earlier",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="archives of earlier stages, whose entries and compiled kernels are put to use",
    )
    parser.add_argument(
        "--peers",
        help="peers of cvt bench on a CPU (default: compile, which takes minutes, and openvino and "
        "onnxruntime where they are installed)",
    )
    parser.add_argument("--tiny", action="store_true", help="shapes of a smoke test: a rehearsal")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all --parts (default: 9)")
    parser.add_argument(
        "--own-triton", action="store_true", help="take this machine's Triton, not the pack's"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the parts; returns 1 if one failed, 2 if this machine or the arguments are not up to it."""
    options = arguments(argv)
    try:
        chosen = STAGES.get(options.stage) or [name for name in NAMES if name in options.parts]
        unknown = sorted({*(options.parts or ())} - set(NAMES))
        if unknown:
            raise ValueError(f"--parts: got {', '.join(unknown)}, expected some of {', '.join(NAMES)}")
        facts = pack()
        if facts and not options.own_triton:
            use_pack(facts)
        lacking = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
        if lacking:
            raise ValueError(f"not installed for {sys.executable}: {', '.join(lacking)}")
        sys.path.insert(0, str(ROOT))  # the project itself need not be installed
        restore([*options.earlier, *([PACK] if facts else [])])
        summary = describe(options.device, facts) | {"tiny": options.tiny, "stage": options.stage}
        slug = re.sub(r"[^a-z0-9]+", "-", summary["device"].lower()).strip("-")
        results = options.results.resolve() / slug / summary["date"]
        results.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"benchmarks/run.py: error: {error}", file=sys.stderr)
        return 2
    known = plan(options.device, results, tiny=options.tiny, minutes=options.minutes, peers=options.peers)
    parts = [known[name] for name in chosen if name != "build" or not serves(options.device, facts)]
    if options.stage:
        archive_path = options.archive or ROOT / "build" / "gpu" / f"stage{options.stage}.tar.gz"
        passed = run_stage(parts, summary, results, archive_path, device=options.device)
    else:
        seconds = 60 * options.minutes
        passed = run(parts, summary, results / "summary.json", seconds=seconds, device=options.device)
    print(f"results: {results}")
    return 0 if passed else 1


def restore(archives: Collection[Path]) -> None:
    """Puts to use what archives and the pack hold of entries and compiled kernels.

    Raises:
        ValueError: One is no archive.
    """
    from benchmarks import archive

    for path in archives:
        archive.restore(path)


def serves(device: str, facts: Mapping[str, Any]) -> bool:
    """Returns whether the extension of the pack serves this machine, which then need not build one."""
    if not facts:
        return False
    reason = f"machine.why_extension_unavailable({device!r})"
    code = f"import sys; from cvt_kernels import machine; sys.exit({reason})"
    asked = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        print(f"the pack's extension does not serve: {asked.stderr.strip().splitlines()[-1]}")
    return asked.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
