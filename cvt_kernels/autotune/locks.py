"""File locks between processes and threads."""

from __future__ import annotations

import atexit
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
    """Returns the process's only lock object for a file; it is reentrant in each thread.

    A forked process has its own: filelock refuses its parent's, or would take it as held.
    """
    from filelock import FileLock

    return FileLock(path)


# The destructor of filelock 4.0's locks raises once Python has taken down the modules that it needs.
atexit.register(_lock.cache_clear)


def remove_unless_held(path: Path) -> None:
    """Removes a lock file unless the lock is held.

    Raises:
        OSError: It cannot be locked or removed.
    """
    from filelock import FileLock, Timeout

    with contextlib.suppress(Timeout, NotImplementedError), FileLock(path).acquire(timeout=0):
        path.unlink()


@contextlib.contextmanager
def held(path: Path, seconds: float) -> Iterator[bool]:
    """Holds a file lock within a block, or goes on without it after a timeout.

    The value of the block is False after a timeout; True if the lock is held, or if locking is impossible.
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
