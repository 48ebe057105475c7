"""Reading of ``last.pth``, from which training resumes, with checks of its contents."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cvt.checkpoints import why_not_finite
from cvt.config import CvTConfig
from cvt.reading import CheckpointError, is_plain, load_pickle, why_larger
from cvt_kernels.checks import shown

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
# What every row of the history has besides the score of its task.
_COLUMNS = ("epoch", "lr", "train_loss", "val_loss", "images_per_second", "seconds")


def read_state(path: Path, score: str) -> dict[str, Any]:
    """Reads a training state.

    Args:
        path: The path of ``last.pth``.
        score: The column of the history by which epochs are compared.

    Raises:
        CheckpointError: The file is damaged, or not written by ``cvt train``.
    """
    state = load_pickle(path)
    with naming(path):
        if not isinstance(state, dict):
            raise TypeError(f"got {shown(state)}, expected an object of fields")
        for name, kind in _FIELDS.items():
            if name not in state:
                raise ValueError(f"has no {name}")
            if not isinstance(state[name], kind) or isinstance(state[name], bool):
                raise TypeError(f"{name}: got {shown(state[name])}, expected {kind.__name__}")
        _check_tensors(state, path.stat().st_size)
        CvTConfig.from_dict(state["same"].get("config"))
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
    """Loads the state of each parameter with a check of the shapes, which PyTorch does not do.

    The settings of ``optimizer`` stay, whatever the state says.

    Raises:
        ValueError: The state is for other parameters, or has numbers that are not finite.
    """
    groups = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in state["param_groups"]] != [group["params"] for group in groups]:
        raise ValueError("optimizer: has groups of other parameters")
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
    for parameter, values in optimizer.state.items():
        shapes = {"step": torch.Size(), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
        for name, shape in shapes.items():
            if values[name].shape != shape:
                raise ValueError(f"optimizer: got {name} {tuple(values[name].shape)} for {tuple(shape)}")
        reason = why_not_finite(values)
        if values["step"] < 1:
            reason = f"step: got {values['step'].item():g}, expected at least 1"
        if reason is not None:
            raise ValueError(f"optimizer: {reason}")


def _check_tensors(state: Mapping[str, Any], size: int) -> None:
    """Raises for tensors, wherever they are, whose numbers are not all in the file of ``size`` bytes."""
    tensors: list[Tensor] = []
    seen, left = set(), [*state.values()]
    while left:
        part = left.pop()
        if id(part) in seen:  # a list may hold another twice, and that one a third
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            if not is_plain(part):
                raise ValueError(f"got a tensor of {part.layout} on {part.device}, expected one in memory")
            tensors.append(part)
        elif isinstance(part, Mapping):
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
    reason = why_larger(tensors, size)
    if reason is not None:
        raise ValueError(reason)


def _check_history(rows: list[Any], epochs: int, score: str) -> None:
    if len(rows) != epochs:
        raise ValueError(f"history: got {len(rows)} rows, expected one for each of {epochs} epochs")
    for row in rows:
        if not isinstance(row, dict):
            raise TypeError(f"history: got {shown(row)}, expected a row of numbers")
        for name in (*_COLUMNS, score, *row):
            value = row.get(name)
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"history: got {shown(value)} for {shown(name)}, expected a number")
            if name in (*_COLUMNS, score) and not math.isfinite(value):
                raise ValueError(f"history: got {value} for {name}, expected a finite number")
