"""``cvt tune``: autotuning of a model's kernels on this machine, ahead of their first use."""

from __future__ import annotations

import argparse
import math
import time

from cvt.config import DTYPES, PRESETS, default_image_size
from cvt.files import check_writable

from ..common import (
    add_device_argument,
    batch_size,
    image_size,
    integer,
    naming_options,
    print_lines,
    resolve_device,
    token_keep,
)
from ..paths import STDOUT, add_json_argument, reporting
from ..process import temporary_files_together
from ..pyramids import NAMES, PYRAMIDS

_DAY = 24 * 60 * 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.description = (
        "Autotunes a model's kernels ahead of time. Every kernel is checked against float64 and "
        "timed against PyTorch's own operators, in a separate process, so that a kernel that hangs or "
        "crashes does no harm. The fastest correct backend of each call is saved in the cache, "
        "~/.cache/cvt_kernels/entries/ (or below XDG_CACHE_HOME), where the backend auto finds it. Triton "
        "kernels are compiled into Triton's cache on the way. Exit codes: 0: everything is tuned; 1: a "
        "kernel of this project failed its check, or a call could not be tuned; 2: tuning could not start."
    )
    parser.add_argument(
        "--model",
        choices=(*PRESETS, *PYRAMIDS),
        metavar="NAME",
        default="cvt_13",
        help=f"{NAMES} (default: cvt_13); all but CvT need the extra bench",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=tuple(DTYPES),
        metavar="DTYPE",
        help=f"{', '.join(DTYPES)} (default: float32 and bfloat16)",
    )
    parser.add_argument(
        "--batch-size",
        nargs="+",
        type=batch_size,
        help="one or more batch sizes to tune for (default: 1 and 8; on a GPU 1 and 256)",
    )
    parser.add_argument(
        "--image-size",
        type=image_size,
        help="side of the input images in pixels (default: 224; cvt_w24 384, glpn 480, segformer 512)",
    )
    parser.add_argument(
        "--train",
        action="store_true",
        help="also tune the training step; 16-bit dtypes then mean autocast",
    )
    parser.add_argument(
        "--quantized",
        action="store_true",
        help="also tune the 8-bit kernels of a model written by cvt quantize",
    )
    parser.add_argument(
        "--token-keep",
        type=token_keep,
        default=1.0,
        metavar="KEEP",
        help="tune for token pruning in the last stage: fraction to keep, or entropy; comma-separated for "
        "one value per block (default: keep all)",
    )
    parser.add_argument(
        "--seconds",
        type=integer(1, _DAY),
        default=60,
        help="time limit for each kernel; one that takes longer counts as hanging (default: 60)",
    )
    parser.add_argument(
        "--time-limit",
        type=integer(1, _DAY),
        metavar="SECONDS",
        help="tune no more calls after this time; those that have an entry come last (default: no limit)",
    )
    add_json_argument(parser, "every result as JSON")
    add_device_argument(parser)
    parser.set_defaults(run=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    """Tunes and prints a table; returns 1 if a kernel failed or a cache key got no entry, else 0."""
    until = time.monotonic() + (arguments.time_limit or math.inf)
    device = resolve_device(arguments.device)
    if arguments.json not in (None, STDOUT):
        check_writable("--json", arguments.json, directory=False)  # fails now rather than after minutes
    from tqdm import tqdm

    from cvt_kernels import autotune, backends, machine

    from . import report
    from .cache_keys import Workload, collect
    from .tuning import Result, compile_ahead, tune_all
    from .worker import Worker

    backends.requested_backends()  # a wrong CVT_KERNELS_BACKEND too fails now
    is_gpu = device.type == "cuda"
    if arguments.model in PYRAMIDS:
        size = PYRAMIDS[arguments.model].image_size
        if arguments.token_keep != 1.0:
            raise ValueError(f"--token-keep: got it with {arguments.model}, expected a CvT")
    else:
        size = default_image_size(arguments.model)
    workload = Workload(
        model=arguments.model,
        image_size=arguments.image_size or size,
        batch_sizes=arguments.batch_size or ([1, 256] if is_gpu else [1, 8]),
        dtypes=arguments.dtype or (["bfloat16", "float32"] if is_gpu else ["float32", "bfloat16"]),
        train=arguments.train,
        quantized=arguments.quantized,
        token_keep=arguments.token_keep,
    )
    with naming_options("image_size", "token_keep"):
        cache_keys = collect(workload, device)
    cache = autotune.cache_for(device)
    if arguments.time_limit is not None:
        cache_keys.sort(key=lambda cache_key: cache.get(cache_key.text) is not None)
    if is_gpu and not machine.INTERPRETING:
        compile_ahead(cache_keys, device, until)
    with (
        temporary_files_together(),
        Worker(device, arguments.seconds) as worker,
        tqdm(cache_keys, desc="tune", unit="call", leave=False, disable=None) as progress,
    ):
        results: list[Result] = []
        try:
            results.extend(tune_all(progress, worker, cache, until))
        finally:  # what is known when someone interrupts it is worth keeping too
            with reporting(arguments.json, indent=1) as report_json:
                report_json(report.as_json(results, workload, cache))
    print_lines(arguments, [*report.table(results), "", *report.summary(results, cache)])
    return int(not all(result.is_good for result in results))
