"""Comparison of two results of ``cvt bench``: which contenders became faster, and what else differs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from cvt_kernels.tables import aligned

from .results import LEAST_ROUNDS, Range, Results, heading, ratio


class Change(NamedTuple):
    """The change of a contender between two results, ``old`` and ``new`` being images per second.

    Attributes:
        factor: New over old speed, each as a multiple of Hugging Face's in the same rounds if both have it
            (of Hugging Face's itself: plain speed). The range spans the ratios of all
            values between the quartiles of the two results.
        is_judged: Whether both have enough rounds to tell a change from noise.
    """

    batch_size: int
    contender: str
    old: float
    new: float
    factor: Range
    is_judged: bool

    @property
    def summary(self) -> str:
        """``"faster"``, ``"slower"``, ``"within noise"``, or that there are too few rounds."""
        if not self.is_judged:
            return f"too few rounds, expected {LEAST_ROUNDS}"
        if self.factor.high < 1:
            return "slower"
        return "faster" if self.factor.low > 1 else "within noise"


def compare(old: Results, new: Results) -> list[Change]:
    """Compares the contenders that both have in the same batch size; raises ValueError if there are none."""
    config, sizes = new["config"], [batch["batch_size"] for batch in new["batches"]]
    check_comparable(old, config["model"], config["image_size"], sizes)
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
        old_rate, new_rate = (batch_size / statistics.median(times[key]) for times in (before, after))
        is_judged = min(len(before[key]), len(after[key])) >= LEAST_ROUNDS
        changes.append(Change(batch_size, contender, old_rate, new_rate, factor, is_judged))
    if not changes:
        raise ValueError("the two results have no contender in the same batch size in common")
    return changes


def check_comparable(old: Results, model: str, image_size: int, batch_sizes: Sequence[int]) -> None:
    """Raises ValueError, which says what differs, if results are of another model or other sizes."""
    config, sizes = old["config"], [batch["batch_size"] for batch in old["batches"]]
    differences = [
        f"{name} {a} → {b}"
        for name, a, b in (
            ("model", config["model"], model),
            ("image size", config["image_size"], image_size),
        )
        if a != b
    ]
    if not set(sizes) & set(batch_sizes):
        a, b = (", ".join(map(str, each)) for each in (sizes, batch_sizes))
        differences.append(f"batch size {a} → {b}")
    if differences:
        raise ValueError(f"the old and the new results cannot be compared: {'; '.join(differences)}")


def _times(results: Results) -> dict[tuple[int, str], list[float]]:
    """Returns the seconds by batch size and contender."""
    return {
        (batch["batch_size"], row["contender"]): row["seconds"]
        for batch in results["batches"]
        for row in batch["rows"]
    }


def comparison(old: Results, new: Results) -> str:
    """Returns :func:`compare` as a table, after what differs between the two runs besides."""
    lines = [f"old: {old['date']}, {heading(old)}", f"new: {new['date']}, {heading(new)}"]
    for section in ("machine", "versions", "config"):
        for name in sorted(old[section].keys() | new[section].keys()):
            a, b = (results[section].get(name) for results in (old, new))
            if a != b:
                lines.append(f"differs: {name}: {a} → {b}")
    rows = [["", "batch", "old images/s", "new images/s", "new / old", ""]]
    for change in compare(old, new):
        numbers = [str(change.batch_size), f"{change.old:.2f}", f"{change.new:.2f}", str(change.factor)]
        rows.append([change.contender, *numbers, change.summary])
    note = (
        "new / old: of the speed in multiples of Hugging Face's in the same rounds (hf: the speed itself).\n"
        "In parentheses, how far the quartiles of both runs would move it."
    )
    return "\n".join([*lines, "", *aligned(rows, right=range(1, len(rows[0]))), "", note])
