"""A worker process that checks and times kernels, and is restarted if one hangs or crashes it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from cvt_kernels import autotune, backends, compiling, dispatch
from cvt_kernels.autotune import Measurement, tuner

from .cache_keys import CacheKey

_START_SECONDS = 300.0  # to import everything, from a slow disk too
_COMPILE_SECONDS = 300.0  # to begin to compile the kernels of one cache key, or to wait for a part of all
_END_SECONDS = 10.0  # for a process that has been killed to be gone, which a GPU may delay

#: Called in the process before its first cache key; for tests.
Setup = Callable[[], None]


class Failure(Exception):  # noqa: N818 (it is caught where it is expected, and says what happened)
    """A failure of the process, worded as the flaw of a :class:`~cvt_kernels.autotune.Measurement`."""


class NotEnoughMemory(Failure):
    """A call does not fit into the memory of the device."""


class Candidates(NamedTuple):
    """The candidates for a cache key, and the one of PyTorch's own that is the default."""

    names: list[str]
    default: str


class Worker:
    """A worker process for a device, which starts with the first command and ends with the context manager.

    Each candidate, and the preparation of a cache key, may take ``seconds``. On a timeout or a crash the
    method raises Failure, and the next command starts a new process. ``setup`` is called in each process
    first.
    """

    def __init__(self, device: torch.device, seconds: float, setup: Setup | None = None):
        self._device, self._seconds, self._setup = device, seconds, setup
        self._process: Any = None
        self._connection: Connection | None = None
        self._prepared: str | None = None

    @property
    def margin(self) -> float:
        """The factor by which a candidate must win against the default."""
        return tuner.margin_of(self._device)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def candidates(self, cache_key: CacheKey) -> Candidates:
        """Returns the candidates for a cache key, and computes the expected results by the reference."""
        self._prepared = None
        candidates = self._run("prepare", cache_key, self._seconds)
        self._prepared = cache_key.text
        return candidates

    def begin_to_compile(self, cache_key: CacheKey) -> None:
        """Begins to compile the Triton kernels for a cache key into Triton's cache, without a launch."""
        self._prepared = None
        self._run("begin_to_compile", cache_key, _COMPILE_SECONDS)

    def wait_for_compilers(self, seconds: float) -> bool:
        """Waits until these kernels are compiled, for some seconds at most; returns whether they are."""
        return self._run("wait_for_compilers", seconds, _COMPILE_SECONDS)

    def check(self, cache_key: CacheKey, name: str) -> Measurement:
        """Checks a candidate, and ends the process if it may be corrupted; a failure becomes the flaw."""
        try:
            measurement = self._prepare_and_run(cache_key, "check", name)
        except NotEnoughMemory:
            raise
        except Failure as failure:
            return Measurement(None, None, None, None, str(failure))
        if measurement.flaw == tuner.WRITES_OUTSIDE:
            self.end()
        return measurement

    def time(self, cache_key: CacheKey, measurements: dict[str, Measurement]) -> dict[str, Measurement]:
        """Times candidates in turns, a single one against itself; returns measurements with seconds."""
        return self._prepare_and_run(cache_key, "time", measurements, patience=len(measurements))

    def end(self) -> None:
        """Kills the process."""
        process, self._process, self._prepared = self._process, None, None
        if process is not None:
            process.kill()
            process.join(_END_SECONDS)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _prepare_and_run(self, cache_key: CacheKey, command: str, argument: Any, patience: int = 1) -> Any:
        """Runs a command about a cache key, which is prepared first if it is not the current one."""
        if self._prepared != cache_key.text:
            self.candidates(cache_key)
        return self._run(command, argument, self._seconds * patience)

    def _run(self, command: str, argument: Any, seconds: float) -> Any:
        """Runs a command in the process, and ends it if it does not answer or is not usable any more."""
        pipe = self._connection or self._start()
        try:
            answer = self._send_and_receive(pipe, (command, argument), seconds)
        except BaseException:
            self.end()
            raise
        if answer.failure is None:
            return answer.value
        if not answer.is_sound:
            self.end()
        raise answer.failure

    def _send_and_receive(self, pipe: Connection, message: tuple[str, Any] | None, seconds: float) -> _Answer:
        """Sends a message, if given, and waits for the answer; raises Failure without one."""
        try:
            if message is not None:
                pipe.send(message)
            if pipe.poll(seconds):
                return pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(_END_SECONDS)
            raise Failure(f"dies: {_words_of_exit(self._process.exitcode)}") from None
        raise Failure(f"hangs: takes longer than {seconds:g} s")

    def _start(self) -> Connection:
        """Starts a process; raises OSError if it does not report in time."""
        ours, theirs = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")  # neither PyTorch's threads nor CUDA survive a fork
        process = spawn.Process(
            target=serve, args=(theirs, self._device, torch.get_num_threads(), self._setup), daemon=True
        )
        with _interrupts_ignored():
            process.start()
            self._process, self._connection = process, ours
        theirs.close()
        try:
            self._send_and_receive(ours, None, _START_SECONDS)
        except Failure as failure:
            self.end()
            raise OSError(f"the process that tunes kernels does not start ({failure})") from None
        except BaseException:
            self.end()
            raise
        return ours


class _Answer(NamedTuple):
    """The answer to a command: a value or a failure, and whether the process is still usable."""

    value: Any
    failure: Failure | None = None
    is_sound: bool = True


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Makes a process that the block starts ignore Ctrl-C from the beginning."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # it would lift what follows
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the process inherits
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _words_of_exit(code: int | None) -> str:
    if code is None:
        return "it does not end"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


# In the process -------------------------------------------------------------------------------------------


def serve(pipe: Connection, device: torch.device, threads: int, setup: Setup | None) -> None:
    """Serves the commands of :class:`Worker` until its end closes."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what a kernel prints does not belong in the table
    torch.set_num_threads(threads)
    backends.use_backend("auto")  # whatever the environment asks for
    if setup is not None:
        setup()
    server = _Server(device)
    pipe.send(_Answer(None))
    with contextlib.suppress(EOFError):
        while True:
            command, argument = pipe.recv()
            pipe.send(server.run(command, argument))


def _end_with_parent() -> None:
    """Ends the process as soon as the parent is gone, even during a kernel."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


class _Server:
    """The commands of the process, and its current cache key."""

    def __init__(self, device: torch.device):
        self._device = device
        self._tuning: tuner.Task
        self._expected: tuner.Expected
        self._autocast: torch.dtype | None = None
        self._compiled: list[str] = []  # keys of kernels

    def run(self, command: str, argument: Any) -> _Answer:
        """Runs the method named by a command."""
        method: Callable[[Any], Any] = getattr(self, command)
        try:
            return _Answer(method(argument))
        except Exception as error:
            failure = Failure(f"fails: {tuner.describe_error(error)}")
            if tuner.is_out_of_memory(error):
                return _Answer(None, NotEnoughMemory(*failure.args), is_sound=False)
            return _Answer(None, failure, tuner.is_usable(self._device))

    def prepare(self, cache_key: CacheKey) -> Candidates:
        # Composed operators are timed with the backends chosen for their parts.
        autotune.cache_for(self._device).read_again()
        backends.forget()
        self._tuning = task = self._task_of(cache_key)
        if len(task.candidates) > 1:
            with self._undisturbed():
                self._expected = task.expected()
        return Candidates(list(task.candidates), task.default)

    def begin_to_compile(self, cache_key: CacheKey) -> None:
        self._autocast = cache_key.autocast
        arguments = cache_key.make_arguments(self._device)
        with self._undisturbed():
            self._compiled += compiling.begin(dispatch.kernels_of(cache_key.operator, **arguments))

    def wait_for_compilers(self, seconds: float) -> bool:
        return compiling.wait(self._compiled, seconds=seconds)

    def _task_of(self, cache_key: CacheKey) -> tuner.Task:
        self._autocast = cache_key.autocast
        arguments = cache_key.make_arguments(self._device)
        with self._undisturbed():
            return dispatch.task_of(cache_key.operator, **arguments)

    def check(self, name: str) -> Measurement:
        with self._undisturbed():
            return tuner.check(self._tuning.candidates[name], self._expected)

    def time(self, measurements: dict[str, Measurement]) -> dict[str, Measurement]:
        functions = {name: self._tuning.candidates[name] for name in measurements}
        if len(measurements) == 1:  # alone it would not be timed
            (name, measurement) = next(iter(measurements.items()))
            functions["beside itself"], measurements = (
                functions[name],
                {**measurements, "beside itself": measurement},
            )
        with self._undisturbed():
            return tuner.time_in_turns(functions, self._tuning.timed, measurements, self._tuning.default)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        casts = torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None)
        with casts, tuner.undisturbed(self._device):
            yield
