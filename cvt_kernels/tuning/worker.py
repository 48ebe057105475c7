"""A worker process that checks and times kernels, and is restarted if one hangs or crashes it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from .. import backends, machine
from ..launch import launching
from . import choices, tuner
from .calls import OperatorCall
from .choices import Entry
from .tuner import Measurement

_START_SECONDS = 300.0  # to import everything, from a slow disk too
_COMPILE_SECONDS = 1800.0  # for all kernels together
_END_SECONDS = 10.0  # for a process that has been killed to be gone, which a GPU may delay
_MOST_COMPILERS = 16

#: Called in the process before its first command; for tests.
Setup = Callable[[], None]


class Failure(Exception):  # noqa: N818 (it is caught where it is expected, and says what happened)
    """A failure of the process, worded as the flaw of a :class:`~.tuner.Measurement`."""


class NotEnoughMemory(Failure):
    """A call does not fit into the memory of the device."""


class _Answer(NamedTuple):
    """The answer to a command: a value or a failure, and whether the process is still usable."""

    value: Any
    failure: Failure | None = None
    is_sound: bool = True


class Worker:
    """A worker process for a device, which starts with the first command and ends with the context manager.

    Each candidate, and the preparation of a call, may take ``seconds``. On a timeout or a crash the method
    raises Failure, and the next command starts a new process. ``setup`` is called in each process first.
    """

    def __init__(self, device: torch.device, seconds: float, setup: Setup | None = None):
        self.device, self._seconds, self._setup = choices.numbered(device), seconds, setup
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._prepared: str | None = None
        self._chosen: dict[str, Entry] = {}

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def use(self, entries: Mapping[str, Entry]) -> None:
        """Tells the process what was chosen, for the parts of composed operators."""
        self._chosen |= entries
        if self._process is not None:
            self._run("use", dict(entries), self._seconds)

    def compile(self, calls: list[OperatorCall]) -> None:
        """Compiles the Triton kernels for calls into Triton's cache, several at once, without a launch."""
        self._run("compile", calls, _COMPILE_SECONDS)

    def candidates(self, call: OperatorCall) -> list[str]:
        """Returns the candidates for a call, the default first, and computes the expected results."""
        self._prepared = None
        names: list[str] = self._run("prepare", call, self._seconds)
        self._prepared = call.cache_key
        return names

    def check(self, call: OperatorCall, name: str) -> Measurement:
        """Checks a candidate, and ends the process if it may be corrupted; a failure becomes the flaw."""
        try:
            measurement: Measurement = self._prepare_and_run(call, "check", name, self._seconds)
        except NotEnoughMemory:
            raise
        except Failure as failure:
            return Measurement(None, None, None, str(failure))
        if measurement.flaw == tuner.WRITES_OUTSIDE:
            self.end()
        return measurement

    def time(self, call: OperatorCall, measurements: dict[str, Measurement]) -> dict[str, Measurement]:
        """Times candidates in turns; returns measurements with seconds."""
        return self._prepare_and_run(call, "time", measurements, self._seconds * len(measurements))

    def end(self) -> None:
        """Kills the process."""
        process, self._process, self._prepared = self._process, None, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            self._connection.close()

    def _prepare_and_run(self, call: OperatorCall, command: str, argument: Any, seconds: float) -> Any:
        """Runs a command about a call, which is prepared first if it is not the current one."""
        if self._prepared != call.cache_key:
            self.candidates(call)
        return self._run(command, argument, seconds)

    def _run(self, command: str, argument: Any, seconds: float) -> Any:
        """Runs a command in the process, and ends it if it does not answer or is not usable any more."""
        try:
            if self._process is None:
                self._start()
            answer = self._send_and_receive((command, argument), seconds)
        except BaseException:
            self.end()
            raise
        if answer.failure is None:
            return answer.value
        if not answer.is_sound:
            self.end()
        raise answer.failure

    def _send_and_receive(self, message: Any, seconds: float) -> _Answer:
        """Sends a message and waits for the answer; raises Failure without one."""
        try:
            self._connection.send(message)
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, ConnectionError):
            assert self._process is not None, "there is no process"
            try:
                code = self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                raise Failure("dies: it does not end") from None
            raise Failure(f"dies: signal {-code}" if code < 0 else f"dies: exit code {code}") from None
        raise Failure(f"hangs: takes longer than {seconds:g} s")

    def _start(self) -> None:
        """Starts a process; raises OSError if it does not report in time.

        It is no process of multiprocessing, which would run the user's script again.
        """
        if getattr(sys, "frozen", False) or not sys.executable:
            raise OSError("there is no Python to start a process with, as in a frozen application")
        self._connection, theirs = Pipe()
        program = f"from {__name__} import main; main({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is this process's affair
            )
        start = self.device, torch.get_num_threads(), self._setup, self._chosen
        try:
            self._send_and_receive(start, _START_SECONDS)
        except Failure as failure:
            raise OSError(f"the process that tunes kernels does not start ({failure})") from None


# In the process -------------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Serves the commands of :class:`Worker` until its end closes."""
    with contextlib.suppress(AttributeError):  # not Linux
        # As soon as the parent is gone, even during a kernel: PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.dup2(2, 1)  # what a kernel prints does not belong in the table
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, ConnectionError):
        device, threads, setup, chosen = connection.recv()
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backends.use_backend("auto")  # whatever the environment asks for
        if setup is not None:
            setup()
        server = _Server(device)
        server.use(chosen)
        connection.send(_Answer(None))
        while True:
            command, argument = connection.recv()
            connection.send(server.run(command, argument))


class _Server:
    """The commands of the process, and its current call."""

    def __init__(self, device: torch.device):
        self._device = device
        self._call: OperatorCall
        self._task: tuner.Task
        self._expected: tuner.Expected

    def run(self, command: str, argument: Any) -> _Answer:
        """Runs the method named by a command."""
        method: Callable[[Any], Any] = getattr(self, command)
        try:
            return _Answer(method(argument))
        except Exception as error:
            flaw = tuner.flaw_of(error)
            if tuner.is_out_of_memory(error):
                return _Answer(None, NotEnoughMemory(flaw), is_sound=False)
            return _Answer(None, Failure(flaw), tuner.is_usable(self._device))

    def use(self, entries: dict[str, Entry]) -> None:
        choices.use(self._device, entries)
        backends.forget()

    def compile(self, calls: list[OperatorCall]) -> None:
        chip, kernels = launching.chip(self._device), dict[bytes, launching.TritonKernel]()
        for call in calls:
            with call.autocasting():
                for launch in tuner.launches_of(call.task(), chip):
                    kernel = launching.specialize(launch, chip.capability)
                    kernels[pickle.dumps(kernel)] = kernel
        missing = [each for each in kernels.values() if not (machine.INTERPRETING or each.is_compiled())]
        workers = min(_MOST_COMPILERS, len(missing), len(os.sched_getaffinity(0)))
        if workers > 1:
            # What does not compile is found, and described, by its check.
            with ProcessPoolExecutor(workers, mp_context=get_context("forkserver")) as pool:
                for future in [pool.submit(kernel.compile_into_cache) for kernel in missing]:
                    future.exception()

    def prepare(self, call: OperatorCall) -> list[str]:
        self._call = call
        with call.autocasting():
            self._task = call.task()
            if len(self._task.candidates) > 1:
                self._expected = self._task.expected()
        return list(self._task.candidates)

    def check(self, name: str) -> Measurement:
        function = self._task.candidates[name]
        with self._call.autocasting():
            measurement = tuner.check(function, self._expected)
            if measurement.flaw is None:
                tuner.rehearse(function, self._task.timed)
        return measurement

    def time(self, measurements: dict[str, Measurement]) -> dict[str, Measurement]:
        functions = {name: self._task.candidates[name] for name in measurements}
        with self._call.autocasting():
            return tuner.time_in_turns(functions, self._task.timed, measurements)
