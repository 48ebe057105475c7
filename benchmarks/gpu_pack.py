"""Packs everything for a GPU machine without a network into one file: sources, extension, compiled kernels.

``make gpu-pack`` runs this with a Python of the version that the other machine has, and torch of its version.
The pack holds the sources of the commit, the extension for that Python, a Triton that is cut down to what
computes, and the kernels that ``cvt compile`` lists, compiled for the GPU. Triton finds them by
the keys under which it would put them itself. ``benchmarks/run.py`` uses all of them where it finds them.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: The top folder in the file, and the folder of ``run.PACK`` in it.
TOP, PACK = "cvt-kernels", "build/gpu-pack"
#: Files of Triton that no run needs: tools, and the assembler for GPUs from sm_100 on.
UNNEEDED = (
    "ptxas-blackwell",
    "cuobjdump",
    "nvdisasm",
    "libproton.so",
    "FileCheck",
    "cupti",
    "__pycache__",
)
#: Operators whose kernels are compiled ahead: CvT-13's, plain and frozen, without quantization.
OPERATORS = (
    *("conv_projection", "conv_linear", "conv_embedding", "attention", "layer_norm_mlp"),
    *("linear_gelu", "linear_add", "linear_add_layer_norm"),
)


def main(argv: list[str] | None = None) -> int:
    """Makes the pack; returns 1 if it would be too large, 2 if this environment cannot make it."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_pack", description=__doc__)
    parser.add_argument("path", type=Path, help="the file, a .tar.xz")
    parser.add_argument("--arch", type=int, default=90, help="of the GPU (default: 90, for H100 and H200)")
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16", "float32"], help="default: bfloat16 float32"
    )
    parser.add_argument(
        "--triton", type=Path, metavar="DIR", help="the package to pack (default: the installed)"
    )
    parser.add_argument("--limit", type=float, default=64.0, help="MiB of the file (default: 64)")
    parser.add_argument("--no-kernels", action="store_true", help="leave compiled kernels out")
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            cut_triton(options.triton or package_of("triton"), folder / "site" / "triton")
            if not options.no_kernels:
                compile_ahead(folder, options.arch, options.dtype)
            size = write(options.path, folder, extension(), limit=options.limit)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"benchmarks.gpu_pack: error: {error}", file=sys.stderr)
        return 2
    if size > options.limit:
        return 1
    print(f"{options.path}: {size:.1f} MiB, for Python {version_here()} and sm_{options.arch}")
    return 0


def version_here() -> str:
    """Returns the version of Python that extensions are built for, as in ``3.12``."""
    return platform.python_version().rpartition(".")[0]


def package_of(name: str) -> Path:
    """Returns the folder of a package.

    Raises:
        ValueError: It is not installed.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ValueError(f"{name} is not installed for {sys.executable}")
    return Path(found.origin).parent


def extension() -> Path:
    """Returns the extension that is built in this checkout for this Python.

    Raises:
        ValueError: There is none.
    """
    suffix = f"cpython-{version_here().replace('.', '')}-"
    built = sorted((ROOT / "cvt_kernels").glob(f"_C.{suffix}*.so"))
    if not built:
        raise ValueError(f"cvt_kernels/_C.{suffix}*.so is missing: run setup.py build_ext --inplace first")
    return built[0]


def cut_triton(source: Path, target: Path) -> None:
    """Copies Triton, with its facts, without what no run needs and without the symbols of its library."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*UNNEEDED))
    for facts in source.parent.glob("triton-*.dist-info"):
        shutil.copytree(facts, target.parent / facts.name)
    library = target / "_C" / "libtriton.so"
    if library.is_file() and shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)


def compile_ahead(folder: Path, arch: int, dtypes: Sequence[str]) -> None:
    """Compiles kernels by the pack's Triton, in a process that imports it, into the folder ``triton``."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)]),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TRITON_STORE_BINARY_ONLY": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    code = f"from benchmarks import gpu_pack; gpu_pack.compile_all({arch}, {list(dtypes)})"
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=True)


def compile_all(arch: int, dtypes: Sequence[str]) -> None:
    """Compiles the kernels of CvT-13 in inference and training, at the batch sizes that are tuned."""
    from cvt.commands.compile import jobs

    selection = jobs.Selection([arch], ["cvt_13"], dtypes, OPERATORS, [1, 2, 3], [None], [1, 256])
    kernels = [job.source for job in jobs.triton_jobs(selection)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        failed = [reason for reason in pool.map(compile_one, kernels) if reason]
    print(f"{len(kernels) - len(failed)} kernels compiled ahead", *failed, sep="\n")


def compile_one(kernel: Any) -> str | None:
    """Compiles a ``TritonKernel`` into Triton's cache; returns why it does not compile."""
    try:
        kernel.compile()
    except RuntimeError as error:  # it will be compiled, or fail, over there
        return f"{kernel.name}: {str(error).splitlines()[-1]}"
    return None


def write(path: Path, folder: Path, built: Path, *, limit: float, preset: int = 9) -> float:
    """Writes the pack, and returns its MiB; where these are more than ``limit`` there is no file.

    Args:
        path: The file.
        folder: Has ``site`` and perhaps ``triton``.
        built: The extension.
        limit: In MiB.
        preset: Of xz: 9 is the smallest file, 0 the quickest.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    sources = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    facts = {"commit": commit.stdout.strip(), "python": version_here()}
    (folder / "pack.json").write_text(json.dumps(facts), encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    with (
        tarfile.open(scratch, "w:xz", preset=preset) as pack,
        tarfile.open(fileobj=io.BytesIO(sources)) as archive,
    ):
        for member in archive:
            content = archive.extractfile(member) if member.isreg() else None
            member.name = f"{TOP}/{member.name}"
            pack.addfile(member, content)
        pack.add(built, f"{TOP}/cvt_kernels/{built.name}")
        for part in sorted(folder.iterdir()):
            pack.add(part, f"{TOP}/{PACK}/{part.name}")
    size = scratch.stat().st_size / 2**20
    if size <= limit:
        scratch.replace(path)
        return size
    scratch.unlink()
    parts = {part.name: sum(f.stat().st_size for f in part.rglob("*")) / 2**20 for part in folder.iterdir()}
    told = ", ".join(f"{name} {mib:.0f} MiB before compression" for name, mib in sorted(parts.items()))
    print(
        f"benchmarks.gpu_pack: error: the pack would have {size:.1f} MiB, more than {limit:g} ({told}); "
        "leave kernels out with --no-kernels, or float32 with --dtype bfloat16",
        file=sys.stderr,
    )
    return size


if __name__ == "__main__":
    sys.exit(main())
