"""``cvt tune``: checks and times a model's kernels on this machine, and remembers the fastest."""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cvt.config import DTYPES, PRESETS, default_image_size
from cvt.factory import create_model

from .common import add, batch_size, integer, print_result, resolve_device, token_keep
from .paths import add_json_argument, reporting
from .process import temporary_files_together
from .pyramids import NAMES, PYRAMIDS, SIZES, build_pyramid

if TYPE_CHECKING:
    from cvt_kernels.tuning.calls import OperatorCall
    from cvt_kernels.tuning.run import Result

_DAY = 24 * 60 * 60
#: Written into the JSON file. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "cvt tune", 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.description = (
        "Checks every backend for the operators of a model against float64, and times those that pass, in a "
        "process of its own, so that a kernel that hangs or crashes does no harm. The fastest ones are "
        "written to ~/.cache/cvt_kernels/choices/ (or below XDG_CACHE_HOME), and serve from then on. Without "
        "it, the table of this release decides. Exit codes: 0: everything is tuned; 1: a kernel of this "
        "project is wrong, fails, hangs or crashes, or a call could not be tuned; 2: tuning could not start."
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
    add(parser, "--image-size", help=SIZES)
    parser.add_argument(
        "--train",
        action="store_true",
        help="also tune the training step; 16-bit dtypes then mean autocast",
    )
    parser.add_argument("--quantized", action="store_true", help="also tune a CvT of 8-bit integers")
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
    add_json_argument(parser, "every result as JSON")
    add(parser, "--device")
    parser.set_defaults(run=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    """Tunes and prints a table; returns 1 if a kernel failed or a call could not be tuned, else 0."""
    device = resolve_device(arguments.device)
    of_cvt = {"--token-keep": arguments.token_keep != 1.0, "--quantized": arguments.quantized}
    for option, is_given in of_cvt.items():
        if is_given and arguments.model in PYRAMIDS:
            raise ValueError(f"{option}: got it with {arguments.model}, expected a CvT")
    from tqdm import tqdm

    from cvt_kernels import backends
    from cvt_kernels.tuning.run import compile_kernels, tune_all
    from cvt_kernels.tuning.worker import Worker

    backends.requested_backends()  # a wrong CVT_KERNELS_BACKEND too fails now
    calls = list(_calls(arguments, device).values())
    results: list[Result] = []
    start = time.monotonic()
    with temporary_files_together(), Worker(device, arguments.seconds) as worker:
        compile_kernels(calls, worker)
        with tqdm(calls, desc="tune", unit="call", leave=False, disable=None) as bar:
            try:
                tune_all(bar, worker, results)
            finally:  # what is known when someone interrupts it is worth keeping too
                with reporting(arguments.json, indent=1) as report_json:
                    report_json(_as_json(results, arguments, device))
    print_result(arguments, [*_table(results), "", *_summary(results, device, time.monotonic() - start)])
    return int(not all(result.is_good for result in results))


def _calls(arguments: argparse.Namespace, device: torch.device) -> dict[str, OperatorCall]:
    """Returns the calls of a model's steps by cache key: served and live, and what else was asked for."""
    from cvt_kernels.tuning.run import calls_of

    is_gpu = device.type == "cuda"
    sizes = arguments.batch_size or ([1, 256] if is_gpu else [1, 8])
    dtypes = arguments.dtype or (["bfloat16", "float32"] if is_gpu else ["float32", "bfloat16"])
    is_cvt = arguments.model in PRESETS
    side = arguments.image_size or (
        default_image_size(arguments.model) if is_cvt else PYRAMIDS[arguments.model].image_size
    )
    calls: dict[str, OperatorCall] = {}
    modes = (False, True) if arguments.train else (False,)
    for train, dtype, batch in itertools.product(modes, dtypes, sizes):
        weights = torch.float32 if train else DTYPES[dtype]
        images = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))

        def place(model: nn.Module, dtype: torch.dtype = weights, train: bool = train) -> nn.Module:
            return model.to(device, dtype).train(train)

        for model in _models(arguments, side, place, train=train):
            try:
                with torch.autocast(device.type, DTYPES[dtype], enabled=train and dtype != "float32"):
                    made = calls_of(model, images.to(device, weights))
            except (RuntimeError, ValueError) as error:
                reason = (str(error).splitlines() or ["no reason given"])[0]
                raise ValueError(
                    f"--image-size: {arguments.model} does not run on {side} pixels: {reason}"
                ) from error
            calls |= {call.cache_key: call for call in made}
    return calls


def _models(
    arguments: argparse.Namespace, side: int, place: Callable[[nn.Module], Any], *, train: bool
) -> Iterator[nn.Module]:
    """Yields the model as it is used: as it is where it is ours, accelerated, and as it serves."""
    import cvt_kernels as ck

    if arguments.model in PYRAMIDS:
        built = place(build_pyramid(arguments.model, None, side))
        yield ck.accelerate(copy.deepcopy(built), freeze=False)
        if not train:
            yield ck.accelerate(built)
        return
    for activation in ("quick_gelu", "gelu"):  # Microsoft's, and Hugging Face's
        made = create_model(arguments.model, activation=activation, token_keep=arguments.token_keep)
        yield place(copy.deepcopy(made))
        if not train:
            yield ck.accelerate(place(copy.deepcopy(made)), freeze=True)
        if arguments.quantized and not train:
            quantized = made.eval()
            ck.quantize(quantized, [torch.randn(2, 3, side, side)])
            yield place(quantized)


# The report -----------------------------------------------------------------------------------------------


def _table(results: Sequence[Result]) -> list[str]:
    """Returns the lines of a table: a block for each operator, direction and dtype, a line per cache key.

    A backend's column has microseconds, or its flaw in a word; the error is the largest of our kernels'.
    """
    blocks: dict[str, list[tuple[str, Result]]] = {}
    for result in results:
        operator, direction, dtype, case = result.cache_key.split(", ", 3)
        kind = f"{operator}, {direction}, {dtype.replace(' under autocast to ', ' → ')}"
        blocks.setdefault(kind, []).append((case.split(", kernel/")[0], result))
    lines: list[str] = []
    for kind, block in blocks.items():
        lines += [""] * bool(lines) + [f"{kind} (times in µs)", *_rows(block)]
    return lines


def _rows(block: Sequence[tuple[str, Result]]) -> list[str]:
    """Returns the lines of a block, with the columns of the backends that were tried for it."""
    from cvt_kernels import backends
    from cvt_kernels.messages import aligned

    tried = {name for _, result in block for name in _measurements(result)}
    names = [name for name in backends.BACKENDS if name in tried]
    rows = [["case", *names, "error / allowed", "chosen"]]
    for case, result in block:
        measured = _measurements(result)
        ours = [measured[name] for name in backends.OURS if name in measured]
        errors = [each.error / each.allowed for each in ours if each.error is not None and each.allowed]
        chosen = result.entry.chosen if result.entry else "not tuned"
        cells = [_cell(measured.get(name)) for name in names]
        rows.append([case, *cells, f"{max(errors):.2g}" if errors else "–", chosen])
    return aligned(rows, right=range(1, 2 + len(names)))


def _measurements(result: Result) -> dict[str, Any]:
    return result.entry.measurements if result.entry is not None else {}


def _cell(measurement: Any) -> str:
    if measurement is None:
        return "–"
    if measurement.flaw is not None:
        return measurement.flaw.partition(":")[0]
    return "right" if measurement.seconds is None else f"{1e6 * measurement.seconds:.0f}"


def _summary(results: Sequence[Result], device: torch.device, seconds: float) -> list[str]:
    """Returns the lines of the summary: every flaw, the number of calls, and where the choices are."""
    from cvt_kernels import backends
    from cvt_kernels.tuning import choices

    lines = [f"{name}, {each.cache_key}: {flaw}" for each in results for name, flaw in each.flaws.items()]
    if any(name in backends.OURS for each in results for name in each.flaws):
        lines.append(
            f"No kernel with a flaw is used. Please report the lines of {', '.join(backends.OURS)} with the "
            "output of `cvt doctor`."
        )
    lines += [f"not tuned, {each.cache_key}: {each.why_not_tuned}" for each in results if not each.entry]
    chosen = [each.entry.chosen for each in results if each.entry is not None]
    counts = ", ".join(f"{name} {chosen.count(name)}" for name in backends.BACKENDS if name in chosen)
    lines.append(
        f"{len(results)} calls, {len(chosen)} tuned in {seconds:.0f} s; chosen: {counts or 'nothing'}"
    )
    lines.append(f"remembered in {choices.path(device)}")
    if given := choices.given_files():
        lines.append(f"CVT_KERNELS_TUNED is set: the choices in {', '.join(map(str, given))} go before them")
    if (requested := backends.requested_backends()) != ("auto",):
        lines.append(f"CVT_KERNELS_BACKEND is {','.join(requested)}: choices serve under auto only")
    return lines


def _as_json(
    results: Sequence[Result], arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Returns the contents of the JSON file, with every measurement."""
    from cvt_kernels import __version__
    from cvt_kernels.tuning import choices
    from cvt_kernels.tuning.key import machine_key

    asked = ("model", "image_size", "batch_size", "dtype", "train", "quantized", "token_keep")
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "cvt_kernels": __version__,
        "machine": machine_key(device),
        "workload": {name: getattr(arguments, name) for name in asked},
        "remembered_in": str(choices.path(device)),
        "calls": [
            {
                "cache_key": each.cache_key,
                "chosen": each.entry.chosen if each.entry else None,
                "why_not_tuned": each.why_not_tuned,
                "measurements": {name: one._asdict() for name, one in _measurements(each).items()},
            }
            for each in results
        ],
    }
