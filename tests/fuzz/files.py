"""Damaged files, and the commands that read them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cvt import damage

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
    "run/last.pth": f"{world.TRAIN} --epochs 2 --resume",
    "run/log.csv": f"{world.TRAIN} --epochs 2 --resume",
    world.ENTRIES: "doctor",
}


def _empty(data: bytes, source: random.Random) -> bytes:
    return b""


def _double(data: bytes, source: random.Random) -> bytes:
    return data + data


def _other(data: bytes, source: random.Random) -> bytes:
    return source.choice(
        (b"{}", b"[]", b"null", b"\xff\xfe", b"PK\x03\x04", b"[" * 100_000, b"1e999", b'{"0": "cat"}')
    )


def _json(data: bytes, source: random.Random) -> bytes:
    """Changes one thing in a file of JSON; other files are damaged as bytes."""
    try:
        content = json.loads(data)
    except ValueError:
        return damage.damaged_bytes(source, data, "bits")
    return json.dumps(damage.damaged(source, content)[0]).encode()


def _of_bytes(what: str) -> Callable[[bytes, random.Random], bytes]:
    return lambda data, source: damage.damaged_bytes(source, data, what)


_DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": _empty,
    **{what: _of_bytes(what) for what in damage.BYTES},
    "double": _double,
    "other": _other,
    "json": _json,
}
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
