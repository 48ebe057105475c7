"""resized_argmax by the compiled extension and by Triton: what both have in common beside the contract."""

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from tests.checks import CPU_KERNELS

pytestmark = [
    pytest.mark.parametrize("backend", [CPU_KERNELS, "triton"]),
    pytest.mark.filterwarnings("ignore:invalid value"),  # of NumPy in the interpreter
]


def run(backend, logits, size):
    with torch.no_grad(), ck.use_backend(backend):
        return ck.resized_argmax(logits, size)


@pytest.mark.parametrize("classes", [7, 40, 150])
def test_the_first_of_equal_classes_wins(backend, classes):
    logits = torch.randn(2, classes, 3, 4)
    logits[:, classes - 1] = logits[:, 3] = 5.0
    assert (run(backend, logits, (12, 16)) == 3).all()
    assert (run(backend, torch.full((2, classes, 3, 4), -torch.inf), (3, 4)) == 0).all()


@pytest.mark.parametrize("size", [(10, 15), (13, 4), (5, 6)])
def test_numbers_that_are_not_finite_count_as_by_pytorch(backend, size):
    """NaN is the largest, also of an infinity by a weight of 0; the first NaN wins."""
    logits = torch.randn(2, 40, 5, 6)
    logits[0, 37, 2, 3] = logits[0, 5, 4, 5] = logits[0, 6, 4, 5] = torch.nan
    logits[1, 33, 1, 1] = torch.inf
    logits[1, 2, 3, 4] = -torch.inf
    out = run(backend, logits, size)
    assert torch.equal(out, F.interpolate(logits, size, mode="bilinear").argmax(1))
    assert {5, 37} <= set(out[0].flatten().tolist())
