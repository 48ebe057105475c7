"""The compilations that a command line asks for, each of them once, and their execution in processes."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import signal
from collections.abc import Collection, Iterable, Sequence
from concurrent import futures
from typing import NamedTuple

from tqdm import tqdm

from cvt_kernels import machine
from cvt_kernels.ops.triton_launch import Budget

from ...config import DTYPES, default_image_size
from ..process import temporary_files_together
from .bounds import Analysis, analyze
from .budgets import budget_of, cuda_budget_of, excesses, is_budgeted
from .cuda_kernels import CudaCase, CudaKernels, cuda_kernels_for, parse_function
from .gpus import LIMITS
from .launches import CUDA_OPERATOR, TRITON_OPERATORS, image_size_of, is_of, stages, stages_of
from .loops import why_not_counted
from .resources import Compiled, Resources
from .triton_kernels import TritonKernel, specialize
from .work import Work, cuda_work, work_of


class Selection(NamedTuple):
    """The kernels to compile: every combination of these.

    Attributes:
        archs: Compute capabilities, 90 for sm_90.
        models: Names of ``PRESETS`` or ``launches.PYRAMIDS``; operators are those that each model has.
        dtypes: Names of ``DTYPES``.
        operators: Names of ``TRITON_OPERATORS``, or ``CUDA_OPERATOR``.
        stages: Stages of the models, from 1; of a model, those that it has.
        image_sizes: Pixels of a side; None is the model's own.
        batch_sizes: Images of a batch.
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
    """One compilation, and the cases that a Triton kernel is launched for, with the work of its launches."""

    source: TritonKernel | CudaKernels
    cases: dict[LaunchCase, list[Work]]


class Row(NamedTuple):
    """One kernel of the report: its GPU, the types and cases that it serves, and what its code says.

    Attributes:
        messages: Messages of the assembler about its performance.
        analyses: The counts and predictions of each launch that differs.
        uncounted: Why there are none; None if there are, or nothing describes the work of the kernel.
        flaws: What must not be, each in a line.
    """

    arch: str
    operator: str
    kernel: str
    dtypes: list[str]
    cases: Sequence[LaunchCase | CudaCase]
    resources: Resources
    messages: Sequence[str] = ()
    analyses: Sequence[Analysis] = ()
    uncounted: str | None = None
    flaws: Sequence[str] = ()


def cuda_jobs(selection: Selection, *, required: bool) -> tuple[list[Job], list[str]]:
    """Returns the compilations of the CUDA kernels, and for each GPU a line that says where they come from.

    Raises:
        ValueError: ``required``, and there are none for one of the GPUs.
    """
    jobs: list[Job] = []
    notes = []
    for arch in selection.archs if CUDA_OPERATOR in selection.operators else ():
        kernels, note = cuda_kernels_for(arch, selection.dtypes)
        if required and not kernels:
            raise ValueError(note)
        notes.append(note)
        jobs += [Job(source, {}) for source in kernels]
    return jobs, notes


def triton_jobs(selection: Selection) -> list[Job]:
    """Returns every specialization of the Triton kernels once for each GPU, with the cases that it serves."""
    jobs: dict[str, Job] = {}
    for arch, operator, model, size, batch, dtype, stage, mode in itertools.product(
        selection.archs, (name for name in TRITON_OPERATORS if name in selection.operators),
        selection.models, selection.image_sizes, selection.batch_sizes, selection.dtypes, selection.stages,
        ("inference", "training"),
    ):  # fmt: skip
        case = LaunchCase(operator, dtype, model, size or image_size_of(model), batch, stage, mode)
        for launch in _launches(case, arch):
            kernel, work = specialize(launch, arch), work_of(launch)
            job = jobs.setdefault(repr(kernel), Job(kernel, {}))
            job.cases.setdefault(case, []).extend([] if work is None else [work])
    return list(jobs.values())


def _launches(case: LaunchCase, arch: int) -> list[machine.Launch]:
    """Returns the launches of a case; none for an operator or a stage that its model does not have."""
    stage = stages_of(case.model, case.image_size)[case.stage - 1 : case.stage]
    if not stage or not is_of(case.operator, case.model):
        return []
    return TRITON_OPERATORS[case.operator](
        *stage,
        DTYPES[case.dtype],
        machine.Chip(arch, LIMITS[arch].multiprocessors),
        batch=case.batch_size,
        training=case.mode == "training",
    )


def count_specializations(
    mode: str, batch_sizes: Iterable[int], *, arch: int = 90, model: str = "cvt_13", dtype: str = "bfloat16"
) -> dict[str, int]:
    """Counts how often a step of a model makes Triton compile each of its kernels, without compiling any.

    Args:
        mode: ``"inference"`` or ``"training"``.
        batch_sizes: The batch sizes that are seen one after the other.
        arch: Compute capability, 90 for sm_90.
        model: A name of ``PRESETS``, at its own image size.
        dtype: A name of ``DTYPES``.

    Returns:
        Kernel → how many specializations of it all the batch sizes need together.
    """
    found: dict[str, set[str]] = {}
    numbers = range(1, len(stages(model)) + 1)
    for operator, batch, stage in itertools.product(("conv_projection", "attention"), batch_sizes, numbers):
        case = LaunchCase(operator, dtype, model, default_image_size(model), batch, stage, mode)
        for launch in _launches(case, arch):
            kernel = specialize(launch, arch)
            found.setdefault(kernel.name, set()).add(repr(kernel))
    return {name: len(kernels) for name, kernels in found.items()}


def compile_all(jobs: Sequence[Job], processes: int) -> list[Row]:
    """Compiles everything, in this process or in several of their own, and returns a row for each kernel."""
    progress = functools.partial(tqdm, desc="compile", total=len(jobs), unit="job", disable=None)
    with temporary_files_together():
        if processes == 1:
            results = [job.source.examine() for job in progress(jobs)]
        else:
            spawn = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
            others = multiprocessing.active_children()
            with futures.ProcessPoolExecutor(processes, spawn, _ignore_interrupts) as pool:
                pending = [pool.submit(job.source.examine) for job in jobs]
                try:
                    for done in progress(futures.as_completed(pending)):
                        done.result()
                except BaseException:
                    for process in multiprocessing.active_children():
                        if process not in others:
                            process.terminate()
                    pool.shutdown(cancel_futures=True)
                    raise
            results = [done.result() for done in pending]
    return [
        _row(job, function, compiled)
        for job, by_function in zip(jobs, results, strict=True)
        for function, compiled in sorted(by_function.items())
    ]


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair


def _row(job: Job, function: str, compiled: Compiled) -> Row:
    source = job.source
    if isinstance(source, CudaKernels):
        return _cuda_row(source, function, compiled)
    kernel, operator = function.strip("_").removesuffix("_kernel"), next(iter(job.cases)).operator
    works = dict.fromkeys(itertools.chain(*job.cases.values()))
    budgeted_cases = [case for case in job.cases if _is_budgeted(case)]
    budgeted = set(itertools.chain(*(job.cases[case] for case in budgeted_cases)))
    budget = budget_of(operator, kernel, source.arch) if budgeted_cases else None
    dtypes = list(dict.fromkeys(case.dtype for case in job.cases))
    row = Row(f"sm_{source.arch}", operator, kernel, dtypes, list(job.cases), compiled.resources)
    return _analyzed(row, source.arch, compiled, works, budget, budgeted)


def _is_budgeted(case: LaunchCase) -> bool:
    return is_budgeted(case.model, case.image_size, case.batch_size, case.dtype)


def _cuda_row(source: CudaKernels, function: str, compiled: Compiled) -> Row:
    kernel, case = parse_function(function)
    work = cuda_work(kernel, case, source.dtype)
    works = [work] if work else []
    budget = cuda_budget_of(kernel, case, source.dtype, source.arch)
    cases = [case] if case else []
    row = Row(f"sm_{source.arch}", CUDA_OPERATOR, kernel, [source.dtype], cases, compiled.resources)
    return _analyzed(row, source.arch, compiled, works, budget, works)


def _analyzed(
    row: Row, arch: int, compiled: Compiled, works: Iterable[Work], budget: Budget | None,
    budgeted: Collection[Work],
) -> Row:  # fmt: skip
    """Returns a row with what its code says of each launch's work; the budget is for those ``budgeted``."""
    reasons = (why_not_counted(compiled.code.blocks, work.trips) for work in works)
    uncounted = next(filter(None, reasons), None)
    analyses = [] if uncounted else [analyze(compiled.code, row.resources, work, arch) for work in works]
    flaws = [*row.resources.flaws(arch), *(text for text in compiled.messages if "serialized" in text)]
    if budget is not None:
        counts = [analysis.counts for analysis in analyses if analysis.work in budgeted]
        flaws += excesses(budget, compiled.resources, counts)
        if not counts and budget.limits_instructions:
            flaws.append(uncounted or "not counted: work.py does not describe it")
    return row._replace(messages=compiled.messages, analyses=analyses, uncounted=uncounted, flaws=flaws)
