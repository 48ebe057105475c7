"""The public function of the token embedding: its formula, its composition, its checks and kinds of calls."""

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import dispatch
from cvt_kernels.ops import conv_embedding
from tests.checks import assert_accurate, record_calls

IMAGE = torch.randn(2, 3, 20, 24, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(16, 3, 7, 7, generator=torch.Generator().manual_seed(1)) / 12
BIAS, GAMMA, BETA, TOKEN = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
SETTINGS = {"stride": 4, "padding": 2}


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("vectors", [(None, None, None), (BIAS, GAMMA, BETA)], ids=["bare", "all"])
def test_formula(vectors, token):
    tokens = ck.conv_embedding(IMAGE, WEIGHT, *vectors, **SETTINGS, class_token=token, eps=1e-3)
    bias, gamma, beta = vectors
    maps = F.conv2d(IMAGE, WEIGHT, bias, 4, 2).flatten(2).transpose(1, 2)
    assert tokens.is_contiguous()
    spatial = tokens if token is None else tokens[:, 1:]
    torch.testing.assert_close(spatial, F.layer_norm(maps, (16,), gamma, beta, 1e-3))
    if token is not None:
        torch.testing.assert_close(tokens[:, 0], token.expand(2, -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_accuracy_of_the_composition(dtype):
    arguments = [t.to(dtype) for t in (IMAGE, WEIGHT, BIAS, GAMMA, BETA)]
    ours = ck.conv_embedding(*arguments, **SETTINGS, class_token=TOKEN)  # float32 beside the image
    with ck.use_backend("reference"):
        theirs = ck.conv_embedding(*arguments, **SETTINGS, class_token=TOKEN)
        exact = ck.conv_embedding(*(t.double() for t in arguments), **SETTINGS, class_token=TOKEN.double())
    assert ours.dtype == theirs.dtype == dtype
    assert_accurate(ours, theirs, exact)


def test_gradients_of_the_composition():
    tensors = [t[..., :8].double() for t in (BIAS, GAMMA, BETA, TOKEN)]
    tensors = [IMAGE[:1, :2, :6, :7].double(), WEIGHT[:8, :2, :3, :3].double(), *tensors]

    def function(image, weight, bias, gamma, beta, token):
        return ck.conv_embedding(
            image, weight, bias, gamma, beta, stride=2, padding=1, class_token=token
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in tensors], fast_mode=True)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kinds_of_calls(layout):
    words = dispatch.question(
        "conv_embedding", IMAGE.contiguous(memory_format=layout), WEIGHT, BIAS, GAMMA, BETA, **SETTINGS,
        eps=1e-5, class_token=TOKEN,
    )  # fmt: skip
    assert "3 to 16 channels, kernel/stride/padding 7/4/2, and a class token" in words
    assert ("channels last" in words) == (layout == torch.channels_last)


def test_backends_get_what_the_caller_gave():
    calls = record_calls("conv_embedding")
    with ck.use_backend("native"):
        ck.conv_embedding(IMAGE, WEIGHT, None, **SETTINGS)
    ((arguments, settings),) = calls
    assert [argument is given for argument, given in zip(arguments, (IMAGE, WEIGHT), strict=False)] == [1, 1]
    assert settings == {"stride": 4, "padding": 2, "eps": 1e-5, "class_token": None}
    assert conv_embedding.conv_embedding is ck.conv_embedding


def call(image=IMAGE, weight=WEIGHT, bias=BIAS, gamma=GAMMA, beta=BETA, **settings):
    return ck.conv_embedding(image, weight, bias, gamma, beta, **SETTINGS | settings)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"image": IMAGE[0]}, ValueError, r"image: got shape \(3, 20, 24\), expected 4 dimensions"),
        ({"image": IMAGE.long()}, TypeError, "image: got dtype int64"),
        ({"image": IMAGE[:, :2]}, ValueError, "image: got 2 channels, expected 3 as weight"),
        ({"weight": WEIGHT[..., :6]}, ValueError, r"weight: got shape .* expected \(16, 3, 6, 6\)"),
        ({"weight": WEIGHT.half()}, TypeError, "weight: has dtype float16, expected float32 as image"),
        ({"weight": WEIGHT[:0]}, ValueError, r"weight: got shape \(0, 3, 7, 7\), expected channels"),
        ({"bias": BIAS[:3]}, ValueError, r"bias: got shape \(3,\), expected \(16,\)"),
        ({"bias": BIAS.double()}, TypeError, "bias: has dtype float64"),
        ({"gamma": GAMMA.half()}, TypeError, "norm_weight: has dtype float16"),
        ({"beta": BETA.to("meta")}, ValueError, "norm_bias: is on meta, expected cpu as image"),
        ({"class_token": TOKEN.view(1, 16)}, ValueError, r"class_token: got shape \(1, 16\)"),
        ({"stride": 0}, ValueError, "stride: got 0, expected an integer of at least 1"),
        ({"padding": 0.5}, TypeError, "padding: got 0.5, expected an integer of at least 0"),
        ({"eps": 0.0}, ValueError, "eps: got 0.0, expected a positive number"),
        ({"image": IMAGE[..., :2]}, ValueError, "image: 20×2 pixels are too few for a kernel of 7"),
    ],
)
def test_bad_arguments(settings, error, message):
    with pytest.raises(error, match=message):
        call(**settings)


def test_under_vmap():
    one_by_one = torch.func.vmap(lambda image: ck.conv_embedding(image[None], WEIGHT, BIAS, **SETTINGS)[0])
    torch.testing.assert_close(one_by_one(IMAGE), ck.conv_embedding(IMAGE, WEIGHT, BIAS, **SETTINGS))
