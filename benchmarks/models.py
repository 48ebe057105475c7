"""Times Hugging Face's model in one way: a forward, or with ``--train`` a step with its optimizer.

``python -m benchmarks.models FILE --way compile --batch-size 256 1``. A row has the seconds of the first
call, milliseconds by events and by the clock, MiB, and the relative error of the first image's logits
against float64; in training the first losses.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cvt.config import DTYPES
from cvt_kernels.autotune import clock

from . import lab


def main(argv: list[str] | None = None) -> int:
    """Measures all batch sizes; one that fails costs no other. Returns 1 if one did."""
    parser = lab.parser("models", __doc__)
    parser.add_argument("--seconds", type=float, default=0.8, help="of timing, for each clock (default: 0.8)")
    options = parser.parse_args(argv)
    told = {name: value for name, value in vars(options).items() if name not in ("path", "batch_size")}
    report = lab.Report(options.path, told)
    dtype = torch.float32 if options.train else DTYPES[options.dtype]
    model, size = lab.hugging_face(options, dtype)
    run: Any = None
    failed = False
    for batch in options.batch_size:
        row: dict[str, Any] = {"way": options.way, "train": options.train, "batch": batch}
        try:
            if run is None or options.way.endswith("compile"):  # whose mode depends on the size
                run = None
                gc.collect()
                torch.compiler.reset()
                run = lab.WAYS[options.way](copy.deepcopy(model), batch)
            with lab.settings(options), torch.inference_mode(not options.train):
                row |= measured(options, run, model, lab.images(batch, size, dtype))
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:2000]
            failed = True
        report.add(row)
        print(row, flush=True)
    return int(failed)


def measured(options: argparse.Namespace, run: Any, model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Returns the figures of a row; ``model`` is what ``run`` is made of."""
    facts: dict[str, Any] = {}
    call: Callable[[], Tensor] = lab.forward(run, images)
    if options.train:
        call = lab.training_step(run, run, images, DTYPES[options.dtype])
    start = clock.now(lab.DEVICE)
    first = call()
    facts["first_seconds"] = round(clock.now(lab.DEVICE) - start, 2)
    if options.train:
        facts["losses"] = [round(float(loss), 4) for loss in (first, *(call() for _ in range(3)))]
    else:
        facts["error"] = error_of(first[:1], model, images[:1])
        for _ in range(3):
            call()
    if lab.DEVICE == "cuda":
        torch.cuda.empty_cache()
        facts["peak_mib"] = round(clock.peak_bytes(call, lab.DEVICE) / 2**20)
        facts["reserved_mib"] = round(torch.cuda.memory_reserved() / 2**20)
    return facts | lab.timed(call, options.seconds)


def error_of(logits: Tensor, model: nn.Module, images: Tensor) -> float:
    """Returns the error of logits against float64, of the same rounded weights, relative to their norm."""
    truth = lab.forward(copy.deepcopy(model).double(), images.double())()
    return ((logits.double() - truth).norm() / truth.norm()).item()


if __name__ == "__main__":
    sys.exit(main())
