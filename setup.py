"""The compiled extension cvt_kernels._C only; everything else is in pyproject.toml.

It is built where torch and a C++ compiler are at hand; otherwise the Python part is installed alone, and
``cvt-kernels doctor`` says so. Nothing is downloaded. ``CVT_KERNELS_CUDA=0`` or ``auto`` builds the CPU
kernels; ``1`` insists on CUDA kernels, which this version does not have.
"""

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = ["csrc/module.cpp", "csrc/layer_norm_gelu.cpp", "csrc/layer_norm_gelu_simd.cpp"]
HEADERS = sorted(str(path) for path in Path("csrc").glob("*.h"))

FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -Werror"
# Errno and traps would keep loops from being vectorised; values are not changed by doing without them.
SIMD_FLAGS = "-fopenmp-simd -fno-math-errno -fno-trapping-math"
DEFINES = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]  # the stable ABI as of torch 2.11

# The loops are compiled for each and chosen when they first run.
INSTRUCTION_SETS = {"plain": ""}
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {
        "avx2": "-mavx2 -mfma -mf16c",
        "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512",
    }


class Step(NamedTuple):
    """One command of the build: what it makes from what."""

    output: Path
    inputs: list[str]
    command: list[str]


class BuildNative(build_ext):
    """Compiles by ninja if it is installed, else one file after another."""

    def build_extension(self, ext: Extension) -> None:
        """Compiles and links."""
        build = Path(self.build_temp)
        build.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        run(steps(build, target, self.distribution.get_version()), build)


def steps(build: Path, target: Path, version: str) -> list[Step]:
    """The commands that make the extension, in an order that works."""
    import torch

    root = Path(torch.__file__).parent
    # torch's headers bring pybind11 along.
    includes = [str(root / "include"), sysconfig.get_path("include")]
    common = [*shlex.split(FLAGS), *DEFINES, *(part for path in includes for part in ("-isystem", path))]
    facts = [f'-DCVT_KERNELS_VERSION="{version}"', f'-DCVT_KERNELS_COMPILER="{compiler_version()}"']

    def compiled(source: str, name: str, flags: list[str]) -> Step:
        output = build / f"{name}.o"
        command = [*compiler(), *common, *flags, "-c", source, "-o", str(output)]
        return Step(output, [source, *HEADERS], command)

    module, operators, loops = SOURCES
    objects = [compiled(module, "module", facts), compiled(operators, "layer_norm_gelu", [])]
    for name, flags in INSTRUCTION_SETS.items():
        table = f"-DKERNELS=kernels_{name}"
        objects.append(
            compiled(loops, f"layer_norm_gelu_{name}", [table, *shlex.split(f"{SIMD_FLAGS} {flags}")])
        )
    names = [str(step.output) for step in objects]
    # No path to torch's libraries is kept: they are loaded before the extension is.
    link = [*compiler(), "-shared", *names, f"-L{root / 'lib'}", "-ltorch_cpu", "-o", str(target)]
    return [*objects, Step(target, names, link)]


def run(plan: list[Step], build: Path) -> None:
    """Runs the commands.

    Raises:
        SystemExit: If one fails; the compiler has said why.
    """
    ninja = shutil.which(
        "ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if ninja is not None:
        lines = [f"builddir = {ninja_path(build)}", "rule run", "  command = $line", "  description = $out"]
        for step in plan:
            line = shlex.join(step.command).replace("$", "$$")
            inputs = " ".join(map(ninja_path, step.inputs))
            lines += [f"build {ninja_path(step.output)}: run {inputs}", f"  line = {line}"]
        script = build / "build.ninja"
        script.write_text("\n".join(lines) + "\n", encoding="utf-8")
        commands = [[ninja, "-f", str(script)]]
    else:
        commands = [step.command for step in plan]
    for command in commands:
        if subprocess.run(command).returncode:
            raise SystemExit(f"cvt_kernels._C was not built: {shlex.join(command)} failed")


def ninja_path(path: object) -> str:
    """The path as ninja reads it."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def compiler() -> list[str]:
    """The C++ compiler: CXX, or c++."""
    return shlex.split(os.environ.get("CXX") or "c++")


def compiler_version() -> str:
    """The first line of ``c++ --version``, without what would end a C string."""
    output = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return output.splitlines()[0].replace('"', "").replace("\\", "")


def missing() -> str | None:
    """Why the extension cannot be built here, or None."""
    if sys.platform != "linux":
        return "it is built on Linux only"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed where it is built; install torch, then use pip's --no-build-isolation"
    if shutil.which(compiler()[0]) is None:
        return f"there is no C++ compiler {compiler()[0]!r}"
    return None


def extensions() -> list[Extension]:
    """The extension, or nothing and a message."""
    cuda = os.environ.get("CVT_KERNELS_CUDA") or "auto"
    if cuda not in ("auto", "0", "1"):
        raise SystemExit(f"CVT_KERNELS_CUDA: got {cuda!r}, expected auto, 0 or 1")
    if cuda == "1":
        raise SystemExit("CVT_KERNELS_CUDA=1: this version has no CUDA kernels in csrc; use auto or 0")
    reason = missing()
    if reason is not None:
        print(f"cvt-kernels: installing without the extension cvt_kernels._C: {reason}", file=sys.stderr)
        return []
    return [Extension("cvt_kernels._C", SOURCES, depends=HEADERS)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative})
