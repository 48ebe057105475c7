"""The results of ``cvt bench``: how they are measured, and what they say as tables of text and a picture."""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from cvt.extras import require
from cvt.images import load_images, sample_photos
from cvt_kernels import __version__, machine
from cvt_kernels.messages import aligned
from cvt_kernels.tuning import clock

from .contenders import CONTENDERS, chosen
from .contest import Contest, share_of_product
from .models import build_subject
from .peers import RUNTIMES

#: What stands beside every figure of memory.
MEMORY = (
    "Memory: the most that PyTorch's allocator held at once during a step, beyond weights and images, and "
    "the workspace that our kernels keep. Process: the most that a contender's process had during a step, "
    "weights included, beyond what it had before they were loaded; on a GPU, what it holds of its memory."
)

_OURS, _PEER = "#0072B2", "#999999"  # of Okabe and Ito, which the color-blind can tell apart

Results = dict[str, Any]


def run(
    *,
    checkpoint: str | None = None,
    model: str | None = None,
    images: Sequence[str | os.PathLike[str]] | None = None,
    image_size: int | None = None,
    batch_sizes: Sequence[int] = (8,),
    rounds: int = 10,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    train: bool = False,
    peers: Sequence[str] = ("hf",),
    summary: bool = False,
) -> Results:
    """Measures our models beside others with the same weights: parity, speed and memory.

    The arguments are the options of ``cvt bench``, the results ready for JSON in the format of
    ``docs/report.md``. A contender that is less accurate than it may be raises ValueError.
    """
    device = torch.device(device)
    keys = chosen(peers, device, train=train)
    subject = build_subject(model, checkpoint, image_size)
    if subject.ours is None:
        keys = [key for key in keys if CONTENDERS[key].model == "hf" or key in peers]
    if summary:
        keys = ["hf", next(key for key in reversed(keys) if CONTENDERS[key].is_ours)]
    photos = list(sample_photos() if images is None else images)
    # A model of pixels may take larger images than the photographs are.
    inputs = load_images(photos, subject.image_size, upscale=subject.ours is None)
    with Contest(subject, keys, inputs, device=device, dtype=dtype, train=train, strict=True) as contest:
        batches = [contest.measured(size, rounds) for size in batch_sizes]
    used = [CONTENDERS[key].runtime for key in keys]
    packages = ["torch", "transformers", "numpy"]
    packages += [name for each in used if each is not None for name in RUNTIMES[each].packages]
    facts, plain = machine.facts(), type(subject.plain).__name__
    config: dict[str, Any] = {"model": subject.name, "weights": subject.weights, "output": subject.output}
    config |= {"photos": [Path(photo).name for photo in photos], "image_size": subject.image_size}
    config |= {"dtype": dtype, "device": str(device), "threads": torch.get_num_threads()}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {**facts._asdict(), "gpus": list(facts.gpus)},
        "versions": {"cvt-kernels": __version__, **{name: metadata.version(name) for name in packages}},
        "config": config | {"train": train, "rounds": rounds},
        "contenders": {
            key: {
                "about": CONTENDERS[key].about.replace("Face's model", f"Face's {plain}"),
                "ours": CONTENDERS[key].is_ours,
                "note": contest.why_not.get(key),
                "first": contest.first.get(key),
            }
            for key in keys
        },
        "batches": batches,
    }


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> tuple[float, float, float]:
    """Returns how many times as fast as the baseline something is: median, quartiles of the rounds."""
    ratios = [b / s for b, s in zip(baseline, seconds, strict=True)]
    at_least_two = ratios if len(ratios) > 1 else 2 * ratios
    low, median, high = statistics.quantiles(at_least_two, n=4, method="inclusive")
    return median, low, high


def text(results: Results) -> str:
    """Returns what was measured: the machine, the contenders, and a table with a line for each of them."""
    config, batches = results["config"], results["batches"]
    about = [
        (key, each["about"] if each["note"] is None else f"{each['about']}; not measured: {each['note']}")
        for key, each in results["contenders"].items()
    ]
    lines = [
        _machine(results),
        f"{config['model']}, {config['weights']}, {len(config['photos'])} photographs of "
        f"{config['image_size']}×{config['image_size']}, {config['dtype']} on {config['device']}, "
        f"{config['threads']} threads, {'training step' if config['train'] else 'forward'}, "
        f"{config['rounds']} rounds",
        "",
        *aligned(about),
    ]
    for batch in batches:
        rows = table(results, batch)
        lines += ["", *aligned(rows, right=range(1, len(rows[0])))]
    rates = [b["product"]["operations"] / statistics.median(b["product"]["seconds"]) / 1e9 for b in batches]
    per_image, n = batches[0]["operations"] / batches[0]["batch_size"] / 1e9, batches[0]["product"]["n"]
    lines += [
        "",
        "×: times as fast, median of the rounds' own ratios and their quartiles; Δ: against float64.",
        f"% of product: of the rate of a matrix product of {n}×{n}×{n} in the same rounds "
        f"({', '.join(f'{rate:,.0f}' for rate in rates)} GFLOP/s), at {per_image:.2f} GFLOP per image.",
        MEMORY,
    ]
    if any(row["is_disturbed"] for batch in batches for row in batch["rows"]):
        lines.append(f"{clock.DISTURBED.capitalize()}.")
    return "\n".join(lines)


def summary(results: Results) -> str:
    """Returns what a newcomer asks: the machine, and ours beside Hugging Face's model in each batch size."""
    config = results["config"]
    table = [["batch", "model", "images/s", "×", "ms", "process MiB", f"max |Δ {config['output']}|"]]
    for batch in results["batches"]:
        rows = {row["contender"]: row for row in batch["rows"]}
        ours = next(key for key in reversed(rows) if results["contenders"][key]["ours"])
        graphed = " and graphed" if "graphed" in ours else ""
        for key, name in (("hf", "Hugging Face's"), (ours, f"accelerated{graphed}")):
            row, theirs = rows[key], rows["hf"]["seconds"]
            seconds = statistics.median(row["seconds"])
            held = "?" if row["resident_bytes"] is None else f"{row['resident_bytes'] / 2**20:.0f}"
            rate, times = batch["batch_size"] / seconds, ratio(row["seconds"], theirs)[0]
            size = str(batch["batch_size"])
            speed = f"{rate:.1f}", f"{times:.2f}", f"{1e3 * seconds:.1f}"
            table.append([size, name, *speed, held, _error(row["error"])])
    return "\n".join(
        [
            _machine(results),
            f"{config['model']}, {config['weights']}, {config['dtype']}, {len(config['photos'])} photographs",
            "",
            *aligned(table, right=(0, *range(2, len(table[0])))),
            "Process: all memory of a process that serves, beyond what it had before; Δ: against float64.",
        ]
    )


def _machine(results: Results) -> str:
    machine = results["machine"]
    where = "; ".join(machine["gpus"]) if results["config"]["device"] != "cpu" else machine["cpu"]
    return f"{where}, torch {results['versions']['torch']}; cvt-kernels {machine['extension']}"


def table(results: Results, batch: dict[str, Any]) -> list[list[str]]:
    """Returns the table of one batch size, its heading first; a figure that is not there is empty."""
    output, theirs = results["config"]["output"], batch["rows"][0]["seconds"]
    titles = ["images/s", "ms", "× hf", "% of product", "waiting, ms", "first, s", "conversion, s"]
    titles += ["memory MiB", "process MiB", f"max |Δ {output}|", "allowed", "top-5 agreement"]
    titles += ["Δ of gradients' norms", "gradients' allowed"]
    rows = [[f"batch {batch['batch_size']}", *titles]]
    for row in batch["rows"]:
        first, seconds = results["contenders"][row["contender"]]["first"], statistics.median(row["seconds"])
        median, low, high = ratio(row["seconds"], theirs)
        cells = [f"{batch['batch_size'] / seconds:.2f}", f"{1e3 * seconds:.2f}"]
        cells += [f"{median:.2f} ({low:.2f}–{high:.2f})", f"{100 * share_of_product(batch, row):.0f}"]
        cells += ["" if row["waits"] is None else f"{1e3 * statistics.median(row['waits']):.2f}"]
        cells += ["" if each is None else f"{each:.2f}" for each in (first["seconds"], first["load"])]
        held = row["peak_bytes"], row["resident_bytes"]
        cells += ["" if each is None else f"{each / 2**20:.1f}" for each in held]
        cells += [_error(row["error"]), _error(row["error_allowed"])]
        cells += [f"{row['top5']}/{row['of']}" if row["of"] else ""]
        cells += [_error(row["gradient_error"]), _error(row["gradient_error_allowed"])]
        rows.append([row["contender"], *cells])
    told = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return [[row[i] for i in told] for row in rows]


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def throughput(results: Results) -> Any:
    """Draws the images per second of each contender, in a panel for each batch size.

    A bar is the median of the rounds; its line ends at the slowest and the fastest.
    """
    batches, config = results["batches"], results["config"]
    count = max(len(batch["rows"]) for batch in batches)
    size = 8, 0.5 + len(batches) * (0.8 + 0.4 * count)
    new = require("matplotlib.figure", "bench").Figure  # outside of pyplot, which would ask for a display
    figure = new(figsize=size, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(h_pad=0.1)  # else a label below touches the next panel's title
    figure.suptitle(f"{config['model']}, {config['dtype']}{', training' if config['train'] else ''}")
    for axes, batch in zip(figure.subplots(len(batches), squeeze=False)[:, 0], batches, strict=True):
        keys = [row["contender"] for row in batch["rows"]]
        samples = [[batch["batch_size"] / s for s in row["seconds"]] for row in batch["rows"]]
        medians = [statistics.median(each) for each in samples]
        below = [m - min(each) for m, each in zip(medians, samples, strict=True)]
        above = [max(each) - m for m, each in zip(medians, samples, strict=True)]
        colors = [_OURS if results["contenders"][key]["ours"] else _PEER for key in keys]
        bars = axes.barh(keys, medians, xerr=[below, above], color=colors, ecolor="#333333")
        labels = [f"{m:.0f}" if m >= 100 else f"{m:#.3g}" for m in medians]
        axes.bar_label(bars, labels, padding=6)
        axes.set(
            title=f"batch {batch['batch_size']}", xlabel="images/s", xlim=(0, 1.15 * max(map(max, samples)))
        )
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    return figure
