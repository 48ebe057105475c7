"""The CPU kernels of 8-bit linear layers: exact products, rounding as by the reference, what follows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cvt_kernels as ck
from cvt_kernels import machine, reference
from cvt_kernels.ops import weight_cache
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


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), max_size=3),
    channels=st.integers(1, 140),
    exponent=st.integers(-149, 126),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(("contiguous", "sliced", "transposed", "expanded", "offset")),
)
def test_rows_of_any_shape_and_strides(sizes, channels, exponent, dtype, layout):
    x = (torch.randn(*sizes, channels, dtype=torch.float64) * 2.0**exponent).to(dtype)
    x = {
        "contiguous": lambda t: t,
        "sliced": lambda t: torch.stack([t, t], -1)[..., 1],
        "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
        "expanded": lambda t: t[:1].expand(t.shape) if t.ndim > 1 else t,
        "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    }[layout](x)
    assert_same_rows(ck.quantize_rows(x), reference.quantize_rows(x))


# Linear layers --------------------------------------------------------------------------------------------


def arguments(dtype, rows=(3, 20), outputs=70, inputs=100):
    x, residual = (torch.randn(*rows, size, dtype=torch.float64).to(dtype) for size in (inputs, outputs))
    return x, *layer(outputs, inputs, dtype), residual


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 40), max_size=2),
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 200),
    dtype=st.sampled_from(DTYPES),
    quantized=st.booleans(),
    layout=st.sampled_from(("contiguous", "sliced", "transposed", "expanded", "part")),
)
def test_any_sizes_and_strides(rows, outputs, inputs, dtype, quantized, layout):
    x, weight, scales, bias, residual = arguments(dtype, rows, outputs, inputs)
    if quantized:
        x, x_scales = reference.quantize_rows(x)
    x = {
        "contiguous": lambda t: t,
        "sliced": lambda t: torch.stack([t, t], -1)[..., 1],
        "transposed": lambda t: t.mT.contiguous().mT if t.ndim > 1 else t,
        "expanded": lambda t: t[:1].expand(t.shape) if t.ndim > 1 else t,
        "part": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    }[layout](x)
    others = {"residual": residual.mT.contiguous().mT if residual.ndim > 1 else residual, "dtype": dtype}
    if quantized:
        got = ck.linear_int8(ck.QuantizedRows(x, x_scales), weight, scales, bias, **others)
        expected = reference.linear_int8(x, weight, scales, bias, x_scales=x_scales, **others)
    else:
        got = ck.linear_int8(x, weight, scales, bias, **others)
        expected = reference.linear_int8(x, weight, scales, bias, **others)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


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


def test_calls_that_the_kernels_do_not_serve():
    x, weight, scales, bias, residual = arguments(torch.float32)
    float8 = torch.float8_e4m3fn
    for call, reason in (
        (lambda: ck.linear_int8(x.double(), weight, scales), "serves float32, bfloat16 and float16"),
        (lambda: ck.quantize_rows(x.double()), "serves float32, bfloat16 and float16"),
        (lambda: ck.quantize_rows(x, dtype=float8), "rounds to int8 only, not to float8_e4m3fn"),
        (lambda: ck.linear_int8(x, weight.float().to(float8), scales), "multiplies int8 only, not float8"),
    ):
        with pytest.raises(ck.BackendUnavailable, match=reason):
            call()
    with torch.autocast("cpu", torch.bfloat16):
        assert ck.linear_int8(x, weight, scales, bias).dtype == torch.bfloat16
        with pytest.raises(ck.BackendUnavailable, match="adds a residual of the dtype of the result only"):
            ck.linear_int8(x, weight, scales, bias, residual=residual)


# The operators of the extension ---------------------------------------------------------------------------


def test_compiled_linear_layers_pack_their_weight_once(monkeypatch):
    torch.compiler.reset()
    x, weight, scales, bias, _ = arguments(torch.float32)
    packs, packed = [], weight_cache.packed
    monkeypatch.setattr(
        weight_cache,
        "packed",
        lambda weight, key, make, *others: packed(weight, key, lambda: packs.append(key) or make(), *others),
    )
    compiled = torch.compile(ck.linear_int8, fullgraph=True, backend="aot_eager", dynamic=False)
    outs = [function(x, weight, scales, bias) for function in (compiled, compiled, ck.linear_int8)]
    assert packs == ["linear_int8"]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_operators_check_what_they_would_read():
    ops = machine.load_extension() and torch.ops.cvt_kernels
    weight, scales, bias = layer(40, 100)  # AMX packs up to 64 inputs alike
    x, residual = torch.randn(4, 100), torch.randn(4, 40)
    values, x_scales = reference.quantize_rows(x)
    packed = ops.pack_linear_int8(weight)
    good = [x, None, packed, scales, bias, residual, "identity", torch.float32]
    ops.linear_int8_packed(*good)
    for place, wrong, message in (
        (0, x[:, :20], "packed: got .*, expected a weight that pack_linear_int8 packed"),
        (0, values, "x_scales: got .*, expected them for x of int8"),
        (0, x.double(), "x: got .*, expected float32, bfloat16 or float16"),
        (1, x_scales, "x_scales: got .*, expected them for x of int8"),
        (3, scales.double(), "weight_scale: got .*, expected float32 of the channels"),
        (4, bias[:39], "bias: got .*, expected float32 of the channels"),
        (5, residual.half(), "residual: got .*, expected float32 of the shape of x"),
        (5, residual[:3], r"residual: got .*, expected float32 of the shape of x, \("),
        (6, "relu", "activation: got 'relu'"),
        (7, torch.float64, "dtype: got .*, expected float32, bfloat16 or float16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.linear_int8_packed(*good[:place], wrong, *good[place + 1 :])
    with pytest.raises(RuntimeError, match=r"x_scales: got .*, expected a float32 number for each row"):
        ops.linear_int8_packed(values, x_scales[:3], *good[2:])
    with pytest.raises(
        RuntimeError, match=r"weight: got .*, expected int8 \(outputs, inputs\) of up to 65536 inputs"
    ):
        ops.pack_linear_int8(weight.float())
