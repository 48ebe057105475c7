"""Times launch configurations of the Triton kernels at CvT-13's shapes, on a GPU, and writes the fastest.

``python -m benchmarks.sweep FILE linear_gelu:3 --batch-size 1 8 32 256``. A job is an operator and a stage
of the model, or all of a part of ``make gpu``, as ``gelu``. What is tried is in the operators' cards
(``sweeps``). Every combination of the values takes the place of what ships; processes
beside this one compile it into Triton's cache. A configuration has to give what the shipped one gives.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cvt.tools.commands.compile import launches
from cvt.tools.commands.compile.gpus import LIMITS
from cvt_kernels import launch, machine
from cvt_kernels.launch import launching
from cvt_kernels.launch.launching import Launch
from cvt_kernels.ops.cards import all_cards, matrix

from . import kernels

FASTEST = 8  # configurations that are written of each size
STAGES = launches.stages_of("cvt_13")


#: The configurations that are worth trying, by the name of a job, from the operators' cards.
SPACES = {name: space for card in all_cards().values() for name, space in card.sweeps.items()}


def jobs_of(words: list[str]) -> list[tuple[str, int]]:
    """Returns the jobs and their stages of words such as ``linear_gelu:3``, or ``gelu`` for a part's."""
    jobs = []
    for word in words:
        spaces = {name: space for name, space in SPACES.items() if space.part == word}
        jobs += [(name, stage) for name, space in spaces.items() for stage in space.stages]
        if not spaces:
            name, _, stage = word.rpartition(":")
            jobs.append((name, int(stage)))
    return jobs


def launched(name: str, stage: int, batch: int, config: Any, device: str = "meta") -> list[Launch]:
    """Returns the launches of a job's kernel with a configuration; they start on tensors of ``device``."""
    space = SPACES[name]
    chip = launching.Chip(90, LIMITS[90].multiprocessors)
    if device == "cuda":
        chip = launching.chip(torch.device("cuda", torch.cuda.current_device()))
        torch.manual_seed(0)
    with contextlib.nullcontext() if config is None else launch.overridden(space.kernel, config):
        made = launches.TRITON_OPERATORS[name.split()[0]](
            STAGES[stage - 1], torch.bfloat16, chip, batch=batch, training=space.training, device=device
        )
    wanted = space.launched or space.kernel
    return [each for each in made if launches.kernel_name(each.kernel.__name__) == wanted]


def compile_ahead(name: str, stage: int, batch: int, config: Any, arch: int) -> None:
    """Compiles a configuration into Triton's cache; it raises whatever Triton does."""
    for each in launched(name, stage, batch, config):
        launching.specialize(each, arch).compile()


def microseconds(run: Callable[[], Any]) -> float:
    """Returns the time of a call within a CUDA graph of some of them, the median of several replays."""
    stream = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        run()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        count = int(max(3, min(30, 600 / max(1e3 * begin.elapsed_time(end), 1))))
        graph, times = torch.cuda.CUDAGraph(), []
        with machine.captured(graph, torch.cuda.graph_pool_handle(), stream):
            for _ in range(count):
                run()
        for _ in range(8):
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / count)
    return statistics.median(times[1:])


def timed(name: str, stage: int, batch: int, config: Any, expected: list[Tensor]) -> float:
    """Returns the microseconds of a configuration.

    Args:
        name: The job's kernel.
        stage: The stage.
        batch: Images.
        config: The configuration; None for what ships, whose tensors are added to ``expected``.
        expected: All tensors of the shipped launches after they have run.

    Raises:
        ValueError: It is not launched, or its results are others.
    """
    found = launched(name, stage, batch, config, "cuda")
    for each in found:
        each.start()
    values = [matrix(value) for each in found for value in each.arguments.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if config is None:
        expected += [tensor.clone() for tensor in tensors]
    if not found or len(tensors) != len(expected):
        raise ValueError("is launched otherwise")
    for ours, theirs in zip(tensors, expected, strict=True) if config is not None else ():
        if ours.shape != theirs.shape:  # sums by program
            continue
        if not (ours - theirs).abs().max() <= 0.02 * theirs.abs().max():  # nor NaN
            raise ValueError("computes something else")
    return microseconds(lambda: [each.start() for each in found])


def swept(
    name: str, stage: int, batch: int, ahead: dict[Any, Future[None]], deadline: float
) -> dict[str, Any]:
    """Returns the row of a size: the shipped configuration's time and the fastest others'."""
    expected: list[Tensor] = []
    shipped = timed(name, stage, batch, None, expected)
    times: list[tuple[float, Any]] = []
    failed: dict[str, int] = {}
    for config, compiled in ahead.items():
        if time.monotonic() > deadline:
            break
        try:
            compiled.result(timeout=max(deadline - time.monotonic(), 0))
            times.append((timed(name, stage, batch, config, expected), config))
        except Exception as error:  # what Triton raises is a fact about the configuration
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            failed[reason] = failed.get(reason, 0) + 1
    times.sort(key=lambda each: each[0])
    fastest = [dataclasses.asdict(config) | {"us": round(us, 2)} for us, config in times[:FASTEST]]
    row = {"job": f"{name}:{stage}", "batch": batch, "shipped_us": round(shipped, 2)}
    return row | {"tried": len(times), "fastest": fastest, "failed": failed}


def main(argv: list[str] | None = None) -> int:
    """Sweeps job by job; the file holds what is done so far."""
    parser = argparse.ArgumentParser(prog="benchmarks.sweep", description=__doc__)
    parser.add_argument("path", type=Path, help="the JSON file")
    parser.add_argument("jobs", nargs="+", metavar="JOB", help=f"{', '.join(SPACES)}, with :STAGE; or a part")
    parser.add_argument("--batch-size", nargs="+", type=int, default=[256, 1, 32, 8], metavar="N")
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything (default: 500)")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + options.seconds
    jobs, rows = jobs_of(options.jobs), []
    arch = 10 * torch.cuda.get_device_capability()[0]
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    ahead = {
        job: {
            config: pool.submit(compile_ahead, *job, max(options.batch_size), config, arch)
            for config in SPACES[job[0]].configurations()
        }
        for job in jobs
    }
    for job in jobs:
        wait(ahead[job].values(), timeout=max(deadline - time.monotonic(), 0))
        for batch in options.batch_size:
            row = swept(*job, batch, ahead[job], deadline)
            rows.append(row)
            kernels.write(options.path, "benchmarks sweep", {"dtype": "bfloat16"}, rows)
            best = row["fastest"][0]["us"] if row["fastest"] else None
            print(f"{row['job']}, batch {batch}: {row['shipped_us']} µs as shipped, best {best}", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
