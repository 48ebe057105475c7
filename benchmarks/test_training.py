"""Training steps beside Hugging Face's model and ``torch.compile``, by pytest-benchmark.

A step is a forward, a loss, a backward and fused AdamW's, in dtypes of 16 bits under autocast.
"""

from __future__ import annotations

from typing import Any

import pytest

from . import models


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    models.parametrize(metafunc, train=True)


def test_step(
    request: pytest.FixtureRequest, benchmark: Any, model: str, dtype: str, batch: int, contender: str
) -> None:
    models.report(request, benchmark, train=True)
