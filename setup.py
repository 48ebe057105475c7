"""Builds the compiled extension cvt_kernels._C; all other settings are in pyproject.toml.

It is built where torch and a C++ compiler are at hand; otherwise the Python part is installed alone, and
``cvt doctor`` says so. Nothing is downloaded. It contains what this machine runs, unless the environment says
otherwise:

- ``CVT_KERNELS_CPU_SETS``: the instruction sets to compile the loops of the CPU for. ``native``, the default,
  is the best of this machine; ``all`` is for wheels, which may run elsewhere; or names, as ``avx2 avx512``.
- ``CVT_KERNELS_CUDA``: ``auto`` (the default) compiles the CUDA kernels where there is an NVIDIA GPU, or all
  instruction sets are asked for, and a CUDA toolkit (in CUDA_HOME, on the PATH, or from PyPI); ``0`` never
  does, ``1`` insists.
- ``TORCH_CUDA_ARCH_LIST``: the GPUs to compile for, such as ``8.0;9.0+PTX``; by default those of the machine.
- ``CXX``: the C++ compiler.
- ``CVT_KERNELS_WERROR``: ``1`` makes every warning of the compilers an error, for CI.
"""

import contextlib
import functools
import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
SOURCES = sorted(str(path) for suffix in ("cpp", "cu") for path in CSRC.rglob(f"*.{suffix}"))
HEADERS = sorted(str(path) for suffix in ("h", "cuh") for path in CSRC.rglob(f"*.{suffix}"))

FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wextra"
# Errno and traps would cost branches; values do not depend on them. A product and a sum become one
# instruction where there is one. No vector type is passed between object files, so -Wpsabi's warning is moot.
SIMD_FLAGS = "-fno-math-errno -fno-trapping-math -ffp-contract=fast -Wno-psabi"
NVCC_FLAGS = "-std=c++20 -O3 -Xcompiler -fPIC,-fvisibility=hidden,-Wall"
# Only for CVT_KERNELS_WERROR=1: a later compiler knows more warnings, which should not end a user's build.
WERROR, NVCC_WERROR = "-Werror", "-Werror all-warnings -Xcompiler -Werror"
DEFINES = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]  # the stable ABI as of torch 2.11
INCLUDE = ["-I", str(CSRC)]  # sources name headers as "common/half.h"

# The build and the library ask the machine by the same functions.
MACHINE = runpy.run_path("cvt_kernels/machine/toolkit.py")

# The loops of the CPU, csrc/*/*cpu_loops.cpp, are compiled several times and chosen when they first run.
# LOOPS has the options of each, the others the loops that serve an instruction set, as has
# csrc/common/instruction_sets.h: AMX is for products of matrices; 8-bit integers have loops of their own.
PRODUCTS = CSRC / "common/product.h"
INTEGERS = CSRC / "linear_int8/cpu_loops.cpp"
LOOPS = {"plain": ""}
SERVED = PRODUCTS_SERVED = INTEGERS_SERVED = {"plain": "plain"}
if platform.machine() in ("x86_64", "AMD64"):
    LOOPS["plain"] = "-O1"  # few processors without AVX2 are left, and the compiler takes a third less time
    LOOPS["avx2"] = "-mavx2 -mfma -mf16c"
    LOOPS["avx2_vnni"] = f"{LOOPS['avx2']} -mavxvnni"
    LOOPS["avx512"] = f"{LOOPS['avx2']} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512"
    LOOPS["avx512_vnni"] = f"{LOOPS['avx512']} -mavx512vnni"
    LOOPS["avx512_bf16"] = f"{LOOPS['avx512']} -mavx512bf16"
    LOOPS["amx_bf16"] = f"{LOOPS['avx512_bf16']} -mamx-tile -mamx-bf16"
    LOOPS["amx_int8"] = f"{LOOPS['avx512_vnni']} -mamx-tile -mamx-int8"
    SERVED = {name: name for name in MACHINE["CPU_SETS"]}
    INTEGERS_SERVED = SERVED | {"avx512_bf16": "avx512_vnni", "amx_bf16": "amx_int8"}
    PRODUCTS_SERVED = SERVED | {"avx2_vnni": "avx2", "avx512_vnni": "avx512"}
    SERVED = PRODUCTS_SERVED | {"amx_bf16": "avx512_bf16"}

# Elements of the CUDA kernels, each compiled by a process of its own.
CUDA_TYPES = {"float32": "float", "bfloat16": "BFloat16", "float16": "Half"}
ARCHITECTURES = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"

# Seconds that the objects of such names take a core of an Intel Xeon, each CUDA architecture of its own.
SECONDS = {"launches": 36, "module": 15, "cpu_operators": 20, "": 6}


class Step(NamedTuple):
    """One command of the build: the file that it makes, the files that it reads, and itself."""

    output: Path
    inputs: list[str]
    command: list[str]


class BuildWithNinja(build_ext):
    """Compiles by ninja if it is installed, else one file after another."""

    def build_extension(self, ext: Extension) -> None:
        """Compiles and links the extension."""
        build = Path(self.build_temp)
        if self.editable_mode:  # setuptools would take a new folder, and all would be compiled again
            build = Path(f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}")
        build.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        sets = cpu_sets()
        try_compiler(build, sets)
        plan = steps(build, target, self.distribution.get_version(), sets)
        announce(plan, sets)
        run(plan, build)


def steps(build: Path, target: Path, version: str, sets: list[str]) -> list[Step]:
    """Returns the commands that make the extension for instruction sets, in an order that works."""
    import torch

    root = Path(torch.__file__).parent
    # torch's headers bring pybind11 along.
    includes = [str(root / "include"), sysconfig.get_path("include")]
    system = [part for path in includes for part in ("-isystem", path)]
    flags, nvcc_flags = FLAGS, NVCC_FLAGS
    if warnings_are_errors():
        flags, nvcc_flags = f"{FLAGS} {WERROR}", f"{NVCC_FLAGS} {NVCC_WERROR}"
    common = [*shlex.split(flags), *DEFINES, *INCLUDE, *system]
    toolkit = find_toolkit()
    # No path to torch's libraries is kept: they are loaded before the extension is.
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-ldl"]
    targets = architectures(toolkit) if toolkit is not None else []
    if not targets:
        toolkit = None
    if toolkit is not None:
        libraries += [str(toolkit.runtime), "-lrt", "-lpthread"]

    def step(source: Path, command: list[str], variant: str = "") -> Step:
        stem = "_".join(source.relative_to(CSRC).with_suffix("").parts)
        output = build / f"{stem}{variant and '_' + variant}.o"
        inputs = [str(source), *map(str, sorted(headers_of(source)))]
        return Step(output, inputs, [*command, "-c", str(source), "-o", str(output)])

    def compiled(source: Path, flags: list[str], variant: str = "") -> Step:
        return step(source, [*compiler(), *common, *flags], variant)

    here = [f'-DCVT_KERNELS_CPU_SETS=" {" ".join(sets)} "']
    objects = [compiled(CSRC / "module.cpp", [*definitions(version, toolkit, targets), *here])]
    objects.append(together(build, [*compiler(), *common, *here]))
    for source in sorted(CSRC.glob("*/*cpu_loops.cpp")):
        for name in loops_of(source, sets):
            options = [f"-DKERNELS=kernels_{name}", *shlex.split(f"{SIMD_FLAGS} {LOOPS[name]}")]
            objects.append(compiled(source, options, name))
    if toolkit is not None:
        objects += [compiled(source, []) for source in sorted(CSRC.glob("*/cuda_operators.cpp"))]
        nvcc = [toolkit.nvcc, *shlex.split(nvcc_flags), *INCLUDE, "-ccbin", host_compiler()]
        nvcc += [f"-gencode=arch={target.virtual},code={target.code}" for target in targets]
        launches = []
        for source in sorted(CSRC.glob("*/cuda_launches.cu")):
            for name, element in CUDA_TYPES.items():
                options = [f"-DKERNELS=kernels_{name}", f"-DTYPE={element}"]
                launches.append(step(source, [*nvcc, *options], name))
        objects = launches + objects  # the longest first
    names = [str(made.output) for made in objects]
    link = [*compiler(), "-shared", *names, *libraries, "-o", str(target)]
    return [*objects, Step(target, names, link)]


def together(build: Path, command: list[str]) -> Step:
    """Returns the step that compiles all operators of the CPU as one file: torch's headers are read once."""
    sources = sorted(CSRC.glob("*/cpu_operators.cpp"))
    inputs = {*sources, *(header for source in sources for header in headers_of(source))}
    everything, output = build / "cpu_operators.cpp", build / "cpu_operators.o"
    text = "".join(f'#include "{source.relative_to(CSRC)}"\n' for source in sources)
    everything.parent.mkdir(parents=True, exist_ok=True)
    everything.write_text(text, encoding="utf-8")
    return Step(output, sorted(map(str, inputs)), [*command, "-c", str(everything), "-o", str(output)])


def announce(plan: list[Step], sets: list[str]) -> None:
    """Says in one line what is compiled and how long it takes; pip, which shows no output, lets it through.

    Nothing is said where everything was compiled before.
    """
    missing = [made for made in plan[:-1] if not made.output.exists()]
    if not missing:
        return
    seconds, cores = 0, len(os.sched_getaffinity(0))
    for made in missing:
        name = next(name for name in SECONDS if name in made.output.stem)
        seconds += SECONDS[name] * max(1, sum(option.startswith("-gencode") for option in made.command))
    cuda = "with" if any("cuda" in made.output.stem for made in plan) else "without"
    line = (
        f"cvt-kernels: compiling {len(missing)} files for {', '.join(sets)}, {cuda} CUDA kernels, in about "
        f"{max(1, round(seconds / 60 / cores))} min on {cores} idle cores; CVT_KERNELS_CPU_SETS and "
        "CVT_KERNELS_CUDA choose others"
    )
    print(line, file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError):
            Path("/dev/tty").write_text(f"{line}\n", encoding="utf-8")


def cpu_sets() -> list[str]:
    """Returns the instruction sets to compile for, as CVT_KERNELS_CPU_SETS asks for them.

    Raises:
        SystemExit: It names what there is not.
    """
    requested = os.environ.get("CVT_KERNELS_CPU_SETS") or "native"
    names = re.split(r"[\s,;]+", requested.strip())
    if names == ["native"]:
        names = MACHINE["cpu_sets_here"]()[-1:]
    elif names == ["all"]:
        names = list(SERVED)
    elif unknown := [name for name in names if name not in SERVED]:
        expected = f"native, all, or some of {', '.join(SERVED)}"
        raise SystemExit(f"CVT_KERNELS_CPU_SETS: got {unknown[0]!r}, expected {expected}")
    return [name for name in SERVED if name in names]


def is_for_others() -> bool:
    """Returns whether other machines are to run the build, as they do wheels."""
    return os.environ.get("CVT_KERNELS_CPU_SETS", "").strip() == "all"


def loops_of(source: Path, sets: list[str]) -> list[str]:
    """Returns the loops of LOOPS to compile a source for, so that they serve some instruction sets."""
    served = PRODUCTS_SERVED if PRODUCTS in headers_of(source) else SERVED
    if source == INTEGERS:
        served = INTEGERS_SERVED
    needed = {served[name] for name in sets}
    return [name for name in LOOPS if name in needed]


def compiled_loops(sets: list[str]) -> set[str]:
    """Returns the loops of LOOPS that serve some instruction sets in any family."""
    return {served[name] for served in (SERVED, PRODUCTS_SERVED, INTEGERS_SERVED) for name in sets}


def definitions(version: str, toolkit: "Toolkit | None", targets: "list[Target]") -> list[str]:
    """Returns the options that give ``module.cpp`` the facts of the build."""
    facts = {
        "VERSION": version,
        "COMPILER": compiler_version(),
        "CUDA_VERSION": toolkit.version if toolkit is not None else "",
        "CUDA_REQUEST": cuda_request(),
        "ARCHITECTURES": ",".join(target.code for target in targets),
    }
    return [f'-DCVT_KERNELS_{name}="{fact}"' for name, fact in facts.items()]


def headers_of(source: Path) -> set[Path]:
    """Returns the headers of ``csrc`` that a source includes, directly or by another header."""
    names = re.findall(r'^#include "(.+)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    included = {CSRC / name for name in names}
    return included.union(*map(headers_of, included))


class Toolkit(NamedTuple):
    """A CUDA toolkit: compiler, version as in ``13.0``, static runtime library, and GPUs as in ``90``."""

    nvcc: str
    version: str
    runtime: Path
    known: frozenset[str]


def cuda_request() -> str:
    """Returns what CVT_KERNELS_CUDA asks for."""
    return os.environ.get("CVT_KERNELS_CUDA") or "auto"


def warnings_are_errors() -> bool:
    """Returns what CVT_KERNELS_WERROR asks for.

    Raises:
        SystemExit: It is neither 0 nor 1.
    """
    requested = os.environ.get("CVT_KERNELS_WERROR") or "0"
    if requested not in ("0", "1"):
        raise SystemExit(f"CVT_KERNELS_WERROR: got {requested!r}, expected 0 or 1")
    return requested == "1"


@functools.cache
def find_toolkit() -> Toolkit | None:
    """Returns the CUDA toolkit to build with, or None if none is usable or wanted.

    Raises:
        SystemExit: ``CVT_KERNELS_CUDA=1`` and there is none that can be used.
    """
    requested = cuda_request()
    if requested == "0" or (requested == "auto" and not (is_for_others() or MACHINE["gpus_here"]())):
        return None
    nvcc = MACHINE["find_nvcc"]()
    reason = "no nvcc was found: neither in CUDA_HOME, nor on the PATH, nor from PyPI's nvidia-cuda-nvcc"
    toolkit = reason if nvcc is None else examine(nvcc)
    if isinstance(toolkit, Toolkit):
        return toolkit
    if requested == "1":
        raise SystemExit(f"CVT_KERNELS_CUDA=1: {toolkit}")
    print(f"cvt-kernels: building without CUDA kernels: {toolkit}", file=sys.stderr)
    return None


def examine(nvcc: str) -> Toolkit | str:
    """Returns the toolkit of a compiler, or why it cannot be used."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", version)
    plan = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    if found is None or top is None:
        return f"{nvcc} does not run"
    if int(found[1]) < 12:
        return f"{nvcc} is of CUDA {found[1]}.{found[2]}, but 12.0 is the oldest that knows C++20"
    places = [Path(path) for path in re.findall(r'"-L([^"]*)"', plan)] + [Path(top[1]) / "lib"]
    runtime = next((p / "libcudart_static.a" for p in places if (p / "libcudart_static.a").exists()), None)
    if runtime is None:
        return (
            f"{nvcc} comes without libcudart_static.a (PyPI's nvidia-cuda-nvcc wants nvidia-cuda-crt, "
            f"nvidia-nvvm, nvidia-cuda-runtime and nvidia-cuda-cccl, all {found[1]}.{found[2]}.*)"
        )
    return Toolkit(nvcc, f"{found[1]}.{found[2]}", runtime, frozenset(re.findall(r"compute_(\d+)", known)))


class Target(NamedTuple):
    """A target of nvcc: ``compute_90`` and, as machine code or as PTX, ``sm_90`` or ``compute_90``."""

    virtual: str
    code: str


def architectures(toolkit: Toolkit) -> list[Target]:
    """Reads ``TORCH_CUDA_ARCH_LIST``: versions as in ``8.0;9.0+PTX``, by semicolons or spaces.

    Without it, the GPUs of this machine, or all where there is none or all instruction sets are asked for.

    Raises:
        SystemExit: It holds something else, or what the toolkit does not know.
    """
    requested = os.environ.get("TORCH_CUDA_ARCH_LIST")
    here = [] if is_for_others() else MACHINE["gpus_here"]()
    default = ";".join(here) if toolkit.known.issuperset(gpu.replace(".", "") for gpu in here) else ""
    targets = []
    for name in re.split(r"[;\s]+", (requested or default or ARCHITECTURES).strip()):
        parts = re.fullmatch(r"(?P<major>\d+)\.(?P<minor>\d)(?P<suffix>[af]?)(?P<ptx>\+PTX)?", name)
        if parts is None:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: got {name!r}, expected versions such as 8.0;9.0+PTX")
        if int(parts["major"]) < 8:
            print(f"cvt-kernels: building no CUDA kernels for {name}: they need 8.0", file=sys.stderr)
            continue
        if parts["major"] + parts["minor"] not in toolkit.known:
            if not requested:  # the toolkit is older than the GPU
                continue
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: got {name}, which CUDA {toolkit.version} does not know")
        number = parts["major"] + parts["minor"] + parts["suffix"]
        targets.append(Target(f"compute_{number}", f"sm_{number}"))
        if parts["ptx"]:
            targets.append(Target(f"compute_{number}", f"compute_{number}"))
    if not (requested or default) and targets and targets[-1].code.startswith("sm_"):
        # The toolkit does not know the last of ARCHITECTURES, which would have brought PTX for later GPUs.
        targets.append(Target(targets[-1].virtual, targets[-1].virtual))
    return targets


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
            raise SystemExit(f"cvt_kernels._C was not built: see what failed above; {what_to_do()}")


def try_compiler(build: Path, sets: list[str]) -> None:
    """Compiles an empty file by all options of loops.

    Raises:
        SystemExit: The compiler does not know one; it has said which.
    """
    empty = build / "empty.cpp"
    empty.touch()
    options = [option for name in LOOPS if name in compiled_loops(sets) for option in LOOPS[name].split()]
    command = [*compiler(), *shlex.split(f"{FLAGS} {SIMD_FLAGS}"), *dict.fromkeys(options)]
    if subprocess.run([*command, "-c", str(empty), "-o", str(empty.with_suffix(".o"))]).returncode:
        raise SystemExit(f"cvt_kernels._C was not built: {compiler_version()} is too old; {what_to_do()}")


def what_to_do() -> str:
    """Returns what a user can do where the build fails, after what the compiler has said."""
    advice = "CXX=... names another compiler, such as GCC from 11 or clang from 16"
    if warnings_are_errors():
        advice += "; CVT_KERNELS_WERROR=0 lets warnings pass"
    if find_toolkit() is not None:
        advice += "; CVT_KERNELS_CUDA=0 builds without CUDA"
    return advice


def ninja_path(path: object) -> str:
    """Returns the path as ninja reads it."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def compiler() -> list[str]:
    """Returns the command of the C++ compiler: CXX, or c++."""
    return shlex.split(os.environ.get("CXX") or "c++")


def host_compiler() -> str:
    """Returns the compiler itself, for nvcc, which takes no launcher before it."""
    return next(word for word in compiler() if Path(word).name not in ("ccache", "sccache", "distcc"))


def compiler_version() -> str:
    """Returns the first line of ``c++ --version``, without the characters that would end a C string."""
    output = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return output.splitlines()[0].replace('"', "").replace("\\", "")


def why_not_buildable() -> str | None:
    """Returns the reason why the extension cannot be built here, or None."""
    if sys.platform != "linux":
        return "it is built on Linux only"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed where it is built; install torch, then use pip's --no-build-isolation"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the headers of Python are not installed; they come with python3-dev or python3-devel"
    if shutil.which(compiler()[0]) is None:
        return f"there is no C++ compiler {compiler()[0]!r}"
    return None


def extensions() -> list[Extension]:
    """Returns the extension; where it cannot be built, nothing, with a message."""
    cuda = cuda_request()
    if cuda not in ("auto", "0", "1"):
        raise SystemExit(f"CVT_KERNELS_CUDA: got {cuda!r}, expected auto, 0 or 1")
    warnings_are_errors()  # these complain before anything is built
    cpu_sets()
    reason = why_not_buildable()
    if reason is not None:
        if cuda == "1":
            raise SystemExit(f"CVT_KERNELS_CUDA=1: the extension cannot be built: {reason}")
        print(f"cvt-kernels: installing without the extension cvt_kernels._C: {reason}", file=sys.stderr)
        return []
    toolkit = find_toolkit()
    if toolkit is not None:
        architectures(toolkit)  # complains before anything is built
    return [Extension("cvt_kernels._C", SOURCES, depends=HEADERS)]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildWithNinja})
