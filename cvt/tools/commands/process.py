"""The process of a command: its streams, the signals that end it, and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# What torch says of sizes that no memory has, besides that it cannot be had.
_TOO_LARGE = (
    "Cannot allocate memory",
    "calculation overflowed",
    "integer multiplication overflow",
    "insufficient shared memory",
)
# Arguments that decide on how much memory is needed.
_SIZES = ("image_size", "image_sizes", "batch_size", "batch_sizes", "workers", "jobs")

_LONGEST = 400  # characters of an error of argparse, which lists all choices


def run_command(name: str, arguments: argparse.Namespace, command: Callable[[], int | None]) -> int:
    """Runs ``command``, which may return an exit code.

    Errors that a user can fix become one line on stderr and exit code 2.
    """
    from cvt_kernels import BackendUnavailable  # lazy, as below: PyTorch would slow down --help

    if sys.stdout is None:
        return _fail(name, "standard output is closed, expected it open")
    code = None
    try:
        code = command()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        return 0
    except (ValueError, OSError, BackendUnavailable, ModuleNotFoundError) as error:
        return _fail(name, why_not_printed() or str(error))
    except (RuntimeError, MemoryError) as error:
        reason = why_too_large(error, arguments)
        if reason is None:
            raise
        return _fail(name, reason)
    except KeyboardInterrupt:
        return 130
    reason = why_not_printed()
    return (code or 0) if reason is None else _fail(name, reason)


def _fail(name: str, reason: str) -> int:
    from cvt_kernels.messages import printable

    with contextlib.suppress(OSError):  # where stderr takes nothing, the exit code says it
        print(f"{name}: error: {printable(' '.join(reason.split()))}", file=sys.stderr)
    return 2


def why_not_printed() -> str | None:
    """Returns why stdout cannot be written to, or None; a closed pipe is no error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        return why_not_written(error)
    return None


def why_not_written(error: OSError) -> str:
    """Returns a message that stdout cannot be written to, and why."""
    return f"standard output cannot be written to: {error.strerror}"


def why_too_large(error: Exception, arguments: argparse.Namespace) -> str | None:
    """Returns a message about the sizes for which memory does not suffice; None for other errors."""
    from cvt_kernels.tuning.tuner import is_out_of_memory

    if not is_out_of_memory(error) and not any(words in str(error) for words in _TOO_LARGE):
        return None
    sizes = []
    for name in _SIZES:
        value = getattr(arguments, name, None)
        numbers = [str(number) for number in (value if isinstance(value, list) else [value]) if number]
        if numbers:
            option = name.replace("_sizes", "_size").replace("_", "-")
            sizes.append(f"--{option} {' '.join(numbers)}")
    told = f" for {', '.join(sizes)}" if sizes else ""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"there is not enough memory{told}: {first_line}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors, which repeat what came, leave the terminal as it is."""

    def error(self, message: str) -> Any:
        """Prints the usage and the error, and exits with 2."""
        if not message.isprintable():
            from cvt_kernels.messages import printable_word

            message = printable_word(message)
        super().error(message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…")

    def error_with_help(self, message: str) -> Any:
        """Prints the help, with a line per command, and the error, and exits with 2."""
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: error: {message}\n")

    def exit(self, status: int = 0, message: str | None = None) -> Any:
        """Exits, with 2 where the help could not be printed."""
        reason = None if sys.stdout is None else why_not_printed()
        if reason is not None:
            status, message = 2, f"{self.prog}: error: {reason}\n"
        super().exit(status, message)


@contextlib.contextmanager
def temporary_files_together() -> Iterator[None]:
    """Keeps the temporary files of the block, and of processes that it starts, in one folder, and removes it.

    Else a process that is ended would leave its own, as Triton's assembler does.
    """
    multiprocessing.util.get_temp_dir()  # is remembered: it has to outlive the block
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            tempfile.tempdir = before
            os.environ.pop("TMPDIR")
            os.environ.update({} if variable is None else {"TMPDIR": variable})


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """Lets a command end cleanly, even with closed streams or on a signal.

    What stdout cannot encode is escaped.
    """
    stdout, stderr = sys.stdout, sys.stderr
    errors = getattr(stdout, "errors", None)
    with contextlib.ExitStack() as stack:
        if stderr is None:
            sys.stderr = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        _reconfigure(stdout, "backslashreplace")
        stack.enter_context(_ended_by_signals())
        try:
            yield
        finally:
            _empty(sys.stdout)
            _empty(sys.stderr)
            sys.stderr = stderr
            _reconfigure(stdout, errors)


def _reconfigure(stream: Any, errors: str | None) -> None:
    with contextlib.suppress(OSError):  # where stdout has become a pipe after Python began
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def _empty(stream: Any) -> None:
    """Writes what a stream holds back, or throws it away where it cannot be: Python would try again."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into SystemExit, so that temporary files are removed.

    Signals that already have a handler, or are ignored as by nohup, stay as they are. So do all signals in
    processes of torchrun: they may wait for a dead peer, and only end when killed.
    """
    if threading.current_thread() is not threading.main_thread() or "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [getattr(signal, name) for name in names]
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    begun: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if not begun:  # timeout sends its own twice
            begun.append(number)
            raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    except Exception as error:  # such as of a worker process, which got the signal too
        if not begun:
            raise
        raise SystemExit(128 + begun[0]) from error
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
