"""How good a classifier is and what it costs: accuracy, confusion, parameters, multiply-adds, speed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cvt_kernels import use_backend

from ..config import CvTConfig
from ..model import CvT

_WORST = 10  # classes of a report


class Evaluation(NamedTuple):
    """What :func:`evaluate` measured.

    Attributes:
        top1: Fraction of the images whose class is the most probable one.
        top5: Fraction of the images whose class is among the five most probable ones.
        loss: Cross-entropy, mean over the images.
        confusion: (K, K) int64 on the CPU: images of class i that were taken for class j.
        images_per_second: Of forward passes alone, without the first batch if there are others.
        peak_memory: Bytes. On CUDA what PyTorch had allocated at most during the evaluation; elsewhere the
            largest resident size that the process ever had, or None where the system does not tell.
    """

    top1: float
    top5: float
    loss: float
    confusion: Tensor
    images_per_second: float
    peak_memory: int | None

    @property
    def images(self) -> int:
        """How many there were."""
        return int(self.confusion.sum())

    @property
    def per_class(self) -> Tensor:
        """(K,) float64: accuracy within each class, NaN for one without images."""
        return self.confusion.diag() / self.confusion.sum(1).double()


class Cost(NamedTuple):
    """What a model costs, wherever it runs; see :func:`cost`."""

    parameters: int
    multiply_adds: int


@torch.inference_mode()
def evaluate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, autocast: torch.dtype | None = None
) -> Evaluation:
    """Runs a classifier over labelled images, each of which counts the same however they are batched.

    Args:
        model: Images (B, …) to logits (B, K). Runs in evaluation mode and is left in the modes it had.
        batches: Of images (B, …) and integer labels (B,) in 0 … K − 1, on any device.
        autocast: ``torch.bfloat16`` or ``torch.float16`` for mixed precision; the loss is in float32 always.

    Raises:
        ValueError: There is no image, a batch is not images with a label each, a label is out of range, or
            logits are not finite.
    """
    device = next(model.parameters()).device
    hits, losses, confusion = [0, 0], 0.0, torch.zeros(0, 0, dtype=torch.int64)
    timed: list[tuple[int, float]] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _eval_mode(model):
        for i, (images, labels) in enumerate(batches):
            images, labels = images.to(device), labels.to(device)
            start = _now(device)
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                logits = model(images)
            timed.append((len(images), _now(device) - start))
            logits = logits.float()
            _check(f"batches[{i}]", images, labels, logits)
            top = logits.topk(min(5, logits.shape[1])).indices
            right = top == labels[:, None]
            hits[0] += int(right[:, 0].sum())
            hits[1] += int(right.sum())
            losses += F.cross_entropy(logits, labels, reduction="sum").item()
            if not len(confusion):
                confusion = torch.zeros(logits.shape[1], logits.shape[1], dtype=torch.int64)
            pairs = labels.cpu(), top[:, 0].cpu()
            confusion.index_put_(pairs, torch.ones_like(pairs[0]), accumulate=True)
    count = sum(size for size, _ in timed)
    if not count:
        raise ValueError("batches: got no images, expected at least one")
    steady = timed[1:] or timed
    rate = sum(size for size, _ in steady) / sum(seconds for _, seconds in steady)
    top1, top5 = (hit / count for hit in hits)
    return Evaluation(top1, top5, losses / count, confusion, rate, _peak_memory(device))


def cost(config: CvTConfig, image_size: int) -> Cost:
    """Parameters, and the multiply-adds of one image, as torch's own counter has them.

    The paper's "FLOPs" are multiply-adds; torch counts each as two. Matrix products and convolutions count:
    linear layers, both products of attention, embeddings, depthwise convolutions. Norms, activations, softmax
    and biases do not. The operators are the reference's, on the meta device, which computes nothing: so no
    kernel of our own hides from the counter, and the figure is the same on every machine.

    Raises:
        ValueError: The images are too small for the model.
    """
    from torch.utils.flop_counter import FlopCounterMode  # 0.2 s, which other commands need not wait for

    with torch.device("meta"):
        model = CvT(config).eval()
        image = torch.empty(1, config.in_chans, image_size, image_size)
    with use_backend("reference"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    return Cost(sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2)


def report(evaluation: Evaluation, costs: Cost, labels: Sequence[str] | None = None) -> str:
    """A table of the figures, and one of the classes with the lowest accuracy."""
    memory = evaluation.peak_memory
    rows = [
        ("images", f"{evaluation.images}"),
        ("top-1", f"{evaluation.top1:.2%}"),
        ("top-5", f"{evaluation.top5:.2%}"),
        ("loss", f"{evaluation.loss:.4f}"),
        ("parameters", _scaled(costs.parameters)),
        ("multiply-adds", _scaled(costs.multiply_adds)),
        ("images/s", f"{evaluation.images_per_second:.1f}"),
        ("peak memory", "unknown" if memory is None else f"{memory / 2**20:.0f} MiB"),
    ]
    seen = evaluation.confusion.sum(1) > 0
    worst = [int(i) for i in evaluation.per_class.argsort(stable=True) if seen[i]][:_WORST]
    classes = [("class", "images", "right", "most often taken for")]
    for i in worst:
        row = evaluation.confusion[i].clone()
        count, right = int(row.sum()), int(row[i])
        row[i] = 0
        other = "" if right == count else f"{_name(int(row.argmax()), labels)} ({int(row.max())})"
        classes.append((_name(i, labels), f"{count}", f"{right / count:.2%}", other))
    return "\n".join([*_aligned(rows, "<>"), "", *_aligned(classes, "<>><")])


def as_json(evaluation: Evaluation, costs: Cost, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """The same as numbers, per-class accuracy (null for a class without images) and confusion complete."""
    figures = evaluation._asdict() | costs._asdict()
    per_class = [None if accuracy != accuracy else accuracy for accuracy in evaluation.per_class.tolist()]
    return figures | {
        "images": evaluation.images,
        "per_class": per_class,
        "confusion": evaluation.confusion.tolist(),
        "labels": None if labels is None else list(labels),
    }


def _aligned(rows: Sequence[tuple[str, ...]], alignment: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[f"{cell:{a}{w}}" for cell, a, w in zip(row, alignment, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in cells]


def _scaled(count: int) -> str:
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.2f} M"


def _name(index: int, labels: Sequence[str] | None) -> str:
    return f"class {index}" if labels is None else labels[index]


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check(name: str, images: Tensor, labels: Tensor, logits: Tensor) -> None:
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{name}: got labels of shape {tuple(labels.shape)} and dtype {labels.dtype}, "
            f"expected ({len(images)},) and torch.int64, one per image"
        )
    if logits.ndim != 2 or logits.shape[0] != len(images):
        raise ValueError(
            f"{name}: got logits of shape {tuple(logits.shape)}, expected ({len(images)}, classes)"
        )
    wrong = labels[(labels < 0) | (labels >= logits.shape[1])]
    if len(wrong):
        raise ValueError(
            f"{name}: got label {int(wrong[0])}, expected 0 to {logits.shape[1] - 1}, the model's classes"
        )
    if not logits.isfinite().all():
        raise ValueError(f"{name}: the model gives logits that are not finite")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
