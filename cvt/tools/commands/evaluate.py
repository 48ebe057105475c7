"""``cvt evaluate``: accuracy, loss, speed and memory on a data set; parameters and multiply-adds.

``--check``: whether a download is whole, the published model, and right when accelerated.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import cvt_kernels as ck
from cvt.checkpoints import local_place
from cvt.extras import require
from cvt.images import open_image
from cvt.model import CvT
from cvt_kernels.messages import aligned
from cvt_kernels.tuning import clock

from ..datasets import Batches
from ..evaluation import Cost, Evaluation, PixelEvaluation, cost, evaluate, evaluate_pixels
from ..training.recipe import PRECISIONS
from .common import BATCHES, MODEL, add, load_model, open_split, option, print_result
from .paths import InputPath, add_json_argument, reporting

#: The photograph of transformers' tests, of COCO's validation set: two cats on a couch, 640×480.
PHOTO = "http://images.cocodataset.org/val2017/000000039769.jpg"
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


# A check of a download ------------------------------------------------------------------------------------

#: The first values of some checkpoints for it, in the order of memory, that these tests expect. The test of
#: PVT v2 repeats the values of PVT, so none is expected of it here.
FIRST_VALUES: dict[str, tuple[float, ...]] = {
    "microsoft/cvt-13": (0.9285, 0.9015, -0.3150),
    "nvidia/segformer-b0-finetuned-ade-512-512": (-4.6310, -5.5232, -6.2356),
    "Zetatech/pvt-tiny-224": (-1.4192, -1.9158, -0.9702),
    "vinvino02/glpn-kitti": (3.4291, 2.7865, 2.5151),
}
#: How far a value may be from the expected one: decoders and resizing differ in the last bit of a pixel.
#: Other weights give unrelated values.
TOLERANCE = 0.02
_DAMAGE = {
    "missing": "are missing",
    "unused": "have no place in the model",
    "not_finite": "have NaN or infinities",
}


def check(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 1 if something is wrong, else 0."""
    name = arguments.checkpoint
    with reporting(arguments.json) as report_json:
        place = _place(name)
        transformers = require("transformers", "hf")
        architecture = next(iter(transformers.AutoConfig.from_pretrained(place).architectures or ()), "none")
        if not hasattr(transformers, architecture):
            raise ValueError(
                f"checkpoint: its architecture is {architecture}, expected a class of transformers"
            )
        made, loading = getattr(transformers, architecture).from_pretrained(place, output_loading_info=True)
        model = made.float().eval()
        content: dict[str, Any] = {
            "checkpoint": name,
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "missing": sorted(loading["missing_keys"]),
            "unused": sorted(loading["unexpected_keys"]),
            "not_finite": [key for key, each in model.state_dict().items() if not each.isfinite().all()],
        }
        content["failures"] = [
            f"{len(keys)} tensors {text}: {', '.join(keys[:3])}{' …' * (len(keys) > 3)}"
            for kind, text in _DAMAGE.items()
            if (keys := content[kind])
        ]
        lines = [f"{name}: {content['model']}, {content['parameters'] / 1e6:.1f} M parameters"]
        if not content["failures"]:
            lines += _run(model, place, arguments.photo, content)
        report_json(content)
    print_result(arguments, [*lines, *(f"wrong: {failure}" for failure in content["failures"])])
    return int(bool(content["failures"]))


def _run(model: Any, place: str, photo: str | None, content: dict[str, Any]) -> list[str]:
    """Computes the first values and verifies the accelerated model; adds both to the content."""
    if photo:  # as the checkpoint asks for
        processor = require("transformers", "hf").AutoImageProcessor.from_pretrained(place)
        with open_image(photo) as file:
            image = processor(images=file.convert("RGB"), return_tensors="pt")["pixel_values"]
    else:
        size = getattr(model.config, "image_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        image = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output = model(image)
    result = output.logits if "logits" in output else output[0]  # such as a depth
    got = result.flatten()[:3].tolist()
    known = FIRST_VALUES.get(place, ())
    content["first_values"], content["expected"] = got, list(known) if photo else []
    if photo and any(not abs(a - b) <= TOLERANCE for a, b in zip(got, known, strict=False)):
        content["failures"].append(f"expected the first values {_numbers(known)} within {TOLERANCE}")
    ck.accelerate(model)
    verification = ck.verify(model, image, rounds=1)
    content["failures"] += verification.failures
    values = f"first values {_numbers(got)} for {photo or 'random numbers of seed 0'}"
    if known:
        values += f"; transformers' tests have {_numbers(known)} for {PHOTO}"
    return [values, "", str(verification), ""]


def _place(name: str) -> str:
    """Returns the directory or the name on the Hub that transformers takes."""
    place = local_place(name)
    if not isinstance(place, Path):
        return place.name
    if not (place / "config.json").is_file():
        expected = "owner/name on the Hub or a directory with config.json, with --check"
        raise ValueError(f"checkpoint: got {name}, expected {expected}")
    return str(place)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
