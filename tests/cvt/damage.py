"""Damaged and hostile checkpoints, made from valid ones: bytes, archives, cards, names and tensors.

``python -m tests.cvt.damage COUNT [SEED]`` reads so many of them and prints what went wrong.
"""

import copy
import dataclasses
import itertools
import json
import math
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cvt import create_model, save_huggingface
from cvt.card import ModelCard
from cvt.checkpoints import Checkpoint, save_safetensors
from tests.cvt.models import SMALL, quantized, small

TINY = dataclasses.replace(SMALL, depths=(1, 1, 2))

#: Values to stand in the place of any other.
ODD = (
    *(None, True, -1, 0, 1, 1.5, float("nan"), float("inf"), 10**8, 2**63, -(2**40), 10**400),
    *("", "x", "\x1b[31mred\n", "\ud800", "x" * 10**6, "../../etc/passwd", "9" * 5000),
    *([], {}, [1], [0] * 10**5, [[]], {"a": 1}, ["a", 1]),
    *([None] * 3, [10**8] * 3, [True] * 3, [-1.0, 2.0, 1e30]),
)


class Allocation:
    """An object whose unpickling would take 3 GB."""

    def __reduce__(self):
        return bytearray, (3 * 10**9,)


def write_valid(folder: Path) -> dict[str, Path]:
    """Writes a checkpoint of each format; returns their places by name."""
    names = [f"class {i}" for i in range(10)]

    def tiny(**changes):
        return small(**vars(TINY) | changes)

    paths = {name: folder / name for name in ("huggingface", "shards", "own")}
    save_huggingface(small(activation="gelu"), paths["huggingface"], labels=names)
    config = json.loads((paths["huggingface"] / "config.json").read_text())
    del config["cvt_config"]
    (paths["huggingface"] / "config.json").write_text(json.dumps(config))
    shutil.copytree(paths["huggingface"], paths["shards"])
    tensors = load_file(paths["shards"] / "model.safetensors")
    (paths["shards"] / "model.safetensors").unlink()
    index = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(index.values()):
        save_file({name: tensors[name] for name in tensors if index[name] == file}, paths["shards"] / file)
    (paths["shards"] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    table = tiny(position_bias=True, position_bias_size=32, mixing="hybrid")
    table.save_pretrained(paths["own"], labels=names, image_size=32)
    model = tiny()
    paths |= {
        name: folder / f"{name}.pth" for name in ("official", "before torch 1.6", "trained", "segmenter")
    }
    torch.save(model.state_dict(), paths["official"])
    torch.save(model.state_dict(), paths["before torch 1.6"], _use_new_zipfile_serialization=False)
    for name, each in (
        ("trained", model),
        ("segmenter", tiny(head="segment")),
        ("safetensors", model),
        ("pruned", tiny(head_dim=(8, 4, 4), pool="avg")),
        ("quantized", quantized(tiny())),
    ):
        card = ModelCard(each.config, names, 32, 0.9, [name.upper() for name in names])
        if name in paths:
            content = {"card": card.to_dict(), "epoch": 1, "metrics": {"val_loss": 1.0}}
            torch.save(content | {"model": each.state_dict()}, paths[name])
        else:
            paths[name] = folder / f"{name}.safetensors"
            save_safetensors(Checkpoint(name, each.state_dict(), card=card), paths[name])
    return paths


def mutations(rng: random.Random, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields damaged checkpoints without end: what was done, and the place, which the next one reuses.

    Args:
        rng: Decides everything.
        folder: An empty one.
    """
    (folder / "valid").mkdir()
    valid = write_valid(folder / "valid")
    while True:
        name = rng.choice(list(valid))
        scratch = folder / "damaged"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        place = scratch / valid[name].name
        if valid[name].is_dir():
            shutil.copytree(valid[name], place)
            file = rng.choice(sorted(place.iterdir()))
        else:
            file = Path(shutil.copy(valid[name], place))
        if rng.random() < 0.4:
            what = _damage_bytes(rng, file)
        elif file.suffix == ".json":
            what = _damage_json(rng, file)
        else:
            what = _damage_content(rng, file)
        yield f"{name}: {file.name}: {what}", place


def _damage_bytes(rng: random.Random, file: Path) -> str:
    what = rng.choice([*BYTES, "missing", "link"])
    if what == "missing":
        file.unlink()
    elif what == "link":
        file.unlink()
        file.symlink_to(rng.choice(["/dev/zero", "nowhere", file.name, "/etc/passwd", "/"]))
    else:
        file.write_bytes(damaged_bytes(rng, file.read_bytes(), what))
    return what


#: The ways to damage bytes.
BYTES = ("truncated", "bits", "block", "insertion", "swap", "head", "tail")


def damaged_bytes(rng: random.Random, data: bytes, what: str) -> bytes:
    """Returns bytes, damaged in one of the ways of ``BYTES``; no bytes stay none."""
    content, size = bytearray(data), len(data)
    if not size:
        return data
    if what == "truncated":
        kept = rng.choice([0, 1, 4, 8, 100, size // 2, size - 1, max(size - 22, 0), rng.randrange(size)])
        del content[kept:]
    elif what in ("bits", "head", "tail"):
        first = {"bits": 0, "head": 0, "tail": max(size - 300, 0)}[what]
        last = min(size, 300) if what == "head" else size
        for _ in range(rng.choice([1, 1, 3, 30])):
            content[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
    elif what == "block":
        start = rng.randrange(size)
        end = min(size, start + rng.choice([1, 16, 1000]))
        content[start:end] = rng.choice([bytes(end - start), rng.randbytes(end - start), b""])
    elif what == "insertion":
        start = rng.randrange(size)
        content[start:start] = rng.choice([b"\0", b"x" * 1000, bytes(content[:100]), rng.randbytes(10)])
    elif what == "swap":
        a, b = (rng.randrange(size) for _ in range(2))
        content[a], content[b] = content[b], content[a]
        content[a : a + 64] = reversed(content[a : a + 64])
    return bytes(content)


def _damage_json(rng: random.Random, file: Path) -> str:
    content, what = damaged(rng, json.loads(file.read_text(encoding="utf-8")))
    text = json.dumps(content)
    if rng.random() < 0.05:
        text, what = "[" * 10**5, "depth"
    file.write_text(text, encoding="utf-8")
    return what


def damaged(rng: random.Random, content: object) -> tuple[object, str]:
    """Returns a copy of nested mappings and lists with one thing changed, and the words for it."""
    root = {"": copy.deepcopy(content)}
    parent, key, path = root, "", ""
    while True:
        value = parent[key]
        is_inner = isinstance(value, dict | list) and len(value) > 0
        if not is_inner or (path and rng.random() < 0.2):
            break
        parent, key = value, rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        path += f".{key}"
    how = rng.random()
    if how < 0.15 and path:
        del parent[key]
        return root[""], f"without {path}"
    if how < 0.25 and isinstance(parent, dict) and path:
        parent[rng.choice(["other", "", "x" * 10**5, "a\nb"])] = rng.choice(ODD)
        return root[""], f"one more beside {path}"
    odd = rng.choice(ODD)
    parent[key] = odd if path else [odd]
    return root[""], f"{path} = {odd!r:.40}"


def _damage_header(rng: random.Random, file: Path) -> str:
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    changed, what = damaged(rng, json.loads(content[8 : 8 + size]))
    text = json.dumps(changed).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    return f"header: {what}"


def _damage_content(rng: random.Random, file: Path) -> str:
    """Changes the card or a tensor of a file, or packs the file in another way."""
    is_pickle, how = file.suffix != ".safetensors", rng.random()
    if how < 0.15:
        return _repack(rng, file) if is_pickle else _damage_header(rng, file)
    if is_pickle:
        content = torch.load(file, weights_only=True)
        tensors, card = content.get("model", content), content.get("card")
    else:
        with safe_open(file, "pt") as opened:
            card = json.loads((opened.metadata() or {}).get("card", "null"))
        content = tensors = load_file(file)
    if card is not None and how < 0.7:
        card, what = damaged(rng, card)
    else:
        what = _damage_tensors(rng, tensors)
    if not is_pickle:
        kept = {name: t.contiguous() for name, t in tensors.items() if _can_be_saved(t)}
        save_file(kept, file, None if card is None else {"card": json.dumps(card)})
        return what
    if card is not None:
        content = content | {"card": card}
    if how > 0.95:
        content, what = {"card": Allocation(), **content}, "a pickled allocation"
    elif how > 0.9:
        content, what = rng.choice([torch.ones(3), [], 3, {"model": 3}, {"model": {}}]), "no weights"
    torch.save(content, file, _use_new_zipfile_serialization=rng.random() < 0.8)
    return what


def _can_be_saved(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and tensor.layout == torch.strided and tensor.numel() < 10**7


def _damage_tensors(rng: random.Random, tensors: dict) -> str:
    name, how = rng.choice(list(tensors)), rng.choice(["missing", "extra", "name", "value"])
    tensor = tensors[name]
    if how == "missing":
        del tensors[name]
    elif how == "extra":
        tensors[rng.choice(["other", "stage9.x", "head.other", "x" * 10**4, "a\x1b[31m\nb"])] = tensor.clone()
    elif how == "name":
        tensors[name.replace(".", "_", 1)] = tensors.pop(name)
    else:
        dtype = rng.choice([torch.int8, torch.int64, torch.bool, torch.complex64, torch.float64])
        first = tensor.reshape(-1)[:1]
        values = {
            "another shape": rng.choice([tensor.flatten(), tensor[None], first, tensor.sum()]),
            "another type": tensor.to(dtype),
            "repeated": first.expand(rng.choice([10**9, 10**15])),
            "empty": torch.empty(rng.choice([(0,), (10**9, 0), (0, 10**9)])),
        }
        if tensor.is_floating_point():
            values |= {str(odd): torch.full_like(tensor, odd) for odd in (math.nan, math.inf)}
            values |= {"meta": tensor.to("meta"), "sparse": tensor.to_sparse()}
        how = rng.choice(list(values))
        tensors[name] = values[how]
    return f"{name}: {how}"


def _repack(rng: random.Random, file: Path) -> str:
    """Writes an archive again: compressed, with a member left out, doubled, or with zeros that stay small."""
    if not zipfile.is_zipfile(file):
        return _damage_bytes(rng, file)
    with zipfile.ZipFile(file) as archive:
        members = [(member.filename, archive.read(member)) for member in archive.infolist()]
    how = rng.choice(["compressed", "left out", "doubled", "bomb", "prefix", "comment"])
    i = rng.randrange(len(members))
    if how == "left out":
        del members[i]
    elif how == "doubled":
        members.append(members[i])
    elif how == "bomb":
        members[i] = (members[i][0], bytes(10**8))
    packing = zipfile.ZIP_DEFLATED if how in ("compressed", "bomb") else zipfile.ZIP_STORED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(file, "w", packing) as archive:
            for name, content in members:
                archive.writestr(name, content)
            archive.comment = b"PK" * 30 if how == "comment" else b""
    if how == "prefix":
        file.write_bytes(b"PK\3\4" + bytes(100) + file.read_bytes())
    return f"an archive with a member {how}"


def why_wrong(place: Path) -> str | None:
    """Says how the reading of a damaged checkpoint went wrong, or returns None: it was read, or refused."""
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            create_model(checkpoint=place)
    except (ValueError, OSError) as error:
        line = str(error)
        if str(place) not in line or not line.isprintable() or len(line) > 1000 + 2 * len(str(place)):
            return f"{type(error).__name__}: {line!r:.500}"
    except BaseException:
        return traceback.format_exc()
    seconds = time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    return f"took {seconds:.1f} s and {grown:.0f} MiB" if seconds > 3 or grown > 500 else None


def main(count: int, seed: int) -> None:
    """Reads damaged checkpoints and prints what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        damages = itertools.islice(mutations(random.Random(seed), Path(folder)), count)
        wrong = [f"{what}: {reason}" for what, place in damages if (reason := why_wrong(place))]
    print(*wrong, f"{count} read, {len(wrong)} wrong", sep="\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
