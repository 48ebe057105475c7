"""The Triton kernel of the segmentation head, on a GPU or else in Triton's interpreter on CPU tensors."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, launch, launching, reference
from cvt_kernels.launch.records import Product
from tests.checks import assert_accurate
from tests.cvt_kernels.ops.agreement import assert_agrees, made_of

DTYPES = "float16", "bfloat16", "float32"
USUAL = {"height": 9, "width": 14, "inputs": 17, "channels": 40, "outputs": 19, "others": 3}


def call_of(**settings):
    return made_of("segmentation_head", "triton", **settings).call.record


def run(call):
    with ck.use_backend("triton"):
        return ck.segmentation_head(*call)


def launches_of(call, capability=90):
    with launching.recorded_launches(launching.Chip(capability, 132)) as launches:
        run(call)
    return launches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"channels_last": True},
        {"height": 1, "width": 1},
        {"height": 1, "width": 35},
        {"height": 33, "width": 2, "others": 4},
        {"others": 0, "bare": True},
        {"inputs": 70, "channels": 65},
        {"channels": 1, "outputs": 1},
        {"outputs": 2},
        {"outputs": 150},
        {"outputs": 1000, "height": 3, "width": 5},
    ],
    ids=str,
)
def test_values(settings, dtype):
    call = call_of(**USUAL | settings, dtype=dtype)
    assert [each.kernel.__name__ for each in launches_of(call)] == ["_segmentation_head_kernel"]
    assert_agrees("segmentation_head", "triton", **USUAL | settings, dtype=dtype)


def tensors(dtype=torch.float16, channels=20, classes=7, images=2):
    """Returns the arguments: maps of 13×21 pixels, about a quarter of them, and of 1×1."""
    x, *maps = (torch.randn(images, *size, dtype=dtype) for size in ((16, 13, 21), (24, 4, 6), (32, 1, 1)))
    first, *weights = (torch.randn(channels, each.shape[1], dtype=dtype) / 4 for each in (x, *maps))
    others = tuple(zip(maps, weights, strict=True))
    classifier = torch.randn(classes, channels, dtype=dtype) / channels**0.5
    return x, first, torch.randn(channels, dtype=dtype), others, classifier, torch.randn(classes, dtype=dtype)


@torch.no_grad()
def test_a_map_of_one_pixel_is_the_same_everywhere():
    x, weight, bias, (_, (pixel, of_pixel)), *classifier = tensors(torch.float32)
    with ck.use_backend("triton"):
        out = ck.segmentation_head(x, weight, bias, ((pixel, of_pixel),), *classifier)
    shifted = bias + pixel.flatten(1) @ of_pixel.t()
    expected = [
        reference.segmentation_head(x[i : i + 1], weight, shifted[i], (), *classifier) for i in range(2)
    ]
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_many_channels_are_accurate(dtype):
    x, weight, bias, others, *classifier = tensors(dtype, channels=256, classes=150)
    arguments = x, weight, bias, others, *classifier
    exact = reference.segmentation_head(
        *(t.double() for t in (x, weight, bias)),
        tuple((image.double(), other.double()) for image, other in others),
        *(t.double() for t in classifier),
    )
    with ck.use_backend("triton"):
        assert_accurate(ck.segmentation_head(*arguments), reference.segmentation_head(*arguments), exact)


@torch.no_grad()
def test_an_image_has_the_same_bits_alone_and_among_others():
    x, weight, bias, others, *classifier = tensors(images=3)
    with ck.use_backend("triton"):
        together = ck.segmentation_head(x, weight, bias, others, *classifier)
        for i in range(3):
            of_image = tuple((image[i : i + 1], other) for image, other in others)
            alone = ck.segmentation_head(x[i : i + 1], weight, bias, of_image, *classifier)
            assert torch.equal(alone[0], together[i])


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy in the interpreter
@torch.no_grad()
def test_numbers_that_are_not_finite_reach_the_pixels_that_they_reach_by_pytorch():
    """Other pixels of the same program do not see them, and ReLU keeps NaN."""
    x, weight, bias, others, *classifier = tensors(torch.float32)
    others[0][0][0, 3, 1, 2] = torch.nan
    x[1, 2, 5, 7] = torch.inf
    arguments = x, weight, bias, others, *classifier
    with ck.use_backend("triton"):
        out = ck.segmentation_head(*arguments)
    expected = reference.segmentation_head(*arguments)
    assert torch.equal(out.isfinite(), expected.isfinite())
    assert 0 < expected.isfinite().float().mean() < 1
    torch.testing.assert_close(out[expected.isfinite()], expected[expected.isfinite()], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_no_map_of_all_channels_is_allocated():
    x, weight, bias, others, *classifier = tensors(channels=512, classes=3)
    (launched,) = launches_of(
        backends.operators["segmentation_head"].bind(x, weight, bias, others, *classifier)
    )
    written = [t for name, t in launched.arguments.items() if name in ("out_ptr", "map_ptrs")]
    sizes = [each.shape for group in written for each in (group if isinstance(group, tuple) else (group,))]
    assert sorted(sizes) == [(2, 1, 1, 512), (2, 4, 6, 512), (2, 273, 3)]
    assert launched.arguments["x_ptr"] is x


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("classes", "programs"), [(2, 1), (150, 1), (256, 1), (257, 2), (1000, 4)])
def test_programs_side_by_side_have_all_classes(capability, classes, programs):
    call = call_of(**USUAL | {"outputs": classes}, dtype="float16")
    (launched,) = launches_of(call, capability)
    spec = launched.arguments["SPEC"]
    assert launched.grid[1] == programs
    assert (programs - 1) * spec.width * spec.parts < classes <= programs * spec.width * spec.parts


@pytest.mark.parametrize("block_m", [16, 128])
def test_replaced_configurations(block_m):
    config = Product(block_m=block_m, width=16, parts=1, block_k=16, num_warps=1, num_stages=1)
    with launch.overridden("segmentation_head", config):
        assert_agrees("segmentation_head", "triton", **USUAL, dtype="float16")


def test_what_is_refused():
    bind = backends.operators["segmentation_head"].bind
    why = backends.implementations["segmentation_head"]["triton"].load().why_unsupported
    x, weight, bias, others, *classifier = tensors()
    assert why(bind(x, weight, bias, others, *classifier)) is None
    assert why(bind(x, weight.requires_grad_(), bias, others, *classifier)) == "gradients are not computed"
    weight.requires_grad_(False)
    of_many = bind(x, weight, bias, 5 * others[:1], *classifier)
    assert why(of_many) == "interpolates up to 4 maps"
    none = tuple((image[:0], other) for image, other in others)
    assert why(bind(x[:0], weight, bias, none, *classifier)) == "the batch is empty"
    wide = bind(x.double(), weight, bias, others, *classifier)
    assert why(wide) == "serves float32, bfloat16 and float16"
    huge = torch.empty(1, 16, 2**14, 2**14, dtype=torch.float16, device="meta")
    assert "2³¹" in why(bind(huge, weight, bias, (), *classifier))
