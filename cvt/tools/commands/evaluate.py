"""``cvt evaluate``: accuracy, loss, speed and memory on a data set; parameters and multiply-adds."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from cvt.config import LARGEST_IMAGE
from cvt.model import CvT
from cvt.segmentation import CvTSegmenter
from cvt.tiles import Tiles
from cvt_kernels.messages import aligned
from cvt_kernels.tuning import clock

from ..evaluation import Cost, Evaluation, PixelEvaluation, TokenCounter, cost, evaluate, evaluate_pixels
from ..training.recipe import PRECISIONS
from .check import PHOTO, check
from .common import (
    BATCHES,
    MODEL,
    add,
    integer,
    load_model,
    naming_options,
    open_split,
    print_result,
    recorded_warnings,
    resolve_device,
    token_keep,
)
from .paths import add_json_argument, input_path, reporting

if TYPE_CHECKING:
    from ..datasets import Batches

_WORST = 10  # classes of a report
_SCORES = {"top1": "top-1", "top5": "top-5", "miou": "mIoU", "pixel_accuracy": "pixel accuracy"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "--data",
        type=input_path,
        help="digits, or a folder in ImageNet's layout, val/CLASS/IMAGE; for segmentation models "
        "val/images/NAME.jpg and val/labels/NAME.png; required without --check",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="instead check a downloaded model of transformers (CvT, SegFormer, PVT, PVT v2, GLPN): all "
        "tensors used and finite, the published first values, right when accelerated; exit code 1 if not",
    )
    parser.add_argument(
        "--photo", type=input_path, help=f"image file for --check; there are published values for {PHOTO}"
    )
    add(parser, *MODEL, "--labels", *BATCHES, "--device")
    parser.add_argument(
        "--token-keep",
        dest="token_keeps",
        nargs="+",
        default=[],
        type=token_keep,
        metavar="KEEP",
        help="also evaluate with token pruning: fractions of the last stage's tokens to keep, or entropy; "
        "the checkpoint's own setting is always evaluated first",
    )
    for name, least, text in (
        ("tile", 1, "segment images in tiles of this side, a multiple of 32, with the memory for one row of "
         "them; for models of --task segment (default: whole images)"),
        ("overlap", 0, f"what neighboring tiles share, a multiple of 32 (default: {Tiles().overlap})"),
        ("context", 0, "what is computed at the edges of a tile and not used, at most half of --overlap "
         f"(default: {Tiles().context})"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=integer(least, LARGEST_IMAGE), metavar="PIXELS", help=text)
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="fp32", help="default: fp32")
    add_json_argument(parser, "the metrics and the full confusion matrix")
    parser.set_defaults(run=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int | None:
    tiles = _tiles(arguments)
    if arguments.check:
        if arguments.data or arguments.token_keeps or tiles:
            raise ValueError("--check: got --data, --token-keep or --tile beside it, expected none of them")
        return check(arguments)
    if arguments.data is None or arguments.photo is not None:
        raise ValueError("--data: got none or --photo beside it, expected it without --photo, or --check")
    from ..datasets import Batches  # lazy: Pillow would slow down --help

    device = resolve_device(arguments.device)
    loaded = load_model(arguments, device)
    model, size, data = loaded.model, loaded.image_size, arguments.data
    if tiles and isinstance(model, CvT):
        raise ValueError(
            f"--tile: {arguments.checkpoint} is a model of head='classify', which needs an image as a whole; "
            "expected one of head='segment'"
        )
    options: dict[str, Any] = {"classes": loaded.checkpoint.labels, "corrupt": arguments.corrupt}
    options["crop_fraction"] = loaded.crop_fraction
    with recorded_warnings() as unread:
        dataset = open_split(data, "val", size, model.config.head, **options)
    loaded.check_classes(dataset.classes, f"--data {data}")
    labels = loaded.labels(arguments.labels) or dataset.classes
    keeps = _keeps(model, arguments.token_keeps)  # before the long run
    batches = Batches(dataset, arguments.batch_size, workers=arguments.workers, corrupt=arguments.corrupt)
    precision = PRECISIONS[arguments.precision]
    with reporting(arguments.json) as report_json, recorded_warnings() as remarks:
        runs = [_measure(model, keep, batches, size, precision, tiles) for keep in keeps]
        evaluation, costs = runs[0].evaluation, runs[0].cost
        names = ("checkpoint", "data", "batch_size", "precision")
        setting = {name: getattr(arguments, name) for name in names}
        setting |= {"image_size": size, "tiles": tiles and tiles._asdict(), "device": str(device)}
        content = setting | as_json(evaluation, costs, labels)
        report_json(content | {"token_keep": [run.as_json() for run in runs]})
    pixels = f"{size}×{size} pixels" + (f" in tiles of {tiles.tile}" if tiles else "")
    heading = f"{arguments.checkpoint} on {data}, {pixels}, {arguments.precision} on {device}"
    result = [heading, "", report(evaluation, costs, labels)]
    if arguments.token_keeps:
        result += ["", *_token_table(runs)]
    if any(run.evaluation.is_disturbed for run in runs):
        remarks.append(clock.DISTURBED)
    print_result(arguments, result, [*loaded.remarks, *unread, *remarks])
    return None


def _tiles(arguments: argparse.Namespace) -> Tiles | None:
    """Returns the tiles that the options name, or None for whole images."""
    options = ((name, getattr(arguments, name)) for name in Tiles._fields)
    given = {name: value for name, value in options if value is not None}
    if not given:
        return None
    if "tile" not in given:
        name, value = next(iter(given.items()))
        raise ValueError(f"--{name}: got {value} without --tile, expected both or neither")
    tiles = Tiles(**given)
    with naming_options(*Tiles._fields):
        tiles.check()
    return tiles


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
    """The figures of a model for one ``token_keep``; ``tokens`` are the means of :class:`TokenCounter`."""

    token_keep: Any
    evaluation: Evaluation | PixelEvaluation
    cost: Cost
    tokens: list[float]

    def as_json(self) -> dict[str, Any]:
        """Returns the figures that depend on how many tokens stay; ``tokens`` counts class tokens too."""
        names = (*_scores_of(self.evaluation), "loss", "images_per_second")
        figures = {name: getattr(self.evaluation, name) for name in names}
        counts = {"multiply_adds": self.cost.multiply_adds, "tokens": self.tokens}
        return {"token_keep": self.token_keep, **figures, **counts}


def _scores_of(evaluation: Evaluation | PixelEvaluation) -> dict[str, str]:
    """Returns the names of the scores of an evaluation, the first one best known, and their titles."""
    return {name: title for name, title in _SCORES.items() if name in evaluation._fields}


def _measure(
    model: CvT | CvTSegmenter,
    keep: Any,
    batches: Batches,
    size: int,
    autocast: torch.dtype | None,
    tiles: Tiles | None,
) -> Measured:
    """Evaluates a model in which ``keep`` is then set."""
    model.set_token_keep(keep)
    progress = tqdm(batches, unit="batch", leave=False, disable=None)
    with TokenCounter(model) as counter:
        evaluation: Evaluation | PixelEvaluation
        if isinstance(model, CvT):
            evaluation = evaluate(model, progress, autocast=autocast)
        else:
            evaluation = evaluate_pixels(model, progress, autocast=autocast, tiles=tiles)
    tokens = counter.means()
    return Measured(keep, evaluation, cost(model.config, size, tokens, tiles=tiles), tokens)


# The report -----------------------------------------------------------------------------------------------


def _token_table(runs: Sequence[Measured]) -> list[str]:
    """Returns a table of models that differ in how many tokens stay, the model as it was loaded first."""
    first = runs[0].cost.multiply_adds
    score, title = next(iter(_scores_of(runs[0].evaluation).items()))
    rows = [("tokens kept", "computed", title, "multiply-adds", "of the first", "images/s")]
    for run in runs:
        keep = run.token_keep if isinstance(run.token_keep, tuple) else (run.token_keep,)
        rows.append(
            (
                ",".join(each if isinstance(each, str) else f"{each:g}" for each in keep),
                f"{sum(run.tokens) / (len(run.tokens) * run.tokens[0]):.1%}",
                f"{getattr(run.evaluation, score):.2%}",
                _scaled(run.cost.multiply_adds),
                f"{run.cost.multiply_adds / first:.1%}",
                _speed(run.evaluation),
            )
        )
    note = "computed: the part of the tokens that blocks of the last stage compute, mean of blocks and images"
    return [*aligned(rows, right=[1, 2, 3, 4, 5]), "", note]


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
