"""MLPs: PyTorch's modules, sums with factors, and what is saved for the backward."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import reference

GELUS = {"none": F.gelu, "tanh": nn.GELU(approximate="tanh"), "quick": lambda x: x * torch.sigmoid(1.702 * x)}


def make(rows=(2, 5), channels=12, hidden=20, dtype=torch.float64):
    """Returns x and the parameters, in the order of the operator."""
    shapes = (*rows, channels), (channels,), (channels,), (hidden, channels), (hidden,), (channels, hidden)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in (*shapes, (channels,))]


class _QuickGELU(nn.Module):
    def forward(self, x):
        return GELUS["quick"](x)


@pytest.mark.parametrize("approximate", GELUS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("leading", [(3,), (2, 5), (0, 4)], ids=str)
@torch.no_grad()
def test_the_reference_is_what_pytorchs_modules_compute(approximate, bias, shifted, affine, leading):
    x = torch.randn(*leading, 7, dtype=torch.float64)
    shift = torch.randn(7, dtype=torch.float64) if shifted else None
    norm = nn.LayerNorm(7, 1e-3, elementwise_affine=affine, dtype=torch.float64)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    gelu = _QuickGELU() if approximate == "quick" else nn.GELU(approximate)
    mlp = nn.Sequential(nn.Linear(7, 13, bias), gelu, nn.Linear(13, 7, bias)).double()
    parameters = (norm.weight, norm.bias, mlp[0].weight, mlp[0].bias, mlp[2].weight, mlp[2].bias)
    got = reference.layer_norm_mlp(x, *parameters, eps=1e-3, approximate=approximate, shift=shift)
    expected = x + mlp(norm(x if shift is None else x + shift))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("approximate", GELUS)
@pytest.mark.parametrize("scales_sum", [False, True])
def test_the_sum_is_the_formula(approximate, scales_sum):
    x, _, _, *layers = make()
    residual, scale = torch.randn(2, 5, 12, dtype=torch.float64), torch.tensor([0.0, 2.0])
    settings = {"scale": scale, "scales_sum": scales_sum}
    fc1_weight, fc1_bias, fc2_weight, fc2_bias = layers
    branch = GELUS[approximate](x @ fc1_weight.t() + fc1_bias) @ fc2_weight.t() + fc2_bias
    factor = scale.double()[:, None, None]
    expected = (residual + branch) * factor if scales_sum else residual + branch * factor
    out = ck.mlp_add(x, *layers, residual, approximate=approximate, **settings)
    torch.testing.assert_close(out, expected)


def test_saves_the_hidden_features_once():
    x, _, _, *layers = [each.requires_grad_() for each in make((2, 50), 16, 64, torch.float32)]
    residual = torch.randn(2, 50, 16, requires_grad=True)
    own = {each.untyped_storage().data_ptr() for each in (x, *layers, residual)}

    def saved(function):
        storages = {}

        def note(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
            return tensor

        with (
            ck.use_backend("triton", "reference"),
            torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
        ):
            function().sum().backward()
        return sum(storage.nbytes() for place, storage in storages.items() if place not in own)

    def in_parts():
        hidden = ck.linear_gelu(x, *layers[:2])
        return ck.linear_add(hidden, *layers[2:], residual)

    features = 2 * 50 * 64 * 4
    assert saved(lambda: ck.mlp_add(x, *layers, residual)) == features
    assert saved(in_parts) == 2 * features
