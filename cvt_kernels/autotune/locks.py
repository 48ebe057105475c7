"""Locks of files between processes and threads."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock


@functools.cache
def _lock(path: Path, process: int) -> BaseFileLock:
    """Returns a process's only lock object of a file, in which each thread counts how often it holds it.

    That of the process from which this one was forked is refused by filelock, or would seem to be held.
    """
    from filelock import FileLock

    return FileLock(path)


def remove_unless_held(path: Path) -> None:
    """Removes the file of a lock unless somebody holds it.

    Raises:
        OSError: It cannot be locked or removed.
    """
    from filelock import FileLock, Timeout

    with contextlib.suppress(Timeout, NotImplementedError), FileLock(path).acquire(timeout=0):
        path.unlink()


@contextlib.contextmanager
def held(path: Path, seconds: float) -> Iterator[bool]:
    """Holds a file's lock within a block, or goes on without it where it cannot be had in time.

    Its value is False if the time was up, True if the lock is held or cannot be had at all.
    """
    from filelock import Timeout

    with contextlib.ExitStack() as stack:
        in_time = True
        try:
            stack.enter_context(_lock(path, os.getpid()).acquire(timeout=seconds))
        except Timeout:
            in_time = False
        except (OSError, NotImplementedError):
            pass
        yield in_time
