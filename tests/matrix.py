"""Runs a part of the tests with other versions of Python and torch, as ``make matrix`` does.

Each combination has an environment and a copy of the project in build/matrix/, both removed after its tests,
since torch alone may take 5 GB. What this machine cannot have, an interpreter or a version, is skipped with
one line. The exit code is 1 if something failed, or if nothing ran.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build/matrix"

#: Versions of Python and torch.
COMBINATIONS = (
    ("3.11", "2.11"), ("3.11", "2.12"), ("3.11", "2.14"), ("3.11", "2.15"), ("3.10", "2.13"),
    ("3.12", "2.13"), ("3.13", "2.13"), ("3.14", "2.15"),
)  # fmt: skip

#: The oldest torch is tested with the oldest transformers that is, the others with the newest.
OLDEST_TRANSFORMERS = {"2.11": "transformers==4.57.*"}

#: What depends most on the version: tracing, compiling and exporting, PyTorch's internals, the extension.
TESTS = (
    "tests/cvt/test_backbone.py",
    "tests/cvt/test_model.py",
    "tests/cvt/tools/commands/test_export.py",
    "tests/cvt_kernels/test_backends.py",
    "tests/cvt_kernels/test_graphs.py",
    "tests/cvt_kernels/test_tracing.py",
    "tests/cvt_kernels/models/test_compiling.py",
    "tests/cvt_kernels/models/test_pyramids.py",
    "tests/cvt_kernels/models/test_segformer.py",
    "tests/cvt_kernels/models/test_tracing.py",
)

# What these tests and the build need besides torch, which says itself which setuptools it can be used with.
PACKAGES = (
    "faster-coco-eval", "filelock", "hypothesis", "ninja", "numpy", "onnx", "onnxruntime", "onnxscript",
    "pillow", "pytest", "safetensors", "scikit-learn", "scipy", "setuptools>=77", "tabulate", "torchmetrics",
    "tqdm",
)  # fmt: skip


class Result(NamedTuple):
    """A row of the table."""

    python: str
    torch: str
    outcome: str
    minutes: float


def main() -> int:
    """Runs all combinations or those that the command line names; returns the exit code."""
    parser = argparse.ArgumentParser(description="Test on other versions of Python and torch.")
    names = [f"{python}-{torch}" for python, torch in COMBINATIONS]
    parser.add_argument("only", nargs="*", metavar="PYTHON-TORCH", help=f"some of {', '.join(names)}; all")
    only = parser.parse_args().only
    if unknown := sorted(set(only) - set(names)):
        parser.error(f"got {', '.join(unknown)}, expected some of {', '.join(names)}")
    results = [
        run(python, torch)
        for name, (python, torch) in zip(names, COMBINATIONS, strict=True)
        if not only or name in only
    ]
    print("\nPython  torch    minutes  outcome")
    for result in results:
        print(f"{result.python:6}  {result.torch:7}  {result.minutes:7.1f}  {result.outcome}")
    outcomes = [result.outcome for result in results]
    return int("passed" not in outcomes or any(outcome.startswith("failed") for outcome in outcomes))


def run(python: str, torch: str) -> Result:
    """Runs one combination."""
    folder, start = BUILD / f"{python}-{torch}", time.monotonic()
    print(f"Python {python}, torch {torch}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        outcome = outcome_in(folder, python, torch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome.startswith("skipped"):
        print(outcome, flush=True)
    return Result(python, torch, outcome, (time.monotonic() - start) / 60)


def outcome_in(folder: Path, python: str, torch: str) -> str:
    """Makes the environment and the copy of one combination in a folder, and runs the tests there."""
    interpreter = find_interpreter(python)
    if interpreter is None:
        return f"skipped: there is no python{python}"
    subprocess.run([interpreter, "-m", "venv", folder / "venv"], check=True)
    own = str(folder / "venv/bin/python")
    if (reason := why_not_installed(own, folder, torch)) is not None:
        return f"skipped: {reason}"
    project = copy_project(folder / "project")
    environment = {"OMP_NUM_THREADS": "1", "CVT_KERNELS_CUDA": "0", **os.environ}
    environment["PATH"] = f"{folder / 'venv/bin'}{os.pathsep}{environment['PATH']}"
    for what, command in (
        ("build", [own, "setup.py", "-q", "build_ext", "--inplace"]),
        ("tests", [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]),
    ):
        if subprocess.run(command, cwd=project, env=environment).returncode:
            return f"failed: {what}"
        if what == "build" and not list(project.glob("cvt_kernels/_C.*")):
            return "failed: the extension was not built"
    return "passed"


def find_interpreter(python: str) -> str | None:
    """Returns a Python of a version: on the PATH or of pyenv; None if there is none."""
    found = shutil.which(f"python{python}")
    if found is not None and not subprocess.run([found, "-c", ""], capture_output=True).returncode:
        return found
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    return next((str(path) for path in sorted(versions.glob(f"{python}.*/bin/python"))), None)


def why_not_installed(interpreter: str, folder: Path, torch: str) -> str | None:
    """Installs a version of torch, and what the tests need; says why it cannot, or returns None."""
    constraints = folder / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    free = ("torch=", "triton=", "setuptools=", "transformers=", "huggingface_hub=")
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith(free)), encoding="utf-8")
    install = [interpreter, "-m", "pip", "install", "-q", "--no-compile", "-c", constraints]
    packages = [f"torch=={torch}.*", OLDEST_TRANSFORMERS.get(torch, "transformers"), *PACKAGES]
    result = subprocess.run([*install, *packages], capture_output=True, text=True)
    if result.returncode == 0:
        return None
    errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or result.stderr.splitlines() or ["pip failed"])[-1]


def copy_project(folder: Path) -> Path:
    """Copies the files that Git knows, so that each version builds an extension of its own."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, files.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return folder


if __name__ == "__main__":
    sys.exit(main())
