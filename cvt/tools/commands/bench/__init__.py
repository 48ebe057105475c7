"""``cvt bench``: accuracy, speed and memory of a model next to its peers, on this machine."""

from __future__ import annotations

import argparse

from cvt.config import DTYPES
from cvt.files import replacing

from ..common import add, batch_size, positive_int, print_result, resolve_device
from ..paths import add_json_argument, input_path, output_path, reporting
from ..pyramids import NAMES, SIZES


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    bench.add_argument(
        "--checkpoint",
        type=input_path,
        help="weights to load: for a CvT the paper's or cvt train's; for another --model a Hugging Face "
        "directory or owner/name on the Hub (default: random weights)",
    )
    bench.add_argument(
        "--model",
        metavar="NAME",
        help=f"{NAMES} (default: detected from the checkpoint, or cvt_13)",
    )
    bench.add_argument(
        "--images",
        type=input_path,
        nargs="+",
        metavar="PHOTO",
        help="photos to run on (default: scikit-learn's two sample images)",
    )
    add(bench, "--image-size", help=SIZES)
    bench.add_argument(
        "--batch-size",
        type=batch_size,
        nargs="+",
        default=[8],
        help="one or more batch sizes to measure (default: 8)",
    )
    bench.add_argument("--rounds", type=positive_int, default=10, help="timed steps per model (default: 10)")
    bench.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="default: float32")
    bench.add_argument(
        "--train", action="store_true", help="measure a training step instead of a forward pass"
    )
    bench.add_argument(
        "--peers",
        type=lambda names: names.split(","),
        default=["hf"],
        metavar="NAMES",
        help="contenders besides hf and those of ours that are always measured, comma-separated: compile, "
        "compile-max, eager, openvino, openvino-int8, onnxruntime, cvt-frozen, accelerate-frozen, "
        "accelerate-int8, cvt-compile, accelerate-compile, accelerate-frozen-compile, cvt-graphed, "
        "accelerate-graphed, accelerate-live-graphed, accelerate-int8-graphed, accelerate-float8-graphed "
        "(always measured: hf, cvt, accelerate, and in evaluation cvt-frozen and accelerate-frozen or, on a "
        "GPU, cvt-graphed and accelerate-graphed)",
    )
    bench.add_argument(
        "--summary",
        action="store_true",
        help="ours beside Hugging Face's alone, in few lines",
    )
    add_json_argument(bench, "the results")
    bench.add_argument(
        "--plot", type=output_path, metavar="FILE.png", help="draw the images per second of each contender"
    )
    add(bench, "--device")
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> None:
    from . import plots, results  # need the bench extra

    if arguments.plot is not None:
        plots.figure_class()  # where Matplotlib is missing, it fails now
    measured = results.run(
        checkpoint=arguments.checkpoint,
        model=arguments.model,
        images=arguments.images,
        image_size=arguments.image_size,
        batch_sizes=arguments.batch_size,
        rounds=arguments.rounds,
        device=resolve_device(arguments.device),
        dtype=arguments.dtype,
        train=arguments.train,
        peers=arguments.peers,
        summary=arguments.summary,
    )
    with reporting(arguments.json, indent=1) as report:
        report(measured)
    print_result(arguments, [results.summary(measured) if arguments.summary else results.text(measured)])
    if arguments.plot is not None:
        with replacing(arguments.plot) as file:
            plots.throughput(measured).savefig(file, format="png", dpi=150)
        print_result(arguments, ["", f"plot: {arguments.plot}"])
