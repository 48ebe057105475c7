"""The picture of ``cvt bench --plot``: the throughput of every contender, made from the results alone."""

from __future__ import annotations

import statistics
from typing import Any

from cvt.extras import require

from .results import Results

_OURS, _PEER = "#0072B2", "#999999"  # of Okabe and Ito, which the color-blind can tell apart


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
