"""The Triton kernels of resized_argmax, on a GPU or else in Triton's interpreter on CPU tensors."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, launch, launching
from cvt_kernels.launch.records import Rows
from cvt_kernels.tuning import tuner
from tests.cvt_kernels.ops.agreement import assert_agrees, made_of

DTYPES = "float16", "bfloat16", "float32"
USUAL = {"height": 5, "width": 6, "channels": 19, "out_height": 20, "out_width": 24}


def run(logits, size):
    with torch.no_grad(), ck.use_backend("triton"):
        return ck.resized_argmax(logits, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"channels_last": True},
        {"channels": 1},
        {"channels": 2},
        {"channels": 150, "out_height": 9},
        {"channels": 1000, "out_height": 3, "out_width": 5},
        {"height": 1, "width": 1},
        {"out_height": 1, "out_width": 1},
        {"height": 7, "width": 11, "out_height": 13, "out_width": 37},
        {"height": 9, "width": 8, "out_height": 4, "out_width": 3},
        {"out_height": 5, "out_width": 6},
    ],
    ids=str,
)
def test_values(settings, dtype):
    call = made_of("resized_argmax", "triton", **USUAL | settings, dtype=dtype).call.record
    with launching.recorded_launches(launching.Chip(90, 132)) as launches:
        run(*call)
    assert [each.kernel.__name__ for each in launches] == ["_pixel_classes_kernel", "_resized_argmax_kernel"]
    assert_agrees("resized_argmax", "triton", **USUAL | settings, dtype=dtype)


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


@pytest.mark.parametrize("elements", [32, 256, 4096])
def test_replaced_configurations(elements):
    with launch.overridden("resized_argmax", Rows(elements=elements, num_warps=1)):
        assert_agrees("resized_argmax", "triton", **USUAL, dtype="float16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_tuning_refuses_wrong_classes_and_takes_near_ones(dtype):
    declared = backends.operators["resized_argmax"]
    record = declared.bind(torch.randn(2, 9, 4, 5).to(getattr(torch, dtype)), (8, 9))
    expected = tuner.Expected.of(declared.reference, tuner.Call(record, False, declared.score))

    def shifted(call):
        return (declared.reference(call) + 1) % 9

    def in_float32(call):  # where 16 bits have equal logits, it may name another class
        return declared.reference(call._replace(logits=call.logits.float()))

    assert "wrong: output is off" in tuner.check(shifted, expected).flaw
    assert tuner.check(in_float32, expected).flaw is None


def test_what_is_refused():
    bind = backends.operators["resized_argmax"].bind
    why = backends.implementations["resized_argmax"]["triton"].load().why_unsupported
    logits = torch.randn(2, 3, 4, 5)
    assert why(bind(logits, (8, 9))) is None
    assert why(bind(logits[:0], (8, 9))) == "the batch is empty"
    assert why(bind(logits.double(), (8, 9))) == "serves float32, bfloat16 and float16"
    assert "2³¹" in why(bind(logits, (2**16, 2**15)))
    assert "2³¹" in why(bind(torch.empty(1, 2**15, 2**8, 2**8, device="meta"), (8, 9)))
    assert "images" in why(bind(torch.empty(2**16, 2, 3, 3, device="meta"), (8, 9)))
    with pytest.raises(ValueError, match="logits: wants a gradient"):
        ck.resized_argmax(logits.requires_grad_(), (8, 9))
