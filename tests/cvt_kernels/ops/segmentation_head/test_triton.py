"""The segmentation head in Triton: maps of one pixel, numbers that are not finite, programs of classes."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, reference
from cvt_kernels.launch import launching
from tests.cvt_kernels.ops.agreement import made_of

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


def test_what_is_refused():
    bind = backends.operators["segmentation_head"].bind
    why = backends.implementations["segmentation_head"]["triton"].load().why_unsupported
    x, weight, bias, others, *classifier = tensors()
    assert why(bind(x, weight, bias, others, *classifier)) is None
    assert why(bind(x, weight.requires_grad_(), bias, others, *classifier)) == "gradients are not computed"
    weight.requires_grad_(False)
    of_many = bind(x, weight, bias, 5 * others[:1], *classifier)
    assert why(of_many) == "interpolates up to 4 maps"
    huge = torch.empty(1, 16, 2**14, 2**14, dtype=torch.float16, device="meta")
    assert "2³¹" in why(bind(huge, weight, bias, (), *classifier))
