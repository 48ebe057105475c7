"""The CPU kernels of 8-bit linear layers: exact products, rounding as by the reference, what follows."""

import math

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import needs_extension, recorded_operators

pytestmark = needs_extension
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _cpu():
    with ck.use_backend("cpu"), torch.no_grad():
        yield


def numbers(*shape):
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def layer(outputs, inputs, dtype=torch.float32):
    """Returns the weight, its scales and the bias of a layer whose results are of ordinary size."""
    weight, scales = reference.quantize_rows(torch.randn(outputs, inputs) / inputs**0.5)
    return weight, scales.flatten(), torch.randn(outputs, dtype=torch.float64).to(dtype)


def assert_same_rows(got, expected):
    assert torch.equal(got.values, expected.values)
    torch.testing.assert_close(got.scales, expected.scales, rtol=0, atol=0, equal_nan=True)


# Every instruction set ------------------------------------------------------------------------------------


def check_products(rows, weight):
    exact = (rows.long() @ weight.long().t()).float()  # rounded once
    quantized = ck.QuantizedRows(rows, torch.ones(rows.shape[0], 1))
    assert torch.equal(ck.linear_int8(quantized, weight, torch.ones(weight.shape[0])), exact)


@torch.no_grad()
def check_integers():
    """Checks exact products and rounding, for ``tests/contract/test_sizes.py`` on every instruction set."""
    torch.manual_seed(0)
    special = torch.tensor([math.nan, math.inf, -math.inf, 3e38, 1e-38, 1e-45, 2.0**-117, 0.0])
    with ck.use_backend("cpu"):
        for rows, outputs, inputs in (
            (1, 1, 1), (3, 33, 2), (5, 31, 63), (12, 64, 64), (13, 65, 65), (33, 32, 130), (40, 97, 384)
        ):  # fmt: skip
            check_products(numbers(rows, inputs), numbers(outputs, inputs))
        for inputs in (64, 129, 65536):
            extremes = torch.tensor([127, -127, 0], dtype=torch.int8)[:, None].expand(3, inputs)
            check_products(extremes.contiguous(), extremes.repeat(12, 1))
        for inputs in (1, 7, 16, 33, 64, 97, 384):
            for dtype in DTYPES:
                x = torch.randn(8, inputs).to(dtype)
                x[:, 0] = special.to(dtype)
                x[4:, 1:] *= 2.0**-125
                for each in (x, x.roll(1, 1)):
                    assert_same_rows(ck.quantize_rows(each), reference.quantize_rows(each))
        ties = torch.cat([torch.arange(-127, 127).add(0.5), torch.tensor([127.0])])[None]
        assert_same_rows(ck.quantize_rows(ties), reference.quantize_rows(ties))


def test_products_are_exact_and_rows_rounded_as_by_the_reference():
    check_integers()


# Rows -----------------------------------------------------------------------------------------------------


# Linear layers --------------------------------------------------------------------------------------------


def arguments(dtype, rows=(3, 20), outputs=70, inputs=100):
    x, residual = (torch.randn(*rows, size, dtype=torch.float64).to(dtype) for size in (inputs, outputs))
    return x, *layer(outputs, inputs, dtype), residual


def test_rows_that_are_not_finite_are_nan_and_no_others():
    x, weight, scales, bias, residual = arguments(torch.float32, (60,))
    x[3, 5], x[17, 99], x[40, 0], x[50] = float("nan"), float("inf"), -float("inf"), 0
    for approximate in (None, "none", "tanh", "quick"):
        out = ck.linear_int8(x, weight, scales, bias, approximate=approximate, residual=residual)
        assert out.isnan().all(1).nonzero().flatten().tolist() == [3, 17, 40]
        assert out.isnan().sum() == 3 * 70
    assert torch.equal(ck.linear_int8(x[50:51], weight, scales, bias), bias[None])


def test_weights_of_other_strides():
    x, weight, scales, bias, _ = arguments(torch.float32)
    expected = ck.linear_int8(x, weight, scales, bias)
    for view in (weight.t().contiguous().t(), torch.stack([weight, weight], -1)[..., 1]):
        assert torch.equal(ck.linear_int8(x, view, scales, bias), expected)


def test_a_weight_is_packed_once():
    x, weight, scales, bias, _ = arguments(torch.float32)
    with recorded_operators() as called:
        for _ in range(3):
            ck.linear_int8(x, weight, scales, bias)
    assert called.count("cvt_kernels.pack_linear_int8.default") == 1
    assert called[-2:] == ["cvt_kernels.linear_int8_packed.default"] * 2  # nothing else passes over memory


def test_autocast():
    x, weight, scales, bias, residual = arguments(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert ck.linear_int8(x, weight, scales, bias).dtype == torch.bfloat16
        with pytest.raises(ck.BackendUnavailable, match="adds a residual of the dtype of the result only"):
            ck.linear_int8(x, weight, scales, bias, residual=residual)
