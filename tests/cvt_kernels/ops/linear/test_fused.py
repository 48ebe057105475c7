"""The linear layers with what follows them: their checks, and their composition of other operators."""

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends
from tests.checks import assert_accurate, record_calls

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def make(dtype=torch.float32):
    """Returns x, weight, bias and residual."""
    shapes = (2, 5, 8), (6, 8), (6,), (2, 5, 6)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_what_their_formulas_say(dtype):
    x, weight, bias, residual = make(dtype)
    wide = [t.double() for t in (x, weight, bias, residual)]
    h = wide[3] + F.linear(*wide[:3])
    assert_accurate(
        ck.linear_gelu(x, weight, bias), F.gelu(F.linear(x, weight, bias)), F.gelu(F.linear(*wide[:3]))
    )
    same = residual + F.linear(x, weight, bias)
    assert_accurate(ck.linear_add(x, weight, bias, residual), same, h)
    for shift in (None, bias):
        ours = ck.linear_add_layer_norm(x, weight, bias, residual, bias, None, shift=shift)
        shifted, exact = (same, h) if shift is None else (same + shift, h + shift.double())
        assert_accurate(ours[0], same, h)
        assert_accurate(
            ours[1], F.layer_norm(shifted, (6,), bias), F.layer_norm(exact, (6,), bias.double()), floor=2
        )


def test_the_composition_takes_the_backends_of_its_parts():
    x, weight, bias, residual = make()
    added, activated = record_calls("add_layer_norm"), record_calls("bias_gelu")
    with ck.use_backend("native", "reference"):
        composed = backends.implementations["linear_gelu"]["composed"].function
        torch.testing.assert_close(
            composed(backends.operators["linear_gelu"].bind(x, weight, bias, approximate="tanh")),
            F.gelu(F.linear(x, weight, bias), approximate="tanh"),
        )
        ck.linear_add_layer_norm(x, weight, bias, residual)
    assert len(activated) == 1
    assert len(added) == 1


def test_kinds_of_calls():
    """Their words name what changes the kernel, and a sample keeps x and the residual together."""
    x, weight, bias, residual = make()
    described = backends.operators["linear_add"]
    words = described.kind(described.bind(x, weight, bias, residual, inplace=True))
    assert words == "4+ rows, 8 to 6 channels, in place"
    fused = backends.operators["linear_gelu"]
    words = fused.kind(fused.bind(x, weight, None, approximate="none"))
    assert words == "exact, 4+ rows, 8 to 6 channels, without bias"
    many = [t.repeat(2**22, 1, 1).to("meta") if t.ndim == 3 else t for t in (x[:1, :1], weight, bias)]
    sample = described.sample(1, described.bind(*many, many[0][..., :6]))
    assert sample.x.shape[0] == sample.residual.shape[0] < 2**22
