"""Files that anybody may have written: how much of them is read, and that nothing is taken for granted."""

import codecs
import io
import itertools
import json
import os
import pickle
import random
import re
import resource
import struct
import sys
import zipfile
from collections import deque
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cvt import CheckpointError, read_checkpoint
from cvt.checkpoints import save_safetensors
from cvt.reading import load_pickle, read_json, why_larger
from tests.cvt.damage import Allocation, mutations, why_wrong


def mebibytes(anew=False):
    """Returns the most memory that this process has had; with ``anew``, Linux forgets it first."""
    if anew and sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def refused(path, message, read=load_pickle):
    """Checks that a file is refused by an error that names it in one short line."""
    with pytest.raises(CheckpointError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300 + len(str(path))


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(3)}, path)
    return path


def repack(path, **changes):
    """Writes an archive again, with other contents of members of these endings."""
    with zipfile.ZipFile(path) as archive:
        members = [(member.filename, archive.read(member)) for member in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, changes.get(name.rpartition("/")[2], content))


# Archives and pickles -------------------------------------------------------------------------------------


def test_archives_that_are_read(weights):
    link = weights.with_name("link.pth")
    link.symlink_to(weights)
    assert load_pickle(link).keys() == {"a", "b"}
    repack(weights)
    assert torch.equal(load_pickle(weights)["a"], torch.arange(1000.0))
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(9)}, weights)
    finally:
        torch.serialization.set_crc32_options(computed)
    assert torch.equal(load_pickle(weights)["a"], torch.ones(9))


def test_a_compressed_archive_is_not_unpacked(weights):
    with zipfile.ZipFile(weights, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("w/data/9", bytes(10**8))
    before = mebibytes(anew=True)
    refused(weights, r"is compressed \('w/data/9'\)")
    assert mebibytes() - before < 50


def overlapping(content):
    """Lets the second member of an archive begin within the first."""
    content = bytearray(content)
    entry = content.index(b"PK\1\2", content.index(b"PK\1\2") + 4)
    content[entry + 42 : entry + 46] = (8).to_bytes(4, "little")
    return content


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:700] + bytes([content[700] ^ 4]) + content[701:], "wrong checksum of "),
        (lambda content: b"PK\3\4" + content, "overlaps another or is not in its place"),
        (overlapping, "overlaps another or is not in its place"),
        (lambda content: content[:-2] + b"\5\0extra", "has bytes after its end"),
        (lambda content: content[:-30], "is not a file of torch.save, or damaged"),
        (lambda content: content[:-34] + b"1" + content[-33:], "its directory is not in its place|is not a "),
    ],
)  # fmt: skip
def test_damaged_archives(weights, damage, message):
    weights.write_bytes(damage(weights.read_bytes()))
    refused(weights, message)


@pytest.mark.parametrize("new", [True, False])
def test_a_pickle_takes_no_memory_that_its_file_does_not(weights, new):
    torch.save({"a": torch.ones(2), "b": Allocation()}, weights, _use_new_zipfile_serialization=new)
    before = mebibytes(anew=True)
    refused(weights, r"holds pickled code or objects \(bytearray\)")
    assert mebibytes() - before < 50


class Call:
    """An object that a pickle makes by a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def doubled(value, function):
    for _ in range(20):
        value = function(value)
    return value


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (doubled("a", lambda text: Call(codecs.encode, text, "hex")), "encode"),
        (Call(torch.Tensor, doubled([0], lambda part: [part, part])), "Tensor"),
        (Call(torch.FloatTensor, doubled([0], lambda part: [part, part])), "FloatTensor"),
        (torch.per_channel_affine, "per_channel_affine"),
        (torch.ones(2).to_sparse(), "_rebuild_sparse_tensor"),
        (
            Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, torch.ones(1), torch.half, "cpu"),
            "_rebuild_device_tensor_from_cpu_tensor",
        ),
    ],
)
def test_what_makes_more_of_little(tmp_path, content, name):
    """Also where torch.load finds the same by another name."""
    path = tmp_path / "w.pth"
    torch.save({"a": content}, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        content = archive.read("w/data.pkl")
    repack(path, **{"data.pkl": content.replace(b"torch._utils\n", b"torch\n_utils.")})
    for written in (whole, path.read_bytes(), whole.replace(b"/data.pkl", b"/DATA.PKL")):
        path.write_bytes(written)
        refused(path, rf"holds pickled code or objects \({name}")


def test_what_is_no_whole_pickle_is_not_loaded(tmp_path, monkeypatch):
    path = tmp_path / "w.pth"
    path.write_bytes(pickle.dumps(deque(), 2))
    refused(path, r"holds pickled code or objects \(collections.deque\)")
    monkeypatch.delattr(torch, "load")
    path.write_bytes(pickle.dumps(1, 2) * 2 + b"c\xff\nx\n.")  # a name that pickletools cannot read
    refused(path, "is not a file of torch.save, or damaged; it begins ")


def test_an_archive_with_two_directories(tmp_path):
    """Another archive lies in a member of the first, and the end of that names the end of the other."""
    path, inner = tmp_path / "w.pth", io.BytesIO()
    torch.save({"a": torch.ones(2)}, path)
    torch.save({"a": Allocation()}, inner)
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir + 30 + len("w/data/9")
    hidden = bytearray(inner.getvalue())
    for place in (*(found.end() + 38 for found in re.finditer(rb"PK\x01\x02", hidden)), len(hidden) - 50):
        moved = int.from_bytes(hidden[place : place + 4], "little") + start  # of a member, then of these
        hidden[place : place + 4] = moved.to_bytes(4, "little")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("w/data/9", bytes(hidden))
    content = path.read_bytes()
    entries, size, place = struct.unpack("<HII", content[-12:-2])
    end = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, size, place)
    end += struct.pack("<4sIQI", b"PK\6\7", 0, start + len(hidden) - 98, 1)
    path.write_bytes(content[:-22] + end + content[-22:])
    assert torch._C.PyTorchFileReader(str(path)).get_record("data.pkl").count(b"bytearray")
    refused(path, "its directory is not in its place|is not a file of torch")


# Tensors, and files beside them ---------------------------------------------------------------------------


def test_tensors_have_no_more_numbers_than_their_file(tmp_path):
    """A module in the places of four is saved once; files are small whose tensors are large only together."""
    shared, path = torch.ones(100), tmp_path / "w.pth"
    torch.save({f"stage0.x{i}": shared.expand(100, 100) for i in range(3)}, path)
    refused(path, r"has \d+ bytes, and its tensors have 40000", read_checkpoint)
    assert why_larger([shared, shared.to("meta").expand(10**6, 100)], 400) is None
    assert why_larger([shared], 399) is not None
    shared = torch.randn(100, 100)
    torch.save({f"stage0.blocks.{i}.mlp.fc1.weight": shared for i in range(4)}, path)
    checkpoint = read_checkpoint(path)
    assert all(torch.equal(tensor, shared) for tensor in checkpoint.tensors.values())
    save_safetensors(checkpoint, tmp_path / "w.safetensors")
    assert why_larger(shared.unbind(), 40000) is None  # of one storage, not of one tensor
    assert why_larger([shared] * 32, 40000) is None
    assert "have 1320000, more than 32 times as many" in why_larger([shared] * 33, 40000)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("abcd", "has 4 tensors, expected at most 3"),
        *((["a\nb"], "got a tensor named "), (["x" * 501], "got a tensor named ")),
    ],
)
def test_tensors_that_no_model_has(tmp_path, monkeypatch, names, message):
    monkeypatch.setattr("cvt.reading.MOST_TENSORS", 3)
    monkeypatch.setattr("cvt.checkpoints.MOST_TENSORS", 3)
    for save, path in ((torch.save, tmp_path / "w.pth"), (save_file, tmp_path / "w.safetensors")):
        save({name: torch.ones(1) for name in names}, path)
        refused(path, message, read_checkpoint)


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "config.json"])
def test_pipes_and_devices_are_not_read(tmp_path, name):
    path = tmp_path / name
    os.mkfifo(path)
    place = tmp_path if name == "config.json" else path
    for _ in range(2):
        refused(place, f"{name}: is no regular file", read_checkpoint)
        path.unlink()
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"a": "x" * 1000}), "has 1009 bytes, expected at most 1000"),
        ("9" * 900, "got a JSON int, expected an object"),
        ("[" * 1000, "is not JSON"),
        ('{"a": "\xff"}', "is not JSON"),
        ("", "is not JSON"),
        (None, "Permission denied|No such file"),
    ],
)
def test_json_of_absurd_sizes(tmp_path, monkeypatch, text, message):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    monkeypatch.setattr("cvt.reading.MOST_JSON", 1000)
    refused(path, message, read_json)


def test_json_that_is_nested_too_deep(tmp_path):
    (tmp_path / "x.json").write_text("[" * 10**5 + "9" * 10**4)
    refused(tmp_path / "x.json", "is not JSON", read_json)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a\\b", "", ["x"], "x" * 10**5])
def test_an_index_names_no_files_elsewhere(tmp_path, name):
    (tmp_path / "config.json").write_text('{"model_type": "cvt"}')
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "fine.bin", "b": name}}))
    refused(tmp_path, r"names .*, expected a file of weights in the same folder", read_checkpoint)


def test_damaged_checkpoints_of_every_format_are_read_or_refused_in_one_line(tmp_path):
    damages = itertools.islice(mutations(random.Random(0), tmp_path), 60)
    assert [f"{what}: {reason}" for what, place in damages if (reason := why_wrong(place))] == []
