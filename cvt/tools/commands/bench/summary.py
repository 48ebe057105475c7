"""Conclusions from the results of ``cvt bench``: which parity passes, who is fastest, what cannot be told."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from cvt.config import DTYPES
from cvt_kernels.autotune import accuracy

from .contenders import INT8
from .results import LEAST_ROUNDS, Range, Results, ratio

# Units in the last place that the accuracy rule allows besides a multiple of Hugging Face's own error, which
# can be small by chance where a model has few classes.
_UNITS = 8
_WIDEST = 0.2

#: What the words of :func:`doubt` mean.
DOUBTS = (
    "Two contenders are too close to tell apart where 1 lies between the quartiles of their ratio in the "
    f"same rounds, and a ratio is rough where its quartiles lie more than {_WIDEST:.0%} of it apart. More "
    "rounds on an idle machine tell more."
)


def parity_errors(
    parity: dict[str, Any], hugging_faces: dict[str, Any], dtype: torch.dtype
) -> dict[str, accuracy.Error]:
    """Returns a contender's errors by the name in its parity, beside Hugging Face's, which allow them."""
    # Errors of gradients are relative already.
    rules = {
        "error": (accuracy.VALUE_FACTOR, hugging_faces["largest"]),
        "gradient_error": (accuracy.GRADIENT_FACTOR, 1.0),
    }
    errors = {}
    for name, (factor, largest) in rules.items():
        ours, pytorchs = parity[name], hugging_faces[name]
        if pytorchs is not None:
            allowed = accuracy.allowed_error(pytorchs, largest, dtype, factor=factor, units=_UNITS)
            errors[name] = accuracy.Error(ours, pytorchs, allowed)
    return errors


def doubt(factor: Range) -> str:
    """Returns ``"too close"`` or ``"rough"`` of a ratio of two contenders, or nothing: see ``DOUBTS``."""
    if factor.low <= 1 <= factor.high:
        return "too close"
    return "rough" if factor.high - factor.low > _WIDEST * factor.median else ""


def sentence(results: Results) -> str:
    """Returns a sentence that says whether the results are equal, and who is how much faster and where."""
    config, facts = results["config"], results["machine"]
    where = facts["gpus"][0] if config["device"].startswith("cuda") else facts["cpu"]
    unequal = _unequal(results)
    parity = (
        f"the results of {_listed(unequal)} do not equal Hugging Face's"
        if unequal
        else "all results equal Hugging Face's up to rounding"
    )
    step = "In a training step" if config["train"] else "In a forward"
    winners = _listed([_winner(results, batch) for batch in results["batches"]])
    rounds = config["rounds"]
    caveat = f", as far as {rounds} rounds can tell" if rounds < LEAST_ROUNDS else ""
    return f"{step} on {where}, {parity}, and the fastest is {winners}{caveat}."


def _winner(results: Results, batch: dict[str, Any]) -> str:
    """Returns the fastest contender of a batch size in words."""
    seconds = {row["contender"]: row["seconds"] for row in batch["rows"]}
    fastest = _fastest(batch)
    words = []
    if fastest != "hf":
        words.append(f"{ratio(seconds[fastest], seconds['hf']).median:.2f} times as fast as Hugging Face's")
    ours = [key for key in seconds if results["contenders"][key]["ours"]]
    if fastest not in ours:
        best = min(ours, key=lambda key: statistics.median(seconds[key]))
        words.append(f"the best of ours is {best}, {ratio(seconds[best], seconds['hf']).median:.2f} times")
    others = [key for key in seconds if key != fastest]
    close = [key for key in others if doubt(ratio(seconds[fastest], seconds[key])) == "too close"]
    if close:
        words.append(f"too close to {_listed(close)} to tell")
    return f"{fastest} in batches of {batch['batch_size']}" + (f" ({', '.join(words)})" if words else "")


def _fastest(batch: dict[str, Any]) -> str:
    return min(batch["rows"], key=lambda row: statistics.median(row["seconds"]))["contender"]


def _unequal(results: Results) -> list[str]:
    """Returns the contenders whose errors the accuracy rule does not allow."""
    dtype = DTYPES[results["config"]["dtype"]]
    found: dict[str, None] = {}
    for batch in results["batches"]:
        hugging_faces = next(row["parity"] for row in batch["rows"] if row["contender"] == "hf")
        for row in batch["rows"]:
            if row["contender"] in INT8:
                continue
            errors = parity_errors(row["parity"], hugging_faces, dtype)
            if not all(error.passed for error in errors.values()):
                found[row["contender"]] = None
    return list(found)


def _listed(words: list[str]) -> str:
    """Joins words by commas, the last by "and"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
