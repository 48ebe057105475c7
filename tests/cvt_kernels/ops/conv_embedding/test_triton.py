"""The Triton kernels of the token embedding, on a GPU or else in Triton's interpreter on CPU tensors."""

import math

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends, machine
from cvt_kernels.ops.conv_embedding.triton import common, embed, operator
from tests.checks import WIDEST, assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_AND_SINGLE = [torch.float16, torch.bfloat16, torch.float32]
ALL = list(dict.fromkeys([*HALF_AND_SINGLE, WIDEST]))
FIRST = {"channels": (3, 64), "kernel_size": 7, "stride": 4, "padding": 2}  # CvT's first stage
LATER = {"channels": (40, 24), "kernel_size": 3, "stride": 2, "padding": 1}  # too many values for one kernel


def random(*shape, dtype, scale=1.0):
    return (scale * torch.randn(shape, dtype=torch.float64)).to(DEVICE, dtype)


def arrange(layout, batch, channels, height, width, dtype):
    """Returns a random image that lies in memory as ``layout`` says."""
    if layout == "sliced":  # nothing adjacent, and it begins at an odd element
        wide = random(2 * batch, channels + 1, height + 2, 2 * width + 1, dtype=dtype)
        return wide[::2, 1:, 1:-1, 1::2]
    image = random(batch, channels, height, width, dtype=dtype)
    return image.to(memory_format=torch.channels_last) if layout == "channels last" else image


def make(
    channels, kernel_size, stride, padding, *, size=(32, 40), batch=2, layout="channels first",
    dtype=WIDEST, bias=True, token=True, norm=True, vectors=None,
):  # fmt: skip
    """Returns the arguments and settings of a call; ``vectors`` is the dtype of γ, β and the class token."""
    inputs, outputs = channels
    image = arrange(layout, batch, inputs, *size, dtype)
    scale = 1 / math.sqrt(inputs * kernel_size**2)
    weight = random(outputs, inputs, kernel_size, kernel_size, dtype=dtype, scale=scale)
    gamma, beta, class_token = (random(outputs, dtype=vectors or dtype) for _ in range(3))
    arguments = [image, weight, random(outputs, dtype=dtype) if bias else None]
    arguments += [gamma, beta] if norm else [None, None]
    settings = {"stride": stride, "padding": padding, "class_token": class_token if token else None}
    return arguments, settings


def run(backend, arguments, settings, double=False):
    def cast(value):
        return value.double() if double and isinstance(value, torch.Tensor) else value

    with ck.use_backend(backend):
        return ck.conv_embedding(*map(cast, arguments), **{k: cast(v) for k, v in settings.items()})


def assert_backends_agree(arguments, settings):
    ours = run("triton", arguments, settings)
    exact = run("reference", arguments, settings, double=True)
    assert ours.is_contiguous()
    assert ours.dtype == arguments[0].dtype
    if ours.dtype == torch.float64:
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)
        return
    assert_accurate(ours, run("reference", arguments, settings), exact)


def kernels_of(arguments, settings):
    """Returns the names of the kernels that a call launches."""
    with machine.recorded_launches(machine.Chip(90, 132)) as launches:
        run("triton", arguments, settings)
    return [launch.kernel.__name__ for launch in launches]


each_stage = pytest.mark.parametrize(
    ("geometry", "kernel"), [(FIRST, "embed"), (LATER, "normalize")], ids=["first", "later"]
)


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("layout", ["channels first", "channels last", "sliced"])
@each_stage
def test_stages(geometry, kernel, layout, dtype):
    arguments, settings = make(**geometry, size=(15, 20), layout=layout, dtype=dtype)
    assert_backends_agree(arguments, settings)
    assert kernels_of(arguments, settings) == [f"_conv_embedding_{kernel}_kernel"]


@each_stage
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_what_may_be_left_out(norm, token, bias, geometry, kernel):
    parts = {"bias": bias, "token": token, "norm": norm}
    assert_backends_agree(*make(**geometry, size=(15, 14), dtype=torch.float16, **parts))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("geometry", "size"),
    [
        (FIRST, (33, 41)),  # odd: no pairs of elements
        (FIRST, (7, 3)),  # one token
        (FIRST | {"channels": (3, 24)}, (32, 44)),  # one part with empty channels
        (FIRST | {"channels": (3, 48)}, (32, 44)),  # three parts
        (FIRST | {"channels": (1, 16), "padding": 9}, (10, 8)),  # windows beyond the image
        (FIRST | {"channels": (2, 16), "kernel_size": 4, "padding": 0}, (16, 12)),  # no empty elements
        (FIRST | {"channels": (3, 16), "kernel_size": 1, "stride": 3}, (8, 12)),
        (LATER | {"channels": (8, 24)}, (16, 12)),
        (LATER | {"channels": (30, 5)}, (7, 9)),
        (LATER | {"channels": (30, 300)}, (5, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_odd_sizes(layout, geometry, size, dtype):
    assert_backends_agree(*make(**geometry, size=size, batch=1, layout=layout, dtype=dtype))


@each_stage
def test_vectors_of_float32_beside_half_precision(geometry, kernel):
    arguments, settings = make(**geometry, size=(16, 12), dtype=torch.bfloat16, vectors=torch.float32)
    ours = run("triton", arguments, settings)
    rounded = [value if value is None else value.bfloat16() for value in arguments]
    theirs = run("reference", rounded, settings | {"class_token": settings["class_token"].bfloat16()})
    assert ours.dtype == torch.bfloat16
    assert_accurate(ours, theirs, run("reference", arguments, settings, double=True))


def test_strided_images_need_no_copy():
    arguments, settings = make(**FIRST, size=(16, 20), dtype=torch.float16)
    image, *rest = arguments
    expected = run("triton", arguments, settings)
    views = [
        torch.stack([image, image], dim=3).flatten(2, 3)[:, :, ::2],  # rows apart
        torch.stack([image, image], dim=1).flatten(0, 1)[::2],  # images apart
        torch.cat([image, image], dim=1)[:, 3:],  # other planes between
        image.to(memory_format=torch.channels_last),
        image.transpose(2, 3).contiguous().transpose(2, 3),  # columns adjacent
    ]
    for view in views:
        assert not view.is_contiguous()
        torch.testing.assert_close(run("triton", [view, *rest], settings), expected, rtol=2e-3, atol=2e-3)
        with machine.recorded_launches(machine.Chip(90, 132)) as launches:
            run("triton", [view, *rest], settings)
        assert launches[0].arguments["image_ptr"] is view


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["channels first", "channels last"])
def test_pixels_beside_a_window_do_not_matter(layout, dtype):
    """Elements that are loaded with those of a window, but do not belong to it, may be NaN."""
    arguments, settings = make(**FIRST, size=(20, 24), batch=1, layout=layout, dtype=dtype)
    image = arguments[0]
    expected = run("triton", arguments, settings)
    image[0, 1, 9, 17] = torch.nan
    tokens = run("triton", arguments, settings)
    spread = tokens[:, 1:].isnan().any(2)
    broken = image.isnan().any(1, keepdim=True).double()
    windows = F.conv2d(broken, torch.ones(1, 1, 7, 7).to(broken), None, 4, 2)
    assert torch.equal(spread, windows.flatten(1) > 0)
    assert torch.equal(tokens[:, 1:][~spread], expected[:, 1:][~spread])


@pytest.mark.parametrize("chip", [machine.Chip(90, 1), machine.Chip(90, 132)])
def test_programs_share_an_image(chip, monkeypatch):
    monkeypatch.setattr(machine, "chip", lambda device: chip)
    assert_backends_agree(*make(**FIRST, size=(64, 40), batch=3, dtype=torch.float32))


@pytest.mark.parametrize(
    ("batch", "tiles", "programs", "splits"),
    [(1, 49, 528, 49), (256, 49, 528, 2), (528, 49, 528, 1), (600, 49, 528, 7), (1, 1, 528, 1)],
)
def test_division_of_images(batch, tiles, programs, splits):
    assert embed._splits(batch, tiles, programs) == splits


@each_stage
def test_replaced_configurations(geometry, kernel):
    arguments, settings = make(**geometry, size=(16, 20), dtype=torch.float32)
    expected = run("triton", arguments, settings)
    config = common.LaunchConfig(elements=1024, num_warps=1, channels=64, resident_programs=1)
    with common.overridden(kernel, config):
        torch.testing.assert_close(run("triton", arguments, settings), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="expected one of "), common.overridden("conv", config):
        pass


@pytest.mark.parametrize(
    ("geometry", "reason"),
    [
        (FIRST, None),
        (FIRST | {"channels": (3, 128)}, None),
        (FIRST | {"channels": (3, 192)}, "there is no configuration for 192 channels"),
        (LATER, "the convolution's window has many values"),
    ],
    ids=str,
)
def test_one_kernel_or_two(geometry, reason):
    (image, weight, *_), settings = make(**geometry, dtype=torch.float16)
    assert embed.why_not_embedded(image, weight, settings["stride"], settings["padding"]) == reason


def test_float32_without_tf32_is_left_to_pytorch():
    arguments, settings = make(**FIRST, size=(16, 20), dtype=torch.float32)
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        assert kernels_of(arguments, settings) == ["_conv_embedding_normalize_kernel"]
        assert_backends_agree(arguments, settings)
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def test_images_beyond_32_bits():
    image = torch.empty(1, 3, 2**15, 2**15, dtype=torch.float16, device="meta")
    weight = torch.empty(64, 3, 7, 7, dtype=torch.float16, device="meta")
    with machine.recorded_launches(machine.Chip(90, 132)):
        reason = embed.why_not_embedded(image, weight, 4, 2)
    assert reason == "the image is too large for 32-bit offsets"
    bind = backends.operators["conv_embedding"].bind
    refused = operator.why_unsupported(bind(image, weight, None, stride=4, padding=2))
    assert refused == "the tokens of one image have 2³¹ elements or more"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"channels": (3, 5000), "kernel_size": 1}, "tokens have 5000 channels, more than 4096"),
        ({"batch": 0}, "the batch is empty"),
    ],
    ids=str,
)
def test_refusals(change, reason):
    arguments, settings = make(**FIRST | change)
    with pytest.raises(ck.BackendUnavailable, match=reason):
        run("triton", arguments, settings)
