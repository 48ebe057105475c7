"""Evaluation of a classifier or a segmenter: accuracy, loss, confusion, speed; parameters and multiply-adds.

torchmetrics computes the figures of pixels; each figure of a classifier is a line of PyTorch.
"""

from __future__ import annotations

import contextlib
import resource
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cvt.config import CvTConfig
from cvt.extras import require
from cvt.segmentation import IGNORED, build, pixel_loss
from cvt_kernels.backends import requesting
from cvt_kernels.tuning import clock

LabeledImages = Iterable[tuple[Tensor, Tensor]]
Answers = Iterator[tuple[Tensor, Tensor]]


class Sums(NamedTuple):
    """The sums over labeled images: cross-entropy, hits among the first and first five classes, images."""

    loss: float
    top1: float
    top5: float
    images: float


class Evaluation(NamedTuple):
    """The figures of a classifier that :func:`evaluate` measured.

    Attributes:
        top1: Fraction of the images whose class is the most probable one.
        top5: Fraction of the images whose class is among the five most probable ones.
        loss: Cross-entropy, mean over the images.
        confusion: (K, K) int64 on the CPU: images of class i that were classified as j.
        images_per_second: The median speed of forward passes, of the most frequent size of batches. The first
            of them, in which kernels may be tuned, does not count; None with fewer than four others.
        peak_memory: Bytes. On CUDA, PyTorch's peak during the evaluation; elsewhere the largest resident size
            that the process ever had.
        is_disturbed: Whether other work on the machine disturbed the forward passes, so that their speed is
            rough.
    """

    top1: float
    top5: float
    loss: float
    confusion: Tensor
    images_per_second: float | None
    peak_memory: int
    is_disturbed: bool = False

    @property
    def images(self) -> int:
        """The number of images."""
        return int(self.confusion.sum())

    @property
    def per_class(self) -> Tensor:
        """The accuracy within each class, (K,) float64, NaN for one without images."""
        return self.confusion.diag() / self.confusion.sum(1).double()


class PixelEvaluation(NamedTuple):
    """The figures of a segmenter that :func:`evaluate_pixels` measured; see also :class:`Evaluation`.

    Attributes:
        miou: Intersection over union (IoU), mean over the classes that occur in labels or predictions.
        pixel_accuracy: The fraction of the labeled pixels whose class is the most probable one.
        loss: Cross-entropy, mean over the pixels that are labeled; NaN without any.
        iou: (K,) float32, the IoU of each class, 0 for one that does not occur.
        confusion: (K, K) int64: pixels of class i that were classified as j.
        images: The number of images.
    """

    miou: float
    pixel_accuracy: float
    loss: float
    iou: Tensor
    confusion: Tensor
    images: int
    images_per_second: float | None = None
    peak_memory: int = 0
    is_disturbed: bool = False


class Cost(NamedTuple):
    """The cost of a model, wherever it runs; see :func:`cost`."""

    parameters: int
    multiply_adds: int


def answers(
    model: Callable[[Tensor], Tensor],
    batches: LabeledImages,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> Answers:
    """Yields labels and logits in float32 of every batch, on the device of the model."""
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            logits = model(images)
        yield labels, logits.float()


@torch.no_grad()
def add_up(answers: Answers, device: torch.device) -> Sums:
    """Sums up loss and hits of a classifier in evaluation mode; synchronizes the device only at the end."""
    parts, count = [torch.zeros(3, device=device)], 0
    for labels, logits in answers:
        hits = logits.topk(min(5, logits.shape[-1])).indices == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        parts.append(torch.stack([loss, hits[:, 0].sum(), hits.sum()]))
        count += len(labels)
    loss_sum, top1, top5 = map(sum, zip(*torch.stack(parts).tolist(), strict=True))
    return Sums(loss_sum, top1, top5, count)


@torch.no_grad()
def add_up_pixels(
    answers: Answers, device: torch.device, classes: int, *, together: bool = True
) -> PixelEvaluation:
    """Counts the pixels of a segmenter in evaluation mode by torchmetrics, of the extra ``train``.

    With ``together`` the pixels of all processes count. Speed and memory are not measured, and ``images`` are
    of this process.
    """
    metrics = require("torchmetrics", "train")
    options = {"ignore_index": IGNORED, "validate_args": False, "sync_on_compute": together}
    counts = metrics.classification.MulticlassConfusionMatrix(classes, **options).to(device)
    loss, images = metrics.SumMetric(nan_strategy="disable", sync_on_compute=together).to(device), 0
    for labels, logits in answers:
        counts.update(logits.argmax(1), labels)
        loss.update(pixel_loss(logits, labels, reduction="sum"))
        images += len(labels)
    confusion = counts.compute().cpu()
    right, occurring = confusion.diag(), confusion.sum(0) + confusion.sum(1)
    iou = right / (occurring - right).clamp_min(1)
    mean_loss = (loss.compute().cpu() / confusion.sum()).item()
    accuracy = (right.sum().double() / confusion.sum()).item()
    return PixelEvaluation(iou[occurring > 0].mean().item(), accuracy, mean_loss, iou, confusion, images)


@torch.inference_mode()
def evaluate(model: nn.Module, batches: LabeledImages, *, autocast: torch.dtype | None = None) -> Evaluation:
    """Evaluates a classifier on labeled images; the result does not depend on the batching.

    Args:
        model: Images (B, …) to logits (B, K). Runs in evaluation mode and is left in the modes it had.
        batches: Pairs of images (B, …) and integer labels (B,) in 0 … K − 1, on any device.
        autocast: ``torch.bfloat16`` or ``torch.float16`` for mixed precision; the loss is in float32 always.

    Raises:
        ValueError: There is no image, an image has no label or one out of range, or logits are not finite.
    """
    confusion = torch.zeros(0, 0, dtype=torch.int64)

    def counted(answers: Answers) -> Answers:
        nonlocal confusion
        for labels, logits in answers:
            if not len(confusion):
                confusion = confusion.new_zeros(logits.shape[1], logits.shape[1])
            places = labels.cpu(), logits.topk(1).indices[:, 0].cpu()
            confusion.index_put_(places, torch.ones_like(places[0]), accumulate=True)
            yield labels, logits

    with _observing(model) as observer:
        sums = add_up(counted(observer.answers(batches, autocast)), observer.device)
    if not sums.images:
        raise ValueError("batches: got no images, expected at least one")
    top1, top5, loss = (part / sums.images for part in (sums.top1, sums.top5, sums.loss))
    return Evaluation(top1, top5, loss, confusion, **observer.cost())


@torch.inference_mode()
def evaluate_pixels(
    model: nn.Module, batches: LabeledImages, *, autocast: torch.dtype | None = None
) -> PixelEvaluation:
    """Evaluates a :class:`cvt.CvTSegmenter` on images with label maps; every labeled pixel counts the same.

    The batches are pairs of images (B, 3, H, W) and labels (B, H, W), int64: classes from 0, or 255 for
    pixels that do not count. The rest is as in :func:`evaluate`.

    Raises:
        ModuleNotFoundError: torchmetrics is not installed.
        ValueError: There is no labeled pixel, a label is out of range, or logits are not finite.
    """
    classes = cast(Any, model).config.num_classes
    with _observing(model) as observer:
        found = observer.answers(batches, autocast)
        counted = add_up_pixels(found, observer.device, classes, together=False)
    if not counted.confusion.sum():
        raise ValueError("batches: got no labeled pixels, expected at least one")
    return counted._replace(**observer.cost())


class _Observer:
    """Times the forward passes of a model, and checks labels and logits."""

    def __init__(self, model: nn.Module):
        self.device = next(model.parameters()).device
        self._model = model
        self._times: dict[int, clock.Times] = defaultdict(clock.Times)  # by the size of batches
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def answers(self, batches: LabeledImages, autocast: torch.dtype | None) -> Answers:
        """Yields labels and logits of every batch, which are checked, and times the forward passes."""
        for number, (labels, logits) in enumerate(answers(self._forward, batches, self.device, autocast)):
            _check(f"batches[{number}]", labels, logits)
            yield labels, logits

    def _forward(self, images: Tensor) -> Tensor:
        with self._times[len(images)].run(self.device):
            return self._model(images)

    def cost(self) -> dict[str, Any]:
        """Returns ``images_per_second``, ``peak_memory`` and ``is_disturbed`` of :class:`Evaluation`."""
        size = max(self._times, key=lambda size: len(self._times[size].seconds))
        times = self._times[size].without_first()
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:
            memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if len(times.seconds) < clock.LEAST_RUNS:
            return {"images_per_second": None, "peak_memory": memory}
        speed, is_disturbed = size / times.median, times.is_disturbed
        return {"images_per_second": speed, "peak_memory": memory, "is_disturbed": is_disturbed}


def _check(name: str, labels: Tensor, logits: Tensor) -> None:
    """Raises unless each image or pixel has a class (a pixel may have 255), and logits are finite."""
    classes, of_pixels = logits.shape[1], logits.ndim > 2
    expected = (len(logits), *logits.shape[2:])
    if labels.dtype != torch.int64 or labels.shape != expected:
        got = f"{tuple(labels.shape)} and dtype {labels.dtype}"
        raise ValueError(f"{name}: got labels of shape {got}, expected {expected} and torch.int64")
    wrong = labels[((labels < 0) | (labels >= classes)) & ((labels != IGNORED) | (not of_pixels))]
    if len(wrong):
        raise ValueError(
            f"{name}: got label {int(wrong[0])}, expected 0 to {classes - 1}, the model's classes"
        )
    if not logits.isfinite().all():
        raise ValueError(f"{name}: the model gives logits that are not finite")


@contextlib.contextmanager
def _observing(model: nn.Module) -> Iterator[_Observer]:
    """Puts a model into evaluation mode for the block, and yields what observes it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield _Observer(model)
    finally:
        for module, training in modes:
            module.training = training


# Cost -----------------------------------------------------------------------------------------------------


def cost(config: CvTConfig, image_size: int) -> Cost:
    """Counts parameters, and multiply-adds per square image by torch's own counter.

    The paper's "FLOPs" are multiply-adds; torch counts each as two. Matrix products and convolutions count;
    norms, activations, softmax and biases do not. The reference's operators run on the meta device, so that
    the figure is the same on every machine. With ``token_keep="entropy"`` as many tokens stay as can be.
    ValueError is raised for images that are too small for the model.
    """
    with torch.device("meta"):
        model = build(config).eval()
    with requesting("reference"):
        operations = count_operations(model, 1, config.in_chans, image_size, image_size)
    return Cost(sum(p.numel() for p in model.parameters()), operations // 2)


def count_operations(model: nn.Module, *shape: int) -> int:
    """Counts the operations of a forward of a model on the meta device, a sum being one too."""
    from torch.utils.flop_counter import FlopCounterMode  # 0.2 s, which other commands need not wait for

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.empty(shape, device="meta"))
    return counter.get_total_flops()
