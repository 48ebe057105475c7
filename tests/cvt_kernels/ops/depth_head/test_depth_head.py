"""The depth head by the compiled extension: what is special beside the contract."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import assert_accurate, needs_extension

#: A map with a few edges.
SIZE = (21, 18)


def tensors(dtype=torch.float32, images=2, size=(5, 6), inputs=6, channels=5):
    """Returns the arguments."""
    x, weight, last = (
        torch.randn(*shape, dtype=dtype)
        for shape in ((images, inputs, *size), (channels, inputs, 3, 3), (1, channels, 3, 3))
    )
    bias, last_bias = torch.randn(channels, dtype=dtype), torch.randn(1, dtype=dtype)
    return x, weight / (9 * inputs) ** 0.5, bias, last / (9 * channels) ** 0.5, last_bias, 10.0


def run(*arguments):
    with torch.no_grad(), ck.use_backend("cpu"):
        return ck.depth_head(*arguments)


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_many_channels_are_accurate(dtype):
    """64 channels are those of GLPN."""
    arguments = tensors(dtype, size=SIZE, inputs=64, channels=64)
    exact = reference.depth_head(*(each.double() for each in arguments[:5]), 10.0)
    assert_accurate(run(*arguments), reference.depth_head(*arguments), exact)


@needs_extension
def test_an_image_has_the_same_bits_alone_and_among_others_whatever_the_threads():
    x, *others = tensors(images=3, size=(37, 18))
    together, before = run(x, *others), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for i in range(3):
                assert torch.equal(run(x[i : i + 1], *others)[0], together[i])
    finally:
        torch.set_num_threads(before)


@needs_extension
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (0.4, 0.5), (1, 1), (0, 0.5), (0.65, 1)], ids=str)
def test_a_number_that_is_not_finite_reaches_no_pixel_that_it_does_not_reach_by_pytorch(number, place):
    arguments = tensors(images=1, size=SIZE)
    row, column = (round(part * (size - 1)) for part, size in zip(place, SIZE, strict=True))
    arguments[0][0, 2, row, column] = number
    expected, out = reference.depth_head(*arguments), run(*arguments)
    is_finite = expected.isfinite()
    torch.testing.assert_close(out[is_finite], expected[is_finite], rtol=1e-4, atol=1e-4)
    assert number == number or (out.isnan().any() and not is_finite.all())  # NaN stays NaN
