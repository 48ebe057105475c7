"""What the commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

import cvt_kernels as ck
from cvt_kernels import BackendUnavailable


def doctor(arguments: argparse.Namespace) -> None:
    """Prints what is installed."""
    print(ck.doctor())


def add_bench(commands: Any) -> None:
    """Adds ``bench``."""
    bench = commands.add_parser(
        "bench", help="parity, speed and memory on real photographs, side by side with Hugging Face's CvT"
    )
    bench.add_argument("--checkpoint", help="weights of a CvT of the paper; default: random ones")
    bench.add_argument("--model", help="cvt_13, cvt_21 or cvt_w24; default: as the checkpoint, or cvt_13")
    bench.add_argument("--images", nargs="+", metavar="PHOTO", help="default: the two of scikit-learn")
    bench.add_argument("--image-size", type=positive_int, help="pixels (default: 224, for cvt_w24 384)")
    bench.add_argument(
        "--batch-size",
        type=positive_int,
        nargs="+",
        default=[8],
        help="images per step, one or more (default: 8)",
    )
    bench.add_argument("--rounds", type=positive_int, default=10, help="timed steps of each (default: 10)")
    bench.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    bench.add_argument("--train", action="store_true", help="a training step instead of a forward")
    bench.add_argument(
        "--peers",
        type=lambda names: names.split(","),
        default=["hf"],
        metavar="NAMES",
        help="of hf, compile, compile-max, eager, with commas between; hf is always measured (default: hf)",
    )
    bench.add_argument("--save-weights", metavar="DIR", help="keep the weights as a Hugging Face directory")
    bench.add_argument("--json", metavar="FILE", help="keep the results")
    bench.add_argument("--report", metavar="DIR", help="write index.html and its plots")
    bench.add_argument("--against", metavar="OLD.json", help="compare with these results")
    bench.add_argument(
        "--compare", nargs=2, metavar=("OLD.json", "NEW.json"), help="compare two results, measure nothing"
    )
    add_device_argument(bench)
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> None:
    from .bench import report

    if arguments.compare is not None:
        print(report.comparison(*map(report.read, arguments.compare)))
        return
    # What would fail at the end fails before the long run.
    old = None if arguments.against is None else report.read(arguments.against)
    for option in ("save_weights", "json", "report"):
        if (path := getattr(arguments, option)) is not None:
            report.check_writable(f"--{option.replace('_', '-')}", path, directory=option != "json")
    if arguments.report is not None:
        report.check_plots()
    from .bench import measurements  # needs the bench extra

    try:
        results = measurements.run(
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
        )
    except torch.OutOfMemoryError as error:
        raise ValueError(f"--batch-size: {error}") from error
    if arguments.json is not None:
        report.write(results, arguments.json)
    print(report.text(results))
    if arguments.report is not None:
        page, *_ = report.write_report(results, arguments.report)
        print(f"\nreport: {page}")
    if old is not None:
        print(f"\n{report.comparison(old, results)}")


def add_compile(commands: Any) -> None:
    """Adds ``compile``."""
    parser = commands.add_parser(
        "compile", help="every kernel compiled for a GPU that need not be here, and what it takes of it"
    )
    for option, name, kind, text in (
        ("--arch", "archs", str, "sm_80, sm_86, sm_89, sm_90, sm_100, sm_120 (default: sm_90)"),
        ("--model", "models", str, "cvt_13, cvt_21, cvt_w24 (default: cvt_13)"),
        ("--dtype", "dtypes", str, "bfloat16, float16, float32 (default: all)"),
        ("--operator", "operators", str, "attention_with_bias, conv_projection, attention, layer_norm_gelu "
         "(default: the last three)"),
        ("--stage", "only_stages", positive_int, "1, 2, 3 (default: all)"),
        ("--image-size", "image_sizes", positive_int, "default: 224; 384 for cvt_w24"),
        ("--batch-size", "batch_sizes", positive_int, "default: 256"),
    ):  # fmt: skip
        metavar = option.removeprefix("--").upper()
        parser.add_argument(
            option, dest=name, nargs="+", type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text
        )
    parser.add_argument(
        "--jobs", type=positive_int, default=argparse.SUPPRESS, help="processes (default: one per core)"
    )
    parser.add_argument(
        "--cuda",
        action="store_true",
        help="fail where there are no CUDA kernels for a GPU: not in the extension, and no nvcc for csrc",
    )
    parser.add_argument(
        "--json", dest="report", default=argparse.SUPPRESS, metavar="FILE", help="write the report"
    )
    parser.set_defaults(run=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    from .compile import run  # needs Triton

    options = vars(arguments)
    return run(**{name: options[name] for name in options if name not in ("command", "run")})


def run_command(name: str, command: Callable[[], int | None]) -> int:
    """Runs ``command``, which may return an exit code.

    What a user can mend becomes one line on stderr and exit code 2.
    """
    code = None
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, BackendUnavailable, ModuleNotFoundError) as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code or 0


def positive_int(text: str) -> int:
    """Type of an argparse argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive integer")
    return int(text)


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--device``, for :func:`resolve_device`."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: cuda if there is one)")


def resolve_device(name: str | None) -> torch.device:
    """The device of that name, tried out; None chooses.

    Raises:
        ValueError: There is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type == "meta":
        raise ValueError("--device meta: computes nothing")
    return device
