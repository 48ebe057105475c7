"""The compilations that a command line asks for, each of them once, in processes, and the report of them."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from tqdm import tqdm

from cvt.config import DTYPES
from cvt_kernels import __version__
from cvt_kernels.launch import launching
from cvt_kernels.messages import aligned

from ..process import temporary_files_together
from .gpus import LIMITS
from .launches import TRITON_OPERATORS, image_size_of, is_of, kernel_name, stages_of
from .triton_kernels import Resources, examine


class LaunchCase(NamedTuple):
    """A case that a Triton kernel is launched for; ``mode`` is inference or training."""

    operator: str
    dtype: str
    model: str
    image_size: int
    batch_size: int
    stage: int
    mode: str


class Job(NamedTuple):
    """One compilation, and the cases that the kernel serves."""

    source: launching.TritonKernel
    cases: dict[LaunchCase, None]


Row = dict[str, Any]


def triton_jobs(asked: Any) -> list[Job]:
    """Returns every specialization that is asked for once for each GPU, with the cases that it serves."""
    jobs: dict[str, Job] = {}
    archs = [int(name.removeprefix("sm_")) for name in dict.fromkeys(asked.archs)]
    operators = [name for name in TRITON_OPERATORS if name in asked.operators]
    sizes = itertools.product(asked.models, asked.image_sizes, asked.batch_sizes)
    rest = asked.dtypes, asked.stages, ("inference", "training")
    for arch, name, (model, size, batch), dtype, stage, mode in itertools.product(
        archs, operators, list(sizes), *rest
    ):
        case = LaunchCase(name, dtype, model, size or image_size_of(model), batch, stage, mode)
        for launch in launches_of(case, arch):
            kernel = launching.specialize(launch, arch)
            jobs.setdefault(repr(kernel), Job(kernel, {})).cases[case] = None
    return list(jobs.values())


def launches_of(case: LaunchCase, arch: int) -> list[launching.Launch]:
    """Returns the launches of a case; none for an operator or a stage that its model does not have."""
    stages = stages_of(case.model, case.image_size)[case.stage - 1 : case.stage]
    if not stages or not is_of(case.operator, case.model):
        return []
    chip = launching.Chip(arch, LIMITS[arch].multiprocessors)
    return TRITON_OPERATORS[case.operator](
        stages[0], DTYPES[case.dtype], chip, batch=case.batch_size, training=case.mode == "training"
    )


def compile_all(jobs: Sequence[Job], processes: int | None) -> list[Row]:
    """Compiles everything in so many processes, or one per core; a single one is this. Returns the rows."""
    processes = processes or len(os.sched_getaffinity(0))
    with temporary_files_together(), contextlib.ExitStack() as stack:
        run: Any = map
        if processes > 1:
            spawn = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
            ignored = signal.SIGINT, signal.SIG_IGN  # an interrupt is this process's affair
            pool = ProcessPoolExecutor(processes, spawn, signal.signal, ignored)
            stack.callback(pool.shutdown, cancel_futures=True)
            run = pool.map
        done = run(examine, [job.source for job in jobs])
        examined = list(tqdm(done, "compile", len(jobs), unit="job", disable=None))
    return [row_of(job, resources) for job, resources in zip(jobs, examined, strict=True)]


# The report -----------------------------------------------------------------------------------------------

#: Written into the JSON file. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "cvt compile", 3
_NUMBERS = ("registers", "spilled B", "shared B", "occupancy")


def row_of(job: Job, resources: Resources) -> Row:
    """Returns what the report says of a kernel, ready for JSON."""
    cases, arch = [case._asdict() for case in job.cases], job.source.arch
    return {
        "arch": f"sm_{arch}",
        "operator": cases[0]["operator"],
        "kernel": kernel_name(job.source.name),
        "dtypes": list(dict.fromkeys(case["dtype"] for case in cases)),
        "cases": cases,
        "resources": resources._asdict(),
        "flaws": resources.flaws(arch),
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of a table with a line for each kernel."""
    cells: list[tuple[str, ...]] = [("arch", "kernel", "dtype", "mode", "for", *_NUMBERS)]
    for row in rows:
        modes, took = dict.fromkeys(case["mode"] for case in row["cases"]), row["resources"]
        words = row["arch"], row["kernel"], " ".join(row["dtypes"]), " ".join(modes), _purpose(row)
        numbers = took["registers"], took["stack"], took["static_shared"] + took["dynamic_shared"]
        cells.append((*words, *map(str, numbers), f"{took['occupancy']:.0%}"))
    return aligned(cells, right=range(5, 9))


def _purpose(row: Row) -> str:
    """Returns which stages of which model a kernel serves."""
    stages: dict[str, list[str]] = {}
    for case in row["cases"]:
        setting = f"{case['model']} {case['image_size']}²×{case['batch_size']}"
        stages.setdefault(setting, []).append(str(case["stage"]))
    return ", ".join(f"{setting} {' '.join(dict.fromkeys(each))}" for setting, each in stages.items())


def entry(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each flaw, or one line that there is none."""
    lines = [
        f"{row['arch']} {row['kernel']}, {' '.join(row['dtypes'])} {_purpose(row)}: {flaw}"
        for row in rows
        for flaw in row["flaws"]
    ]
    return lines or [f"{len(rows)} kernels: nothing spills, everything fits"]


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the contents of the JSON file, which has every case of every kernel."""
    versions = {"cvt_kernels": __version__, "torch": torch.__version__, "triton": triton.__version__}
    return {"schema": SCHEMA, "version": VERSION, "versions": versions, "kernels": rows}
