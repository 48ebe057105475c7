"""What setup.py builds and what it says when it cannot; loading of what it built."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
import torch

import cvt_kernels as ck
from cvt_kernels import backends, machine
from tests.checks import not_built

ROOT = Path(__file__).parents[2]


def run_setup(**environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "--version"],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip


def test_without_a_compiler_the_python_part_is_installed_alone():
    result = run_setup(CXX="no-such-compiler")
    assert result.returncode == 0
    assert (
        "without the extension cvt_kernels._C: there is no C++ compiler 'no-such-compiler'" in result.stderr
    )


def test_what_cannot_be_built_is_said_in_one_sentence(tmp_path):
    no_toolkit = {"CUDA_HOME": str(tmp_path), "CUDA_PATH": "", "PATH": path_of_the_compiler(tmp_path)}
    for environment, message in (
        ({"CVT_KERNELS_CUDA": "yes"}, "CVT_KERNELS_CUDA: got 'yes', expected auto, 0 or 1"),
        ({"CVT_KERNELS_CUDA": "1", **no_toolkit}, "CVT_KERNELS_CUDA=1: no nvcc was found"),
        (
            {"CVT_KERNELS_CUDA": "1", "CXX": "no-such-compiler"},
            "CVT_KERNELS_CUDA=1: the extension cannot be built: there is no C++ compiler 'no-such-compiler'",
        ),
    ):
        result = run_setup(**environment)
        assert result.returncode == 1
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_without_a_toolkit_the_cpu_kernels_are_built(tmp_path):
    result = run_setup(CUDA_HOME=str(tmp_path), CUDA_PATH="", PATH=path_of_the_compiler(tmp_path))
    assert result.returncode == 0
    assert "building without CUDA kernels: no nvcc was found" in result.stderr
    assert run_setup(CVT_KERNELS_CUDA="0").stderr == ""


def path_of_the_compiler(tmp_path):
    """A PATH that holds the compiler and nothing else."""
    (tmp_path / "c++").symlink_to(shutil.which("c++") or "/nowhere/c++")
    return str(tmp_path)


NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release {version}, V{version}.1" ;;
  --list-gpu-arch) printf 'compute_80\\ncompute_90\\n' ;;
  --dryrun) echo '#$ TOP={top}' >&2; echo '#$ LIBRARIES= "-L{top}/lib/stubs"' >&2 ;;
esac
"""


def toolkit(tmp_path, version="13.0", library=True):
    """A CUDA toolkit that answers questions and compiles nothing."""
    for folder in ("bin", "lib"):
        (tmp_path / folder).mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(version=version, top=tmp_path))
    nvcc.chmod(0o755)
    if library:
        (tmp_path / "lib" / "libcudart_static.a").touch()
    return {"CUDA_HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"version": "11.8"}, "is of CUDA 11.8, but 12.0 is the oldest that knows C++20"),
        ({"library": False}, "comes without libcudart_static.a"),
    ],
)
def test_a_toolkit_that_cannot_be_used(tmp_path, found, message):
    environment = toolkit(tmp_path, **found)
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
    result = run_setup(**toolkit(tmp_path), TORCH_CUDA_ARCH_LIST=architectures)
    assert result.returncode == 1
    assert message in result.stderr


def test_architectures(tmp_path, monkeypatch):
    """The default leaves out what the toolkit is too old for."""
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.chdir(ROOT)
    for name, value in toolkit(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    setup = runpy.run_path("setup.py")
    found = setup["find_toolkit"]()
    assert [target.code for target in setup["architectures"](found)] == ["sm_80", "sm_90", "compute_90"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert setup["architectures"](found) == []
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5 9.0a 8.0+PTX")
    assert setup["architectures"](found) == [
        ("compute_90a", "sm_90a"), ("compute_80", "sm_80"), ("compute_80", "compute_80")
    ]  # fmt: skip


needs_extension = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


@needs_extension
def test_build_facts():
    facts = machine.load_extension()
    assert facts.version == ck.__version__
    assert facts.compiler
    assert bool(facts.cuda) == bool(facts.architectures)
    assert ("no CUDA" in machine.facts().native) == (not facts.cuda)


@pytest.fixture
def _reload(monkeypatch):
    """As in a process that has not loaded the extension."""
    caches = (machine.load_extension, backends._ask_why_unavailable, machine.facts)
    for cache in caches:
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@needs_extension
@pytest.mark.usefixtures("_reload")
def test_an_extension_that_does_not_load_says_why(monkeypatch):
    def import_module(name):
        raise ImportError(f"{name}: undefined symbol: aoti_torch_x")

    monkeypatch.setattr(machine.importlib, "import_module", import_module)
    x = torch.ones(3)
    with pytest.raises(
        machine.ExtensionError, match=r"does not load; build it again.*undefined symbol: aoti"
    ):
        ck.bias_gelu(x, x)
    with ck.use_backend("reference"):
        ck.bias_gelu(x, x)
    report = ck.doctor()
    assert "undefined symbol: aoti_torch_x" in report
    assert "native: the extension does not load, see above" in report


@pytest.mark.usefixtures("_reload")
def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    ck.bias_gelu(torch.ones(3), torch.ones(3))
    reason = ck.fallbacks()["bias_gelu", "native"]
    assert "not part of this installation" in reason
    assert "no C++ compiler 'no-such-compiler' here" in reason
    assert "native   not built" in ck.doctor()


@pytest.mark.parametrize(
    ("toolkit", "architectures", "capability", "driver", "reason"),
    [
        ("13.0", ("sm_80", "sm_90"), (8, 6), 13, None),
        ("13.0", ("sm_80", "compute_90"), (12, 0), 13, None),
        ("", (), (9, 0), 13, "no CUDA toolkit"),
        ("13.0", ("sm_90",), (8, 0), 13, "built for sm_90, which a GPU cannot run"),
        ("13.0", ("sm_90a",), (10, 0), 13, "built for sm_90a"),
        ("13.0", ("sm_86",), (8, 0), 13, "built for sm_86"),
        ("13.0", ("sm_90",), (9, 0), 0, "there is no NVIDIA driver"),
        ("13.0", ("sm_90",), (9, 0), 12, "built with CUDA 13.0, but the driver serves CUDA 12 at most"),
    ],
)
def test_gpus_that_the_extension_was_not_built_for(
    monkeypatch, toolkit, architectures, capability, driver, reason
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(machine, "_cuda_driver", lambda: driver)
    got = machine._why_cuda_unavailable(toolkit, architectures)
    assert got is None if reason is None else reason in got
