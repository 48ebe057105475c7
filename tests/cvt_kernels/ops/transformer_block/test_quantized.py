"""transformer_block with quantized layers: any of the six."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import assert_accurate, needs_extension, not_built
from tests.cvt_kernels.ops.transformer_block.calls import (
    call,
    decibels,
    far_from_ties,
    in_float64,
    is_far_from_ties,
    make,
    pyramid,
    with_quantized,
)

SERVING = ("reference", "composed", "cpu") if not not_built() else ("reference", "composed")
every_backend = pytest.mark.parametrize("backend", SERVING)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def check(made):
    """Compares calls with the reference, and in float64, where nothing is rounded, what computes in it."""
    x, grid, block = arguments = far_from_ties(made)
    same, exact = reference.transformer_block(*arguments), reference.transformer_block(*in_float64(arguments))
    for backend in SERVING:
        out, stream = call(backend, arguments), x.clone()
        assert torch.equal(call(backend, arguments), out)
        assert call(backend, (stream, grid, block), inplace=True) is stream
        assert torch.equal(stream, out)
        assert decibels(same - x, out - x) > 55
        assert decibels(exact - x, out - x) > 10
        assert_accurate(out, same, exact, floor=4)
        if backend != "cpu":
            assert decibels(exact, call(backend, in_float64(arguments))) > 250


# Values ---------------------------------------------------------------------------------------------------


CASES = {
    "exact": lambda: with_quantized(make(class_tokens=1)),
    "tanh": lambda: with_quantized(make(class_tokens=1, approximate="tanh")),
    "quick": lambda: with_quantized(make(approximate="quick")),
    "q": lambda: with_quantized(make(channels=48, class_tokens=1), (0,)),
    "k v proj": lambda: with_quantized(make(channels=48, class_tokens=1), (1, 2, 3)),
    "fc1": lambda: with_quantized(make(channels=48, class_tokens=1), (4,)),
    "fc2": lambda: with_quantized(make(channels=48, class_tokens=1), (5,)),
    "proj fc1": lambda: with_quantized(make(channels=48, class_tokens=1), (3, 4)),
    "one token": lambda: with_quantized(make(1, (1, 1), 5, 1, 1, bias=False)),
    "one column": lambda: with_quantized(make(3, (7, 1), 21, 7)),
    "wide heads": lambda: with_quantized(make(2, (3, 8), 20, 2, strides=(1, 3, 3), width=36)),
    "hidden rows in groups": lambda: with_quantized(make(1, (12, 11), 70, 2, 1)),
    "SegFormer": lambda: with_quantized(pyramid()),
    "PVT": lambda: with_quantized(pyramid(convolves=False, approximate="tanh")),
    "no reduction": lambda: with_quantized(pyramid(ratio=0, grid=(9, 14), channels=40, heads=5)),
    "q k": lambda: with_quantized(pyramid(channels=48), (0, 1)),
    "v proj fc1": lambda: with_quantized(pyramid(channels=48), (2, 3, 4)),
    "fc1, no convolution": lambda: with_quantized(pyramid(channels=48, convolves=False), (4,)),
    "fc2, many hidden": lambda: with_quantized(pyramid(channels=48, hidden=530), (5,)),
    "a wide row": lambda: with_quantized(pyramid(1, (3, 130), 8, 2, hidden=20)),
    "few rows of many hidden": lambda: with_quantized(pyramid(3, (12, 5), 20, 2, hidden=3000)),
    "no bias": lambda: with_quantized(pyramid(bias=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    check(CASES[name])


OF_16_BITS = {
    "CvT": lambda dtype: with_quantized(make(class_tokens=1, dtype=dtype)),
    "CvT, tanh": lambda dtype: with_quantized(make(approximate="tanh", dtype=dtype)),
    "CvT, proj fc1": lambda dtype: with_quantized(make(channels=48, dtype=dtype), (3, 4)),
    "CvT, k fc2": lambda dtype: with_quantized(make(channels=35, heads=5, dtype=dtype), (1, 5)),
    "SegFormer": lambda dtype: with_quantized(pyramid(dtype=dtype)),
    "PVT": lambda dtype: with_quantized(pyramid(dtype=dtype, convolves=False)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OF_16_BITS)
def test_16_bits(name, dtype):
    x, grid, block = arguments = OF_16_BITS[name](dtype)
    exact = reference.transformer_block(*in_float64(arguments))
    for backend in SERVING:
        out, stream = call(backend, arguments), x.clone()
        assert call(backend, (stream, grid, block), inplace=True) is stream
        assert torch.equal(stream, out)
        assert out.dtype == dtype
        assert decibels(exact, out) > 28


@every_backend
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_image(backend, bad):
    x, grid, block = with_quantized(make(batch=3, class_tokens=1))
    broken = x.clone()
    broken[1, 3, 0] = bad
    out, whole = call(backend, (broken, grid, block)), call(backend, (x, grid, block))
    assert torch.equal(out[[0, 2]], whole[[0, 2]])
    assert out[1].isnan().all()  # every query attends to a key that is NaN


@needs_extension
def test_cpu_leaves_floats_of_8_bits_to_the_composition():
    arguments = with_quantized(make(class_tokens=1), dtype=torch.float8_e4m3fn)
    assert decibels(reference.transformer_block(*in_float64(arguments)), call("composed", arguments)) > 25
    with pytest.raises(ck.BackendUnavailable, match="of int8 only"):
        call("cpu", arguments)


@needs_extension
@pytest.mark.parametrize("field", ["weight", "weight_scale", "bias"])
@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("made", [make, pyramid])
def test_changed_layers_are_packed_anew(made, layer, field):
    for _ in range(100):
        x, _, block = arguments = with_quantized(made())
        before = call("cpu", arguments)
        tensor = getattr(block.layers()[layer], field)
        tensor.copy_(tensor // 2 if field == "weight" else tensor * 3)
        if is_far_from_ties(arguments):
            break
    out, expected = call("cpu", arguments), reference.transformer_block(*arguments)
    assert decibels(expected - x, out - x) > 55
    assert (layer, field) == (1, "bias") or decibels(expected - x, before - x) < 45
