"""The segmentation head: images in parts on a CPU; in Triton no large map, and what is refused."""

import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.launch import launching
from tests.checks import needs_extension


def tensors(channels, classes, images=2, dtype=torch.float32):
    """Returns the arguments: maps of 13×21 pixels, about a quarter of them, and of 1×1."""
    x, *maps = (torch.randn(images, *size, dtype=dtype) for size in ((16, 13, 21), (24, 4, 6), (32, 1, 1)))
    first, *weights = (torch.randn(channels, each.shape[1], dtype=dtype) / 4 for each in (x, *maps))
    others = tuple(zip(maps, weights, strict=True))
    classifier = torch.randn(classes, channels, dtype=dtype) / channels**0.5
    return x, first, torch.randn(channels, dtype=dtype), others, classifier, torch.randn(classes, dtype=dtype)


@needs_extension
@torch.no_grad()
def test_an_image_has_the_same_bits_alone_and_among_others():
    """Products of more than 16 MB are made of some images at a time."""
    x, weight, bias, others, *classifier = tensors(64, 7, images=5)
    others = *others, (torch.randn(5, 3, 150, 150), torch.randn(64, 3))
    with ck.use_backend("cpu"):
        together = ck.segmentation_head(x, weight, bias, others, *classifier)
        for i in range(5):
            of_image = tuple((image[i : i + 1], other) for image, other in others)
            alone = ck.segmentation_head(x[i : i + 1], weight, bias, of_image, *classifier)
            assert torch.equal(alone[0], together[i])


@torch.no_grad()
def test_no_map_of_all_channels_is_allocated_in_triton():
    given = tensors(512, 3, dtype=torch.float16)
    with launching.recorded_launches(launching.Chip(90, 132)) as launches, ck.use_backend("triton"):
        ck.segmentation_head(*given)
    (launched,) = launches
    written = [launched.arguments["out_ptr"], *launched.arguments["map_ptrs"]]
    assert sorted(each.shape for each in written) == [(2, 1, 1, 512), (2, 4, 6, 512), (2, 273, 3)]
    assert launched.arguments["x_ptr"] is given[0]


def test_what_is_refused_in_triton():
    bind = backends.operators["segmentation_head"].bind
    why = backends.implementations["segmentation_head"]["triton"].load().why_unsupported
    x, weight, bias, others, *classifier = tensors(20, 7, dtype=torch.float16)
    assert why(bind(x, weight, bias, others, *classifier)) is None
    assert why(bind(x, weight, bias, 5 * others[:1], *classifier)) == "interpolates up to 4 maps"
    huge = torch.empty(1, 16, 2**14, 2**14, dtype=torch.float16, device="meta")
    assert "2³¹" in why(bind(huge, weight, bias, (), *classifier))
