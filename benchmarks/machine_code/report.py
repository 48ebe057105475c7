"""The report of machine code: the tables that are printed, the flaws that they name, and the JSON file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from cvt.commands.compile import report as compile_report
from cvt.commands.compile.jobs import LaunchCase
from cvt.commands.compile.report import ABBREVIATIONS, has_one_setting, purpose, versions
from cvt_kernels.tables import aligned

from .bounds import Analysis
from .cuda_kernels import CudaCase
from .instructions import CLASSES, access_bytes
from .jobs import Row

#: Written into the JSON file. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "benchmarks.machine_code", 1

_HEADING = (
    "arch", "kernel", "dtype", "mode", "for", "registers", "spills", "stack B", "shared B", "occupancy",
    "load B", "store B", "tensor cores", "waits",
)  # fmt: skip
_PREDICTED_HEADING = (
    "arch", "kernel", "dtype", "for", *CLASSES, "all", "MUFU", "per 64×64", "warps", "KiB in flight",
    "issue µs", "MUFU µs", "tensor µs", "DRAM µs", "predicted bound", "predicted share",
)  # fmt: skip
_NUMBERS = range(_HEADING.index("registers"), _HEADING.index("load B"))


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of a table with a line for each kernel."""
    brief = _has_one_setting(rows)
    return aligned([_HEADING, *(_cells(row, brief=brief) for row in rows)], right=_NUMBERS)


def _has_one_setting(rows: Sequence[Row]) -> bool:
    return has_one_setting(case for row in rows for case in row.cases if isinstance(case, LaunchCase))


def _cells(row: Row, *, brief: bool) -> tuple[str, ...]:
    resources, instructions = row.resources, row.instructions
    spill_loads = sum(instructions.spill_loads.values())
    spill_stores = sum(instructions.spill_stores.values())
    return (
        row.arch,
        row.kernel,
        " ".join(ABBREVIATIONS[dtype] for dtype in row.dtypes),
        " ".join(dict.fromkeys(case.mode for case in row.cases if isinstance(case, LaunchCase))),
        _purpose(row.cases, brief=brief),
        str(resources.registers),
        f"{spill_loads}+{spill_stores}" if spill_loads or spill_stores else "0",
        str(resources.stack),
        str(resources.shared),
        f"{resources.occupancy:.0%}",
        access_range(instructions.loads),
        access_range(instructions.stores),
        " ".join(f"{count}×{name}" for name, count in _families(instructions.tensor_cores).items()),
        str(instructions.waits or ""),
    )


def predicted_table(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of a table of what was counted and predicted; none if nothing was.

    A kernel that several launches share has the line of the launch with the lowest share of its floor.
    """
    counted = [row for row in rows if row.analyses]
    if not counted:
        return []
    brief = _has_one_setting(counted)
    cells = [_predicted_cells(row, brief=brief) for row in counted]
    return [
        "Instructions of a thread per output, counted in the code; times and bounds PREDICTED from them, not "
        "measured:",
        *aligned([_PREDICTED_HEADING, *cells], right=range(4, len(_PREDICTED_HEADING))),
    ]


def _predicted_cells(row: Row, *, brief: bool) -> tuple[str, ...]:
    _, counts, predicted = slowest(row)
    tile = counts.instructions_per_tile
    cells = (
        row.arch,
        row.kernel,
        " ".join(ABBREVIATIONS[dtype] for dtype in row.dtypes),
        _purpose(row.cases, brief=brief),
        *(f"{counts.classes_per_output[name]:.1f}" for name in CLASSES),
        f"{counts.instructions_per_output:.1f}",
        f"{counts.mufu_per_output:.2f}",
        "" if tile is None else f"{tile:.0f}",
        str(counts.warps),
        f"{counts.bytes_in_flight / 1024:.1f}",
    )
    if predicted is None:
        return (*cells, *[""] * (len(_PREDICTED_HEADING) - len(cells)))
    times = (f"{predicted.microseconds[part]:.0f}" for part in ("issue", "MUFU", "tensor", "DRAM"))
    return (*cells, *times, predicted.bound, f"{predicted.share_of_floor:.0%}")


def slowest(row: Row) -> Analysis:
    """Returns the analysis of the launch that is predicted farthest from its floor."""
    return min(
        row.analyses, key=lambda analysis: analysis.predicted.share_of_floor if analysis.predicted else 0.0
    )


def _purpose(cases: Sequence[LaunchCase | CudaCase], *, brief: bool) -> str:
    """Returns which stages of which model a kernel serves, or which activation and layout of a row."""
    for case in cases:
        if isinstance(case, CudaCase):
            result = f" to {case.result}" if case.result else ""
            return f"{case.activation}, {case.vectors} × {case.vector}{result}"
    return purpose((case for case in cases if isinstance(case, LaunchCase)), brief=brief)


def access_range(instructions: Iterable[str]) -> str:
    """Returns the bytes of the narrowest and the widest access among instructions, such as ``2–16``."""
    widths = sorted({access_bytes(name) for name in instructions})
    return "–".join(map(str, dict.fromkeys(widths[:1] + widths[-1:])))


def _families(counts: dict[str, int]) -> dict[str, int]:
    """Returns the counts of instructions added up by the first part of their names: HGMMA, HMMA."""
    totals: dict[str, int] = Counter()
    for name, count in counts.items():
        totals[name.split(".")[0]] += count
    return totals


def entry(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each flaw, or one line that there is none."""
    return compile_report.entry(
        rows, _purpose, "nothing spills, everything fits, no kernel is over its budget"
    )


def as_json(rows: Sequence[Row], notes: Sequence[str]) -> dict[str, Any]:
    """Returns the contents of the JSON file, which has every case and instruction of every kernel."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "versions": versions(),
        "notes": notes,
        "kernels": [_row_as_json(row) for row in rows],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    analyses = [
        {
            "work": analysis.work._asdict(),
            "counted": analysis.counts._asdict(),
            "predicted": analysis.predicted and analysis.predicted._asdict(),
        }
        for analysis in row.analyses
    ]
    return row._asdict() | {
        "cases": [case._asdict() for case in row.cases],
        "resources": row.resources._asdict(),
        "instructions": row.instructions._asdict(),
        "analyses": analyses,
    }
