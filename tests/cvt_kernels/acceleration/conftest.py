"""The backends that tests of accelerated models take."""

from collections.abc import Iterator

import pytest

import cvt_kernels as ck
from tests.upstream import KERNELS_FIRST


@pytest.fixture(autouse=True)
def _kernels_first(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets kernels of this project serve whatever they can, those of Triton on a GPU only."""
    on_gpu = request.node.get_closest_marker("gpu") is not None
    with ck.use_backend(*(["triton"] if on_gpu else []), *KERNELS_FIRST):
        yield
