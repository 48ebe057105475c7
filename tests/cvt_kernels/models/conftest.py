"""The backends that tests of accelerated models take, and what is served as one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels.models import served as served_module
from tests.upstream import KERNELS_FIRST


@pytest.fixture(autouse=True)
def _kernels_first(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets kernels of this project serve whatever they can (Triton's on a GPU only)."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    with ck.use_backend(*(["triton"] if on_gpu else []), *KERNELS_FIRST):
        yield


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """Runs a test without gradients."""
    with torch.no_grad():
        yield


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Lists the calls of stages and layers that are served as one."""
    calls: list[Any] = []
    serve = served_module.tokens_served

    def tokens_served(*args: Any) -> Any:
        out = serve(*args)
        calls.extend([] if out is None else [args])
        return out

    monkeypatch.setattr(served_module, "tokens_served", tokens_served)
    return calls
