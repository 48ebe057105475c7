"""Mutated command lines of every command of ``cvt``."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from . import world
from .worker import Answer

if TYPE_CHECKING:
    from .cases import Case

_MODEL = "--checkpoint model.pth --device cpu"
_LINES = {
    "doctor": "doctor",
    "classify": f"classify photo.png photo.jpg {_MODEL} --labels labels.txt --top 2 --batch-size 1 "
    "--image-size 32",
    "evaluate": f"evaluate --data data {_MODEL} --json figures.json --batch-size 2 --workers 0 "
    "--precision fp32",
    "explain": f"explain photo.png {_MODEL} --output pictures --image-size 32",
    "quantize": f"quantize {_MODEL} --calibrate data --output other.safetensors --images 4 "
    "--max-drop 50 --json figures.json --keep-float stage0.blocks.0.attn.proj_q",
    "prune": f"prune {_MODEL} --mlp 0.5 --heads 0.0 --output other.safetensors --calibrate data --batches 1 "
    "--seed 1",
    "train": "train --data data --output run --model cvt_nano --image-size 16 --epochs 1 --batch-size 4 "
    "--workers 0 --device cpu --lr 1e-3 --mixup 0 --ema-decay 0.9 --precision fp32",
    "export": "export --checkpoint model.pth --format pt2 --output model.pt2 --image-size 16",
    "bench": f"bench {_MODEL} --images photo.png --rounds 1 --image-size 16 --batch-size 1 "
    "--peers eager --plot rates.png",
    "tune": "tune --model cvt_13 --dtype float32 --batch-size 1 --image-size 32 --seconds 1 --device cpu "
    "--json tunings.json",
    "compile": "compile --arch sm_90 --model cvt_13 --dtype float32 --operator gather_rows --stage 1 "
    "--jobs 1 --json kernels.json",
}
#: Values that no option wants, and files that are something else.
_ABSURD = (
    "", " ", "-1", "0", "1", "1.5", "nan", "inf", "-inf", "1e400", "99999999999999999999", "2147483648",
    "é", "½", "一", "none", "None", "--", "-", "x" * 300, "x" * 5000, "a\nb", "[]", "{}",
    ".", "..", "/", "/dev/null", "/dev/full", "/proc/self/mem", "missing", "missing/file", "photo.png/file",
    "data", "model", "photo.png", "model.pth", "labels.json", "quantized.safetensors", "pruned.safetensors",
    "cuda", "meta", "cuda:99", "cvt_13",
)  # fmt: skip
_MUTATIONS = ("drop", "double", "swap", "absurd", "unknown", "cut", "onto")
_OUTPUTS = ("--output", "--json", "--plot")
#: Files that commands read, by several paths.
_INPUTS = (
    "model.pth", "./model.pth", "model", "model/config.json", "model/../model/model.safetensors", "photo.png",
    "data/train/cat/0.png", "data/val/dog/1.png", "data", "labels.txt",
)  # fmt: skip
#: The settings of a case: a command, and the number and kinds of mutations.
CHOICES: dict[str, tuple[Any, ...]] = {
    "command": tuple(_LINES),
    "first": ("none", *_MUTATIONS),
    "second": ("none", *_MUTATIONS),
    "third": ("none", *_MUTATIONS),
}


def argv_of(case: Case) -> list[str]:
    """Returns the command line of a case."""
    source = random.Random(case.seed)
    words = _LINES[case.settings["command"]].split()
    for name in ("first", "second", "third"):
        if len(words) > 1:
            _mutate(words, case.settings[name], source)
    return words


def _mutate(words: list[str], mutation: str, source: random.Random) -> None:
    place = source.randrange(1, len(words))
    if mutation == "drop":
        del words[place]
    elif mutation == "double":
        words.insert(place, words[place])
    elif mutation == "swap":
        other = source.randrange(1, len(words))
        words[place], words[other] = words[other], words[place]
    elif mutation == "absurd":
        words[place] = source.choice(_ABSURD)
    elif mutation == "unknown":
        words.insert(place, source.choice(("--unknown", "-x", "--json", "--help-me", *_ABSURD)))
    elif mutation == "onto":
        words += [source.choice(_OUTPUTS), source.choice(_INPUTS)]
    elif mutation == "cut":
        words[place] = words[place][: source.randrange(len(words[place]) + 1)]


def judge(case: Case) -> Answer:
    """Runs the command line of a case in a folder of its own."""
    with world.copied(world.template()) as place:
        argv = argv_of(case)
        answer = world.run(place, argv, may_last=argv != _LINES[case.settings["command"]].split())
    return answer._replace(flaws=[f"cvt {' '.join(map(repr, argv))[:300]} {flaw}" for flaw in answer.flaws])
