"""CvT with a class of every pixel: its head, weights of and for other models, label maps, figures."""

import copy
import dataclasses
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix, jaccard_score
from torch.nn import functional as F

import cvt_kernels as ck
from cvt import CheckpointError, CvT, CvTSegmenter, create_model, load_checkpoint
from cvt.checkpoints import read_checkpoint
from cvt.factory import randomize
from cvt.images import ImageError
from cvt.segmentation import Decoder, pixel_loss
from cvt.tools.datasets import Batches, RandomCrop
from cvt.tools.evaluation import add_up_pixels, cost, evaluate_pixels
from cvt.tools.evaluation import answers as found
from cvt.tools.label_maps import LabelMapDataset, open_label_maps, read_label_map, save_digit_scenes
from tests.checks import python_blocks, run_blocks
from tests.cvt.models import SMALL, equal, small

SEGMENT = dataclasses.replace(SMALL, head="segment", decoder_dim=12, num_classes=5)
CPU = torch.device("cpu")


def segmenter(config=SEGMENT, **overrides):
    model = create_model(config, **overrides)
    randomize(model, 1)
    return model.eval()


def images(count=2, height=64, width=96):
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(0))


# The model ------------------------------------------------------------------------------------------------


def test_the_decoder_is_that_of_segformer():
    """Upsampled, concatenated and fused by one 1×1 convolution, as the paper has it."""
    decoder = Decoder((8, 16, 24), 12, 5).double().eval()
    randomize(decoder)
    maps = [torch.randn(2, c, 12 // s, 20 // s, dtype=torch.float64) for c, s in ((8, 1), (16, 2), (24, 4))]
    parts = []
    for layer, each in zip(decoder.projections, maps, strict=True):
        projected = F.conv2d(each, layer.weight[:, :, None, None], layer.bias)
        parts.append(F.interpolate(projected, (12, 20), mode="bilinear", align_corners=False))
    kernel = torch.cat([layer.weight for layer in decoder.fuse], dim=1)[:, :, None, None]
    fused = F.conv2d(torch.cat(parts, dim=1), kernel, decoder.fuse[0].bias).movedim(1, -1)
    fused = F.layer_norm(fused, (12,), decoder.norm.weight, decoder.norm.bias).relu()
    expected = F.linear(fused, decoder.classifier.weight, decoder.classifier.bias).movedim(-1, 1)
    torch.testing.assert_close(decoder(maps), expected, rtol=1e-12, atol=1e-12)


def test_logits_are_of_every_pixel():
    model = segmenter()
    assert isinstance(model, CvTSegmenter)
    assert model.feature_info.channels() == [8, 16, 24]
    for height, width in ((64, 96), (65, 47)):
        x = images(1, height, width)
        features = create_model(SMALL, features_only=True).eval()
        features.load_state_dict({k: v for k, v in model.state_dict().items() if k.startswith("stage")})
        expected = F.interpolate(model.decoder(features(x)), (height, width), mode="bilinear")
        assert torch.equal(model(x), expected)
        assert expected.shape == (1, 5, height, width)


def test_names_of_the_weights():
    """The stages are the classifier's; the head is as docs/segmentation.md says."""
    theirs = {name for name in small().state_dict() if name.startswith("stage")}
    ours = set(segmenter().state_dict())
    linear = [f"projections.{i}" for i in range(3)] + ["fuse.0", "norm", "classifier"]
    head = {f"{name}.{kind}" for name in linear for kind in ("weight", "bias")}
    assert ours - theirs == {f"decoder.{name}" for name in (*head, "fuse.1.weight", "fuse.2.weight")}
    assert theirs <= ours


def test_every_weight_has_a_gradient():
    """DistributedDataParallel expects that."""
    model = segmenter(drop_path_rate=0.0).train()
    logits = model(images(1))
    logits.square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    assert not torch.equal(model(images(1)), logits)  # of the head's dropout


def test_configurations_that_cannot_be():
    for wrong in (1, 256):
        with pytest.raises(
            ValueError, match=f"num_classes: got {wrong} with head='segment', expected 2 to 255"
        ):
            dataclasses.replace(SEGMENT, num_classes=wrong)
    assert dataclasses.replace(SEGMENT, num_classes=255).num_classes == 255
    with pytest.raises(ValueError, match=r"config: has head='segment', expected 'classify'"):
        CvT(SEGMENT)
    with pytest.raises(ValueError, match=r"config: has head='classify', expected 'segment'"):
        CvTSegmenter(SMALL)


def test_frozen_and_quantized():
    x, model = images(), segmenter()
    expected = model(x)
    frozen = ck.accelerate(copy.deepcopy(model), freeze=True)
    assert all(row.fused for row in ck.coverage(frozen))
    with torch.inference_mode():
        torch.testing.assert_close(frozen(x), expected, rtol=1e-4, atol=1e-4)
    report = ck.quantize(model, x)
    error = (model(x) - expected).square().mean() / expected.square().mean()
    assert 0 < error < 1e-2
    assert all(row.path.startswith("stage") for row in report if row.weight != "float")


# Weights --------------------------------------------------------------------------------------------------


def test_the_backbone_of_a_classifier(tmp_path):
    classifier = small()
    torch.save(classifier.state_dict(), tmp_path / "c.pth")
    with pytest.warns(UserWarning, match=r"c.pth has a head to classify and the model one to segment: the"):
        model = create_model(SEGMENT, checkpoint=tmp_path / "c.pth")
    own = model.state_dict()
    assert all(torch.equal(own[k], v) for k, v in classifier.state_dict().items() if k.startswith("stage"))
    assert model.labels is None
    with pytest.warns(UserWarning, match="the head was not loaded"):
        report = load_checkpoint(model, tmp_path / "c.pth")
    assert report.head_replaced
    assert {name.split(".")[0] for name in report.unused} == {"norm", "head"}


def test_own_weights_load_whole(tmp_path):
    model, x = segmenter(), images()
    torch.save(model.state_dict(), tmp_path / "s.pth")
    with pytest.raises(CheckpointError, match="is not a CvT of"):  # nothing tells its sizes but heads
        create_model(checkpoint=tmp_path / "s.pth")
    again = create_model(SEGMENT, checkpoint=tmp_path / "s.pth").eval()
    assert torch.equal(again(x), model(x))
    model.save_pretrained(tmp_path / "saved", labels=list("abcde"))
    again = CvTSegmenter.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(again(x), model(x))
    assert (again.config, again.labels) == (SEGMENT, list("abcde"))
    with pytest.raises(ValueError, match=r"has head='segment', expected 'classify'"):
        CvT.from_pretrained(tmp_path / "saved")


def test_a_preset_is_known_by_its_head(tmp_path):
    with torch.device("meta"):
        shapes = create_model("cvt_13", head="segment", decoder_dim=16, num_classes=3).state_dict()
    torch.save({name: torch.zeros(t.shape, dtype=t.dtype) for name, t in shapes.items()}, tmp_path / "s.pth")
    config = read_checkpoint(tmp_path / "s.pth").configuration()
    assert (config.head, config.decoder_dim, config.num_classes) == ("segment", 16, 3)


def test_weights_of_a_segmenter_for_others(tmp_path):
    model = segmenter()
    torch.save(model.state_dict(), tmp_path / "s.pth")
    with pytest.warns(UserWarning, match=r"has a head of 5 classes and the model one of 7: the head was not"):
        other = create_model(SEGMENT, checkpoint=tmp_path / "s.pth", num_classes=7)
    assert torch.equal(other.decoder.fuse[2].weight, model.decoder.fuse[2].weight)
    assert other.decoder.classifier.weight.shape == (7, 12)
    with pytest.warns(UserWarning, match=r"has a head to segment and the model one to classify: the head"):
        classifier = create_model(SMALL, checkpoint=tmp_path / "s.pth")
    assert torch.equal(classifier.stage2.blocks[1].mlp.fc1.weight, model.stage2.blocks[1].mlp.fc1.weight)
    assert equal(classifier.norm.state_dict(), torch.nn.LayerNorm(24).state_dict())
    features = create_model(SMALL, checkpoint=tmp_path / "s.pth", features_only=True)
    assert torch.equal(features.stage0.patch_embed.proj.weight, model.stage0.patch_embed.proj.weight)
    with pytest.raises(
        CheckpointError, match=r"of another shape \(first: decoder.projections.0.weight \(12, 8\)"
    ):
        create_model(SEGMENT, checkpoint=tmp_path / "s.pth", decoder_dim=16)


# Label maps -----------------------------------------------------------------------------------------------


def test_labels_are_cropped_and_flipped_with_their_images(label_maps):
    for crop in (RandomCrop(0.2), None):
        data = open_label_maps(label_maps, "train", 48, random_crop=crop)
        assert data.classes == ["class 0", "class 1", "class 2"]
        for pixels, labels in (data[i] for i in range(len(data))):
            red = pixels[0].float() if crop else (pixels[0] * 0.229 + 0.485) * 255
            expected = torch.where(labels == 255, (255 * 80) % 256, labels * 80)
            assert labels.dtype == torch.int64
            assert pixels.shape == (3, 48, 48)
            assert ((red - expected).abs() < 20).float().mean() > 0.7  # all but the edges, which are blurred
    crops = [
        open_label_maps(label_maps, "train", 48, random_crop=RandomCrop(flip=flip))[0][1] for flip in (0, 1)
    ]
    assert torch.equal(crops[0], crops[1].flip(1))
    assert not torch.equal(*crops)


@pytest.mark.parametrize("crop", [None, RandomCrop(0.2)])
def test_no_label_is_between_two_others(label_maps, crop):
    """A label map is resized without blending: a class between two others would be another one."""
    path = label_maps / "train" / "labels" / "0.png"
    stripes = np.tile(np.uint8([0, 0, 0, 2, 2, 255, 0, 2]), (48, 9))
    Image.fromarray(stripes).save(path)
    _, labels = open_label_maps(label_maps, "train", 40, random_crop=crop)[0]
    assert labels.unique().tolist() == [0, 2, 255]


def test_names_of_the_classes(label_maps):
    assert open_label_maps(label_maps, "val", 32, classes=list("abcd")).classes == list("abcd")
    (label_maps / "classes.txt").write_text("sky\nsea \n\nland\n")
    assert open_label_maps(label_maps, "val", 32, classes=["a", "b"]).classes == ["sky", "sea", "land"]
    with pytest.raises(ValueError, match=r"classes: got 256, expected at most 255"):
        LabelMapDataset(["a"], ["b"], [f"{i}" for i in range(256)], 32)


def save_png(file, bits, labels, *, palette):
    """Writes labels (H, W) with so many bits each; a row must fill whole bytes."""
    digits = (labels[..., None] >> np.arange(bits)[::-1] & 1).astype(np.uint8)
    rows = np.packbits(digits.reshape(len(labels), -1), axis=1)
    height, width = labels.shape
    header = struct.pack(">IIBBBBB", width, height, bits, 3 if palette else 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))]
    if palette:
        chunks.insert(1, (b"PLTE", bytes((90 + i) % 256 for i in range(3 * 2**bits))))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (*chunks, (b"IEND", b""))
    ]
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.mark.parametrize("palette", [False, True], ids=["gray", "palette"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_labels_of_any_number_of_bits(tmp_path, bits, palette):
    """Pillow stretches gray pixels of fewer than 8 bits to 255."""
    labels = np.arange(16).reshape(2, 8) % 2**bits
    save_png(tmp_path / "a.png", bits, labels, palette=palette)
    assert np.array_equal(np.array(read_label_map(tmp_path / "a.png")), labels)


@pytest.mark.parametrize(
    ("label_map", "message"),
    [
        (Image.new("L", (72, 47)), "0.png: has 72×47 pixels, its image 72×48"),
        (Image.new("L", (72, 48), 3), "0.png: has label 3, expected 0 to 2 for 3 classes, or 255, which is"),
        (Image.new("RGB", (72, 48)), "0.png: has pixels of mode RGB, expected a class index of at most 8"),
    ],
    ids=["size", "label", "RGB"],
)
def test_a_wrong_label_map_is_named(label_maps, label_map, message):
    (label_maps / "classes.txt").write_text("a\nb\nc\n")
    label_map.save(label_maps / "val" / "labels" / "0.png")
    with pytest.raises(ImageError, match=f"labels/{message}"):
        list(Batches(open_label_maps(label_maps, "val", 32), 2))
    with pytest.warns(UserWarning, match=f"skipped: .*labels/{message}"):
        batches = list(Batches(open_label_maps(label_maps, "val", 32), 2, corrupt="skip"))
    assert [len(labels) for _, labels in batches] == [1, 1]


def test_an_unreadable_label_map_is_skipped(label_maps):
    """The same is left out with classes.txt and without."""
    (label_maps / "val" / "labels" / "1.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"1.png: is not a readable label map"):
        open_label_maps(label_maps, "val", 32)
    with pytest.warns(UserWarning, match=r"data: no classes are known of .*1.png: is not") as caught:
        numbered = open_label_maps(label_maps, "val", 32, corrupt="skip")
    assert [each.filename for each in caught] == [__file__]
    (label_maps / "classes.txt").write_text("a\nb\nc\n")
    named = open_label_maps(label_maps, "val", 32, corrupt="skip")
    for data in (numbered, named):
        with pytest.warns(UserWarning, match=r"skipped: .*1.png: is not a readable label map"):
            batches = list(Batches(data, 3, corrupt="skip"))
        assert [len(labels) for _, labels in batches] == [2]
        with pytest.raises(ImageError, match=r"1.png: is not a readable label map"):
            list(Batches(data, 3))


@pytest.mark.parametrize(
    ("remove", "arguments", "error", "message"),
    [
        ("labels/0.png", {}, FileNotFoundError, "images/0.png has no label map, expected .*labels/0.png"),
        ("images/*", {}, ValueError, "val/images has no images"),
        ("images", {}, FileNotFoundError, "val/images does not exist, expected train/images/NAME"),
        ("none", {"split": "test"}, ValueError, "split: got 'test'"),
    ],
)
def test_a_wrong_folder_is_named(label_maps, remove, arguments, error, message):
    for path in (label_maps / "val").glob(remove):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(error, match=message):
        open_label_maps(label_maps, **{"split": "val", "image_size": 32, **arguments})


def test_scenes_of_digits(tmp_path):
    for name in ("a", "b"):
        save_digit_scenes(tmp_path / name, train=4, val=2, image_size=32)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 13
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)
    data = open_label_maps(tmp_path / "a", "train", 32)
    assert data.classes == ["photograph", *map(str, range(10))]
    labels = torch.stack([data[i][1] for i in range(4)])
    assert 0.4 < (labels == 0).float().mean() < 0.98
    for name, wrong in (("image_size", 8), ("train", -1), ("val", 0)):
        with pytest.raises(ValueError, match=f"{name}: got {wrong}, expected an integer of at least "):
            save_digit_scenes(tmp_path / "none", **{name: wrong})
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_the_page_of_segmentation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "segmentation.md"
    with pytest.warns(UserWarning, match="has a head to classify and the model one to segment"):
        names = run_blocks(python_blocks(page.read_text(encoding="utf-8")))
    assert names["logits"].shape == (2, 21, 64, 96)
    assert equal(names["again"].state_dict(), names["tuned"].state_dict())
    assert names["figures"].images == 16
    assert "%" in capsys.readouterr().out


# Figures --------------------------------------------------------------------------------------------------


def answers(count=3, classes=4):
    """Returns logits and labels; class 3 is neither labeled nor answered, one label in ten is ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, classes, 8, 10, generator=generator)
    logits[:, 3] = -10
    labels = torch.randint(0, 3, (count, 8, 10), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.1] = 255
    return logits, labels


def test_figures_agree_with_scikit_learn():
    logits, labels = answers()
    batches = [(logits[:2], labels[:2]), (logits[2:], labels[2:])]
    sums = add_up_pixels(found(lambda x: x, batches, CPU), CPU, 4)
    true, predicted = labels[labels != 255].numpy(), logits.argmax(1)[labels != 255].numpy()
    assert torch.equal(sums.confusion, torch.from_numpy(confusion_matrix(true, predicted, labels=range(4))))
    expected = jaccard_score(true, predicted, labels=range(3), average=None)
    np.testing.assert_allclose(sums.iou[:3].numpy(), expected, rtol=1e-6)
    assert sums.iou[3] == 0
    assert sums.miou == pytest.approx(expected.mean(), rel=1e-6)  # without the class that does not occur
    assert sums.pixel_accuracy == pytest.approx((true == predicted).mean())
    assert sums.loss == pytest.approx(F.cross_entropy(logits, labels, ignore_index=255).item(), rel=1e-6)


def test_the_loss_of_pixels():
    logits, labels = answers()
    expected = F.cross_entropy(logits, labels, ignore_index=255, label_smoothing=0.1)
    torch.testing.assert_close(pixel_loss(logits, labels, label_smoothing=0.1), expected)
    assert pixel_loss(logits, torch.full_like(labels, 255)) == 0


class _Fixed(torch.nn.Module):
    config = dataclasses.replace(SEGMENT, num_classes=4)

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, images):
        return self.logits[: len(images)]


def test_evaluation_of_pixels():
    logits, labels = answers()
    model, x = _Fixed(logits), torch.zeros(3, 3, 8, 10)
    evaluation = evaluate_pixels(model, [(x, labels)])
    assert evaluation.images == 3
    assert evaluation.images_per_second is None  # of one batch
    assert evaluate_pixels(model, [(x, labels)] * 5).images_per_second > 0
    assert evaluation.confusion.sum() == (labels != 255).sum()
    assert model.training
    for wrong, message in (
        (labels[:, :4], r"batches\[0\]: got labels of shape \(3, 4, 10\) .*expected \(3, 8, 10\)"),
        (torch.full_like(labels, 4), r"batches\[0\]: got label 4, expected 0 to 3"),
        (torch.full_like(labels, 255), "got no labeled pixels"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_pixels(model, [(x, wrong)])
    with pytest.raises(ValueError, match="logits that are not finite"):
        evaluate_pixels(_Fixed(logits / 0), [(x, labels)])


def test_cost_is_of_the_whole_model():
    of_stages = cost(dataclasses.replace(SMALL, num_classes=0), 64)
    whole = cost(SEGMENT, 64)
    pixels, dim, channels = (16 * 16, 8 * 8, 4 * 4), 12, SEGMENT.embed_dims
    of_head = sum(n * (c * dim + dim * dim) for n, c in zip(pixels, channels, strict=True)) + 256 * dim * 5
    assert whole.multiply_adds == of_stages.multiply_adds + of_head
    assert whole.parameters == sum(p.numel() for p in segmenter().parameters())
