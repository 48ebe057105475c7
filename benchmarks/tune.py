"""Times other launch configurations of the Triton kernels at CvT-13's shapes, and writes the fastest as JSON.

``python benchmarks/tune.py FILE --seconds 300``. Each candidate differs from the configuration that ships in
one field; last comes the combination of the best values. A candidate must give the results of what ships.
Processes beside this one compile ahead, into Triton's cache. No code is rewritten: that is for the reader.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import timing
import torch

from cvt_kernels import machine
from cvt_kernels.ops.attention.triton import common as attention_triton
from cvt_kernels.ops.conv_projection import triton as conv_projection_triton

SCHEMA = 1
#: Operator → its module, the function that looks configurations up, and its kernels.
OPERATORS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "conv_projection": (
        conv_projection_triton,
        "_config",
        ("fwd", "bwd_input", "bwd_conv", "bwd_sums", "stats"),
    ),
    "attention": (attention_triton, "configuration", ("fwd", "fwd_loop", "bwd", "bwd_dq", "bwd_dkdv")),
}
#: Field → values worth trying; what a kernel cannot take it says itself.
VALUES = {
    "pixels": (8, 16, 32),
    "rows": (1, 2, 4),
    "region_rows": (8, 16, 32),
    "region_cols": (16, 32, 64),
    "registers": (128, 168, 255),
    "block_q": (32, 64, 128),
    "block_kv": (32, 64, 128, 256),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
}


class Job(NamedTuple):
    """One kernel at the shape of one stage."""

    operator: str
    stage: str
    kernel: str


def neighbours(config: Any) -> list[Any]:
    """Configurations that differ from ``config`` in one field."""
    return [
        dataclasses.replace(config, **{field.name: value})
        for field in dataclasses.fields(config)
        for value in VALUES.get(field.name, ())
        if value != getattr(config, field.name)
    ]


def combination(config: Any, times: dict[Any, float]) -> Any:
    """The shipped configuration with, of each field, the value of the fastest that was timed."""
    best = {}
    for field in dataclasses.fields(config):
        seconds = {
            getattr(other, field.name): time
            for other, time in times.items()
            if other == config or getattr(other, field.name) != getattr(config, field.name)
        }
        best[field.name] = min(seconds, key=seconds.__getitem__)
    return dataclasses.replace(config, **best)


def step(operator: str, stage: str) -> tuple[torch.Tensor, ...]:
    """A training step on the inputs of the suite: outputs and gradients."""
    # Not above: other tests have a module of this name too.
    if operator == "attention":
        import test_attention

        *leaves, dout = test_attention.make(stage, timing.dtypes()[0])
        return timing.results(test_attention.contender("triton", leaves[0]), leaves, [dout])
    import test_conv_projection

    setting = test_conv_projection.setting(stage, timing.dtypes()[0])
    x, _, branches = setting
    call = test_conv_projection.contender("triton", *setting[1:], True)
    leaves = test_conv_projection.leaves_of(x, branches)
    return timing.results(call, leaves, test_conv_projection.gradients(*setting))


def work(job: Job, candidate: Any, launch: Any) -> tuple[torch.Tensor, ...]:
    """The step with a candidate for one kernel; what would be launched goes to ``launch``."""
    module, lookup, _ = OPERATORS[job.operator]
    original = getattr(module, lookup)

    def configure(kernel: str, *arguments: Any) -> Any:
        return candidate if kernel == job.kernel else original(kernel, *arguments)

    with mock.patch.object(module, lookup, configure), mock.patch.object(machine, "launch", launch):
        return step(job.operator, job.stage)


def shipped(operator: str, stage: str) -> dict[str, Any]:
    """Kernel → the configuration that a step looks up for it."""
    module, lookup, kernels = OPERATORS[operator]
    original, found = getattr(module, lookup), {}

    def configure(kernel: str, *arguments: Any) -> Any:
        found[kernel] = original(kernel, *arguments)
        return found[kernel]

    with mock.patch.object(module, lookup, configure):
        step(operator, stage)
    return {kernel: found[kernel] for kernel in kernels if kernel in found}


def compile_ahead(job: Job, candidate: Any) -> None:
    """Compiles a candidate into Triton's cache, and launches nothing."""

    def compile_only(kernel: Any, grid: Any, *args: Any, config: Any, **constants: Any) -> None:
        if is_of(job, kernel):
            kernel.warmup(*args, grid=grid, **constants, **config.options)

    work(job, candidate, compile_only)


def is_of(job: Job, kernel: Any) -> bool:
    """Whether a kernel is the one that a job is about."""
    return kernel.__name__ == f"_{job.operator}_{job.kernel}_kernel"


def seconds_of(job: Job, candidate: Any, expected: tuple[torch.Tensor, ...]) -> float:
    """Of the kernel alone.

    Raises:
        ValueError: It is not launched at all, or the results are others.
    """
    launches = []

    def note(kernel: Any, *args: Any, original: Any = machine.launch, **keywords: Any) -> None:
        original(kernel, *args, **keywords)
        if is_of(job, kernel):
            launches.append(functools.partial(original, kernel, *args, **keywords))

    found = work(job, candidate, note)
    if not launches:
        raise ValueError("is not launched with this configuration")
    for ours, theirs in zip(found, expected, strict=True):
        if not (ours - theirs).abs().max() <= 0.02 * theirs.abs().max():  # nor NaN
            raise ValueError("computes something else")
    return sum(timing.fastest(launch, rounds=2 if timing.TINY else 20) for launch in launches)


def tune(job: Job, config: Any, ahead: dict[Any, Future], deadline: float) -> dict[str, Any]:
    """The entry of one kernel and shape; what time did not suffice for is missing from it."""
    expected = step(job.operator, job.stage)
    times: dict[Any, float] = {}
    errors: dict[Any, str] = {}

    def attempt(candidate: Any) -> None:
        if candidate in times or candidate in errors or time.monotonic() > deadline:
            return
        if candidate in ahead:  # its errors turn up again below
            wait([ahead[candidate]], timeout=max(deadline - time.monotonic(), 0))
        try:
            times[candidate] = seconds_of(job, candidate, expected)
        except Exception as error:  # whatever Triton raises is a fact about the candidate
            errors[candidate] = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    for candidate in (config, *neighbours(config)):
        attempt(candidate)
    if config in times:
        attempt(combination(config, times))

    def row(candidate: Any) -> dict[str, Any]:
        return {"config": dataclasses.asdict(candidate), "microseconds": 1e6 * times[candidate]}

    return job._asdict() | {
        "shipped": row(config) if config in times else {"config": dataclasses.asdict(config)},
        "best": row(min(times, key=times.__getitem__)) if times else None,
        "tried": [row(candidate) for candidate in times]
        + [{"config": dataclasses.asdict(c), "error": reason} for c, reason in errors.items()],
    }


def main() -> None:
    """Tunes kernel by kernel; the file holds what is done so far."""
    parser = argparse.ArgumentParser(prog="benchmarks/tune.py", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    timing.TINY = options.tiny
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "device": timing.device_name(),
        "batch": timing.batch(),
        "dtype": timing.short(timing.dtypes()[0]),
        "kernels": [],
    }
    stages = list(reversed(timing.stages()))  # the last has most of the blocks
    if timing.TINY:
        stages = stages[:1]
    configs = {
        Job(operator, stage, kernel): config
        for stage in stages
        for operator in OPERATORS
        for kernel, config in shipped(operator, stage).items()
    }
    with ahead_of_time(configs) as futures:
        for job, config in configs.items():
            if time.monotonic() > deadline:
                break
            entry = tune(job, config, futures.get(job, {}), deadline)
            report["kernels"].append(entry)
            options.path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(line(entry), flush=True)


@contextlib.contextmanager
def ahead_of_time(configs: dict[Job, Any]) -> Iterator[dict[Job, dict[Any, Future]]]:
    """Compiles all neighbours meanwhile, if this machine has a GPU to compile for and processors to spare."""
    workers = min(8, (os.cpu_count() or 1) - 1)
    if not timing.CUDA or workers < 1:
        yield {}
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context)
    try:
        yield {
            job: {other: pool.submit(compile_ahead, job, other) for other in neighbours(config)}
            for job, config in configs.items()
        }
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def line(entry: dict[str, Any]) -> str:
    """For whoever watches."""
    name = f"{entry['operator']} {entry['kernel']}, {entry['stage']}"
    if entry["best"] is None or "microseconds" not in entry["shipped"]:
        return f"{name}: nothing was timed"
    before, best = entry["shipped"]["microseconds"], entry["best"]["microseconds"]
    return f"{name}: {before:.1f} µs as shipped, {best:.1f} µs with {entry['best']['config']}"


if __name__ == "__main__":
    main()
