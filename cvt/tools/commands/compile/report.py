"""The report of ``cvt compile``: the table that it prints, the flaws that it names, and its JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import triton

from cvt_kernels import __version__
from cvt_kernels.messages import aligned

from .jobs import LaunchCase, Row

#: Written into the JSON file. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "cvt compile", 3

_HEADING = (
    "arch", "kernel", "dtype", "mode", "for", "registers", "spilled B", "shared B", "occupancy",
)  # fmt: skip
ABBREVIATIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of a table with a line for each kernel."""
    brief = len({_setting(case) for row in rows for case in row.cases}) == 1
    numbers = range(_HEADING.index("registers"), len(_HEADING))
    return aligned([_HEADING, *(_cells(row, brief=brief) for row in rows)], right=numbers)


def _cells(row: Row, *, brief: bool) -> tuple[str, ...]:
    return (
        row.arch,
        row.kernel,
        " ".join(ABBREVIATIONS[dtype] for dtype in row.dtypes),
        " ".join(dict.fromkeys(case.mode for case in row.cases)),
        purpose(row.cases, brief=brief),
        str(row.resources.registers),
        str(row.resources.stack),
        str(row.resources.shared),
        f"{row.resources.occupancy:.0%}",
    )


def _setting(case: LaunchCase) -> str:
    return f"{case.model} {case.image_size}²×{case.batch_size}"


def purpose(cases: Iterable[LaunchCase], *, brief: bool) -> str:
    """Returns which stages of which model a kernel serves; ``brief`` leaves the model out."""
    by_setting: dict[str, list[str]] = {}
    for case in cases:
        by_setting.setdefault("stage" if brief else _setting(case), []).append(str(case.stage))
    return ", ".join(f"{setting} {' '.join(dict.fromkeys(each))}" for setting, each in by_setting.items())


def entry(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each flaw, or one line that there is none."""
    lines = []
    for row in rows:
        served = " ".join([*row.dtypes, purpose(row.cases, brief=False)])
        lines += [f"{row.arch} {row.kernel}, {served}: {flaw}" for flaw in row.flaws]
    return lines or [f"{len(rows)} kernels: nothing spills, everything fits"]


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the contents of the JSON file, which has every case of every kernel."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "versions": {
            "cvt_kernels": __version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "kernels": [
            row._asdict()
            | {"cases": [case._asdict() for case in row.cases], "resources": row.resources._asdict()}
            for row in rows
        ],
    }
