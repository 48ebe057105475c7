"""The public function of the token embedding: its composition on a CPU, and kinds of calls."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends, choose, modes
from cvt_kernels.ops import conv_embedding
from tests.checks import assert_accurate, precision_of

IMAGE = torch.randn(2, 3, 20, 24, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(16, 3, 7, 7, generator=torch.Generator().manual_seed(1)) / 12
BIAS, GAMMA, BETA, TOKEN = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
POSITIONS = torch.randn(1 + 5 * 6, 16, generator=torch.Generator().manual_seed(3))
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


@pytest.mark.parametrize("backend", ["auto", "cpu", "composed", "reference"])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_positions_are_added(token, backend):
    arguments = (IMAGE, WEIGHT, BIAS, GAMMA, BETA)
    positions = POSITIONS[int(token is None) :]
    before = positions.clone()
    with ck.use_backend(*(["composed", "reference"] if backend == "composed" else [backend])):
        tokens = ck.conv_embedding(*arguments, **SETTINGS, class_token=token)
        added = ck.conv_embedding(*arguments, **SETTINGS, class_token=token, positions=positions)
    torch.testing.assert_close(added, tokens + positions)
    assert torch.equal(positions, before)


def test_gradients_of_class_token_and_positions():
    token, positions = TOKEN.clone().requires_grad_(), POSITIONS.clone().requires_grad_()
    tokens = ck.conv_embedding(
        IMAGE, WEIGHT, BIAS, GAMMA, BETA, **SETTINGS, class_token=token, positions=positions
    )
    dout = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(4))
    tokens.backward(dout)
    torch.testing.assert_close(positions.grad, dout.sum(0))
    torch.testing.assert_close(token.grad, dout[:, 0].sum(0))
    with pytest.raises(ck.BackendUnavailable, match="has no gradients"), ck.use_backend("cpu"):
        ck.conv_embedding(IMAGE, WEIGHT, BIAS, **SETTINGS, class_token=TOKEN, positions=positions)


@pytest.mark.parametrize(
    ("token", "positions", "message"),
    [
        (TOKEN, POSITIONS[1:], r"positions: got shape \(30, 16\), expected \(31, 16\) \(tokens, channels\)"),
        (None, POSITIONS, r"positions: got shape \(31, 16\), expected \(30, 16\) \(tokens, channels\)"),
        (TOKEN, POSITIONS[None], r"positions: got shape \(1, 31, 16\), expected \(31, 16\)"),
        (TOKEN, POSITIONS.half(), "positions: has dtype float16, expected float32 as image"),
    ],
    ids=["no class token", "a class token", "three dimensions", "dtype"],
)
def test_wrong_positions(token, positions, message):
    error = TypeError if positions.dtype != IMAGE.dtype else ValueError
    with pytest.raises(error, match=message):
        ck.conv_embedding(IMAGE, WEIGHT, None, **SETTINGS, class_token=token, positions=positions)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_accuracy_of_the_composition(dtype):
    """LayerNorm, class token and positions may be float32 beside the image."""
    arguments = [*(t.to(dtype) for t in (IMAGE, WEIGHT, BIAS)), GAMMA, BETA]
    added = {"class_token": TOKEN, "positions": POSITIONS}
    ours = ck.conv_embedding(*arguments, **SETTINGS, **added)
    with ck.use_backend("reference"):
        theirs = ck.conv_embedding(*arguments, **SETTINGS, **added)
        added = {name: each.double() for name, each in added.items()}
        exact = ck.conv_embedding(*(t.double() for t in arguments), **SETTINGS, **added)
    assert ours.dtype == theirs.dtype == dtype
    assert_accurate(ours, theirs, exact)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kinds_of_calls(layout):
    words = choose.cache_key(
        "conv_embedding", IMAGE.contiguous(memory_format=layout), WEIGHT, BIAS, GAMMA, BETA, **SETTINGS,
        eps=1e-5, class_token=TOKEN, positions=POSITIONS,
    )  # fmt: skip
    assert "3 to 16 channels, kernel/stride/padding 7/4/2, and a class token, and positions" in words
    assert ("channels last" in words) == (layout == torch.channels_last)


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


def test_an_image_without_a_window():
    with pytest.raises(ValueError, match="image: 20×2 pixels are too few for a kernel of 7"):
        ck.conv_embedding(IMAGE[..., :2], WEIGHT, None, **SETTINGS)


def test_the_module_is_no_function():
    assert conv_embedding.conv_embedding is ck.conv_embedding
