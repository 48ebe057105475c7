"""Every operator at the shapes of the stages of four models: PyTorch, torch.compile, and each backend.

A contender is checked against float64 before it is timed. ``pytest benchmarks -k "attention and cvt_13"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from . import suites
from .suites import Case

pytestmark = pytest.mark.benchmark(**suites.TIMER)


def rows() -> Iterator[Any]:
    """Yields a case with each of its contenders; of those that this machine lacks, one with the reason."""
    absent: set[tuple[str, str]] = set()
    for case in suites.cases():
        for contender in suites.contenders(case.operator):
            reason = suites.why_absent(case.operator, contender)
            if reason is None:
                yield pytest.param(case, contender, id=f"{case}-{contender}")
            elif (case.operator, contender) not in absent:
                absent.add((case.operator, contender))
                marks = pytest.mark.skip(reason=reason)
                yield pytest.param(case, contender, marks=marks, id=f"{case.operator}-{contender}")


@pytest.fixture(autouse=True)
def _no_compiled_code_stays() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("case", "contender"), list(rows()))
def test_operator(benchmark: Any, case: Case, contender: str) -> None:
    call = case.made()
    if (reason := suites.why_not(case, contender, call)) is not None:
        pytest.skip(reason)
    errors = suites.check(case, contender)
    facts = {
        "suite": "operators",
        "operator": case.operator,
        "case": str(case),
        "contender": contender,
        "dtype": str(case.dtype).removeprefix("torch."),
        "batch": case.batch(),
        **errors,
    }
    benchmark.group = str(case)
    suites.record(benchmark, suites.timed(case, contender, call), facts)
