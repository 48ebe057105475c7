"""``cvt evaluate``: accuracy, loss, speed and memory on a data set; parameters and multiply-adds."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from tqdm import tqdm

from cvt.model import CvT
from cvt_kernels.messages import aligned
from cvt_kernels.tuning import clock

from ..datasets import Batches
from ..evaluation import Cost, Evaluation, PixelEvaluation, cost, evaluate, evaluate_pixels
from ..training.recipe import PRECISIONS
from .check import PHOTO, check
from .common import BATCHES, MODEL, add, load_model, open_split, option, print_result
from .paths import InputPath, add_json_argument, reporting

_WORST = 10  # classes of a report
_SCORES = (("top1", "top-1"), ("top5", "top-5"), ("miou", "mIoU"), ("pixel_accuracy", "pixel accuracy"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    data = (
        "digits, or a folder in ImageNet's layout, val/CLASS/IMAGE; for segmentation models "
        "val/images/NAME.jpg and val/labels/NAME.png; required without --check"
    )
    option(parser, "--data", data, type=InputPath)
    text = (
        "instead check a downloaded model of transformers (CvT, SegFormer, PVT, PVT v2, GLPN): all tensors "
        "used and finite, the published first values, right when accelerated; exit code 1 if not"
    )
    option(parser, "--check", text, action="store_true")
    photo = f"image file for --check; there are published values for {PHOTO}"
    option(parser, "--photo", photo, type=InputPath)
    add(parser, *MODEL, "--token-keep", "--labels", *BATCHES, "--device")
    option(parser, "--precision", "dtype of autocast", choices=tuple(PRECISIONS), default="fp32")
    add_json_argument(parser, "the metrics and the full confusion matrix")
    parser.set_defaults(run=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int | None:
    if arguments.check:
        if arguments.data or arguments.token_keep:
            raise ValueError("--check: got --data or --token-keep beside it, expected neither")
        return check(arguments)
    if arguments.data is None or arguments.photo is not None:
        raise ValueError("--data: got none or --photo beside it, expected it without --photo, or --check")
    loaded = load_model(arguments)
    model, size, data = loaded.model, loaded.image_size, arguments.data
    options: dict[str, Any] = {"classes": loaded.checkpoint.labels, "corrupt": arguments.corrupt}
    options["crop_fraction"] = loaded.crop_fraction
    dataset = open_split(data, "val", size, model.config.head, **options)
    loaded.check_classes(dataset.classes, f"--data {data}")
    labels = loaded.labels(arguments.labels) or dataset.classes
    batches = Batches(dataset, arguments.batch_size, workers=arguments.workers, corrupt=arguments.corrupt)
    progress = tqdm(batches, unit="batch", leave=False, disable=None)
    run: Any = evaluate if isinstance(model, CvT) else evaluate_pixels
    with reporting(arguments.json) as report_json:
        evaluation = run(model, progress, autocast=PRECISIONS[arguments.precision])
        costs = cost(model.config, size)
        names = ("checkpoint", "data", "batch_size", "precision")
        setting = {name: getattr(arguments, name) for name in names}
        setting |= {"image_size": size, "token_keep": model.config.token_keep, "device": str(loaded.device)}
        report_json(setting | as_json(evaluation, costs, labels))
    if evaluation.is_disturbed:
        warnings.warn(clock.DISTURBED, stacklevel=1)
    setup = f"{size}×{size} pixels, {arguments.precision} on {loaded.device}"
    heading = f"{arguments.checkpoint} on {data}, {setup}"
    print_result(arguments, [heading, "", report(evaluation, costs, labels)])
    return None


# The report -----------------------------------------------------------------------------------------------


def report(evaluation: Evaluation | PixelEvaluation, costs: Cost, labels: Sequence[str]) -> str:
    """Returns a table of the figures, and one of the classes with the lowest accuracy."""
    figures_of, speed = evaluation._asdict(), evaluation.images_per_second
    figures = [
        ("images", f"{evaluation.images}"),
        *((title, f"{score:.2%}") for name, title in _SCORES if (score := figures_of.get(name)) is not None),
        ("loss", f"{evaluation.loss:.4f}"),
        ("parameters", _scaled(costs.parameters)),
        ("multiply-adds", _scaled(costs.multiply_adds)),
        ("images/s", "too few batches" if speed is None else f"{speed:.1f}"),
        ("peak memory", f"{evaluation.peak_memory / 2**20:.0f} MiB"),
    ]
    return "\n".join([*aligned(figures, right=[1]), "", *aligned(_worst(evaluation, labels), right=[1, 2])])


def _worst(evaluation: Evaluation | PixelEvaluation, labels: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the rows of the classes with the lowest accuracy or IoU, of those that occur."""
    confusion = evaluation.confusion
    if isinstance(evaluation, PixelEvaluation):
        figures, occurs = evaluation.iou, confusion.sum(0) + confusion.sum(1) > 0
        kinds = "pixels", "IoU"
    else:
        figures, occurs = evaluation.per_class, confusion.sum(1) > 0
        kinds = "images", "right"
    rows: list[tuple[str, ...]] = [("class", *kinds, "most often taken for")]
    for i in [int(i) for i in figures.argsort(stable=True) if occurs[i]][:_WORST]:
        others = confusion[i].clone()
        others[i] = 0
        confused = f"{labels[int(others.argmax())]} ({int(others.max())})" if others.any() else ""
        rows.append((labels[i], f"{int(confusion[i].sum())}", f"{figures[i]:.2%}", confused))
    return rows


def as_json(evaluation: Evaluation | PixelEvaluation, costs: Cost, labels: Sequence[str]) -> dict[str, Any]:
    """Returns the metrics as plain numbers, with every class' own and the full confusion matrix.

    The accuracy of a class without images is null.
    """
    figures = {**evaluation._asdict(), **costs._asdict(), "images": evaluation.images}
    if isinstance(evaluation, Evaluation):
        per_class = evaluation.per_class.tolist()
        figures["per_class"] = [None if accuracy != accuracy else accuracy for accuracy in per_class]
    plain = {name: each.tolist() if isinstance(each, Tensor) else each for name, each in figures.items()}
    return plain | {"labels": list(labels)}


def _scaled(count: int) -> str:
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.2f} M"
