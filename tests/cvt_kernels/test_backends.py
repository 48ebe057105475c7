"""The choice of backends, by request and by cache entry, with made-up ones besides the project's."""

import _thread
import pickle
import threading

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends, choose
from cvt_kernels.backends import Implementation
from cvt_kernels.ops.cards import call_public
from tests.checks import add_marked_backend, needs_extension, remember_entry
from tests.contract.examples import EXAMPLES, ROUNDING, example
from tests.fuzz.cases import CHOICES
from tests.processes import run_python


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from torch.nn.functional import renamed", "cannot import name 'renamed'"),
        ("import torch\ntorch.nn.functional.renamed", "no attribute 'renamed'"),
        ("import torch\ntorch.relu(torch.ones(1), renamed=1)", "renamed"),
    ],
)
def test_a_backend_that_cannot_be_imported_is_unavailable(tmp_path, monkeypatch, source, said):
    """Other versions of what it imports have other names and parameters."""
    name = f"kernels_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(f"{source}\ndef gelu(call): return call.x + 10\n")
    monkeypatch.syspath_prepend(tmp_path)
    backends.register("gelu", "cpu", Implementation(f"{name}:gelu"))
    x = torch.ones(3)
    with ck.use_backend("cpu", "reference"):
        assert torch.equal(ck.gelu(x), ck.reference.gelu(x))
    assert said in ck.fallbacks()["gelu", "cpu"]
    with ck.use_backend("cpu"), pytest.raises(ck.BackendUnavailable, match=said):
        ck.gelu(x)


def no_tanh(x, bias=None, *, approximate):
    return "no tanh" if approximate == "tanh" else None


@pytest.mark.parametrize("names", [("auto",), ("cpu", "reference")])
def test_a_backend_may_refuse_one_call_and_serve_another(names):
    add_marked_backend("cpu", 10.0, why_unsupported=no_tanh)
    x = torch.ones(3)
    remember_entry("cpu", "gelu", x, approximate="none")
    remember_entry("cpu", "gelu", x, approximate="tanh")
    with ck.use_backend(*names):
        assert torch.equal(ck.gelu(x), x + 10)
        assert torch.equal(ck.gelu(x, approximate="tanh"), ck.reference.gelu(x, approximate="tanh"))
    assert ck.fallbacks()["gelu", "cpu"] == "no tanh"
    with ck.use_backend("cpu"), pytest.raises(ck.BackendUnavailable, match=r"gelu.*'cpu'.*no tanh"):
        ck.gelu(x, approximate="tanh")


def test_a_cached_choice_whose_backend_refuses_other_numbers_is_noticed_by_the_tests():
    add_marked_backend("cpu", 10.0, why_unsupported=lambda x, *_, **__: "too large" if x[0] > 5 else None)
    with ck.use_backend("cpu", "reference"):
        ck.gelu(torch.ones(3))
        with pytest.raises(AssertionError, match="gelu: cached for a call that its backend refuses: too"):
            ck.gelu(torch.full((3,), 9.0))


def test_an_explicit_backend_is_used_or_raises():
    add_marked_backend("cpu", 10.0)
    x = torch.ones(3)
    with ck.use_backend("reference"):
        assert torch.equal(ck.gelu(x), ck.reference.gelu(x))
    with ck.use_backend("cpu"):
        assert torch.equal(ck.gelu(x), x + 10)
    with ck.use_backend("triton"), pytest.raises(ck.BackendUnavailable) as caught:
        ck.gelu(x)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.operator, error.backend, error.reason) == (
        "gelu",
        "triton",
        "not implemented in this version",
    )
    assert str(error) == str(caught.value)


# Several names --------------------------------------------------------------------------------------------


def test_names_are_an_order_of_preference():
    add_marked_backend("cpu", 10.0)
    add_marked_backend("triton", 20.0)
    x = torch.ones(3)
    for names, mark in ((("cpu", "triton"), 10), (("triton", "cpu"), 20), (("triton", "triton"), 20)):
        with ck.use_backend(*names):
            assert torch.equal(ck.gelu(x), x + mark)
    with ck.use_backend("sdpa", "cpu", "triton"):
        assert torch.equal(ck.gelu(x), x + 10)
    assert ck.fallbacks() == {("gelu", "sdpa"): "not implemented in this version"}


def test_an_operator_without_kernels_of_ours_is_not_concerned_by_requests_for_these():
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    for names in (("cpu",), ("triton",), ("triton", "cpu")):
        with ck.use_backend(*names):
            assert torch.equal(ck.linear(x, weight), F.linear(x, weight))
            assert choose.chosen_backends("linear", x.device) == [("reference", "requested")]
    with ck.use_backend("float32"), pytest.raises(ck.BackendUnavailable, match="serves 16-bit tensors only"):
        ck.linear(x, weight)
    with (
        ck.use_backend("convolution"),
        pytest.raises(ck.BackendUnavailable, match=r"gelu: .*not implemented"),
    ):
        ck.gelu(x)


@pytest.mark.parametrize(
    "names",
    [
        (),
        (None,),
        (1,),
        ("native",),
        ("cpu", "native"),
        ("auto", "cpu"),
        ("cpu", "auto"),
        ("auto", "auto"),
    ],
    ids=str,
)
def test_names_that_cannot_be_requested(names):
    with pytest.raises(
        ValueError, match=f"^backend: got '{', '.join(map(str, names))}', expected auto alone or"
    ):
        ck.use_backend(*names)
    assert backends.requested_backends() == ("auto",)


def test_the_backward_in_a_thread_of_pytorch_is_served_as_the_forward():
    seen = []

    def backward_elsewhere(start):
        """Runs a backward that notes what is requested in it, in a thread of Python's or in another one."""
        done = threading.Event()
        x = torch.ones(2, requires_grad=True)
        y = 2 * x
        y.register_hook(lambda _: seen.append(backends.requested_backends()))

        def run():
            y.sum().backward()
            done.set()

        start(run)
        assert done.wait(60)

    def start_outside_of_python(run):
        _thread.start_new_thread(run, ())

    with ck.use_backend("reference"):
        with ck.use_backend("triton", "reference"):
            backward_elsewhere(start_outside_of_python)
            backward_elsewhere(lambda run: threading.Thread(target=run).start())
        backward_elsewhere(start_outside_of_python)
    backward_elsewhere(start_outside_of_python)
    assert seen == [("triton", "reference"), ("auto",), ("reference",), ("auto",)]


@needs_extension
def test_names_in_the_environment_variable():
    code = """
import torch, cvt_kernels as ck
ck.gelu(torch.ones(2))
ck.linear(torch.ones(2, 3), torch.ones(4, 3))
print(ck.fallbacks())
"""
    result = run_python(code, CVT_KERNELS_BACKEND="triton,cpu")
    assert result.stdout == "{('gelu', 'triton'): 'not implemented in this version'}\n", result.stderr
    result = run_python(code, CVT_KERNELS_BACKEND="triton, native")
    assert "ValueError: CVT_KERNELS_BACKEND: got 'triton, native', expected auto alone" in result.stderr


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
slow = {"triton", "transformers", "cvt", "PIL", "sklearn", "cvt_kernels.tuning.clock"}
print(sorted(slow & set(sys.modules)))
"""
    result = run_python(code)
    assert result.stdout == "[]\n", result.stderr


# What is chosen -------------------------------------------------------------------------------------------


def test_a_backend_that_is_registered_or_replaced_is_asked_for_again():
    x = torch.ones(3)
    add_marked_backend("cpu", 10.0)
    remember_entry("cpu", "gelu", x, approximate="none")
    assert torch.equal(ck.gelu(x), x + 10)
    with backends.replaced(lambda *_: Implementation(lambda call: call.x + 50)):
        assert torch.equal(ck.gelu(x), x + 50)
    assert torch.equal(ck.gelu(x), x + 10)
    add_marked_backend("cpu", 30.0)
    assert torch.equal(ck.gelu(x), x + 30)


# CacheKeys ------------------------------------------------------------------------------------------------


def cache_key_of(operator, **settings):
    record = example(operator, "reference", "usual", **settings).call.record
    return choose.cache_key(operator, **record._asdict())


@pytest.mark.parametrize("operator", backends.operators)
def test_a_cache_key_depends_on_the_class_of_sizes(operator):
    size = "rows" if "rows" in EXAMPLES[operator]["usual"] else "batch"
    others = {name: CHOICES[operator][name][2] for name in ("eps", "scale") if name in CHOICES[operator]}
    cache_keys = {n: cache_key_of(operator, **{size: n}) for n in range(4, 65, 4)}
    assert 3 <= len(set(cache_keys.values())) <= 5  # operators on rows count two numbers of elements
    for n in (4, 16):
        assert cache_keys[n].startswith(f"{operator}, forward, float32, ")
        assert cache_keys[n] == cache_key_of(operator, **{size: n}, **others)
        assert cache_keys[n] != cache_keys[4 * n]


@pytest.mark.parametrize("operator", backends.operators)
def test_calls_with_other_costs_have_other_cache_keys(operator):
    changes = [{}, {"dtype": "bfloat16"}, {"channels": 9}]
    if operator not in ROUNDING:
        changes.append({"gradient": "all"})
    if "height" in EXAMPLES[operator]["usual"]:
        changes.append({"height": 40})
    cache_keys = [cache_key_of(operator, **change) for change in changes]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            cache_keys.append(cache_key_of(operator))
    assert len(set(cache_keys)) == len(cache_keys)


@pytest.mark.parametrize("operator", backends.operators)
def test_tensors_without_numbers_are_served(operator):
    call = example(operator, "reference", "usual").call.map(lambda tensor: tensor.to("meta"))
    out = call_public(operator, call.record)
    assert all(t.is_meta for t in (out if isinstance(out, tuple) else (out,)))
