"""The Triton kernels of 8-bit numbers, on a GPU or else in Triton's interpreter."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, machine
from cvt_kernels.launch import launching
from cvt_kernels.ops.linear_int8 import triton as rounding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NUMBERS = [torch.int8, torch.float8_e4m3fn]
every_number = pytest.mark.parametrize("number", NUMBERS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype)


def by(backend, function, *args, **options):
    with ck.use_backend(backend):
        return function(*args, **options)


def both(function, *args, **options):
    return (by(backend, function, *args, **options) for backend in ("triton", "reference"))


def assert_same_rows(ours, theirs):
    """Fails unless two results have the same bits, but for the sign of zero."""
    assert ours.values.dtype == theirs.values.dtype
    assert torch.equal(ours.values.float(), theirs.values.float())
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=0, atol=0, equal_nan=True)


# Rows -----------------------------------------------------------------------------------------------------


def special_rows(channels, dtype):
    """Returns rows of every kind: ties, zeros, tiny and huge numbers, NaN, infinities."""
    x = randn(24, channels)
    limits = torch.finfo(dtype)
    x[0] = 0
    x[1, 0] = torch.nan
    x[2, -1] = torch.inf
    x[3, 0] = -torch.inf
    x[4] *= limits.max / x[4].abs().max()
    x[5] *= limits.tiny
    x[6] *= 2.0**-117 / x[6].abs().max()
    x[7] *= 2.0**-118 / x[7].abs().max()
    x[8] = torch.linspace(-126.5, 126.5, channels).div(0.5).round().mul(0.5)  # ties, where 127 is the largest
    x[8, 0] = 127
    x[6, x[6].abs() < 2.0**-126] = 0  # which Triton's interpreter widens wrongly
    return x.to(dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which interprets
@every_number
@every_dtype
def test_rows_have_the_bits_of_the_reference(dtype, number):
    for channels in (1, 7, 64, 192, 100, 5000):
        x = special_rows(channels, dtype)
        assert_same_rows(*both(ck.quantize_rows, x, dtype=number))


def test_a_shift_is_added_in_the_dtype_of_x():
    x, shift = torch.full((1, 4), 1024.0), torch.tensor([0.2, 0.4, 0.6, 0.8])
    x, shift = x.to(DEVICE, torch.float16), shift.to(DEVICE)
    ours, theirs = both(ck.layer_norm_quantize, x, shift=shift)
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=1e-4, atol=0)
    assert ((ours.values - theirs.values).abs() <= 1).all()
    assert len(ours.values.unique()) == 2  # the sums are 1024 and 1025


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which interprets
@every_number
def test_rows_that_are_not_finite(number):
    x = randn(6, 40)
    x[1, 3], x[2, 0], x[4, 39] = torch.nan, torch.inf, -torch.inf
    for function in (ck.quantize_rows, ck.layer_norm_quantize, ck.gelu_quantize):
        ours = by("triton", function, x, dtype=number)
        assert ours.scales.isnan().flatten().tolist() == [False, True, True, False, True, False]
        assert not ours.values[[1, 2, 4]].float().any()
        assert ours.values[[0, 3, 5]].float().any(1).all()


def test_float8_needs_a_chip_that_has_it():
    call = backends.operators["quantize_rows"].bind(randn(2, 4), dtype=torch.float8_e4m3fn)
    with launching.recorded_launches(launching.Chip(80, 108)):
        assert "needs compute capability 8.9, got 8.0" in rounding.why_rows_unsupported(call)
        assert rounding.why_rows_unsupported(call._replace(dtype=torch.int8)) is None


@pytest.mark.parametrize(("capability", "converts_exactly"), [(89, False), (90, True), (100, True)])
def test_float8_is_rounded_once(capability, converts_exactly, monkeypatch):
    """The conversion of sm_89 rounds to float16 first: there the kernel rounds before it."""
    monkeypatch.setattr(machine, "INTERPRETING", False)
    x = torch.empty(8, 64, device="meta")
    with launching.recorded_launches(launching.Chip(capability, 1)) as launches:
        rounding.quantize_rows_forward(x, torch.float8_e4m3fn)
    assert launches[0].arguments["SPEC"].converts_exactly == converts_exactly
