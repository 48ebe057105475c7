"""The facts of the machine, the loading of the extension, and the reasons why there is none."""

from types import SimpleNamespace

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import machine
from tests.checks import needs_extension


@needs_extension
def test_the_facts_of_the_build():
    facts = machine.load_extension()
    assert facts.version == ck.__version__
    assert facts.compiler
    assert bool(facts.cuda) == bool(facts.architectures)
    assert ("no CUDA" in machine.facts().extension) == (not facts.cuda)
    assert f", CPU {facts.cpu_sets.strip()}" in machine.facts().extension


def test_the_instruction_sets_of_the_build_and_the_newest_if_it_lacks_that(monkeypatch):
    monkeypatch.setattr(machine, "cpu_sets_here", lambda: ["plain", "avx2", "avx512"])
    assert machine._cpu_sets(["plain", "avx2", "avx512", "amx_bf16"]) == "plain avx2 avx512 amx_bf16"
    assert machine._cpu_sets(["avx512"]) == "avx512"
    assert machine._cpu_sets(["plain"]) == "plain (built here again: avx512)"


@pytest.mark.usefixtures("_reload")
def test_a_build_for_another_cpu_serves_nothing_and_says_why(monkeypatch):
    facts = SimpleNamespace(cpu_sets=" avx512_bf16 amx_bf16 ")
    monkeypatch.setattr(machine, "cpu_sets_here", lambda: ["plain", "avx2"])
    monkeypatch.setattr(machine, "has_extension", lambda: True)
    monkeypatch.setattr(machine, "load_extension", lambda: facts)
    reason = machine.why_extension_unavailable("cpu")
    assert reason.startswith("the extension was built for avx512_bf16 amx_bf16, which this CPU lacks; run ")
    assert machine.facts().extension == reason


@needs_extension
@pytest.mark.usefixtures("_reload")
def test_an_extension_that_does_not_load_says_why(monkeypatch):
    actual = machine.importlib.import_module

    def import_module(name, package=None):
        if name == "cvt_kernels._C":
            raise ImportError(f"{name}: undefined symbol: aoti_torch_x")
        return actual(name, package)

    monkeypatch.setattr(machine.importlib, "import_module", import_module)
    x = torch.ones(3)
    with pytest.raises(
        machine.ExtensionError, match=r"does not load; build it again.*undefined symbol: aoti"
    ):
        ck.gelu(x, x)
    with ck.use_backend("reference"):
        ck.gelu(x, x)
    report = ck.doctor()
    assert "undefined symbol: aoti_torch_x" in report
    assert "cpu: the extension does not load, see above" in report


@pytest.mark.usefixtures("_reload")
def test_the_reason_where_the_extension_is_not_built(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    ck.gelu(torch.ones(3), torch.ones(3))
    reason = ck.fallbacks()["gelu", "cpu"]
    assert "the extension cvt_kernels._C is not installed" in reason
    assert "no C++ compiler 'no-such-compiler' here" in reason
    assert "compiled not built" in ck.doctor()


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that puts GPUs into this machine, and an extension for architectures."""

    def put(*capabilities, architectures="sm_80,sm_90", toolkit="13.0"):
        facts = SimpleNamespace(architectures=architectures, cuda=toolkit, cuda_request="auto")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
        monkeypatch.setattr(machine, "load_extension", lambda: facts)
        monkeypatch.setattr(machine, "cuda_driver_version", lambda: 13000)
        monkeypatch.setattr(machine, "has_extension", lambda: True)
        monkeypatch.setattr(machine, "INTERPRETING", False)

    machine.why_gpu_unsupported.cache_clear()
    yield put
    machine.why_gpu_unsupported.cache_clear()


@pytest.mark.parametrize(
    ("architectures", "capability", "reason"),
    [
        ("sm_80,sm_90", (8, 6), None),
        ("sm_80,compute_90", (12, 0), None),
        ("sm_90", (8, 0), "built for sm_90, which GPU 0 cannot run"),
        ("sm_90a", (10, 0), "built for sm_90a"),
        ("sm_86", (8, 0), "built for sm_86"),
    ],
)
def test_gpus_that_the_extension_was_not_built_for(gpus, architectures, capability, reason):
    gpus(capability, architectures=architectures)
    for got in (machine.why_gpu_unsupported("cuda", 0), machine.why_extension_unavailable("cuda")):
        assert got is None if reason is None else reason in got
    assert machine.why_gpu_unsupported("triton", 0) is None


@pytest.mark.parametrize(
    ("built_with", "driver", "reason"),
    [
        ("13.0", 13, None),
        ("", 13, "no NVIDIA GPU or no nvcc"),
        ("13.0", 0, "there is no NVIDIA driver"),
        ("13.0", 12, "built with CUDA 13.0, but the driver serves CUDA 12 at most"),
    ],
)
def test_drivers_that_the_extension_was_not_built_for(gpus, monkeypatch, built_with, driver, reason):
    gpus((9, 0), toolkit=built_with)
    monkeypatch.setattr(machine, "cuda_driver_version", lambda: 1000 * driver)
    got = machine.why_extension_unavailable("cuda")
    assert got is None if reason is None else reason in got


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((7, 5), None, "the kernels need a GPU of compute capability 8.0 or newer, GPU 0 has 7.5"),
        ((9, 0), "7.0", "there are kernels for NVIDIA's GPUs only, not for GPU 0"),
    ],
)
def test_gpus_that_no_kernel_serves_are_refused_in_one_sentence(gpus, monkeypatch, capability, hip, reason):
    gpus(capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    for ask in (machine.why_triton_unavailable, machine.why_extension_unavailable):
        assert ask("cuda") == reason


@pytest.mark.parametrize(
    ("capability", "version", "is_right"),
    [
        ((10, 0), "3.6.0", False),
        ((10, 3), "3.7.0+git123", False),
        ((10, 0), "3.7.1", True),
        ((10, 3), "3.10.0", True),
        ((9, 0), "3.6.0", True),
        ((12, 0), "3.6.0", True),
    ],
)
def test_a_triton_of_wrong_products_is_refused(gpus, monkeypatch, capability, version, is_right):
    gpus(capability, architectures="sm_80,compute_90")
    monkeypatch.setattr(machine, "installed_version", lambda package: version)
    reason = machine.why_gpu_unsupported("triton", 0)
    assert reason == machine._why_no_gpu_runs("triton")
    if is_right:
        assert reason is None
    else:
        assert reason == f"Triton below 3.7.1 computes wrong products on GPU 0; {version} is installed"
    assert machine.why_gpu_unsupported("cuda", 0) is None
