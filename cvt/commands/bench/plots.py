"""The plots of ``cvt bench --report``, made from the results alone."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...extras import require
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
_MARKERS = "os^Dv*"  # of stages; they can be told apart also where they overlap
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
    if all(row["peak_bytes"] is not None for batch in batches for row in batch["rows"]):
        yield Plot(
            "memory",
            "Memory",
            MEMORY,
            _bars(results, "MiB", lambda row, size: [row["peak_bytes"] / 2**20]),
        )
    for batch in batches:
        size = batch["batch_size"]
        yield Plot(
            f"operators-{size}",
            f"Where the time goes, batch {size}",
            "A step under the profiler, the fastest of three, with what the profiler itself takes: the "
            "whole, then the mean block of each stage. A compiled graph has no blocks, nor has a backward."
            + (" Time of the GPU's kernels only." if results["machine"]["gpus"] else ""),
            _operators(results, batch),
        )
        if batch["work"] and not results["config"]["train"]:
            yield Plot(
                f"roofline-{size}",
                f"Roofline, batch {size}",
                "Each operator of each stage (hollow: of its embedding), and what this machine reached in "
                "the same run in a large copy and in a matrix product. Operations and bytes are those that "
                "the operator cannot do without: a contender that moves more lies lower. Caches can lift it "
                "above the slope.",
                _roofline(results, batch),
            )


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
        rows = batch["rows"]
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
    rows = batch["rows"]
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


def _marker(shape: str, stage: int) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color="#333333", linestyle="", marker=shape, label=f"stage {stage}")


def _roofline(results: Results, batch: dict[str, Any]) -> Any:
    """Draws a panel for Hugging Face's model and each of ours: kinds as colors, stages as shapes."""
    rows = [
        row
        for row in batch["rows"]
        if row["contender"] == "hf" or results["contenders"][row["contender"]]["ours"]
    ]
    work = {(each["part"], each["kind"]): each for each in batch["work"]}
    # A contender without parts would have an empty panel.
    rows = [row for row in rows if any((cell["part"], cell["kind"]) in work for cell in row["breakdown"])]
    flops, copied = (results["ceilings"][f"{name}_per_second"] for name in ("flops", "bytes"))
    figure = _new_figure(4.6 * len(rows), 5.6)
    knee = flops / copied
    ends = [0.1, 4 * max(knee, *(need["flops"] / need["bytes"] for need in batch["work"]))]
    for axes, row in zip(
        figure.subplots(1, len(rows), squeeze=False, sharey=True, sharex=True)[0], rows, strict=True
    ):
        roof = [copied * ends[0] / 1e9, flops / 1e9, flops / 1e9]
        axes.plot([ends[0], knee, ends[1]], roof, color="#333333")
        for cell in row["breakdown"]:
            need = work.get((cell["part"], cell["kind"]))
            if need is None:
                continue
            color, stage = _KINDS[cell["kind"]].color, int(cell["part"][-1])
            x, y = need["flops"] / need["bytes"], need["flops"] / cell["seconds"] / 1e9
            edge, face = (color, "none") if cell["part"].startswith("embedding") else ("white", color)
            shape = _MARKERS[(stage - 1) % len(_MARKERS)]
            axes.plot(x, y, shape, markersize=9, markeredgecolor=edge, markerfacecolor=face)
        axes.set(xscale="log", yscale="log", title=row["contender"], xlabel="operations per byte")
        axes.grid(alpha=0.25, which="major")
        _plain_axes(axes)
    panels = figure.axes
    panels[0].set_ylabel("10⁹ operations per second")
    panels[0].annotate(
        f"matrix product {flops / 1e9:.4g}·10⁹/s", (ends[1], flops / 1e9), xytext=(0, 5),
        textcoords="offset points", ha="right", fontsize=9,
    )  # fmt: skip
    panels[0].annotate(
        f"copy\n{copied / 1e9:.4g} GB/s", (knee / 3, flops / 3e9), xytext=(-6, 0),
        textcoords="offset points", fontsize=9, ha="right", va="bottom",
    )  # fmt: skip
    kinds = {need["kind"]: None for need in batch["work"]}
    handles = [_patch(_KINDS[kind]) for kind in kinds]
    handles += [_marker(shape, i) for i, shape in enumerate(_MARKERS[: len(results["config"]["depths"])], 1)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(rows) + 1, frameon=False)
    return figure
