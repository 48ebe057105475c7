"""The choice of backend, with made-up backends in place of those that later machines have."""

import pickle

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.backends import Implementation
from tests.checks import add_marked_backend, run_python


def test_auto_takes_the_first_backend_that_can_serve_and_records_why():
    x = torch.zeros(3)
    add_marked_backend("native", 10.0)
    add_marked_backend("triton", 20.0, devices=("cuda",))
    assert torch.equal(ck.gelu(x), x + 10)
    assert ck.fallbacks() == {("gelu", "triton"): "serves cuda tensors, not cpu"}
    add_marked_backend("triton", 20.0)
    assert torch.equal(ck.gelu(x), x + 20)


def test_a_backend_may_refuse_one_call_and_serve_another():
    def no_tanh(x, *, approximate):
        return "no tanh" if approximate == "tanh" else None

    add_marked_backend("native", 10.0, why_unsupported=no_tanh)
    x = torch.ones(3)
    assert torch.equal(ck.gelu(x), x + 10)
    assert torch.equal(ck.gelu(x, approximate="tanh"), ck.reference.gelu(x, approximate="tanh"))
    assert ck.fallbacks()["gelu", "native"] == "no tanh"
    with ck.use_backend("native"), pytest.raises(ck.BackendUnavailable, match=r"gelu.*'native'.*no tanh"):
        ck.gelu(x, approximate="tanh")


def test_the_machine_is_asked_once_and_not_before_the_first_call():
    asked = []
    add_marked_backend("triton", 10.0, why_unavailable=lambda device_type: asked.append("triton") or "no GPU")
    assert asked == []
    for _ in range(3):
        ck.gelu(torch.ones(3))
    assert asked == ["triton"]
    assert ck.fallbacks()["gelu", "triton"] == "no GPU"


def test_an_explicit_backend_is_used_or_raises():
    add_marked_backend("native", 10.0)
    x = torch.ones(3)
    with ck.use_backend("reference"):
        assert torch.equal(ck.gelu(x), ck.reference.gelu(x))
    with ck.use_backend("triton"), pytest.raises(ck.BackendUnavailable) as caught:
        ck.gelu(x)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.operator, error.backend, error.reason) == (
        "gelu",
        "triton",
        "not implemented in this version",
    )
    assert str(error) == str(caught.value)


def test_use_backend_as_statement_and_nested():
    assert backends.requested_backend() == "auto"
    with ck.use_backend("reference"):
        with ck.use_backend("native"):
            assert backends.requested_backend() == "native"
        assert backends.requested_backend() == "reference"
    ck.use_backend("triton")
    assert backends.requested_backend() == "triton"
    again = ck.use_backend("reference")
    for _ in range(2):
        with again:
            assert backends.requested_backend() == "reference"
        assert backends.requested_backend() == "triton"
    with pytest.raises(ZeroDivisionError), ck.use_backend("auto"):
        _ = 1 / 0
    assert backends.requested_backend() == "triton"


def test_unknown_names():
    with pytest.raises(ValueError, match="backend: got 'cuda', expected one of auto, triton"):
        ck.use_backend("cuda")
    with pytest.raises(ValueError, match="operator: got 'conv'"):
        backends.register("conv", "native", Implementation(abs))
    with pytest.raises(ValueError, match="backend: got 'auto'"):
        backends.register("gelu", "auto", Implementation(abs))
    assert backends.requested_backend() == "auto"


def test_environment_variable():
    call = "import torch, cvt_kernels as ck; ck.gelu(torch.ones(2)); print('served')"
    assert run_python(call, CVT_KERNELS_BACKEND="reference").stdout == "served\n"
    refused = run_python(call, CVT_KERNELS_BACKEND="triton")
    assert refused.returncode == 1
    assert "BackendUnavailable: gelu: backend 'triton' is unavailable" in refused.stderr
    assert "CVT_KERNELS_BACKEND: got 'cuda'" in run_python(call, CVT_KERNELS_BACKEND="cuda").stderr


def test_import_asks_the_machine_nothing():
    code = """
import sys
import subprocess
subprocess.run = subprocess.Popen = None
import torch
torch.cuda.is_available = torch.cuda.device_count = None
import cvt_kernels
from cvt_kernels import backends, machine
assert machine.facts.cache_info().currsize == backends._ask_why_unavailable.cache_info().currsize == 0
print(sorted({"triton", "transformers", "cvt", "PIL", "sklearn"} & set(sys.modules)))
"""
    result = run_python(code)
    assert result.stdout == "[]\n", result.stderr


def test_compiled_code_follows_the_chosen_backend():
    add_marked_backend("native", 10.0, why_unsupported=lambda x, **_: "too long" if x.shape[0] > 5 else None)
    compiled = torch.compile(lambda x: 2 * ck.gelu(x), fullgraph=True, backend="aot_eager", dynamic=False)
    x = torch.ones(3)
    assert torch.equal(compiled(x), 2 * (x + 10))
    with ck.use_backend("reference"):
        assert torch.equal(compiled(x), 2 * ck.reference.gelu(x))
    assert torch.equal(compiled(x), 2 * (x + 10))
    long = torch.ones(6)
    assert torch.equal(compiled(long), 2 * ck.reference.gelu(long))
