"""The segmentation head on a CPU: images in parts, and sums of many channels."""

import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import assert_accurate, needs_extension


def tensors(dtype=torch.float32, channels=20, classes=7, images=2):
    """Returns the arguments: maps of 31×45 pixels, an eighth of them, and of 1×1."""
    x, *maps = (torch.randn(images, *size, dtype=dtype) for size in ((16, 31, 45), (24, 4, 6), (32, 1, 1)))
    first, *weights = (torch.randn(channels, each.shape[1], dtype=dtype) / 4 for each in (x, *maps))
    others = tuple(zip(maps, weights, strict=True))
    classifier = torch.randn(classes, channels, dtype=dtype) / channels**0.5
    return x, first, torch.randn(channels, dtype=dtype), others, classifier, torch.randn(classes, dtype=dtype)


@needs_extension
@torch.no_grad()
def test_an_image_has_the_same_bits_alone_and_among_others():
    """Products of more than 16 MB are made of some images at a time."""
    x, weight, bias, others, *classifier = tensors(images=5, channels=64)
    wide = torch.randn(5, 3, 150, 150), torch.randn(64, 3)
    with ck.use_backend("cpu"):
        together = ck.segmentation_head(x, weight, bias, (*others, wide), *classifier)
        for i in range(5):
            of_image = tuple((image[i : i + 1], other) for image, other in (*others, wide))
            alone = ck.segmentation_head(x[i : i + 1], weight, bias, of_image, *classifier)
            assert torch.equal(alone[0], together[i])


@needs_extension
@torch.no_grad()
def test_sums_of_many_channels_are_accurate():
    """768 channels are those of SegFormer-B2 to B5."""
    x, weight, bias, others, *classifier = tensors(channels=768, classes=150)
    arguments = x, weight, bias, others, *classifier
    exact = reference.segmentation_head(
        *(t.double() for t in (x, weight, bias)),
        tuple((image.double(), other.double()) for image, other in others),
        *(t.double() for t in classifier),
    )
    with ck.use_backend("cpu"):
        assert_accurate(ck.segmentation_head(*arguments), reference.segmentation_head(*arguments), exact)
