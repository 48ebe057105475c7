"""Triton kernels that are compiled before they are launched, several at once, in processes beside this one.

A first call needs some forty kernels, and Triton takes 0.2 to 10 seconds for each, one after the other. Here
they are compiled into Triton's cache on disk, where their launches find them. A process beside this one, the
server, imports PyTorch and Triton once, and forks a process for each kernel. Nothing is forked here, where
there may be threads and a CUDA context. Threads would do without processes, but a fifth of a compilation is
Python: it would hold the GIL that the call needs for thousands of small operators meanwhile.

What goes wrong beside costs time only: the launch then compiles the kernel here, and raises its error here.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from . import caller, launching, machine

with contextlib.suppress(ImportError):  # on Windows, where nothing is compiled beside
    import fcntl

# Kernels --------------------------------------------------------------------------------------------------


class TritonKernel(NamedTuple):
    """A Triton kernel specialized for some arguments; plain data, which can go to another process.

    Attributes:
        arch: Compute capability, 90 for sm_90.
        module: The module of the kernel.
        name: The name of the kernel in its module.
        signature, constants, attributes: Triton's description of the arguments, the last two by the path to
            an argument: its index, then indices within tuples.
        options: Triton's options, such as ``num_warps``.
    """

    arch: int
    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    def compile(self) -> Any:
        """Compiles the kernel into Triton's cache, under the key that a launch looks for, or finds it there.

        Raises:
            RuntimeError: It does not compile.
        """
        import triton

        try:
            return triton.compile(self.source(), target=self.target(), options=self.options)
        except Exception as error:  # Triton's own do not all survive the way to another process
            if caller.is_foreign(error):
                raise
            raise RuntimeError(f"{self.name} does not compile for sm_{self.arch}: {error}") from error

    def is_cached(self) -> bool:
        """Returns whether Triton's cache has it; False if this version of Triton does not tell."""
        try:
            from triton._C.libtriton import get_cache_invalidating_env_vars
            from triton.compiler import make_backend
            from triton.runtime.cache import get_cache_key, get_cache_manager

            backend, source = make_backend(self.target()), self.source()
            options = backend.parse_options(dict(self.options))
            key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
            manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
            return bool(manager.get_group(f"{source.name[:150]}.json"))
        except Exception as error:  # these are Triton's own, and a launch will tell what is wrong
            if caller.is_foreign(error):
                raise
            return False

    def source(self) -> Any:
        """Returns Triton's description of the kernel."""
        kernel = getattr(importlib.import_module(self.module), self.name)
        launching.settle_key(kernel)
        return source_of(kernel, self.signature, self.constants, self.attributes)

    def target(self) -> Any:
        """Returns Triton's description of the GPU."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def source_of(kernel: Any, *facts: dict[Any, Any]) -> Any:
    """Returns the source of a kernel in Triton or Gluon, by its signature, constants and attributes."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, *facts)
    from triton.compiler import ASTSource

    return ASTSource(kernel, *facts)


def specialize(launch: launching.Launch, arch: int) -> TritonKernel:
    """Returns the kernel of a launch, specialized as Triton specializes it for these arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, backend = launch.kernel, make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments)
    _, signature, constants, attributes = kernel._pack_args(
        backend, launch.options, bound, specialization, {}
    )
    names = kernel.__module__, kernel.__name__
    return TritonKernel(arch, *names, signature, constants, attributes, launch.options)


# In this process ------------------------------------------------------------------------------------------

_MOST = 16  # processes by default
_FEWEST = 3  # kernels for which a server is started, unless the call goes on meanwhile
_SILENCE = 300.0  # seconds after which a server that has finished nothing is given up


def workers() -> int:
    """Returns how many processes compile: ``CVT_KERNELS_COMPILE_WORKERS``, by default one per core, up to 16.

    With 0 the launches compile, in this process; so by default on one core, and always where processes cannot
    be forked, or in a frozen application, whose ``sys.executable`` is the application and no Python.

    Raises:
        ValueError: The variable is not a number of processes.
    """
    requested = os.environ.get("CVT_KERNELS_COMPILE_WORKERS")
    if requested and not (requested.isascii() and requested.isdigit()):
        raise ValueError(
            f"CVT_KERNELS_COMPILE_WORKERS: got {requested!r}, expected a number of processes, 0 for none"
        )
    if machine.INTERPRETING or not hasattr(os, "fork") or not sys.executable or getattr(sys, "frozen", False):
        return 0
    if requested:
        return int(requested)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST, cores) if cores > 1 else 0


class _Server:
    """The process beside this one; see :func:`serve`."""

    def __init__(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        program = f"from {__name__} import serve; serve({theirs.fileno()}, {workers()})"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is this process's affair
            )
        self.connection: Any = ours

    def end(self) -> None:
        """Kills the process and those that it has forked."""
        self.connection.close()
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class _Compilations:
    """The kernels that this process has asked for, and its server."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._server: _Server | None = None
        self._known: set[str] = set()
        self._pending: set[str] = set()
        self._unsent: list[tuple[str, TritonKernel]] = []
        self._heard = 0.0  # when the server last finished something, or got something to do

    def begin(self, kernels: Iterable[TritonKernel]) -> list[str]:
        with self._lock:
            named = {repr(kernel): kernel for kernel in kernels}
            for key, kernel in named.items():
                if key not in self._known:
                    self._known.add(key)
                    if not kernel.is_cached():
                        self._pending.add(key)
                        self._unsent.append((key, kernel))
            if self._server is not None or len(self._unsent) >= _FEWEST:
                self._send()
            return [key for key in named if key in self._pending]

    def pending(self, keys: Collection[str]) -> list[str]:
        with self._lock:
            self._receive()
            return [key for key in keys if key in self._pending]

    def wait(self, groups: Sequence[Collection[str]], seconds: float, most_left: int) -> bool:
        with self._lock:
            if self._unsent and seconds == math.inf:  # too few to wait for the start of a server
                self._give_up([key for key, _ in self._unsent])
            elif self._unsent:
                self._send()
        until = time.monotonic() + seconds
        while sum(1 for keys in groups if self.pending(keys)) > most_left:
            if time.monotonic() >= until:
                return False
            time.sleep(0.005)
        return True

    def end(self) -> None:
        with self._lock:
            server, self._server = self._server, None
            self._give_up(list(self._pending))
            if server is not None:
                server.end()

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        try:
            if self._server is None:
                self._server = _Server()
            for each in unsent:
                self._server.connection.send(each)
            self._heard = time.monotonic()
        except Exception as error:  # no process can be started, it is gone, or a kernel cannot be pickled
            self.end()
            if caller.is_foreign(error):
                raise

    def _receive(self) -> None:
        """Notes what the server has finished, or gives it up."""
        if self._server is None:
            return
        try:
            while self._server.connection.poll():
                self._pending.discard(self._server.connection.recv())
                self._heard = time.monotonic()
        except (EOFError, OSError):
            self.end()
        if self._pending and time.monotonic() > self._heard + _SILENCE:
            self.end()

    def _give_up(self, keys: Iterable[str]) -> None:
        """Leaves kernels to their launches."""
        self._pending.difference_update(keys)
        self._unsent = [each for each in self._unsent if each[0] in self._pending]

    def forget_in_fork(self) -> None:
        """Closes the connection in a fork of this process, which keeps it from the server otherwise."""
        if self._server is not None:
            self._server.process.returncode = 0  # it is no child of the fork
            self._server.connection.close()


_compilations = _Compilations()
atexit.register(lambda: _compilations.end())


def begin(kernels: Iterable[TritonKernel]) -> list[str]:
    """Begins to compile the kernels that Triton's cache does not have; returns the keys of these."""
    return _compilations.begin(kernels) if workers() else []


def pending(keys: Collection[str]) -> list[str]:
    """Returns the keys of the kernels that are not compiled yet."""
    return _compilations.pending(keys)


def wait(*groups: Collection[str], seconds: float = math.inf, most_left: int = 0) -> bool:
    """Waits until groups of kernels are compiled, or given up; returns whether they are.

    Args:
        groups: Keys of :func:`begin`.
        seconds: The longest to wait.
        most_left: The number of groups that it does not wait for.
    """
    return _compilations.wait(groups, seconds, most_left)


def end() -> None:
    """Ends the processes beside this one; what they have not compiled is left to the launches."""
    _compilations.end()


def _renew() -> None:
    global _compilations
    _compilations.forget_in_fork()
    _compilations = _Compilations()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew)


# In the process beside ------------------------------------------------------------------------------------

_IDLE = 60.0  # seconds after which a server without work ends


def serve(descriptor: int, most: int) -> None:
    """Compiles kernels that come through a connection, up to ``most`` at once, in forks of this process.

    It ends with the connection, and after a minute without work. It leads a process group of its own. Servers
    of several processes that share a cache of Triton's take turns, and find there what others have compiled.
    """
    connection, turn = Connection(descriptor), _Turn()
    with contextlib.suppress(OSError):
        os.nice(5)  # the call that waits has other work too
    waiting: deque[tuple[str, TritonKernel]] = deque()
    running: dict[int, str] = {}
    try:
        while True:
            if connection.poll(0.01 if running or waiting else _IDLE):
                waiting.append(connection.recv())
            elif not running and not waiting:
                return
            for process in _ended(running):
                connection.send(running.pop(process))
            if not waiting and not running:
                turn.end()
            while waiting and len(running) < most and turn.has_come():
                key, kernel = waiting.popleft()
                running[_forked(kernel, connection)] = key
    except (EOFError, OSError):  # the process that asks is gone
        pass
    finally:
        os.killpg(0, signal.SIGKILL)  # itself too


class _Turn:
    """A file lock: the turn of a server among those that share a cache of Triton's."""

    def __init__(self) -> None:
        self._file: Any = None

    def has_come(self) -> bool:
        """Returns whether the lock is held, or cannot be."""
        if self._file is None:
            from triton import knobs

            try:
                os.makedirs(knobs.cache.dir, exist_ok=True)
                self._file = open(os.path.join(knobs.cache.dir, "cvt_kernels.lock"), "w")  # noqa: SIM115
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.end()
                return False
            except OSError:
                return True
        return True

    def end(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _ended(running: Iterable[int]) -> list[int]:
    return [process for process in running if os.waitpid(process, os.WNOHANG)[0]]


def _forked(kernel: TritonKernel, connection: Any) -> int:
    """Forks a process that compiles a kernel; returns its number. An error is left to the launch."""
    kernel.is_cached()  # imports, and computes keys of functions, here: once for all forks
    process = os.fork()
    if process:
        return process
    try:
        connection.close()  # else the other end would not notice the end of the server
        compiled = kernel.compile()
        _build_launcher(compiled)
    finally:
        os._exit(0)


def _build_launcher(compiled: Any) -> None:
    """Builds the launcher in C that Triton up to 3.6 has for each signature, into its cache too."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)
