"""depth_head by the compiled extension, on every instruction set."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import assert_accurate, every_instruction_set, not_built
from tests.cvt_kernels.ops.agreement import DTYPES, assert_agrees, assert_agrees_on

built = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


@built
@every_instruction_set
def test_values(name):
    sizes = {"height": 9, "width": 17, "inputs": 17, "channels": 9}
    assert_agrees_on(name, "depth_head", sizes, sizes | {"channels_last": True}, dtypes=DTYPES[:3])


@built
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(
    "size", [(1, 1), (1, 33), (33, 1), (2, 15), (3, 16), (18, 31), (5, 32), (4, 63)], ids=str
)
def test_every_edge_of_a_vector_and_of_the_rows_that_pass_together(size, dtype):
    sizes = dict(zip(("height", "width"), size, strict=True))
    assert_agrees("depth_head", "cpu", dtype=dtype, inputs=5, channels=6, **sizes)


def tensors(dtype=torch.float32, images=2, size=(21, 18), inputs=6, channels=5):
    """Returns the arguments."""
    x = torch.randn(images, inputs, *size, dtype=dtype)
    weight, last = (
        torch.randn(channels, inputs, 3, 3, dtype=dtype),
        torch.randn(1, channels, 3, 3, dtype=dtype),
    )
    of_both = torch.randn(channels, dtype=dtype), torch.randn(1, dtype=dtype)
    return x, weight / (9 * inputs) ** 0.5, of_both[0], last / (9 * channels) ** 0.5, of_both[1], 10.0


@built
@torch.no_grad()
def test_an_image_has_the_same_bits_alone_and_among_others_whatever_the_threads():
    x, *others = tensors(images=3, size=(37, 18))
    before = torch.get_num_threads()
    with ck.use_backend("cpu"):
        together = ck.depth_head(x, *others)
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for i in range(3):
                    assert torch.equal(ck.depth_head(x[i : i + 1], *others)[0], together[i])
        finally:
            torch.set_num_threads(before)


@built
@torch.no_grad()
def test_sums_of_many_channels_are_accurate():
    """64 channels are those of GLPN."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        arguments = tensors(dtype, inputs=64, channels=64)
        exact = reference.depth_head(*(each.double() for each in arguments[:5]), 10.0)
        with ck.use_backend("cpu"):
            assert_accurate(ck.depth_head(*arguments), reference.depth_head(*arguments), exact)


@built
@torch.no_grad()
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (7, 9), (20, 17), (0, 9), (13, 17)], ids=str)
def test_a_number_that_is_not_finite_reaches_no_pixel_that_it_does_not_reach_by_pytorch(number, place):
    arguments = tensors(images=1)
    arguments[0][0, 2, place[0], place[1]] = number
    expected = reference.depth_head(*arguments)
    with ck.use_backend("cpu"):
        out = ck.depth_head(*arguments)
    is_finite = expected.isfinite()
    assert out[is_finite].isfinite().all()
    torch.testing.assert_close(out[is_finite], expected[is_finite], rtol=1e-4, atol=1e-4)
    assert number == number or (~is_finite).any()  # NaN stays NaN


@torch.no_grad()
def test_under_torch_compile_pytorch_serves():
    arguments = tensors()
    compiled = torch.compile(ck.depth_head, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*arguments), reference.depth_head(*arguments))
