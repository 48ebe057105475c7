"""The lock of a training's directory, by which a second run there notices the first."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a directory within a block; however the process ends, the kernel releases it.

    Where there are no locks, a warning says so. It is a POSIX lock, since processes that decode images do not
    inherit such a one: they may live a little longer than this one. It is between processes, not between
    threads.

    Raises:
        ValueError: Another process holds it.
    """
    with open(directory / LOCK, "a+", encoding="utf-8") as file:
        try:
            _lock(file.fileno())
        except (BlockingIOError, PermissionError):
            file.seek(0)
            owner = file.read() or "another process"
            raise ValueError(
                f"output: {directory} is where {owner} trains; wait for its end, or choose another directory"
            ) from None
        except OSError as error:
            warnings.warn(f"{file.name}: cannot be locked against other runs: {error.strerror}", stacklevel=4)
        file.truncate(0)
        file.write(f"process {os.getpid()} of {platform.node()}")
        file.flush()
        yield
        file.truncate(0)


def _lock(descriptor: int) -> None:
    try:
        import fcntl  # which only POSIX has
    except ImportError:
        raise OSError(errno.ENOTSUP, "this system has no POSIX locks") from None
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
