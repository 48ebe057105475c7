"""The installed command ``cvt``."""

import os
import subprocess
import sys
from pathlib import Path

from cvt.commands import main
from cvt_kernels import backends
from tests.processes import run_python


def test_installed_command_and_module():
    script = Path(sys.executable).parent / "cvt"
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("cvt 0.")
    result = subprocess.run([sys.executable, "-m", "cvt"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "usage: cvt" in result.stderr


def test_help_waits_for_no_package_that_only_some_commands_need():
    code = "import sys; from cvt.commands import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    result = run_python(code)
    result.check_returncode()
    *usage, modules = result.stdout.splitlines()
    commands = "classify evaluate explain quantize export train doctor bench compile"
    for command in commands.split():
        assert any(line.startswith(f"    {command} ") for line in usage)
    heavy = {"PIL", "kornia", "matplotlib", "sklearn", "transformers", "triton", "torch.utils.flop_counter"}
    assert not heavy & set(modules.split())


def test_doctor_command_and_a_reader_that_leaves_early(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{operator} " in out for operator in backends.operators)
    for name, value in (("CVT_KERNELS_BACKEND", "x"), ("CVT_KERNELS_CPU", "foo")):
        code = "import sys; from cvt.commands import main; sys.exit(main(['doctor']))"
        wrong = run_python(code, **{name: value})
        assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
        assert wrong.stderr.startswith(f"cvt doctor: error: {name}: got '{value}', expected ")
    read, write = os.pipe()
    os.close(read)
    command = [Path(sys.executable).parent / "cvt", "doctor"]
    closed = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (closed.returncode, closed.stderr) == (0, "")
