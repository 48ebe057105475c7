"""The results of ``cvt bench``: their file, their numbers, and what they say as tables of text.

Results are plain JSON; ``docs/report.md`` has the format.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cvt.config import MOST_IMAGES
from cvt_kernels.autotune import clock
from cvt_kernels.checks import shown
from cvt_kernels.tables import aligned

from ..paths import reporting

#: Written into every file of results. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "cvt bench", 1

#: What stands beside every figure of memory.
MEMORY = (
    "Memory: the most that PyTorch's allocator held at once during a step, beyond weights and images, and "
    "the workspace that our kernels keep. Process: the most that a contender's process had during a step, "
    "weights included, beyond what it had before they were loaded."
)

#: With fewer rounds nothing is said about noise.
LEAST_ROUNDS = clock.LEAST_RUNS

# Bounds of what a file may say, within which ratios are numbers.
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e9

Results = dict[str, Any]
_PathLike = str | os.PathLike[str]


# Files ----------------------------------------------------------------------------------------------------


def write(results: Results, path: _PathLike) -> None:
    """Writes results as JSON, for ``-`` to standard output."""
    with reporting(os.fspath(path), indent=1) as report:
        report(results)


def read(path: _PathLike) -> Results:
    """Reads what :func:`write` wrote.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: It is not a file of results, or one of another version.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"results: {path} does not exist")
    try:
        results = json.loads(path.read_text(encoding="utf-8"), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"results: {path} is not JSON: {error}") from error
    schema = results.get("schema") if isinstance(results, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"results: {path} has schema {schema!r}, expected {SCHEMA!r}")
    if results.get("version") != VERSION:
        raise ValueError(f"results: {path} has version {results.get('version')!r}, expected {VERSION}")
    try:
        _check(results)
        text(results)
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise ValueError(f"results: {path} is damaged: {type(error).__name__} {error}") from error
    return results


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"got {text}, expected a finite number")
    return number


def _check(results: Results) -> None:
    """Raises an error unless there is what comparisons need besides :func:`text`, in possible numbers."""
    sections = [dict(results[name]) for name in ("config", "machine", "versions", "contenders")]
    if not (results["date"] and all(sections) and results["batches"]):
        raise ValueError("a part of it is empty")
    for batch in results["batches"]:
        size, times = batch["batch_size"], [row["seconds"] for row in batch["rows"]]
        if type(size) is not int or not 1 <= size <= MOST_IMAGES:
            raise ValueError(f"batch_size: got {shown(size)}, expected an integer from 1 to {MOST_IMAGES}")
        if len(set(map(len, times))) != 1 or not times[0]:
            raise ValueError(f"batch_size {size}: expected as many seconds for each contender")
        for seconds in itertools.chain(*times):
            if type(seconds) not in (int, float) or not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
                expected = f"{_LEAST_SECONDS:g} to {_MOST_SECONDS:g}"
                raise ValueError(f"seconds: got {shown(seconds)}, expected {expected}")


# Numbers --------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """The median of several values between their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def quartiles(values: Sequence[float]) -> Range:
    """Returns the median and the quartiles of at least one value."""
    if len(values) == 1:
        return Range(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Range(median, low, high)


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Range:
    """Returns how many times as fast as the baseline something is, by the rounds' own ratios."""
    return quartiles([b / s for b, s in zip(baseline, seconds, strict=True)])


def share_of_product(batch: dict[str, Any], row: dict[str, Any]) -> float:
    """Returns what part of a large product's rate a contender reaches: the median of the rounds."""
    product, operations = batch["product"], batch["operations"]
    pairs = zip(row["seconds"], product["seconds"], strict=True)
    return statistics.median(operations / s / (product["operations"] / p) for s, p in pairs)


# Text -----------------------------------------------------------------------------------------------------


def text(results: Results) -> str:
    """Returns all that was measured but for the breakdown, as aligned tables."""
    lines = [heading(results), ""]
    legend = [[key, meaning(about)] for key, about in results["contenders"].items()]
    lines += aligned(legend)
    for rows in (*(speed_rows(results, batch) for batch in results["batches"]), first_rows(results)):
        lines += ["", *_aligned_numbers(rows)] if rows else []
    lines += [
        "",
        "×: times as fast, median of the rounds' own ratios and their quartiles.",
        *products(results),
        MEMORY,
        *advice(results),
    ]
    for batch in results["batches"]:
        lines += ["", *_aligned_numbers(parity_rows(results, batch))]
    return "\n".join(lines)


def heading(results: Results) -> str:
    """Returns a line that says what was run."""
    config = results["config"]
    return (
        f"{config['model']}, {config['weights']}, {config['image_size']}×{config['image_size']}, "
        f"{config['dtype']} on {config['device']}, {config['threads']} threads, "
        f"{'training step' if config['train'] else 'forward'}, {config['rounds']} rounds"
    )


def products(results: Results) -> list[str]:
    """Returns a line about the rate of the matrix products; none for older results."""
    batches = [batch for batch in results["batches"] if "product" in batch]
    if not batches:
        return []
    per_image = batches[0]["operations"] / batches[0]["batch_size"] / 1e9
    n = batches[0]["product"]["n"]
    rates = [
        batch["product"]["operations"] / statistics.median(batch["product"]["seconds"]) / 1e9
        for batch in batches
    ]
    return [
        f"% of product: of the rate of a matrix product of {n}×{n}×{n} in the same rounds "
        f"({', '.join(f'{rate:,.0f}' for rate in rates)} GFLOP/s), at {per_image:.2f} GFLOP per image."
    ]


def advice(results: Results) -> list[str]:
    """Returns the line that says which choices are unsure, and what to do; none if none is."""
    line = results["config"].get("advice")
    return [] if line is None else [f"{line}."]


def meaning(about: dict[str, Any]) -> str:
    """Returns what a contender is and, if it was not measured, why."""
    return about["about"] if about["note"] is None else f"{about['about']}; not measured: {about['note']}"


def speed_rows(
    results: Results, batch: dict[str, Any], cell_of: Callable[[Range], Any] = str
) -> list[list[Any]]:
    """Returns the table of speed and memory in one batch size, its heading first."""
    rows = {row["contender"]: row for row in batch["rows"]}
    peers = [key for key in rows if not results["contenders"][key]["ours"]]
    table = [
        [f"batch {batch['batch_size']}", "images/s", "slowest", "fastest"]
        + (["% of product"] if "product" in batch else [])
        + ["memory MiB", "process MiB", *(f"× {peer}" for peer in peers)]
    ]
    for key, row in rows.items():
        rates = [batch["batch_size"] / s for s in row["seconds"]]
        numbers = [f"{rate:.2f}" for rate in (statistics.median(rates), min(rates), max(rates))]
        if "product" in batch:
            numbers.append(f"{100 * share_of_product(batch, row):.0f}")
        memory = [_mebibytes(row.get(name)) for name in ("peak_bytes", "resident_bytes")]
        ratios = {peer: ratio(row["seconds"], rows[peer]["seconds"]) for peer in peers}
        cells = ["" if peer == key else cell_of(factor) for peer, factor in ratios.items()]
        table.append([key, *numbers, *memory, *cells])
    return table


def _mebibytes(size: float | None) -> str:
    return "?" if size is None else f"{size / 2**20:.1f}"


def first_rows(results: Results) -> list[list[str]]:
    """Returns the table of the seconds to the first result, its heading first; nothing for older results."""
    begun = {key: about["first"] for key, about in results["contenders"].items() if about.get("first")}
    if not begun:
        return []
    size = next(iter(begun.values()))["batch_size"]
    names = {"seconds": "seconds", "untuned_seconds": "before autotuning", "load": "conversion before"}
    table = [[f"first result, batch {size}", *names.values()]]
    for key, first in begun.items():
        table.append([key, *("" if first[name] is None else f"{first[name]:.2f}" for name in names)])
    return table


def parity_rows(results: Results, batch: dict[str, Any]) -> list[list[str]]:
    """Returns the table of parity in one batch size, its heading first."""
    trained = any(row["parity"]["gradient_error"] is not None for row in batch["rows"])
    output = results["config"].get("output", "logit")
    table = [[f"parity, batch {batch['batch_size']}", f"max |Δ {output}|", f"max |{output}|"]]
    table[0] += ["top-5 agreement"] if output == "logit" else []
    table[0] += ["Δ of gradients' norms"] if trained else []
    for row in batch["rows"]:
        parity = row["parity"]
        table.append(
            [
                row["contender"],
                f"{parity['error']:.1e}",
                f"{parity['largest']:.2f}",
                *([f"{parity['top5']}/{parity['of']}"] if output == "logit" else []),
                *([f"{parity['gradient_error']:.1e}"] if trained else []),
            ]
        )
    return table


def _aligned_numbers(rows: list[list[str]]) -> list[str]:
    """Aligns names to the left and numbers to the right."""
    return aligned(rows, right=range(1, len(rows[0])))
