"""The depthwise convolution with GELU: its reference is a loop."""

import pytest
import torch
import torch.nn.functional as F

from cvt_kernels import reference

GRID, CHANNELS = (3, 4), 6
X = torch.randn(2, 12, CHANNELS)
WEIGHT, BIAS = torch.randn(CHANNELS, 1, 3, 3), torch.randn(CHANNELS)


@pytest.mark.parametrize("approximate", ["none", "tanh", "quick"])
@pytest.mark.parametrize("bias", [None, BIAS], ids=["bare", "bias"])
def test_the_reference_is_a_loop(approximate, bias):
    out = reference.depthwise_conv_gelu(X, GRID, WEIGHT, bias, approximate=approximate)
    image = F.pad(X.view(2, *GRID, CHANNELS), (0, 0, 1, 1, 1, 1))
    sums = torch.zeros(2, *GRID, CHANNELS) if bias is None else bias.expand(2, *GRID, CHANNELS).clone()
    for y in range(3):
        for x in range(3):
            sums += image[:, y : y + 3, x : x + 4] * WEIGHT[:, 0, y, x]
    quick = sums * torch.sigmoid(1.702 * sums)
    expected = quick if approximate == "quick" else F.gelu(sums, approximate=approximate)
    torch.testing.assert_close(out, expected.flatten(1, 2))
