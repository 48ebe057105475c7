"""``cvt bench``: accuracy, speed and memory of a model next to its peers, on this machine."""

from __future__ import annotations

import argparse

from cvt.config import DTYPES
from cvt.extras import require
from cvt.files import replacing

from ..common import add, batch_size, option, positive_int, print_result, resolve_device
from ..paths import InputPath, OutputPath, add_json_argument, reporting
from ..pyramids import NAMES, SIZES
from .contenders import CONTENDERS


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    text = (
        "weights to load: for a CvT the paper's or cvt train's; for another --model a Hugging Face directory "
        "or owner/name on the Hub (default: random weights)"
    )
    add(bench, "--checkpoint", required=False, help=text)
    text = f"{NAMES} (default: detected from the checkpoint, or cvt_13)"
    option(bench, "--model", text, metavar="NAME")
    text = "photos to run on (default: scikit-learn's two sample images)"
    option(bench, "--images", text, type=InputPath, nargs="+", metavar="PHOTO")
    add(bench, "--image-size", help=SIZES)
    text = "one or more batch sizes to measure (default: 8)"
    option(bench, "--batch-size", text, type=batch_size, nargs="+", default=[8])
    option(bench, "--rounds", "timed steps per model", type=positive_int, default=10)
    option(bench, "--dtype", "of weights and images", choices=tuple(DTYPES), default="float32")
    text = "measure a training step instead of a forward pass"
    option(bench, "--train", text, action="store_true")
    text = (
        f"contenders, comma-separated: {', '.join(CONTENDERS)} (always measured: hf, cvt, accelerate, and in "
        "evaluation cvt-frozen and accelerate-frozen or, on a GPU, cvt-graphed and accelerate-graphed)"
    )
    names = {"type": lambda names: names.split(","), "default": ["hf"], "metavar": "NAMES"}
    option(bench, "--peers", text, **names)
    option(bench, "--summary", "ours beside Hugging Face's alone, in few lines", action="store_true")
    add_json_argument(bench, "the results")
    option(
        bench, "--plot", "draw the images per second of each contender", type=OutputPath, metavar="FILE.png"
    )
    add(bench, "--device")
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> None:
    from . import results  # needs the bench extra

    if arguments.plot is not None:
        require("matplotlib.figure", "bench")  # where it is missing, this fails now
    names = ("checkpoint", "model", "images", "image_size", "rounds", "dtype", "train", "peers", "summary")
    settings = {name: getattr(arguments, name) for name in names}
    device = resolve_device(arguments.device)
    measured = results.run(batch_sizes=arguments.batch_size, device=device, **settings)
    with reporting(arguments.json, indent=1) as report:
        report(measured)
    print_result(arguments, [results.summary(measured) if arguments.summary else results.text(measured)])
    if arguments.plot is not None:
        with replacing(arguments.plot) as file:
            results.throughput(measured).savefig(file, format="png", dpi=150)
