"""``cvt bench``: accuracy, speed and memory of a model next to its peers, on this machine."""

from __future__ import annotations

import argparse

from cvt.config import DTYPES
from cvt.files import check_writable
from cvt.huggingface import CONFIGS, WEIGHTS

from ..common import (
    add_device_argument,
    batch_size,
    image_size,
    positive_int,
    print_lines,
    resolve_device,
)
from ..paths import STDOUT, add_json_argument, input_path, output_path
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
        help="models to compare with, comma-separated: hf, compile, compile-max, eager, openvino, "
        "openvino-int8, onnxruntime, accelerate-int8, cvt-compile, accelerate-compile, "
        "accelerate-frozen-compile; hf is always included (default: hf)",
    )
    bench.add_argument(
        "--save-weights", type=output_path, metavar="DIR", help="save the weights as a Hugging Face directory"
    )
    add_json_argument(bench, "the results")
    bench.add_argument(
        "--report", type=output_path, metavar="DIR", help="write a report, index.html with plots"
    )
    bench.add_argument(
        "--against", type=input_path, metavar="OLD.json", help="compare with earlier results of --json"
    )
    bench.add_argument(
        "--compare",
        nargs=2,
        type=input_path,
        metavar=("OLD.json", "NEW.json"),
        help="compare two earlier results instead of measuring",
    )
    add_device_argument(bench)
    bench.set_defaults(run=_bench, written=_names_written)


def _names_written(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the names of the files in the folders that are written."""
    drawn = [f"operators-{size}" for size in arguments.batch_size]
    pages = ["index.html", *(f"{name}.png" for name in ("throughput", "memory", *drawn))]
    return {"save_weights": [WEIGHTS[0], *CONFIGS], "report": pages}


def _bench(arguments: argparse.Namespace) -> None:
    from . import compare, plots, report, results

    if arguments.compare is not None:
        print_lines(arguments, [compare.comparison(*map(results.read, arguments.compare))])
        return
    # What would fail at the end fails before the long run.
    old = None if arguments.against is None else results.read(arguments.against)
    for option in ("save_weights", "json", "report"):
        if (path := getattr(arguments, option)) not in (None, STDOUT):
            check_writable(f"--{option.replace('_', '-')}", path, directory=option != "json")
    if arguments.report is not None:
        plots.check_plots()
    from . import measurements  # needs the bench extra

    measured = measurements.run(
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
        against=old,
    )
    if arguments.json is not None:
        results.write(measured, arguments.json)
    print_lines(arguments, [results.text(measured)])
    if arguments.report is not None:
        page, *_ = report.write_report(measured, arguments.report)
        print_lines(arguments, ["", f"report: {page}"])
    if old is not None:
        print_lines(arguments, ["", compare.comparison(old, measured)])
