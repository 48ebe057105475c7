"""The report of ``cvt compile``: the table that it prints, the flaws that it names, and its JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from cvt_kernels import __version__
from cvt_kernels.messages import aligned

from .jobs import Row

#: Written into the JSON file. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "cvt compile", 3

_NUMBERS = ("registers", "spilled B", "shared B", "occupancy")


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of a table with a line for each kernel."""
    cells: list[tuple[str, ...]] = [("arch", "kernel", "dtype", "mode", "for", *_NUMBERS)]
    for row in rows:
        modes, took = dict.fromkeys(case.mode for case in row.cases), row.resources
        words = row.arch, row.kernel, " ".join(row.dtypes), " ".join(modes), _purpose(row)
        numbers = took.registers, took.stack, took.shared
        cells.append((*words, *map(str, numbers), f"{took.occupancy:.0%}"))
    return aligned(cells, right=range(5, 9))


def _purpose(row: Row) -> str:
    """Returns which stages of which model a kernel serves."""
    stages: dict[str, list[str]] = {}
    for case in row.cases:
        setting = f"{case.model} {case.image_size}²×{case.batch_size}"
        stages.setdefault(setting, []).append(str(case.stage))
    return ", ".join(f"{setting} {' '.join(dict.fromkeys(each))}" for setting, each in stages.items())


def entry(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each flaw, or one line that there is none."""
    lines = [
        f"{row.arch} {row.kernel}, {' '.join(row.dtypes)} {_purpose(row)}: {flaw}"
        for row in rows
        for flaw in row.flaws
    ]
    return lines or [f"{len(rows)} kernels: nothing spills, everything fits"]


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the contents of the JSON file, which has every case of every kernel."""
    versions = {"cvt_kernels": __version__, "torch": torch.__version__, "triton": triton.__version__}
    kernels = [
        row._asdict()
        | {"cases": [case._asdict() for case in row.cases], "resources": row.resources._asdict()}
        for row in rows
    ]
    return {"schema": SCHEMA, "version": VERSION, "versions": versions, "kernels": kernels}
