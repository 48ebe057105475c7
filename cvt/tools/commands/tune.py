"""``cvt tune``: checks and times a model's kernels on this machine, and remembers the fastest."""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import cvt_kernels as ck
from cvt.config import DTYPES, PRESETS
from cvt.factory import create_model
from cvt_kernels import backends
from cvt_kernels.tuning import choices, run
from cvt_kernels.tuning.calls import OperatorCall
from cvt_kernels.tuning.key import machine_key
from cvt_kernels.tuning.run import Result

from .common import add, batch_size, integer, option, print_result, resolve_device
from .paths import add_json_argument, reporting
from .process import temporary_files_together
from .pyramids import NAMES, PYRAMIDS, SIZES, build_pyramid, image_size_of

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
    text = f"{NAMES} (default: cvt_13); all but CvT need the extra bench"
    names = (*PRESETS, *PYRAMIDS)
    option(parser, "--model", text, choices=names, metavar="NAME", default="cvt_13")
    text = f"{', '.join(DTYPES)} (default: float32 and bfloat16)"
    option(parser, "--dtype", text, nargs="+", choices=tuple(DTYPES), metavar="DTYPE")
    text = "one or more batch sizes to tune for (default: 1 and 8; on a GPU 1 and 256)"
    option(parser, "--batch-size", text, nargs="+", type=batch_size)
    add(parser, "--image-size", help=SIZES)
    text = "also tune the training step; 16-bit dtypes then mean autocast"
    option(parser, "--train", text, action="store_true")
    text = "time limit for each kernel; one that takes longer counts as hanging"
    option(parser, "--seconds", text, type=integer(1, _DAY), default=60)
    add_json_argument(parser, "every result as JSON")
    add(parser, "--device")
    parser.set_defaults(run=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    """Tunes and prints; returns 1 if a kernel failed or a call could not be tuned, else 0."""
    device = resolve_device(arguments.device)
    backends.requested_backends()  # a wrong CVT_KERNELS_BACKEND too fails now
    calls = list(_calls(arguments, device).values())
    results: list[Result] = []
    start = time.monotonic()
    with temporary_files_together():
        try:
            run.tune_all(calls, arguments.seconds, results)
        finally:  # what is known when someone interrupts it is worth keeping too
            with reporting(arguments.json, indent=1) as report_json:
                report_json(_as_json(results, arguments, device))
    print_result(arguments, _lines(results, device, time.monotonic() - start))
    return int(not all(result.is_good for result in results))


def _calls(arguments: argparse.Namespace, device: torch.device) -> dict[str, OperatorCall]:
    """Returns the calls of a model's steps by cache key: served and live, and what else was asked for."""
    is_gpu = device.type == "cuda"
    sizes = arguments.batch_size or ([1, 256] if is_gpu else [1, 8])
    dtypes = arguments.dtype or (["bfloat16", "float32"] if is_gpu else ["float32", "bfloat16"])
    side = arguments.image_size or image_size_of(arguments.model)
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
                    made = run.calls_of(model, images.to(device, weights))
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
    if arguments.model in PYRAMIDS:
        built = place(build_pyramid(arguments.model, None, side))
        yield ck.accelerate(copy.deepcopy(built), freeze=False)
        if not train:
            yield ck.accelerate(built)
        return
    for activation in ("quick_gelu", "gelu"):  # Microsoft's, and Hugging Face's
        made = create_model(arguments.model, activation=activation)
        yield place(copy.deepcopy(made))
        if not train:
            yield ck.accelerate(place(copy.deepcopy(made)), freeze=True)


# The report -----------------------------------------------------------------------------------------------


def _lines(results: Sequence[Result], device: torch.device, seconds: float) -> Iterator[str]:
    """Yields a line for each call, what each backend took or its flaw, and a summary with all flaws."""
    for each in results:
        measured = [f"{name} {_figure(one)}" for name, one in each.measurements.items()]
        yield f"{each.cache_key}: {each.chosen or 'not tuned'} ({', '.join(measured)})"
    yield ""
    for each in results:
        yield from (f"{name}, {each.cache_key}: {flaw}" for name, flaw in each.flaws.items())
    ours = ", ".join(backends.OURS)
    if any(name in backends.OURS for each in results for name in each.flaws):
        yield f"No kernel with a flaw is used. Please report the lines of {ours} and of `cvt doctor`."
    yield from (
        f"not tuned, {each.cache_key}: {each.why_not_tuned}" for each in results if each.why_not_tuned
    )
    chosen = [each.chosen for each in results if each.chosen is not None]
    counts = ", ".join(f"{name} {chosen.count(name)}" for name in backends.BACKENDS if name in chosen)
    tuned = sum(each.why_not_tuned is None for each in results)
    yield f"{len(results)} calls, {tuned} tuned in {seconds:.0f} s; chosen: {counts or 'nothing'}"
    yield f"remembered in {choices.path(device)}"
    if given := choices.given_files():
        yield f"CVT_KERNELS_TUNED is set: the choices in {', '.join(map(str, given))} go before them"
    if (requested := backends.requested_backends()) != ("auto",):
        yield f"CVT_KERNELS_BACKEND is {','.join(requested)}: choices serve under auto only"


def _figure(measurement: Any) -> str:
    if measurement.flaw is not None:
        return str(measurement.flaw.partition(":")[0])
    return "right" if measurement.seconds is None else f"{1e6 * measurement.seconds:.0f} µs"


def _as_json(
    results: Sequence[Result], arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Returns the contents of the JSON file, with every measurement."""
    asked = ("model", "image_size", "batch_size", "dtype", "train")
    workload = {name: getattr(arguments, name) for name in asked}
    calls = [
        {
            "cache_key": each.cache_key,
            "chosen": each.chosen,
            "why_not_tuned": each.why_not_tuned,
            "measurements": {name: one._asdict() for name, one in each.measurements.items()},
        }
        for each in results
    ]
    about = {"schema": SCHEMA, "version": VERSION, "cvt_kernels": ck.__version__}
    places = {"machine": machine_key(device), "remembered_in": str(choices.path(device))}
    return {**about, **places, "workload": workload, "calls": calls}
