"""The plots of ``cvt bench --report``, made from the results alone."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from cvt.extras import require

from .results import MEMORY, Results


class _Kind(NamedTuple):
    """The label and the color of a kind of operators, and whether black is read well on that color."""

    label: str
    color: str
    is_light: bool


# Okabe and Ito's colors, which the color-blind can tell apart.
_KINDS = {
    "linear": _Kind("linear", "#0072B2", False),
    "attention": _Kind("attention", "#D55E00", False),
    "convolution": _Kind("convolution, BatchNorm", "#009E73", False),
    "norm": _Kind("LayerNorm, residual sum", "#CC79A7", True),
    "gelu": _Kind("GELU", "#E69F00", True),
    "copies": _Kind("copies", "#56B4E9", True),
    "compiled": _Kind("loops of torch.compile", "#F0E442", True),
    "block": _Kind("whole blocks", "#000000", False),
    "other": _Kind("other", "#999999", True),
}
_OURS_COLOR, _PEER_COLOR = "#0072B2", "#999999"


class Plot(NamedTuple):
    """A figure of matplotlib, the name of its file without the suffix, its heading and its caption."""

    name: str
    title: str
    caption: str
    figure: Any


def draw(results: Results) -> Iterator[Plot]:
    """Draws every plot, in the order of the page."""
    batches = results["batches"]
    yield Plot(
        "throughput",
        "Throughput",
        "Images per second, median of the rounds; the line ends at the slowest and the fastest.",
        _bars(results, "images/s", lambda row, size: [size / s for s in row["seconds"]]),
    )
    if any(row["peak_bytes"] for batch in batches for row in batch["rows"]):
        yield Plot("memory", "Memory", MEMORY, _bars(results, "MiB", _peak))
    for batch in batches:
        size = batch["batch_size"]
        yield Plot(
            f"operators-{size}",
            f"Where the time goes, batch {size}",
            "A step under the profiler, the fastest of up to three, with what the profiler itself takes: the "
            "whole, then the mean block of each stage. A compiled graph has no blocks, nor has a backward."
            + (" Time of the GPU's kernels only." if results["machine"]["gpus"] else ""),
            _operators(results, batch),
        )


def _peak(row: dict[str, Any], size: int) -> list[float]:
    """Returns the peak of memory in MiB, or nothing where it is not known."""
    return [] if row["peak_bytes"] is None else [row["peak_bytes"] / 2**20]


def check_plots() -> None:
    """Raises ModuleNotFoundError unless there is what draws."""
    _new_figure(1, 1)


def _new_figure(width: float, height: float) -> Any:
    """Makes a figure outside of pyplot, which would ask for a display and keep global state."""
    figure = require("matplotlib.figure", "bench").Figure
    made = figure(figsize=(width, height), layout="constrained", facecolor="white")
    made.get_layout_engine().set(h_pad=0.1)  # else a label below touches the next panel's title
    return made


def png(figure: Any) -> bytes:
    """Renders a figure of matplotlib."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _bars(results: Results, unit: str, values: Callable[[dict[str, Any], int], list[float]]) -> Any:
    """Draws a bar for the median of each contender's ``values``, in a panel for each batch size."""
    batches = results["batches"]
    count = max(len(batch["rows"]) for batch in batches)
    figure = _new_figure(8, len(batches) * (0.8 + 0.4 * count))
    panels = figure.subplots(len(batches), squeeze=False)[:, 0]
    for axes, batch in zip(panels, batches, strict=True):
        rows = [row for row in batch["rows"] if values(row, batch["batch_size"])]
        samples = [values(row, batch["batch_size"]) for row in rows]
        medians = [statistics.median(each) for each in samples]
        ours = [results["contenders"][row["contender"]]["ours"] for row in rows]
        bars = axes.barh(
            [row["contender"] for row in rows],
            medians,
            xerr=[
                [m - min(each) for m, each in zip(medians, samples, strict=True)],
                [max(each) - m for m, each in zip(medians, samples, strict=True)],
            ],
            color=[_OURS_COLOR if own else _PEER_COLOR for own in ours],
            ecolor="#333333",
        )
        axes.bar_label(bars, [_short(median) for median in medians], padding=6)
        axes.set(title=f"batch {batch['batch_size']}", xlabel=unit, xlim=(0, 1.15 * max(map(max, samples))))
        axes.invert_yaxis()
        _plain_axes(axes)
    return figure


def _plain_axes(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _operators(results: Results, batch: dict[str, Any]) -> Any:
    """Draws stacked bars: a panel for the whole, and one for the mean block of each stage."""
    depths = results["config"]["depths"]
    panels: list[tuple[str, str | None, int]] = [("whole model", None, 1)]
    for i, depth in enumerate(depths, 1):
        panels.append((f"a block of stage {i} (mean of {depth})", f"block {i}", depth))
    rows = [row for row in batch["rows"] if row["breakdown"]]  # another runtime has no operators of PyTorch's
    figure = _new_figure(9, 0.8 + len(panels) * (0.8 + 0.32 * len(rows)))
    used = [kind for kind in _KINDS if any(cell["kind"] == kind for row in rows for cell in row["breakdown"])]
    for axes, (title, part, depth) in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True
    ):
        totals = {row["contender"]: _milliseconds(row, part, depth) for row in rows}
        widest = max(sum(kinds.values()) for kinds in totals.values()) or 1.0
        left = [0.0] * len(rows)
        for kind in used:
            widths = [kinds.get(kind, 0.0) for kinds in totals.values()]
            bars = axes.barh(list(totals), widths, left=left, color=_KINDS[kind].color, edgecolor="white")
            labels = [_short(width) if width > 0.06 * widest else "" for width in widths]
            shade = "black" if _KINDS[kind].is_light else "white"
            axes.bar_label(bars, labels, label_type="center", color=shade, fontsize=8)
            left = [x + width for x, width in zip(left, widths, strict=True)]
        labels = [_short(x) if x else "not to be told apart" for x in left]
        ends = axes.barh(list(totals), [0.0] * len(rows), left=left)
        axes.bar_label(ends, labels, padding=5, fontsize=9)
        axes.set(title=title, xlabel="ms", xlim=(0, 1.1 * widest))
        axes.invert_yaxis()
        _plain_axes(axes)
    handles = [_patch(_KINDS[kind]) for kind in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _milliseconds(row: dict[str, Any], part: str | None, depth: int) -> dict[str, float]:
    """Returns the time by kind of one of the ``depth`` blocks that ``part`` is; of everything for None."""
    kinds: dict[str, float] = {}
    for cell in row["breakdown"]:
        if part in (None, cell["part"]):
            kinds[cell["kind"]] = kinds.get(cell["kind"], 0.0) + 1e3 * cell["seconds"] / depth
    return kinds


def _patch(kind: _Kind) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=kind.color, label=kind.label)
