"""Segmentation in tiles: what equals the whole image's, and what does not."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cvt_kernels as ck
from cvt import create_model, segment_in_tiles
from cvt.factory import randomize
from tests.checks import python_blocks, record_calls, run_blocks, section_of
from tests.cvt.models import SMALL

SIZES = [(64, 64), (128, 96), (200, 340), (65, 512), (256, 97), (1, 300)]


class Local(nn.Module):
    """Two strides and their inverse; no output depends on pixels more than 14 away."""

    def __init__(self, classes=5):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GELU(), nn.Conv2d(8, 8, 3, 2, 1), nn.GELU())
        self.up = nn.Sequential(nn.Upsample(scale_factor=4), nn.Conv2d(8, classes, 7, padding=3))
        self.seen = []

    def forward(self, images):
        self.seen.append(tuple(images.shape[2:]))
        return self.up(self.down(images))[..., : images.shape[2], : images.shape[3]]


def local(classes=5):
    model = Local(classes).eval()
    randomize(model, 1)
    return model


def images(height, width, count=2):
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(("overlap", "context"), [(64, 14), (32, 16), (96, 20)])
def test_a_local_model_computes_what_it_does_of_the_whole_image(height, width, overlap, context):
    model, x = local(), images(height, width)
    with torch.no_grad():
        expected = model(x)
    model.seen.clear()
    out = segment_in_tiles(model, x, tile=128, overlap=overlap, context=context, logits=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not out.requires_grad
    assert max(max(seen) for seen in model.seen) <= 128
    assert (len(model.seen) > 1) == (max(height, width) > 128)
    labels = segment_in_tiles(model, x, tile=128, overlap=overlap, context=context)
    assert labels.dtype == torch.uint8
    assert torch.equal(labels.long(), out.argmax(1))


def test_attention_is_of_the_whole_tile():
    config = dataclasses.replace(SMALL, head="segment", decoder_dim=12, num_classes=5)
    model = create_model(config).eval()
    randomize(model, 1)
    x = images(64, 160, count=1)
    with torch.no_grad():
        whole, first = model(x), model(x[..., :96])
    out = segment_in_tiles(model, x, tile=96, overlap=32, context=16, logits=True)
    torch.testing.assert_close(out[..., :80], first[..., :80])
    assert (out - whole).abs().max() > 1e-4
    assert torch.equal(segment_in_tiles(model, x, tile=160, overlap=32, context=8, logits=True), whole)


def test_logits_are_blended_between_contexts():
    class Constant(nn.Module):
        """Says for every pixel of a tile how many tiles there were before."""

        calls = 0

        def forward(self, x):
            self.calls += 1
            return torch.full_like(x[:, :1], self.calls - 1)

    out = segment_in_tiles(Constant().eval(), images(32, 128), tile=96, overlap=64, context=8, logits=True)
    steps = (torch.arange(48) + 0.5) / 48
    expected = torch.cat((torch.zeros(40), steps, torch.ones(40)))
    torch.testing.assert_close(out, expected.expand(2, 1, 32, 128))


def test_many_classes_are_int64():
    assert segment_in_tiles(local(300), images(32, 32)).dtype == torch.int64


@pytest.mark.parametrize(("tile", "calls"), [(128, 1), (64, 0)])
def test_smaller_logits_of_one_tile_are_not_interpolated_in_memory(tile, calls):
    class Small(nn.Module):
        def forward(self, x):
            return Output(x[:, :, ::4, ::4].repeat(1, 4, 1, 1).bfloat16())

    x, recorded = images(96, 128), record_calls("resized_argmax")
    with ck.use_backend("cpu"):
        labels = segment_in_tiles(Small().eval(), x, tile=tile, overlap=32, context=0)
    assert len(recorded) == calls
    if calls:
        logits = Small()(x).logits.float()
        expected = F.interpolate(logits, (96, 128), mode="bilinear").argmax(1)
        assert labels.dtype == torch.uint8
        assert torch.equal(labels.long(), expected)


class Output(NamedTuple):
    """An output as of transformers' segmenters, with logits that are smaller than the images."""

    logits: Any


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda out: [out],
            TypeError,
            r"model: returned list, expected logits \(2, classes, 32, 32\), or an output of transformers "
            r'with logits; of others give a function, such as lambda images: model\(images\)\["out"\]',
        ),
        (lambda out: Output([out]), TypeError, "model: returned Output, expected logits"),
        (
            lambda out: out[..., ::4],
            ValueError,
            r"model: returned shape .*, expected \(2, classes, 32, 32\); for smaller logits give a "
            r"function, such as lambda images: F.interpolate",
        ),
        (lambda out: Output(out[0]), ValueError, r"returned shape \(5, 32, 32\), expected \(2, classes, 32"),
        (lambda out: Output(out[:1]), ValueError, r"returned shape \(1, 5, 32, 32\), expected \(2, classes"),
    ],
)
def test_other_outputs_are_refused(change, error, message):
    model = local()
    model.register_forward_hook(lambda module, args, out: change(out))
    with pytest.raises(error, match=message):
        segment_in_tiles(model, images(32, 32))


def test_a_function_and_smaller_logits_of_an_output():
    model, x = local(), images(128, 224)
    model.up = nn.Sequential(nn.Conv2d(8, 5, 3, padding=1))  # four times as small as the images
    randomize(model, 1)
    with torch.no_grad():
        expected = F.interpolate(model(x), x.shape[2:], mode="bilinear")
    sizes = {"tile": 128, "overlap": 64, "context": 32, "logits": True}
    for each in (
        lambda images: Output(model(images)),
        lambda images: F.interpolate(model(images), images.shape[2:], mode="bilinear"),
    ):
        torch.testing.assert_close(segment_in_tiles(each, x, **sizes), expected, rtol=1e-5, atol=1e-5)
    model.register_forward_hook(lambda module, args, out: Output(out.bfloat16()))  # its labels are float32's
    out = segment_in_tiles(model, x, **sizes)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@pytest.mark.rest
def test_the_page_runs_as_it_stands():
    names = run_blocks(python_blocks(section_of("segmentation.md", "## Large images")))
    assert names["labels"].shape == (1, 800, 1200)
    assert names["segformer"].config.num_labels == 21
