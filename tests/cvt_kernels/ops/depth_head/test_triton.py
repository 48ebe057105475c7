"""The Triton kernels of the depth head, on a GPU or else in Triton's interpreter on CPU tensors."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, launch, launching
from cvt_kernels.launch.records import Pixels
from tests.cvt_kernels.ops.agreement import assert_agrees, made_of
from tests.cvt_kernels.ops.depth_head.test_depth_head import tensors

DTYPES = "float16", "bfloat16", "float32"
USUAL = {"height": 3, "width": 5, "inputs": 17, "channels": 9}


def run(*call):
    with torch.no_grad(), ck.use_backend("triton"):
        return ck.depth_head(*call)


def launches_of(call, capability=90):
    with launching.recorded_launches(launching.Chip(capability, 132)) as launches:
        run(*call)
    return launches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"channels_last": True},
        {"bare": True},
        {"height": 1, "width": 1},
        {"height": 1, "width": 33},
        {"height": 5, "width": 1},
        {"height": 2, "width": 65},
        {"inputs": 1, "channels": 1},
        {"inputs": 70, "channels": 65},
        {"max_depth": 80},
    ],
    ids=str,
)
def test_values(settings, dtype):
    call = made_of("depth_head", "triton", **USUAL | settings, dtype=dtype).call.record
    assert [each.kernel.__name__ for each in launches_of(call)] == [
        "_depth_head_kernel",
        "_depth_sums_kernel",
    ]
    assert_agrees("depth_head", "triton", **USUAL | settings, dtype=dtype)


def test_no_upsampled_map_is_allocated():
    arguments = tensors(channels=64)
    first, _ = launches_of(arguments)
    assert first.arguments["products_ptr"].shape == (2, 5, 6, 9 * 64)
    assert first.arguments["sums_ptr"].shape == (2, 20, 4, 9, 6)


@pytest.mark.parametrize("pixels", [16, 64])
def test_replaced_configurations(pixels):
    with launch.overridden("depth_head", Pixels(pixels=pixels, channels=16, num_warps=1)):
        assert_agrees("depth_head", "triton", **USUAL | {"channels": 20}, dtype="float16")


def test_what_is_refused():
    bind = backends.operators["depth_head"].bind
    why = backends.implementations["depth_head"]["triton"].load().why_unsupported
    x, *others = tensors()
    assert why(bind(x, *others)) is None
    assert why(bind(x[:0], *others)) == "the batch is empty"
    wide = [each.double() for each in (x, *others[:4])]
    assert why(bind(*wide)) == "serves float32, bfloat16 and float16"
    assert "2³¹" in why(bind(torch.empty(1, 6, 2**14, 2**13, device="meta"), *others))
    assert "2²⁹" in why(bind(torch.empty(2**9, 6, 2**10, 2**10, device="meta"), *others))
    others[0].requires_grad_()
    assert why(bind(x, *others)) == "gradients are not computed"
