"""The public operators of 8-bit numbers: what they compute, and what they refuse."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from cvt_kernels.records import LEAST, LIMITS, QuantizedRows

every_dtype = pytest.mark.parametrize("dtype", list(LIMITS))


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(outputs=5, inputs=8, dtype=torch.int8):
    values, scales = reference.quantize_rows(randn(outputs, inputs, seed=1), dtype=dtype)
    return values, scales.flatten(), randn(outputs, seed=2)


# What they compute ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rounded_half_to_even_by_their_largest_number(of):
    x = randn(3, 7, 33, dtype=of)
    values, scales = ck.quantize_rows(x)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (3, 7, 1))
    for row, numbers, scale in zip(x.flatten(0, 1), values.flatten(0, 1), scales.flatten(), strict=True):
        largest = row.float().abs().max()
        assert scale == largest / torch.tensor(127.0)
        expected = [round(number) for number in (row.float() * (torch.tensor(127.0) / largest)).tolist()]
        assert numbers.tolist() == expected
        assert numbers.abs().max() == 127


def test_ties_go_to_the_even_number():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    assert ck.quantize_rows(x).values.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@every_dtype
def test_rows_that_are_not_finite_or_tiny(dtype):
    x = torch.ones(6, 4)
    x[0, 1], x[1, 2], x[2, 3] = torch.nan, torch.inf, -torch.inf
    x[3] = 0
    x[4] = LEAST / 2
    values, scales = ck.quantize_rows(x, dtype=dtype)
    assert scales[:3].isnan().all()
    assert not values[:5].float().any()
    assert values[5].float().eq(LIMITS[dtype]).all()
    assert not scales[3:5].any()
    weight, weight_scale, bias = layer(inputs=4, dtype=dtype)
    out = ck.linear_int8(QuantizedRows(values, scales), weight, weight_scale, bias)
    assert out[:3].isnan().all()
    assert torch.equal(out[3:5], bias.expand(2, -1))
    assert out[5].isfinite().all()


@every_dtype
def test_norms_and_gelu_are_rounded_once(dtype):
    with ck.use_backend("reference"):
        x, vector = randn(4, 16, dtype=torch.bfloat16), randn(16, seed=3, dtype=torch.bfloat16)
        wide, row = x.float(), vector.float()
        norm = ck.quantize_rows(reference.layer_norm(wide, row, row), dtype=dtype)
        shifted = (x + vector).float()
        expected = {
            "norm": (ck.layer_norm_quantize(x, vector, vector, dtype=dtype), norm),
            "shift": (
                ck.layer_norm_quantize(x, shift=vector, eps=1e-3, dtype=dtype),
                ck.quantize_rows(reference.layer_norm(shifted, eps=1e-3), dtype=dtype),
            ),
            "gelu": (
                ck.gelu_quantize(x, vector, approximate="quick", dtype=dtype),
                ck.quantize_rows(reference.gelu(wide + row, approximate="quick"), dtype=dtype),
            ),
        }
    for rows, same in expected.values():
        assert torch.equal(rows.values.float(), same.values.float())
        assert torch.equal(rows.scales, same.scales)


@pytest.mark.parametrize("inputs", [1, 8, 1500])
def test_sums_of_integers_are_exact(inputs):
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-127, 128, (rows, inputs), generator=generator, dtype=torch.int8) for rows in (4, 6)
    )
    one = torch.ones(4, 1)
    out = ck.linear_int8(QuantizedRows(x, one), weight, torch.ones(6))
    assert torch.equal(out, (x.long() @ weight.long().T).float())


def test_nothing_is_rounded_in_float64():
    x, (weight, scale, bias) = randn(3, 8, dtype=torch.float64), layer()
    exact = torch.nn.functional.linear(x, weight.double() * scale.double()[:, None], bias.double())
    out = ck.linear_int8(x, weight, scale, bias.double())
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    rows = ck.quantize_rows(x)
    assert {rows.values.dtype, rows.scales.dtype} == {torch.float64}
    assert torch.equal(ck.linear_int8(rows, weight, scale, bias.double()), out)


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_of_results(of):
    x, (weight, scale, bias) = randn(3, 8, dtype=of), layer()
    rows = ck.quantize_rows(x)
    assert ck.linear_int8(x, weight, scale, bias.to(of)).dtype == of
    other = torch.float64 if of == torch.float64 else torch.float32
    assert ck.linear_int8(rows, weight, scale).dtype == other
    if of != torch.float64:
        assert ck.linear_int8(x, weight, scale, dtype=torch.float16).dtype == torch.float16
        residual = torch.ones(3, 5, dtype=torch.bfloat16)
        assert ck.linear_int8(rows, weight, scale, residual=residual).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert ck.linear_int8(x, weight, scale, bias).dtype == torch.bfloat16


# What they refuse, beside what test_arguments.py tries ----------------------------------------------------


@pytest.mark.parametrize("operator", ["quantize_rows", "layer_norm_quantize", "gelu_quantize"])
def test_wrong_rows(operator):
    with pytest.raises(ValueError, match="x: wants a gradient, expected none"):
        getattr(ck, operator)(randn(3, 8).requires_grad_())


def test_wrong_linear_layers():
    (weight, scale, bias), x = layer(), randn(3, 8)
    with pytest.raises(ValueError, match=r"^x: wants a gradient, expected none"):
        ck.linear_int8(x, weight, scale, bias.requires_grad_())
    with pytest.raises(TypeError, match="x: got values of dtype float8_e4m3fn"):
        ck.linear_int8(ck.quantize_rows(x, dtype=torch.float8_e4m3fn), weight, scale)
    assert ck.linear_int8(x[0], weight, scale).shape == (5,)


def test_more_inputs_than_sums_can_hold():
    weight = torch.zeros(1, 2**16 + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"^weight: got 65537 inputs, expected at most 65536"):
        ck.linear_int8(torch.ones(1, 2**16 + 1), weight, torch.ones(1))
