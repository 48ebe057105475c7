"""The installed command ``cvt``."""

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
from cvt.tools.commands import COMMANDS, main
from cvt_kernels import backends
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
        ([], 2, "cvt: error: a command is missing"),
        (["clasify"], 2, "cvt: error: argument COMMAND: invalid choice: 'clasify'"),
        (["--nonsense"], 2, "cvt: error: unrecognized arguments: --nonsense"),
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
    heavy = {"PIL", "kornia", "matplotlib", "sklearn", "transformers", "triton", "torch.utils.flop_counter"}
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


@pytest.mark.parametrize("flaw", [None, "wrong: output is off by 2"])
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
