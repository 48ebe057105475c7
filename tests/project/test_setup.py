"""The build of the extension by setup.py, and its messages where it cannot build."""

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

import pytest
import setuptools

import cvt_kernels as ck
from cvt_kernels import machine
from cvt_kernels.machine import toolkit
from tests.checks import compiler, not_built

ROOT = Path(__file__).parents[2]

needs_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="there are several instruction sets on x86-64 only"
)
needs_compiler = pytest.mark.skipif(not_built(), reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def no_settings_of_builds(monkeypatch):
    """CI and users set these for their own builds; a test decides by itself."""
    for name in ("CVT_KERNELS_CPU_SETS", "CVT_KERNELS_CUDA", "CVT_KERNELS_WERROR", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)


def run_setup(**environment):
    """Runs setup.py, which here compiles nothing, so that any program passes for a compiler."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "--version"],
        cwd=ROOT, env={**os.environ, "CXX": shlex.quote(sys.executable), **environment},
        capture_output=True, text=True,
    )  # fmt: skip


NO_COMPILER = {"CXX": "no-such-compiler"}
NO_TOOLKIT = {"CUDA_HOME": "no-such-folder", "CUDA_PATH": "", "PATH": "no-such-folder"}


def test_without_a_compiler_the_python_part_is_installed_alone():
    result = run_setup(**NO_COMPILER)
    assert result.returncode == 0
    assert "without the extension" in result.stderr
    assert "there is no C++ compiler 'no-such-compiler'" in result.stderr


def test_without_a_toolkit_the_cpu_kernels_are_built():
    """Nothing is said where no GPU is: the PATH has no nvidia-smi here."""
    result = run_setup(**NO_TOOLKIT, CVT_KERNELS_CPU_SETS="all")
    assert result.returncode == 0
    assert "building without CUDA kernels: no nvcc was found" in result.stderr
    assert run_setup(CVT_KERNELS_CUDA="0").stderr == ""
    assert run_setup(**NO_TOOLKIT).stderr == ""


NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
  --list-gpu-arch) printf 'compute_80\\ncompute_90\\n' ;;
  --dryrun) echo '#$ TOP={top}' >&2; echo '#$ LIBRARIES= "-L{top}/lib/stubs"' >&2 ;;
esac
"""


def fake_toolkit(tmp_path, version="13.0", library=True):
    """Makes a CUDA toolkit that answers but compiles nothing; returns the environment that names it."""
    for folder in ("bin", "lib"):
        (tmp_path / folder).mkdir(parents=True)
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(version=version, top=tmp_path))
    nvcc.chmod(0o755)
    if library:
        (tmp_path / "lib" / "libcudart_static.a").touch()
    return {"CUDA_HOME": str(tmp_path)}


CUDA = {"CVT_KERNELS_CUDA": "1"}


@pytest.mark.parametrize(
    ("environment", "toolkit", "message"),
    [
        ({"CVT_KERNELS_CUDA": "yes"}, None, "got 'yes', expected auto, 0 or 1"),
        (CUDA | NO_TOOLKIT, None, "no nvcc was found"),
        (CUDA | NO_COMPILER, None, "there is no C++ compiler 'no-such-compiler'"),
        ({"CVT_KERNELS_WERROR": "yes"}, None, "got 'yes', expected 0 or 1"),
        ({"CVT_KERNELS_CPU_SETS": "avx3"}, None, "got 'avx3', expected native, all, or some of plain"),
        ({"CVT_KERNELS_CPU_SETS": "all avx2"}, None, "got 'all', expected native, all, or some of plain"),
        (CUDA, {"version": "11.8"}, "is of CUDA 11.8, but 12.0 is the oldest that knows C++20"),
        (CUDA, {"library": False}, "comes without libcudart_static.a"),
        (
            {"TORCH_CUDA_ARCH_LIST": "Hopper"} | CUDA,
            {},
            "got 'Hopper', expected versions such as 8.0;9.0+PTX",
        ),
        ({"TORCH_CUDA_ARCH_LIST": "9.0;12.0"} | CUDA, {}, "got 12.0, which CUDA 13.0 does not know"),
    ],
)
def test_a_build_that_is_impossible_fails_with_one_sentence(tmp_path, environment, toolkit, message):
    made = {} if toolkit is None else fake_toolkit(tmp_path, **toolkit)
    result = run_setup(**environment, **made)
    assert result.returncode == 1
    assert next(iter(environment)) in result.stderr
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Returns the functions of setup.py, by name, which find the toolkit of fake_toolkit() and no GPU."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.chdir(ROOT)
    for name, value in {**fake_toolkit(tmp_path), "CVT_KERNELS_CUDA": "1"}.items():
        monkeypatch.setenv(name, value)
    functions = runpy.run_path("setup.py")
    functions["MACHINE"]["gpus_here"] = list
    return functions


def test_architectures_that_are_compiled_for(monkeypatch, setup):
    """The default is the GPUs here, else all but those that the toolkit is too old for."""
    cuda = setup["find_toolkit"]()
    everything = ["sm_80", "sm_90", "compute_90"]
    for gpus, codes in (([], everything), (["9.0"], ["sm_90"]), (["8.0", "12.0"], everything)):
        setup["MACHINE"]["gpus_here"] = lambda gpus=gpus: gpus
        assert [target.code for target in setup["architectures"](cuda)] == codes
    setup["MACHINE"]["gpus_here"] = lambda: ["9.0"]
    with monkeypatch.context() as patched:
        patched.setenv("CVT_KERNELS_CPU_SETS", "all")
        assert [target.code for target in setup["architectures"](cuda)] == everything
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert setup["architectures"](cuda) == []
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 9.0a 8.0+PTX")
    assert setup["architectures"](cuda) == [
        ("compute_90a", "sm_90a"), ("compute_80", "sm_80"), ("compute_80", "compute_80")
    ]  # fmt: skip


@pytest.mark.parametrize(("gpus", "sets", "built"), [([], "", False), (["9.0"], "", True), ([], "all", True)])
def test_cuda_kernels_are_for_machines_with_a_gpu_and_for_wheels(monkeypatch, setup, gpus, sets, built):
    monkeypatch.setenv("CVT_KERNELS_CUDA", "auto")
    monkeypatch.setenv("CVT_KERNELS_CPU_SETS", sets)
    setup["MACHINE"]["gpus_here"] = lambda: gpus
    setup["find_toolkit"].cache_clear()
    assert (setup["find_toolkit"]() is not None) is built


def test_the_gpus_here_are_those_of_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolkit.gpus_here() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '9.0\\n8.0\\n9.0\\n[N/A]\\n'\n")
    program.chmod(0o755)
    assert toolkit.gpus_here() == ["8.0", "9.0"]


def planned(setup, tmp_path, sets):
    """Returns the commands of a build for some instruction sets."""
    return setup["steps"](tmp_path / "build", tmp_path / "_C.so", ck.__version__, sets)


@needs_compiler
def test_every_source_of_csrc_is_compiled(tmp_path, setup):
    *objects, link = planned(setup, tmp_path, list(setup["SERVED"]))
    sources = [path for path in Path("csrc").rglob("*") if path.suffix in (".cpp", ".cu")]
    assert {path for step in objects for path in step.inputs if not path.endswith(("h", "cuh"))} == set(
        map(str, sources)
    )
    assert len({step.output for step in objects}) == len(objects)
    [together] = (step for step in objects if step.output.name == "cpu_operators.o")
    names = [line.split('"')[1] for line in Path(together.command[-3]).read_text().splitlines()]
    assert [f"csrc/{name}" for name in names] == [path for path in together.inputs if path.endswith(".cpp")]
    assert link.inputs == [str(step.output) for step in objects]


@needs_compiler
@pytest.mark.parametrize("strict", [False, True])
def test_a_warning_is_an_error_for_ci_only(tmp_path, monkeypatch, setup, strict):
    """Later compilers have more warnings, so that a user's build must pass with them."""
    monkeypatch.setenv("CVT_KERNELS_WERROR", "1" if strict else "")
    *objects, _ = planned(setup, tmp_path, ["plain"])
    assert any("nvcc" in step.command[0] for step in objects)
    for step in objects:
        assert ("-Werror" in " ".join(step.command)) is strict, step.command


# Instruction sets ------------------------------------------------------------------------------------------

#: The flags of CPUs, and the instruction sets that they have.
AVX2 = "fpu avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512dq avx512vl"
BF16 = f"{AVX512} avx512_vnni avx512_bf16"
AMX = "amx_tile amx_bf16 amx_int8"
CPUS = [
    ("fpu sse4_2 avx", "plain"),
    ("fpu sse4_2 avx2 fma", "plain"),  # lacks f16c
    (AVX2, "plain avx2"),
    (f"{AVX2} avx_vnni", "plain avx2 avx2_vnni"),
    (f"{AVX512} avx512cd", "plain avx2 avx512"),
    (f"{AVX512} avx512_vnni", "plain avx2 avx512 avx512_vnni"),
    (BF16, "plain avx2 avx512 avx512_vnni avx512_bf16"),
    (f"{BF16} avx512_fp16 avx512_vp2intersect", "plain avx2 avx512 avx512_vnni avx512_bf16"),
    (f"{BF16} avx512_fp16", "plain avx2 avx512 avx512_bf16 avx512_vnni"),  # slow pairs
    (f"{BF16} {AMX}", "plain avx2 avx512 avx512_vnni avx512_bf16 amx_bf16"),
    (f"{BF16} avx512_fp16 {AMX}", "plain avx2 avx512 avx512_bf16 avx512_vnni amx_bf16"),
]


@needs_x86
@pytest.mark.parametrize(("flags", "sets"), CPUS)
def test_a_build_in_a_checkout_is_for_what_the_cpu_has(monkeypatch, setup, flags, sets):
    """Whoever made the CPU: its flags decide, as Linux has them."""
    monkeypatch.setattr(Path, "read_text", lambda path, **_: f"vendor_id : any\nflags\t\t: {flags}\n")
    tiles = setup["MACHINE"]["cpu_sets_here"].__globals__
    monkeypatch.setitem(tiles, "may_use_tiles", lambda: True)
    assert setup["MACHINE"]["cpu_sets_here"]() == sets.split()
    assert setup["cpu_sets"]() == sets.split()[-1:]
    monkeypatch.setitem(tiles, "may_use_tiles", lambda: False)
    assert setup["MACHINE"]["cpu_sets_here"]() == [name for name in sets.split() if name != "amx_bf16"]


def test_a_cpu_without_flags_has_plain_loops(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", lambda path, **_: "Features : fp asimd\n")
        assert toolkit.cpu_sets_here() == ["plain"]
    monkeypatch.setattr(toolkit, "Path", lambda name: Path("/no/such/folder"))
    assert toolkit.cpu_sets_here() == ["plain"]


@needs_x86
def test_what_cvt_kernels_cpu_sets_asks_for(monkeypatch, setup):
    assert setup["cpu_sets"]() == toolkit.cpu_sets_here()[-1:]
    monkeypatch.setenv("CVT_KERNELS_CPU_SETS", "all")
    assert setup["cpu_sets"]() == list(toolkit.CPU_SETS)
    monkeypatch.setenv("CVT_KERNELS_CPU_SETS", "native")
    assert setup["cpu_sets"]() == toolkit.cpu_sets_here()[-1:]
    for names in ("avx512 avx2", "avx2,avx512", " avx512; avx2 "):
        monkeypatch.setenv("CVT_KERNELS_CPU_SETS", names)
        assert setup["cpu_sets"]() == ["avx2", "avx512"]


def tables_of_the_header():
    """Returns the loops of each macro of csrc/common/instruction_sets.h, and the instruction sets there."""
    header = (ROOT / "csrc/common/instruction_sets.h").read_text(encoding="utf-8").replace("\\\n", "")
    [sets] = re.findall(r"enum class InstructionSet \{(.*?)\}", header)
    tables = re.findall(r"#define (\w+_TABLES)\s*\{(&kernels_plain,.*?)\}", header)
    return {name: re.findall(r"&kernels_(\w+)", names) for name, names in tables}, sets.strip().split(", ")


@needs_x86
def test_the_loops_of_a_set_are_those_of_the_tables_of_the_operators(setup):
    tables, sets = tables_of_the_header()
    assert list(toolkit.CPU_SETS) == sets
    for macro, served in (
        ("KERNEL_TABLES", "SERVED"),
        ("PRODUCT_TABLES", "PRODUCTS_SERVED"),
        ("INTEGER_TABLES", "INTEGERS_SERVED"),
    ):
        loops = tables[macro] + tables[macro][-1:] * (len(sets) - len(tables[macro]))  # as choose() does
        assert [setup[served][name] for name in sets] == loops


@needs_compiler
def test_a_compiler_that_lacks_an_option_is_named_before_the_build(tmp_path, monkeypatch, setup):
    """GCC 10 knows no AVX-VNNI, for example: the message says what to do in one line."""
    monkeypatch.setitem(setup["LOOPS"], "plain", "-mno-such-option")
    with pytest.raises(SystemExit, match=r"^cvt_kernels._C was not built: .* is too old; CXX=.*$"):
        setup["try_compiler"](tmp_path, ["plain"])
    monkeypatch.setitem(setup["LOOPS"], "plain", "")
    setup["try_compiler"](tmp_path, list(setup["SERVED"]))


@needs_compiler
@pytest.mark.parametrize(
    ("environment", "advice"),
    [
        ({"CVT_KERNELS_CUDA": "0"}, ""),
        ({"CVT_KERNELS_CUDA": "0", "CVT_KERNELS_WERROR": "1"}, "; CVT_KERNELS_WERROR=0 lets warnings pass"),
        ({}, "; CVT_KERNELS_CUDA=0 builds without CUDA"),
    ],
)
@pytest.mark.parametrize("ninja", [True, False])
def test_a_build_that_fails_says_what_to_do(tmp_path, monkeypatch, setup, environment, advice, ninja):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    setup["find_toolkit"].cache_clear()  # setup.py has looked for it already
    if not ninja:
        which = shutil.which
        monkeypatch.setattr(
            shutil, "which", lambda *name, **path: None if name == ("ninja",) else which(*name)
        )
    fails = setup["Step"](tmp_path / "x.o", [], [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(SystemExit) as failure:
        setup["run"]([fails], tmp_path)
    expected = "cvt_kernels._C was not built: see what failed above; CXX=... names another compiler, such as"
    assert str(failure.value).startswith(expected)
    assert str(failure.value).endswith(f"clang from 16{advice}")


def test_without_the_headers_of_python_the_python_part_is_installed_alone(monkeypatch, setup):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "no-such-folder")
    monkeypatch.setitem(setup["why_not_buildable"].__globals__, "compiler", lambda: [sys.executable])
    assert "the headers of Python are not installed" in setup["why_not_buildable"]()


@needs_compiler
def test_a_source_is_compiled_again_for_the_headers_that_the_compiler_reads(setup):
    loops = sorted(Path("csrc").glob("*/*cpu_loops.cpp"))
    command = [*compiler(), "-std=c++20", "-MM", "-I", "csrc", *map(str, loops)]
    rules = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    read = [set(rule.split()[1:]) for rule in rules.replace("\\\n", " ").splitlines()]
    assert read == [{str(loop), *map(str, setup["headers_of"](loop))} for loop in loops]


@pytest.mark.usefixtures("_reload")
def test_nvcc_of_cuda_home_comes_before_that_of_the_path_and_pypi(tmp_path, monkeypatch):
    """The build and the library find the same one, which doctor names."""
    pypi, path, home = (tmp_path / name for name in ("site-packages/nvidia/cu13", "path", "home"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "site-packages"))
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", str(path / "bin"))
    assert toolkit.find_nvcc() is None
    for folder, version in ((pypi, "13.1"), (path, "13.2"), (home, "13.3")):
        fake_toolkit(folder, version)
        assert toolkit.find_nvcc() == str(folder / "bin/nvcc")
        machine.facts.cache_clear()
        assert machine.facts().nvcc == f"{version} ({folder / 'bin/nvcc'})"
