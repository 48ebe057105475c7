"""A process that compiles kernels and reads their machine code: this one has them for the interpreter."""

import json

import pytest

from tests.processes import Child

#: Runs a command for each line that it reads, in a copy of itself: they share what takes time to import.
COMMANDS = """
import json, multiprocessing, os, sys, traceback
from triton.runtime.cache import triton_key
from benchmarks.machine_code.__main__ import main

triton_key()  # which Triton remembers
multiprocessing.current_process()._config.pop("daemon")  # else it may not start processes
for line in sys.stdin:
    arguments, prelude, printed = json.loads(line)
    copy = os.fork()
    if copy == 0:
        code = 99
        try:
            os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            exec(prelude)
            code = main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def commands():
    """Starts a process that runs commands: this one has imported the kernels for the interpreter."""
    child = Child(COMMANDS, TRITON_INTERPRET="0")
    yield child
    child.communicate()


@pytest.fixture
def compile_ahead(commands, tmp_path):
    """Runs the command, and returns what it prints and the rows of its report."""

    def run(*arguments, prelude="pass", code=0, jobs=1):
        report, printed = tmp_path / "report.json", tmp_path / "printed"
        command = [*arguments, "--jobs", str(jobs), "--json", str(report)]
        print(json.dumps([command, prelude, str(printed)]), file=commands.stdin, flush=True)
        returned, out = int(commands.stdout.readline()), printed.read_text(encoding="utf-8")
        assert returned == code, out
        return out, json.loads(report.read_text())["kernels"]

    return run
