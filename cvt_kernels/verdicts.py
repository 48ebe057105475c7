"""Verdicts: which backend serves which calls on this machine, and their store on disk.

A *question* is a plain string that names an operator and a class of its calls; a :class:`Verdict` answers it
for one machine. The verdicts of a machine are one JSON file in the user's cache directory, named by a digest
of everything that they depend on (:func:`machine_key`). Processes share it: each reads it once, and merges
what it has proven into it under a lock. ``CVT_KERNELS_VERDICTS`` names files that are read but never written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import machine

if TYPE_CHECKING:
    from filelock import BaseFileLock

_SCHEMA, _VERSION = "cvt-kernels verdicts", 1
_NUMBERS = ("error", "allowed", "seconds", "host_seconds")

#: Seconds that a process waits while another one proves, and while another one writes.
_PROVING_SECONDS, _WRITING_SECONDS = 300.0, 10.0


class Trial(NamedTuple):
    """The result of one candidate.

    Attributes:
        error: Its largest error against float64; None if it gave no number.
        allowed: The largest error that is allowed.
        seconds: Device time of a call, with a cold L2; None if it was not timed.
        host_seconds: Time that the host takes to start a call; None on a CPU.
        flaw: Why it cannot serve: ``wrong: …``, ``fails: …``, or from ``cvt prove`` ``hangs: …`` or
            ``dies: …``; None if it can.
    """

    error: float | None
    allowed: float | None
    seconds: float | None
    host_seconds: float | None
    flaw: str | None

    @property
    def call_seconds(self) -> float | None:
        """The seconds that a call takes at best: those of the device or of the host, whichever are more."""
        return None if self.seconds is None else max(self.seconds, self.host_seconds or 0.0)


class Verdict(NamedTuple):
    """The answer to one question.

    Attributes:
        chosen: The backend that serves.
        chosen_in_graphs: The backend that serves in CUDA graphs and under ``torch.compile``, where the host
            costs nothing.
        trials: Backend → its result.
    """

    chosen: str
    chosen_in_graphs: str
    trials: dict[str, Trial]


# Settings -------------------------------------------------------------------------------------------------


def proving_enabled() -> bool:
    """Returns whether kernels may be proven at first use: unless ``CVT_KERNELS_PROVE`` is 0.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    requested = os.environ.get("CVT_KERNELS_PROVE") or "1"
    if requested not in ("0", "1"):
        raise ValueError(f"CVT_KERNELS_PROVE: got {requested!r}, expected 0 or 1")
    return requested == "1"


def cache_directory() -> Path:
    """Returns the folder of this package in the user's cache directory; it need not exist.

    The cache directory is ``XDG_CACHE_HOME``, or else ``~/.cache``. Without a home directory it is one that
    cannot be made, so that nothing is written where nobody looks for it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # to be ignored, by the specification of XDG
        cache = Path(os.path.expanduser("~"), ".cache")
    if not cache.is_absolute():
        cache = Path(os.path.abspath(os.devnull))
    return cache / "cvt_kernels"


# The machine's key ----------------------------------------------------------------------------------------


def machine_key(device: torch.device) -> dict[str, object]:
    """Returns everything that the verdicts of a device depend on, ready for JSON."""
    return {**_installation(), **_device_facts(device)}


@functools.cache
def _installation() -> dict[str, object]:
    triton = machine.installed_version("triton") or "not installed"
    extension = _extension_file()
    return {
        "cvt-kernels": importlib.import_module("cvt_kernels").__version__,
        "kernel sources": _hash_of(_source_files()),
        "extension": _hash_of([extension]) if extension else "not built",
        "torch": str(torch.__version__),
        "triton": f"{triton}, interpreted" if machine.INTERPRETING else triton,
        "CUDA": torch.version.cuda,
    }


def _source_files() -> list[Path]:
    """Returns the sources that decide what a kernel computes and whether it passes."""
    package = Path(__file__).parent
    judges = [package / name for name in ("accuracy.py", "proofs.py", "reference.py")]
    return [*sorted((package / "ops").rglob("*.py")), *(path for path in judges if path.is_file())]


def _extension_file() -> Path | None:
    spec = importlib.util.find_spec("cvt_kernels._C")
    return Path(spec.origin) if spec is not None and spec.origin else None


def _hash_of(files: Iterable[Path]) -> str:
    contents = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        contents.update(f"{path.name} {len(content)} ".encode())
        contents.update(content)
    return contents.hexdigest()[:16]


def _device_facts(device: torch.device) -> dict[str, object]:
    if device.type == "cuda":
        return _gpu_facts(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu":
        return {**_cpu_facts(), "threads": torch.get_num_threads()}
    return {"device": device.type}


@functools.cache
def _gpu_facts(index: int) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "device": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _nvidia_driver(),
    }


def _nvidia_driver() -> str:
    """Describes the driver by its kernel module and its library, as ``580.65.06, CUDA 13.0``."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:  # Windows and its Linux
        text = ""
    number = re.search(r"\d+(\.\d+)+", text)
    cuda = machine.cuda_driver_version()
    return f"{number[0] if number else 'unknown'}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"


@functools.cache
def _cpu_facts() -> dict[str, object]:
    return {
        "device": "cpu",
        "name": machine.cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "CVT_KERNELS_CPU": os.environ.get("CVT_KERNELS_CPU", ""),  # read once by the extension too
        "instruction sets": _hash_of_instruction_sets(),
    }


def _hash_of_instruction_sets() -> str:
    """Returns the hash of the processor's flags in ``/proc/cpuinfo``; ``unknown`` where there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux
        flags = ""
    names = sorted(flags.partition(":")[2].split())
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16] if names else "unknown"


def _digest(key: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


# The store ------------------------------------------------------------------------------------------------

#: Guards what follows, and the fields of every store.
_guard = threading.RLock()
_stores: dict[tuple[torch.device, int], Store] = {}
_warned: set[str] = set()


def _renew_guard() -> None:
    """Makes the guard free in a forked process: the thread that held it is not there."""
    global _guard
    _guard = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_guard)


def store_for(device: torch.device) -> Store:
    """Returns the store of a device: the same object in a process as long as its key is the same."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    place = device, torch.get_num_threads()
    return _stores.get(place) or _new_store(place)


def _new_store(place: tuple[torch.device, int]) -> Store:
    with _guard:
        key = machine_key(place[0])
        same = next((store for store in _stores.values() if store.key == key), None)
        return _stores.setdefault(place, same or Store(key))


class Store:
    """The verdicts of one machine key.

    Those of the files in ``CVT_KERNELS_VERDICTS`` win over those of the cache, and of several such files the
    earlier one wins. A file that is damaged or of another machine is ignored, with one warning per process.

    Attributes:
        key: The key, as :func:`machine_key` returns it.
        path: The file in the cache.
    """

    def __init__(self, key: Mapping[str, object]):
        self.key = dict(key)
        self.path = cache_directory() / "verdicts" / f"{_digest(key)}.json"
        names = os.environ.get("CVT_KERNELS_VERDICTS", "").split(os.pathsep)
        self._shipped_paths = [Path(name) for name in names if name]
        self._shipped: dict[str, Verdict] | None = None
        self._kept: dict[str, Verdict] = {}  # could not be written
        # Replaced and never changed, so that get() needs no lock; None before the files have been read.
        self._known: dict[str, Verdict] | None = None

    def get(self, question: str) -> Verdict | None:
        """Returns the verdict on a question; None if there is none."""
        known = self._known
        if known is None:
            known = self._read()
        return known.get(question)

    def questions(self) -> dict[str, Verdict]:
        """Returns every verdict by its question."""
        return dict(self._read() if self._known is None else self._known)

    def shipped_files(self) -> dict[Path, int | str]:
        """Returns the files of ``CVT_KERNELS_VERDICTS``: path → number of its verdicts, or why it is ignored.

        The verdicts of another type of device do not count.
        """
        contents = {path: _content_of(path, self.key, is_shipped=True) for path in self._shipped_paths}
        return {path: found if isinstance(found, str) else len(found) for path, found in contents.items()}

    def remember(self, verdicts: Mapping[str, Verdict], *, replace: bool = False) -> None:
        """Merges verdicts into the file of the cache.

        Where it cannot be written they are kept in this process, and one warning per process says so.

        Args:
            verdicts: Question → verdict. Numbers that are not finite become None, and such an error is also a
                flaw.
            replace: Whether they replace those that are already known; otherwise those stay.
        """
        new = {question: storable(verdict) for question, verdict in verdicts.items()}
        with _guard:
            reason = self.why_not_remembered()
            if reason is None:
                try:
                    self._merge(new, replace)
                    return
                except OSError as error:
                    reason = _reason(error)
            known = {**_read_file(self.path, self.key), **self._kept}
            self._kept |= {question: new[question] for question in new if replace or question not in known}
            self._read()
        _warn_once(
            "not remembered",
            f"{self.path}: verdicts cannot be remembered there, so that each process proves its kernels "
            f"again: {reason}. Let XDG_CACHE_HOME name a directory that can be written, or "
            "CVT_KERNELS_VERDICTS a file of verdicts",
        )

    def why_not_remembered(self) -> str | None:
        """Says why verdicts cannot be written here, having tried it; None if they can."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".tried.") as file:
                file.write(b"1")
                file.flush()
        except OSError as error:
            return _reason(error)
        return None

    @contextlib.contextmanager
    def proving(self) -> Iterator[None]:
        """Lets one thread of one process at a time prove kernels for this key, within a block.

        The block begins with what others have proven meanwhile, and may be nested. It goes on without the
        lock after 300 s, and at once where nothing can be written.
        """
        with contextlib.ExitStack() as stack:
            if self.why_not_remembered() is None:
                stack.enter_context(_held(self.path.with_suffix(".proving"), _PROVING_SECONDS))
            self._read()
            yield

    def _read(self) -> dict[str, Verdict]:
        """Reads the cache's file again, and the others the first time; returns all that is known then."""
        with _guard:
            return self._combine(_read_file(self.path, self.key))

    def _combine(self, cached: dict[str, Verdict]) -> dict[str, Verdict]:
        if self._shipped is None:
            self._shipped = {}
            for path in reversed(self._shipped_paths):
                self._shipped |= _read_file(path, self.key, is_shipped=True)
        self._known = {**cached, **self._kept, **self._shipped}
        return self._known

    def _merge(self, new: dict[str, Verdict], replace: bool) -> None:
        """Merges verdicts into the file; OSError if it cannot be written."""
        # If the lock does not come in time, the file stays whole all the same: a verdict may be lost.
        with _held(self.path.with_suffix(".writing"), _WRITING_SECONDS):
            cached = _read_file(self.path, self.key)
            old = {**cached, **self._kept}
            merged = {**old, **new} if replace else {**new, **old}
            if merged != cached:
                _write_file(self.path, self.key, merged)
        self._kept = {}
        self._combine(merged)


@functools.cache
def _lock(path: Path) -> BaseFileLock:
    """Returns the only lock object of a file, in which each thread counts how often it holds it."""
    from filelock import FileLock

    return FileLock(path)


@contextlib.contextmanager
def _held(path: Path, seconds: float) -> Iterator[None]:
    """Holds a file's lock within a block, or goes on without it where it cannot be had in time."""
    with contextlib.ExitStack() as stack:
        # OSError includes filelock.Timeout.
        with contextlib.suppress(OSError, NotImplementedError):
            stack.enter_context(_lock(path).acquire(timeout=seconds))
        yield


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


def _warn_once(subject: str, message: str) -> None:
    with _guard:
        if subject in _warned:
            return
        _warned.add(subject)
    warnings.warn(message, RuntimeWarning, stacklevel=4)


# The file -------------------------------------------------------------------------------------------------


def storable(verdict: Verdict) -> Verdict:
    """Returns a verdict as its file has it: without NaN and infinity, which JSON does not have."""
    return verdict._replace(trials={name: _storable_trial(trial) for name, trial in verdict.trials.items()})


def _storable_trial(trial: Trial) -> Trial:
    flaw = trial.flaw
    if flaw is None and trial.error is not None and not math.isfinite(trial.error):
        flaw = f"wrong: its error is {trial.error}"
    numbers = {name: _finite(getattr(trial, name)) for name in _NUMBERS}
    return Trial(**numbers, flaw=flaw)


def _finite(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else float(number)


def _write_file(path: Path, key: Mapping[str, object], verdicts: Mapping[str, Verdict]) -> None:
    """Writes a file in one piece, whatever other processes do."""
    content = {
        "schema": _SCHEMA,
        "version": _VERSION,
        "machine": key,
        "verdicts": {
            question: {
                **verdict._asdict(),
                "trials": {name: trial._asdict() for name, trial in verdict.trials.items()},
            }
            for question, verdict in verdicts.items()
        },
    }
    text = json.dumps(content, sort_keys=True, indent=1, allow_nan=False)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(8).hex()}")
    try:
        scratch.write_text(text + "\n", encoding="utf-8")
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()


def _read_file(path: Path, key: Mapping[str, object], *, is_shipped: bool = False) -> dict[str, Verdict]:
    """Reads the verdicts of a file; a warning and none if it is damaged, of another machine, or not there.

    A file of the cache may be missing. A file of another type of device is for another store: no warning.
    """
    content = _content_of(path, key, is_shipped=is_shipped)
    if not isinstance(content, str):
        return content
    source = "CVT_KERNELS_VERDICTS: " if is_shipped else ""
    _warn_once(str(path), f"{source}{path}: this file of verdicts is ignored: {content}")
    return {}


def _content_of(path: Path, key: Mapping[str, object], *, is_shipped: bool) -> dict[str, Verdict] | str:
    """Returns the verdicts of a file, or why it is ignored."""
    try:
        return _parse(path.read_text(encoding="utf-8"), key)
    except (FileNotFoundError, NotADirectoryError) as error:
        return _reason(error) if is_shipped else {}
    except OSError as error:
        return _reason(error)
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8 or not JSON
        return str(error)


def _parse(text: str, key: Mapping[str, object]) -> dict[str, Verdict]:
    """Returns the verdicts of a file's text, none if it is of another type of device.

    Raises:
        ValueError: The text is no file of verdicts, or one of another machine.
    """
    content = _checked(json.loads(text), dict, "file")
    for name, expected in (("schema", _SCHEMA), ("version", _VERSION)):
        value = _field(content, name, type(expected), name)
        if value != expected:
            raise ValueError(f"{name}: got {value!r}, expected {expected!r}")
    theirs = _field(content, "machine", dict, "machine")
    if theirs.get("device") != key.get("device"):
        return {}
    names = sorted({*theirs, *key})
    differing = [
        f"{name} is {theirs.get(name)!r} (here {key.get(name)!r})"
        for name in names
        if theirs.get(name) != key.get(name)
    ]
    if differing:
        raise ValueError(f"it is of another machine: {', '.join(differing)}")
    verdicts = _field(content, "verdicts", dict, "verdicts")
    return {question: _parse_verdict(value, repr(question)) for question, value in verdicts.items()}


def _parse_verdict(content: object, where: str) -> Verdict:
    fields = _checked(content, dict, where)
    trials = _field(fields, "trials", dict, f"{where}, trials")
    return Verdict(
        _field(fields, "chosen", str, f"{where}, chosen"),
        _field(fields, "chosen_in_graphs", str, f"{where}, chosen_in_graphs"),
        {name: _parse_trial(trial, f"{where}, {name}") for name, trial in trials.items()},
    )


def _parse_trial(content: object, where: str) -> Trial:
    fields = _checked(content, dict, where)
    numbers = {name: _number(fields, name, f"{where}, {name}") for name in _NUMBERS}
    return Trial(**numbers, flaw=_field(fields, "flaw", str | None, f"{where}, flaw"))


def _number(fields: dict[str, Any], name: str, where: str) -> float | None:
    value = _field(fields, name, float | int | None, where)
    if value is None:
        return None
    if isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{where}: got {value!r:.60}, expected a finite number or null")
    return float(value)


def _field(fields: dict[str, Any], name: str, kind: Any, where: str) -> Any:
    if name not in fields:
        raise ValueError(f"{where}: is missing")
    return _checked(fields[name], kind, where)


def _checked(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, kind):
        expected = getattr(kind, "__name__", kind)
        raise ValueError(f"{where}: got {value!r:.60}, expected {expected}")
    return value
