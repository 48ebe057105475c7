"""``cvt evaluate``: accuracy, loss, speed and memory on a data set; parameters and multiply-adds."""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from tqdm import tqdm

from cvt.model import CvT
from cvt.segmentation import CvTSegmenter
from cvt_kernels.messages import aligned
from cvt_kernels.tuning import clock

from ..evaluation import Cost, Evaluation, PixelEvaluation, cost, evaluate, evaluate_pixels
from ..training.recipe import PRECISIONS
from .check import PHOTO, check
from .common import (
    BATCHES,
    MODEL,
    add,
    load_model,
    naming_options,
    open_split,
    option,
    print_result,
    resolve_device,
)
from .paths import InputPath, add_json_argument, reporting

if TYPE_CHECKING:
    from ..datasets import Batches

_WORST = 10  # classes of a report
_SCORES = {"top1": "top-1", "top5": "top-5", "miou": "mIoU", "pixel_accuracy": "pixel accuracy"}


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
    add(parser, *MODEL, "--labels", *BATCHES, "--device")
    text = (
        "also evaluate with token pruning: fractions of the last stage's tokens to keep, or entropy; the "
        "checkpoint's own setting is always evaluated first"
    )
    add(parser, "--token-keep", dest="token_keeps", nargs="+", default=[], help=text)
    option(parser, "--precision", "dtype of autocast", choices=tuple(PRECISIONS), default="fp32")
    add_json_argument(parser, "the metrics and the full confusion matrix")
    parser.set_defaults(run=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int | None:
    if arguments.check:
        if arguments.data or arguments.token_keeps:
            raise ValueError("--check: got --data or --token-keep beside it, expected neither")
        return check(arguments)
    if arguments.data is None or arguments.photo is not None:
        raise ValueError("--data: got none or --photo beside it, expected it without --photo, or --check")
    from ..datasets import Batches  # lazy: Pillow would slow down --help

    device = resolve_device(arguments.device)
    loaded = load_model(arguments, device)
    model, size, data = loaded.model, loaded.image_size, arguments.data
    options: dict[str, Any] = {"classes": loaded.checkpoint.labels, "corrupt": arguments.corrupt}
    options["crop_fraction"] = loaded.crop_fraction
    dataset = open_split(data, "val", size, model.config.head, **options)
    loaded.check_classes(dataset.classes, f"--data {data}")
    labels = loaded.labels(arguments.labels) or dataset.classes
    keeps = _keeps(model, arguments.token_keeps)  # before the long run
    batches = Batches(dataset, arguments.batch_size, workers=arguments.workers, corrupt=arguments.corrupt)
    precision = PRECISIONS[arguments.precision]
    with reporting(arguments.json) as report_json:
        runs = [_measure(model, keep, batches, size, precision) for keep in keeps]
        evaluation, costs = runs[0].evaluation, runs[0].cost
        names = ("checkpoint", "data", "batch_size", "precision")
        setting = {name: getattr(arguments, name) for name in names}
        setting |= {"image_size": size, "device": str(device)}
        content = setting | as_json(evaluation, costs, labels)
        report_json(content | {"token_keep": [run.as_json() for run in runs]})
    if any(run.evaluation.is_disturbed for run in runs):
        warnings.warn(clock.DISTURBED, stacklevel=1)
    setup = f"{size}×{size} pixels, {arguments.precision} on {device}"
    heading = f"{arguments.checkpoint} on {data}, {setup}"
    result = [heading, "", report(evaluation, costs, labels)]
    if arguments.token_keeps:
        result += ["", *_token_table(runs)]
    print_result(arguments, result)
    return None


def _keeps(model: CvT | CvTSegmenter, more: Sequence[Any]) -> list[Any]:
    """Returns the model's own ``token_keep`` and others, none of them twice, as what they come to."""
    configs = [model.config]
    with naming_options("token_keep"):
        configs += [dataclasses.replace(model.config, token_keep=keep) for keep in more]
    keeps: dict[Any, Any] = {}
    for config in configs:
        keeps.setdefault(config.stages[-1].token_keep, config.token_keep)
    return list(keeps.values())


class Measured(NamedTuple):
    """The figures of a model for one ``token_keep``."""

    token_keep: Any
    evaluation: Evaluation | PixelEvaluation
    cost: Cost

    def as_json(self) -> dict[str, Any]:
        """Returns the figures that depend on how many tokens stay."""
        names = (*_scores_of(self.evaluation), "loss", "images_per_second")
        figures = {name: getattr(self.evaluation, name) for name in names}
        return {"token_keep": self.token_keep, **figures, "multiply_adds": self.cost.multiply_adds}


def _scores_of(evaluation: Evaluation | PixelEvaluation) -> dict[str, str]:
    """Returns the names of the scores of an evaluation, the first one best known, and their titles."""
    return {name: title for name, title in _SCORES.items() if name in evaluation._fields}


def _measure(model: CvT | CvTSegmenter, keep: Any, batches: Batches, size: int, autocast: Any) -> Measured:
    """Evaluates a model in which ``keep`` is then set."""
    model.set_token_keep(keep)
    progress = tqdm(batches, unit="batch", leave=False, disable=None)
    evaluation: Evaluation | PixelEvaluation
    if isinstance(model, CvT):
        evaluation = evaluate(model, progress, autocast=autocast)
    else:
        evaluation = evaluate_pixels(model, progress, autocast=autocast)
    return Measured(keep, evaluation, cost(model.config, size))


# The report -----------------------------------------------------------------------------------------------


def _token_table(runs: Sequence[Measured]) -> list[str]:
    """Returns a table of models that differ in how many tokens stay, the model as it was loaded first."""
    first = runs[0].cost.multiply_adds
    score, title = next(iter(_scores_of(runs[0].evaluation).items()))
    rows = [("tokens kept", title, "multiply-adds", "of the first", "images/s")]
    for run in runs:
        keep = run.token_keep if isinstance(run.token_keep, tuple) else (run.token_keep,)
        kept = ",".join(each if isinstance(each, str) else f"{each:g}" for each in keep)
        counts = _scaled(run.cost.multiply_adds), f"{run.cost.multiply_adds / first:.1%}"
        rows.append((kept, f"{getattr(run.evaluation, score):.2%}", *counts, _speed(run.evaluation)))
    return [*aligned(rows, right=[1, 2, 3, 4]), "", "entropy: the multiply-adds are the most that can be"]


def report(evaluation: Evaluation | PixelEvaluation, costs: Cost, labels: Sequence[str] | None = None) -> str:
    """Returns a table of the figures, and one of the classes with the lowest accuracy."""
    figures = [
        ("images", f"{evaluation.images}"),
        *((title, f"{getattr(evaluation, name):.2%}") for name, title in _scores_of(evaluation).items()),
        ("loss", f"{evaluation.loss:.4f}"),
        ("parameters", _scaled(costs.parameters)),
        ("multiply-adds", _scaled(costs.multiply_adds)),
        ("images/s", _speed(evaluation)),
        ("peak memory", f"{evaluation.peak_memory / 2**20:.0f} MiB"),
    ]
    return "\n".join([*aligned(figures, right=[1]), "", *aligned(_worst(evaluation, labels), right=[1, 2])])


def _worst(
    evaluation: Evaluation | PixelEvaluation, labels: Sequence[str] | None
) -> list[tuple[str, str, str, str]]:
    """Returns the rows of the classes with the lowest accuracy or IoU, of those that occur."""

    def name(index: int) -> str:
        return f"class {index}" if labels is None else labels[index]

    confusion = evaluation.confusion
    if isinstance(evaluation, PixelEvaluation):
        figures, occurs = evaluation.iou, confusion.sum(0) + confusion.sum(1) > 0
        rows = [("class", "pixels", "IoU", "most often taken for")]
    else:
        figures, occurs = evaluation.per_class, confusion.sum(1) > 0
        rows = [("class", "images", "right", "most often taken for")]
    for i in [int(i) for i in figures.argsort(stable=True) if occurs[i]][:_WORST]:
        others = confusion[i].clone()
        others[i] = 0
        confused = f"{name(int(others.argmax()))} ({int(others.max())})" if others.any() else ""
        rows.append((name(i), f"{int(confusion[i].sum())}", f"{figures[i]:.2%}", confused))
    return rows


def as_json(
    evaluation: Evaluation | PixelEvaluation, costs: Cost, labels: Sequence[str] | None = None
) -> dict[str, Any]:
    """Returns the metrics as plain numbers, with every class' own and the full confusion matrix.

    The accuracy of a class without images is null.
    """
    figures = {**evaluation._asdict(), **costs._asdict(), "images": evaluation.images}
    if isinstance(evaluation, Evaluation):
        per_class = evaluation.per_class.tolist()
        figures["per_class"] = [None if accuracy != accuracy else accuracy for accuracy in per_class]
    plain = {name: each.tolist() if isinstance(each, Tensor) else each for name, each in figures.items()}
    return plain | {"labels": None if labels is None else list(labels)}


def _speed(evaluation: Evaluation | PixelEvaluation) -> str:
    speed = evaluation.images_per_second
    return "too few batches" if speed is None else f"{speed:.1f}"


def _scaled(count: int) -> str:
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.2f} M"
