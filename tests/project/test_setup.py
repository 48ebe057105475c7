"""The build of the extension by setup.py, and its messages where it cannot build."""

import os
import runpy
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import setuptools

import cvt_kernels as ck
from cvt_kernels import machine, toolkit
from tests.checks import compiler, not_built

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"CVT_KERNELS_CUDA": "yes"}, "got 'yes', expected auto, 0 or 1"),
        ({"CVT_KERNELS_CUDA": "1", **NO_TOOLKIT}, "no nvcc was found"),
        ({"CVT_KERNELS_CUDA": "1", **NO_COMPILER}, "there is no C++ compiler 'no-such-compiler'"),
        ({"CVT_KERNELS_WERROR": "yes"}, "got 'yes', expected 0 or 1"),
    ],
)
def test_a_build_that_is_impossible_fails_with_one_sentence(environment, message):
    result = run_setup(**environment)
    assert result.returncode == 1
    assert next(iter(environment)) in result.stderr
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_a_toolkit_the_cpu_kernels_are_built():
    result = run_setup(**NO_TOOLKIT)
    assert result.returncode == 0
    assert "building without CUDA kernels: no nvcc was found" in result.stderr
    assert run_setup(CVT_KERNELS_CUDA="0").stderr == ""


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


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ({"version": "11.8"}, "is of CUDA 11.8, but 12.0 is the oldest that knows C++20"),
        ({"library": False}, "comes without libcudart_static.a"),
    ],
)
def test_a_toolkit_that_cannot_be_used(tmp_path, lacks, message):
    environment = fake_toolkit(tmp_path, **lacks)
    assert message in run_setup(**environment).stderr
    insisting = run_setup(**environment, CVT_KERNELS_CUDA="1")
    assert insisting.returncode == 1
    assert message in insisting.stderr


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        ("Hopper", "TORCH_CUDA_ARCH_LIST: got 'Hopper', expected versions such as 8.0;9.0+PTX"),
        ("9.0;12.0", "TORCH_CUDA_ARCH_LIST: got 12.0, which CUDA 13.0 does not know"),
    ],
)
def test_architectures_that_cannot_be_compiled_for(tmp_path, architectures, message):
    result = run_setup(**fake_toolkit(tmp_path), TORCH_CUDA_ARCH_LIST=architectures)
    assert result.returncode == 1
    assert message in result.stderr


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Returns the functions of setup.py, by name, which find the toolkit of fake_toolkit()."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.chdir(ROOT)
    for name, value in fake_toolkit(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.delenv("CVT_KERNELS_CUDA", raising=False)
    return runpy.run_path("setup.py")


def test_architectures_that_are_compiled_for(monkeypatch, setup):
    """The default leaves out those that the toolkit is too old for."""
    cuda = setup["find_toolkit"]()
    assert [target.code for target in setup["architectures"](cuda)] == ["sm_80", "sm_90", "compute_90"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert setup["architectures"](cuda) == []
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 9.0a 8.0+PTX")
    assert setup["architectures"](cuda) == [
        ("compute_90a", "sm_90a"), ("compute_80", "sm_80"), ("compute_80", "compute_80")
    ]  # fmt: skip


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler")
def test_every_source_of_csrc_is_compiled(tmp_path, setup):
    *objects, link = setup["steps"](tmp_path / "build", tmp_path / "_C.so", ck.__version__)
    sources = [path for path in Path("csrc").rglob("*") if path.suffix in (".cpp", ".cu")]
    assert {step.inputs[0] for step in objects} == set(map(str, sources))
    assert len({step.output for step in objects}) == len(objects)
    assert link.inputs == [str(step.output) for step in objects]


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler")
@pytest.mark.parametrize("strict", [False, True])
def test_a_warning_is_an_error_for_ci_only(tmp_path, monkeypatch, setup, strict):
    """Later compilers have more warnings, so that a user's build must pass with them."""
    monkeypatch.setenv("CVT_KERNELS_WERROR", "1" if strict else "")
    *objects, _ = setup["steps"](tmp_path / "build", tmp_path / "_C.so", ck.__version__)
    assert any("nvcc" in step.command[0] for step in objects)
    for step in objects:
        assert ("-Werror" in " ".join(step.command)) is strict, step.command


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler")
def test_a_source_is_compiled_again_for_the_headers_that_the_compiler_reads(setup):
    loops = sorted(Path("csrc").glob("*/*cpu_loops.cpp"))
    command = [*compiler(), "-std=c++20", "-MM", "-I", "csrc", *map(str, loops)]
    rules = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    read = [set(rule.split()[1:]) for rule in rules.replace("\\\n", " ").splitlines()]
    assert read == [{str(loop), *map(str, setup["headers_of"](loop))} for loop in loops]


def test_every_included_header_exists(setup):
    for source in map(Path, setup["SOURCES"] + setup["HEADERS"]):
        assert all(header.exists() for header in setup["headers_of"](source)), source


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
