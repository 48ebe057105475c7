"""The depth head by the compiled extension and by Triton: what both have in common beside the contract."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import CPU_KERNELS, assert_accurate

#: Sizes of maps with a few edges, small where an interpreter computes.
SIZES = {"cpu": (21, 18), "triton": (5, 6)}
every_backend = pytest.mark.parametrize("backend", [CPU_KERNELS, "triton"])


def tensors(dtype=torch.float32, images=2, size=(5, 6), inputs=6, channels=5):
    """Returns the arguments."""
    x, weight, last = (
        torch.randn(*shape, dtype=dtype)
        for shape in ((images, inputs, *size), (channels, inputs, 3, 3), (1, channels, 3, 3))
    )
    bias, last_bias = torch.randn(channels, dtype=dtype), torch.randn(1, dtype=dtype)
    return x, weight / (9 * inputs) ** 0.5, bias, last / (9 * channels) ** 0.5, last_bias, 10.0


def run(backend, *arguments):
    with torch.no_grad(), ck.use_backend(backend):
        return ck.depth_head(*arguments)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_many_channels_are_accurate(backend, dtype):
    """64 channels are those of GLPN."""
    arguments = tensors(dtype, size=SIZES[backend], inputs=64, channels=64)
    exact = reference.depth_head(*(each.double() for each in arguments[:5]), 10.0)
    assert_accurate(run(backend, *arguments), reference.depth_head(*arguments), exact)


def test_an_image_has_the_same_bits_alone_and_among_others_whatever_the_threads():
    """Triton has a product of PyTorch's before its kernels, whose bits depend on the rows on some CPUs."""
    x, *others = tensors(images=3, size=(37, 18))
    together, before = run("cpu", x, *others), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for i in range(3):
                assert torch.equal(run("cpu", x[i : i + 1], *others)[0], together[i])
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy in the interpreter
@every_backend
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (0.4, 0.5), (1, 1), (0, 0.5), (0.65, 1)], ids=str)
def test_a_number_that_is_not_finite_reaches_no_pixel_that_it_does_not_reach_by_pytorch(
    backend, number, place
):
    arguments = tensors(images=1, size=SIZES[backend])
    row, column = (round(part * (size - 1)) for part, size in zip(place, SIZES[backend], strict=True))
    arguments[0][0, 2, row, column] = number
    expected, out = reference.depth_head(*arguments), run(backend, *arguments)
    is_finite = expected.isfinite()
    torch.testing.assert_close(out[is_finite], expected[is_finite], rtol=1e-4, atol=1e-4)
    assert number == number or (out.isnan().any() and not is_finite.all())  # NaN stays NaN
