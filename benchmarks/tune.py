"""Times other launch configurations of the Triton kernels at CvT-13's shapes, and writes the fastest as JSON.

``python -m benchmarks.tune FILE --seconds 300``. Each candidate differs from the configuration that ships in
one field; last comes the combination of the best values. A candidate must give the same results.
Processes beside this one compile ahead, into Triton's cache. No code is rewritten.
"""

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any, NamedTuple

import torch

from cvt_kernels import launching
from cvt_kernels.autotune import clock

from . import suites

SCHEMA, VERSION = "benchmarks tune", 1
#: Operator → its kernels that are tuned.
KERNELS = {
    "conv_projection": (
        "sliding_fwd",
        "sliding_bwd_input",
        "sliding_bwd_conv",
        "sliding_bwd_sums",
        "sliding_stats",
    ),
    "attention": ("fwd", "fwd_loop", "bwd", "bwd_dq", "bwd_dkdv"),
}
#: Channels of a head, in all of CvT.
HEAD_DIM = 64
#: Field → values worth trying; a kernel that cannot take one says so itself.
VALUES = {
    "pairs": (1, 2, 4, 8),
    "resident_warps": (8, 12, 16),
    "registers": (128, 168, 255),
    "block_q": (32, 64, 128),
    "block_kv": (32, 64, 128, 256),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
}


class Job(NamedTuple):
    """A kernel at the shape of a stage."""

    operator: str
    stage: str
    kernel: str


def neighbors(config: Any) -> list[Any]:
    """Returns the configurations that differ from ``config`` in one field."""
    return [
        dataclasses.replace(config, **{field.name: value})
        for field in dataclasses.fields(config)
        for value in VALUES.get(field.name, ())
        if value != getattr(config, field.name)
    ]


def combination(config: Any, times: dict[Any, float]) -> Any:
    """Returns the shipped configuration with, of each field, the value of the fastest that was timed."""
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
    """Runs a training step on the inputs of the suite; returns outputs and gradients."""
    # Not above, since the shapes of a suite depend on what main sets.
    if operator == "attention":
        from . import test_attention

        *leaves, dout = test_attention.make(stage, suites.dtypes()[0], suites.batch())
        call = test_attention.contender(suites.implementation(operator, "triton"), leaves[0])
        return suites.results(call, leaves, [dout])
    from . import test_conv_projection

    setting = test_conv_projection.setting(stage, suites.dtypes()[0], suites.batch())
    x, _, branches = setting
    call = test_conv_projection.contender(suites.implementation(operator, "triton"), *setting[1:], True)
    leaves = test_conv_projection.leaves_of(x, branches)
    return suites.results(call, leaves, test_conv_projection.gradients(*setting))


def configuration_module(operator: str) -> Any:
    """Returns the module of an operator that has the configurations of its kernels."""
    return importlib.import_module(f"cvt_kernels.ops.{operator}.triton.common")


def shipped_configuration(operator: str, kernel: str) -> Any:
    """Returns the configuration that ships for a kernel on this machine."""
    capability = launching.chip(torch.empty(0, device=suites.DEVICE).device).capability
    if operator == "attention":
        return configuration_module(operator).configuration(
            kernel, HEAD_DIM, suites.dtypes()[0].itemsize, capability
        )
    return configuration_module(operator).configuration(kernel, capability)


def shipped(operator: str, stage: str) -> dict[str, Any]:
    """Returns the configurations of the kernels that a step launches."""
    launched: list[launching.Launch] = []

    def note(launch: launching.Launch) -> None:
        launched.append(launch)
        launch.start()

    with launching.intercepted_launches(note):
        step(operator, stage)
    return {
        kernel: shipped_configuration(operator, kernel)
        for kernel in KERNELS[operator]
        if any(is_of(Job(operator, stage, kernel), launch) for launch in launched)
    }


def is_of(job: Job, launch: launching.Launch) -> bool:
    """Returns whether a launch is of the kernel that a job is about."""
    return launch.kernel.__name__ == f"_{job.operator}_{job.kernel}_kernel"


def work(job: Job, candidate: Any, take: Callable[[launching.Launch], Any]) -> tuple[torch.Tensor, ...]:
    """Runs the step with a candidate for one kernel; ``take`` gets the launches instead of the GPU."""
    with (
        configuration_module(job.operator).overridden(job.kernel, candidate),
        launching.intercepted_launches(take),
    ):
        return step(job.operator, job.stage)


def compile_ahead(job: Job, candidate: Any) -> None:
    """Compiles a candidate into Triton's cache, and launches nothing."""

    def compile_only(launch: launching.Launch) -> None:
        if is_of(job, launch):
            launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)

    work(job, candidate, compile_only)


def seconds_of(job: Job, candidate: Any, expected: tuple[torch.Tensor, ...]) -> float:
    """Returns the seconds of the kernel alone.

    Raises:
        ValueError: It is not launched at all, or the results are others.
    """
    launches: list[launching.Launch] = []

    def note(launch: launching.Launch) -> None:
        launch.start()
        if is_of(job, launch):
            launches.append(launch)

    outputs = work(job, candidate, note)
    if not launches:
        raise ValueError("is not launched with this configuration")
    for ours, theirs in zip(outputs, expected, strict=True):
        if not (ours - theirs).abs().max() <= 0.02 * theirs.abs().max():  # nor NaN
            raise ValueError("computes something else")
    rounds = 2 if suites.TINY else 20
    return sum(clock.fastest(launch.start, suites.DEVICE, rounds) for launch in launches)


def tune(job: Job, config: Any, ahead: dict[Any, Future], deadline: float) -> dict[str, Any]:
    """Returns the entry of one kernel and shape; what time did not suffice for is missing from it."""
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

    for candidate in (config, *neighbors(config)):
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
    parser = suites.script_parser("tune", __doc__)
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything (default: 500)")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    suites.TINY = options.tiny
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "device": suites.device_name(),
        "batch": suites.batch(),
        "dtype": suites.short(suites.dtypes()[0]),
        "kernels": [],
    }
    stages = list(reversed(suites.stages()))  # the last has most of the blocks
    if suites.TINY:
        stages = stages[:1]
    configs = {
        Job(operator, stage, kernel): config
        for stage in stages
        for operator in KERNELS
        for kernel, config in shipped(operator, stage).items()
    }
    with ahead_of_time(configs) as futures:
        for job, config in configs.items():
            if time.monotonic() > deadline:
                break
            entry = tune(job, config, futures.get(job, {}), deadline)
            report["kernels"].append(entry)
            suites.write_report(options.path, report)
            print(line(entry), flush=True)


@contextlib.contextmanager
def ahead_of_time(configs: dict[Job, Any]) -> Iterator[dict[Job, dict[Any, Future]]]:
    """Compiles all neighbors meanwhile, if this machine has a GPU to compile for and processors to spare."""
    workers = min(8, (os.cpu_count() or 1) - 1)
    if not suites.CUDA or workers < 1:
        yield {}
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context)
    try:
        yield {
            job: {other: pool.submit(compile_ahead, job, other) for other in neighbors(config)}
            for job, config in configs.items()
        }
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def line(entry: dict[str, Any]) -> str:
    """Returns a line about an entry."""
    name = f"{entry['operator']} {entry['kernel']}, {entry['stage']}"
    if entry["best"] is None or "microseconds" not in entry["shipped"]:
        return f"{name}: nothing was timed"
    before, best = entry["shipped"]["microseconds"], entry["best"]["microseconds"]
    return f"{name}: {before:.1f} µs as shipped, {best:.1f} µs with {entry['best']['config']}"


if __name__ == "__main__":
    main()
