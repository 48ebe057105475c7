"""ck.tune, and the process that checks and times: what is wrong, hangs or dies costs a line of the report."""

import contextlib
import copy
import dataclasses
import functools
import subprocess
import sys
import time
import types
import unittest.mock

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.ops import cards
from cvt_kernels.tuning import calls, choices, run, tuner, worker
from cvt_kernels.tuning.worker import Worker
from tests.checks import implementation
from tests.cvt_kernels.tuning import broken_kernels as kernels
from tests.processes import Copied

CPU = torch.device("cpu")
SECONDS = 4


def gelu_call(kernel, *, gradient=False):
    """Returns a call of a GELU that this kernel serves in the process."""
    x = torch.empty(2, 4, kernels.KERNELS.index(kernel), requires_grad=gradient)
    return calls.call_of("gelu", x, approximate="none")


def attention_call():
    q, k = torch.empty(1, 8, 1, 4), torch.empty(1, 4, 1, 4)
    return calls.call_of("attention", q, k, k)


@pytest.fixture(scope="module", autouse=True)
def _quick_starts():
    """Starts the process of ``tune`` as a copy of one that has imported torch, half of its time."""
    with pytest.MonkeyPatch.context() as patch:
        quick = {"Popen": Copied, "DEVNULL": None, "TimeoutExpired": subprocess.TimeoutExpired}
        patch.setattr(worker, "subprocess", types.SimpleNamespace(**quick))
        yield


@pytest.fixture(scope="module")
def broken():
    """A process with the broken kernels."""
    with Worker(CPU, SECONDS, kernels.register) as process:
        yield process


# Kernels with flaws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "flaw"),
    [
        (kernels.wrong_element, "wrong: output 0 is off by "),
        (kernels.writes_beyond, "wrong: writes outside of its tensors"),
        (kernels.raising, "fails: RuntimeError: has no such kernel"),
        (kernels.racing, tuner.RACES),
        (kernels.hanging, f"hangs: takes longer than {SECONDS} s"),
        (kernels.killed, "dies: signal 9"),
        pytest.param(kernels.exiting, "dies: exit code 3", marks=pytest.mark.slow),
        (kernels.hanging_when_timed, f"hangs: takes longer than {SECONDS} s"),
        pytest.param(kernels.dying_when_timed, "dies: signal 6", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_kernel_with_a_flaw_is_named_and_not_chosen(broken, kernel, flaw):
    result = run.tune_call(gelu_call(kernel), broken)
    found = result.measurements["triton"].flaw
    assert found.startswith(flaw)
    assert "second line" not in found
    assert result.flaws == {"triton": found}
    assert not result.is_good
    assert result.chosen in ("cpu", "reference")
    assert all(result.measurements[name].seconds is not None for name in ("cpu", "reference"))


def test_a_backward_that_is_wrong_matters_in_training_only(broken):
    training = run.tune_call(gelu_call(kernels._WrongBackward.apply, gradient=True), broken)
    assert training.flaws["triton"].startswith("wrong: gradient 0 is off by ")
    assert run.tune_call(gelu_call(kernels._WrongBackward.apply), broken).is_good


def test_a_form_of_pytorch_that_kills_the_process_is_no_fault_of_ours(broken):
    result = run.tune_call(attention_call(), broken)
    assert result.flaws == {"sdpa": "dies: exit code 4"}
    assert result.is_good


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (kernels.register_reference_that_hangs, f"the preparation hangs: takes longer than {SECONDS} s"),
        (kernels.register_kernel_without_memory, "there is not enough memory"),
        pytest.param(
            kernels.register_kernel_without_host_memory,
            "there is not enough memory",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_call_that_cannot_be_tuned_gets_no_entry(monkeypatch, setup, reason):
    results = []
    monkeypatch.setattr(run, "Worker", functools.partial(Worker, setup=setup))
    run.tune_all([gelu_call(kernels.wrong_element)], SECONDS, results)
    assert [(each.chosen, each.why_not_tuned) for each in results] == [(None, reason)]
    assert not results[0].is_good
    assert choices.entries(CPU) == {}


@pytest.mark.parametrize("reason", ["hangs", "memory"])
def test_a_wrong_kernel_is_not_chosen_where_only_the_timing_fails(broken, monkeypatch, reason):
    failure = worker.Failure("hangs") if reason == "hangs" else worker.NotEnoughMemory("")
    monkeypatch.setattr(broken, "time", unittest.mock.Mock(side_effect=failure))
    for kernel, chosen, flaws in ((kernels.wrong_element, "reference", ["triton"]), (kernels.slow, None, [])):
        result = run.tune_call(gelu_call(kernel), broken)
        assert (result.chosen, list(result.flaws), result.is_good) == (chosen, flaws, False)
        assert reason in result.why_not_tuned


def test_flaws_that_may_pass_are_not_written_down(monkeypatch):
    results = []
    setup = kernels.register_killed_compiler
    monkeypatch.setattr(run, "Worker", functools.partial(Worker, setup=setup))
    run.tune_all([gelu_call(kernels.wrong_element)], SECONDS, results)
    (result,) = results
    assert result.flaws["triton"].startswith("fails here: RuntimeError: `ptxas` failed with error code -9")
    assert choices.entries(CPU)[result.cache_key].chosen in ("cpu", "reference")  # in this process
    choices.forget()
    assert choices.entries(CPU) == {}


@pytest.mark.parametrize(
    ("setup", "flaw"),
    [(None, None), (kernels.register_reference_that_hangs, f"hangs: takes longer than {SECONDS} s")],
)
def test_the_kernels_that_may_serve_are_checked(monkeypatch, setup, flaw):
    monkeypatch.setattr(cards, "all_cards", lambda: {"gelu": cards.card_of("gelu")})
    monkeypatch.setattr(run, "Worker", functools.partial(Worker, setup=setup))
    monkeypatch.setattr(run, "_DTYPES", ("float32",))
    monkeypatch.setattr(run, "_EXAMPLES", ("odd",))
    ((name, measurement),) = run.check_kernels(CPU, SECONDS).items()
    assert (name.split(", ")[:4], measurement.flaw) == (["cpu", "gelu", "forward", "float32"], flaw)


def test_every_operator_with_kernels_is_checked(monkeypatch):
    process = unittest.mock.MagicMock()
    monkeypatch.setattr(run, "Worker", process)
    run.check_kernels(CPU)
    asked = process.return_value.__enter__.return_value.candidates.call_args_list
    ours = {operator for operator, known in backends.implementations.items() if "cpu" in known}
    assert {each.args[0].operator for each in asked} == ours


def test_it_ends_with_the_process_that_started_it():
    code = (
        "import torch\n"
        "from cvt_kernels.tuning import calls, worker\n"
        "made = worker.Worker(torch.device('cpu'), 60)\n"
        "made.candidates(calls.call_of('gelu', torch.empty(2, 4), approximate='none'))\n"
        "print(made._process.pid, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert_gone(int(done.stdout.split()[-1]))


def assert_gone(process):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            with open(f"/proc/{process}/stat", encoding="utf-8") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {process} goes on")


# A model --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def noted():
    """Lists the operators that are served in a block, each with its backend."""
    served = []

    def noting(operator, backend, each):
        function = lambda call: served.append((operator, backend)) or each.load().function(call)  # noqa: E731
        return dataclasses.replace(each, function=function)

    with backends.replaced(noting):
        yield served


class Model(nn.Module):
    """Two kinds of GELU, a BatchNorm and a dropout, which training changes and draws numbers for."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.5)

    def forward(self, x, *, scale=1.0):
        return ck.gelu(self.dropout(ck.gelu(self.norm(x)))[:, :8].contiguous()) * scale


def test_it_returns_what_serves_from_now_on_and_writes_it_down():
    model, x = Model().eval(), torch.randn(3, 16)
    with torch.no_grad():
        model(x)
    chosen = ck.tune(model, x, scale=2.0)
    assert [cache_key.split(", ")[:3] for cache_key in chosen] == 2 * [["gelu", "forward", "float32"]]
    assert chosen == {key: entry.chosen for key, entry in choices.entries(CPU).items()}
    with torch.no_grad(), noted() as served:
        model(x)
    assert [backend for _, backend in served] == list(chosen.values())
    choices.forget()  # another process
    assert chosen == {key: entry.chosen for key, entry in choices.entries(CPU).items()}


def test_training_is_tuned_with_gradients_and_changes_nothing():
    model, x = Model().train(), torch.randn(3, 16)
    before, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    chosen = ck.tune(model, x)
    assert [cache_key.split(", ")[1] for cache_key in chosen] == 2 * ["forward+backward"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(seed, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_our_kernels_do_not_run_in_the_users_process(monkeypatch):
    def crash(*_, **__):
        pytest.fail("a kernel ran before it was checked")

    backends.register("gelu", "triton", implementation("gelu", crash))
    made = run.calls_of(Model().eval(), torch.randn(3, 16))
    assert [call.operator for call in made] == ["gelu", "gelu"]


def test_bad_input_and_the_models_own_errors():
    with pytest.raises(TypeError, match="model: got int, expected Module"):
        ck.tune(3)
    with pytest.raises(RuntimeError):
        ck.tune(Model().eval(), torch.randn(3, 5))
    assert choices.entries(CPU) == {}


def test_an_interrupt_keeps_what_is_known(monkeypatch):
    tuned = run.tune_call
    asked = []

    def interrupted(call, process):
        asked.append(call)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return tuned(call, process)

    monkeypatch.setattr(run, "tune_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ck.tune(Model().eval(), torch.randn(3, 16))
    assert list(choices.entries(CPU)) == [asked[0].cache_key]


def test_a_folder_that_cannot_be_written_is_said_and_the_process_is_served(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be written, and serve this process only: .*file"):
        chosen = ck.tune(Model().eval(), torch.randn(3, 16))
    assert len(chosen) == len(choices.entries(CPU)) == 2


def test_parts_come_before_what_is_composed_of_them():
    from tests.upstream import images, segformer

    model = ck.accelerate(segformer())
    made = run.calls_of(model.eval(), images())
    composed = ["composed" in backends.implementations[call.operator] for call in made]
    assert any(composed)
    assert composed == sorted(composed)
    assert {"attention", "linear", "transformer_block"} <= {call.operator for call in made}
    with torch.no_grad(), noted() as served:
        model(images())
    for name, _ in served:
        assert any(call.operator == name for call in made), name


@pytest.mark.gpu
def test_gpu_kernels_are_compiled_ahead(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    q, k = (torch.empty(2, n, 2, 64, device="cuda", dtype=torch.bfloat16) for n in (64, 16))
    call = calls.call_of("attention", q, k, k)
    with Worker(call.device, 60) as process:
        run.compile_kernels([call], process)
        compiled = set(tmp_path.rglob("*.cubin"))
        assert compiled
        run.tune_call(call, process)
    assert set(tmp_path.rglob("*.cubin")) == compiled


@pytest.mark.parametrize("use", [lambda gpu: Worker(gpu, SECONDS).device, lambda gpu: choices.use(gpu, {})])
def test_a_gpu_without_its_number_is_the_current_one(monkeypatch, use):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(choices, "_read", lambda device: {})
    assert use(torch.device("cuda")) in (torch.device("cuda", 1), None)
    assert set(choices._known) <= {torch.device("cuda", 1)}


def test_flaws_are_said(monkeypatch):
    measured = {"cpu": tuner.Measurement(1.0, 0.0, None, "wrong: off by 1")}
    monkeypatch.setattr(
        run, "tune_call", lambda call, process: run.Result(call.cache_key, "reference", measured)
    )
    with pytest.warns(
        RuntimeWarning, match="please report them(.|\n)*cpu, gelu, forward, .*: wrong: off by 1"
    ):
        ck.tune(Model().eval(), torch.randn(3, 16))
