"""``cvt quantize``: 8-bit quantization of a model's linear layers, with the loss of accuracy."""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cvt_kernels as ck
from cvt.card import ModelCard
from cvt.checkpoints import Checkpoint, save_safetensors
from cvt.factory import create_model
from cvt.files import check_writable, replacing
from cvt.model import CvT
from cvt.quantized import compact
from cvt_kernels.quantization import QuantizationReport

from ..evaluation import Evaluation
from .common import (
    add_batch_arguments,
    add_calibrate_argument,
    add_device_argument,
    add_labels_argument,
    add_model_arguments,
    load_model,
    open_calibration,
    positive_int,
    print_result,
    recorded_warnings,
    resolve_device,
    seed,
)
from .paths import add_json_argument, output_path, reporting
from .smaller import SUFFIX, accuracy, card_of, evaluated, settings, size_of, table

if TYPE_CHECKING:
    from ..datasets import Batches

_ROUNDING = 1e-9  # of differences of fractions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_model_arguments(parser)
    add_calibrate_argument(parser, required=True)
    parser.add_argument(
        "--output", type=output_path, required=True, metavar="FILE", help=f"{SUFFIX} file to write"
    )
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
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed for choosing the calibration images (default: 0)"
    )
    add_labels_argument(parser)
    add_batch_arguments(parser)
    add_json_argument(parser, "accuracy, size and the error of every layer")
    add_device_argument(parser)
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
    output = Path(arguments.output)
    if output.suffix != SUFFIX:
        raise ValueError(f"--output: got {arguments.output!r}, expected a name that ends with {SUFFIX}")
    try:
        os.fsencode(os.path.realpath(output)).decode()
    except UnicodeDecodeError as error:  # the file is read again, and safetensors takes no such name
        raise ValueError(f"--output: got {str(output)!r}, expected a name in UTF-8") from error
    check_writable("--output", output, directory=False)
    device = resolve_device(arguments.device)
    loaded = load_model(arguments, device)
    if loaded.checkpoint.quantized:
        raise ValueError(f"--checkpoint: {loaded.checkpoint.path} is quantized already")
    classifier = loaded.classifier
    images, answers = open_calibration(arguments, loaded, arguments.images)
    card = card_of(loaded, classifier.config, loaded.labels(arguments.labels), images.dataset.classes)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(replacing(output))
        report_json = stack.enter_context(reporting(arguments.json))  # fails before --output is replaced
        remarks = stack.enter_context(recorded_warnings())
        model = copy.deepcopy(classifier)
        report = ck.quantize(
            model,
            images,
            keep_float=arguments.keep_float,
            embeddings=arguments.embeddings,
            progress=True,
        )
        before = evaluated(classifier, answers, "before")
        measurements = _Measurements(classifier, model, report, card, file, answers)
        report, after = measurements.within(before.top1 - arguments.max_drop / 100)
        figures = (before, size_of(classifier)), (after, file.stat().st_size)
        given = settings(arguments, loaded, device) | {"calibration_images": len(images.dataset)}
        report_json(given | _as_json(report, *figures))
    heading = (
        f"{output}: {arguments.checkpoint}, calibrated on {len(images.dataset)} images of "
        f"{arguments.calibrate}, measured on {after.images} others"
    )
    embeddings = "the first embedding" if arguments.embeddings else "embeddings"
    rest = (
        f"{embeddings}, depthwise convolutions, norms and the head stay in floating point, "
        "their matrices in float16"
    )
    columns = [accuracy(each) | {"size": f"{size / 1e6:.2f} MB"} for each, size in figures]
    lines = [heading, "", str(report), rest, "", *table(*columns)]
    print_result(arguments, lines, [*loaded.remarks, *dict.fromkeys(remarks)])


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
        unmeasured = [row for row in report if row.sqnr is None]
        rows = [*report.worst(), *unmeasured]
        self._order = [row.path for row in rows if row.weight != "float"]

    def within(self, least: float) -> tuple[QuantizationReport, Evaluation]:
        """Writes the version with the fewest layers in floating point whose top-1 is at least ``least``.

        Raises:
            ValueError: No such version has a quantized layer.
        """
        evaluations: dict[int, Evaluation] = {}

        def is_enough(count: int) -> bool:
            evaluations[count] = self._write_and_evaluate(count)
            return evaluations[count].top1 >= least - _ROUNDING

        count = fewest(len(self._order), is_enough)
        if count == len(self._order):
            raise ValueError(
                f"--max-drop: top-1 falls below {least:.2%} even if {self._order[-1]} is the only layer "
                "that is quantized; nothing is written"
            )
        if count != list(evaluations)[-1]:
            self._write(count)
        return self._report_on(count), evaluations[count]

    def _write_and_evaluate(self, count: int) -> Evaluation:
        self._write(count)
        model = create_model(checkpoint=self._path).to(self._device).eval()
        return evaluated(model, self._batches, f"{count} layers in floating point" if count else "after")

    def _write(self, count: int) -> None:
        kept = {
            f"{path}.{name}" for path in self._order[:count] for name in ("weight", "qweight", "weight_scale")
        }
        tensors = {name: t for name, t in self._quantized.items() if name not in kept}
        tensors |= {name: t for name, t in self._original.items() if name in kept}
        tensors = {name: tensor.cpu() for name, tensor in compact(tensors).items()}
        save_safetensors(Checkpoint(str(self._path), tensors, card=self._card), self._path)

    def _report_on(self, count: int) -> QuantizationReport:
        kept = self._order[:count]
        reason = "is kept, since it loses more than others, for the sake of top-1"
        return QuantizationReport(
            row._replace(weight="float", reason=reason) if row.path in kept else row for row in self._report
        )


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


def _as_json(report: QuantizationReport, *figures: tuple[Evaluation, int]) -> dict[str, Any]:
    """Returns the figures and bytes as numbers; an SQNR that is not known or not finite is null."""
    before, after = (
        {"top1": each.top1, "top5": each.top5, "loss": each.loss, "bytes": size} for each, size in figures
    )
    rows = [row._asdict() for row in report]
    layers = [row | {"sqnr": row["sqnr"] if math.isfinite(row["sqnr"] or 0) else None} for row in rows]
    return {"held_out_images": figures[-1][0].images, "before": before, "after": after, "layers": layers}
