"""The compilations that a command line asks for, each of them once, and their execution in processes."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import operator
import os
import signal
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from cvt.config import DTYPES
from cvt_kernels import launching

from ..process import temporary_files_together
from .gpus import LIMITS
from .launches import TRITON_OPERATORS, image_size_of, is_of, stages_of
from .resources import Resources
from .triton_kernels import TritonKernel, specialize

_Result = TypeVar("_Result")


class Selection(NamedTuple):
    """The kernels to compile: every combination of these that there is.

    ``archs`` are compute capabilities, 90 for sm_90, ``stages`` count from 1, and an image size of None is
    the model's own.
    """

    archs: Sequence[int]
    models: Sequence[str]
    dtypes: Sequence[str]
    operators: Sequence[str]
    stages: Sequence[int]
    image_sizes: Sequence[int | None]
    batch_sizes: Sequence[int]


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
    """One compilation, and the cases that the kernel serves, with its launches in each."""

    source: TritonKernel
    cases: dict[LaunchCase, list[launching.Launch]]


class Row(NamedTuple):
    """One kernel of the report: its GPU, the types and cases that it serves, what it takes, and its flaws."""

    arch: str
    operator: str
    kernel: str
    dtypes: list[str]
    cases: Sequence[LaunchCase]
    resources: Resources
    flaws: Sequence[str]


def triton_jobs(selection: Selection) -> list[Job]:
    """Returns every specialization of the Triton kernels once for each GPU, with the cases that it serves."""
    jobs: dict[str, Job] = {}
    for arch, name, model, size, batch, dtype, stage, mode in itertools.product(
        selection.archs, (each for each in TRITON_OPERATORS if each in selection.operators),
        selection.models, selection.image_sizes, selection.batch_sizes, selection.dtypes, selection.stages,
        ("inference", "training"),
    ):  # fmt: skip
        case = LaunchCase(name, dtype, model, size or image_size_of(model), batch, stage, mode)
        for launch in launches_of(case, arch):
            kernel = specialize(launch, arch)
            job = jobs.setdefault(repr(kernel), Job(kernel, {}))
            job.cases.setdefault(case, []).append(launch)
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
    """Compiles everything, in this process or in several of their own, and returns a row for each kernel."""
    results = in_processes(operator.methodcaller("examine"), [job.source for job in jobs], processes)
    return [_row(job, resources) for job, resources in zip(jobs, results, strict=True)]


def in_processes(
    examine: Callable[[Any], _Result], sources: Sequence[Any], processes: int | None
) -> list[_Result]:
    """Returns ``examine`` of each source, in one process per core or as many as given; 1 is this process."""
    processes = processes or len(os.sched_getaffinity(0))
    progress = functools.partial(tqdm, desc="compile", total=len(sources), unit="job", disable=None)
    with temporary_files_together():
        if processes == 1:
            return [examine(source) for source in progress(sources)]
        spawn = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
        others = multiprocessing.active_children()
        with futures.ProcessPoolExecutor(processes, spawn, _ignore_interrupts) as pool:
            pending = [pool.submit(examine, source) for source in sources]
            try:
                for done in progress(futures.as_completed(pending)):
                    done.result()
            except BaseException:
                for process in multiprocessing.active_children():
                    if process not in others:
                        process.terminate()
                pool.shutdown(cancel_futures=True)
                raise
        return [done.result() for done in pending]


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair


def _row(job: Job, resources: Resources) -> Row:
    arch = job.source.arch
    return Row(
        arch=f"sm_{arch}",
        operator=next(iter(job.cases)).operator,
        kernel=job.source.label,
        dtypes=list(dict.fromkeys(case.dtype for case in job.cases)),
        cases=list(job.cases),
        resources=resources,
        flaws=resources.flaws(arch),
    )
