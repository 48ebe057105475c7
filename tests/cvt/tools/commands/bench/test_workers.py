"""Tests of the processes of ``cvt bench`` and of its peers OpenVINO and ONNX Runtime."""

import os
import signal
import sys
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from cvt.tools import commands as cli
from cvt.tools.commands.bench import peers, workers
from cvt.tools.commands.bench import results as result_files
from cvt.tools.commands.bench.contenders import CONTENDERS
from cvt_kernels import BackendUnavailable
from tests.checks import bad
from tests.cvt.tools.commands.bench.test_bench import Together, make_small
from tests.upstream import segformer

CPU = torch.device("cpu")
PHOTOS = torch.ones(1, 3, 32, 32)


class Behaving(nn.Module):
    """A model that does what it is told as soon as it runs."""

    def __init__(self, act, *arguments):
        super().__init__()
        self.act, self.arguments = act, arguments
        self.eval()

    def forward(self, images):
        self.act(*self.arguments)
        return images.mean((2, 3))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail_unreadably():
    raise RuntimeError(lambda: None)  # cannot be pickled


def refuse():
    raise BackendUnavailable("linear", "triton", "no GPU")


def job_of(model, folder):
    job = workers.Job(str(folder), CPU, "float32", False, 1, ("auto",))
    job.save(hf=model, images=PHOTOS)
    return job


def test_a_process_answers_and_prints_nothing_as_a_result(tmp_path, capfd):
    worker = workers.Worker("hf", job_of(Behaving(print, "noise"), tmp_path))
    first = worker.ask("first", 2)
    assert first["load"] is None
    assert 0 < first["seconds"] < 60
    logits, norms, why_not_graphed = worker.ask("parity", 2)
    np.testing.assert_allclose(logits, np.ones((1, 3)))
    assert (len(norms), why_not_graphed) == (0, None)
    seconds, waits, waited = worker.ask("turn", 2)
    assert 0 < seconds < 60
    assert (waits, waited >= 0) == (None, True)
    assert worker.ask("facts", 2)["resident_bytes"] >= 0
    worker.end()
    assert "noise" not in capfd.readouterr().out


def test_a_model_of_transformers_is_whole_in_another_process(tmp_path):
    model = segformer()
    worker = workers.Worker("hf", job_of((type(model), model.config, model.state_dict()), tmp_path))
    worker.ask("first", 1)
    logits, *_ = worker.ask("parity", 1)
    worker.end()
    with torch.no_grad():
        expected = model(PHOTOS).logits
    torch.testing.assert_close(torch.from_numpy(logits), expected)


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (die, ChildProcessError, "its process ended with signal SIGKILL"),
        (refuse, BackendUnavailable, "backend 'triton' is unavailable: no GPU"),
        (fail_unreadably, RuntimeError, "RuntimeError: <function"),
    ],
)
def test_what_fails_in_a_process_is_raised_here(act, error, message, tmp_path):
    worker = workers.Worker("hf", job_of(Behaving(act), tmp_path))
    with pytest.raises(error, match=message):
        worker.ask("first", 1)
    worker.end()


def test_a_process_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.1)
    worker = workers.Worker("hf", job_of(Behaving(time.sleep, 1000), tmp_path))
    with pytest.raises(TimeoutError, match="no answer within 0 seconds"):
        worker.ask("first", 1)
    worker.end()


# The contest ----------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """Lets all contenders run in this process, and lists the requests to them."""
    requests = []

    class Listed(Together):
        def ask(self, request, *arguments):
            requests.append((request, self.key))
            return super().ask(request, *arguments)

    make_small(monkeypatch)
    monkeypatch.setattr(workers, "Worker", Listed)
    return requests


def test_contenders_take_turns_and_a_peer_that_crashes_costs_its_line(asked, monkeypatch):
    turn = workers.Runner.turn

    def dying(self, batch_size):
        if self._contender == CONTENDERS["eager"] and asked.count(("turn", "eager")) == 2:
            raise ChildProcessError("its process ended with signal SIGKILL")
        return turn(self, batch_size)

    monkeypatch.setattr(workers.Runner, "turn", dying)
    results = result_files.run(image_size=32, batch_sizes=(2,), rounds=3, peers=("eager",))
    there = ["hf", "cvt", "accelerate", "cvt-frozen", "accelerate-frozen"]
    everyone = ["hf", "eager", *there[1:]]
    turns = [key for request, key in asked if request == "turn"]
    assert turns == [*everyone, *reversed(everyone), *there]
    (batch,) = results["batches"]
    assert [row["contender"] for row in batch["rows"]] == there
    assert all(len(row["seconds"]) == 3 for row in batch["rows"])
    note = "fails: ChildProcessError: its process ended with signal SIGKILL"
    assert results["contenders"]["eager"]["note"] == note
    assert f"not measured: {note}" in result_files.text(results)


def test_one_of_ours_that_crashes_is_an_error(asked, monkeypatch):
    def die(self, batch_size):
        raise ChildProcessError("its process ended with signal SIGSEGV")

    monkeypatch.setattr(workers.Runner, "parity", die)
    with pytest.raises(ChildProcessError, match="SIGSEGV"):
        result_files.run(image_size=32, batch_sizes=(1,), rounds=1)


def test_the_first_result_is_timed(asked):
    results = result_files.run(image_size=32, batch_sizes=(2, 1), rounds=1)
    firsts = {key: about["first"] for key, about in results["contenders"].items()}
    for key, first in firsts.items():
        assert asked.count(("first", key)) == 1
        assert (first["batch_size"], first["load"]) == (2, None)
        assert 0 < first["seconds"] < 60
    head, row, *_ = result_files.table(results, results["batches"][0])
    assert row[head.index("first, s")] == f"{firsts['hf']['seconds']:.2f}"
    assert "conversion, s" not in head


# Runtimes -------------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, images):
        return SimpleNamespace(logits=2 * images.mean((2, 3)))


@pytest.mark.parametrize(("dtype", "hint"), [("float32", "f32"), ("bfloat16", "bf16")])
def test_openvino_is_told_threads_and_precision(dtype, hint, monkeypatch):
    openvino = mock.Mock()
    compile_model = openvino.Core().compile_model
    compile_model().create_infer_request().infer = lambda arrays: [2 * arrays[0].mean((2, 3))]
    monkeypatch.setitem(sys.modules, "openvino", openvino)
    runtime = peers.OpenVINO(Doubled, dtype)
    images = torch.ones(2, 3, 4, 4, dtype=getattr(torch, dtype))
    for _ in range(2):
        assert torch.equal(runtime(images), torch.full((2, 3), 2.0))
    runtime(images[:1])
    shapes = [call.kwargs["input"] for call in openvino.convert_model.call_args_list]
    assert shapes == [[(2, 3, 4, 4)], [(1, 3, 4, 4)]]  # once for every shape
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    settings["INFERENCE_PRECISION_HINT"] = hint
    compile_model.assert_called_with(openvino.convert_model(), "CPU", settings)


def test_onnxruntime_is_told_threads(monkeypatch):
    onnxruntime = mock.Mock(SessionOptions=SimpleNamespace)
    onnxruntime.InferenceSession().run = lambda outputs, given: [2 * given["images"].mean((2, 3))]
    monkeypatch.setitem(sys.modules, "onnxruntime", onnxruntime)
    monkeypatch.setattr(torch.onnx, "export", lambda model, arguments, file, **_: file.write(b"file"))
    runtime = peers.OnnxRuntime(Doubled, "float32")
    assert torch.equal(runtime(torch.ones(2, 3, 4, 4)), torch.full((2, 3), 2.0))
    options = SimpleNamespace(intra_op_num_threads=torch.get_num_threads())
    onnxruntime.InferenceSession.assert_called_with(b"file", options, providers=["CPUExecutionProvider"])
    assert runtime.load_seconds > 0


@pytest.mark.parametrize(
    ("options", "why_not"),
    [
        ({}, None),
        ({"train": True}, "it has no training step"),
        ({"device": torch.device("cuda")}, "it is measured on a CPU only"),
        ({"dtype": "bfloat16"}, "it is measured in float32 only"),
    ],
)
def test_what_onnxruntime_is_not_measured_for(options, why_not, monkeypatch):
    monkeypatch.setattr(peers.OnnxRuntime, "packages", ())
    asked = {"device": CPU, "dtype": "float32", "train": False} | options
    assert peers.why_not("onnxruntime", **asked) == why_not


@pytest.mark.parametrize(
    ("peer", "package"),
    [(peer, package) for peer in peers.RUNTIMES for package in peers.RUNTIMES[peer].packages],
)
def test_a_runtime_that_is_not_installed(peer, package, capsys, monkeypatch):
    make_small(monkeypatch)
    for each in peers.RUNTIMES[peer].packages:
        monkeypatch.setitem(sys.modules, each, None if each == package else mock.Mock())
    error = bad(capsys, cli.main, "bench", "--device", "cpu", "--peers", peer)
    assert f"{package} is not installed; pip install {package}, or in a checkout" in error
    assert "'.[peers]'" in error


@pytest.mark.rest
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("peer", peers.RUNTIMES)
def test_the_runtimes_themselves(peer):
    for package in peers.RUNTIMES[peer].packages:
        pytest.importorskip(package)
    results = result_files.run(image_size=64, batch_sizes=(1, 2), rounds=1, peers=(peer,))
    assert results["contenders"][peer]["first"]["load"] > 0
    assert peer in results["versions"]
    for batch in results["batches"]:
        row = next(row for row in batch["rows"] if row["contender"] == peer)
        assert row["error"] < 1e-4 < 1 < row["largest"]
        assert (row["peak_bytes"], row["error_allowed"]) == (None, None)
