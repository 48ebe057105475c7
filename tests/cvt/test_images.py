"""Images as people have them and as nobody takes them, the official preprocessing, and class names."""

import importlib.util
import io
import re
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from cvt import images
from cvt.images import ImageError, load_images, normalize, preprocess, read_image, read_labels, sample_photos
from cvt.tools.datasets import Batches, ImageDataset
from cvt.tools.label_maps import read_label_map

RED, BLUE, WHITE = (200, 30, 40), (20, 40, 220), (255, 255, 255)


def two_halves(size=(40, 20)):
    """Returns an image that is red on the left and blue on the right."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image


def assert_halves(path, left, right, tolerance=0):
    """Compares the colors in the middle of both halves."""
    image = read_image(path)
    assert (image.mode, image.size) == ("RGB", (40, 20))
    found = [image.getpixel((x, 10)) for x in (10, 30)]
    assert np.abs(np.array(found, dtype=int) - np.array([left, right])).max() <= tolerance


# What files hold ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [name for name in images._formats() if name in Image.SAVE])
def test_formats_that_are_read(tmp_path, kind):
    two_halves().save(tmp_path / "a", kind)
    assert_halves(tmp_path / "a", RED, BLUE, 8)


# How a camera held each way stores the picture: the transform that a viewer must undo.
STORED = {
    1: lambda image: image,
    3: lambda image: image.rotate(180),
    6: lambda image: image.rotate(90, expand=True),
    8: lambda image: image.rotate(270, expand=True),
    2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation(tmp_path, orientation):
    """Also beside an odd tag: ImageWidth as BYTE in place of SHORT or LONG, in either byte order."""
    exif = Image.Exif()
    exif[0x0112], exif[0x0100] = orientation, 40
    STORED[orientation](two_halves()).save(tmp_path / "a.jpg", exif=exif, subsampling=0)
    assert_halves(tmp_path / "a.jpg", RED, BLUE, 4)
    whole = jpeg = (tmp_path / "a.jpg").read_bytes()
    for tag in (b"\x01\x00\x00\x03", b"\x01\x00\x00\x04", b"\x00\x01\x03\x00", b"\x00\x01\x04\x00"):
        jpeg = jpeg.replace(tag, tag.replace(b"\x03", b"\x01").replace(b"\x04", b"\x01"), 1)
    assert jpeg != whole
    (tmp_path / "a.jpg").write_bytes(jpeg)
    assert_halves(tmp_path / "a.jpg", RED, BLUE, 4)


def of_16_bits(left, right):
    return Image.fromarray(np.repeat(np.uint16([[left] * 20 + [right] * 20]), 20, axis=0))


def half_transparent(mode):
    image = two_halves().convert(mode)
    image.putalpha(Image.fromarray(np.repeat(np.uint8([[255] * 20 + [0] * 20]), 20, axis=0)))
    return image


PALETTE = two_halves().quantize(4)


@pytest.mark.parametrize(
    ("image", "options", "left", "right"),
    [
        (two_halves().convert("L"), {}, (82,) * 3, (55,) * 3),
        (of_16_bits(51 * 257, 204 * 257), {}, (51,) * 3, (204,) * 3),  # scaled, not clipped
        (of_16_bits(0, 65535), {}, (0,) * 3, WHITE),
        (of_16_bits(7, 204 * 257), {"transparency": 7}, WHITE, (204,) * 3),
        (half_transparent("RGB"), {}, RED, WHITE),
        (half_transparent("L"), {}, (82,) * 3, WHITE),
        (PALETTE, {"transparency": PALETTE.getpixel((30, 10))}, RED, WHITE),
        (two_halves().convert("CMYK"), {"format": "JPEG"}, RED, BLUE),
    ],
)
def test_pixels_become_rgb_on_white(tmp_path, image, options, left, right):
    image.save(tmp_path / "a", **{"format": "PNG"} | options)
    assert_halves(tmp_path / "a", left, right, 8 if image.mode == "CMYK" else 2)


def png_bytes():
    buffer = io.BytesIO()
    two_halves((300, 300)).save(buffer, "PNG")
    return buffer.getvalue()


def huge_png():
    """Returns a header that claims 60000×60000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("text.jpg", b"not an image at all\n", ImageError, "is not a readable image"),
        ("empty.png", b"", ImageError, "is not a readable image"),
        ("truncated.png", png_bytes()[:300], ImageError, "is not a readable image"),
        ("bomb.png", huge_png(), ImageError, "is not a readable image"),
        (".", None, ImageError, "is not a readable image"),
        ("none.jpg", None, FileNotFoundError, "does not exist"),
        ("small.png", (500, 200), ImageError, "is 500×200 pixels, smaller than the 224×224 crop"),
        ("int.tiff", np.int32, ImageError, "has 32-bit pixels of unknown range"),
        ("float.tiff", np.float32, ImageError, "has 32-bit pixels of unknown range"),
        ("longer.png", (2**20 + 1, 1), ImageError, "is 1048577×1 pixels, expected at most 1048576 on"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, error, message):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, tuple):
        Image.new("L", content).save(path)
    elif content is not None:
        Image.fromarray(np.full((20, 40), 200, dtype=content)).save(path)
    with pytest.raises(error, match=re.escape(f"{path}") + f".* {message}"):
        load_images([path])
    if "is 1048577" in message:
        with pytest.raises(error, match=message):
            read_label_map(path)


def test_more_pixels_than_pillow_opens(tmp_path, monkeypatch):
    """It would warn of half as many, if that were not put down once, at the import."""
    spec = importlib.util.spec_from_file_location("cvt.images_again", images.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # pytest undoes the first import's
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    Image.new("L", (20, 20)).save(tmp_path / "a.png")
    Image.new("L", (30, 30)).save(tmp_path / "b.png")
    monkeypatch.setattr(images, "warnings", None)  # whose filters hold in all threads
    for read in (read_image, read_label_map):
        read(tmp_path / "a.png")
        with pytest.raises(ImageError, match=r"b.png: has more than 600 pixels, the most that Pillow opens"):
            read(tmp_path / "b.png")


def test_too_little_memory_names_the_file(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise MemoryError

    Image.new("L", (30, 30)).save(tmp_path / "a.png")
    for name in ("resize", "copy"):
        with monkeypatch.context() as patch:
            patch.setattr(Image.Image, name, full)
            with pytest.raises(ImageError, match=r"a.png: needs more memory than there is"):
                load_images([tmp_path / "a.png"], upscale=True)


@pytest.mark.parametrize("suffix", ["jpg", "eps"])
def test_other_formats_are_refused_before_anything_starts(tmp_path, monkeypatch, suffix):
    for start in ("Popen", "run", "check_call", "check_output"):
        monkeypatch.setattr(subprocess, start, lambda *_, **__: pytest.fail("a program was started"))
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("a program was started"))
    Image.new("RGB", (8, 8)).save(tmp_path / f"b.{suffix}", "EPS")
    for read, kind in ((read_image, "image"), (read_label_map, "label map")):
        with pytest.raises(ImageError, match=rf"b.{suffix}: is not a readable {kind}: expected one of JPEG"):
            read(tmp_path / f"b.{suffix}")


# Preprocessing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [224, 384, 96])
def test_preprocessing_is_that_of_hugging_face(size):
    """Its ConvNextImageProcessor, which its CvT repositories name, where the crop's margins are even.

    With an odd margin it puts the crop one pixel before torchvision, which Microsoft used and we follow.
    """
    from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil

    processor = ConvNextImageProcessorPil(
        size={"shortest_edge": size}, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]
    )
    for path in sample_photos():
        image = read_image(path).crop((0, 0, 640, 400 if size == 96 else 426))
        expected = processor(image, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(preprocess(image, size), expected, rtol=0, atol=1e-5)


def test_the_crop_is_where_torchvision_puts_it():
    """round((383 − 224) / 2) = 80 for a margin of 79.5."""
    image = Image.new("RGB", (383, 256))
    image.paste((255, 255, 255), (80, 0, 81, 256))
    assert preprocess(image)[0, 0].argmax() == 0


def test_crop_fraction_chooses_how_much_is_seen():
    image = two_halves((64, 64))
    for fraction, expected in (
        (1.0, image.resize((32, 32), Image.Resampling.BICUBIC)),
        (0.5, image.crop((16, 16, 48, 48))),
    ):
        pixels = torch.from_numpy(np.array(expected)).permute(2, 0, 1) / 255
        assert torch.equal(preprocess(image, 32, crop_fraction=fraction), normalize(pixels))


def test_sizes_that_no_image_has():
    for wrong, error, message in (
        ({"image_size": 10**8}, ValueError, "image_size: got 100000000"),
        ({"image_size": 16.0}, TypeError, "image_size: got 16.0"),
        ({"crop_fraction": float("nan")}, ValueError, "crop_fraction: got nan"),
    ):
        with pytest.raises(error, match=message):
            preprocess(two_halves((256, 256)), **wrong)


def test_several_files(tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for size, path in zip(((224, 224), (225, 1000), (1001, 257)), paths, strict=True):
        two_halves(size).save(path)
    assert load_images(paths).shape == (3, 3, 224, 224)
    for path in ("a.png", Path("a.png")):
        with pytest.raises(TypeError, match=r"paths: got 'a.png', expected a sequence of paths"):
            load_images(path)


# Long images ----------------------------------------------------------------------------------------------


def test_what_is_too_long_is_named(tmp_path):
    path = tmp_path / "long.png"
    Image.new("L", (1, 2000)).save(path)
    assert load_images([path], upscale=True).shape == (1, 3, 224, 224)
    Image.new("L", (1, 700_000)).save(path)
    for size, message in ((384, "384×384"), (224, "256×179200000")):
        with pytest.raises(
            ImageError, match=rf"long.png: is 1×700000 pixels, too long to be resized to {message}"
        ):
            load_images([path], size, upscale=True)
    with pytest.raises(ImageError, match=r"images\[0\]: is 1×700000"):
        list(Batches(ImageDataset([Image.new("RGB", (1, 700_000))], [0], ["a", "b"], 384), 1))


# Class names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "cat\ndog\ncorgi, Pembroke\n"),
        ("a.txt", "\ufeffcat\ndog\ncorgi, Pembroke"),
        ("a.json", '["cat", "dog", "corgi, Pembroke"]'),
        ("a.json", '{"2": "corgi, Pembroke", "0": "cat", "1": "dog"}'),
    ],
)
def test_labels(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert read_labels(tmp_path / name, 3) == ["cat", "dog", "corgi, Pembroke"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"cat\ndog\n", "names 2 classes, expected 3"),
        ("a.txt", b"\xff\xfe\x00c", "is not UTF-8 text"),
        ("a.json", b'["cat"', "is not JSON"),
        ("a.json", b"[" * 100000, "is not JSON"),
        ("a.json", b"[1, 2, 3]", "has no list of names"),
        ("a.json", b'"cat"', "has no list of names"),
        ("a.json", b'{"1": "a", "2": "b", "3": "c"}', "missing are '0', not expected '3'"),
        ("a.json", b'{"0": "a", "1": "b", "2": "c", "3": "d"}', "missing are none, not expected '3'"),
        ("a.json", b'{"0": "a", "1": "b", "1": "c"}', "an object has a key twice"),
        ("a.json", b'["a", "b", "\\ud800"]', "of 1 characters among"),
        ("a.txt", b"a\nb\n" + b"x" * 1001, "'xx.*' of 1001 characters among"),
        (
            "a.json",
            b'{"-1": "a", "00": "b", "1.0": "c", "x": "d"}',
            "missing are '0', '1', '2', not expected '-1'",
        ),
        ("a.txt", None, "does not exist"),
    ],
)
def test_bad_labels(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_labels(tmp_path / name, 3)
