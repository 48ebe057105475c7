"""The report's rows: every kernel compiled once, with what its machine code says of each of its launches."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from cvt.commands.compile.jobs import Job, LaunchCase, Selection, in_processes, launches_of
from cvt.commands.compile.launches import stages
from cvt.commands.compile.resources import Resources
from cvt.commands.compile.triton_kernels import TritonKernel, specialize
from cvt.config import default_image_size
from cvt_kernels.ops.triton_launch import Budget

from . import examined
from .bounds import Analysis, analyze
from .budgets import budget_of, cuda_budget_of, excesses, is_budgeted
from .cuda_kernels import CudaCase, CudaKernels, cuda_kernels_for, parse_function
from .examined import Compiled, KeyInstructions
from .loops import why_not_counted
from .work import Work, cuda_work, work_of

#: The operator with CUDA kernels. All of them in the extension are examined, since they depend on no shape.
CUDA_OPERATOR = "layer_norm_gelu"


class Row(NamedTuple):
    """One kernel of the report: its GPU, the types and cases that it serves, and what its code says.

    Attributes:
        instructions: The instructions of its code that the report names.
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
    instructions: KeyInstructions
    messages: Sequence[str] = ()
    analyses: Sequence[Analysis] = ()
    uncounted: str | None = None
    flaws: Sequence[str] = ()


def cuda_sources(selection: Selection, *, required: bool) -> tuple[list[CudaKernels], list[str]]:
    """Returns the CUDA kernels, and for each GPU a line that says where they come from.

    Raises:
        ValueError: ``required``, and there are none for one of the GPUs.
    """
    sources: list[CudaKernels] = []
    notes = []
    for arch in selection.archs if CUDA_OPERATOR in selection.operators else ():
        kernels, note = cuda_kernels_for(arch, selection.dtypes)
        if required and not kernels:
            raise ValueError(note)
        notes.append(note)
        sources += kernels
    return sources, notes


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
        for launch in launches_of(case, arch):
            kernel = specialize(launch, arch)
            found.setdefault(kernel.name, set()).add(repr(kernel))
    return {name: len(kernels) for name, kernels in found.items()}


def compile_all(cuda: Sequence[CudaKernels], jobs: Sequence[Job], processes: int | None) -> list[Row]:
    """Compiles everything, in this process or in several of their own, and returns a row for each kernel."""
    # nvcc takes longest, so it comes first
    results = in_processes(_examine, [*cuda, *(job.source for job in jobs)], processes)
    rows = [
        triton_row(job.source, _works_of(job), compiled)
        for job, by_function in zip(jobs, results[len(cuda) :], strict=True)
        for compiled in by_function.values()
    ]
    for source, by_function in zip(cuda, results, strict=False):
        rows += [_cuda_row(source, function, compiled) for function, compiled in sorted(by_function.items())]
    return rows


def _examine(source: TritonKernel | CudaKernels) -> dict[str, Compiled]:
    return source.examine() if isinstance(source, CudaKernels) else examined.examine(source)


def _works_of(job: Job) -> dict[LaunchCase, list[Work]]:
    return {case: list(filter(None, map(work_of, launches))) for case, launches in job.cases.items()}


def triton_row(source: TritonKernel, works: dict[LaunchCase, list[Work]], compiled: Compiled) -> Row:
    """Returns the row of a Triton kernel, whose launches have this work in each case."""
    operator = next(iter(works)).operator
    budgeted_cases = [case for case in works if _is_budgeted(case)]
    budgeted = set(itertools.chain(*(works[case] for case in budgeted_cases)))
    budget = budget_of(operator, source.label, source.arch) if budgeted_cases else None
    dtypes = list(dict.fromkeys(case.dtype for case in works))
    row = _row(source.arch, operator, source.label, dtypes, list(works), compiled)
    return _analyzed(
        row, source.arch, compiled, dict.fromkeys(itertools.chain(*works.values())), budget, budgeted
    )


def _row(
    arch: int, operator: str, kernel: str, dtypes: list[str], cases: Sequence[LaunchCase | CudaCase],
    compiled: Compiled,
) -> Row:  # fmt: skip
    return Row(f"sm_{arch}", operator, kernel, dtypes, cases, compiled.resources, compiled.instructions)


def _is_budgeted(case: LaunchCase) -> bool:
    return is_budgeted(case.model, case.image_size, case.batch_size, case.dtype)


def _cuda_row(source: CudaKernels, function: str, compiled: Compiled) -> Row:
    kernel, case = parse_function(function)
    work = cuda_work(kernel, case, source.dtype)
    works = [work] if work else []
    budget = cuda_budget_of(kernel, case, source.dtype, source.arch)
    cases = [case] if case else []
    row = _row(source.arch, CUDA_OPERATOR, kernel, [source.dtype], cases, compiled)
    return _analyzed(row, source.arch, compiled, works, budget, works)


def _analyzed(
    row: Row, arch: int, compiled: Compiled, works: Iterable[Work], budget: Budget | None,
    budgeted: Collection[Work],
) -> Row:  # fmt: skip
    """Returns a row with what its code says of each launch's work; the budget is for those ``budgeted``."""
    reasons = (why_not_counted(compiled.code.blocks, work.trips) for work in works)
    uncounted = next(filter(None, reasons), None)
    analyses = [] if uncounted else [analyze(compiled.code, row.resources, work, arch) for work in works]
    flaws = [*row.resources.flaws(arch), *row.instructions.flaws()]
    flaws += (text for text in compiled.messages if "serialized" in text)
    if budget is not None:
        counts = [analysis.counts for analysis in analyses if analysis.work in budgeted]
        flaws += excesses(budget, compiled.resources, counts)
        if not counts and budget.limits_instructions:
            flaws.append(uncounted or "not counted: work.py does not describe it")
    return row._replace(messages=compiled.messages, analyses=analyses, uncounted=uncounted, flaws=flaws)
