"""Classes of resized logits: equal classes, smooth regions, tuning, numbers that are not finite, refusals."""

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends, reference
from cvt_kernels.tuning import tuner
from tests.checks import CPU_KERNELS

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy in the interpreter
every_backend = pytest.mark.parametrize("backend", [CPU_KERNELS, "triton"])


def run(backend, logits, size):
    with torch.no_grad(), ck.use_backend(backend):
        return ck.resized_argmax(logits, size)


@every_backend
@pytest.mark.parametrize("classes", [7, 40, 150])
def test_the_first_of_equal_classes_wins(backend, classes):
    logits = torch.randn(2, classes, 3, 4)
    logits[:, classes - 1] = logits[:, 3] = 5.0
    assert (run(backend, logits, (12, 16)) == 3).all()
    assert (run(backend, torch.full((2, classes, 3, 4), -torch.inf), (3, 4)) == 0).all()


@every_backend
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


@every_backend
def test_smooth_logits_of_a_few_regions(backend):
    """A photograph has such: nearly all pixels have neighbors of one class, which need no logits."""
    coarse = torch.randn(2, 21, 3, 4, generator=torch.Generator().manual_seed(0))
    logits = F.interpolate(coarse, (32, 40), mode="bicubic").contiguous(memory_format=torch.channels_last)
    labels = logits.argmax(1)
    assert (labels[:, :, 1:] == labels[:, :, :-1]).float().mean() > 0.8
    assert torch.equal(run(backend, logits, (128, 160)), reference.resized_argmax(logits, (128, 160)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tuning_refuses_wrong_classes_and_takes_near_ones(dtype):
    declared = backends.operators["resized_argmax"]
    record = declared.bind(torch.randn(2, 9, 4, 5).to(getattr(torch, dtype)), (8, 9))
    expected = tuner.Expected.of(declared.reference, tuner.Call(record, False, declared.score))

    def shifted(call):
        return (declared.reference(call) + 1) % 9

    def in_float32(call):  # where 16 bits have equal logits, it may name another class
        return declared.reference(call._replace(logits=call.logits.float()))

    assert "wrong: output 0 is off" in tuner.check(shifted, expected).flaw
    assert tuner.check(in_float32, expected).flaw is None


@pytest.mark.parametrize(
    ("backend", "shape", "size", "reason"),
    [
        pytest.param("cpu", (2, 3, 4, 5), (2**20 + 1, 9), "1048576", marks=CPU_KERNELS.marks),
        ("triton", (2, 3, 4, 5), (2**16, 2**15), "2³¹"),
        ("triton", (1, 2**15, 2**8, 2**8), (8, 9), "2³¹"),
        ("triton", (2**16, 2, 3, 3), (8, 9), "images"),
    ],
)
def test_what_is_refused(backend, shape, size, reason):
    call = backends.operators["resized_argmax"].bind(torch.empty(shape, device="meta"), size)
    assert reason in backends.implementations["resized_argmax"][backend].load().why_unsupported(call)
    with pytest.raises(ValueError, match="logits: wants a gradient"):
        ck.resized_argmax(torch.randn(2, 3, 4, 5, requires_grad=True), (8, 9))
