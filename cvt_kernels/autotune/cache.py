"""The cache of autotuning: cache key → entry, in memory and on disk.

A cache key is a string that names an operator and a class of its calls. Its :class:`Entry` names the backend
that serves them. Each machine has one JSON file in the user's cache directory, named by a hash of everything
that its entries depend on (:func:`machine_key`). Processes share it: each reads it once and merges its new
entries under a lock. ``CVT_KERNELS_TUNED`` names files that are read and never written.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from ..caller import stacklevel_of_caller
from . import files
from .entries import Entry
from .key import digest, machine_key
from .locks import held

#: How many processes time the candidates of a cache key where other work disturbs the timing.
_MOST_TIMINGS = 3

#: Seconds that a process waits while another one tunes, and while another one writes; and the interval at
#: which it looks for an entry meanwhile.
_TUNING_SECONDS, _WRITING_SECONDS, _TURN_SECONDS = 300.0, 10.0, 0.2


# Settings -------------------------------------------------------------------------------------------------


def tuning_enabled() -> bool:
    """Returns whether calls are autotuned at first use: True unless ``CVT_KERNELS_AUTOTUNE`` is 0.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    requested = os.environ.get("CVT_KERNELS_AUTOTUNE") or "1"
    if requested not in ("0", "1"):
        raise ValueError(f"CVT_KERNELS_AUTOTUNE: got {requested!r}, expected 0 or 1")
    return requested == "1"


def tuning_seconds() -> float:
    """Returns how long a call may tune: ``CVT_KERNELS_AUTOTUNE_SECONDS``, by default 2; inf is no limit.

    Raises:
        ValueError: The variable is not a number of seconds.
    """
    requested = os.environ.get("CVT_KERNELS_AUTOTUNE_SECONDS") or "2"
    try:
        seconds = float(requested)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError(
            f"CVT_KERNELS_AUTOTUNE_SECONDS: got {requested!r}, expected a number of at least 0, or inf"
        )
    return seconds


def cache_directory() -> Path:
    """Returns this package's folder in ``XDG_CACHE_HOME`` or ``~/.cache``; it need not exist.

    Without a home directory, it is a path that cannot be created, so that nothing is written anywhere.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the XDG specification says to ignore it
        cache = Path(os.path.expanduser("~"), ".cache")
    if not cache.is_absolute():
        cache = Path(os.path.abspath(os.devnull))
    return cache / "cvt_kernels"


# The cache ------------------------------------------------------------------------------------------------

#: Guards what follows, and the fields of every cache.
_guard = threading.RLock()
_caches: dict[tuple[torch.device, int], Cache] = {}
_warned: set[str] = set()


def _renew_guard() -> None:
    """Releases the guard in a forked process, which lacks the thread that held it."""
    global _guard
    _guard = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_guard)


def cache_for(device: torch.device) -> Cache:
    """Returns the cache of a device: one object in a process for each machine key."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    device_and_threads = device, torch.get_num_threads()
    return _caches.get(device_and_threads) or _new_cache(device_and_threads)


def _new_cache(device_and_threads: tuple[torch.device, int]) -> Cache:
    with _guard:
        key = machine_key(device_and_threads[0])
        same = next((cache for cache in _caches.values() if cache.key == key), None)
        return _caches.setdefault(device_and_threads, same or Cache(key))


def forget() -> None:
    """Drops the entries that this process has in memory, and lets it warn again."""
    with _guard:
        _caches.clear()
        _warned.clear()


class Cache:
    """The entries of one machine key.

    Files in ``CVT_KERNELS_TUNED`` take precedence over the user's cache, and earlier ones over later ones. A
    file that is damaged or from another machine is ignored, with one warning per process.

    Attributes:
        key: The machine key (:func:`machine_key`).
        path: The file in the user's cache.
    """

    def __init__(self, key: Mapping[str, object]):
        self.key = dict(key)
        self.path = cache_directory() / "entries" / f"{digest(key)}.json"
        names = os.environ.get("CVT_KERNELS_TUNED", "").split(os.pathsep)
        self._shipped_paths = [Path(name) for name in names if name]
        self._shipped: dict[str, Entry] | None = None
        self._cached: dict[str, Entry] = {}  # in the cache's file, as last read or written
        self._unwritten: dict[str, Entry] = {}  # could not be written
        self._passing: dict[str, Entry] = {}  # never written: they hold for this process only
        self._is_tried = False  # whether the next field holds
        self._why_not_written: str | None = None
        self._settled: set[str] = set()  # cache keys that were tuned or timed in this process
        self._is_disturbed = False  # whether other work disturbed a timing in this process
        # Replaced and never changed, so that get() needs no lock; None before the files have been read.
        self._known: dict[str, Entry] | None = None

    def get(self, cache_key: str) -> Entry | None:
        """Returns the entry of a cache key, or None."""
        known = self._known
        if known is None:
            known = self._read()
        return known.get(cache_key)

    def read_again(self) -> None:
        """Reads the cache's file again, for entries of other processes."""
        self._read()

    def entries(self) -> dict[str, Entry]:
        """Returns all entries: cache key → entry."""
        return dict(self._read() if self._known is None else self._known)

    def cached_entries(self) -> dict[str, Entry]:
        """Returns the entries in the cache's file: cache key → entry."""
        if self._known is None:
            self._read()
        return dict(self._cached)

    def shipped_files(self) -> dict[Path, int | str]:
        """Returns the files of ``CVT_KERNELS_TUNED``: path → number of its entries, or why it is ignored.

        Entries for another type of device are not counted.
        """
        contents = {path: files.read(path, self.key) for path in self._shipped_paths}
        return {path: found if isinstance(found, str) else len(found) for path, found in contents.items()}

    def remember(self, entries: Mapping[str, Entry], *, replace: bool = False) -> None:
        """Adds entries to the cache, and to its file if they are lasting.

        Where the file cannot be written, they stay in memory, and the process warns once.

        Args:
            entries: Cache key → entry. Numbers that are not finite become None; an error that is not finite
                is also a flaw.
            replace: Whether they replace existing entries of the same cache keys.
        """
        new = {cache_key: files.storable(entry) for cache_key, entry in entries.items()}
        with _guard:
            self._settled |= new.keys()
            self._is_disturbed |= any(entry.is_unsure for entry in new.values())
            new = self._without_passing(new, replace)
            if entries and not new:
                return
            if self._why_not_written is not None:
                self._why_not_written = files.why_not_writable(self.path.parent)  # it may be possible now
            if self._why_not_written is None:
                self._merge(new, replace)
            if self._why_not_written is None:
                return
            known = {**self._read_cache(), **self._unwritten}
            self._unwritten |= {
                cache_key: new[cache_key] for cache_key in new if replace or cache_key not in known
            }
            self._read()
        self._warn_not_remembered(self._why_not_written)

    def _warn_not_remembered(self, reason: str | None) -> None:
        _warn_once(
            "not remembered",
            f"{self.path}: entries cannot be remembered there, so that each process tunes its kernels "
            f"again: {reason}. Let XDG_CACHE_HOME name a directory of your own that can be written, or "
            "CVT_KERNELS_TUNED a file of entries",
        )

    def times_again(self, cache_key: str) -> bool:
        """Returns whether this process should time the candidates again; True at most once for a cache key.

        It should where other work disturbed the timing in an earlier process, and has disturbed none in this
        one. Entries of ``CVT_KERNELS_TUNED`` stay as they are.
        """
        with _guard:
            entry = self.get(cache_key)
            if entry is None or not entry.is_unsure or cache_key in (self._shipped or {}):
                return False
            if self._is_disturbed or cache_key in self._settled:
                return False
            self._settled.add(cache_key)
            return entry.timings < _MOST_TIMINGS

    def advice(self) -> str | None:
        """Returns how many entries were timed on a busy machine, and what to do about it, or None."""
        known, shipped = self.entries(), self._shipped or {}
        if not (unsure := sum(known[cache_key].is_unsure for cache_key in known if cache_key not in shipped)):
            return None
        were = "1 choice was" if unsure == 1 else f"{unsure} choices were"
        return (
            f"{were} timed while other programs kept this machine busy: run `cvt tune` when it is idle, or "
            f"remove {self.path} and start again"
        )

    def _without_passing(self, new: dict[str, Entry], replace: bool) -> dict[str, Entry]:
        """Keeps the entries that are not lasting in memory, and returns the others."""
        lasting = {cache_key: entry for cache_key, entry in new.items() if entry.is_lasting}
        if replace:
            for cache_key in new:
                self._passing.pop(cache_key, None)
        if len(lasting) < len(new):
            known = {} if replace else self._read()
            self._passing |= {q: new[q] for q in new if q not in lasting and q not in known}
            self._read()
        return lasting

    def why_not_remembered(self, *, may_write: bool = True) -> str | None:
        """Returns why the cache's file cannot be written, or None.

        The result is kept until the next attempt to write.

        Args:
            may_write: Whether to find out by creating the folder and a file in it. If not, only permissions
                are looked at, as long as nothing has been written.
        """
        with _guard:
            if not self._is_tried and not may_write:
                return files.why_not_permitted(self.path.parent)
            if not self._is_tried:
                self._is_tried, self._why_not_written = True, files.why_not_writable(self.path.parent)
            return self._why_not_written

    @contextlib.contextmanager
    def tuning(
        self, is_known: Callable[[], bool] = lambda: False, *, seconds: float = _TUNING_SECONDS
    ) -> Iterator[bool]:
        """Holds the lock of this machine key: one thread of one process tunes at a time.

        The context manager is reentrant, and reads the cache's file again before its block begins. It goes on
        without the lock after some seconds, where nothing can be written, and once ``is_known``: the process
        that tunes may itself be waiting for this one, in a collective operation.

        The value of the block is False where another thread or process has the lock.

        Args:
            is_known: Returns whether the needed entries are there; called after each reading of the file.
            seconds: How long to wait for the lock; at most 300.
        """
        with contextlib.ExitStack() as stack:
            has_turn = True
            if self.why_not_remembered() is None:
                path = self.path.with_suffix(".tuning")
                until = time.monotonic() + min(seconds, _TUNING_SECONDS)
                has_turn = stack.enter_context(held(path, min(seconds, _TURN_SECONDS)))
                while not has_turn and time.monotonic() < until:
                    self._read()
                    if is_known():
                        break
                    has_turn = stack.enter_context(held(path, _TURN_SECONDS))
            self._read()
            yield has_turn

    def _read(self) -> dict[str, Entry]:
        """Reads the cache's file again, and the others the first time; returns all entries."""
        with _guard:
            return self._combine(self._read_cache())

    def _read_cache(self) -> dict[str, Entry]:
        if (reason := files.why_folder_not_trusted(self.path.parent)) is not None:
            if os.path.lexists(self.path):
                self._warn_not_remembered(reason)
            return {}
        return _read_or_warn(self.path, self.key, is_shipped=False)

    def _combine(self, cached: dict[str, Entry]) -> dict[str, Entry]:
        if self._shipped is None:
            self._shipped = {}
            for path in reversed(self._shipped_paths):
                self._shipped |= _read_or_warn(path, self.key, is_shipped=True)
        self._cached = cached
        # Others may have timed what this process has only checked.
        passing = {q: each for q, each in self._passing.items() if each.timings or q not in cached}
        self._known = {**cached, **self._unwritten, **passing, **self._shipped}
        return self._known

    def _merge(self, new: dict[str, Entry], replace: bool) -> None:
        """Merges entries into the file by an atomic write; notes why if it cannot be written."""
        try:
            files.make_folder(self.path.parent)
            # Without the lock, the file stays whole all the same, but entries may be lost.
            with held(self.path.with_suffix(".writing"), _WRITING_SECONDS):
                cached = self._read_cache()
                old = {**cached, **self._unwritten}
                merged = {**old, **new} if replace else {**new, **old}
                if merged != cached:
                    files.write(self.path, self.key, merged)
        except OSError as error:
            self._is_tried, self._why_not_written = True, files.reason(error)
            return
        self._is_tried, self._why_not_written = True, None
        self._unwritten = {}
        self._combine(merged)


def _read_or_warn(path: Path, key: Mapping[str, object], *, is_shipped: bool) -> dict[str, Entry]:
    """Returns the entries of a file; if it cannot be used, warns and returns none."""
    found = files.read(path, key, may_be_missing=not is_shipped)
    if not isinstance(found, str):
        return found
    source = "CVT_KERNELS_TUNED: " if is_shipped else ""
    _warn_once(str(path), f"{source}{path}: this file of entries is ignored: {found}")
    return {}


def _warn_once(subject: str, message: str) -> None:
    with _guard:
        if subject in _warned:
            return
        _warned.add(subject)
    warnings.warn(message, RuntimeWarning, stacklevel=stacklevel_of_caller())
