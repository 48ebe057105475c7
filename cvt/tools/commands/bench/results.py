"""The results of ``cvt bench``: how they are measured, and what they say as tables of text."""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

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

_PACKAGES = ("torch", "transformers", "numpy")

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
    packages = [*_PACKAGES, *(name for each in used if each is not None for name in RUNTIMES[each].packages)]
    facts, plain = machine.facts(), type(subject.plain).__name__
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {**facts._asdict(), "gpus": list(facts.gpus)},
        "versions": {"cvt-kernels": __version__, **{name: metadata.version(name) for name in packages}},
        "config": {
            "model": subject.name,
            "weights": subject.weights,
            "output": subject.output,
            "photos": [Path(photo).name for photo in photos],
            "image_size": subject.image_size,
            "dtype": dtype,
            "device": str(device),
            "threads": torch.get_num_threads(),
            "train": train,
            "rounds": rounds,
        },
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


# Text -----------------------------------------------------------------------------------------------------


def text(results: Results) -> str:
    """Returns all that was measured, as aligned tables."""
    config, batches = results["config"], results["batches"]
    step = "training step" if config["train"] else "forward"
    lines = [
        f"{config['model']}, {config['weights']}, {config['image_size']}×{config['image_size']}, "
        f"{config['dtype']} on {config['device']}, {config['threads']} threads, {step}, "
        f"{config['rounds']} rounds",
        "",
        *aligned([[key, _meaning(about)] for key, about in results["contenders"].items()]),
    ]
    for rows in (*(speed_rows(results, batch) for batch in batches), first_rows(results)):
        lines += ["", *_aligned_numbers(rows)]
    per_image = batches[0]["operations"] / batches[0]["batch_size"] / 1e9
    products = [(batch["product"]["operations"], batch["product"]["seconds"]) for batch in batches]
    rates = ", ".join(f"{operations / statistics.median(s) / 1e9:,.0f}" for operations, s in products)
    n = batches[0]["product"]["n"]
    lines += [
        "",
        "×: times as fast, median of the rounds' own ratios and their quartiles.",
        f"% of product: of the rate of a matrix product of {n}×{n}×{n} in the same rounds ({rates} GFLOP/s), "
        f"at {per_image:.2f} GFLOP per image.",
        MEMORY,
    ]
    if any(row["is_disturbed"] for batch in batches for row in batch["rows"]):
        lines.append(f"{clock.DISTURBED.capitalize()}.")
    for batch in batches:
        lines += ["", *_aligned_numbers(parity_rows(results, batch))]
    return "\n".join(lines)


def summary(results: Results) -> str:
    """Returns what a newcomer asks: the machine, and ours beside Hugging Face's model in each batch size."""
    config, machine = results["config"], results["machine"]
    where = "; ".join(machine["gpus"]) if config["device"] != "cpu" else machine["cpu"]
    table = [["batch", "model", "images/s", "×", "ms", "process MiB", f"max |Δ {config['output']}|"]]
    for batch in results["batches"]:
        rows = {row["contender"]: row for row in batch["rows"]}
        ours = next(key for key in reversed(rows) if results["contenders"][key]["ours"])
        graphed = " and graphed" if "graphed" in ours else ""
        for key, name in (("hf", "Hugging Face's"), (ours, f"accelerated{graphed}")):
            row, theirs = rows[key], rows["hf"]["seconds"]
            seconds = statistics.median(row["seconds"])
            held = "?" if row["resident_bytes"] is None else f"{row['resident_bytes'] / 2**20:.0f}"
            rate, times = batch["batch_size"] / seconds, ratio(row["seconds"], theirs).median
            size = str(batch["batch_size"])
            speed = f"{rate:.1f}", f"{times:.2f}", f"{1e3 * seconds:.1f}"
            table.append([size, name, *speed, held, _error(row["error"])])
    return "\n".join(
        [
            f"{where}, torch {results['versions']['torch']}; cvt-kernels {machine['extension']}",
            f"{config['model']}, {config['weights']}, {config['dtype']}, {len(config['photos'])} photographs",
            "",
            *aligned(table, right=(0, *range(2, len(table[0])))),
            "Process: all memory of a process that serves, beyond what it had before; Δ: against float64.",
        ]
    )


def _meaning(about: dict[str, Any]) -> str:
    """Returns what a contender is and, if it was not measured, why."""
    return about["about"] if about["note"] is None else f"{about['about']}; not measured: {about['note']}"


def speed_rows(results: Results, batch: dict[str, Any]) -> list[list[str]]:
    """Returns the table of speed and memory in one batch size, its heading first."""
    rows = {row["contender"]: row for row in batch["rows"]}
    peers = [key for key in rows if not results["contenders"][key]["ours"]]
    waits = any(row["waits"] for row in rows.values())
    table = [[f"batch {batch['batch_size']}", "images/s", "slowest", "fastest", "% of product"]]
    table[0] += [*(["waiting, ms"] if waits else []), "memory MiB", "process MiB", *(f"× {p}" for p in peers)]
    for key, row in rows.items():
        rates = [batch["batch_size"] / s for s in row["seconds"]]
        numbers = [f"{rate:.2f}" for rate in (statistics.median(rates), min(rates), max(rates))]
        numbers.append(f"{100 * share_of_product(batch, row):.0f}")
        numbers += [f"{1e3 * statistics.median(row['waits']):.2f}"] if waits else []
        numbers += [
            "?" if row[name] is None else f"{row[name] / 2**20:.1f}"
            for name in ("peak_bytes", "resident_bytes")
        ]
        ratios = {peer: ratio(row["seconds"], rows[peer]["seconds"]) for peer in peers}
        table.append([key, *numbers, *("" if peer == key else str(each) for peer, each in ratios.items())])
    return table


def first_rows(results: Results) -> list[list[str]]:
    """Returns the table of the seconds to the first result, its heading first."""
    begun = {key: about["first"] for key, about in results["contenders"].items() if about["first"]}
    names = {"seconds": "seconds", "load": "conversion before"}
    table = [[f"first result, batch {results['batches'][0]['batch_size']}", *names.values()]]
    for key, first in begun.items():
        table.append([key, *("" if first[name] is None else f"{first[name]:.2f}" for name in names)])
    return table


def parity_rows(results: Results, batch: dict[str, Any]) -> list[list[str]]:
    """Returns the table of parity in one batch size, its heading first."""
    output, trained = results["config"]["output"], results["config"]["train"]
    table = [[f"parity, batch {batch['batch_size']}", f"max |Δ {output}|", "allowed", f"max |{output}|"]]
    table[0] += ["top-5 agreement"] if output == "logit" else []
    table[0] += ["Δ of gradients' norms", "allowed"] if trained else []
    for row in batch["rows"]:
        cells = [_error(row["error"]), _error(row["error_allowed"]), f"{row['largest']:.2f}"]
        cells += [f"{row['top5']}/{row['of']}"] if output == "logit" else []
        cells += [_error(row["gradient_error"]), _error(row["gradient_error_allowed"])] if trained else []
        table.append([row["contender"], *cells])
    return table


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def _aligned_numbers(rows: list[list[str]]) -> list[str]:
    """Aligns names to the left and numbers to the right."""
    return aligned(rows, right=range(1, len(rows[0])))
