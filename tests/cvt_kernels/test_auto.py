"""``auto``: the first call of each cache key autotunes; later calls and other processes use its entry."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from filelock import FileLock
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cvt_kernels as ck
from cvt_kernels import autotune, backends, dispatch, machine, reference
from cvt_kernels.autotune import limit, tuner
from tests.checks import Terminal, implementation, recorded_operators, remember_entry
from tests.contract.examples import example
from tests.processes import Child

CPU = torch.device("cpu")


def slow(function, seconds=0.01):
    def sleeps(*args, **kwargs):
        if not torch.compiler.is_compiling():
            time.sleep(seconds)
        return function(*args, **kwargs)

    return sleeps


@pytest.fixture
def tuned(monkeypatch, tuning) -> list[str]:
    """Turns autotuning on and makes PyTorch's own GELU slow; lists the cache keys as they are tuned."""
    cache_keys = []
    tune = tuner.tune

    def noted(task, *how):
        cache_keys.append(task.cache_key)
        return tune(task, *how)

    monkeypatch.setattr(tuner, "tune", noted)
    backends.register("gelu", "reference", implementation("gelu", slow(reference.gelu)))
    return cache_keys


@contextlib.contextmanager
def new_process():
    """Lets the block run with what is on disk only."""
    backends.forget()
    autotune.forget()
    yield


def answers(device=CPU) -> dict[str, autotune.Entry]:
    return autotune.cache_for(device).entries()


def only_answer() -> autotune.Entry:
    [entry] = answers().values()
    return entry


def register(function, backend="cpu", operator="gelu", **conditions) -> list[int]:
    """Registers a backend; returns a list that grows by one at each of its calls."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return function(*args, **kwargs)

    backends.register(operator, backend, implementation(operator, counted, **conditions))
    return calls


def remember(entry, x) -> str:
    """Caches an entry of GELU; returns its cache key."""
    asked = dispatch.cache_key("gelu", x, approximate="none")
    autotune.cache_for(CPU).remember({asked: entry})
    return asked


MEASUREMENT = autotune.Measurement(0.0, 0.0, 1e-6, None, None)


# Wrong kernels --------------------------------------------------------------------------------------------


def _one_wrong(x, *, approximate):
    out = reference.gelu(x, approximate=approximate).clone()
    out.view(-1)[3] += 0.1
    return out


def _outside(x, *, approximate):
    out = torch.empty_like(x).copy_(reference.gelu(x, approximate=approximate))
    with contextlib.suppress(RuntimeError):  # outside of autotuning there is nothing behind it
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0.0)
    return out


@pytest.mark.parametrize(
    ("function", "flaw"),
    [
        (_one_wrong, "wrong: output is off by 1.0e-01, allowed are "),
        (_outside, "wrong: writes outside of its tensors"),
        (lambda x, **_: 1 / 0, "fails: ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_kernel_is_never_used_and_reported_once(tuned, function, flaw):
    calls = register(function)
    x = torch.randn(3, 16)
    expected = reference.gelu(x)
    with pytest.warns(RuntimeWarning) as caught:
        assert torch.equal(ck.gelu(x), expected)
    [warning] = caught
    text = str(warning.message)
    assert text.startswith("cvt_kernels: the kernel of backend 'cpu' failed its check on this machine")
    assert f"(gelu, forward, float32, exact, 16+ elements, 16 channels): {flaw}" in text
    assert "reference serves instead, so that results are right. Please report this line" in text
    assert warning.filename == __file__
    tried = len(calls)
    assert torch.equal(ck.gelu(x), expected)
    with new_process():
        assert torch.equal(ck.gelu(x), expected)
        assert torch.equal(ck.gelu(x[:2]), expected[:2])
        assert ck.fallbacks()["gelu", "cpu"].startswith(flaw)
    assert (len(calls), len(tuned)) == (tried, 1)


def test_a_kernel_that_needs_more_than_a_gpu_has_is_passed_over_in_silence(tuned):
    class OutOfResources(Exception):  # noqa: N818
        """Stands for Triton's."""

        __module__ = "triton.runtime.errors"

    def function(x, *, approximate):
        raise OutOfResources("out of resource: shared memory, Required: 155648, Hardware limit: 65536")

    register(function)
    x = torch.randn(3, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ck.gelu(x), reference.gelu(x))
    assert ck.fallbacks()["gelu", "cpu"].startswith("fails: OutOfResources: out of resource: shared memory")


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        subprocess.CalledProcessError(1, ["gcc"]),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        ImportError("libcuda.so.1: cannot open shared object file"),
    ],
    ids=repr,
)
def test_a_fault_of_the_environment_is_tried_again_in_the_next_process(tuned, error):
    faults = [error]

    def function(x, *, approximate):
        if faults:
            raise faults[0]
        return reference.gelu(x, approximate=approximate)

    calls = register(function)
    x = torch.randn(3, 16)
    with pytest.warns(RuntimeWarning, match=r"'cpu' could not be tried .* The next process tries again"):
        assert torch.equal(ck.gelu(x), reference.gelu(x))
    assert ck.fallbacks()["gelu", "cpu"].startswith(f"fails here: {type(error).__name__}: ")
    ck.gelu(x[:2])  # another call of the kind
    assert (len(calls), len(tuned)) == (1, 1)
    assert autotune.cache_for(CPU).cached_entries() == {}
    faults.clear()
    for _ in range(2):
        with new_process():
            ck.gelu(x)
            assert only_answer().measurements["cpu"].flaw is None
    assert len(tuned) == 2


def test_a_warning_that_is_an_error_does_not_lose_the_entry(tuned):
    register(_one_wrong)
    x = torch.randn(3, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            ck.gelu(x)
        assert torch.equal(ck.gelu(x), reference.gelu(x))
    assert len(tuned) == 1


def test_a_slow_kernel_is_not_chosen(tuned):
    calls = register(slow(reference.gelu, 0.1))
    x = torch.randn(3, 16)
    ck.gelu(x)
    tried = len(calls)
    ck.gelu(x)
    assert len(calls) == tried
    assert only_answer().chosen == only_answer().chosen_in_graphs == "reference"
    reason = r"takes \d+ µs where reference takes \d+ \(measured here\)"
    assert re.fullmatch(reason, ck.fallbacks()["gelu", "cpu"])


def test_a_wrong_backward_serves_the_forward_only(tuned):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return reference.gelu(x)

        @staticmethod
        def backward(ctx, dout):
            return dout

    register(lambda x, **_: Wrong.apply(x))
    x = torch.randn(3, 16, requires_grad=True)
    with pytest.warns(RuntimeWarning, match=r"gelu, forward\+backward, float32.*gradient is off by"):
        out = ck.gelu(x)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, reference.gelu(x))))
    with torch.no_grad():
        ck.gelu(x)
    chosen = {cache_key.split(", ")[1]: entry.chosen for cache_key, entry in answers().items()}
    assert chosen == {"forward": "cpu", "forward+backward": "reference"}


# What the caller sees of a first call ---------------------------------------------------------------------


def test_a_second_call_of_the_kind_tunes_nothing(tuned):
    calls = register(reference.gelu)
    for rows in (17, 18, 30):
        ck.gelu(torch.randn(rows, 16))
    assert len(tuned) == 1
    tried = len(calls)
    with new_process():
        ck.gelu(torch.randn(17, 16))
    assert len(calls) == tried + 1
    ck.gelu(torch.randn(170, 16))
    assert len(tuned) == 2


@pytest.mark.parametrize("autocast", [False, True])
def test_a_first_call_within_a_checkpoint(tuned, autocast):
    x, weight = torch.randn(5, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)

    def block(x):
        return ck.layer_norm(ck.gelu(ck.linear(x, weight)))

    def gradients():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = checkpoint(block, x, use_reentrant=False)
        return torch.autograd.grad(out.float().square().sum(), (x, weight))

    first = gradients()
    assert len(tuned) == 3
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))
    assert len(tuned) == 3


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func itself
def test_function_transforms_and_forward_mode_take_pytorchs_own(tuned):
    calls = register(reference.gelu)
    x = torch.randn(5, 16)

    def transformed():
        torch.testing.assert_close(torch.func.vmap(ck.gelu)(x), reference.gelu(x))
        torch.func.grad(lambda t: ck.gelu(t).sum())(x)
        torch.func.jvp(ck.gelu, (x,), (x,))
        with torch.autograd.forward_ad.dual_level():
            ck.gelu(torch.autograd.forward_ad.make_dual(x, x))

    transformed()
    assert (calls, tuned) == ([], [])
    assert "forward-mode" in ck.fallbacks()["gelu", "cpu"]
    ck.gelu(x)
    ck.gelu(x.requires_grad_())
    x = x.detach()
    calls.clear()
    transformed()
    assert calls == []


def test_subclasses_take_pytorchs_own(tuned):
    from torch._subclasses import FakeTensorMode

    class Subclass(torch.Tensor):
        pass

    calls = register(reference.gelu)
    x = torch.randn(5, 16)
    for _ in range(2):
        tried = len(calls)
        assert torch.equal(ck.gelu(x.as_subclass(Subclass)), reference.gelu(x))
        with FakeTensorMode() as mode:
            assert ck.gelu(mode.from_tensor(x)).shape == x.shape
        assert len(calls) == tried
        ck.gelu(x)
    assert len(tuned) == 1


def test_an_empty_tensor_is_served_and_not_tuned(tuned):
    register(reference.gelu)
    assert ck.gelu(torch.zeros(0, 16)).shape == (0, 16)
    assert tuned == []
    assert ck.gelu(torch.tensor(1.0)).shape == ()
    assert len(tuned) == 1


class Shown(Terminal):
    """A terminal that tells when something is written to it."""

    def __init__(self):
        super().__init__()
        self.is_written = threading.Event()

    def write(self, text):
        super().write(text)
        self.is_written.set()


@pytest.mark.parametrize("where", ["terminal", "quick", "pipe", "pytest"])
def test_what_takes_time_is_shown_once_on_a_terminal_and_logged_elsewhere(tuned, monkeypatch, caplog, where):
    shown, seen = Shown(), threading.Event()
    caplog.handler.setLevel("WARNING")
    monkeypatch.setattr(caplog.handler, "emit", lambda record: (caplog.records.append(record), seen.set()))
    seen = {"terminal": shown.is_written, "pipe": seen}.get(where)

    def waits(x, *, approximate):
        assert seen is None or seen.wait(60)
        return reference.gelu(x, approximate=approximate)

    if where != "pytest":
        monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(limit, "_PATIENCE", 1e6 if where == "quick" else 0.0)
    monkeypatch.setattr(limit, "_is_noticed", False)
    monkeypatch.setattr(shown, "isatty", lambda: where != "pipe")
    monkeypatch.setattr(sys, "stderr", shown)
    register(waits)
    for channels in (16, 17):
        ck.gelu(torch.randn(3, channels))
    assert len(tuned) == 2
    begins = "cvt_kernels: checking and timing kernels"
    assert shown.getvalue().count(begins) == (where == "terminal")
    logged = [(record.name, record.levelname, begins in record.getMessage()) for record in caplog.records]
    assert logged == [("cvt_kernels", "WARNING", True)] * (where == "pipe")


# Determinism, compilation and capture ---------------------------------------------------------------------


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("how", ["remembered", "not remembered", "does not last"])
def test_deterministic_algorithms_take_what_every_process_will(tuned, monkeypatch, tmp_path, how):
    def fails(x, *, approximate):
        raise OSError("no")

    calls = register(reference.gelu)
    x = torch.randn(5, 16)
    if how == "not remembered":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    elif how == "does not last":
        register(fails, "triton")
    expected = pytest.warns(RuntimeWarning, match="tries again") if how == "does not last" else new_process()
    with deterministic(), expected:
        ck.gelu(x)
    tried = len(calls)
    with deterministic(), new_process():
        if how == "remembered":
            ck.gelu(x)
            assert (len(tuned), len(calls)) == (1, tried + 1)
        else:
            reason = (
                "demanded, but entries cannot be remembered: "
                if how == "not remembered"
                else "demanded, but the"
            )
            assert reason in ck.fallbacks()["gelu", "cpu"]
            assert len(tuned) == (how == "does not last")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_holds_the_remembered_choice(tuned, backend):
    def compiled():
        torch.compiler.reset()
        return torch.compile(lambda q: 2 * ck.attention(q, q, q), fullgraph=True, backend=backend)

    register(lambda q, k, v, **_: q + 10, operator="attention")
    q = torch.randn(1, 5, 2, 16)
    torch.testing.assert_close(compiled()(q), 2 * reference.attention(q, q, q))
    reason = "has no entry, and nothing is tuned while torch.compile traces"
    assert ck.fallbacks()["attention", "cpu"] == reason
    remember_entry("cpu", "attention", q, q, q, scale=None, bias=None, dropout_p=0.0)
    assert torch.equal(compiled()(q), 2 * (q + 10))
    assert tuned == []


def test_code_for_all_sizes_is_compiled_once(tuned):
    compilations = []

    def noted(graph, inputs):
        compilations.append(1)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda q: 2 * ck.attention(q, q, q), fullgraph=True, backend=noted, dynamic=True)
    for images in (5, 6, 15, 17, 60, 5):
        q = torch.randn(images, 3, 1, 16)
        torch.testing.assert_close(compiled(q), 2 * reference.attention(q, q, q))
        assert len(compilations) == 1, images
    assert tuned == []


@pytest.mark.parametrize("others", ["agree", "have a flaw", "choose another"])
def test_code_for_all_sizes_takes_what_is_right_for_all_of_them(tuned, others):
    """The backend that most entries of other sizes choose, if it has a flaw in none."""
    register(lambda q, k, v, **_: q + 10, operator="attention")
    compiled = torch.compile(
        lambda q, k: ck.attention(q, k, k), fullgraph=True, backend="eager", dynamic=True
    )
    flawed = autotune.Measurement(1.0, 0.0, None, None, "wrong: a test")
    for images, flaw in ((1, False), (5, False), (20, others == "have a flaw")):
        q = torch.randn(images, 3, 1, 16)
        chosen = "sdpa" if flaw or (others == "choose another" and images > 1) else "cpu"
        entry = autotune.Entry(chosen, chosen, {"cpu": flawed if flaw else MEASUREMENT, "sdpa": MEASUREMENT})
        asked = dispatch.cache_key("attention", q, q, q, scale=None, bias=None, dropout_p=0.0, position=None)
        autotune.cache_for(CPU).remember({asked: entry})
    q, k = torch.randn(7, 3, 1, 16), torch.randn(7, 3, 1, 16)
    torch.compiler.reset()
    expected = q + 10 if others == "agree" else reference.attention(q, k, k)
    torch.testing.assert_close(compiled(q, k), expected)
    assert tuned == []


def test_on_a_cpu_gelu_is_left_to_torch_compile(tuned):
    x, weight, bias = torch.randn(5, 16), torch.randn(16, 16), torch.randn(16)
    for operator, args in (("gelu", (x,)), ("bias_gelu", (x, bias))):
        register(lambda x, *_, **__: x + 10, operator=operator)
        remember_entry("cpu", operator, *args, approximate="none")
        assert torch.equal(getattr(ck, operator)(*args), x + 10)
    targets = []

    def noted(graph, inputs):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(ck.linear_gelu, fullgraph=True, backend=noted)
    expected = reference.linear_gelu(x, weight, bias, approximate="none")
    torch.testing.assert_close(compiled(x, weight, bias), expected)
    assert targets == [F.linear, F.gelu]
    assert ck.fallbacks()["gelu", "cpu"] == "torch.compile fuses such calls with others on a CPU"
    with ck.use_backend("cpu", "reference"):  # a requested backend serves
        torch.testing.assert_close(compiled(x, weight, bias), F.linear(x, weight) + 10)
    remember_entry("cpu", "gelu", x.requires_grad_(), approximate="none")
    assert torch.equal(torch.compile(ck.gelu, fullgraph=True, backend=noted)(x), x + 10)  # with gradients
    assert tuned == []


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_pytorchs_own(tuned, strict):
    class Model(nn.Module):
        def forward(self, x):
            return ck.gelu(x)

    x = torch.randn(5, 16)
    calls = register(lambda x, **_: x + 10)
    remember_entry("cpu", "gelu", x, approximate="none")
    batch = torch.export.Dim("batch", min=2, max=100_000)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: batch},), strict=strict)
    for rows in (2, 5, 3000):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(program.module()(x), reference.gelu(x))
    assert (calls, tuned) == ([], [])


def test_nothing_is_tuned_while_a_graph_is_captured(tuned, monkeypatch):
    calls = register(reference.gelu)
    x = torch.randn(5, 16)
    capturing = [True]
    monkeypatch.setattr(machine, "is_capturing", lambda x: capturing[0])
    ck.gelu(x)
    assert (calls, tuned) == ([], [])
    assert ck.fallbacks()["gelu", "cpu"].endswith("nothing is tuned while a CUDA graph is captured")
    capturing[0] = False
    ck.gelu(x)
    assert len(tuned) == 1


def test_the_choice_for_graphs_serves_in_graphs(tuned, monkeypatch):
    register(lambda x, **_: x + 10)
    x = torch.randn(5, 16)
    measurements = dict.fromkeys(("cpu", "reference"), MEASUREMENT)
    remember(autotune.Entry("reference", "cpu", measurements), x)
    for capturing, expected in ((False, reference.gelu(x)), (True, x + 10), (False, reference.gelu(x))):
        monkeypatch.setattr(machine, "is_capturing", lambda x, capturing=capturing: capturing)
        assert torch.equal(ck.gelu(x), expected)


@pytest.mark.parametrize("known", ["reference", "native"])
def test_a_backend_that_the_entry_does_not_know_is_tuned_too(tuned, known):
    """An earlier call, which it could not serve, may have left it out; or the entry has names of old."""
    calls = register(reference.gelu)
    x = torch.randn(5, 16)
    asked = remember(autotune.Entry(known, known, {known: MEASUREMENT}), x)
    ck.gelu(x)
    assert (len(tuned), len(calls) > 0) == (1, True)
    assert set(answers()[asked].measurements) == {"cpu", "reference"}


@pytest.mark.parametrize("chosen", ["triton", "float32", "native"])
def test_an_entry_for_what_cannot_serve_here(tuned, chosen):
    register(reference.gelu)
    x = torch.randn(5, 16)
    remember(autotune.Entry(chosen, chosen, {"cpu": MEASUREMENT}), x)
    assert torch.equal(ck.gelu(x), reference.gelu(x))


# A busy machine -------------------------------------------------------------------------------------------


@pytest.fixture
def unsure(tuned, monkeypatch):
    """Tunes GELU on a busy machine; returns its input, and a list of whether later timings are disturbed."""
    disturbed, time_in_turns = [True], tuner.time_in_turns

    def timed(*arguments):
        is_disturbed = disturbed.pop(0)
        measurements = time_in_turns(*arguments)
        return {
            name: measurement._replace(is_disturbed=is_disturbed)
            for name, measurement in measurements.items()
        }

    monkeypatch.setattr(autotune.cache, "_MOST_TIMINGS", 3)
    monkeypatch.setattr(tuner, "time_in_turns", timed)
    register(slow(reference.gelu, 0.1))
    x = torch.randn(5, 16)
    ck.gelu(x)
    assert only_answer().chosen == "reference"
    assert only_answer().is_unsure
    register(reference.gelu)  # is in truth the faster one
    return x, disturbed


def test_a_choice_of_a_busy_machine_is_timed_again_by_the_next_process(tuned, unsure):
    x, disturbed = unsure
    ck.gelu(x[:4])  # by this process it is not
    disturbed.append(False)
    with new_process():
        ck.gelu(x)
        assert (only_answer().chosen, only_answer().is_unsure) == ("cpu", False)
        assert autotune.cache_for(CPU).advice() is None
    with new_process():
        ck.gelu(x)
    assert (len(tuned), disturbed, only_answer().timings) == (1, [], 2)


@pytest.mark.parametrize("how", ["deterministic", "no tunings", "captured", "another tunes", "no memory"])
def test_when_a_choice_of_a_busy_machine_is_not_timed_again(unsure, monkeypatch, how):
    x, _ = unsure
    with contextlib.ExitStack() as stack:
        stack.enter_context(new_process())
        if how == "deterministic":
            stack.enter_context(deterministic())
        elif how == "no tunings":
            monkeypatch.setenv("CVT_KERNELS_AUTOTUNE", "0")
        elif how == "captured":
            monkeypatch.setattr(machine, "is_capturing", lambda x: True)
        elif how == "another tunes":
            other = FileLock(autotune.cache_for(CPU).path.with_suffix(".tuning"))
            stack.enter_context(other)
        else:
            monkeypatch.setattr(tuner, "time_again", lambda *_: torch.empty(2**60))
        assert torch.equal(ck.gelu(x), reference.gelu(x))
    assert (only_answer().chosen, only_answer().timings) == ("reference", 1)


# Settings -------------------------------------------------------------------------------------------------


def test_without_autotuning_pytorchs_own_serve(tuned, monkeypatch):
    calls = register(reference.gelu)
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE", "0")
    ck.gelu(torch.randn(5, 16))
    q = torch.randn(1, 4, 1, 8)
    with recorded_operators() as operators:
        ck.attention(q, q, q)
    assert any("scaled_dot_product" in name for name in operators)
    assert (calls, tuned) == ([], [])
    reason = "has no entry, and CVT_KERNELS_AUTOTUNE=0 forbids tuning it at first use"
    assert ck.fallbacks()["gelu", "cpu"] == ck.fallbacks()["attention", "cpu"] == reason


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), FloatingPointError("nothing finite")])
def test_failed_autotuning_leaves_the_call_to_pytorch(tuning, monkeypatch, error):
    attempts = []

    def fails(task, *how):
        attempts.append(task)
        raise error

    monkeypatch.setattr(tuner, "tune", fails)
    register(reference.gelu)
    x = torch.randn(5, 16)
    for _ in range(3):
        assert torch.equal(ck.gelu(x), reference.gelu(x))
    assert len(attempts) == 1
    assert ck.fallbacks()["gelu", "cpu"] == f"could not be tuned: {type(error).__name__}: {error}"
    assert answers() == {}


def test_hooks_on_saved_tensors_may_be_forbidden(tuned):
    register(reference.gelu)
    x = torch.randn(5, 16, requires_grad=True)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert torch.equal(ck.gelu(x), reference.gelu(x))
    assert ck.fallbacks()["gelu", "cpu"] == "could not be tuned: RuntimeError: not here"


def test_a_call_that_pytorch_refuses_raises_its_error(tuning):
    register(reference.gelu)
    register(lambda x, **_: [][x], "reference")
    with pytest.raises(TypeError, match="only integer tensors"):
        ck.gelu(torch.randn(5, 16))


# Several processes ----------------------------------------------------------------------------------------


def run_ranks(code: str, **environment: str) -> list[str]:
    """Runs code in two processes at once; returns what each has printed."""
    strict = "import warnings; warnings.simplefilter('error', RuntimeWarning)\n"
    ranks = [Child(strict + code, **environment, RANK=str(rank)) for rank in range(2)]
    outputs = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], [err for _, err in outputs]
    return [out for out, _ in outputs]


def test_one_of_two_processes_tunes_and_both_choose_the_same(tuning, tmp_path):
    code = """
import os, time, torch, cvt_kernels as ck
from cvt_kernels import autotune, backends
from cvt_kernels.autotune import tuner
tune, tuned = tuner.tune, []
tuner.tune = lambda *task: tuned.append(1) or time.sleep(0.2) or tune(*task)
x = torch.randn(8, 256)
rank, scratch = int(os.environ["RANK"]), os.environ["SCRATCH"]
open(f"{scratch}/{rank}", "w").close()
while not os.path.exists(f"{scratch}/{1 - rank}"):
    time.sleep(0.001)
ck.gelu(x)
[entry] = autotune.cache_for(x.device).entries().values()
import json
print(json.dumps([len(tuned), entry]))
"""
    results = [json.loads(out) for out in run_ranks(code, SCRATCH=str(tmp_path))]
    assert sorted(tuned for tuned, _ in results) == [0, 1]
    assert results[0][1] == results[1][1]


GROUP = """
import os, torch, torch.distributed as dist, cvt_kernels as ck
from cvt_kernels import backends, reference
from tests.checks import implementation, remember_entry
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["RENDEZVOUS"], rank=rank, world_size=2)
torch.manual_seed(rank)
x = torch.randn((2, 5)[rank], 12, 8)
def branch():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 1, 3, 3, generator=generator)
    statistics = torch.zeros(8), torch.ones(8), torch.tensor(0)
    return ck.ConvBatchNorm(weight, None, None, *statistics, padding=1, process_group=dist.group.WORLD)
"""


# Without the end of the interpreter, in which threads of gloo may still run.
FINISH = """
dist.barrier()
dist.destroy_process_group()
print({}, flush=True)
os._exit(0)
"""


def test_ranks_agree_on_pytorchs_own_unless_all_choose_the_same(tuning, tmp_path):
    code = f"""{GROUP}
os.environ["XDG_CACHE_HOME"] += str(rank)
def cpu(*args, **kwargs):
    served.append("cpu")
    return reference.conv_projection(*args, **kwargs)
conv, all_served = branch(), []
for local in (("cpu", "reference"), ("reference", "cpu"), ("cpu", "cpu")):
    served = []
    backends.register("conv_projection", "cpu", implementation("conv_projection", cpu))
    remember_entry(local[rank], "conv_projection", x, (3, 4), (conv,), training=True)
    for _ in range(3):
        ck.conv_projection(x, (3, 4), [conv], training=True)
    all_served.append(served)
{FINISH.format("all_served")}
"""
    served = f"{[[], [], ['cpu'] * 3]}\n"
    assert run_ranks(code, RENDEZVOUS=str(tmp_path / "ranks")) == [served] * 2


def test_synchronized_training_is_tuned_and_right(tuning, tmp_path):
    code = f"""{GROUP}
from cvt_kernels.autotune import tuner
tune, tuned = tuner.tune, []
tuner.tune = lambda *task: tuned.append(1) or tune(*task)
backends.register("conv_projection", "cpu", implementation("conv_projection", reference.conv_projection))
ours, theirs = branch(), branch()
for _ in range(2):
    out = ck.conv_projection(x, (3, 4), [ours], training=True)[0]
    same = reference.conv_projection(x, (3, 4), (theirs,), training=True)[0]
    torch.testing.assert_close(out, same)
torch.testing.assert_close(ours.running_var, theirs.running_var)
assert ours.num_batches_tracked == 2
one = torch.randn(1, 1, 8)  # a single value per channel in each process
ck.conv_projection(one, (1, 1), [branch()], training=True)
{FINISH.format("sum(tuned)")}
"""
    counts = run_ranks(code, RENDEZVOUS=str(tmp_path / "ranks"))
    assert sum(map(int, counts)) >= 1


# Costs ----------------------------------------------------------------------------------------------------


def test_a_call_with_an_entry_costs_as_one_by_request(tuning):
    x, conv, best = (
        torch.randn(1, 1, 8),
        ck.ConvBatchNorm(torch.randn(8, 1, 3, 3), *torch.ones(4, 8), padding=1),
        {},
    )
    remember_entry("cpu", "gelu", x, approximate="none")
    remember_entry("cpu", "conv_projection", x, (1, 1), (conv,), training=False)
    for _ in range(60):
        for backend in ("auto", "cpu"):
            with ck.use_backend(backend):
                start = time.perf_counter()
                for _ in range(50):
                    ck.gelu(x)
                    ck.conv_projection(x, (1, 1), [conv], training=False)
                seconds = (time.perf_counter() - start) / 50
            best[backend] = min(best.get(backend, seconds), seconds)
    assert best["auto"] - best["cpu"] < 1e-5


@pytest.mark.parametrize("backend", ["auto", "reference"])
@torch.no_grad()
def test_nothing_is_cached_for_a_call_with_tensors_as_settings(backend):
    """They would be kept alive, and their numbers may change."""
    q, scale = torch.randn(1, 4, 2, 8), torch.tensor(0.5)
    made = example("transformer_block", "reference", "usual").call.record

    def calls(scale, grid):
        block = made.block._replace(scale=scale)
        return ck.attention(q, q, q, scale=scale), ck.transformer_block(made.x, grid, block)

    with ck.use_backend(backend):
        expected = calls(0.5, made.grid)
        kept = len(backends.dispatch_cache)
        assert kept
        for _ in range(2):
            torch.testing.assert_close(calls(scale, tuple(torch.tensor(made.grid))), expected)
        assert len(backends.dispatch_cache) == kept
        scale.fill_(torch.nan)
        with pytest.raises(ValueError, match="scale: got"):
            calls(scale, made.grid)


@pytest.mark.parametrize(
    ("operator", "gradient", "favored"),
    [
        ("transformer_block", False, "cpu"),
        ("transformer_block", True, "composed"),
        ("gelu", False, "reference"),
    ],
)
def test_what_another_backend_replaces_by_a_margin_only(operator, gradient, favored):
    call = example(operator, "cpu", "usual").call.record
    call = call._replace(x=call.x.detach().requires_grad_(gradient))
    assert dispatch._task_of(operator, call).default == favored
