"""The linear layers of CvT-13: ``F.linear``, PyTorch's other ways to the same product on a CPU, compiled.

Those of 8-bit integers (``int8``) stand beside them, with everything that makes such integers of x.
"""

import pytest

from cvt_kernels import reference

from . import suites

pytestmark = pytest.mark.benchmark(**suites.TIMER)

LAYERS = {"projection": (1, 1), "fc1": (1, 4), "fc2": (4, 1)}  # channels in and out, in units of C


def make(layer, stage, dtype, images):
    """Returns x, weight and bias of ordinary size, and the gradient of the output."""
    (height, width), channels, class_tokens = suites.stages()[stage]
    fan_in, fan_out = (factor * channels for factor in LAYERS[layer])
    rows = images, height * width + class_tokens
    shapes = enumerate(((*rows, fan_in), (fan_out, fan_in), (fan_out,), (*rows, fan_out)))
    x, weight, bias, dout = (suites.randn(*shape, dtype=dtype, seed=i) for i, shape in shapes)
    return x, weight / fan_in**0.5, bias, dout


@pytest.mark.parametrize("dtype", suites.dtypes(), ids=suites.short)
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("stage", suites.stages())
@pytest.mark.parametrize("name", suites.contenders("linear"))
def test_linear(benchmark, stage, layer, direction, dtype, name):
    *leaves, dout = make(layer, stage, dtype, suites.batch())
    x, weight, _ = leaves
    douts = [dout] if direction == "forward+backward" else None
    call, reference = (suites.implementation("linear", which) for which in (name, "reference"))
    outputs = suites.served(call, leaves, douts)
    exact = [t.double() for t in leaves], douts and [dout.double()]
    suites.check(outputs, suites.results(reference, leaves, douts), suites.results(reference, *exact), dtype)

    passes = 1 if douts is None else 3
    once = x.nbytes + weight.nbytes + dout.nbytes
    suites.record(
        benchmark,
        lambda: suites.results(call, leaves, douts),
        {
            "suite": "linear",
            "case": f"{layer} {weight.shape[1]}→{weight.shape[0]}, {stage}, {direction}",
            "contender": name,
            "dtype": suites.short(dtype),
            "batch": x.shape[0],
        },
        moved=passes * once,
        operations=passes * 2 * x[..., 0].numel() * weight.numel(),
    )


@pytest.mark.parametrize("dtype", suites.dtypes(), ids=suites.short)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("stage", suites.stages())
@pytest.mark.parametrize("name", suites.contenders("linear_int8"))
def test_linear_int8(benchmark, stage, layer, dtype, name):
    x, weight, bias, out = make(layer, stage, dtype, suites.batch())
    values, scales = reference.quantize_rows(weight)
    leaves = x, values, scales.flatten(), bias
    call, same = (suites.implementation("linear_int8", which) for which in (name, "reference"))
    exact = x.double(), values, scales.flatten().double(), bias.double()
    outputs = suites.served(call, leaves)
    suites.check(outputs, suites.results(same, leaves), suites.results(same, exact), dtype)

    suites.record(
        benchmark,
        lambda: suites.results(call, leaves),
        {
            "suite": "linear",
            "case": f"{layer} {weight.shape[1]}→{weight.shape[0]}, {stage}, forward",
            "contender": f"int8 {name}",
            "dtype": suites.short(dtype),
            "batch": x.shape[0],
        },
        moved=x.nbytes + values.nbytes + out.nbytes,
        operations=2 * x[..., 0].numel() * weight.numel(),
    )
