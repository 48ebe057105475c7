"""Reading of ``last.pth``, from which a training goes on, with checks of all that it holds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import why_not_finite
from ..config import CvTConfig, brief
from ..reading import CheckpointError, load_pickle

# The fields of the file, and their types.
_FIELDS = {
    "epoch": int,
    "history": list,
    "same": Mapping,
    "model": Mapping,
    "optimizer": Mapping,
    "scaler": Mapping,
    "ema": Mapping,
}
# What the optimizer has of the recipe, besides the rate, which every step sets.
_SETTINGS = ("betas", "eps", "weight_decay")
# What it has for each parameter, besides the number of steps.
_MOMENTS = ("exp_avg", "exp_avg_sq")
# What every row of the history has besides the score of its task.
_COLUMNS = ("epoch", "lr", "train_loss", "val_loss", "images_per_second", "seconds")


def read_state(path: Path, score: str) -> dict[str, Any]:
    """Reads the state of a training.

    Args:
        path: That of ``last.pth``.
        score: The column of the history by which epochs are compared.

    Raises:
        CheckpointError: The file is damaged, or is none of ``cvt train``.
    """
    state = load_pickle(path)
    with naming(path):
        if not isinstance(state, dict):
            raise TypeError(f"got {brief(state)}, expected an object of fields")
        for name, kind in _FIELDS.items():
            if name not in state:
                raise ValueError(f"has no {name}")
            if not isinstance(state[name], kind) or isinstance(state[name], bool):
                raise TypeError(f"{name}: got {brief(state[name])}, expected {kind.__name__}")
        # An earlier version knew fewer fields.
        config = CvTConfig.from_dict(state["same"].get("config"))
        state["same"] = {**state["same"], "config": dataclasses.asdict(config)}
        _check_history(state["history"], state["epoch"], score)
        for name in ("model", "ema"):
            reason = why_not_finite(state[name])
            if reason is not None:
                raise ValueError(f"{name}: {reason}")
    return state


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Lets every error of the block say in one line that the state in a file is damaged.

    Modules and optimizers of PyTorch raise errors of many classes for states that are not theirs.
    """
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"resume: {path} is damaged, or of another version: {reason:.500}") from error


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the state of an optimizer of the same recipe; PyTorch looks neither at shapes nor at numbers.

    Raises:
        ValueError: It is one of other parameters or settings.
    """
    before = [{name: group[name] for name in _SETTINGS} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        for name, expected in settings.items():
            if group[name] != expected:
                raise ValueError(f"optimizer: got {name} {brief(group[name])}, expected {expected}")
    for parameter, values in optimizer.state.items():
        for name in _MOMENTS:
            if values[name].shape != parameter.shape:
                got, expected = tuple(values[name].shape), tuple(parameter.shape)
                raise ValueError(f"optimizer: got {name} of shape {got} for a parameter of {expected}")
        reason = why_not_finite(values)
        if reason is not None:
            raise ValueError(f"optimizer: {reason}")


def _check_history(rows: list[Any], epochs: int, score: str) -> None:
    if len(rows) != epochs:
        raise ValueError(f"history: got {len(rows)} rows, expected one for each of {epochs} epochs")
    for row in rows:
        if not isinstance(row, dict):
            raise TypeError(f"history: got {brief(row)}, expected a row of numbers")
        for name in (*_COLUMNS, score, *row):
            value = row.get(name)
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"history: got {brief(value)} for {brief(name)}, expected a number")
