"""``cvt bench``: accuracy, speed and memory of a model next to its peers, on this machine."""

from __future__ import annotations

import argparse

from cvt.config import DTYPES
from cvt.files import check_writable, replacing
from cvt.huggingface import CONFIGS, WEIGHTS

from ..common import (
    add_device_argument,
    batch_size,
    image_size,
    positive_int,
    print_lines,
    resolve_device,
)
from ..paths import STDOUT, add_json_argument, input_path, output_path, reporting
from ..pyramids import NAMES


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
    bench.add_argument(
        "--image-size",
        type=image_size,
        help="side of the input images in pixels (default: 224; cvt_w24 384, glpn 480, segformer 512)",
    )
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
        "--save-weights", type=output_path, metavar="DIR", help="save the weights as a Hugging Face directory"
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
    add_device_argument(bench)
    bench.set_defaults(run=_bench, written=lambda _: {"save_weights": [WEIGHTS[0], *CONFIGS]})


def _bench(arguments: argparse.Namespace) -> None:
    from . import plots, results  # need the bench extra

    # What would fail at the end fails before the long run.
    for option in ("save_weights", "json", "plot"):
        if (path := getattr(arguments, option)) not in (None, STDOUT):
            check_writable(f"--{option.replace('_', '-')}", path, directory=option == "save_weights")
    if arguments.plot is not None:
        plots.new_figure()
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
        save_weights=arguments.save_weights,
        summary=arguments.summary,
    )
    with reporting(arguments.json, indent=1) as report:
        report(measured)
    print_lines(arguments, [results.summary(measured) if arguments.summary else results.text(measured)])
    if arguments.plot is not None:
        with replacing(arguments.plot) as file:
            file.write_bytes(plots.png(plots.throughput(measured)))
        print_lines(arguments, ["", f"plot: {arguments.plot}"])
