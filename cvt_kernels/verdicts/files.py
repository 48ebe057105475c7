"""Files of verdicts: how they are written and read, and why that may not be possible."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .answers import Trial, Verdict

_SCHEMA, _VERSION = "cvt-kernels verdicts", 1
_NUMBERS = ("error", "allowed", "seconds", "host_seconds")

# Writing --------------------------------------------------------------------------------------------------


def write(path: Path, key: Mapping[str, object], verdicts: Mapping[str, Verdict]) -> None:
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


def why_not_writable(folder: Path) -> str | None:
    """Says why files cannot be written in a folder, having made it and a file in it; None if they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tried.") as file:
            file.write(b"1")
            file.flush()
    except OSError as error:
        return reason(error)
    return None


def why_not_permitted(folder: Path) -> str | None:
    """Says why files may not be written in a folder, without a change on the disk; None if they may.

    The permissions of the folder answer, or of the nearest one above it that exists.
    """
    nearest = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)
    if not nearest.is_dir():
        return f"{nearest}: {os.strerror(errno.ENOTDIR)}"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest}: {os.strerror(errno.EACCES)}"
    return None


def reason(error: OSError) -> str:
    """Returns the message of an error, with the name of the file that it is about."""
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)


# Reading --------------------------------------------------------------------------------------------------


def read(path: Path, key: Mapping[str, object], *, may_be_missing: bool = False) -> dict[str, Verdict] | str:
    """Reads the verdicts of a file.

    Args:
        path: The file.
        key: The machine's key that it should have.
        may_be_missing: Whether a file that is not there counts as one without verdicts.

    Returns:
        Question → verdict, nothing from a file of another type of device; or why the file cannot be used.
    """
    try:
        return _parse(path.read_text(encoding="utf-8"), key)
    except (FileNotFoundError, NotADirectoryError) as error:
        return {} if may_be_missing else error.strerror or str(error)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeDecodeError as error:
        return f"it is not text: {error}"
    except (json.JSONDecodeError, RecursionError) as error:
        return f"it is not JSON: {error}"
    except ValueError as error:
        return str(error)


def _parse(text: str, key: Mapping[str, object]) -> dict[str, Verdict]:
    """Returns the verdicts of a file's text, none if it is of another type of device.

    Raises:
        ValueError: The text is no file of verdicts, or one that was made for another machine.
    """
    content = _checked(json.loads(text), dict, "file")
    for name, expected in (("schema", _SCHEMA), ("version", _VERSION)):
        value = _field(content, name, type(expected), name)
        if value != expected:
            raise ValueError(f"{name}: got {value!r}, expected {expected!r}")
    theirs = _field(content, "machine", dict, "machine")
    if theirs.get("device") != key.get("device"):
        return {}
    differences = [
        f"{name}: {_told(theirs.get(name))} in the file, {_told(key.get(name))} here"
        for name in sorted({*theirs, *key})
        if theirs.get(name) != key.get(name)
    ]
    if differences:
        raise ValueError(f"it was made for another machine or installation: {'; '.join(differences)}")
    verdicts = _field(content, "verdicts", dict, "verdicts")
    return {question: _parse_verdict(value, repr(question)) for question, value in verdicts.items()}


def _told(fact: object) -> str:
    return "none" if fact in (None, "") else str(fact)


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
