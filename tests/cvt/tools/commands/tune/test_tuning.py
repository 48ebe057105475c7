"""Kernels that are wrong, hang or kill the process cost a line of the report, and not the process."""

import multiprocessing
import time

import pytest
import torch

from cvt.tools.commands.tune import tuning
from cvt.tools.commands.tune.cache_keys import CacheKey, TensorLike, Workload, collect
from cvt.tools.commands.tune.worker import Worker, _Server
from cvt_kernels import autotune, dispatch
from tests.cvt.tools.commands.tune import broken_kernels as kernels

CPU = torch.device("cpu")
SPAWN = multiprocessing.get_context("spawn")


def gelu_cache_key(kernel, *, gradient=False):
    """Returns a cache key about a GELU that this kernel serves."""
    x = torch.empty(2, 4, kernels.KERNELS.index(kernel), requires_grad=gradient)
    text = dispatch.cache_key("gelu", x, approximate="none")
    return CacheKey(text, "gelu", {"x": TensorLike.of(x), "approximate": "none"}, None)


def attention_cache_key():
    q, k = torch.empty(1, 8, 1, 4), torch.empty(1, 4, 1, 4)
    settings = {"scale": None, "bias": None, "dropout_p": 0.0}
    text = dispatch.cache_key("attention", q, k, k, **settings)
    tensors = {name: TensorLike.of(tensor) for name, tensor in {"q": q, "k": k, "v": k}.items()}
    return CacheKey(text, "attention", tensors | settings, None)


SECONDS = 3


@pytest.fixture(scope="module")
def worker(quick_start):
    with Worker(CPU, SECONDS, kernels.register) as worker:
        yield worker


@pytest.mark.parametrize(
    ("kernel", "flaw"),
    [
        (kernels.wrong_element, "wrong: output is off by "),
        (kernels.writes_beyond, "wrong: writes outside of its tensors"),
        (kernels.raising, "fails: RuntimeError: has no such kernel"),
        (kernels.hanging, f"hangs: takes longer than {SECONDS} s"),
        (kernels.killed, "dies: signal 9"),
        (kernels.exiting, "dies: exit code 3"),
        (kernels.hanging_when_timed, f"hangs: takes longer than {SECONDS} s"),
        (kernels.dying_when_timed, "dies: signal 6"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_kernel_with_a_flaw_is_not_chosen(worker, kernel, flaw):
    result = tuning.tune(gelu_cache_key(kernel), worker)
    measurement = result.entry.measurements["triton"]
    assert measurement.flaw.startswith(flaw)
    assert "second line" not in measurement.flaw
    assert measurement.seconds is None
    assert result.flaws == {"triton": measurement.flaw}
    assert not result.is_good
    assert {result.entry.chosen, result.entry.chosen_in_graphs} <= {"cpu", "reference"}
    assert all(result.entry.measurements[name].seconds is not None for name in ("cpu", "reference"))


@pytest.mark.parametrize(
    ("kernel", "survives"),
    [(kernels.wrong_element, True), (kernels.raising, True), (kernels.writes_beyond, False)],
)
def test_the_process_goes_on_after_a_flaw_that_does_it_no_harm(worker, kernel, survives):
    worker.candidates(gelu_cache_key(kernels.slow))
    process = worker._process
    assert worker.check(gelu_cache_key(kernel), "triton").flaw
    assert (worker._process is process) is survives


def test_the_process_knows_what_was_tuned_meanwhile(cache):
    server, asked = _Server(CPU), gelu_cache_key(kernels.slow)
    parts = dispatch.cache_key("linear", torch.empty(4, 8), torch.empty(8, 8), None)
    server.prepare(asked)
    autotune.Cache(autotune.machine_key(CPU)).remember({parts: autotune.Entry("reference", "reference", {})})
    assert autotune.cache_for(CPU).get(parts) is None
    server.prepare(asked)
    assert autotune.cache_for(CPU).get(parts) is not None


def test_after_the_time_limit_nothing_is_begun(worker, cache):
    cache = autotune.cache_for(CPU)
    cache_keys = [gelu_cache_key(kernels.slow), attention_cache_key()]
    results = list(tuning.tune_all(cache_keys, worker, cache, until=time.monotonic()))
    assert [result.cache_key for result in results] == [cache_key.text for cache_key in cache_keys]
    assert all(result.why_not_tuned == "the time limit was reached before" for result in results)
    assert not any(result.is_good for result in results)
    assert cache.entries() == {}


@pytest.mark.gpu
def test_gpu_kernels_are_compiled_ahead(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cuda = torch.device("cuda", 0)
    workload = Workload("cvt_13", 64, [2], ["bfloat16"], train=False)
    asked = [each for each in collect(workload, cuda) if each.operator in ("attention", "linear_gelu")]
    tuning.compile_ahead(asked, cuda)
    compiled = set(tmp_path.rglob("*.cubin"))
    assert compiled
    with Worker(cuda, 60) as worker:
        for _ in tuning.tune_all(asked, worker, autotune.cache_for(cuda)):
            pass
    assert set(tmp_path.rglob("*.cubin")) == compiled


def test_a_backward_that_is_wrong_matters_in_training_only(worker):
    training = tuning.tune(gelu_cache_key(kernels._WrongBackward.apply, gradient=True), worker)
    assert training.flaws["triton"].startswith("wrong: gradient is off by ")
    assert tuning.tune(gelu_cache_key(kernels._WrongBackward.apply), worker).is_good


def test_a_slow_kernel_is_right_but_not_chosen(worker):
    result = tuning.tune(gelu_cache_key(kernels.slow), worker)
    assert result.is_good
    assert result.entry.measurements["triton"].seconds > 0.02
    assert result.entry.chosen != "triton"


def test_a_form_of_pytorch_that_kills_the_process_is_no_fault_of_ours(worker):
    result = tuning.tune(attention_cache_key(), worker)
    assert result.flaws == {"sdpa": "dies: exit code 4"}
    assert result.entry.chosen in ("cpu", "reference")
    assert result.is_good


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (kernels.register_reference_that_hangs, f"the preparation hangs: takes longer than {SECONDS} s"),
        (kernels.register_kernel_without_memory, "there is not enough memory"),
        (kernels.register_kernel_without_host_memory, "there is not enough memory"),
    ],
)
@pytest.mark.usefixtures("quick_start")
def test_what_cannot_be_tuned_gets_no_entry(setup, reason, cache):
    cache = autotune.cache_for(CPU)
    with Worker(CPU, SECONDS, setup) as worker:
        (result,) = tuning.tune_all([gelu_cache_key(kernels.wrong_element)], worker, cache)
    assert (result.entry, result.why_not_tuned) == (None, reason)
    assert not result.is_good
    assert cache.entries() == {}


def test_a_single_candidate_needs_no_entry(worker):
    x = TensorLike((4, 8), (8, 1), torch.float64, requires_grad=False)
    cache_key = CacheKey("linear", "linear", {"x": x, "weight": x, "bias": None}, None)
    assert tuning.tune(cache_key, worker) is None


def test_the_process_tunes_all_candidates_on_as_many_threads(monkeypatch):
    monkeypatch.setenv("CVT_KERNELS_BACKEND", "reference")  # which only a process that is spawned reads
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: SPAWN)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with Worker(CPU, 5, kernels.register) as worker:
            result = tuning.tune(gelu_cache_key(kernels.telling_threads), worker)
    finally:
        torch.set_num_threads(threads)
    assert result.flaws == {"triton": f"fails: RuntimeError: runs on {threads + 1} threads"}
    assert set(result.entry.measurements) == {"triton", "cpu", "reference"}
