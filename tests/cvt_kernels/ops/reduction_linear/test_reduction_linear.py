"""The reduction with the layers of keys and values: one launch, refusals, PyTorch's modules."""

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels import backends, machine
from cvt_kernels.launch import launching
from cvt_kernels.ops import reduction_linear
from tests.checks import recorded_operators
from tests.contract.examples import made_of


def call_of(**settings):
    sizes = {"height": 9, "width": 14, "channels": 40, "kernel": 4, "outputs": 40}
    return made_of("reduction_linear", "triton", **sizes, **settings).call.record


def run(call):
    *arguments, eps = call
    with ck.use_backend("triton"):
        return reduction_linear.reduction_linear(*arguments, eps=eps)


@pytest.mark.parametrize("channels_last", [False, True])
def test_one_launch_reads_parameters_in_place(channels_last):
    call = call_of(channels_last=channels_last)
    with launching.recorded_launches(launching.Chip(90, 132)) as launches, recorded_operators() as operators:
        run(call)
    (launched,) = launches
    assert launched.arguments["w_ptr"] is call.weight
    layers = launched.arguments["linear_ptrs"]
    assert all(given is weight for given, (weight, _) in zip(layers, call.linears, strict=True))
    assert not [each for each in operators if "copy" in each or "clone" in each]


def test_layers_of_several_widths():
    call = call_of(dtype="float16")
    (weight, bias), other = call.linears
    call = call._replace(linears=((weight[:5], None if bias is None else bias[:5]), other))
    found = run(call)
    assert [each.shape[2] for each in found] == [5, 40]
    for ours, expected in zip(found, backends.operators["reduction_linear"].reference(call), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_it_is_the_modules_of_an_attention_with_a_reduction():
    conv, norm = nn.Conv2d(6, 6, 2, 2).double(), nn.LayerNorm(6).double()
    key, value = nn.Linear(6, 6).double(), nn.Linear(6, 6, bias=False).double()
    x = torch.randn(2, 35, 6, dtype=torch.float64, requires_grad=True)
    kept = norm(conv(x.transpose(1, 2).unflatten(2, (5, 7))).flatten(2).transpose(1, 2))
    layers = [(layer.weight, layer.bias) for layer in (key, value)]
    found = reduction_linear.reduction_linear(
        x, (5, 7), conv.weight, conv.bias, norm.weight, norm.bias, layers
    )
    for ours, layer in zip(found, (key, value), strict=True):
        torch.testing.assert_close(ours, layer(kept))
    parameters = [x, *conv.parameters(), *norm.parameters(), *key.parameters(), *value.parameters()]
    ours, theirs = (
        torch.autograd.grad(k.square().sum() + v.sum(), parameters, retain_graph=True)
        for k, v in (found, (key(kept), value(kept)))
    )
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.skipif(not machine.INTERPRETING, reason="the kernel is compiled, not interpreted")
@torch.no_grad()
def test_a_written_weight_counts():
    call = call_of(gradient="none")
    before = run(call)
    run(call)
    call.weight.mul_(2)
    call.linears[0][0].add_(1)
    after = run(call)
    assert not torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    for ours, expected in zip(after, backends.operators["reduction_linear"].reference(call), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=5e-2)
