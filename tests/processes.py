"""Child processes that start in no time, as copies of one that has imported torch and nothing of ours."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import torch.multiprocessing

#: The way in which these processes start.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "pytest"])


def renew_server() -> None:
    """Stops the process that children are copies of; the next child starts another such process."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    CONTEXT.set_forkserver_preload(["torch", "pytest"])


class Child:
    """A process that runs code as ``python -c`` does.

    Attributes:
        stdin: Its standard input, to be written to.
        stdout: Its standard output.
    """

    def __init__(self, code: str, **environment: str):
        self._errors = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed by communicate)
        (theirs_in, ours_in), (ours_out, theirs_out) = (CONTEXT.Pipe(duplex=False) for _ in range(2))
        state = {**os.environ, **environment}, list(sys.path), os.getcwd()
        self._process = CONTEXT.Process(
            target=_run, args=(code, state, theirs_in, theirs_out, self._errors.name), daemon=True
        )
        self._process.start()
        theirs_in.close()
        theirs_out.close()
        self.stdin, self.stdout = (
            os.fdopen(os.dup(pipe.fileno()), mode) for pipe, mode in ((ours_in, "w"), (ours_out, "r"))
        )
        ours_in.close()
        ours_out.close()

    @property
    def returncode(self) -> int | None:
        """Its exit code; None as long as it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns its exit code; None as long as it runs."""
        return self.returncode

    def kill(self) -> None:
        """Ends it by SIGKILL."""
        self._process.kill()

    def communicate(self) -> tuple[str, str]:
        """Waits for its end; returns its standard output and error."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        with self.stdout, self._errors:
            out = self.stdout.read()
            self._process.join()
            return out, Path(self._errors.name).read_text(encoding="utf-8")


class Copied:
    """A ``subprocess.Popen`` of ``python -c`` that hands over pipes, but starts as a copy of that process."""

    def __init__(self, command: list[str], *, env: dict[str, str], pass_fds: list[int], **_: object):
        pipes = [Connection(os.dup(number)) for number in pass_fds]
        arguments = command[-1], env, pass_fds, pipes
        self._process = CONTEXT.Process(target=_run_with_pipes, args=arguments, daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill
        for pipe in pipes:
            pipe.close()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns its exit code."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return self._process.exitcode


def _run_with_pipes(
    code: str, environment: dict[str, str], numbers: list[int], pipes: list[Connection]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    os.setsid()
    kept = [os.dup(pipe.fileno()) for pipe in pipes]  # above all numbers, as copies of them are
    for number, copy in zip(numbers, kept, strict=True):
        os.dup2(copy, number, inheritable=True)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def run_ranks(function: Callable[..., None], *arguments: object) -> None:
    """Runs ``function(rank, *arguments)`` in two child processes, and waits for their end."""
    torch.multiprocessing.start_processes(function, arguments, nprocs=2, start_method="forkserver")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a child process, whose environment has ``environment`` too."""
    child = Child(code, **environment)
    out, err = child.communicate()
    assert child.returncode is not None
    return subprocess.CompletedProcess(code, child.returncode, out, err)


#: Runs pieces of code in copies of this process, at most ten minutes each; prints what each has printed.
_PIECES = """
import json, os, signal, sys, tempfile
told = {}
for name, code in PIECES.items():
    with tempfile.TemporaryFile("w+") as file:
        pid = os.fork()
        if pid == 0:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            signal.alarm(600)
            exec(code)
            sys.exit()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file.seek(0)
        told[name] = status, file.read()
print(json.dumps(told))
"""


def run_pieces(setup: str, pieces: dict[str, str], **environment: str) -> dict[str, tuple[int, str]]:
    """Runs pieces of code, each in a copy of one process that has run ``setup``.

    Returns:
        The exit code of each, and what it has printed, on standard error too.
    """
    done = run_python(setup + _PIECES.replace("PIECES", repr(pieces)), **environment)
    assert done.returncode == 0, done.stderr
    return {name: tuple(each) for name, each in json.loads(done.stdout).items()}


def _run(
    code: str,
    state: tuple[dict[str, str], list[str], str],
    stdin: Connection,
    stdout: Connection,
    errors: str,
) -> None:
    environment, sys.path[:], folder = state
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    stdin.close()
    stdout.close()
    sys.stdin = os.fdopen(0)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
