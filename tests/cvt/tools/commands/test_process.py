"""The process of a command: its streams, signals, memory, and what terminals obey."""

import io
import os
import signal
import sys

import pytest
import torch
from PIL import Image

from cvt import create_model
from cvt.card import ModelCard
from cvt.checkpoints import Checkpoint, save_safetensors
from cvt.factory import randomize
from cvt.tools.commands import evaluate, main
from cvt.tools.training.recipe import MODELS
from cvt_kernels.messages import printable
from cvt_kernels.tuning import choices
from tests.checks import bad
from tests.processes import run_python

LABEL, NAME = "\x1b[31mred\x07\u202e", "\x1b]0;title\x07é.png"
EVALUATE = ["evaluate", "--data", "digits", "--checkpoint", "digits", "--device", "cpu"]


@pytest.fixture
def photo(tmp_path):
    Image.new("L", (16, 16)).save(tmp_path / NAME)
    return str(tmp_path / NAME)


@pytest.fixture
def classify(photo):
    return ["classify", photo, "--checkpoint", "digits", "--device", "cpu"]


def test_a_stdout_of_ascii_gets_escapes(monkeypatch, classify):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(classify) == 0
    assert b"\\xe9.png" in stdout.buffer.getvalue()


# Signals --------------------------------------------------------------------------------------------------

ENDED = """
import os, signal, sys, tempfile
from cvt.tools.commands import evaluate, explain, main
from cvt.tools.commands.compile import jobs

folder, photo, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
tempfile.tempdir = folder
signal.signal(number, signal.SIG_DFL)  # under nohup it is ignored, which commands leave as it is
handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]

def end(*args, **kwargs):
    tempfile.NamedTemporaryFile(delete=False).close()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)  # as timeout does

def ended(*arguments):
    try:
        main(arguments)
    except SystemExit as caught:
        # Python's folder for processes stays until this one ends.
        print(caught.code, [name for name in os.listdir(folder) if not name.startswith("pymp-")])

model = ("--checkpoint", "digits", "--device", "cpu")
evaluate.evaluate = lambda *args, **kwargs: os.kill(os.getpid(), number)
ended("evaluate", "--data", "digits", *model, "--json", folder + "/x.json")
explain.pictures = lambda *args, **kwargs: os.kill(os.getpid(), number)
ended("explain", photo, *model, "--output", folder)
jobs.triton_jobs = lambda selection: [jobs.Job(None, {})]
jobs.examine = end
ended("compile", "--jobs", "1")
assert handlers == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.slow
def test_a_signal_ends_a_command_without_leftovers(name, tmp_path, photo):
    folder, number = tmp_path / "folder", int(getattr(signal, name))
    folder.mkdir()
    arguments = ["", str(folder), photo, str(number)]
    result = run_python(f"import sys; sys.argv = {arguments!r}\n{ENDED}", TRITON_INTERPRET="0")
    assert result.stdout == f"{128 + number} []\n" * 3, result.stderr
    assert result.returncode == 0, result.stderr


def test_a_signal_that_somebody_handles_stays_theirs(monkeypatch):
    def end(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("goes on")

    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        monkeypatch.setattr(evaluate, "evaluate", end)
        assert main(EVALUATE) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


# Memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "message"), [((2**50,), "allocate memory"), ((2**40, 2**40), "overflow"), (None, "MemoryError")]
)
def test_too_little_memory_is_an_error(capsys, monkeypatch, shape, message):
    def allocate(*args, **kwargs):
        if shape is None:
            raise MemoryError
        torch.empty(shape)

    monkeypatch.setattr(evaluate, "evaluate", allocate)
    error = bad(capsys, main, *EVALUATE)
    assert "there is not enough memory for images of this size and number: " in error
    assert message in error


def test_other_errors_of_torch_are_not_of_memory(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("something else")

    monkeypatch.setattr(evaluate, "evaluate", fail)
    with pytest.raises(RuntimeError, match="something else"):
        main(EVALUATE)


# Terminals ------------------------------------------------------------------------------------------------


def test_printable():
    shown = r"é→\x1b[0m\x07\x7f\x9b\t\u202e\u2066" + "\nx"
    assert printable("é→\x1b[0m\x07\x7f\x9b\t\u202e\u2066\nx") == shown


@pytest.fixture
def hostile(tmp_path):
    """Returns a file of a model of digits with names that would command a terminal."""
    model = create_model(MODELS["cvt_nano"], num_classes=10)
    randomize(model)
    digits = [str(i) for i in range(10)]
    labels = [f"{LABEL}\n{i}" for i in digits]
    card = ModelCard(model.config, labels, image_size=16, crop_fraction=1.0, folders=digits)
    path = tmp_path / "\x1b[2J.safetensors"
    save_safetensors(Checkpoint(str(path), model.state_dict(), card=card), path)
    return str(path)


def test_names_of_files_and_classes_command_no_terminal(capsys, photo, hostile, tmp_path):
    for arguments in (
        ["classify", photo],
        ["evaluate", "--data", "digits"],
        ["explain", photo, "--output", str(tmp_path / "\x1bnew")],
        ["prune", "--mlp", "0.5", "--output", str(tmp_path / "\x07.safetensors"), "--image-size", "16"],
    ):
        assert main([*arguments, "--checkpoint", hostile, "--device", "cpu"]) == 0
        out, err = capsys.readouterr()
        assert printable(out + err) == out + err
        assert r"\x1b" in out
        assert out.count(r"\x1b[31mred\x07\u202e\n") == {"classify": 5, "evaluate": 20}.get(arguments[0], 0)


def test_doctor_with_a_hostile_name(capsys, monkeypatch, tmp_path):
    choices.remember(torch.device("cpu"), {"a cache key": choices.Entry("cpu", {})})
    path = choices.path(torch.device("cpu")).rename(tmp_path / "\x1b[31m.json")
    monkeypatch.setenv("CVT_KERNELS_TUNED", str(path))
    choices.forget()
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert r"\x1b[31m.json" in out
    assert "\x1b" not in out
