"""``cvt quantize``: 8-bit quantization of a model's linear layers, with the loss of accuracy."""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cvt_kernels as ck
from cvt.card import ModelCard
from cvt.factory import create_model
from cvt.model import CvT
from cvt.quantized import compact
from cvt_kernels.quantization import QuantizationReport

from ..evaluation import Evaluation
from . import smaller
from .common import load_model, open_calibration, positive_int, print_result, resolve_device
from .smaller import evaluated

if TYPE_CHECKING:
    from ..datasets import Batches

_ROUNDING = 1e-9  # of differences of fractions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    smaller.add_shared_arguments(parser, "accuracy, size and the error of every layer", calibrate=True)
    parser.add_argument(
        "--keep-float",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="layers to keep in floating point, such as 'stage2.blocks.9.*'",
    )
    parser.add_argument(
        "--max-drop",
        type=_points,
        default=0.5,
        help="largest accepted drop of top-1, in percentage points; the most sensitive layers are kept in "
        "floating point until it holds (default: 0.5)",
    )
    parser.add_argument(
        "--embeddings", action="store_true", help="also quantize all convolutional embeddings but the first"
    )
    parser.add_argument(
        "--images", type=positive_int, default=256, help="most images to calibrate with (default: 256)"
    )
    parser.set_defaults(run=_quantize)


def _points(text: str) -> float:
    try:
        points = float(text)
    except ValueError:
        points = math.nan
    if not 0 <= points <= 100:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected 0 to 100")
    return points


def _quantize(arguments: argparse.Namespace) -> None:
    smaller.check_output(arguments.output)
    device = resolve_device(arguments.device)
    loaded = load_model(arguments, device)
    if loaded.checkpoint.quantized:
        raise ValueError(f"--checkpoint: {loaded.checkpoint.path} is quantized already")
    classifier = loaded.classifier
    images, answers = open_calibration(arguments, loaded, arguments.images)
    labels = loaded.labels(arguments.labels)
    card = smaller.card_of(loaded, classifier.config, labels, images.dataset.classes)
    remarks: list[str] = []
    with smaller.staged(arguments, remarks) as (file, report_json):
        model = copy.deepcopy(classifier)
        report = ck.quantize(
            model,
            images,
            keep_float=arguments.keep_float,
            embeddings=arguments.embeddings,
            progress=True,
        )
        unquantized = evaluated(classifier, answers, "before")
        measurements = _Measurements(classifier, model, report, card, file, answers)
        report, quantized = measurements.within(unquantized.top1 - arguments.max_drop / 100)
        before = smaller.accuracy(unquantized) | {"bytes": smaller.size_of(classifier)}
        after = smaller.accuracy(quantized) | {"bytes": file.stat().st_size}
        given = smaller.settings(arguments, loaded, device)
        given |= {"calibration_images": len(images.dataset), "held_out_images": quantized.images}
        report_json(given | {"before": before, "after": after, "layers": _layers(report)})
    heading = (
        f"{arguments.output}: {arguments.checkpoint}, calibrated on {len(images.dataset)} images of "
        f"{arguments.calibrate}, measured on {quantized.images} others"
    )
    embeddings = "the first embedding" if arguments.embeddings else "embeddings"
    rest = (
        f"{embeddings}, depthwise convolutions, norms and the head stay in floating point, "
        "their matrices in float16"
    )
    lines = [heading, "", str(report), rest, "", *smaller.table(before, after)]
    print_result(arguments, lines, [*loaded.remarks, *remarks])


# Layers that stay in floating point -----------------------------------------------------------------------


class _Measurements:
    """Versions of a quantized model in which more and more of the worst layers stay in floating point.

    Args:
        original: The model in floating point.
        quantized: The same model with all layers quantized that can be, as the ``report`` says.
        report: See there.
        card: The card of the files.
        path: The file that every measurement writes.
        batches: Images and labels for the accuracy of the model in the file.
    """

    def __init__(
        self,
        original: CvT,
        quantized: CvT,
        report: QuantizationReport,
        card: ModelCard,
        path: Path,
        batches: Batches,
    ):
        self._device = next(original.parameters()).device
        self._original, self._quantized = original.state_dict(), quantized.state_dict()
        self._report, self._card, self._path, self._batches = report, card, path, batches
        rows = [*report.worst(), *(row for row in report if row.sqnr is None)]
        self._order = [row.path for row in rows if row.weight != "float"]

    def within(self, least: float) -> tuple[QuantizationReport, Evaluation]:
        """Writes the version with the fewest layers in floating point whose top-1 is at least ``least``."""
        evaluations: dict[int, Evaluation] = {}

        def is_enough(count: int) -> bool:
            self._write(count)
            model = create_model(checkpoint=self._path).to(self._device).eval()
            title = f"{count} layers in floating point" if count else "after"
            evaluations[count] = evaluated(model, self._batches, title)
            return evaluations[count].top1 >= least - _ROUNDING

        count = fewest(len(self._order), is_enough)
        if count == len(self._order):
            raise ValueError(
                f"--max-drop: top-1 falls below {least:.2%} even if {self._order[-1]} is the only layer "
                "that is quantized; nothing is written"
            )
        if count != list(evaluations)[-1]:
            self._write(count)
        kept, reason = self._order[:count], "is kept, since it loses more than others, for the sake of top-1"
        rows = (
            row._replace(weight="float", reason=reason) if row.path in kept else row for row in self._report
        )
        return QuantizationReport(rows), evaluations[count]

    def _write(self, count: int) -> None:
        kept = {
            f"{path}.{name}" for path in self._order[:count] for name in ("weight", "qweight", "weight_scale")
        }
        tensors = {name: t for name, t in self._quantized.items() if name not in kept}
        tensors |= {name: t for name, t in self._original.items() if name in kept}
        smaller.write(self._path, compact(tensors), self._card)


def fewest(most: int, is_enough: Callable[[int], bool]) -> int:
    """Returns the smallest number that ``is_enough``, by few measurements: 0, 1, 2, 4, …, then by halves.

    ``most`` is enough without a measurement.
    """
    too_few, enough = -1, 0
    while enough < most and not is_enough(enough):
        too_few, enough = enough, min(max(1, 2 * enough), most)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _layers(report: QuantizationReport) -> list[dict[str, Any]]:
    """Returns the rows of a report for JSON; an SQNR that is not known or not finite is null."""
    rows = [row._asdict() for row in report]
    return [row | {"sqnr": row["sqnr"] if math.isfinite(row["sqnr"] or 0) else None} for row in rows]
