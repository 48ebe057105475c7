"""The process of a command: its warnings, the signals that end it, and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

# What torch says of sizes that no memory has, besides that it cannot be had.
_TOO_LARGE = (
    "Cannot allocate memory",
    "calculation overflowed",
    "integer multiplication overflow",
    "insufficient shared memory",
)
_LONGEST = 400  # characters of an error of argparse, which lists all choices


def run_command(name: str, command: Callable[[], int | None]) -> int:
    """Runs ``command``, which may return an exit code; its warnings are lines on stderr.

    Errors that a user can fix become one line there and exit code 2.
    """
    from cvt_kernels import BackendUnavailable  # lazy, as below: PyTorch would slow down --help
    from cvt_kernels.messages import printable
    from cvt_kernels.tuning.tuner import is_out_of_memory

    try:
        with _printed_warnings(name):
            return command() or 0
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would write again
        return 0
    except (ValueError, OSError, BackendUnavailable, ModuleNotFoundError) as error:
        reason = str(error)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) and not any(words in str(error) for words in _TOO_LARGE):
            raise
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = f"there is not enough memory for images of this size and number: {first_line}"
    except KeyboardInterrupt:
        return 130
    print(f"{name}: error: {printable(' '.join(reason.split()))}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def _printed_warnings(name: str) -> Iterator[None]:
    """Prints every warning of the block on stderr at once, each once, as a line after a name."""
    from tqdm import tqdm

    from cvt_kernels.messages import printable

    def show(message: Any, *details: Any, **more: Any) -> None:
        tqdm.write(f"{name}: {printable(str(message))}", file=sys.stderr)  # above a bar, if there is one

    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=UserWarning)
        warnings.showwarning = show
        yield


class Parser(argparse.ArgumentParser):
    """A parser whose errors, which repeat what came, leave the terminal as it is."""

    def error(self, message: str) -> Any:
        """Prints the usage and the error, and exits with 2."""
        if not message.isprintable():
            from cvt_kernels.messages import printable_word

            message = printable_word(message)
        super().error(message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…")


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
def ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into SystemExit, so that temporary files are removed.

    Signals that already have a handler, or are ignored as by nohup, stay as they are. So do all signals in
    processes of torchrun: they may wait for a dead peer, and only end when killed.
    """
    numbers: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread() and "TORCHELASTIC_RUN_ID" not in os.environ:
        both = signal.SIGTERM, signal.SIGHUP
        numbers = [number for number in both if signal.getsignal(number) == signal.SIG_DFL]

    def end(number: int, frame: Any) -> None:
        for each in numbers:  # timeout sends its own twice
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
