"""Forwards of models beside Hugging Face's, ``torch.compile`` and other runtimes, by pytest-benchmark.

``pytest benchmarks/test_models.py -k "cvt_13 and not slow"``.
"""

from __future__ import annotations

from typing import Any

import pytest

from . import models


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    models.parametrize(metafunc, train=False)


def test_forward(
    request: pytest.FixtureRequest, benchmark: Any, model: str, dtype: str, batch: int, contender: str
) -> None:
    models.report(request, benchmark, train=False)
