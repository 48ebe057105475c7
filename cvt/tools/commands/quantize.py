"""``cvt quantize``: 8-bit quantization of a model's linear layers, with the loss of accuracy."""

from __future__ import annotations

import argparse
import bisect
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

import cvt_kernels as ck
from cvt.factory import create_model
from cvt.model import CvT
from cvt.quantized import compact
from cvt_kernels.quantization import QuantizationReport

from ..datasets import Batches
from ..evaluation import Evaluation
from . import smaller
from .common import load_model, open_calibration, option, positive_int, print_result
from .paths import staged
from .smaller import evaluated

_ROUNDING = 1e-9  # of differences of fractions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    smaller.add_shared_arguments(parser, "accuracy, size and the error of every layer", calibrate=True)
    text = "layers to keep in floating point, such as 'stage2.blocks.9.*'"
    option(parser, "--keep-float", text, nargs="+", action="extend", default=[], metavar="NAME")
    text = (
        "largest accepted drop of top-1, in percentage points; the most sensitive layers are kept in "
        "floating point until it holds"
    )
    option(parser, "--max-drop", text, type=float, default=0.5)
    text = "also quantize all convolutional embeddings but the first"
    option(parser, "--embeddings", text, action="store_true")
    option(parser, "--images", "most images to calibrate with", type=positive_int, default=256)
    parser.set_defaults(run=_quantize)


def _quantize(arguments: argparse.Namespace) -> None:
    smaller.check_output(arguments.output)
    if not 0 <= arguments.max_drop <= 100:
        raise ValueError(f"--max-drop: got {arguments.max_drop:g}, expected 0 to 100")
    loaded = load_model(arguments)
    if loaded.checkpoint.quantized:
        raise ValueError(f"--checkpoint: {loaded.checkpoint.path} is quantized already")
    classifier = loaded.classifier
    images, answers = open_calibration(arguments, loaded, arguments.images)
    labels = loaded.labels(arguments.labels)
    card = smaller.card_of(loaded, classifier.config, labels, images.dataset.classes)
    with staged(arguments) as (file, report_json):
        model = copy.deepcopy(classifier)
        kinds: dict[str, Any] = {"keep_float": arguments.keep_float, "embeddings": arguments.embeddings}
        report = ck.quantize(model, images, **kinds, progress=True)
        unquantized = evaluated(classifier, answers, "before")
        least = unquantized.top1 - arguments.max_drop / 100

        def write(tensors: dict[str, Tensor]) -> Path:
            smaller.write(file, compact(tensors), card)
            return file

        report, quantized = _fewest(classifier, model, report, least, write, answers)
        before = smaller.accuracy(unquantized) | {"bytes": smaller.size_of(classifier)}
        after = smaller.accuracy(quantized) | {"bytes": file.stat().st_size}
        given = smaller.settings(arguments, loaded)
        given |= {"calibration_images": len(images.dataset), "held_out_images": quantized.images}
        rows = [row._asdict() for row in report]  # an SQNR that is not known or not finite is null
        layers = [row | {"sqnr": row["sqnr"] if math.isfinite(row["sqnr"] or 0) else None} for row in rows]
        report_json(given | {"before": before, "after": after, "layers": layers})
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
    print_result(arguments, lines)


def _fewest(
    originals: CvT,
    quantized: CvT,
    report: QuantizationReport,
    least: float,
    write: Callable[[dict[str, Tensor]], Path],
    batches: Batches,
) -> tuple[QuantizationReport, Evaluation]:
    """Keeps the fewest of the worst layers in floating point with which top-1 is at least ``least``.

    ``originals`` is the model in floating point, ``quantized`` has all layers quantized that can be, as the
    ``report`` says. Every measurement writes the weights into the file that ``write`` returns.
    """
    rows = [*report.worst(), *(row for row in report if row.sqnr is None)]
    order = [row.path for row in rows if row.weight != "float"]
    evaluations: dict[int, Evaluation] = {}

    def written(count: int) -> Path:
        kept = {f"{path}.{name}" for path in order[:count] for name in ("weight", "qweight", "weight_scale")}
        tensors = {name: t for name, t in quantized.state_dict().items() if name not in kept}
        return write(tensors | {name: t for name, t in originals.state_dict().items() if name in kept})

    def is_enough(count: int) -> bool:
        model = create_model(checkpoint=written(count)).to(next(originals.parameters()).device).eval()
        title = f"{count} layers in floating point" if count else "after"
        evaluations[count] = evaluated(model, batches, title)
        return evaluations[count].top1 >= least - _ROUNDING

    # By few measurements: none as a rule, else by halves.
    most = len(order)
    count = 0 if is_enough(0) else bisect.bisect_left(range(most), True, 1, key=is_enough)
    if count == most:
        raise ValueError(
            f"--max-drop: top-1 falls below {least:.2%} even if {order[-1]} is the only layer that is "
            "quantized; nothing is written"
        )
    if count != list(evaluations)[-1]:
        written(count)
    kept, reason = order[:count], "is kept, since it loses more than others, for the sake of top-1"
    rows = [row._replace(weight="float", reason=reason) if row.path in kept else row for row in report]
    return QuantizationReport(rows), evaluations[count]
