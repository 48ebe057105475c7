"""The token embedding in Triton: views, positions, packed weights, and which kernel serves."""

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.launch import launching
from cvt_kernels.ops.conv_embedding.triton import embed, operator, patches
from tests.checks import assert_accurate, needs_float64, precision_of
from tests.cvt_kernels.ops.agreement import assert_agrees, made_of

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
WINDOWS = [
    PATCHES,
    PATCHES | sizes(8, 8, kernel=8, stride=8, inputs=32, channels=32),
    PATCHES | sizes(7, 5, kernel=2, stride=2, inputs=5, channels=300),
    PATCHES | sizes(5, 3, kernel=1, stride=1, inputs=1, channels=1),
    PATCHES | sizes(3, 22, kernel=3, stride=3, inputs=7, channels=160, bare=True),
]
each_stage = pytest.mark.parametrize(
    ("stage", "kernel"), [(FIRST, "embed"), (LATER, "normalize")], ids=["first", "later"]
)
with_positions = pytest.mark.parametrize("positions", [False, True], ids=["", "positions"])


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


def test_positions_in_no_order_are_copied():
    call = call_of(**PATCHES | {"positions": True}, dtype="float16")
    strided = call._replace(positions=call.positions.repeat_interleave(2, dim=1)[:, ::2])
    assert torch.equal(run(strided), run(call))


@each_stage
def test_vectors_of_float32_beside_half_precision(stage, kernel):
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("settings", WINDOWS, ids=str)
@with_positions
def test_windows_of_a_packed_weight(positions, settings, dtype):
    settings = settings | {"class_token": positions, "positions": positions}
    call = call_of(**settings, batch=3, dtype=str(dtype).removeprefix("torch."))
    call = call._replace(weight=call.weight.contiguous(memory_format=torch.channels_last))
    (launched,) = launched_by(call)
    assert launched.arguments["w_ptr"] is call.weight
    reference = backends.operators["conv_embedding"].reference
    exact = [each.double() if isinstance(each, torch.Tensor) else each for each in call]
    assert_accurate(run(call), reference(call), reference(type(call)(*exact)))


def test_a_weight_in_no_order_is_copied():
    call = call_of(**PATCHES, dtype="float16")
    strided = call._replace(weight=call.weight.repeat_interleave(2, dim=1)[:, ::2])
    assert torch.equal(run(strided), run(call))


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


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (PATCHES, None),
        (PATCHES | {"stride": 3}, "windows overlap or are apart"),
        (PATCHES | {"padding": 1}, "windows overlap or are apart"),
        (PATCHES | {"channels_last": False}, "channels are not last"),
        (PATCHES | {"channels": 513}, "tokens have 513 channels, more than 512"),
        (PATCHES | {"class_token": True}, None),
        (PATCHES | {"dtype": "float32"}, "float32 would need more registers than there are"),
    ],
    ids=str,
)
def test_which_windows_are_gathered(settings, reason):
    call = call_of(**{"dtype": "float16"} | settings)
    told = patches.why_not_gathered(call.image, call.weight, call.stride, call.padding, call.class_token)
    assert told == reason


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (FIRST, None),
        (FIRST | {"channels": 128}, None),
        (FIRST | {"channels": 192}, "there is no configuration for 192 channels"),
        (LATER, "the convolution's window has many values"),
    ],
    ids=str,
)
def test_one_kernel_or_two(settings, reason):
    call = call_of(**settings, dtype="float16")
    assert embed.why_not_embedded(call.image, call.weight, call.stride, call.padding) == reason


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
