"""What ``cvt bench`` measured, for people: tables, comparisons, plots and one HTML page.

Everything here is made from the results alone, which are plain JSON; ``docs/report.md`` has the format.
"""

from __future__ import annotations

import base64
import html
import io
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...extras import require

#: Written into every file of results. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "cvt bench", 1

#: With fewer rounds nothing is said about noise.
_LEAST_ROUNDS = 4

Results = dict[str, Any]
_PathLike = str | os.PathLike[str]


# Files ----------------------------------------------------------------------------------------------------


def write(results: Results, path: _PathLike) -> None:
    """Writes results as JSON."""
    Path(path).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")


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
        results = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"results: {path} is not JSON: {error}") from error
    schema = results.get("schema") if isinstance(results, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"results: {path} has schema {schema!r}, expected {SCHEMA!r}")
    if results.get("version") != VERSION:
        raise ValueError(f"results: {path} has version {results.get('version')!r}, expected {VERSION}")
    try:
        text(results)
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise ValueError(f"results: {path} is damaged: {type(error).__name__} {error}") from error
    return results


def check_writable(option: str, path: _PathLike, *, directory: bool) -> None:
    """Looks whether a file can be written at ``path``, or files below it if it is a directory; makes nothing.

    Missing parents are allowed above a directory, not above a file.

    Raises:
        OSError: It cannot; the message begins with ``option``.
    """
    path = Path(path).absolute()
    if not directory and path.is_dir():
        raise OSError(f"{option}: {path} is a directory, expected a file")
    folder = path if directory else path.parent
    while directory and not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"{option}: {path} cannot be written: {folder} is no directory that takes files")


# Numbers --------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """The median of several values between their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def quartiles(values: Sequence[float]) -> Range:
    """Of at least one value."""
    if len(values) == 1:
        return Range(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Range(median, low, high)


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Range:
    """How many times as fast as the baseline, by the rounds' own ratios."""
    return quartiles([b / s for b, s in zip(baseline, seconds, strict=True)])


class Change(NamedTuple):
    """One contender in two results.

    Attributes:
        batch_size: Images per step.
        contender: Its key.
        old: Images per second, median.
        new: Likewise.
        factor: New over old speed, each as a multiple of Hugging Face's in the same rounds if both have it
            (of Hugging Face's itself: plain speed), so that the machine's own pace cancels. The range is that
            of two values anywhere between the quartiles of their results.
        judged: Whether both have rounds enough to tell a change from noise.
    """

    batch_size: int
    contender: str
    old: float
    new: float
    factor: Range
    judged: bool

    @property
    def verdict(self) -> str:
        """What can be said: ``"faster"``, ``"slower"``, or that it is within the noise or unknown."""
        if not self.judged:
            return f"too few rounds, expected {_LEAST_ROUNDS}"
        if self.factor.high < 1:
            return "slower"
        return "faster" if self.factor.low > 1 else "within noise"


def compare(old: Results, new: Results) -> list[Change]:
    """The contenders that both results have in the same batch size.

    Raises:
        ValueError: There are none.
    """
    before, after = _times(old), _times(new)
    changes = []
    for key in [key for key in after if key in before]:
        batch_size, contender = key
        hf = batch_size, "hf"
        paced = contender != "hf" and hf in before and hf in after
        a, b = (
            ratio(times[key], times[hf] if paced else [1.0] * len(times[key])) for times in (before, after)
        )
        factor = Range(b.median / a.median, b.low / a.high, b.high / a.low)
        rates = [batch_size / statistics.median(times[key]) for times in (before, after)]
        judged = min(len(before[key]), len(after[key])) >= _LEAST_ROUNDS
        changes.append(Change(batch_size, contender, rates[0], rates[1], factor, judged))
    if not changes:
        raise ValueError("the two results have no contender in the same batch size in common")
    return changes


def _times(results: Results) -> dict[tuple[int, str], list[float]]:
    """Seconds by batch size and contender."""
    return {
        (batch["batch_size"], row["contender"]): row["seconds"]
        for batch in results["batches"]
        for row in batch["rows"]
    }


# Text -----------------------------------------------------------------------------------------------------


def text(results: Results) -> str:
    """All that was measured but for the breakdown, as aligned tables."""
    lines = [heading(results), ""]
    legend = [[key, _meaning(about)] for key, about in results["contenders"].items()]
    lines += _aligned(legend, left=2)
    for batch in results["batches"]:
        lines += ["", *_aligned(_speed_rows(results, batch))]
    lines += [
        "",
        "×: times as fast, median of the rounds' own ratios and their quartiles.",
        _MEMORY,
    ]
    for batch in results["batches"]:
        lines += ["", *_aligned(_parity_rows(batch))]
    return "\n".join(lines)


_MEMORY = "Memory: the most that PyTorch's allocator held at once during a step, beyond weights and images."


def heading(results: Results) -> str:
    """One line that says what was run."""
    config = results["config"]
    return (
        f"{config['model']}, {config['weights']}, {config['image_size']}×{config['image_size']}, "
        f"{config['dtype']} on {config['device']}, {config['threads']} threads, "
        f"{'training step' if config['train'] else 'forward'}, {config['rounds']} rounds"
    )


def comparison(old: Results, new: Results) -> str:
    """:func:`compare` as a table, after what differs between the two runs besides."""
    lines = [f"old: {old['date']}, {heading(old)}", f"new: {new['date']}, {heading(new)}"]
    for section in ("machine", "versions", "config"):
        for name in sorted(old[section].keys() | new[section].keys()):
            a, b = (results[section].get(name) for results in (old, new))
            if a != b:
                lines.append(f"differs: {name}: {a} → {b}")
    rows = [["", "batch", "old images/s", "new images/s", "new / old", ""]]
    for change in compare(old, new):
        numbers = [str(change.batch_size), f"{change.old:.2f}", f"{change.new:.2f}", str(change.factor)]
        rows.append([change.contender, *numbers, change.verdict])
    note = (
        "new / old: of the speed in multiples of Hugging Face's in the same rounds (hf: the speed itself).\n"
        "In parentheses, how far the quartiles of both runs would move it."
    )
    return "\n".join([*lines, "", *_aligned(rows), "", note])


def _meaning(about: dict[str, Any]) -> str:
    return about["about"] if about["note"] is None else f"{about['about']}; not measured: {about['note']}"


def _speed_rows(results: Results, batch: dict[str, Any]) -> list[list[str]]:
    rows = {row["contender"]: row for row in batch["rows"]}
    peers = [key for key in rows if not results["contenders"][key]["ours"]]
    table = [
        [f"batch {batch['batch_size']}", "images/s", "slowest", "fastest", "memory MiB"]
        + [f"× {peer}" for peer in peers]
    ]
    for key, row in rows.items():
        rates = [batch["batch_size"] / s for s in row["seconds"]]
        numbers = [f"{rate:.2f}" for rate in (statistics.median(rates), min(rates), max(rates))]
        memory = "?" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f}"
        ratios = [str(ratio(row["seconds"], rows[peer]["seconds"])) if peer != key else "" for peer in peers]
        table.append([key, *numbers, memory, *ratios])
    return table


def _parity_rows(batch: dict[str, Any]) -> list[list[str]]:
    trained = any(row["parity"]["gradient_error"] is not None for row in batch["rows"])
    table = [[f"parity, batch {batch['batch_size']}", "max |Δ logit|", "max |logit|", "top-5 agreement"]]
    table[0] += ["Δ of gradients' norms"] if trained else []
    for row in batch["rows"]:
        parity = row["parity"]
        table.append(
            [
                row["contender"],
                f"{parity['error']:.1e}",
                f"{parity['largest']:.2f}",
                f"{parity['top5']}/{parity['of']}",
                *([f"{parity['gradient_error']:.1e}"] if trained else []),
            ]
        )
    return table


def _aligned(rows: list[list[str]], left: int = 1) -> list[str]:
    """The first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if i < left else ">" for i in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{w}}" for cell, side, w in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]


# The page -------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; border-bottom: 1px solid #ccc; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.facts td { text-align: left; white-space: normal; }
img { max-width: 100%; }
"""


def write_report(results: Results, directory: _PathLike) -> list[Path]:
    """Writes ``index.html``, which needs no other file and no network, and its plots as PNG files.

    Returns:
        The files.

    Raises:
        ModuleNotFoundError: The ``bench`` extra is not installed.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    sections, paths = [], []
    for name, title, caption, figure in _figures(results):
        image = _png(figure)
        paths.append(directory / f"{name}.png")
        paths[-1].write_bytes(image)
        source = "data:image/png;base64," + base64.b64encode(image).decode("ascii")
        words = html.escape(title)
        sections.append(
            f'<h2>{words}</h2>\n<img alt="{words}" src="{source}">\n<p>{html.escape(caption)}</p>'
        )
    page = directory / "index.html"
    page.write_text(_page(results, sections), encoding="utf-8")
    return [page, *paths]


def _page(results: Results, sections: list[str]) -> str:
    legend = [[key, _meaning(about)] for key, about in results["contenders"].items()]
    facts = {"date": results["date"], **results["machine"], **results["versions"]}
    facts |= {"photographs": results["config"]["photos"], "backends": results["config"]["backends"]}
    tables = [_html_table(_speed_rows(results, batch)) for batch in results["batches"]]
    tables += [_html_table(_parity_rows(batch)) for batch in results["batches"]]
    body = [
        "<h1>cvt bench</h1>",
        f"<p>{html.escape(heading(results))}</p>",
        _html_table([["contender", ""], *legend], "facts"),
        "<h2>Speed, memory, parity</h2>",
        f"<p>× peer: times as fast as that peer, median (quartiles). {html.escape(_MEMORY)}</p>",
        *tables,
        *sections,
        "<h2>Machine</h2>",
        _html_table([["", ""], *([name, _plain(value)] for name, value in facts.items())], "facts"),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>cvt bench</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _html_table(rows: list[list[str]], css_class: str = "numbers") -> str:
    lines = []
    for i, row in enumerate(rows):
        tag = "td" if i else "th"
        lines.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>")
    return f'<table class="{css_class}">\n' + "\n".join(lines) + "\n</table>"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {item}" for name, item in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


# Plots ----------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which the colour-blind can tell apart.
_KINDS = {
    "linear": ("linear", "#0072B2"),
    "attention": ("attention", "#D55E00"),
    "convolution": ("convolution, BatchNorm", "#009E73"),
    "norm": ("LayerNorm, residual sum", "#CC79A7"),
    "gelu": ("GELU", "#E69F00"),
    "copies": ("copies", "#56B4E9"),
    "compiled": ("loops of torch.compile", "#F0E442"),
    "other": ("other", "#999999"),
}
_LIGHT_KINDS = ("norm", "gelu", "copies", "compiled", "other")
_OURS_COLOUR, _PEER_COLOUR = "#0072B2", "#999999"


def _figures(results: Results) -> Any:
    """(file name, title, caption, figure) of every plot, in the order of the page."""
    batches = results["batches"]
    yield (
        "throughput",
        "Throughput",
        "Images per second, median of the rounds; the line ends at the slowest and the fastest.",
        _bars(results, "images/s", lambda row, size: [size / s for s in row["seconds"]]),
    )
    if all(row["peak_bytes"] is not None for batch in batches for row in batch["rows"]):
        yield (
            "memory",
            "Memory",
            _MEMORY,
            _bars(results, "MiB", lambda row, size: [row["peak_bytes"] / 2**20]),
        )
    for batch in batches:
        size = batch["batch_size"]
        yield (
            f"operators-{size}",
            f"Where the time goes, batch {size}",
            "A step under the profiler, the fastest of three, with what the profiler itself takes: the "
            "whole, then the mean block of each stage. A compiled graph has no blocks, nor has a backward."
            + (" Time of the GPU's kernels only." if results["machine"]["gpus"] else ""),
            _operators(results, batch),
        )
        if not results["config"]["train"]:
            yield (
                f"roofline-{size}",
                f"Roofline, batch {size}",
                "Each operator of each stage, and what this machine reached in the same run in a large copy "
                "and in a matrix product. Operations and bytes are those that the operator cannot do "
                "without: a contender that moves more lies lower. Caches can lift it above the slope.",
                _roofline(results, batch),
            )


def check_plots() -> None:
    """Raises ModuleNotFoundError unless there is what draws."""
    _new_figure(1, 1)


def _new_figure(width: float, height: float) -> Any:
    """A figure outside of pyplot, which would ask for a display and keep global state."""
    figure = require("matplotlib.figure", "bench").Figure
    return figure(figsize=(width, height), layout="constrained", facecolor="white")


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _bars(results: Results, unit: str, values: Callable[[dict[str, Any], int], list[float]]) -> Any:
    """A bar for the median of each contender's ``values``, a panel for each batch size."""
    batches = results["batches"]
    count = max(len(batch["rows"]) for batch in batches)
    figure = _new_figure(8, len(batches) * (0.8 + 0.4 * count))
    panels = figure.subplots(len(batches), squeeze=False)[:, 0]
    for axes, batch in zip(panels, batches, strict=True):
        rows = batch["rows"]
        found = [values(row, batch["batch_size"]) for row in rows]
        medians = [statistics.median(each) for each in found]
        ours = [results["contenders"][row["contender"]]["ours"] for row in rows]
        axes.barh(
            [row["contender"] for row in rows],
            medians,
            xerr=[
                [m - min(each) for m, each in zip(medians, found, strict=True)],
                [max(each) - m for m, each in zip(medians, found, strict=True)],
            ],
            color=[_OURS_COLOUR if own else _PEER_COLOUR for own in ours],
            ecolor="#333333",
        )
        for i, (median, each) in enumerate(zip(medians, found, strict=True)):
            axes.annotate(
                f"{median:.4g}", (max(each), i), xytext=(6, 0), textcoords="offset points", va="center"
            )
        axes.set(title=f"batch {batch['batch_size']}", xlabel=unit, xlim=(0, 1.15 * max(map(max, found))))
        axes.invert_yaxis()
        _plain_axes(axes)
    return figure


def _plain_axes(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _operators(results: Results, batch: dict[str, Any]) -> Any:
    """Stacked bars: a panel for the whole, and one for the mean block of each stage."""
    depths = results["config"]["depths"]
    panels: list[tuple[str, str | None, int]] = [("whole model", None, 1)]
    panels += [
        (f"a block of stage {i} (mean of {depth})", f"block {i}", depth) for i, depth in enumerate(depths, 1)
    ]
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
            axes.barh(list(totals), widths, left=left, color=_KINDS[kind][1], edgecolor="white")
            for y, (x, width) in enumerate(zip(left, widths, strict=True)):
                if width > 0.06 * widest:
                    shade = "black" if kind in _LIGHT_KINDS else "white"
                    axes.text(
                        x + width / 2, y, _short(width), color=shade, ha="center", va="center", fontsize=8
                    )
            left = [x + width for x, width in zip(left, widths, strict=True)]
        for y, x in enumerate(left):
            words = _short(x) if x else "not to be told apart"
            axes.annotate(words, (x, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
        axes.set(title=title, xlabel="ms", xlim=(0, 1.1 * widest))
        axes.invert_yaxis()
        _plain_axes(axes)
    handles = [_patch(_KINDS[kind][1], _KINDS[kind][0]) for kind in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _milliseconds(row: dict[str, Any], part: str | None, depth: int) -> dict[str, float]:
    """By kind, of one block of the ``depth`` that ``part`` has; of everything for None."""
    kinds: dict[str, float] = {}
    for cell in row["breakdown"]:
        if part in (None, cell["part"]):
            kinds[cell["kind"]] = kinds.get(cell["kind"], 0.0) + 1e3 * cell["seconds"] / depth
    return kinds


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _roofline(results: Results, batch: dict[str, Any]) -> Any:
    """A panel for Hugging Face's model and for each of ours: the kinds as colours, the stages as digits."""
    rows = [
        row
        for row in batch["rows"]
        if row["contender"] == "hf" or results["contenders"][row["contender"]]["ours"]
    ]
    work = {(each["part"], each["kind"]): each for each in batch["work"]}
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
            colour = _KINDS[cell["kind"]][1]
            embedding = cell["part"].startswith("embedding")
            x, y = need["flops"] / need["bytes"], need["flops"] / cell["seconds"] / 1e9
            axes.plot(x, y, "s" if embedding else "o", color=colour, markersize=11, alpha=0.85)
            axes.text(x, y, cell["part"][-1], color="white", ha="center", va="center", weight="bold")
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
        f"copy {copied / 1e9:.4g} GB/s", (2 * ends[0], 2 * copied * ends[0] / 1e9), xytext=(8, -8),
        textcoords="offset points", fontsize=9,
    )  # fmt: skip
    kinds = {need["kind"]: None for need in batch["work"]}
    handles = [_patch(_KINDS[kind][1], _KINDS[kind][0]) for kind in kinds]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=5, frameon=False,
        title="digit: stage; circle: its blocks, square: its embedding",
    )  # fmt: skip
    return figure
