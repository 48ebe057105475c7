"""Every operator at the shapes of the stages of four models: PyTorch, torch.compile, and each backend.

A contender is checked against float64 before it is timed. ``pytest benchmarks -k "attention and cvt_13"``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from . import models, operators
from .operators import Case

pytestmark = pytest.mark.benchmark(**operators.TIMER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test for each contender of a case; for one that this machine lacks, one with the reason."""
    tiny, absent, rows = models.is_tiny(metafunc.config), set(), []
    for case in operators.cases(tiny=tiny):
        for contender in operators.contenders(case, tiny=tiny):
            reason = operators.why_absent(case.operator, contender)
            name = f"{case.operator}-{contender}" if reason else f"{case}-{contender}"
            if name not in absent:
                absent.add(name)
                marks = [pytest.mark.skip(reason=reason)] if reason else []
                rows.append(pytest.param(case, contender, id=name, marks=marks))
    metafunc.parametrize(("case", "contender"), rows)


@pytest.fixture(autouse=True)
def _no_compiled_code_stays() -> Iterator[None]:
    yield
    torch.compiler.reset()


def test_operator(benchmark: BenchmarkFixture, case: Case, contender: str) -> None:
    made = operators.prepared(case)
    if (reason := made.why_not(contender)) is not None:
        pytest.skip(reason)
    serve = operators.function(case.operator, contender)
    errors = made.check(serve, contender)
    benchmark.group = str(case)
    benchmark.extra_info |= {
        "suite": "operators",
        "operator": case.operator,
        "case": str(case),
        "model": case.model,
        "dtype": str(case.dtype).removeprefix("torch."),
        "batch": case.batch,
        "train": case.training,
        "contender": contender,
        **errors,
    }
    operators.time(benchmark, lambda: made.run(serve), made)
