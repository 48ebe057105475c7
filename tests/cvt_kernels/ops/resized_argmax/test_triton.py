"""Classes of resized logits in Triton: neighbors that agree, tuning, and what is refused."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.launch import launching
from cvt_kernels.tuning import tuner

DTYPES = "float16", "bfloat16", "float32"


def run(logits, size):
    with torch.no_grad(), ck.use_backend("triton"):
        return ck.resized_argmax(logits, size)


def test_neighbors_that_agree_need_no_logits():
    """The second kernel reads their classes alone: numbers that are planted in the logits change nothing."""
    logits = torch.zeros(1, 5, 4, 4)
    logits[0, 3] = 1.0
    with launching.recorded_launches(launching.Chip(90, 132)) as launches:
        run(logits, (16, 16))
    resize = launches[1]
    largest, out = resize.arguments["largest_ptr"], resize.arguments["out_ptr"]
    largest.fill_(2)
    logits.fill_(torch.nan)
    resize.start()
    assert (out == 2).all()


@pytest.mark.parametrize("dtype", DTYPES)
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


def test_what_is_refused():
    bind = backends.operators["resized_argmax"].bind
    why = backends.implementations["resized_argmax"]["triton"].load().why_unsupported
    logits = torch.randn(2, 3, 4, 5)
    assert why(bind(logits, (8, 9))) is None
    assert "2³¹" in why(bind(logits, (2**16, 2**15)))
    assert "2³¹" in why(bind(torch.empty(1, 2**15, 2**8, 2**8, device="meta"), (8, 9)))
    assert "images" in why(bind(torch.empty(2**16, 2, 3, 3, device="meta"), (8, 9)))
    with pytest.raises(ValueError, match="logits: wants a gradient"):
        ck.resized_argmax(logits.requires_grad_(), (8, 9))
