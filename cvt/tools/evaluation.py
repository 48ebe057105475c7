"""Evaluation of a classifier or a segmenter: accuracy, loss, confusion, speed; parameters and multiply-adds.

torchmetrics computes the figures of pixels; each figure of a classifier is a line of PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cvt.config import CvTConfig
from cvt.extras import require
from cvt.model import Block, Stage, Stages
from cvt.segmentation import IGNORED, build, pixel_loss
from cvt.tiles import Tiles
from cvt_kernels import checks
from cvt_kernels.backends import requesting
from cvt_kernels.tuning import clock

LabeledImages = Iterable[tuple[Tensor, Tensor]]


class Sums(NamedTuple):
    """The sums over labeled images: cross-entropy, hits among the first and first five classes, images."""

    loss: float
    top1: float
    top5: float
    images: float


class PixelSums(NamedTuple):
    """The figures of a segmenter over labeled images, as torchmetrics counts them.

    A class that is in neither the labels nor the predictions has an IoU of 0 and is left out of the mean.

    Attributes:
        loss: Cross-entropy, mean over the pixels that are labeled; NaN without any.
        miou: Intersection over union (IoU), mean over the classes.
        pixel_accuracy: The fraction of the labeled pixels whose class is the most probable one.
        iou: (K,) float32, the IoU of each class.
        confusion: (K, K) int64: pixels of class i that were classified as j.
    """

    loss: float
    miou: float
    pixel_accuracy: float
    iou: Tensor
    confusion: Tensor


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
    """The figures of a segmenter that :func:`evaluate_pixels` measured; see the other classes."""

    miou: float
    pixel_accuracy: float
    loss: float
    iou: Tensor
    confusion: Tensor
    images: int
    images_per_second: float | None
    peak_memory: int
    is_disturbed: bool = False


class Cost(NamedTuple):
    """The cost of a model, wherever it runs; see :func:`cost`."""

    parameters: int
    multiply_adds: int


@torch.no_grad()
def add_up(
    model: Callable[[Tensor], Tensor],
    batches: LabeledImages,
    device: torch.device,
    *,
    autocast: torch.dtype | None = None,
    observe: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None,
) -> Sums:
    """Sums up loss and hits of a classifier over labeled images; synchronizes the device only at the end.

    Args:
        model: Images (B, …) to logits (B, K), in evaluation mode.
        batches: Pairs of images (B, …) and integer labels (B,), on any device.
        device: The model's device.
        autocast: As in :func:`evaluate`.
        observe: Called for every batch with images, labels, logits and its (B, 5) most probable classes.
    """
    parts, count = [torch.zeros(3, device=device)], 0
    for images, labels, logits in _answers(model, batches, device, autocast):
        top = logits.topk(min(5, logits.shape[-1])).indices
        if observe is not None:
            observe(images, labels, logits, top)
        hits = top == labels[:, None]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        parts.append(torch.stack([loss, hits[:, 0].sum(), hits.sum()]))
        count += len(labels)
    loss_sum, top1, top5 = map(sum, zip(*torch.stack(parts).tolist(), strict=True))
    return Sums(loss_sum, top1, top5, count)


@torch.no_grad()
def add_up_pixels(
    model: Callable[[Tensor], Tensor],
    batches: LabeledImages,
    device: torch.device,
    classes: int,
    *,
    autocast: torch.dtype | None = None,
    observe: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    together: bool = True,
) -> PixelSums:
    """Sums up the confusion of a segmenter's pixels by torchmetrics, which the extra ``train`` installs.

    Args:
        model: Images (B, …) to logits (B, K, H, W), in evaluation mode.
        batches: Pairs of images (B, …) and labels (B, H, W): classes, or 255 for pixels that do not count.
        device: The model's device.
        classes: K.
        autocast: As in :func:`evaluate`.
        observe: Called with images, labels and logits of every batch before they are added.
        together: With several processes, add up the pixels of all.
    """
    metrics = require("torchmetrics", "train")
    kinds = metrics.classification
    options = {"num_classes": classes, "ignore_index": IGNORED, "validate_args": False}
    options |= {"sync_on_compute": together}
    counts = metrics.MetricCollection(
        {
            "confusion": kinds.MulticlassConfusionMatrix(**options),
            "iou": kinds.MulticlassJaccardIndex(average="none", **options),
            "miou": kinds.MulticlassJaccardIndex(average="macro", **options),
        },
        compute_groups=[["confusion", "iou", "miou"]],  # which count the same
    ).to(device)
    loss = metrics.SumMetric(nan_strategy="disable", sync_on_compute=together).to(device)
    for images, labels, logits in _answers(model, batches, device, autocast):
        if observe is not None:
            observe(images, labels, logits)
        counts.update(logits.argmax(1), labels)
        loss.update(pixel_loss(logits, labels, reduction="sum"))
    figures = counts.compute()
    confusion = figures["confusion"].cpu()
    mean_loss = (loss.compute().cpu() / confusion.sum()).item()
    accuracy = (confusion.diag().sum().double() / confusion.sum()).item()
    return PixelSums(mean_loss, figures["miou"].item(), accuracy, figures["iou"].cpu(), confusion)


def _answers(
    model: Callable[[Tensor], Tensor],
    batches: LabeledImages,
    device: torch.device,
    autocast: torch.dtype | None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields images, labels and logits in float32 of every batch, on the device."""
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            logits = model(images)
        yield images, labels, logits.float()


@torch.inference_mode()
def evaluate(model: nn.Module, batches: LabeledImages, *, autocast: torch.dtype | None = None) -> Evaluation:
    """Evaluates a classifier on labeled images; the result does not depend on the batching.

    Args:
        model: Images (B, …) to logits (B, K). Runs in evaluation mode and is left in the modes it had.
        batches: Pairs of images (B, …) and integer labels (B,) in 0 … K − 1, on any device.
        autocast: ``torch.bfloat16`` or ``torch.float16`` for mixed precision; the loss is in float32 always.

    Raises:
        TypeError: An argument of the wrong type, or a batch that is no pair of tensors.
        ValueError: There is no image, a batch is not images with a label each, a label is out of range,
            logits are not finite, or the model has no parameters.
    """
    observer = _Observer(model, autocast)
    confusion = torch.zeros(0, 0, dtype=torch.int64)

    def observe(images: Tensor, labels: Tensor, logits: Tensor, top: Tensor) -> None:
        nonlocal confusion
        observer.check(labels, logits, images.shape[:1])
        if not len(confusion):
            confusion = confusion.new_zeros(logits.shape[1], logits.shape[1])
        places = labels.cpu(), top[:, 0].cpu()
        confusion.index_put_(places, torch.ones_like(places[0]), accumulate=True)

    batches = pairs(batches)
    with _eval_mode(model):
        sums = add_up(observer.forward, batches, observer.device, autocast=autocast, observe=observe)
    if not sums.images:
        raise ValueError("batches: got no images, expected at least one")
    top1, top5, loss = (part / sums.images for part in (sums.top1, sums.top5, sums.loss))
    return Evaluation(top1, top5, loss, confusion, *observer.cost())


@torch.inference_mode()
def evaluate_pixels(
    model: nn.Module,
    batches: LabeledImages,
    *,
    autocast: torch.dtype | None = None,
    tiles: Tiles | None = None,
) -> PixelEvaluation:
    """Evaluates a segmenter on images with label maps; every labeled pixel counts the same.

    Args:
        model: A :class:`cvt.CvTSegmenter`. Runs in evaluation mode and is left in the modes it had.
        batches: Pairs of images (B, 3, H, W) and labels (B, H, W), int64: classes from 0, or 255 for pixels
            that do not count.
        autocast: As in :func:`evaluate`.
        tiles: Segments in tiles, as :func:`cvt.segment_in_tiles` does, with the memory for one tile and one
            row of logits; None segments whole images.

    Raises:
        ModuleNotFoundError: torchmetrics is not installed.
        TypeError: As of :func:`evaluate`, or the model is no segmenter.
        ValueError: There is no labeled pixel, a batch is not images with a label of each pixel, a label is
            out of range, logits are not finite, or tiles have sizes that do not fit.
    """
    if tiles is not None:
        checks.check_kind("tiles", tiles, Tiles)
        tiles.check()
    observer = _Observer(model, autocast, of_pixels=True)
    batches = pairs(batches)
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "num_classes"):
        raise TypeError(f"model: got {type(model).__name__}, expected a CvTSegmenter")

    def observe(images: Tensor, labels: Tensor, logits: Tensor) -> None:
        observer.check(labels, logits, (len(images), *images.shape[2:]))

    settings: dict[str, Any] = {"autocast": autocast, "observe": observe, "together": False}
    forward: Callable[[Tensor], Tensor] = observer.forward
    if tiles is not None:  # logits in place of images
        batches = (strip for images, labels in batches for strip in observer.strips(images, labels, tiles))
        forward = Tensor.float
    with _eval_mode(model):
        sums = add_up_pixels(forward, batches, observer.device, config.num_classes, **settings)
    if not sums.confusion.sum():
        raise ValueError("batches: got no labeled pixels, expected at least one")
    scores = sums.miou, sums.pixel_accuracy, sums.loss, sums.iou, sums.confusion
    return PixelEvaluation(*scores, sum(observer.sizes), *observer.cost())


class _Observer:
    """Times the forward passes of a model, and checks labels and logits.

    Args:
        model: Must have parameters.
        autocast: A dtype, or None.
        of_pixels: Whether logits are (B, K, H, W), and labels (B, H, W) or 255.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None, *, of_pixels: bool = False):
        checks.check_kind("model", model, nn.Module)
        if autocast is not None:
            checks.check_float_dtype("autocast", autocast)
        if next(model.parameters(), None) is None:
            raise ValueError("model: has no parameters, expected a model with weights")
        self.device = next(model.parameters()).device
        self.sizes: list[int] = []  # of batches
        self._model, self._autocast, self._of_pixels = model, autocast, of_pixels
        self._times: dict[int, clock.Times] = defaultdict(clock.Times)  # by the size of batches
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def forward(self, images: Tensor) -> Tensor:
        """Runs the model."""
        with self._times[len(images)].run(self.device):
            logits = self._model(images)
        self.sizes.append(len(images))
        sizes = images.shape[2:] if self._of_pixels else ()
        if logits.ndim != 2 + len(sizes) or (len(logits), *logits.shape[2:]) != (len(images), *sizes):
            expected = ", ".join(map(str, (len(images), "classes", *sizes)))
            raise ValueError(
                f"{self._batch}: got logits of shape {tuple(logits.shape)}, expected ({expected})"
            )
        return logits

    def strips(self, images: Tensor, labels: Tensor, tiles: Tiles) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs a model of pixels in tiles; yields the logits of rows of the images, with their labels."""
        self.sizes.append(len(images))
        times = clock.Times()
        checks.check_rank(self._batch, images, 4, "(B, C, H, W)")
        self._check_shape(labels, (len(images), *images.shape[2:]))
        strips, top = tiles.strips(self._model, images), 0
        while top < images.shape[2]:
            autocast = torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None)
            with times.run(self.device), autocast:
                logits = next(strips)
            yield logits, labels[:, top : top + logits.shape[2]]
            top += logits.shape[2]
        self._times[len(images)].add(sum(times.seconds), sum(times.waited))

    def check(self, labels: Tensor, logits: Tensor, shape: Sequence[int]) -> None:
        """Raises unless labels are classes of that shape, and logits finite."""
        self._check_shape(labels, shape)
        is_wrong = (labels < 0) | (labels >= logits.shape[1])
        wrong = labels[is_wrong & (labels != IGNORED) if self._of_pixels else is_wrong]
        if len(wrong):
            others = f", or {IGNORED}, which is ignored" if self._of_pixels else ""
            raise ValueError(
                f"{self._batch}: got label {int(wrong[0])}, expected 0 to {logits.shape[1] - 1}, the model's "
                f"classes{others}"
            )
        if not logits.isfinite().all():
            raise ValueError(f"{self._batch}: the model gives logits that are not finite")

    def _check_shape(self, labels: Tensor, shape: Sequence[int]) -> None:
        if labels.dtype != torch.int64 or labels.shape != shape:
            raise ValueError(
                f"{self._batch}: got labels of shape {tuple(labels.shape)} and dtype {labels.dtype}, "
                f"expected {tuple(shape)} and torch.int64, one per {'pixel' if self._of_pixels else 'image'}"
            )

    @property
    def _batch(self) -> str:
        return f"batches[{len(self.sizes) - 1}]"

    def cost(self) -> tuple[float | None, int, bool]:
        """Returns ``images_per_second``, ``peak_memory`` and ``is_disturbed`` of :class:`Evaluation`."""
        size = max(self._times, key=lambda size: len(self._times[size].seconds))
        times = self._times[size].without_first()
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if len(times.seconds) < clock.LEAST_RUNS:
            return None, memory, False
        return size / times.median, memory, times.is_disturbed


# Cost -----------------------------------------------------------------------------------------------------


def cost(
    config: CvTConfig,
    image_size: int,
    computed: Sequence[float] | None = None,
    *,
    tiles: Tiles | None = None,
) -> Cost:
    """Counts parameters, and multiply-adds per image by torch's own counter.

    The paper's "FLOPs" are multiply-adds; torch counts each as two. Matrix products and convolutions count;
    norms, activations, softmax and biases do not. The reference's operators run on the meta device, so that
    the figure is the same on every machine.

    Args:
        config: The model.
        image_size: Pixels of each side.
        computed: The mean number of tokens that each block of the last stage computes, from
            :class:`TokenCounter`; None for as many as ``token_keep="entropy"`` may keep at most.
        tiles: Counts the tiles of a segmenter in place of the whole image; ``computed`` is of a mean tile.

    Raises:
        ValueError: The images are too small for the model.
    """
    with torch.device("meta"):
        model = build(config).eval()
    whole = image_size, image_size
    sizes = {whole: 1} if tiles is None else tiles.sizes(*whole)
    multiply_adds = sum(count * _multiply_adds(model, *size, computed) for size, count in sizes.items())
    return Cost(sum(p.numel() for p in model.parameters()), multiply_adds)


def _multiply_adds(model: Stages, height: int, width: int, computed: Sequence[float] | None) -> int:
    """Counts the multiply-adds of an image for a model on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode  # 0.2 s, which other commands need not wait for

    image = torch.empty(1, model.config.in_chans, height, width, device="meta")
    counter, tokens = FlopCounterMode(display=False), TokenCounter(model)
    with requesting("reference"), torch.no_grad(), counter, tokens:
        model(image)
    multiply_adds = counter.get_total_flops() // 2
    if computed is not None:
        multiply_adds -= round(tokens.multiply_adds_without(computed))
    return multiply_adds


class TokenCounter:
    """A context manager that counts the tokens that the blocks of the last stage compute.

    Args:
        model: A model whose blocks are called, so not frozen for serving.
    """

    def __init__(self, model: Stages):
        last = cast(Stage, model.get_submodule(f"stage{len(model.config.depths) - 1}"))
        self._blocks = [cast(Block, block) for block in last.blocks]
        self._calls: list[list[tuple[Tensor | int, int, int]]] = [[] for _ in self._blocks]
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> TokenCounter:
        for block, calls in zip(self._blocks, self._calls, strict=True):
            hook = functools.partial(self._count, calls)
            self._hooks.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *details: object) -> None:
        self._hooks.close()

    @staticmethod
    def _count(calls: list[Any], block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, grid, *given = args
        rows = given[0] if given else kwargs.get("rows")
        keys = math.prod((tokens - 1) // block.attn.stride_kv + 1 for tokens in grid)
        keys += x.shape[1] - math.prod(grid)
        tokens = (
            x.shape[0] * x.shape[1] if rows is None else rows.numel() if rows.is_meta else (rows >= 0).sum()
        )
        calls.append((tokens, x.shape[0], keys))

    def means(self) -> list[float]:
        """Returns the mean of each block over its images, with class tokens; without values the largest."""
        return [
            sum(float(tokens) for tokens, _, _ in calls) / sum(images for _, images, _ in calls)
            for calls in self._calls
        ]

    def multiply_adds_without(self, computed: Sequence[float]) -> float:
        """Returns the multiply-adds per image that are saved if blocks compute only ``computed`` tokens."""
        saved = 0.0
        for block, calls, mean, fewer in zip(self._blocks, self._calls, self.means(), computed, strict=True):
            attention, keys = block.attn, calls[0][2]
            layers = (attention.proj_q, attention.proj, block.mlp.fc1, block.mlp.fc2)
            of_products = 2 * keys * attention.proj_q.out_features
            saved += (mean - fewer) * (of_products + sum(layer.weight.numel() for layer in layers))
        return saved


# Batches --------------------------------------------------------------------------------------------------


def pairs(batches: LabeledImages) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the batches; raises TypeError for no iterable, or one that is no pair of tensors."""
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise TypeError(f"batches: got {checks.shown(batches)}, expected pairs of images and labels")
    return map(_pair, itertools.count(), batches)


def _pair(number: int, batch: Any) -> tuple[Tensor, Tensor]:
    name = f"batches[{number}]"
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(f"{name}: got a {type(batch).__name__}, expected images with their labels")
    images, labels = batch
    checks.check_tensor(name, images, "of images first")
    checks.check_tensor(name, labels, "of labels behind the images")
    return images, labels


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
