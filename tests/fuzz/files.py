"""Damaged files, and the commands that read them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import world
from .worker import Answer

if TYPE_CHECKING:
    from .cases import Case

_CLASSIFY = "classify photo.png --device cpu --image-size 32 --checkpoint"
#: The files that are damaged, each with the command that reads it.
_FILES = {
    "photo.png": f"{_CLASSIFY} model.pth",
    "photo.jpg": "classify photo.jpg --device cpu --checkpoint model.pth",
    "labels.json": f"{_CLASSIFY} model.pth --labels labels.json",
    "labels.txt": f"{_CLASSIFY} model.pth --labels labels.txt",
    "model.pth": f"{_CLASSIFY} model.pth",
    "pruned.safetensors": f"{_CLASSIFY} pruned.safetensors",
    "quantized.safetensors": f"{_CLASSIFY} quantized.safetensors",
    "model/config.json": f"{_CLASSIFY} model",
    "model/model.safetensors": f"{_CLASSIFY} model",
    "model/preprocessor_config.json": f"{_CLASSIFY} model",
    "data/val/cat/0.png": "evaluate --data data --checkpoint model.pth --device cpu --workers 0",
    "results0.json": "bench --compare results0.json results1.json",
    "run/last.pth": f"{world.TRAIN} --epochs 2 --resume",
    "run/log.csv": f"{world.TRAIN} --epochs 2 --resume",
    world.VERDICTS: "doctor",
}


def _empty(data: bytes, source: random.Random) -> bytes:
    return b""


def _cut(data: bytes, source: random.Random) -> bytes:
    return data[: source.randrange(len(data) + 1)]


def _flip(data: bytes, source: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(source.choice((1, 2, 8, 64))):
        # The first bytes say what the rest means.
        place = source.randrange(min(len(data), source.choice((16, 256, 4096, len(data)))) or 1)
        if place < len(changed):
            changed[place] = source.randrange(256)
    return bytes(changed)


def _insert(data: bytes, source: random.Random) -> bytes:
    place = source.randrange(len(data) + 1)
    return data[:place] + source.randbytes(source.choice((1, 8, 1000))) + data[place:]


def _zero(data: bytes, source: random.Random) -> bytes:
    place = source.randrange(len(data) + 1)
    size = source.choice((8, 512, 65536))
    return data[:place] + bytes(len(data[place : place + size])) + data[place + size :]


def _double(data: bytes, source: random.Random) -> bytes:
    return data + data


def _other(data: bytes, source: random.Random) -> bytes:
    return source.choice(
        (b"{}", b"[]", b"null", b"\xff\xfe", b"PK\x03\x04", b"[" * 100_000, b"1e999", b'{"0": "cat"}')
    )


#: Values in the place of one of a JSON file.
_VALUES = (
    None, True, -1, 0, 1.5, 1e308, 10**30, float("nan"), float("inf"), "", "x" * 1000, "\ud800", "cvt",
    [], {}, [[]], {"0": 1}, [None], [1, 2, 3], [-1], 2**31, 2**63,
)  # fmt: skip


def _json(data: bytes, source: random.Random) -> bytes:
    """Replaces a value somewhere in a file of JSON, or drops it; other files are damaged as bytes."""
    try:
        content = json.loads(data)
    except ValueError:
        return _flip(data, source)
    places = list(_places(content))
    if not places:
        return _other(data, source)
    container, key = source.choice(places)
    if source.random() < 0.3:
        del container[key]
    else:
        container[key] = source.choice(_VALUES)
    return json.dumps(content).encode()


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Returns all places of values in a JSON value, each as its container and its key."""
    pairs = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    places = []
    for key, value in pairs:
        places += [(content, key), *_places(value)]
    return places


_DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": _empty, "cut": _cut, "flip": _flip, "insert": _insert, "zero": _zero, "double": _double,
    "other": _other, "json": _json,
}  # fmt: skip
#: The settings of a case.
CHOICES: dict[str, tuple[Any, ...]] = {"file": tuple(_FILES), "damage": tuple(_DAMAGES), "again": (1, 2, 3)}


def judge(case: Case) -> Answer:
    """Runs the command that reads the file of a case, which is damaged before."""
    source, name = random.Random(case.seed), case.settings["file"]
    folder = world.template_with_run() if name.startswith("run/") else world.template()
    with world.copied(folder) as place:
        path = next(Path(place).glob(name))
        for _ in range(case.settings["again"]):
            path.write_bytes(_DAMAGES[case.settings["damage"]](path.read_bytes(), source))
        answer = world.run(place, _FILES[name].split())
    return answer._replace(flaws=[f"{name}: {flaw}" for flaw in answer.flaws])
