"""resized_argmax by the compiled extension, on every instruction set."""

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends, reference
from tests.checks import every_instruction_set, not_built
from tests.cvt_kernels.ops.agreement import DTYPES, assert_agrees_on

built = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


def run(logits, size):
    with torch.no_grad(), ck.use_backend("cpu"):
        return ck.resized_argmax(logits, size)


@built
@every_instruction_set
def test_values(name):
    usual = {"height": 5, "width": 6, "channels": 19, "out_height": 20, "out_width": 24}
    cases = [
        {"channels_last": True},
        {"channels": 1},
        {"channels": 1000, "out_height": 7},
        {"height": 1, "width": 1},
        {"height": 9, "width": 8, "out_height": 4, "out_width": 3},
        {"out_height": 5, "out_width": 6},
    ]
    assert_agrees_on(name, "resized_argmax", *(usual | case for case in cases), dtypes=DTYPES[:3])


@built
@pytest.mark.parametrize("classes", [7, 40, 150])
def test_the_first_of_equal_classes_wins(classes):
    logits = torch.randn(2, classes, 3, 4)
    logits[:, classes - 1] = logits[:, 3] = 5.0
    assert (run(logits, (12, 16)) == 3).all()
    assert (run(torch.full((2, classes, 3, 4), -torch.inf), (3, 4)) == 0).all()


@built
@pytest.mark.parametrize("size", [(10, 15), (13, 4), (5, 6)])
def test_numbers_that_are_not_finite_count_as_by_pytorch(size):
    """NaN is the largest, also of an infinity by a weight of 0; the first NaN wins."""
    logits = torch.randn(2, 40, 5, 6)
    logits[0, 37, 2, 3] = logits[0, 5, 4, 5] = logits[0, 6, 4, 5] = torch.nan
    logits[1, 33, 1, 1] = torch.inf
    logits[1, 2, 3, 4] = -torch.inf
    out = run(logits, size)
    assert torch.equal(out, F.interpolate(logits, size, mode="bilinear").argmax(1))
    assert {5, 37} <= set(out[0].flatten().tolist())


@built
def test_smooth_logits_of_a_few_regions():
    """A photograph has such: nearly all pixels have neighbors of one class; classes are PyTorch's."""
    coarse = torch.randn(2, 21, 3, 4, generator=torch.Generator().manual_seed(0))
    logits = F.interpolate(coarse, (32, 40), mode="bicubic").contiguous(memory_format=torch.channels_last)
    out = run(logits, (128, 160))
    labels = logits.argmax(1)
    assert (labels[:, :, 1:] == labels[:, :, :-1]).float().mean() > 0.8
    assert torch.equal(out, reference.resized_argmax(logits, (128, 160)))


@built
def test_what_is_refused():
    bind = backends.operators["resized_argmax"].bind
    why = backends.implementations["resized_argmax"]["cpu"].load().why_unsupported
    logits = torch.randn(2, 3, 4, 5)
    assert why(bind(logits, (8, 9))) is None
    assert why(bind(logits.double(), (8, 9))) == "serves float32, bfloat16 and float16"
    assert "1048576" in why(bind(logits, (2**20 + 1, 9)))


@built
def test_compiled():
    logits = torch.randn(2, 9, 4, 5)
    compiled = torch.compile(ck.resized_argmax, fullgraph=True, backend="eager")
    with ck.use_backend("cpu"):
        assert torch.equal(compiled(logits, (8, 9)), reference.resized_argmax(logits, (8, 9)))
