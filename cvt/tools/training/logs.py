"""Logs of a training: TensorBoard's event files, a table and a plot of the learning curve."""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any

from cvt.extras import require
from cvt.files import replacing


class Logs:
    """The writer of TensorBoard's event files, ``log.csv`` and ``curves.png`` in a directory.

    Raises:
        ModuleNotFoundError: TensorBoard or Matplotlib is not installed.
    """

    def __init__(self, directory: Path, step: int):
        self._directory, self._figure = directory, require("matplotlib.figure", "train").Figure
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

    def close(self, history: list[dict[str, float]]) -> None:
        """Draws the learning curve of all epochs and closes the event files."""
        self._writer.close()
        ticker = require("matplotlib.ticker", "train")
        figure = self._figure(figsize=(9, 4), layout="constrained")
        losses, accuracies = figure.subplots(1, 2)
        part = "pixels" if "miou" in history[-1] else "images"
        epochs = [row["epoch"] for row in history]
        for axes, name, words, style in (
            (losses, "train_loss", "training loss", "o-"),
            (losses, "val_loss", "validation loss", "s--"),
            (accuracies, "top1", "top-1 accuracy", "o-"),
            (accuracies, "top5", "top-5 accuracy", "s--"),
            (accuracies, "miou", "mean intersection over union", "o-"),
            (accuracies, "pixel_accuracy", "accuracy", "s--"),
        ):
            if name not in history[-1]:
                continue
            axes.plot(epochs, [row[name] for row in history], style, markersize=4, label=words)
        losses.set(title="Loss", xlabel="epoch", ylabel=f"mean over the {part}")
        accuracies.set(title="Accuracy on the validation images", xlabel="epoch", ylabel=f"of the {part}")
        accuracies.yaxis.set_major_formatter(ticker.PercentFormatter(1))
        for axes in (losses, accuracies):
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
            axes.grid(alpha=0.25)
            axes.legend()
        with replacing(self._directory / "curves.png") as scratch:
            figure.savefig(scratch)
