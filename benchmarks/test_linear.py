"""The linear layers of CvT-13: ``F.linear``, PyTorch's other ways to the same product on a CPU, compiled.

Those of 8-bit integers (``int8``) stand beside them, with everything that makes such integers of x.
"""

import pytest

from cvt_kernels.reference import quantize_rows

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


def case_of(layer, weight, stage, direction):
    return f"{layer} {weight.shape[1]}→{weight.shape[0]}, {stage}, {direction}"


@pytest.mark.parametrize("dtype", suites.dtypes(), ids=suites.short)
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("stage", suites.stages())
@pytest.mark.parametrize("name", suites.contenders("linear"))
def test_linear(benchmark, stage, layer, direction, dtype, name):
    *leaves, dout = make(layer, stage, dtype, suites.batch())
    x, weight, _ = leaves
    call, reference = (suites.implementation("linear", which) for which in (name, "reference"))
    passes = 1 if direction == "forward" else 3
    suites.compare(
        benchmark,
        {"suite": "linear", "case": case_of(layer, weight, stage, direction), "contender": name},
        call, reference, leaves, None if direction == "forward" else [dout],
        moved=passes * (x.nbytes + weight.nbytes + dout.nbytes),
        operations=passes * 2 * x[..., 0].numel() * weight.numel(),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", suites.dtypes(), ids=suites.short)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("stage", suites.stages())
@pytest.mark.parametrize("name", suites.contenders("linear_int8"))
def test_linear_int8(benchmark, stage, layer, dtype, name):
    x, weight, bias, out = make(layer, stage, dtype, suites.batch())
    values, scales = quantize_rows(weight)
    leaves = x, values, scales.flatten(), bias
    call, reference = (suites.implementation("linear_int8", which) for which in (name, "reference"))
    exact = x.double(), values, scales.flatten().double(), bias.double()
    suites.compare(
        benchmark,
        {"suite": "linear", "case": case_of(layer, weight, stage, "forward"), "contender": f"int8 {name}"},
        call, reference, leaves, exact=suites.results(reference, exact),
        moved=x.nbytes + values.nbytes + out.nbytes,
        operations=2 * x[..., 0].numel() * weight.numel(),
    )  # fmt: skip
