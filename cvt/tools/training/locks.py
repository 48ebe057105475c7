"""A lock on a training run's directory, so that a second run there fails."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

from cvt_kernels.messages import stacklevel_of_caller

LOCK = ".lock"
# What is not meant to be the lock is neither followed nor waited for, where a system can do so.
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a directory during a block; the operating system releases it if the process dies.

    Warns where file locks are not supported. It is a POSIX lock, which image-loading workers do not inherit:
    they may outlive this process a little. It does not lock threads against each other.

    Raises:
        ValueError: Another process holds it, or it is no regular file.
    """
    with open(directory / LOCK, "a+", encoding="utf-8", opener=_open_regular) as file:
        try:
            _lock(file.fileno())
        except (BlockingIOError, PermissionError):
            file.seek(0)
            owner = file.read() or "another process"
            raise ValueError(
                f"output: {directory} is where {owner} trains; wait for its end, or choose another directory"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{file.name}: cannot be locked against other runs: {error.strerror}",
                stacklevel=stacklevel_of_caller(),
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} of {platform.node()}")
        file.flush()
        yield
        file.truncate(0)


def _open_regular(path: str, flags: int) -> int:
    """Opens a regular file for ``open``, and nothing that a link with its name leads to."""
    try:
        descriptor = os.open(path, flags | _SAFELY, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"output: {path} is a link, expected a regular file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"output: {path} is no regular file")
    return descriptor


def _lock(descriptor: int) -> None:
    try:
        import fcntl  # which only POSIX has
    except ImportError:
        raise OSError(errno.ENOTSUP, "this system has no POSIX locks") from None
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
