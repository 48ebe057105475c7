"""The Triton kernels of the depth head, on a GPU or else in Triton's interpreter on CPU tensors."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, launch, launching, reference
from cvt_kernels.launch.records import Pixels
from tests.checks import assert_accurate
from tests.cvt_kernels.ops.agreement import assert_agrees, made_of

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


def tensors(dtype=torch.float32, images=2, size=(5, 6), inputs=6, channels=5):
    """Returns the arguments."""
    x, weight, last = (
        torch.randn(*shape, dtype=dtype)
        for shape in ((images, inputs, *size), (channels, inputs, 3, 3), (1, channels, 3, 3))
    )
    bias, last_bias = torch.randn(channels, dtype=dtype), torch.randn(1, dtype=dtype)
    return x, weight / (9 * inputs) ** 0.5, bias, last / (9 * channels) ** 0.5, last_bias, 10.0


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_many_channels_are_accurate(dtype):
    """64 channels are those of GLPN."""
    arguments = tensors(dtype, inputs=64, channels=64)
    exact = reference.depth_head(*(each.double() for each in arguments[:5]), 10.0)
    assert_accurate(run(*arguments), reference.depth_head(*arguments), exact)


def test_an_image_has_the_same_bits_alone_and_among_others():
    x, *others = tensors(images=3)
    together = run(x, *others)
    for i in range(3):
        assert torch.equal(run(x[i : i + 1], *others)[0], together[i])


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy in the interpreter
@torch.no_grad()
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (4, 5), (2, 3), (0, 3), (4, 0)], ids=str)
def test_a_number_that_is_not_finite_reaches_no_pixel_that_it_does_not_reach_by_pytorch(number, place):
    arguments = tensors(images=1)
    arguments[0][0, 2, place[0], place[1]] = number
    expected, out = reference.depth_head(*arguments), run(*arguments)
    is_finite = expected.isfinite()
    torch.testing.assert_close(out[is_finite], expected[is_finite], rtol=1e-4, atol=1e-4)
    assert number == number or out.isnan().any()


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
