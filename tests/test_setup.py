"""What setup.py builds and what it says when it cannot; loading of what it built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checks import not_built

import cvt_kernels as ck
from cvt_kernels import runtime

ROOT = Path(__file__).parents[1]


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


@pytest.mark.parametrize(("value", "message"), [("1", "no CUDA kernels"), ("yes", "expected auto, 0 or 1")])
def test_cuda_that_cannot_be_built(value, message):
    result = run_setup(CVT_KERNELS_CUDA=value)
    assert result.returncode == 1
    assert message in result.stderr.splitlines()[-1]


needs_extension = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


@needs_extension
def test_build_facts():
    facts = runtime.load_extension()
    assert facts.version == ck.__version__
    assert facts.compiler
    assert (facts.cuda, facts.architectures) == ("", ())


@pytest.fixture
def _reload(monkeypatch):
    """As in a process that has not loaded the extension."""
    caches = (runtime.load_extension, runtime._ask_missing, runtime.machine)
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

    monkeypatch.setattr(runtime.importlib, "import_module", import_module)
    x = torch.ones(3)
    with pytest.raises(
        runtime.ExtensionError, match=r"does not load; build it again.*undefined symbol: aoti"
    ):
        ck.bias_gelu(x, x)
    with ck.use_backend("reference"):
        ck.bias_gelu(x, x)
    report = ck.doctor()
    assert "undefined symbol: aoti_torch_x" in report
    assert "native: the extension does not load, see above" in report


@pytest.mark.usefixtures("_reload")
def test_without_the_extension(monkeypatch):
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    ck.bias_gelu(torch.ones(3), torch.ones(3))
    reason = ck.step_downs()["bias_gelu", "native"]
    assert "not part of this installation" in reason
    assert "no C++ compiler 'no-such-compiler' here" in reason
    assert "native   not built" in ck.doctor()
