"""Every command that runs: its module, its help, its report, its bars, and who takes its files."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cvt.tools import commands
from cvt.tools.commands import COMMANDS, main, paths
from cvt_kernels import backends
from cvt_kernels.tuning import clock
from tests.checks import Terminal
from tests.cvt.tools.commands.test_refusals import parsers
from tests.processes import run_python


def test_installed_command_and_module():
    script = Path(sys.executable).parent / "cvt"
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("cvt 0.")
    result = subprocess.run([sys.executable, "-m", "cvt"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "usage: cvt" in result.stderr


ASKED = """
import sys, time
from cvt.tools.commands import main
try:
    main(sys.argv[1:])
finally:
    print(time.process_time(), *sys.modules)
"""


def _asked(*words):
    """Returns what a new process of ``cvt`` prints, its exit code, its processor time and its modules."""
    command = [sys.executable, "-c", ASKED, *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    *printed, last = result.stdout.splitlines()
    seconds, *modules = last.split()
    return [*printed, *result.stderr.splitlines()], result.returncode, float(seconds), set(modules)


@pytest.mark.parametrize(
    ("words", "code", "last"),
    [
        (["--help"], 0, "  --version   show program's version number and exit"),
        ([], 2, "cvt: error: the following arguments are required: COMMAND"),
        (["clasify"], 2, "cvt: error: argument COMMAND: invalid choice: 'clasify'"),
        (["--nonsense"], 2, "cvt: error: the following arguments are required: COMMAND"),
    ],
)
def test_help_and_errors_of_the_shell_wait_for_no_package(words, code, last):
    printed, returned, seconds, modules = _asked(*words)
    assert returned == code
    assert any(line.startswith(last) for line in printed), printed
    if words == ["--help"]:
        for command in COMMANDS:
            assert any(line.startswith(f"    {command} ") for line in printed)
    assert not {"torch", "numpy", "transformers", "cvt_kernels", "cvt.config"} & modules
    assert seconds < 0.5


def test_a_command_waits_for_no_package_that_only_others_need():
    result = run_python(f"import sys; sys.argv[1:] = ['train', '--help']\n{ASKED}")
    result.check_returncode()
    *usage, modules = result.stdout.splitlines()
    assert "usage: cvt train [-h] --data DATA" in usage[0]
    heavy = {"kornia", "matplotlib", "sklearn", "transformers", "triton", "torch.utils.flop_counter"}
    assert not heavy & set(modules.split())
    assert "cvt.tools.commands.classify" not in modules.split()


def test_every_command_has_a_module():
    folder = Path(commands.__file__).parent
    for command in COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"cvt.tools.commands.{command}").add_arguments(parser)
        assert parser.get_default("run") is not None
    known = {path.stem for path in folder.glob("*.py") if "def add_arguments(" in path.read_text()}
    known |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert known == set(COMMANDS)


def test_doctor_command_and_a_reader_that_leaves_early(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"\b{operator}\b", out) for operator in backends.operators)
    for name, value in (("CVT_KERNELS_BACKEND", "x"), ("CVT_KERNELS_CPU", "foo")):
        code = "import sys; from cvt.tools.commands import main; sys.exit(main(['doctor']))"
        wrong = run_python(code, **{name: value})
        assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
        assert wrong.stderr.startswith(f"cvt doctor: error: {name}: got '{value}', expected ")
    read, write = os.pipe()
    os.close(read)
    command = [Path(sys.executable).parent / "cvt", "doctor"]
    closed = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (closed.returncode, closed.stderr) == (0, "")


@pytest.mark.parametrize("flaw", [None, "wrong: output 0 is off by 2"])
def test_doctor_checks_the_kernels(flaw, monkeypatch, capsys, tmp_path):
    checked = {"gelu, cpu": SimpleNamespace(flaw=flaw), "linear, cpu": SimpleNamespace(flaw=None)}
    monkeypatch.setattr("cvt_kernels.tuning.run.check_kernels", lambda device: checked)
    report = tmp_path / "report.json"
    assert main(["doctor", "--check", "--json", str(report)]) == (flaw is not None)
    flaws = {} if flaw is None else {"gelu, cpu": flaw}
    assert json.loads(report.read_text())["check"] == flaws
    lines = capsys.readouterr().out.splitlines()
    assert f"2 checks against float64, {len(flaws)} failed" in lines
    assert (f"  gelu, cpu: {flaw}" in lines) == ("Please report these lines." in lines) == bool(flaws)


# Paths and reports ----------------------------------------------------------------------------------------

#: Every argument that is a path or a name → what it is.
KINDS = {
    **dict.fromkeys(("photos", "labels", "checkpoint", "teacher", "data", "calibrate"), paths.InputPath),
    **dict.fromkeys(("photo", "bench images"), paths.InputPath),
    **dict.fromkeys(("output", "json", "bench plot"), paths.OutputPath),
}


def test_every_path_is_an_input_or_an_output():
    found = set()
    for command, parser in parsers().items():
        for action in parser._actions:
            own = f"{command} {action.dest}"
            name = own if own in KINDS else action.dest
            is_path = action.type in (paths.InputPath, paths.OutputPath)
            assert KINDS.get(name) == (action.type if is_path else None), own
            found |= {name} & KINDS.keys()
    assert found == {*KINDS}


def test_every_report_may_go_to_standard_output():
    with_report = {name for name, parser in parsers().items() if "--json" in parser._option_string_actions}
    assert with_report == {*parsers()} - {"classify", "explain"}


_DIGITS = "--checkpoint digits"
_NEW = "--output new.safetensors"


@pytest.mark.parametrize(
    "words",
    [
        "doctor",
        *(
            pytest.param(words, marks=pytest.mark.slow)
            for words in (
                f"export {_DIGITS} --format=pt2 --output=new.pt2",
                f"prune {_DIGITS} --mlp=0.5 --batch-size=1 {_NEW}",
                "train --data=digits --output=run --epochs=1 --warmup-epochs=0 --device=cpu",
            )
        ),
    ],
)
def test_a_report_on_standard_output(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*words.split(), "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert captured.err
    if not words.startswith("train"):
        assert main([*words.split(), "--json", "report.json"]) == 0
        assert json.loads(Path("report.json").read_text()).keys() == json.loads(captured.out).keys()


@pytest.mark.parametrize(
    ("words", "titles"),
    [
        ("evaluate --data digits --batch-size 180", ["0/2 ["]),
        (f"quantize --calibrate digits --images 5 {_NEW}", ["errors: ", "before: ", "after: "]),
        (f"prune --calibrate digits --heads 0.5 {_NEW}", ["saliency: ", "before: ", "after: "]),
    ],
)
def test_bars_are_drawn_on_a_terminal_and_wiped_away(words, titles, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main([*words.split(), *_DIGITS.split()]) == 0
    drawn = sys.stderr.getvalue()
    assert all(title in drawn for title in titles)
    assert not drawn.split("\r")[-1].strip()
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize("words", ["evaluate --data digits", f"prune --mlp 0.25 {_NEW}"])
def test_a_speed_beside_other_programs_is_said_to_be_rough(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(clock.Times, "is_disturbed", True)
    assert main([*words.split(), *_DIGITS.split(), "--json", "figures.json"]) == 0
    assert capsys.readouterr().err == f"cvt {words.split()[0]}: {clock.DISTURBED}\n"
    content = json.loads(Path("figures.json").read_text())
    figures = [content["before"], content["after"]] if "after" in content else [content]
    assert all(each["is_disturbed"] for each in figures)
