"""The fuzzer: a slice of its cases passes, and faults that are planted are found and shrunk."""

import contextlib
import itertools
import json
import random
import signal
import sys
from pathlib import Path

import pytest
import torch

from cvt.tools.commands.process import run_command
from cvt_kernels import backends, changes, reference
from cvt_kernels.ops.cards import all_cards
from tests.checks import implementation, not_built
from tests.fuzz import campaign, cases, commands, files, models, raw, subjects, world
from tests.fuzz.__main__ import main
from tests.fuzz.worker import Answer, Worker
from tests.processes import run_python

ask = subjects.asking()


@pytest.fixture(autouse=True)
def _as_in_a_run():
    """Lets PyTorch take one thread, as the fuzzer does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# A slice of a run -----------------------------------------------------------------------------------------


def served(subject, count, ask=ask):
    """Returns how many backends served each of the first cases, which have no flaw."""
    answers = {line: ask(line) for line in (f"{subject}:{seed}" for seed in range(count))}
    assert {line: answer.flaws for line, answer in answers.items() if answer.flaws} == {}
    return [answer.served for answer in answers.values()]


@pytest.mark.parametrize("operator", backends.operators)
def test_cases_of_operators(operator):
    asked = subjects.asking(triton={*backends.implementations[operator]} == {"reference", "triton"})
    assert not_built() or sum(map(bool, served(operator, 12, asked))) >= 4


def test_raw_operators():
    assert not_built() or 50 < sum(served("raw", 200)) < 150
    assert not_built() or all(raw._right_calls().values())


def test_sequences_of_changes_to_models():
    assert sum(served("models", 8)) > 30


#: Cases that failed once, as the fuzzer has shrunk them.
FOUND = tuple(f"{operator} {words}" for operator, card in all_cards().items() for words in card.found)
#: Others: command lines, and damaged files.
OTHERS = (
    "commands command=classify seed=1",
    "commands command=bench first=absurd second=drop seed=2",
    "commands command=evaluate first=onto seed=3",
    "files damage=truncated seed=1",
    "files file=labels.json damage=json seed=1",
    "files file=model/config.json damage=other seed=1",
    "models second=weight_norm_by_a_hook fourth=pickle fifth=other_memory eighth=other_memory seed=133",
)


@pytest.mark.parametrize("line", FOUND + OTHERS)
def test_single_cases(line):
    assert str(cases.parsed(line)) == line
    assert ask(line).flaws == []


def test_every_operator_has_cases():
    assert set(cases.CHOICES) == {*backends.operators, "commands", "files", "models", "raw"}


def test_command_lines_are_mutated_and_files_damaged():
    lines = [str(commands.argv_of(cases.parsed(f"commands:{seed}"))) for seed in range(50)]
    assert len({*lines}) > 30
    assert commands.argv_of(cases.parsed("commands")) == ["doctor"]
    for damage, data in itertools.product(files._DAMAGES.values(), (b'{"a": [1, 2]}', b"")):
        assert isinstance(damage(data, random.Random(0)), bytes)


def test_garbage_of_cases_is_collected():
    code = "import gc; from tests.fuzz import subjects; print(gc.isenabled())"
    assert run_python(code).stdout == "True\n"


# Lines, and the command -----------------------------------------------------------------------------------


def test_a_line_names_a_case():
    case = cases.parsed("attention:12")
    assert case == cases.parsed(str(case)) != cases.parsed("attention:13")
    assert list(cases.simpler("gelu seed=0")) == []
    assert list(cases.simpler("gelu rows=3 seed=5")) == [
        "gelu seed=5", "gelu rows=2 seed=5", "gelu rows=3 seed=0"
    ]  # fmt: skip


def fuzz(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["fuzz", *words])
    return main()


def test_a_run_prints_and_writes_its_figures(monkeypatch, capsys, tmp_path):
    file = tmp_path / "figures.json"
    assert fuzz(monkeypatch, "--cases", "3", "--seed", "7", "--only", "gelu", "--json", str(file)) == 0
    assert "gelu: 3 cases, 0 failures" in capsys.readouterr().out
    figures = json.loads(file.read_text())[0]
    assert (figures["subject"], figures["cases"], figures["failures"]) == ("gelu", 3, [])


def test_a_case_alone(monkeypatch, capsys):
    assert fuzz(monkeypatch, "--case", "gelu rows=3 seed=1") == 0
    assert capsys.readouterr().out.startswith("gelu rows=3 seed=1\nno failure")
    plant("gelu", lambda function, x, *others, **settings: function(x, *others, **settings) + 1)
    assert fuzz(monkeypatch, "--case", "gelu rows=3 seed=1") == 1
    assert "cpu outputs 0 is off by" in capsys.readouterr().out


def test_a_process_that_ends_or_has_an_answer():
    answer = "os.abort() if 'x' in line else print('[[], 2, 0.5]', flush=True)"
    echo = f"import os, sys\nfor line in sys.stdin: {answer}"
    with Worker(command=("-c", echo)) as worker:
        assert worker.ask("a") == Answer([], 2, 0.5)
        assert worker.ask("x") == Answer(["ends the process by SIGABRT"])
        assert worker.ask("a") == Answer([], 2, 0.5)


# Planted faults -------------------------------------------------------------------------------------------


_GUARDED = 4096  # where tensors in guarded memory begin, at least


def plant(operator, fault):
    """Registers kernels with a fault, a function that gets the reference and what it is called with."""
    right = getattr(reference, operator)
    faulty = implementation(operator, lambda *args, **kwargs: fault(right, *args, **kwargs))
    backends.register(operator, "cpu", faulty)


def found(operator, fault, *, trials=60):
    """Returns the shrunk cases, with their flaws, that a search finds in kernels with a fault."""
    plant(operator, fault)
    lines = (f"{operator}:{seed}" for seed in itertools.count())
    figures = campaign.search(operator, lines, ask, cases.simpler, cases=trials, seconds=None)
    assert figures.cases == trials
    assert 0 < figures.failed < trials
    return {failure.shrunk: failure.flaw for failure in figures.failures}


def test_an_error_of_4_units_is_found():
    def fault(function, x, *others, **settings):
        out = function(x, *others, **settings)
        numbers = out.detach()[out.detach().isfinite()]
        return out + 4 * torch.finfo(out.dtype).eps * (numbers.abs().max() if numbers.numel() else 0)

    failures = found("gelu", fault)
    assert all("is off by" in flaw for flaw in failures.values())
    shrunk = [cases.parsed(line).settings for line in failures]
    # Of fewer than 1000 values more is allowed.
    assert any(each["rows"] * each["channels"] >= 500 and each["layout"] == "contiguous" for each in shrunk)


def test_a_read_out_of_bounds_is_found():
    def fault(function, x, *others, **settings):
        if x.shape[0] == 1 and x.is_contiguous() and x.storage_offset() > _GUARDED:
            x = x.as_strided(x.shape, x.stride(), x.storage_offset() + 1)
        return function(x, *others, **settings)

    assert "is nan where PyTorch has" in found("layer_norm", fault, trials=40)["layer_norm seed=0"]


def test_a_write_out_of_bounds_is_found():
    def fault(function, x, *others, **settings):
        if x.shape[0] > 64 and x.storage_offset() > _GUARDED:
            x.detach().as_strided((1,), (1,), x.storage_offset() - 1).fill_(1)
        return function(x, *others, **settings)

    assert found("gelu", fault)["gelu rows=65 seed=0"] == "cpu writes outside of its tensors"


def test_a_row_that_is_left_out_is_found():
    def fault(function, x, *others, **settings):
        out = function(x, *others, **settings)
        return torch.cat([out[:-1], torch.zeros_like(out[-1:])]) if out.shape[0] > 64 else out

    assert "gelu rows=65 seed=0" in found("gelu", fault)


def test_other_faults_are_found():
    count = itertools.count()

    def changes(function, x, *others, **settings):
        x.detach().add_(1)
        return function(x, *others, **settings)

    def raises(function, x, *others, **settings):
        raise RuntimeError("no reason")

    def widens(function, x, *others, **settings):
        return function(x, *others, **settings).double()

    def varies(function, x, *others, **settings):
        return function(x, *others, **settings) * (1 + (next(count) % 2) * torch.finfo(x.dtype).eps)

    said = []
    for fault in (changes, raises, widens, varies):
        plant("gelu", fault)
        said += ask("gelu rows=3 seed=1").flaws
    assert said == [
        "cpu changes tensor 0 of its arguments",
        "cpu fails: RuntimeError: no reason",
        "cpu returns torch.float64 (3, 1) as outputs 0, expected torch.float32 (3, 1)",
        "cpu gives other bits with 1 threads than with 1 elsewhere in memory",
    ]


def _round_off(share):
    """Returns a hook by which float32 is off by a share of the largest value, and float64 is exact."""
    return lambda module, args, out: out + share * out.abs().max() if out.dtype == torch.float32 else out


@pytest.mark.parametrize(
    ("twins", "ours", "found"),
    [
        (1e-4, -1e-4, False),
        (0, 2e-4, True),
        (1e-4, -3e-4, True),
        (2.4e-4, 1e-3, True),
        (2.4e-4, -1e-3, True),
        (2e-3, 0, False),
        (2e-3, -2e-3, True),
    ],
)
def test_an_accelerated_model_may_lose_what_its_twin_loses(twins, ours, found):
    pair = models._Pair(cases.parsed("models family=microsoft seed=1"))
    pair.own.register_forward_hook(_round_off(twins))
    pair.accelerated.register_forward_hook(_round_off(ours))
    with pytest.raises(models._Flaw, match="is off by") if found else contextlib.nullcontext():
        pair.compare()


@pytest.mark.slow
def test_a_forward_with_old_weights_is_found(monkeypatch):
    monkeypatch.setattr(changes, "note_written", lambda tensors: None)
    word = "a_number_by_a_fused_step"
    answers = [ask(f"models mode=frozen backend=cpu second={word} seed={seed}") for seed in range(30)]
    flaws = [flaw for answer in answers for flaw in answer.flaws]
    assert flaws
    assert all(f"a frozen huggingface, after {word}, is off by" in flaw for flaw in flaws)


def _leave_a_file(argv):
    Path("left").write_text("")
    print("error: a reason", file=sys.stderr)
    return 2


_COMMANDS = {
    "raises ZeroDivisionError: division by zero": lambda argv: 1 / 0,
    "ends with exit code 3: ''": lambda argv: 3,
    "ends with exit code 2 and 0 lines that say why: ''": lambda argv: 2,
    "has failed, but changed world/left": _leave_a_file,
    "ends with exit code 130: ''": lambda argv: run_command(
        "cvt", lambda: signal.raise_signal(signal.SIGPROF)
    ),
}


@pytest.mark.parametrize("flaw", _COMMANDS)
def test_faults_of_commands_are_found(flaw, monkeypatch, tmp_path):
    monkeypatch.setattr(world, "main", _COMMANDS[flaw])
    (tmp_path / "folder").mkdir()
    with world.copied(tmp_path / "folder") as place:
        assert world.run(place, ["classify"]).flaws == [flaw]
        if "130" in flaw:
            assert world.run(place, ["classify"], may_last=True).flaws == []
