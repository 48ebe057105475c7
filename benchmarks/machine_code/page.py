"""The tables of docs/kernels.md, made from a JSON report of the machine code.

``python -m benchmarks.machine_code.page REPORT.json docs/kernels.md`` puts them into the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cvt.files import replacing
from cvt_kernels.tables import markdown

from .report import SCHEMA, VERSION, access_range


def main(arguments: Sequence[str | Path]) -> None:
    """Puts the tables of a report into a page, between ``<!-- compile: NAME -->`` and ``<!-- end -->``.

    The names are the keys of ``tables``.

    Args:
        arguments: The paths of the report and of the page.

    Raises:
        ValueError: The page lacks the marks of a table, or the report is of another version.
    """
    report, page = map(Path, arguments)
    made = tables(json.loads(report.read_text(encoding="utf-8")))
    put_into(page, {f"compile: {name}": table for name, table in made.items()})


def put_into(page: Path, parts: Mapping[str, str]) -> None:
    """Puts parts into a page, each between ``<!-- NAME -->`` and ``<!-- end -->``.

    Raises:
        ValueError: The page lacks the marks of a part.
    """
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"{page}: has no {begin.strip()} and {end}")
        text = before + begin + part + "\n" + end + after
    with replacing(page) as file:
        file.write_text(text, encoding="utf-8")


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Returns two Markdown tables for each ``table_name``: the worst of each kernel over all shapes.

    ``NAME`` has registers of a thread / KiB of shared memory of a block / occupancy. ``NAME, predicted`` has
    instructions per output, or per 64 × 64 attention scores / the predicted bound and share of the floor. The
    CUDA kernels have a line for each number of elements that a thread holds.

    Raises:
        ValueError: It is not a report of this version.
    """
    if (report.get("schema"), report.get("version")) != (SCHEMA, VERSION):
        raise ValueError(f"expected a report of {SCHEMA}, version {VERSION}")
    grouped: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in report["kernels"]:
        grouped.setdefault(table_name(row), {}).setdefault(line_name(row), []).append(row)
    archs = list(dict.fromkeys(row["arch"] for row in report["kernels"]))
    found = {}
    for name, lines in grouped.items():
        found[name] = "\n".join(markdown(_rows(lines, archs)))
        found[f"{name}, predicted"] = "\n".join(markdown(_predicted_rows(lines, archs)))
    return found


#: The operators of each table that has several.
_TABLES = {
    "linear": (
        "conv_embedding",
        "conv_linear",
        "linear_gelu",
        "linear_add",
        "linear_add_layer_norm",
        "layer_norm_mlp",
    ),
    "rows": ("gather_rows", "gather_add_layer_norm", "scatter_rows"),
    "int8": ("quantize_rows", "layer_norm_quantize", "gelu_quantize", "linear_int8"),
}


def table_name(row: dict[str, Any]) -> str:
    """Returns the name of the tables that a kernel of the report belongs to, else its operator's."""
    operator = row["operator"]
    return next((name for name, operators in _TABLES.items() if operator in operators), operator)


#: How the name of a line ends, by the dtype of a result that is not of the input's.
_RESULTS = {"": "", "float32": " to float32", "float16": " to 16 bits", "bfloat16": " to 16 bits"}


def line_name(row: dict[str, Any]) -> str:
    """Returns the name of the line that a kernel of the report belongs to."""
    operator, kernel = row["operator"], row["kernel"]
    if table_name(row) in _TABLES:
        return f"`{kernel}`" if kernel.startswith(operator) else f"`{kernel}` for `{operator}`"
    name = kernel.removeprefix(operator).strip("_") or kernel
    for case in row["cases"]:
        if "vector" in case:
            single = " single" if case["vector"] == 1 else ""
            result = _RESULTS[case["result"]]
            return f"`{name}`, {case['vector'] * case['vectors']}{single} elements{result}"
    return f"`{name}`"


def _rows(lines: dict[str, list[dict[str, Any]]], archs: list[str]) -> list[list[str]]:
    """Returns the rows of an operator's table, the heading first."""
    columns = _columns(archs)
    table = [["kernel", "bytes per load", "per store", *map(" ".join, columns)]]
    for name, rows in lines.items():
        accesses = (
            access_range(instruction for row in rows for instruction in row["instructions"][kind])
            for kind in ("loads", "stores")
        )
        cells = (
            _worst([row["resources"] for row in _of_column(rows, dtype, arch)]) for dtype, arch in columns
        )
        table.append([name, *accesses, *cells])
    return table


def _columns(archs: list[str]) -> list[tuple[str, str]]:
    return [(dtype, arch) for dtype in ("bfloat16", "float32") for arch in archs]


def _of_column(rows: list[dict[str, Any]], dtype: str, arch: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["arch"] == arch and dtype in row["dtypes"]]


def _predicted_rows(lines: dict[str, list[dict[str, Any]]], archs: list[str]) -> list[list[str]]:
    """Returns the rows of an operator's table of predictions; a kernel without any has none."""
    columns = _columns(archs)
    table = [["kernel, predicted", *map(" ".join, columns)]]
    for name, rows in lines.items():
        analyses = (
            [analysis for row in _of_column(rows, dtype, arch) for analysis in row["analyses"]]
            for dtype, arch in columns
        )
        cells = [_least(each) for each in analyses]
        if any(cells):
            table.append([name, *cells])
    return table


def _least(analyses: list[dict[str, Any]]) -> str:
    """Returns the cell of one type and GPU, empty if nothing was predicted.

    It has the most instructions of any launch, and the bound of the launch that is farthest from its floor.
    """
    predicted = [analysis for analysis in analyses if analysis["predicted"] is not None]
    if not predicted:
        return ""
    bound = min((analysis["predicted"] for analysis in predicted), key=lambda each: each["share_of_floor"])
    instructions = max(
        analysis["counted"]["instructions_per_tile"] or analysis["counted"]["instructions_per_output"]
        for analysis in predicted
    )
    number = f"{instructions:.3g}" if instructions < 100 else f"{instructions:.0f}"
    return f"{number} / {bound['bound']} {bound['share_of_floor']:.0%}"


def _worst(resources: list[dict[str, Any]]) -> str:
    """Returns the cell of one type and GPU, empty if there is no such kernel."""
    if not resources:
        return ""
    registers = max(each["registers"] for each in resources)
    shared = max(each["static_shared"] + each["dynamic_shared"] for each in resources)
    return f"{registers} / {shared / 1024:.3g} / {min(each['occupancy'] for each in resources):.0%}"


if __name__ == "__main__":
    main(sys.argv[1:])
