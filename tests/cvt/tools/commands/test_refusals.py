"""Refusals of every command: one line that names what is wrong, exit code 2, and no file made or changed.

Every option of every command is tried with values that make no sense, and each line of ``LINES`` by itself.
"""

import argparse
import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import cvt_kernels as ck
from cvt import create_model, read_checkpoint
from cvt.card import ModelCard
from cvt.checkpoints import PACKAGED
from cvt.tools.commands import COMMANDS, main, paths
from cvt.tools.datasets import save_digits
from cvt.tools.training.recipe import MODELS
from cvt_kernels.tuning import choices
from tests.checks import bad, leave_the_interpreter
from tests.cvt.models import quantized, save_label_maps, small

_NUMBERS = ("0", "-1", "99999999999999999999", "1e3", "x")
_FRACTIONS = ("nan", "inf", "-1", "2", "x")
_NOTHING = ("",)
_WORDS = ("", "x", "\x1b[31m")
_NO_FILE = ("", "missing/folder/x.json", ".")
_WEIGHTS = ("missing.pth", ".", "hf-hub:x")


def parsers():
    """Returns name → parser of every command."""
    made = {}
    for command in COMMANDS:
        made[command] = argparse.ArgumentParser()
        importlib.import_module(f"cvt.tools.commands.{command}").add_arguments(made[command])
    return made


# Every option ---------------------------------------------------------------------------------------------

#: Values by argument name; values for a single command after its name.
_BAD = {
    "photos": (),  # those of _GOOD are missing
    "photo": ("missing", ""),  # nor does it fit with --data
    "checkpoint": _WEIGHTS,
    "teacher": _WEIGHTS,
    "data": ("missing", "."),
    "calibrate": ("", "missing"),
    "labels": ("missing", "."),
    "output": _NO_FILE,
    "explain output": ("/dev/null/x", "file"),
    **dict.fromkeys(("prune output", "quantize output"), ("", "file", "x.pth", "missing/x.safetensors")),
    "train output": ("/dev/null/x", "file"),
    "json": _NO_FILE,
    "plot": ("", "/dev/null/x"),
    "images": _NOTHING,
    "quantize images": _NUMBERS,
    "device": ("", "x", "cuda:99999999999999999999", "meta", "cpu:-1"),
    "top": _NUMBERS,
    "image_size": _NUMBERS,
    "image_sizes": (*_NUMBERS, "1"),
    "batch_size": _NUMBERS,
    "batch_sizes": _NUMBERS,
    "stages": (*_NUMBERS, "5"),
    "workers": ("-1", "1000000000", "1.5"),
    "seed": ("-1", str(2**64), "x"),
    "jobs": (*_NUMBERS, "1000000000"),
    "rounds": _NUMBERS,
    "seconds": (*_NUMBERS, "1000000000"),
    "batches": _NUMBERS,
    "token_keep": (*_FRACTIONS, "", ",", "0"),
    "mlp": _FRACTIONS,
    "heads": _FRACTIONS,
    "keep_float": (),  # layers are looked for when all is loaded: test_quantize.py
    "max_drop": ("nan", "-1", "101", "x"),
    "peers": _WORDS,
    "bench model": _WORDS,
    # Of training:
    "drop_path_rate": _FRACTIONS,
    "layer_scale": ("nan", "inf", "x"),
    "epochs": ("0", "-1", "1.5"),
    "accumulate": ("0", "-1", "x"),
    "train batch_size": ("0", "-1", "99999999999999999999"),
    "warmup_epochs": ("nan", "-1", "1e30"),
    "layer_decay": _FRACTIONS,
    "temperature": ("nan", "inf", "0", "x"),
    "rand_augment": ("-1", "30", "1.5"),
    "precision": _WORDS,
    "distillation": _WORDS,
    **dict.fromkeys(
        ("lr", "min_lr", "weight_decay", "clip_norm", "mixup", "cutmix"), ("nan", "-1", "inf", "x")
    ),
    **dict.fromkeys(
        ("label_smoothing", "min_scale", "flip", "color_jitter", "random_erasing", "ema_decay"), _FRACTIONS
    ),
    "distillation_weight": _FRACTIONS,
}

#: What a command needs besides.
_GOOD = {
    "classify": ["photo.png", "--checkpoint", "digits", "--device", "cpu"],
    "evaluate": ["--data", "digits", "--checkpoint", "digits", "--device", "cpu"],
    "explain": ["photo.png", "--checkpoint", "digits", "--device", "cpu", "--output", "new"],
    "quantize": ["--checkpoint", "digits", "--calibrate", "digits", "--output", "new.safetensors"],
    "prune": ["--checkpoint", "digits", "--mlp", "0.5", "--output", "new.safetensors"],
    "export": ["--checkpoint", "digits", "--format", "pt2", "--output", "new.pt2"],
    "train": ["--data", "digits", "--output", "new", "--device", "cpu"],
    "doctor": [],
    "tune": ["--device", "cpu"],
    "bench": ["--device", "cpu"],
    "compile": [],
}


def _values(command, action):
    if action.choices is not None:
        return _WORDS
    own = f"{command} {action.dest}"
    return _BAD[own if own in _BAD else action.dest]


@pytest.mark.parametrize("command", list(_GOOD))
def test_no_value_of_any_option_is_too_absurd(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leave_the_interpreter(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "file").write_text("{")
    for action in parsers()[command]._actions:
        if action.nargs == 0:  # a flag, which takes no value
            continue
        option = next(iter(action.option_strings), None)
        for value in _values(command, action):
            given = [f"{option}={value}"] if option else [value]
            given = [option, value, value] if action.nargs == 2 else given
            line = bad(capsys, main, command, *_GOOD[command], *given)
            assert line.startswith(f"cvt {command}: error: "), line
            assert len(line) < 500
            assert "\x1b" not in line
            assert os.listdir(tmp_path) == ["file"], (command, given)


def test_every_command_is_tried():
    assert list(_GOOD) == list(COMMANDS)


# One line each --------------------------------------------------------------------------------------------


def save_images(folder, names):
    """Writes an image of each name, of folders and files."""
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (25 * (i % 10), 40, 100)).save(folder / name)


def save_models(folder):
    """Writes models of every kind that some command refuses."""
    shutil.copy(PACKAGED["digits"], folder / "digits.safetensors")
    (folder / "trained").mkdir()
    shutil.copy(PACKAGED["digits"], folder / "trained" / "best.pth")
    two = small(num_classes=2)
    two.save_pretrained(folder / "two", labels=["cat", "dog"])
    quantized(two).save_pretrained(folder / "quantized")
    small(num_classes=0).save_pretrained(folder / "headless")
    create_model(MODELS["cvt_nano"], num_classes=2).save_pretrained(folder / "classifier")
    segmenter = create_model(MODELS["cvt_nano"], head="segment", decoder_dim=8, num_classes=3)
    segmenter.save_pretrained(folder / "segmenter")
    digits = read_checkpoint("digits")
    named = ModelCard(digits.card.config, [*"abcdefghij"], 16, 1.0)
    torch.save({"state_dict": digits.tensors, "card": named.to_dict()}, folder / "named.pth")
    large = ("norm.weight", "head.weight")  # which overflow when they are multiplied
    tensors = {name: t * 1e37 if name in large else t for name, t in digits.tensors.items()}
    torch.save({"state_dict": tensors, "card": digits.card.to_dict()}, folder / "large.pth")
    broken = create_model(checkpoint="digits")
    broken.stage1.blocks[0].mlp.fc1.weight.data[0, 0] = torch.nan
    broken.save_pretrained(folder / "broken")


def save_data(folder):
    """Writes photographs and data sets, most of them with something wrong."""
    save_images(folder, ["cat.png", "heads.png", *(f"three/val/class {i}/0.png" for i in range(3))])
    for i in range(10):
        others = [f"others/{split}/class {i}/0.png" for split in ("train", "val")]
        save_images(folder, [*others, f"parts/train/{i}/0.png", f"parts/val/{i + 1}/0.png", f"one/{i}/0.png"])
    digits = folder / "data" / "train"
    for image in save_digits(folder / "images"):
        (digits / image.stem).mkdir(parents=True)
        shutil.copy(image, digits / image.stem / "0.png")
    shutil.copytree(digits, folder / "data" / "val")
    for split in ("train", "val"):
        save_images(folder, [f"gone/{split}/cat/0.png", f"gone/{split}/dog/0.png"])
        os.symlink("nowhere", folder / "gone" / split / "cat" / "gone.png")
    save_label_maps(folder / "maps")
    (folder / "labels").write_text("\n".join("abcdefghij"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Returns a folder with models, data, and links to them, which no command changes."""
    folder = tmp_path_factory.mktemp("world")
    save_models(folder)
    save_data(folder)
    (folder / "elsewhere").mkdir()
    os.rename(folder / "data/val/9", folder / "elsewhere/9")
    os.symlink("../../elsewhere/9", folder / "data/val/9")
    os.symlink("digits.safetensors", folder / "link.safetensors")
    os.link(folder / "digits.safetensors", folder / "hard.safetensors")
    for loop in ("loop", "loop.safetensors"):
        os.symlink(loop, folder / loop)
    return folder


def state_of(folder):
    """Returns what tells whether a file of a folder was made or changed."""
    found = ((path, path.lstat()) for path in folder.rglob("*"))
    return {path: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in found}


_MODEL = "--checkpoint digits.safetensors"
_NEW = "--output new.safetensors"
_QUANTIZE = f"quantize {_MODEL} --calibrate data"
_PRUNE = f"prune {_MODEL} --mlp=0.5"
_EVALUATE = f"evaluate {_MODEL} --data=data"
_DIGITS = "evaluate --data digits --checkpoint digits"
_OF_PIXELS = "is a model of head='segment', which is for pixels; expected a classifier"
_HAS_MAPS = "--data: maps has label maps, which are for models of train --task segment; expected"
_NO_SUCH = "--model, --operator, --stage: none of these models has such an operator or stage"
_OTHERS = "\x1b[31m.pth"

#: Command lines, each with what its error says.
LINES = {
    "classify cat.png none.jpg --checkpoint digits": "none.jpg does not exist",
    "classify cat.png --checkpoint large.pth": "probabilities that are not finite",
    "classify cat.png --checkpoint headless": "headless is a model without classes",
    "classify cat.png --checkpoint segmenter": _OF_PIXELS,
    "explain cat.png none.jpg --checkpoint digits --output new": "none.jpg does not exist",
    "explain cat.png cat.png --checkpoint digits --output new": "got two of the name cat",
    "explain cat.png --checkpoint segmenter --output new": _OF_PIXELS,
    # Evaluation, its tiles, and its check.
    "evaluate --data three --checkpoint digits": "three: has 3 classes, the model 10",
    "evaluate --data digits --checkpoint named.pth": "its classes have other names than those of",
    "evaluate --data digits --checkpoint large.pth --json new.json": "gives logits that are not finite",
    f"{_DIGITS} --photo x.png": "--photo beside it",
    "evaluate --checkpoint digits": "--data: got none",
    "evaluate --check --checkpoint digits": "expected owner/name on the Hub or a directory with config.json",
    f"{_DIGITS} --check": "--check: got --data or --token-keep beside it",
    # A folder with images/ and labels/ would be one of two classes of these names.
    "evaluate --checkpoint classifier --data maps": _HAS_MAPS,
    "evaluate --checkpoint segmenter --data digits": "--data: got digits, which have no label maps; expected",
    "evaluate --checkpoint two --image-size 32 --data gone": "cat/gone.png does not exist",
    # Training.
    "train --data maps --output new": _HAS_MAPS,
    "train --task segment --data maps --output new --mixup 0.8": "--mixup: got 0.8, expected 0 for head=",
    "train --data digits --checkpoint quantized --output new": "is quantized, expected weights in floating",
    # Smaller models.
    f"{_PRUNE} --mlp=0 {_NEW}": "error: --mlp, --heads: got 0 for both",
    f"{_PRUNE} --saliency=taylor {_NEW}": "--saliency: taylor needs images with labels",
    f"prune --checkpoint two --mlp 0.5 --calibrate digits {_NEW}": "--calibrate digits: has 10 classes",
    f"prune --checkpoint quantized --mlp 0.5 {_NEW}": "expected floating point: prune first, then quantize",
    f"prune --checkpoint two --image-size 32 --mlp 0.5 --calibrate gone {_NEW}": "gone.png does not exist",
    f"{_PRUNE} --output p.pth": "p.pth', expected a name that ends with .safetensors",
    f"{_QUANTIZE} --output q": "--output: got 'q', expected a name that ends with .safetensors",
    f"{_QUANTIZE} --output \udcff.safetensors": "udcff.safetensors', expected a name in UTF-8",
    f"{_QUANTIZE} --calibrate others {_NEW}": "others: its classes have other names than those of",
    f"{_QUANTIZE} --calibrate parts {_NEW}": "parts has train/ and val/ of different classes",
    f"{_QUANTIZE} --calibrate one {_NEW}": "has no images besides those that are held out",
    f"{_QUANTIZE} --checkpoint quantized {_NEW}": "quantized is quantized already",
    f"{_QUANTIZE} --checkpoint broken {_NEW}": "stage1.blocks.0.mlp.fc1",
    f"{_QUANTIZE} --keep-float stage9.* {_NEW}": "'stage9.*' matches none of the 18 layers",
    f"{_QUANTIZE} --keep-float * {_NEW}": "none of its 18 layers can be quantized",
    f"quantize --checkpoint segmenter --calibrate data {_NEW}": _OF_PIXELS,
    f"quantize --checkpoint two --image-size 32 --calibrate gone {_NEW}": "gone.png does not exist",
    f"{_PRUNE} --batch-size=1 {_NEW} --json=/dev/full": "No space left on device",  # and no output is left
    # Kernels.
    "tune --model glpn --image-size 8 --dtype float32": "--image-size: glpn does not run on 8 pixels",
    "tune --image-size 1": "1×1 pixels are too few",
    "bench --images none.jpg": "none.jpg does not exist",
    "bench --model segformer_b0 --image-size 16": "image_size: got 16, which segformer_b0 does not take:",
    "bench --model pvt_v2_b0 --checkpoint none": "none is no folder",
    "bench --checkpoint segmenter": "segmenter: Hugging Face's CvT has no head='segment'",
    "compile --json /": "--json: / is a directory, expected a file",
    "bench --plot /": "--plot: / is a directory, expected a file",
    "compile --json /nowhere/report.json": "--json: /nowhere/report.json cannot be written",
    "compile --model cvt_13 --operator depthwise_conv_gelu": _NO_SUCH,
    "compile --model cvt_21 --operator attention --stage 4": _NO_SUCH,
    # Names that would command the terminal.
    "doctor a\n\x1b": r"unrecognized arguments: a\n\x1b",
    f"classify x.png --checkpoint {_OTHERS}": r"\x1b[31m.pth does not exist",
    f"bench --checkpoint {_OTHERS}": r"\x1b[31m.pth does not exist",
}
#: Those in which an output is an input, or another output, or cannot be written.
NO_OUTPUT_IS_AN_INPUT = [
    f"{_QUANTIZE} {_NEW} --json=digits.safetensors",
    f"{_QUANTIZE} {_NEW} --json=data/train/3/0.png",
    f"{_QUANTIZE} --output=hard.safetensors",
    f"{_PRUNE} {_NEW} --json=./link.safetensors",
    f"{_PRUNE} --calibrate data {_NEW} --json=elsewhere/9/0.png",
    f"prune --checkpoint=trained --mlp=0.5 {_NEW} --json=trained/best.pth",
    "prune --checkpoint two --mlp 0.5 --output two/model.safetensors",
    f"{_EVALUATE} --json=digits.safetensors",
    f"{_EVALUATE} --json=data/val/9/0.png",
    f"{_EVALUATE} --labels=labels --json=labels",
    f"export {_MODEL} --format=pt2 --output=digits.safetensors",
    "export --checkpoint=trained --format=pt2 --output=trained/other.pt2 --json=trained/best.pth",
    f"export {_MODEL} --format=pt2 --output=new.pt2 --json=new.pt2",
    "train --data=digits --checkpoint=trained/best.pth --output=trained",
    "train --data=data --teacher=digits.safetensors --json=link.safetensors --output=new",
    "bench --images heads.png --json=heads.png",
    "bench --images heads.png --plot=heads.png",
    "bench --json=new.png --plot=new.png",
]
LINES |= dict.fromkeys(NO_OUTPUT_IS_AN_INPUT, ", expected ")
LINES |= {
    f"{command} {_NEW} {option} loop.safetensors": ""
    for command in (_QUANTIZE, f"{_PRUNE} --calibrate data")
    for option in ("--checkpoint", "--output", "--json", "--calibrate")
}


@pytest.mark.parametrize("words", LINES)
def test_a_line_is_refused(words, capsys, world, monkeypatch):
    monkeypatch.chdir(world)
    leave_the_interpreter(monkeypatch)
    before = state_of(world)
    arguments = words.split(" ")
    if "--device" in parsers()[arguments[0]]._option_string_actions:
        arguments += ["--device", "cpu"]
    line = bad(capsys, main, *arguments)
    assert line.startswith(f"cvt {arguments[0]}: error: ") or "unrecognized arguments" in line
    assert LINES[words] in line
    assert line.isprintable()
    assert state_of(world) == before
    assert not choices.cache_directory().exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    assert "--device: got 'cuda', expected cpu, cuda or" in bad(
        capsys, main, *_DIGITS.split(), "--device", "cuda"
    )


@pytest.mark.parametrize("words", ["classify cat.png --checkpoint digits", _DIGITS])
def test_a_backend_that_cannot_serve_is_named(words, capsys, world, monkeypatch):
    monkeypatch.chdir(world)
    with ck.use_backend("triton"):
        assert "backend 'triton' is unavailable" in bad(capsys, main, *words.split())


@pytest.mark.parametrize(
    ("module", "words", "package"),
    [
        ("matplotlib.figure", "explain cat.png --checkpoint digits --output new", "matplotlib"),
        ("matplotlib.figure", "bench --plot new.png", "matplotlib"),
        ("transformers", "bench --device cpu", "transformers"),
        ("sklearn", "bench --device cpu", "scikit-learn"),
        ("onnxscript", "export --checkpoint digits --format onnx --output new.onnx", "onnxscript"),
    ],
)
def test_a_package_that_is_missing_is_named(module, words, package, capsys, world, monkeypatch):
    """It is named before anything is computed."""
    monkeypatch.chdir(world)
    monkeypatch.setitem(sys.modules, module, None)
    before = state_of(world)
    line = bad(capsys, main, *words.split())
    assert f"{package} is not installed; pip install {package}, or in a checkout" in line
    assert state_of(world) == before


def test_what_is_no_input_may_be_written(world, monkeypatch, tmp_path):
    """Files beside the images, a second time too, and files of a folder with weights that are not read."""
    shutil.copytree(world / "data", tmp_path / "data")
    shutil.copytree(world / "trained", tmp_path / "trained")
    monkeypatch.chdir(tmp_path)
    evaluate = parsers()["evaluate"]
    for place in ("report.json", "data/report.json", "trained/report.json"):
        arguments = evaluate.parse_args(["--checkpoint=trained", "--data=data", f"--json={place}"])
        for _ in range(2):
            paths.check_outputs(arguments)
            Path(place).write_text("{}")
