"""Logs of a training: TensorBoard's event files and a table."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any

from cvt.extras import require
from cvt.files import replacing


class Logs:
    """The writer of TensorBoard's event files and ``log.csv``; ModuleNotFoundError without TensorBoard."""

    def __init__(self, directory: Path, step: int):
        self._directory = directory
        self._summary_writer, self._first = require("torch.utils.tensorboard", "train").SummaryWriter, step

    @functools.cached_property
    def _writer(self) -> Any:
        """The writer of the event file, opened for the first value: a run that fails before leaves none."""
        return self._summary_writer(str(self._directory), purge_step=self._first)

    def step(self, step: int, **values: float) -> None:
        """Writes values of one step to TensorBoard."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def epoch(self, step: int, history: list[dict[str, float]]) -> None:
        """Writes the last epoch of ``history`` to TensorBoard, and all of them to ``log.csv``."""
        self.step(step, **{name: value for name, value in history[-1].items() if name != "epoch"})
        self._writer.flush()
        with (
            replacing(self._directory / "log.csv") as scratch,
            open(scratch, "w", encoding="utf-8", newline="") as file,
        ):
            rows = csv.DictWriter(file, history[-1], lineterminator="\n")
            rows.writeheader()
            rows.writerows(history)

    def close(self) -> None:
        """Closes the event files."""
        self._writer.close()
