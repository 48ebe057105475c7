"""The token embedding in Triton: views, positions, vectors of float32, precision."""

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.launch import launching
from cvt_kernels.ops.conv_embedding.triton import embed, operator
from tests.checks import needs_float64, precision_of
from tests.contract.examples import assert_agrees, made_of

FLOAT64 = pytest.param("float64", marks=needs_float64)


def sizes(height, width, **settings):
    return {"height": height, "width": width, **settings}


#: CvT's first stage, and one whose windows have too many values for one kernel.
FIRST = sizes(15, 20, inputs=3, channels=64, kernel=7, stride=4, padding=2)
LATER = sizes(9, 14, inputs=40, channels=24, kernel=3, stride=2, padding=1)
#: A pyramid's reduction of keys and values: windows side by side.
PATCHES = sizes(
    9, 14, inputs=40, channels=24, kernel=4, stride=4, padding=0, channels_last=True, class_token=False
)


def call_of(**settings):
    return made_of("conv_embedding", "triton", **settings).call.record


def run(call):
    settings = call._asdict()
    arguments = [settings.pop(name) for name in call._fields[:5]]
    with ck.use_backend("triton"):
        return ck.conv_embedding(*arguments, **settings)


def launched_by(call):
    with launching.recorded_launches(launching.Chip(90, 132)) as launches:
        run(call)
    return launches


def kernels_of(call):
    return [launch.kernel.__name__ for launch in launched_by(call)]


@pytest.mark.parametrize("settings", [FIRST, PATCHES], ids=["embed", "patches"])
def test_positions_are_added_before_rounding(settings):
    """A sum of float32 that is rounded once; the class token's position is the first."""
    call = call_of(**settings | {"class_token": True, "positions": True}, dtype="bfloat16")
    wide = {name: value.float() for name, value in call._asdict().items() if isinstance(value, torch.Tensor)}
    exact = backends.operators["conv_embedding"].reference(call._replace(**wide))
    tokens = run(call)
    rounding = torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(tokens.float(), exact, rtol=rounding, atol=2e-3)
    assert torch.equal(tokens[0, 0], call.class_token + call.positions[0])


@pytest.mark.parametrize("name", ["positions", "weight"])
def test_what_lies_in_no_order_is_copied(name):
    call = call_of(**PATCHES | {"positions": True}, dtype="float16")
    strided = call._replace(**{name: getattr(call, name).repeat_interleave(2, dim=1)[:, ::2]})
    assert torch.equal(run(strided), run(call))


@pytest.mark.parametrize("stage", [FIRST, LATER], ids=["first", "later"])
def test_vectors_of_float32_beside_half_precision(stage):
    call = call_of(**stage, dtype="bfloat16", class_token=True, positions=True)
    rounded = run(call)
    names = "norm_weight", "norm_bias", "class_token", "positions"
    vectors = {name: getattr(call, name).float() for name in names}
    assert torch.equal(run(call._replace(**vectors)), rounded)


def test_strided_images_need_no_copy():
    call = call_of(**FIRST | sizes(16, 20), dtype="float16")
    image, expected = call.image, run(call)
    views = [
        torch.stack([image, image], dim=3).flatten(2, 3)[:, :, ::2],  # rows apart
        torch.stack([image, image], dim=1).flatten(0, 1)[::2],  # images apart
        torch.cat([image, image], dim=1)[:, 3:],  # other planes between
        image.to(memory_format=torch.channels_last),
        image.transpose(2, 3).contiguous().transpose(2, 3),  # columns adjacent
    ]
    for view in views:
        assert not view.is_contiguous()
        viewed = call._replace(image=view)
        torch.testing.assert_close(run(viewed), expected, rtol=2e-3, atol=2e-3)
        assert launched_by(viewed)[0].arguments["image_ptr"] is view


@pytest.mark.parametrize("dtype", ["float16", FLOAT64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_pixels_beside_a_window_do_not_matter(channels_last, dtype):
    """Elements that are loaded with a window, but do not belong to it, may be NaN."""
    call = call_of(**FIRST | sizes(20, 24), batch=1, channels_last=channels_last, dtype=dtype)
    expected = run(call)
    call.image[0, 1, 9, 17] = torch.nan
    tokens = run(call)
    spread = tokens[:, 1:].isnan().any(2)
    broken = call.image.isnan().any(1, keepdim=True).double()
    windows = F.conv2d(broken, torch.ones(1, 1, 7, 7).to(broken), None, 4, 2)
    assert torch.equal(spread, windows.flatten(1) > 0)
    assert torch.equal(tokens[:, 1:][~spread], expected[:, 1:][~spread])


@pytest.mark.parametrize("chip", [launching.Chip(90, 1), launching.Chip(90, 132)])
def test_programs_share_an_image(chip, monkeypatch):
    monkeypatch.setattr(launching, "chip", lambda device: chip)
    assert_agrees("conv_embedding", "triton", **FIRST | sizes(64, 40), batch=3)


def test_pixels_apart_are_not_gathered():
    call = call_of(**PATCHES | {"inputs": 1}, dtype="float16")
    assert kernels_of(call) == ["_conv_embedding_patches_kernel"]
    apart = call._replace(image=torch.cat([call.image, call.image], dim=3)[..., ::2])
    assert "_conv_embedding_patches_kernel" not in kernels_of(apart)
    expected = backends.operators["conv_embedding"].reference(apart)
    torch.testing.assert_close(run(apart), expected, rtol=2e-3, atol=2e-3)


def test_tokens_are_read_as_they_lie():
    """A view of tokens is read in place, and a weight with channels last too."""
    call = call_of(**PATCHES, dtype="float16")
    weight = call.weight.contiguous(memory_format=torch.channels_last)
    spread = torch.cat([call.image, call.image], dim=0)[::2].permute(0, 2, 3, 1)  # images apart
    wide = torch.cat([spread, spread], dim=2)[:, :, :14].permute(0, 3, 1, 2)  # rows apart
    changed = call._replace(image=wide, weight=weight)
    torch.testing.assert_close(
        run(changed), run(call._replace(image=wide.contiguous(memory_format=torch.channels_last)))
    )
    (launch_of_view,) = launched_by(changed)
    assert launch_of_view.arguments["image_ptr"] is wide
    assert launch_of_view.arguments["w_ptr"].data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_float32_is_left_to_pytorch(precision):
    """Only cuDNN knows, not a flag, whether it rounds to TF32."""
    with precision_of(torch.backends.cudnn.conv, precision):
        assert kernels_of(call_of(**FIRST, dtype="float32")) == ["_conv_embedding_normalize_kernel"]
        assert_agrees("conv_embedding", "triton", **FIRST, dtype="float32")


def test_what_is_refused():
    image = torch.empty(1, 3, 2**15, 2**15, dtype=torch.float16, device="meta")
    weight = torch.empty(64, 3, 7, 7, dtype=torch.float16, device="meta")
    with launching.recorded_launches(launching.Chip(90, 132)):
        reason = embed.why_not_embedded(image, weight, 4, 2)
    assert reason == "the image is too large for 32-bit offsets"
    bind = backends.operators["conv_embedding"].bind
    refused = operator.why_unsupported(bind(image, weight, None, stride=4, padding=2))
    assert refused == "the tokens of one image have 2³¹ elements or more"
    wide = bind(image, torch.empty(5000, 3, 1, 1, device="meta"), None, stride=2**10, padding=0)
    assert operator.why_unsupported(wide) == "tokens have 5000 channels, more than 4096"
