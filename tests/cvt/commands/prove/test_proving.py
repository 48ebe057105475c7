"""Kernels that are wrong, hang or kill the process cost a line of the report, and not the process."""

import multiprocessing
import time

import pytest
import torch

from cvt.commands.prove import proving
from cvt.commands.prove.questions import Question, TensorLike, Workload, collect
from cvt.commands.prove.worker import Worker, _Server
from cvt_kernels import dispatch, verdicts
from tests.cvt.commands.prove import broken_kernels as kernels

CPU = torch.device("cpu")
SPAWN = multiprocessing.get_context("spawn")


def gelu_question(kernel, *, gradient=False):
    """Returns a question about a GELU that this kernel serves."""
    x = torch.empty(2, 4, kernels.KERNELS.index(kernel), requires_grad=gradient)
    text = dispatch.question("gelu", x, approximate="none")
    return Question(text, "gelu", {"x": TensorLike.of(x), "approximate": "none"}, None)


def attention_question():
    q, k = torch.empty(1, 8, 1, 4), torch.empty(1, 4, 1, 4)
    settings = {"scale": None, "bias": None, "dropout_p": 0.0}
    text = dispatch.question("attention", q, k, k, **settings)
    tensors = {name: TensorLike.of(tensor) for name, tensor in {"q": q, "k": k, "v": k}.items()}
    return Question(text, "attention", tensors | settings, None)


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
    result = proving.prove(gelu_question(kernel), worker)
    trial = result.verdict.trials["triton"]
    assert trial.flaw.startswith(flaw)
    assert "second line" not in trial.flaw
    assert trial.seconds is None
    assert result.flaws == {"triton": trial.flaw}
    assert not result.is_good
    assert {result.verdict.chosen, result.verdict.chosen_in_graphs} <= {"native", "reference"}
    assert all(result.verdict.trials[name].seconds is not None for name in ("native", "reference"))


@pytest.mark.parametrize(
    ("kernel", "survives"),
    [(kernels.wrong_element, True), (kernels.raising, True), (kernels.writes_beyond, False)],
)
def test_the_process_goes_on_after_a_flaw_that_does_it_no_harm(worker, kernel, survives):
    worker.candidates(gelu_question(kernels.slow))
    process = worker._process
    assert worker.check(gelu_question(kernel), "triton").flaw
    assert (worker._process is process) is survives


def test_the_process_knows_what_was_proven_meanwhile(cache):
    server, asked = _Server(CPU), gelu_question(kernels.slow)
    parts = dispatch.question("linear", torch.empty(4, 8), torch.empty(8, 8), None)
    server.prepare(asked)
    verdicts.Store(verdicts.machine_key(CPU)).remember(
        {parts: verdicts.Verdict("reference", "reference", {})}
    )
    assert verdicts.store_for(CPU).get(parts) is None
    server.prepare(asked)
    assert verdicts.store_for(CPU).get(parts) is not None


def test_after_the_time_limit_nothing_is_begun(worker, cache):
    store = verdicts.store_for(CPU)
    questions = [gelu_question(kernels.slow), attention_question()]
    results = list(proving.prove_all(questions, worker, store, until=time.monotonic()))
    assert [result.question for result in results] == [question.text for question in questions]
    assert all(result.why_not_proven == "the time limit was reached before" for result in results)
    assert not any(result.is_good for result in results)
    assert store.verdicts() == {}


@pytest.mark.gpu
def test_gpu_kernels_are_compiled_ahead(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cuda = torch.device("cuda", 0)
    workload = Workload("cvt_13", 64, [2], ["bfloat16"], train=False)
    asked = [each for each in collect(workload, cuda) if each.operator in ("attention", "linear_gelu")]
    proving.compile_ahead(asked, cuda)
    compiled = set(tmp_path.rglob("*.cubin"))
    assert compiled
    with Worker(cuda, 60) as worker:
        for _ in proving.prove_all(asked, worker, verdicts.store_for(cuda)):
            pass
    assert set(tmp_path.rglob("*.cubin")) == compiled


def test_a_backward_that_is_wrong_matters_in_training_only(worker):
    training = proving.prove(gelu_question(kernels._WrongBackward.apply, gradient=True), worker)
    assert training.flaws["triton"].startswith("wrong: gradient is off by ")
    assert proving.prove(gelu_question(kernels._WrongBackward.apply), worker).is_good


def test_a_slow_kernel_is_right_but_not_chosen(worker):
    result = proving.prove(gelu_question(kernels.slow), worker)
    assert result.is_good
    assert result.verdict.trials["triton"].seconds > 0.02
    assert result.verdict.chosen != "triton"


def test_a_form_of_pytorch_that_kills_the_process_is_no_fault_of_ours(worker):
    result = proving.prove(attention_question(), worker)
    assert result.flaws == {"sdpa": "dies: exit code 4"}
    assert result.verdict.chosen in ("native", "reference")
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
def test_what_cannot_be_proven_gets_no_verdict(setup, reason, cache):
    store = verdicts.store_for(CPU)
    with Worker(CPU, SECONDS, setup) as worker:
        (result,) = proving.prove_all([gelu_question(kernels.wrong_element)], worker, store)
    assert (result.verdict, result.why_not_proven) == (None, reason)
    assert not result.is_good
    assert store.verdicts() == {}


def test_a_single_candidate_needs_no_verdict(worker):
    x = TensorLike((4, 8), (8, 1), torch.float64, requires_grad=False)
    question = Question("linear", "linear", {"x": x, "weight": x, "bias": None}, None)
    assert proving.prove(question, worker) is None


def test_the_process_proves_all_candidates_on_as_many_threads(monkeypatch):
    monkeypatch.setenv("CVT_KERNELS_BACKEND", "reference")  # which only a process that is spawned reads
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: SPAWN)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with Worker(CPU, 5, kernels.register) as worker:
            result = proving.prove(gelu_question(kernels.telling_threads), worker)
    finally:
        torch.set_num_threads(threads)
    assert result.flaws == {"triton": f"fails: RuntimeError: runs on {threads + 1} threads"}
    assert set(result.verdict.trials) == {"triton", "native", "reference"}
