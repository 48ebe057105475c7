"""The token embedding: what depends on TF32."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends, choose, modes
from cvt_kernels.ops import conv_embedding
from tests.checks import precision_of

IMAGE = torch.randn(2, 3, 20, 24, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(16, 3, 7, 7, generator=torch.Generator().manual_seed(1)) / 12
BIAS = torch.randn(16, generator=torch.Generator().manual_seed(2))
SETTINGS = {"stride": 4, "padding": 2}


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [(torch.float32, "tf32", True), (torch.float32, "ieee", False), (torch.float16, "tf32", False)],
)
def test_kinds_of_calls_by_precision(dtype, precision, expected):
    with FakeTensorMode(), precision_of(torch.backends.cudnn.conv, precision):
        image, weight = (torch.empty(t.shape, dtype=dtype, device="cuda") for t in (IMAGE, WEIGHT))
        key = choose.cache_key("conv_embedding", image, weight, None, **SETTINGS)
    assert ("convolved in tf32" in key) == expected


@pytest.mark.parametrize("may_round", [False, True])
def test_the_composition_gives_up_no_precision_for_a_layout(monkeypatch, may_round):
    """CuDNN takes TF32 for few channels with channels last only."""
    convolve, layouts = F.conv2d, []

    def noted(image, *others):
        layouts.append(image.stride())
        return convolve(image, *others)

    monkeypatch.setattr(F, "conv2d", noted)
    monkeypatch.setattr(modes, "convolves_in_tf32", lambda image: may_round)
    bind = backends.operators["conv_embedding"].bind
    ours = conv_embedding._compose(bind(IMAGE, WEIGHT, BIAS, **SETTINGS))
    last = IMAGE.contiguous(memory_format=torch.channels_last)
    assert layouts == [(IMAGE if may_round else last).stride()]
    torch.testing.assert_close(ours, ck.reference.conv_embedding(IMAGE, WEIGHT, BIAS, **SETTINGS))
