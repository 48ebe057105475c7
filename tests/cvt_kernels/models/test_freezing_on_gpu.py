"""Frozen stages as on a GPU, in float and with LinearInt8: by the reference, and in Triton's interpreter."""

import copy
import itertools

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.models import served as served_module
from cvt_kernels.models import stages
from cvt_kernels.ops.transformer_block import composed
from tests.checks import assert_accurate
from tests.cvt_kernels.models.served import decibels, frozen, noted_backends
from tests.cvt_kernels.models.test_freezing_quantized import LEAST_DECIBELS, quantized, small
from tests.upstream import images, in_float64, logits, microsoft

#: The layers of a block, by the ends of their names in Microsoft's model.
QKV, PROJ, FC1, FC2 = ("proj_q", "proj_k", "proj_v"), ("attn.proj",), ("fc1",), ("fc2",)
#: Every mixture of quantized layers and others.
KEPT = [sum(parts, ()) for n in range(5) for parts in itertools.combinations((QKV, PROJ, FC1, FC2), n)]


@pytest.fixture(autouse=True)
def _folded_for_a_gpu(monkeypatch, without_gradients):
    """Lets the biases be in the stream from its start."""
    monkeypatch.setattr(served_module, "fold", lambda parts, device_type: stages.fold(parts, "cuda"))


def small_model(**settings):
    """Returns a small model whose biases and layer scales are random, of narrow stages and wide ones."""
    model = small((16, 64, 80), (1, 2, 5), **settings)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(torch.randn_like(parameter))
    return model


def noting(name, function, called):
    """Returns a function that notes its name when it is called."""

    def call(*args, **kwargs):
        called.add(name)
        return function(*args, **kwargs)

    return call


def note_operators(monkeypatch, called):
    """Notes the names of the operators that the embedding and the blocks of stages call."""
    for module in (stages, composed):
        for name in set(backends.operators) & set(vars(module)) - {"transformer_block"}:
            monkeypatch.setattr(module, name, noting(name, getattr(module, name), called))


def operators_launched(kept):
    """Returns the operators of a narrow and a wide stage on a GPU, where these layers are not quantized."""
    qkv, proj, fc1, fc2 = (layers[0] in kept for layers in (QKV, PROJ, FC1, FC2))
    names = {"conv_embedding", "layer_norm", "attention", "conv_linear" if qkv else "conv_projection"}
    if not all((qkv, proj, fc1, fc2)):
        names.add("linear_int8")
    if fc1 and fc2:
        names |= {"layer_norm_mlp", "linear_gelu"}
    if not fc1:
        names.add("layer_norm_quantize")
    if not fc2:
        names.add("gelu_quantize")
    if proj and fc1:
        names.add("linear_add_layer_norm")
    if fc2 or (proj and not fc1):
        names.add("linear_add")
    return names


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: "+".join(kept) or "none")
def test_mixed_layers_are_exact_where_nothing_is_rounded(kept, monkeypatch):
    """Checks in float64, where rounding cannot hide a bias that is added twice or not at all."""
    called = set()
    note_operators(monkeypatch, called)
    own = quantized(small_model(layer_scale=0.3), kept).double()
    fused = ck.accelerate(copy.deepcopy(own), freeze=True)
    x = images(2, dtype=torch.float64)
    with ck.use_backend("reference"):
        torch.testing.assert_close(fused(x), own(x), rtol=1e-5, atol=1e-6)  # folded scales are float32
    assert called - {"linear"} == operators_launched(kept)


def test_stages_whose_blocks_are_one_operator(monkeypatch):
    """Checks in float64 with random biases, as above; the last block computes the class token alone."""
    called = set()
    note_operators(monkeypatch, called)
    monkeypatch.setattr(stages, "_are_one_operator", lambda weight, blocks: weight.shape[0] > 64)
    own = small_model(layer_scale=0.3).double().eval()
    fused = ck.accelerate(copy.deepcopy(own), freeze=True)
    x = images(2, dtype=torch.float64)
    with ck.use_backend("reference"):
        for _ in range(2):
            torch.testing.assert_close(fused(x), own(x), rtol=1e-9, atol=1e-9)
    assert "transformer_blocks" in called


BY_TRITON = {"conv_embedding", "attention"}
BY_TRITON_IN_FLOAT = {"conv_linear", "linear_add", "layer_norm_mlp", "linear_add_layer_norm", "linear_gelu"}
BY_TRITON_QUANTIZED = {"conv_projection", "layer_norm_quantize", "gelu_quantize"}


@pytest.mark.parametrize("is_quantized", [False, True])
def test_tritons_kernels_serve_whole_stages(is_quantized, served):
    own = microsoft(embed_dims=(16, 32, 80), num_heads=(1, 2, 5)).eval()
    own = quantized(own) if is_quantized else own
    fused, x = frozen(own), images(1, 48, 32)
    with noted_backends() as asked, ck.use_backend("triton", "cpu", "reference"):
        out = logits(fused(x))
    by_triton = BY_TRITON | (BY_TRITON_QUANTIZED if is_quantized else BY_TRITON_IN_FLOAT)
    others = {("layer_norm", "cpu"), ("linear_int8", "cpu") if is_quantized else ("linear", "reference")}
    assert set(asked) == {(operator, "triton") for operator in by_triton} | others
    assert len(served) == 3
    if is_quantized:
        # A number of float32 that is another in its last bit may be rounded to another one of 8 bits.
        assert decibels(own(x), out) >= LEAST_DECIBELS
    else:
        assert_accurate(out, own(x), in_float64(copy.deepcopy(own))(x.double()))
