"""The training loop, for one process or several under ``torchrun``.

Random numbers are seeded anew in every epoch, so that a run that was stopped and resumes from the checkpoint
of its last complete epoch gives the same results: on a CPU, bit for bit.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import gc
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from cvt.card import ModelCard
from cvt.extras import require
from cvt.files import replacing
from cvt.huggingface import BEST
from cvt.model import CvT
from cvt.reading import load_pickle
from cvt.segmentation import CvTSegmenter
from cvt_kernels import graphed
from cvt_kernels.checks import shown

from ..datasets import Batches, ImageDataset
from ..evaluation import answers
from .augment import Augment
from .recipe import PRECISIONS, TASKS, TrainConfig, distillation_loss, learning_rate, parameter_groups

LAST, LOCK = "last.pth", ".lock"


class NonFiniteLossError(ValueError):
    """The loss is NaN or infinite; the checkpoint on disk is an earlier epoch's."""


@contextlib.contextmanager
def distributed(device: torch.device) -> Iterator[torch.device]:
    """Joins the process group under ``torchrun``; yields the device of this process."""
    if not dist.is_torchelastic_launched():
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield device
    gc.collect()  # of what still holds the group, whose threads abort a process if they outlive Python
    dist.barrier()
    dist.destroy_process_group()  # not after an error, when the others may be waiting in another call


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


class Trainer:
    """The training of one model; :meth:`fit` is the loop over epochs.

    The model, a classifier or a segmenter, is trained in place, on ``device``, by the images of
    ``train_set``, with ``random_crop``; ``val_set`` has images of the same classes, without. Those of a
    segmenter have label maps. Checkpoints and logs go into the directory ``output``; with ``resume`` the run
    goes on from its ``last.pth``, which must exist; without, it must not. ``workers`` (for each process) and
    ``corrupt`` are as in :class:`cvt.tools.datasets.Batches`. With ``config.distillation``, ``teacher`` maps
    the same images to logits, or to an object with ``logits``. With ``graph``, forwards and backwards are
    replayed as CUDA graphs on a GPU (:func:`cvt_kernels.graphed`).

    ``epoch`` is the number of completed epochs, and ``history`` has a row of numbers for each of them.

    Raises:
        FileNotFoundError: ``resume`` without a checkpoint.
        ModuleNotFoundError: The ``train`` extra is not installed.
        ValueError: Arguments that contradict each other, or a checkpoint that is damaged or of another
            configuration.
    """

    def __init__(
        self,
        model: CvT | CvTSegmenter,
        train_set: ImageDataset,
        val_set: ImageDataset,
        config: TrainConfig,
        *,
        output: str | os.PathLike[str],
        device: torch.device | str = "cpu",
        teacher: nn.Module | None = None,
        resume: bool = False,
        workers: int = 0,
        corrupt: Literal["error", "skip"] = "error",
        graph: bool = True,
    ):
        self.config, self.device, self.output = config, torch.device(device), Path(output)
        self.rank, self.world_size = rank_and_world_size()
        self.task = TASKS[model.config.head]
        self._check(model, train_set, val_set, teacher)
        if (self.output / LAST).exists() and not resume:
            raise ValueError(
                f"output: {self.output / LAST} exists; go on with --resume, or choose another directory"
            )
        self.card = ModelCard(model.config, val_set.classes, val_set.image_size, val_set.crop_fraction)
        self._same = {**dataclasses.asdict(config), "images": len(train_set), **self.card.to_dict()}
        micro_batch = config.batch_size // (self.world_size * config.accumulate)
        share: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size}
        share |= {"workers": workers, "corrupt": corrupt}
        self.train_batches = Batches(train_set, micro_batch, shuffle=True, seed=config.seed, **share)
        self.val_batches = Batches(val_set, micro_batch, **share)
        self.steps_per_epoch = len(self.train_batches) // config.accumulate
        if not self.steps_per_epoch:
            raise ValueError(f"batch_size: {config.batch_size} is more than the {len(train_set)} images")
        self.augment = Augment(config, len(train_set.classes), train_set.image_size)
        self.model = model.to(self.device)
        self.teacher: Any = teacher.to(self.device).eval() if teacher else None
        self.ema = None
        if config.ema_decay:
            average = get_ema_multi_avg_fn(config.ema_decay)
            self.ema = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)
        if graph:
            graphed(self.model)  # before DDP
        self.wrapped: Any = self.model
        if self.world_size > 1:
            self.wrapped = DistributedDataParallel(self.model)
            if config.sync_bn:
                # After DDP, which takes it on GPUs only; cvt_kernels.conv_projection has it on CPUs too.
                nn.SyncBatchNorm.convert_sync_batchnorm(self.wrapped)
        groups = parameter_groups(self.model, config.weight_decay, config.layer_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr)
        self._dtype = PRECISIONS[config.precision]
        self._autocast = torch.autocast(self.device.type, self._dtype, enabled=self._dtype is not None)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.epoch = 0
        self.history: list[dict[str, float]] = []
        if resume:
            self._load()
        self.output.mkdir(parents=True, exist_ok=True)
        self.logs = Logs(self.output, self.epoch * self.steps_per_epoch) if self.rank == 0 else None

    def _check(
        self, model: Any, train_set: ImageDataset, val_set: ImageDataset, teacher: nn.Module | None
    ) -> None:
        config, count = self.config, self.world_size * self.config.accumulate
        if train_set.classes != val_set.classes:
            in_one_only = sorted(set(train_set.classes) ^ set(val_set.classes))
            raise ValueError(f"data: train and val have different classes: {', '.join(in_one_only[:5])}")
        for name, expected in self.task.unfit.items():
            if (got := getattr(config, name)) != expected:
                raise ValueError(f"{name}: got {got}, expected {expected} for head={model.config.head!r}")
        if config.batch_size % count:
            raise ValueError(
                f"batch_size: got {config.batch_size}, expected a multiple of {count}, {config.accumulate} "
                f"micro-batches for each of {self.world_size} processes"
            )
        if (teacher is None) != (config.distillation == "none"):
            raise ValueError(
                f"teacher: expected one with distillation soft or hard only, not {config.distillation}"
            )

    def fit(
        self, *, report: Callable[[dict[str, float]], None] | None = None, progress: bool = False
    ) -> list[dict[str, float]]:
        """Trains to the last epoch, with a checkpoint after each; returns ``history``.

        This has of each epoch ``epoch``, ``lr``, ``train_loss``, the figures of :meth:`evaluate`,
        ``images_per_second`` of the training alone, and ``seconds``. The first process calls ``report`` with
        such a row, of which :func:`epoch_line` makes a line, when its checkpoint is written; ``progress``
        shows a bar of the steps, if stderr is a terminal.

        Raises:
            ImageError: An image cannot be used, and ``corrupt`` is ``"error"``.
            NonFiniteLossError: The loss is NaN or infinite; checkpoints stay as they were.
            ValueError: Another process trains in the same directory.
        """
        with _locked(self.output) if self.rank == 0 else contextlib.nullcontext():
            if self.logs is not None and self.history:  # a run that was killed may have left some out
                self.logs.epoch(self.epoch * self.steps_per_epoch, self.history)
            while self.epoch < self.config.epochs:
                self._epoch(report, progress)
            if self.logs is not None:
                self.logs.close()
        if self.world_size > 1:
            dist.barrier()  # the first process has written its files
        return self.history

    def _epoch(self, report: Callable[[dict[str, float]], None] | None, progress: bool) -> None:
        """Trains for one epoch, evaluates, and writes checkpoints and logs."""
        start = time.perf_counter()
        losses = self.train_epoch(progress=progress)
        trained = time.perf_counter() - start  # the last loss has been fetched, so no step is left
        metrics = self.evaluate()
        step = self.epoch * self.steps_per_epoch
        self._check_finite(metrics["val_loss"], step, "validation loss")
        row = {
            "epoch": self.epoch,
            "lr": learning_rate(self.config, step - 1, self.steps_per_epoch),
            "train_loss": sum(losses) / len(losses),
            **metrics,
            "images_per_second": self.steps_per_epoch * self.config.batch_size / trained,
            "seconds": time.perf_counter() - start,
        }
        self.history.append(row)
        self._save()
        if self.logs is not None:
            self.logs.epoch(step, self.history)
        if self.rank == 0 and report is not None:
            report(row)

    def train_epoch(self, *, progress: bool = False) -> list[float]:
        """Trains for one epoch; returns the loss of every step, the mean over all processes."""
        entropy = np.random.SeedSequence((self.config.seed, self.epoch, self.rank))
        torch.manual_seed(int(entropy.generate_state(1)[0]))
        self.train_batches.set_epoch(self.epoch)
        self.wrapped.train()
        if self.config.freeze_bn:
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        batches, first = iter(self.train_batches), self.epoch * self.steps_per_epoch
        losses: list[float] = []
        pending: list[Tensor] = []
        bar = {"unit": "step", "leave": False, "disable": None if progress and self.rank == 0 else True}
        with tqdm(range(self.steps_per_epoch), f"epoch {self.epoch + 1}", **bar) as steps:
            for step in steps:
                micro_batches = list(itertools.islice(batches, self.config.accumulate))
                pending.append(self.step(micro_batches, first + step))
                if len(pending) == 20 or step == self.steps_per_epoch - 1:  # seldom: it waits for the GPU
                    losses += self._losses(pending, first + len(losses))
                    steps.set_postfix(loss=f"{sum(losses[-len(pending) :]) / len(pending):.4f}")
                    pending = []
        self.epoch += 1
        return losses

    def step(self, micro_batches: Sequence[tuple[Tensor, Tensor]], step: int) -> Tensor:
        """Takes one step of the optimizer; returns the loss of this process."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step, self.steps_per_epoch) * group["lr_scale"]
        total = torch.zeros((), device=self.device)
        for i, (images, labels) in enumerate(micro_batches):
            images, targets = self.augment(images.to(self.device), labels.to(self.device))
            # The processes exchange gradients once per step, with its last micro-batch.
            is_exchanging = self.world_size == 1 or i == len(micro_batches) - 1
            with contextlib.nullcontext() if is_exchanging else self.wrapped.no_sync():
                with self._autocast:
                    logits = self.wrapped(images)
                loss = self._loss(logits.float(), images, targets) / len(micro_batches)
                self.scaler.scale(loss).backward()
            total += loss.detach()
        if config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        return total

    def _loss(self, logits: Tensor, images: Tensor, targets: Tensor) -> Tensor:
        config = self.config
        loss = self.task.loss(logits, targets, label_smoothing=config.label_smoothing)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            teacher = self.teacher(images)
        teacher = getattr(teacher, "logits", teacher)
        distilled = distillation_loss(logits, teacher, config.distillation, config.temperature)
        return (1 - config.distillation_weight) * loss + config.distillation_weight * distilled

    def _losses(self, pending: list[Tensor], first: int) -> list[float]:
        losses = torch.stack(pending)
        if self.world_size > 1:
            dist.all_reduce(losses)
        values = (losses / self.world_size).tolist()
        for step, value in enumerate(values, first):
            self._check_finite(value, step, "loss")
            if self.logs is not None:
                self.logs.step(step, loss=value)
        return values

    def _check_finite(self, value: float, step: int, name: str) -> None:
        if not math.isfinite(value):
            epochs = len(self.history)
            saved = f"{self.output / LAST} is of epoch {epochs}" if epochs else "nothing was saved"
            raise NonFiniteLossError(f"{name} is {value} at step {step}; {saved}")

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics of the averaged weights, or else of the model.

        These are ``val_loss``, and ``top1`` and ``top5``; of a segmenter ``miou``, ``pixel_accuracy`` and
        ``iou/CLASS`` for each class.
        """
        found = answers((self.ema or self.model).eval(), self.val_batches, self.device, self._dtype)
        return self.task.evaluate(found, self.device, self.card.labels, self.world_size > 1)

    def _save(self) -> None:
        """Writes ``last.pth``, and before it ``best.pth`` if this is the best epoch so far."""
        if self.rank:
            return
        content = {"card": self.card.to_dict(), "epoch": self.epoch}
        score = self.task.score
        if all(row[score] < self.history[-1][score] for row in self.history[:-1]):
            model = self.ema.module if self.ema else self.model
            best = {**content, "model": model.state_dict(), "metrics": self.history[-1]}
            _write(best, self.output / BEST)
        content |= {
            "same": self._same,
            "history": self.history,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict() if self.ema else {},
        }
        _write(content, self.output / LAST)

    def _load(self) -> None:
        """Resumes from ``last.pth``; the settings of the optimizer stay those of the recipe."""
        path = self.output / LAST
        if not path.exists():
            raise FileNotFoundError(f"resume: {path} does not exist")
        state = load_pickle(path)
        different = _differences(state["same"], self._same)
        if different:
            raise ValueError(f"resume: {path} was trained with {'; '.join(different):.1000}")
        self.model.load_state_dict(state["model"])
        own = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": own})
        self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.epoch, self.history = state["epoch"], state["history"]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lets one process at a time train in a directory; the lock of one that dies is free."""
    try:
        with FileLock(directory / LOCK, timeout=0):
            yield
    except Timeout:
        raise ValueError(
            f"output: another process trains in {directory}; wait for its end, or choose another directory"
        ) from None


def epoch_line(row: dict[str, float], epochs: int) -> str:
    """Returns a row of the history as a line: losses, accuracy, speed, and the time left at this pace."""
    left = tqdm.format_interval(row["seconds"] * (epochs - row["epoch"]))
    task = next(task for task in TASKS.values() if task.score in row)
    return (
        f"epoch {row['epoch']:{len(str(epochs))}}/{epochs}  loss {row['train_loss']:.4f}  "
        f"validation loss {row['val_loss']:.4f}  {task.title} {row[task.score]:7.2%}  "
        f"{row['images_per_second']:.0f} images/s  {left} left"
    )


def _write(content: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint atomically."""
    with replacing(path) as scratch:
        try:
            torch.save(content, scratch)
        except RuntimeError as error:  # PyTorch's own writer does not say why
            raise OSError(f"{path}: cannot be written to, perhaps the disk is full: {error}") from error


def rank_and_world_size() -> tuple[int, int]:
    """Returns the rank of this process and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns the old and new value of everything that differs, field by field for a configuration."""
    texts = []
    for name, before in then.items():
        after = now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            texts += _differences(before, after)
        elif before != after:
            texts.append(f"{shown(name)[1:-1]} {shown(before)}, now {shown(after)}")
    return texts
