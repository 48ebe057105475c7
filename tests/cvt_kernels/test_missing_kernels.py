"""The warning of kernels that would serve a machine but are not installed."""

import platform
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt.tools import commands
from cvt_kernels import machine
from tests.processes import run_python
from tests.upstream import huggingface

TINY = CvTConfig(embed_dims=(16, 32, 64), depths=(1, 1, 1), num_heads=(1, 1, 1))
BUILD = "pip install --no-build-isolation ."


@pytest.fixture
def at(monkeypatch):
    """Returns a function that makes this machine another one, where nothing has been said yet."""
    find_spec = machine.importlib.util.find_spec
    monkeypatch.setattr(machine, "_said_missing", False)
    monkeypatch.delenv("CXX", raising=False)

    def become(
        system="Linux", processor="x86_64", *,
        extension=False, compiler=True, gpu=None, triton=True, toolkit="13.0", request="auto",
    ):  # fmt: skip
        installed = {"cvt_kernels._C": extension, "triton": triton}

        def find(name, package=None):
            return (True if installed[name] else None) if name in installed else find_spec(name, package)

        facts = SimpleNamespace(
            cuda=toolkit, architectures="sm_90" if toolkit else "", cuda_request=request, cpu_sets=" plain "
        )
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "machine", lambda: processor)
        monkeypatch.setattr(machine.importlib.util, "find_spec", find)
        monkeypatch.setattr(machine.shutil, "which", lambda name, **_: "/usr/bin/c++" if compiler else None)
        load_extension = Mock(return_value=facts)
        if isinstance(extension, Exception):
            load_extension.side_effect = extension
        monkeypatch.setattr(machine, "load_extension", load_extension)
        monkeypatch.setattr(machine, "find_nvcc", lambda: None)
        monkeypatch.setattr(machine, "cuda_driver_version", lambda: 13000)
        monkeypatch.setattr(torch.version, "cuda", "13.0" if gpu else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpu is not None))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")

    machine.why_gpu_unsupported.cache_clear()
    yield become
    machine.why_gpu_unsupported.cache_clear()


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ({}, ["_C is not installed: pip leaves it out where the build does not see torch", BUILD]),
        ({"processor": "aarch64"}, ["_C is not installed", BUILD]),
        ({"compiler": False}, ["there is no C++ compiler 'c++' here; install one", BUILD]),
        ({"gpu": (9, 0), "extension": True, "toolkit": ""}, ["no NVIDIA GPU or no nvcc; install one", BUILD]),
        ({"gpu": (8, 0), "extension": True}, ["built for sm_90, which a GPU cannot run", BUILD]),
        ({"gpu": (9, 0), "triton": False}, ["_C is not installed", "triton is not installed; 'pip install"]),
        ({"extension": True}, []),
        ({"extension": True, "gpu": (9, 0)}, []),
        # They would not serve there.
        ({"system": "Darwin", "processor": "arm64"}, []),
        ({"system": "Windows", "processor": "AMD64", "gpu": (9, 0), "triton": False}, []),
        ({"processor": "riscv64"}, []),
        ({"extension": True, "triton": False}, []),
        ({"extension": True, "gpu": (7, 5), "toolkit": "", "triton": False}, []),
        # They were left out on purpose, or do not load, which the first call says.
        ({"extension": True, "gpu": (9, 0), "toolkit": "", "request": "0"}, []),
        ({"extension": machine.ExtensionError("undefined symbol"), "gpu": (9, 0)}, []),
    ],
)  # fmt: skip
def test_kernels_that_are_missing_are_named_with_the_command_that_mends_it(at, where, says):
    at(**where)
    reason = machine.why_kernels_are_missing()
    assert (reason is None) == (not says)
    assert "\n" not in str(reason)
    for words in says:
        assert words in reason


@pytest.mark.parametrize("first", [lambda: create_model(TINY), lambda: ck.accelerate(huggingface())])
def test_the_first_model_warns_once_in_a_process_and_points_to_its_line(at, first):
    at()
    with pytest.warns(
        RuntimeWarning, match="kernels are missing, and PyTorch's own operators serve"
    ) as caught:
        first()
    assert [warning.filename for warning in caught] == [__file__]
    create_model(TINY)
    ck.accelerate(huggingface())


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(at):
    at()
    model = huggingface()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeWarning):
        ck.accelerate(model)
    assert [type(module) for module in model.modules()] == classes


def test_commands_say_it_on_one_line(at, capsys, monkeypatch):
    at()
    monkeypatch.setattr("cvt.tools.commands.bench._bench", lambda arguments: print("measured"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert commands.main(["bench"]) == 0
        assert commands.main(["bench"]) == 0
    out, err = capsys.readouterr()
    assert out == "measured\n" * 2
    [line] = err.splitlines()
    assert line.startswith(
        "cvt bench: kernels are missing, and PyTorch's own operators serve in their place: "
    )


def test_everything_but_the_compilation_for_gpus_works_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch, cvt, cvt.tools.commands, cvt.tools.training, cvt_kernels as ck
from cvt_kernels import machine
machine.torch.cuda.is_available = lambda: True
assert machine.why_triton_unavailable("cuda").startswith("the package triton is not installed")
machine.torch.cuda.is_available = lambda: False
tiny = cvt.CvTConfig(embed_dims=(16, 32, 64), depths=(1, 1, 1), num_heads=(1, 1, 1))
cvt.create_model(tiny)(torch.zeros(2, 3, 64, 64)).sum().backward()
assert cvt.tools.commands.main(["compile"]) == 2
print(ck.doctor())
"""
    result = run_python(code, TRITON_INTERPRET="0")
    assert result.returncode == 0, result.stderr
    assert "triton: there is no NVIDIA GPU" in result.stdout
    assert result.stderr == (
        "cvt compile: error: triton is not installed; pip install triton, or in a checkout of cvt-kernels "
        "pip install --no-build-isolation '.[gpu]'\n"
    )
