"""Fused forwards of blocks whose linear layers are quantized, and what coverage and verify say of them."""

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from tests.checks import record_all_calls
from tests.upstream import huggingface, images, logits, microsoft, ours, with_all_tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

MAKERS = [ours, huggingface, microsoft]

#: The operators of one quantized block, in the order in which they are called.
BLOCK = [
    *["layer_norm", "conv_projection", *3 * ["linear_int8"], "attention", "linear_int8"],
    *["layer_norm_quantize", *2 * ["linear_int8"]],
]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def quantized(request):
    model = ck.accelerate(with_all_tokens(request.param().eval()), freeze=False)
    ck.quantize(model)
    return model


def first_layer(model):
    """Returns the first linear layer of the first MLP, and the module that is called with its input."""
    names = ("mlp.fc1", "intermediate.dense")
    path = next(path for path, _ in model.named_modules() if path.endswith(names))
    return model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])


@torch.no_grad()
def run(model):
    return logits(model(images(2, 32, 48)))


def called(model):
    calls = record_all_calls()
    with ck.use_backend("cpu", "reference"):
        run(model)
    return calls


def test_blocks_call_the_operators_of_8_bit_numbers(quantized):
    calls = called(quantized)
    blocks = sum(call == "attention" for call in calls)
    assert calls[1 : 1 + len(BLOCK)] == BLOCK
    assert calls.count("linear_int8") == 6 * blocks
    assert calls.count("layer_norm_quantize") == blocks
    assert not any(call in ("add_layer_norm", "linear", "gelu") for call in calls)


def test_mixed_blocks(quantized):
    layer, caller = first_layer(quantized)
    name = next(name for name, child in caller.named_children() if child is layer)
    setattr(caller, name, layer.float_layer)
    calls = called(quantized)
    assert calls.count("add_layer_norm") == 1
    assert calls.count("linear_gelu") + calls.count("gelu") >= 1


def test_an_mlp_may_be_anything():
    model = ours().eval()
    model.stage0.blocks[0].mlp = nn.Identity()
    run(model)
    reason = "is not built as upstream's: 'Identity' object has no attribute 'fc1'"
    assert ck.coverage(model)[1].reason == reason


def test_traces_hold_quantized_layers():
    model = ours().eval()
    ck.quantize(model)
    x = images(2, 32, 48)
    with torch.no_grad():
        traced = torch.jit.trace(model, x, check_trace=False)
        torch.testing.assert_close(traced(x[:1]), model(x[:1]), rtol=0.02, atol=0.02)
        exported = torch.export.export(model, (x,))
        torch.testing.assert_close(exported.module()(x), model(x), rtol=0.02, atol=0.02)
