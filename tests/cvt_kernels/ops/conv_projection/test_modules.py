"""The projection of live modules: changes that calls like an earlier one notice."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import cvt_kernels as ck
from cvt_kernels.ops.conv_projection.modules import project

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRID, CHANNELS = (2, 3), 16


def make(class_tokens=1, dtype=torch.float32, strides=(1,)):
    """Returns tokens, and the convolution and BatchNorm of every branch in evaluation."""
    torch.manual_seed(1)
    branches = []
    for stride in strides:
        conv = nn.Conv2d(CHANNELS, CHANNELS, 3, stride, 1, groups=CHANNELS, bias=False)
        bn = nn.BatchNorm2d(CHANNELS)
        for tensor in (bn.weight, bn.bias, bn.running_mean):
            nn.init.normal_(tensor)
        branches.append((conv.to(DEVICE, dtype), bn.to(DEVICE, dtype).eval()))
    x = torch.randn(2, class_tokens + GRID[0] * GRID[1], CHANNELS, device=DEVICE, dtype=dtype)
    return x, branches


def assert_served(x, branches):
    """Compares a call of the Triton kernels, where they serve, with the reference; returns its outputs."""
    with ck.use_backend("reference"):
        expected = project(x, GRID, copy.deepcopy(branches))
    with ck.use_backend("triton", "reference"):
        outs = project(x, GRID, branches)
    for ours, theirs in zip(outs, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.is_contiguous()
        precise = theirs.dtype in (torch.float32, torch.float64)
        torch.testing.assert_close(
            ours, theirs, rtol=1e-4 if precise else 2e-2, atol=1e-4 if precise else 2e-2
        )
    return outs


def written_in_place(conv, bn):
    conv.weight.mul_(2)
    bn.running_var.add_(1)


def loaded_state(conv, bn):
    bn.load_state_dict({name: tensor + 1 for name, tensor in bn.state_dict().items()})


def computed_weight(conv, bn):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(conv, "weight", Doubled())


def other_dilation(conv, bn):
    conv.dilation, conv.padding = (2, 2), (2, 2)


def other_size(conv, bn):
    conv.weight = nn.Parameter(torch.randn(CHANNELS, 1, 1, 1, device=DEVICE))
    conv.padding = (0, 0)


def strided_weight(conv, bn):
    conv.weight.data = torch.randn(3, 3, 1, CHANNELS, device=DEVICE).permute(3, 2, 1, 0)


def unaligned_weight(conv, bn):
    flat = torch.randn(conv.weight.numel() + 1, device=DEVICE)
    conv.weight.data = flat[1:].view_as(conv.weight)


CHANGES = {
    "replaced parameter": lambda conv, bn: setattr(
        conv, "weight", nn.Parameter(torch.randn_like(conv.weight))
    ),
    "replaced data": lambda conv, bn: setattr(bn.weight, "data", torch.randn_like(bn.weight)),
    "replaced buffer": lambda conv, bn: setattr(bn, "running_mean", torch.randn_like(bn.running_mean)),
    "written in place": written_in_place,
    "loaded state": loaded_state,
    "computed weight": computed_weight,
    "other eps": lambda conv, bn: setattr(bn, "eps", 0.5),
    "no scale": lambda conv, bn: setattr(bn, "weight", None),
    "other stride": lambda conv, bn: setattr(conv, "stride", (2, 2)),
    "other dilation": other_dilation,
    "other size": other_size,
    "strided weight": strided_weight,
    "unaligned weight": unaligned_weight,
    "training again": lambda conv, bn: bn.train(),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_modules_are_noticed(change):
    x, branches = make()
    assert_served(x, branches)
    before = assert_served(x, branches)
    change(*branches[0])
    for _ in range(2):
        after = assert_served(x, branches)
        assert after[0].shape != before[0].shape or not torch.allclose(after[0], before[0])


@torch.no_grad()
@pytest.mark.parametrize(
    ("which", "name", "value", "message"),
    [
        (0, "bias", lambda: nn.Parameter(torch.zeros(CHANNELS)), "has a bias"),
        (0, "padding_mode", lambda: "reflect", "padding_mode is 'reflect'"),
        (0, "stride", lambda: (1.0, 1.0), "stride: got 1.0"),  # equal to what was right
        (0, "weight", lambda: nn.Parameter(torch.zeros(CHANNELS, 1, 3, 3, device="meta")), "is on meta"),
        (1, "bias", lambda: nn.Parameter(torch.zeros(8, device=DEVICE)), "bn_bias: got shape"),
        (1, "running_mean", lambda: torch.zeros(CHANNELS, device=DEVICE).double(), "running_mean: has dtype"),
        (1, "eps", lambda: 0.0, "eps: got 0.0"),
    ],
)
def test_wrong_changes_raise_as_if_there_had_been_no_call_before(which, name, value, message):
    x, branches = make()
    assert_served(x, branches)
    module = branches[0][which]
    previous = getattr(module, name)
    setattr(module, name, value())
    with ck.use_backend("triton"), pytest.raises((TypeError, ValueError), match=message):
        project(x, GRID, branches)
    setattr(module, name, previous)
    with ck.use_backend("triton"), pytest.raises(TypeError, match="grid: got"):
        project(x, (2.0, 3.0), branches)
    assert_served(x, branches)
