"""The tasks that a model is trained for, with their losses and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from cvt.config import Head
from cvt.segmentation import pixel_loss

from ..evaluation import Sums, add_up, add_up_pixels


class Task(NamedTuple):
    """A task, chosen by the head of the model.

    Attributes:
        score: The metric by which the best weights are chosen.
        title: Its name, for people.
        evaluate: Returns the metrics of a model on batches on a device; ``together`` for all processes'.
        loss: Returns the loss of logits and targets with label smoothing, the mean over the batch.
        unfit: Training options that do not apply, with the value that each must have.
    """

    score: str
    title: str
    evaluate: Callable[..., dict[str, float]]
    loss: Callable[..., Tensor]
    unfit: dict[str, object]


def _classify(*data: Any, classes: list[str], autocast: Any, together: bool) -> dict[str, float]:
    sums = add_up(*data, autocast=autocast)
    if together:
        joined = torch.tensor(sums, dtype=torch.float64, device=data[2])
        dist.all_reduce(joined)
        sums = Sums(*joined.tolist())
    images = sums.images or math.nan  # without any the loss is not finite, which stops the training
    return {"val_loss": sums.loss / images, "top1": sums.top1 / images, "top5": sums.top5 / images}


def _segment(*data: Any, classes: list[str], autocast: Any, together: bool) -> dict[str, float]:
    model, batches, device = data
    sums = add_up_pixels(model, batches, device, len(classes), autocast=autocast, together=together)
    if not sums.confusion.sum():
        raise ValueError("data: the validation images have no labeled pixels, expected at least one")
    figures = {"val_loss": sums.loss, "miou": sums.miou, "pixel_accuracy": sums.pixel_accuracy}
    return figures | {f"iou/{name}": iou for name, iou in zip(classes, sums.iou.tolist(), strict=True)}


#: The task of each head.
TASKS: dict[Head, Task] = {
    "classify": Task("top1", "top-1", _classify, F.cross_entropy, {}),
    "segment": Task(
        "miou",
        "mIoU",
        _segment,
        pixel_loss,
        {"mixup": 0, "cutmix": 0, "rand_augment": 0, "random_erasing": 0, "distillation": "none"},
    ),
}
