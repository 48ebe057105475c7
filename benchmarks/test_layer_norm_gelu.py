"""LayerNorm, GELU and their fusions at CvT-13's shapes: PyTorch, compiled, the kernels where they run."""

import functools

import pytest

from . import suites

pytestmark = pytest.mark.benchmark(**suites.TIMER)

#: Operator and GELU.
CALLS = (
    ("layer_norm", None),
    ("add_layer_norm", None),
    ("gelu", "none"),
    ("gelu", "quick"),
    ("bias_gelu", "none"),
    ("bias_gelu", "quick"),
    ("layer_norm_gelu", "none"),
)


def tensors_moved(operator, backward):
    """Returns how many tensors of the shape of x must be read or written."""
    if operator == "add_layer_norm":
        return 8 if backward else 4
    return 5 if backward else 2


def make(operator, stage, dtype, images):
    """Returns the arguments, tokens first; an MLP has four times the channels."""
    (height, width), channels, class_tokens = suites.stages()[stage]
    channels *= 4 if operator in ("gelu", "bias_gelu") else 1
    tokens = height * width + class_tokens
    x, residual = (suites.randn(images, tokens, channels, dtype=dtype, seed=i) for i in (0, 1))
    weight, bias = (suites.randn(channels, dtype=dtype, seed=i) for i in (2, 3))
    return {
        "layer_norm": (x, weight, bias),
        "add_layer_norm": (x, residual, weight, bias),
        "gelu": (x,),
        "bias_gelu": (x, bias),
        "layer_norm_gelu": (x, weight, bias),
    }[operator]


def gradients(operator, x):
    """Returns gradients of the outputs."""
    outputs = 2 if operator == "add_layer_norm" else 1
    return [suites.randn(*x.shape, dtype=x.dtype, seed=4 + i) for i in range(outputs)]


@pytest.mark.parametrize("dtype", suites.dtypes(), ids=suites.short)
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("stage", suites.stages())
@pytest.mark.parametrize(
    ("name", "operator", "approximate"),
    # The compiled ones last.
    sorted(
        ((name, *call) for call in CALLS for name in suites.contenders(call[0])),
        key=lambda row: row[0] in ("compiled", "max_autotune"),
    ),
)
def test_layer_norm_gelu(benchmark, stage, direction, dtype, name, operator, approximate):
    keywords = {} if approximate is None else {"approximate": approximate}
    call, reference = (
        functools.partial(suites.implementation(operator, which), **keywords) for which in (name, "reference")
    )
    leaves = make(operator, stage, dtype, suites.batch())
    backward = direction == "forward+backward"
    case = f"{operator}{f' ({approximate})' if approximate else ''}, {stage}, {direction}"
    suites.compare(
        benchmark,
        {"suite": "layer_norm_gelu", "case": case, "contender": name},
        call, reference, leaves, gradients(operator, leaves[0]) if backward else None,
        moved=tensors_moved(operator, backward) * leaves[0].nbytes,
    )  # fmt: skip
