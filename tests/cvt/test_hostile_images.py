"""Images that nobody takes with a camera, and folders in which some cannot be reached."""

import argparse
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from cvt import create_model, images
from cvt.card import ModelCard
from cvt.commands import common, main
from cvt.datasets import Batches, ImageDataset, RandomCrop, open_dataset, open_parts
from cvt.images import ImageError, load_images, preprocess, read_image
from cvt.label_maps import open_label_maps, read_label_map
from cvt.training.recipe import MODELS
from tests.checks import bad

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    """Makes a data set of two classes with two images each."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(2):
                Image.new("L", (20, 20), 100 * i).save(tmp_path / split / name / f"{i}.png")
    return tmp_path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Writes a small checkpoint as ``cvt train`` does, of images of 224 pixels that are cropped."""
    model = create_model(MODELS["cvt_nano"], num_classes=2)
    path = tmp_path_factory.mktemp("weights") / "best.pth"
    torch.save(
        {"model": model.state_dict(), "card": ModelCard(model.config, ["cat", "dog"], 224, None).to_dict()},
        path,
    )
    return path


# Long images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 700), (900, 3), (30, 2500), (2000, 700)])
def test_the_crop_alone_has_the_pixels_of_the_crop_of_the_whole(monkeypatch, size):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    for shorter, side in ((36, 32), (32, 32), (64, 16)):
        results = []
        for limit in (2**40, 0):
            monkeypatch.setattr(images, "_WHOLE", limit)
            results.append(np.array(images._central(image, shorter, side), dtype=int))
        assert results[0].shape == (side, side, 3)
        assert np.abs(results[0] - results[1]).max() <= 1


def test_long_images_are_cropped_without_the_whole(tmp_path, monkeypatch):
    """The whole would be 5 million rows of 256 pixels."""
    Image.linear_gradient("L").resize((1, 20000)).save(tmp_path / "long.png")
    resize = Image.Image.resize

    def watched(image, size, *arguments, **options):
        assert size[0] * size[1] <= 2**24
        return resize(image, size, *arguments, **options)

    monkeypatch.setattr(Image.Image, "resize", watched)
    for turn in (0, 90):
        image = read_image(tmp_path / "long.png").rotate(turn, expand=True)
        gray = preprocess(image, upscale=True)[0] * 0.229 + 0.485
        assert gray.std() < 0.01  # 0.9 of 20000 pixels
        assert gray.mean() == pytest.approx(0.5, abs=0.01)
    data = ImageDataset([tmp_path / "long.png"], [0], ["a", "b"], 224, random_crop=RandomCrop())
    assert data[0][0].shape == (3, 224, 224)


def test_wide_images_take_little_memory():
    """Pillow changes the width first."""
    assert preprocess(Image.new("RGB", (700_000, 10)), 384, upscale=True).shape == (3, 384, 384)


def test_what_is_too_long_is_named(tmp_path, checkpoint, capsys):
    Image.new("L", (1, 700_000)).save(tmp_path / "long.png")
    Image.new("L", (2**20 + 1, 1)).save(tmp_path / "longer.png")
    assert load_images([tmp_path / "long.png"], upscale=True).shape == (1, 3, 224, 224)
    with pytest.raises(ImageError, match=r"long.png: is 1×700000 pixels, too long to be resized to 384×384"):
        load_images([tmp_path / "long.png"], 384, upscale=True)
    data = ImageDataset([tmp_path / "long.png"] * 2, [0, 1], ["a", "b"], 384)
    with pytest.raises(ImageError, match=r"long.png: is 1×700000 pixels, too long"):
        list(Batches(data, 2))
    with pytest.warns(UserWarning, match=r"skipped: .*long.png: is 1×700000 pixels, too long"):
        assert list(Batches(data, 2, corrupt="skip")) == []
    with pytest.raises(ImageError, match=r"images\[0\]: is 1×700000"):
        list(Batches(ImageDataset([Image.new("RGB", (1, 700_000))], [0], ["a", "b"], 384), 1))
    for read in (read_image, read_label_map):
        with pytest.raises(ImageError, match=r"longer.png: is 1048577×1 pixels, expected at most 1048576 on"):
            read(tmp_path / "longer.png")
    for command in ("classify", "explain"):
        options = ["--checkpoint", checkpoint, "--image-size", 384]
        options += ["--output", tmp_path / "out"] if command == "explain" else []
        assert "long.png: is 1×700000 pixels, too long" in bad(
            capsys, main, command, tmp_path / "long.png", *options
        )
    assert not (tmp_path / "out").exists()


def test_too_little_memory_names_the_file(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise MemoryError

    Image.new("L", (30, 30)).save(tmp_path / "a.png")
    for name in ("resize", "copy"):
        with monkeypatch.context() as patch:
            patch.setattr(Image.Image, name, full)
            with pytest.raises(ImageError, match=r"a.png: needs more memory than there is"):
                load_images([tmp_path / "a.png"], upscale=True)


def test_more_pixels_than_pillow_opens(tmp_path, monkeypatch):
    """It would warn of half as many, if that were not put down once, at the import."""
    spec = importlib.util.spec_from_file_location("cvt.images_again", images.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # pytest undoes that of the first import
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    Image.new("L", (20, 20)).save(tmp_path / "a.png")
    Image.new("L", (30, 30)).save(tmp_path / "b.png")
    with common.recorded_warnings() as remarks:
        read_image(tmp_path / "a.png")
    assert not remarks
    monkeypatch.setattr(images, "warnings", None)  # whose filters are those of all threads
    for read in (read_image, read_label_map):
        read(tmp_path / "a.png")
        message = r"b.png: has more than 600 pixels, the most that Pillow opens: twice PIL.Image.MAX_IMAGE_P"
        with pytest.raises(ImageError, match=message):
            read(tmp_path / "b.png")


# Formats --------------------------------------------------------------------------------------------------


def test_other_formats_are_refused_before_anything_starts(tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.eps")
    for start in ("Popen", "run", "check_call", "check_output"):
        monkeypatch.setattr(subprocess, start, lambda *_, **__: pytest.fail("a program was started"))
    monkeypatch.setattr(
        EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started")
    )
    for suffix in ("jpg", "png", "eps", "ps"):
        file = (tmp_path / "a.eps").rename(tmp_path / f"b.{suffix}")
        for read, kind in ((read_image, "image"), (read_label_map, "label map")):
            with pytest.raises(
                ImageError, match=rf"b.{suffix}: is not a readable {kind}: expected one of JPEG, PNG"
            ):
                read(file)
        file.rename(tmp_path / "a.eps")


@pytest.mark.parametrize("kind", [name for name in images._formats() if name in Image.SAVE])
def test_formats_that_are_read(tmp_path, kind):
    Image.new("RGB", (24, 24), (200, 30, 40)).save(tmp_path / "a", kind)
    assert np.abs(np.array(read_image(tmp_path / "a"), int) - (200, 30, 40)).max() <= 8


def test_images_are_opened_in_one_place():
    files = [file for name in ("cvt", "cvt_kernels", "benchmarks") for file in (ROOT / name).rglob("*.py")]
    opening = re.compile(r"\b(PIL\.)?Image\.open\(|import open\b|ImageFile\.Parser")
    assert [file.name for file in files if opening.search(file.read_text(encoding="utf-8"))] == ["images.py"]


# Folders --------------------------------------------------------------------------------------------------


def test_what_is_left_out_is_counted_and_named(folder):
    val = folder / "val"
    (val / "cat" / "gone.png").symlink_to(folder / "nowhere.png")
    (val / "cat" / ".hidden.png").symlink_to(folder / "nowhere.png")
    os.mkfifo(val / "dog" / "pipe.png")
    (val / "fox").symlink_to(folder / "nowhere")
    (val / "stray.JPG").write_bytes(b"")
    (val / "README.md").write_text("no image")
    message = (
        rf"^data: 4 entries of {val} cannot be used: {val}/cat/gone.png links to nothing; "
        rf"{val}/dog/pipe.png is no file; {val}/fox links to nothing; and 1 more$"
    )
    for opened in (lambda: open_dataset(folder, "val", 16), lambda: open_parts(val, 16)):
        with pytest.raises(ImageError, match=message):
            opened()
    with pytest.warns(UserWarning, match=rf"^data: skipped 4 entries of {val}: {val}/cat/gone.png links"):
        assert len(open_dataset(folder, "val", 16, corrupt="skip")) == 4
    with pytest.warns(UserWarning, match=rf"^data: skipped 4 entries of {val}"):
        assert [len(part) for part in open_parts(folder, 16, corrupt="skip")] == [4, 4]
    with pytest.raises(ValueError, match="corrupt: got 'ignore'"):
        open_parts("digits", 16, corrupt="ignore")


def test_linked_folders_are_entered_once(folder):
    cat = folder / "val" / "cat"
    (folder / "more" / "deep").mkdir(parents=True)
    Image.new("L", (20, 20)).save(folder / "more" / "deep" / "2.png")
    (cat / "linked").symlink_to(folder / "more")
    (cat / "again").symlink_to(folder / "more" / "deep")
    (cat / "round").symlink_to(cat)
    (folder / "more" / "up").symlink_to(cat)
    (folder / "val" / "fox").symlink_to(folder / "train" / "dog")
    dataset = open_dataset(folder, "val", 16)
    assert dataset.classes == ["cat", "dog", "fox"]
    assert [path.name for path in dataset.images[:3]] == ["0.png", "1.png", "2.png"]
    assert dataset.labels == [0, 0, 0, 1, 1, 2, 2]


def test_folders_that_cannot_be_listed_are_named(folder, monkeypatch):
    (folder / "val" / "cat" / "private").mkdir()
    scandir = os.scandir

    def refusing(path):
        if Path(path).name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(
        ImageError, match=r"1 entry of .*val/cat/private cannot be listed: Permission denied$"
    ):
        open_dataset(folder, "val", 16)


def test_label_maps_that_are_left_out_are_named(label_maps):
    inside = label_maps / "val" / "images"
    (inside / "city").mkdir()
    (inside / "gone.png").symlink_to("nowhere")
    message = rf"2 entries of {inside}.*: {inside}/city is a folder; {inside}/gone.png links to nothing$"
    with pytest.raises(ImageError, match=f"^data: {message}"):
        open_label_maps(label_maps, "val", 32)
    with pytest.warns(UserWarning, match="^data: skipped " + message):
        assert len(open_label_maps(label_maps, "val", 32, corrupt="skip")) == 3
    (label_maps / "train" / "labels" / "gone.png").symlink_to("nowhere")
    with (
        pytest.warns(UserWarning, match="^data: skipped 2"),
        pytest.warns(
            UserWarning, match=r"^data: skipped 1 entry of .*train/labels: .*gone.png links to nothing"
        ),
    ):
        open_label_maps(label_maps, "val", 32, corrupt="skip")


def test_classes_that_no_checkpoint_can_have(label_maps):
    (label_maps / "classes.txt").write_text("a\n" + "x" * 1001)
    with pytest.raises(ValueError, match=r"of 1001 characters among the classes, expected text"):
        open_label_maps(label_maps, "val", 32)


def test_hidden_folders_are_left_out_of_label_maps(label_maps):
    for name in ("images/.ipynb_checkpoints", "labels/.cache"):
        (label_maps / "val" / name).mkdir()
    assert len(open_label_maps(label_maps, "val", 32)) == 3


def test_every_command_says_it_before_it_starts(folder, tmp_path, checkpoint, capsys):
    for split in ("train", "val"):
        (folder / split / "cat" / "gone.png").symlink_to("nowhere")
    named = {"--checkpoint": checkpoint, "--image-size": 32}
    for command, options in (
        ("train", {"--data": folder, "--output": tmp_path / "run", "--model": "cvt_nano"}),
        ("evaluate", {"--data": folder, **named}),
        ("quantize", {"--calibrate": folder, "--output": tmp_path / "q.safetensors", **named}),
        ("prune", {"--calibrate": folder, "--output": tmp_path / "p.safetensors", "--mlp": 0.5, **named}),
    ):
        arguments = [command, *(text for pair in options.items() for text in pair), "--device", "cpu"]
        assert "cat/gone.png links to nothing" in bad(capsys, main, *arguments)
    assert not [name for name in ("run", "q.safetensors", "p.safetensors") if (tmp_path / name).exists()]
    options = {"checkpoint": checkpoint, "model": None, "activation": None, "image_size": 32}
    options |= {"calibrate": folder, "corrupt": "skip", "seed": 0, "workers": 0, "batch_size": 2}
    loaded = common.load_model(argparse.Namespace(**options), "cpu")
    assert [len(part) for part in common.open_calibration(argparse.Namespace(**options), loaded, 2)] == [1, 2]
    assert [remark.split(": /")[0] for remark in loaded.remarks] == [
        f"data: skipped 1 entry of {folder / split}" for split in ("train", "val")
    ]


def test_a_path_is_not_empty(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["explain", "a.png", "--checkpoint", "digits", "--output", ""],
        ["explain", "", "--checkpoint", "digits", "--output", "out"],
        ["classify", "a.png", "--checkpoint", ""],
        ["classify", "a.png", "--labels", ""],
        ["train", "--data", "digits", "--output", ""],
        ["train", "--data", "", "--output", "out"],
        ["train", "--data", "digits", "--output", "out", "--teacher", ""],
    ):
        assert "got '', expected a path" in bad(capsys, main, *arguments)
    assert not list(tmp_path.iterdir())
