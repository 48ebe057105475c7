"""Images as people have them, the official preprocessing, and class names."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cvt.images import ImageError, load_images, normalize, preprocess, read_image, read_labels, sample_photos

RED, BLUE = (200, 30, 40), (20, 40, 220)


def two_halves(size=(40, 20)):
    """Returns an image that is red on the left and blue on the right."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image


def colors(image):
    """Returns the colors in the middle of the left and the right half."""
    assert image.mode == "RGB"
    width, height = image.size
    return [image.getpixel((x, height // 2)) for x in (width // 4, 3 * width // 4)]


def near(actual, expected, tolerance):
    return np.abs(np.array(actual, dtype=int) - np.array(expected)).max() <= tolerance


@pytest.mark.parametrize("path", ["a.png", Path("a.png")])
def test_a_single_path_is_not_taken_for_several(path):
    with pytest.raises(TypeError, match=r"paths: got 'a.png', expected a sequence of paths"):
        load_images(path)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "bmp"])
def test_rgb(tmp_path, suffix):
    two_halves().save(tmp_path / f"a.{suffix}")
    assert near(colors(read_image(tmp_path / f"a.{suffix}")), [RED, BLUE], 4)


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
    exif = Image.Exif()
    exif[0x0112] = orientation
    STORED[orientation](two_halves()).save(tmp_path / "a.jpg", exif=exif, subsampling=0)
    image = read_image(tmp_path / "a.jpg")
    assert image.size == (40, 20)
    assert near(colors(image), [RED, BLUE], 4)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_grayscale(tmp_path, suffix):
    two_halves().convert("L").save(tmp_path / f"a.{suffix}")
    expected = [[two_halves().convert("L").getpixel((x, 10))] * 3 for x in (10, 30)]
    assert near(colors(read_image(tmp_path / f"a.{suffix}")), expected, 2)


def test_grayscale_of_16_bits_is_scaled_not_clipped(tmp_path):
    values = np.full((20, 40), 51 * 257, dtype=np.uint16)
    values[:, 20:] = 204 * 257
    Image.fromarray(values).save(tmp_path / "a.png")
    assert colors(read_image(tmp_path / "a.png")) == [(51,) * 3, (204,) * 3]


def test_grayscale_of_16_bits_with_a_transparent_value(tmp_path):
    values = np.full((20, 40), 7, dtype=np.uint16)
    values[:, 20:] = 204 * 257
    Image.fromarray(values).save(tmp_path / "a.png", transparency=7)
    assert colors(read_image(tmp_path / "a.png")) == [(255,) * 3, (204,) * 3]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_unknown_range_are_refused(tmp_path, dtype):
    Image.fromarray(np.full((20, 40), 200, dtype=dtype)).save(tmp_path / "a.tiff")
    with pytest.raises(ImageError, match=r"a.tiff: has 32-bit pixels of unknown range"):
        read_image(tmp_path / "a.tiff")


def test_an_odd_exif_tag_does_not_spoil_the_picture(tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x0100] = 6, 40
    STORED[6](two_halves()).save(tmp_path / "a.jpg", exif=exif, subsampling=0)
    jpeg = (tmp_path / "a.jpg").read_bytes()
    for tag in (b"\x01\x00\x00\x03", b"\x01\x00\x00\x04", b"\x00\x01\x03\x00", b"\x00\x01\x04\x00"):
        if tag in jpeg:  # ImageWidth as SHORT or LONG, in either byte order: now of type BYTE
            broken = tag.replace(b"\x03", b"\x01").replace(b"\x04", b"\x01")
            (tmp_path / "a.jpg").write_bytes(jpeg.replace(tag, broken, 1))
    assert (tmp_path / "a.jpg").read_bytes() != jpeg
    assert near(colors(read_image(tmp_path / "a.jpg")), [RED, BLUE], 4)


def test_transparency_is_shown_on_white(tmp_path):
    image = two_halves().convert("RGBA")
    image.putalpha(Image.fromarray(np.repeat(np.uint8([[255] * 20 + [0] * 20]), 20, axis=0)))
    image.save(tmp_path / "a.png")
    assert colors(read_image(tmp_path / "a.png")) == [RED, (255, 255, 255)]
    gray = Image.merge("LA", (Image.new("L", (40, 20), 100), image.getchannel("A")))
    gray.save(tmp_path / "gray.png")
    assert colors(read_image(tmp_path / "gray.png")) == [(100,) * 3, (255,) * 3]
    palette = two_halves().quantize(4)
    palette.save(tmp_path / "palette.png", transparency=palette.getpixel((30, 10)))
    assert near(colors(read_image(tmp_path / "palette.png")), [RED, (255, 255, 255)], 2)


def test_cmyk_jpeg(tmp_path):
    two_halves().convert("CMYK").save(tmp_path / "a.jpg")
    assert near(colors(read_image(tmp_path / "a.jpg")), [RED, BLUE], 8)


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
        assert expected.shape == (3, size, size)
        torch.testing.assert_close(preprocess(image, size), expected, rtol=0, atol=1e-5)


def test_the_crop_is_where_torchvision_puts_it():
    """round((383 − 224) / 2) = 80 for a margin of 79.5."""
    image = Image.new("RGB", (383, 256))
    image.paste((255, 255, 255), (80, 0, 81, 256))
    assert preprocess(image)[0, 0].argmax() == 0


def test_preprocessing_by_hand():
    """The crop of a wide picture: 512×256 after the resize, so columns 144 to 368 of it."""
    columns = np.arange(1024) // 4
    image = Image.fromarray(
        np.repeat(np.repeat(columns[None, :, None], 512, axis=0), 3, axis=2).astype(np.uint8)
    )
    out = preprocess(image)
    red = (out[0] * 0.229 + 0.485) * 255
    assert out.shape == (3, 224, 224)
    expected = torch.arange(144, 368).float() / 2
    torch.testing.assert_close(red[100], expected, rtol=0, atol=0.6)


def test_batches_and_odd_sizes(tmp_path):
    paths = []
    for size in ((224, 224), (225, 1000), (1001, 257)):
        two_halves(size).save(tmp_path / f"{size[0]}.png")
        paths.append(tmp_path / f"{size[0]}.png")
    assert load_images(paths).shape == (3, 3, 224, 224)


def png_bytes():
    buffer = io.BytesIO()
    two_halves((300, 300)).save(buffer, "PNG")
    return buffer.getvalue()


def jpeg_bytes():
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG")
    return buffer.getvalue()


def huge_png():
    """Returns a header that claims 60000×60000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("text.jpg", b"not an image at all\n"),
        ("empty.png", b""),
        ("truncated.jpg", jpeg_bytes()[:20000]),
        ("truncated.png", png_bytes()[:300]),
        ("bomb.png", huge_png()),
    ],
)
def test_damaged_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageError, match=f"{name}: is not a readable image"):
        load_images([tmp_path / name])


def test_missing_small_and_not_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"image: .*none.jpg does not exist"):
        load_images([tmp_path / "none.jpg"])
    with pytest.raises(ImageError, match="is not a readable image"):
        load_images([tmp_path])
    two_halves((500, 200)).save(tmp_path / "small.png")
    with pytest.raises(ImageError, match=r"small.png: is 500×200 pixels, smaller than the 224×224 crop"):
        load_images([tmp_path / "small.png"])


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
        ("a.txt", b"cat\ndog\n", "a.txt names 2 classes, expected 3"),
        ("a.txt", b"\xff\xfe\x00c", "a.txt is not UTF-8 text"),
        ("a.json", b'["cat"', "a.json is not JSON"),
        ("a.json", b"[" * 100000, "a.json is not JSON"),
        ("a.json", b"[1, 2, 3]", "a.json has no list of names"),
        ("a.json", b'"cat"', "a.json has no list of names"),
        ("a.json", b'{"1": "a", "2": "b", "3": "c"}', "missing are '0', not expected '3'"),
        ("a.json", b'{"0": "a", "2": "c", "1000": "x"}', "missing are '1', not expected '1000'"),
        ("a.json", b'{"0": "a", "1": "b", "2": "c", "3": "d"}', "a.json names 4 classes, expected 3"),
        ("a.json", b'{"0": "a", "1": "b", "1": "c"}', "a.json has the key '1' more than once"),
        ("a.json", b'{"0": "a", "1": 2, "2": "c"}', "a.json has no list of names and no object"),
        ("a.json", b'["a", "b", "\\ud800"]', "of 1 characters among the labels of .*a.json, expected text"),
        (
            "a.txt",
            b"a\nb\n" + b"x" * 1001,
            "'xx.*' of 1001 characters among the labels of .*a.txt, expected ",
        ),
        ("a.json", b'{"-1": "a", "00": "b", "1.0": "c", "x": "d"}', "'0', '1', '2', .* '1.0', and 1 more"),
    ],
)
def test_bad_labels(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_labels(tmp_path / name, 3)
    with pytest.raises(FileNotFoundError, match=r"labels: .* does not exist"):
        read_labels(tmp_path / "none", 3)


def test_crop_fraction_chooses_how_much_is_seen():
    image = two_halves((64, 64))
    whole, half = (preprocess(image, 32, crop_fraction=f) for f in (1.0, 0.5))
    expected = image.resize((32, 32), Image.Resampling.BICUBIC)
    assert torch.equal(whole, normalize(torch.from_numpy(np.array(expected)).permute(2, 0, 1) / 255))
    center = image.crop((16, 16, 48, 48))
    assert torch.equal(half, normalize(torch.from_numpy(np.array(center)).permute(2, 0, 1) / 255))


@pytest.mark.parametrize(
    ("size", "fraction", "error", "message"),
    [
        (0, None, ValueError, "image_size: got 0, expected at least 1"),
        (10**8, None, ValueError, "image_size: got 100000000, expected at least 1 and below 16385"),
        (16.0, None, TypeError, "image_size: got 16.0, expected int"),
        (16, 0.0, ValueError, "crop_fraction: got 0.0, expected a part of the image"),
        (16, float("nan"), ValueError, "crop_fraction: got nan"),
    ],
)
def test_sizes_that_no_image_has(size, fraction, error, message):
    with pytest.raises(error, match=message):
        preprocess(Image.new("RGB", (32, 32)), size, crop_fraction=fraction, upscale=True)
