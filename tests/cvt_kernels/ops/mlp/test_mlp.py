"""The public function ``layer_norm_mlp``, and its composition of other operators."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends, dispatch, reference
from tests.checks import assert_accurate, record_all_calls

GELUS = {
    "none": F.gelu,
    "tanh": nn.GELU(approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def make(rows=(2, 5), channels=12, hidden=20, dtype=torch.float64):
    """Returns x and the parameters, in the order of the operator."""
    shapes = (*rows, channels), (channels,), (channels,), (hidden, channels), (hidden,), (channels, hidden)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in (*shapes, (channels,))]


def formula(x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, gelu, shift=0, eps=1e-5):
    z = x + shift
    z = (z - z.mean(-1, keepdim=True)) / (z.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    hidden = gelu((z * norm_weight + norm_bias) @ fc1_weight.t() + fc1_bias)
    return x + hidden @ fc2_weight.t() + fc2_bias


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("approximate", GELUS)
def test_formula(approximate, backend):
    tensors, shift = make(), torch.randn(12, dtype=torch.float64)
    with ck.use_backend(backend):
        plain = ck.layer_norm_mlp(*tensors, approximate=approximate)
        shifted = ck.layer_norm_mlp(*tensors, approximate=approximate, shift=shift, eps=0.1)
    torch.testing.assert_close(plain, formula(*tensors, GELUS[approximate]))
    torch.testing.assert_close(shifted, formula(*tensors, GELUS[approximate], shift, 0.1))


def test_absent_parameters_are_one_and_zero():
    x, _, _, fc1, _, fc2, _ = make()
    ones, zeros, hidden_zeros = torch.ones(12).double(), torch.zeros(12).double(), torch.zeros(20).double()
    bare = ck.layer_norm_mlp(x, None, None, fc1, None, fc2, None)
    torch.testing.assert_close(bare, ck.layer_norm_mlp(x, ones, zeros, fc1, hidden_zeros, fc2, zeros))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_accuracy_of_the_composition(dtype):
    tensors = make((40,), 64, 256, dtype)
    exact = reference.layer_norm_mlp(*[t.double() for t in tensors])
    assert_accurate(ck.layer_norm_mlp(*tensors), reference.layer_norm_mlp(*tensors), exact)


def test_calls_the_operators_one_after_the_other():
    called = record_all_calls()
    backends.implementations["layer_norm_mlp"].pop("native")
    with ck.use_backend("native"):
        ck.layer_norm_mlp(*make())
    assert called == ["layer_norm", "linear_gelu", "linear_add"]


def test_autocast_keeps_the_dtype_of_the_residual():
    tensors = make((40,), 64, 256, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, same = ck.layer_norm_mlp(*tensors), reference.layer_norm_mlp(*tensors)
    assert out.dtype == torch.float32
    assert_accurate(out, same, reference.layer_norm_mlp(*[t.double() for t in tensors]))


def test_kinds_of_calls():
    tensors = make((2, 40), 64, 256, torch.float32)
    settings = {"eps": 1e-5, "approximate": "quick", "shift": None}
    asked = dispatch.question("layer_norm_mlp", *tensors, **settings)
    assert asked.endswith("quick, 64+ rows of 64 channels, 256 hidden")
    strided = tensors[0].transpose(0, 1)
    asked = dispatch.question("layer_norm_mlp", strided, *tensors[1:], **settings)
    assert asked.endswith("quick, 64+ rows of 64 channels, 256 hidden, strided")
