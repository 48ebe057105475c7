"""Every option of every command with values that make no sense: one line, exit code 2, nothing made."""

import argparse
import importlib
import os

import pytest

from cvt.tools.commands import COMMANDS, main
from tests.checks import bad, leave_the_interpreter

_NUMBERS = ("0", "-1", "99999999999999999999", "1e3", "x")
_FRACTIONS = ("nan", "inf", "-1", "2", "x")
_NOTHING = ("",)
_WORDS = ("", "x", "\x1b[31m")
_NO_FILE = ("", "missing/folder/x.json", ".")
_WEIGHTS = ("missing.pth", ".", "hf-hub:x")

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
    "tile": _NUMBERS,
    "overlap": _NUMBERS,
    "context": _NUMBERS,
    "image_sizes": (*_NUMBERS, "1"),
    "batch_size": _NUMBERS,
    "batch_sizes": _NUMBERS,
    "stages": (*_NUMBERS, "5"),
    "workers": ("-1", "1000000000", "1.5"),
    "seed": ("-1", str(2**64), "x"),
    "jobs": (*_NUMBERS, "1000000000"),
    "rounds": _NUMBERS,
    "seconds": (*_NUMBERS, "1000000000"),
    "time_limit": _NUMBERS,
    "batches": _NUMBERS,
    "token_keep": (*_FRACTIONS, "", ",", "0"),
    "token_keeps": (*_FRACTIONS, "", ",", "0"),
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


def parsers():
    """Returns name → parser of every command."""
    made = {}
    for command in COMMANDS:
        made[command] = argparse.ArgumentParser()
        importlib.import_module(f"cvt.tools.commands.{command}").add_arguments(made[command])
    return made


def _actions(command):
    """Returns the arguments of a command."""
    return parsers()[command]._actions


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
    for action in _actions(command):
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
