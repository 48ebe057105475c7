"""Files that anybody may have written: how much of them is read, and that nothing is taken for granted."""

import codecs
import io
import json
import os
import pickle
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
from tests.cvt.damage import Allocation


def mebibytes(anew=False):
    """Returns the most memory that this process has had; with ``anew``, Linux forgets it first."""
    if anew and sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(3)}, path)
    return path


def repack(path, packing=zipfile.ZIP_STORED, **changes):
    """Writes an archive again, with other contents of members of these endings."""
    with zipfile.ZipFile(path) as archive:
        members = [(member.filename, archive.read(member)) for member in archive.infolist()]
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, content in members:
            archive.writestr(name, changes.get(name.rpartition("/")[2], content))


def test_archives_that_are_packed_again_are_read_if_nothing_is_compressed(weights):
    repack(weights)
    assert torch.equal(load_pickle(weights)["a"], torch.arange(1000.0))


@pytest.mark.parametrize("size", [0, 10**8])
def test_a_compressed_archive_is_not_unpacked(weights, size):
    if not size:
        repack(weights, zipfile.ZIP_DEFLATED)
    else:
        with zipfile.ZipFile(weights, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("w/data/9", bytes(size))
    before = mebibytes(anew=True)
    with pytest.raises(
        CheckpointError, match=r"w.pth: is compressed \('w/data.*, which torch.save never does"
    ):
        load_pickle(weights)
    assert mebibytes() - before < 50


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:700] + bytes([content[700] ^ 4]) + content[701:], "the checksum of .* is "),
        (lambda content: b"PK\3\4" + content, "overlaps another or is not in its place"),
        (lambda content: content[:-2] + b"\5\0extra", "has bytes after its end"),
        (lambda content: content[:-30], "is not a file of torch.save, or damaged"),
        (lambda content: content[:-34] + b"1" + content[-33:], "its directory is not in its place|is not a "),
    ],
)  # fmt: skip
def test_damaged_archives(weights, damage, message):
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        load_pickle(weights)


def test_members_that_overlap(weights):
    content = bytearray(weights.read_bytes())
    with zipfile.ZipFile(weights) as archive:
        first, second = sorted(archive.infolist(), key=lambda member: member.header_offset)[:2]
    entry = content.index(b"PK\1\2", content.index(b"PK\1\2") + 4)
    assert int.from_bytes(content[entry + 42 : entry + 46], "little") == second.header_offset
    content[entry + 42 : entry + 46] = (first.header_offset + 8).to_bytes(4, "little")
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="overlaps another"):
        load_pickle(weights)


@pytest.mark.parametrize("new", [True, False])
def test_a_pickle_takes_no_memory_that_its_file_does_not(tmp_path, new):
    torch.save(
        {"a": torch.ones(2), "b": Allocation()}, tmp_path / "w.pth", _use_new_zipfile_serialization=new
    )
    before = mebibytes(anew=True)
    with pytest.raises(CheckpointError, match=r"holds pickled code or objects \(bytearray\)"):
        load_pickle(tmp_path / "w.pth")
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
)  # fmt: skip
def test_what_makes_more_of_little(tmp_path, content, name):
    path = tmp_path / "w.pth"
    torch.save({"a": content}, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        content = archive.read("w/data.pkl")
    repack(path, **{"data.pkl": content.replace(b"torch._utils\n", b"torch\n_utils.")})
    # Also where torch.load finds the same by another name.
    for written in (whole, path.read_bytes(), whole.replace(b"/data.pkl", b"/DATA.PKL")):
        path.write_bytes(written)
        with pytest.raises(CheckpointError, match=rf"w.pth: holds pickled code or objects \({name}.*; not "):
            load_pickle(path)


def test_what_is_no_whole_pickle_is_not_loaded(tmp_path, monkeypatch):
    path = tmp_path / "w.pth"
    path.write_bytes(pickle.dumps(deque(), 2))
    with pytest.raises(CheckpointError, match=r"w.pth: holds pickled code or objects \(collections.deque\)"):
        load_pickle(path)
    monkeypatch.delattr(torch, "load")
    path.write_bytes(pickle.dumps(1, 2) * 2 + b"c\xff\nx\n.")  # a name that pickletools cannot read
    with pytest.raises(CheckpointError, match=r"w.pth: is not a file of torch.save, or damaged; it begins "):
        load_pickle(path)


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
    with pytest.raises(CheckpointError, match=r"its directory is not in its place|is not a file of torch"):
        load_pickle(path)


def test_tensors_are_no_larger_than_their_file(tmp_path):
    shared = torch.ones(100)
    torch.save({f"stage0.x{i}": shared.expand(100, 100) for i in range(3)}, tmp_path / "w.pth")
    with pytest.raises(
        CheckpointError, match=r"w.pth: has \d+ bytes, and its tensors have 40000; expected ev"
    ):
        read_checkpoint(tmp_path / "w.pth")
    assert why_larger([shared, shared.to("meta").expand(10**6, 100)], 400) is None
    assert why_larger([shared], 399) is not None


def test_tensors_may_share_their_numbers(tmp_path):
    """A module in the places of four is saved once; files are small whose tensors are large only together."""
    shared = torch.randn(100, 100)
    torch.save({f"stage0.blocks.{i}.mlp.fc1.weight": shared for i in range(4)}, tmp_path / "w.pth")
    checkpoint = read_checkpoint(tmp_path / "w.pth")
    assert all(torch.equal(tensor, shared) for tensor in checkpoint.tensors.values())
    save_safetensors(checkpoint, tmp_path / "w.safetensors")
    assert why_larger(shared.unbind(), 40000) is None  # of one storage, not of one tensor
    assert why_larger([shared] * 32, 40000) is None
    reason = why_larger([shared] * 33, 40000)
    assert reason == "has 40000 bytes, and its tensors have 1320000, more than 32 times as many"


def test_a_file_without_checksums_is_read(tmp_path):
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(1000.0)}, tmp_path / "w.pth")
    finally:
        torch.serialization.set_crc32_options(computed)
    assert torch.equal(load_pickle(tmp_path / "w.pth")["a"], torch.arange(1000.0))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_more_tensors_than_any_model_has(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("cvt.reading.MOST_TENSORS", 3)
    monkeypatch.setattr("cvt.checkpoints.MOST_TENSORS", 3)
    tensors = {f"x{i}": torch.ones(1) for i in range(4)}
    (torch.save if suffix == ".pth" else save_file)(tensors, tmp_path / f"w{suffix}")
    with pytest.raises(CheckpointError, match=rf"w{suffix}: .*has 4 tensors, expected at most 3"):
        read_checkpoint(tmp_path / f"w{suffix}")


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors", "config.json"])
def test_pipes_and_devices_are_not_read(tmp_path, name):
    path = tmp_path / name
    os.mkfifo(path)
    place = tmp_path if name == "config.json" else path
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"{name}: is no regular file"):
            read_checkpoint(place)
        path.unlink()
        path.symlink_to("/dev/zero")


def test_links_to_files_are_read(weights, tmp_path):
    (tmp_path / "link.pth").symlink_to(weights)
    assert load_pickle(tmp_path / "link.pth").keys() == {"a", "b"}


def test_json_of_absurd_sizes(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    monkeypatch.setattr("cvt.reading.MOST_JSON", 1000)
    for text, message in (
        (json.dumps({"a": "x" * 1000}), "has 1009 bytes, expected at most 1000"),
        ("9" * 900, "got a JSON int, expected an object"),
        ("[" * 1000, "is not JSON"),
        ('{"a": "\xff"}', "is not JSON"),
        ("", "is not JSON"),
    ):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=rf"x.json: {message}") as caught:
            read_json(path)
        assert "\n" not in str(caught.value)
    monkeypatch.undo()
    path.write_text("[" * 10**5 + "9" * 10**4)
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_json(path)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "a/b", "a\\b", "", 1, None, ["x"], "x" * 10**5, "C:x"]
)
def test_an_index_names_no_files_elsewhere(tmp_path, name):
    (tmp_path / "config.json").write_text('{"model_type": "cvt"}')
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "fine.bin", "b": name}}))
    with pytest.raises(
        CheckpointError, match=r"names .*, expected a file of weights in the same folder"
    ) as caught:
        read_checkpoint(tmp_path)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["a\nb", "x" * 501, "\x1b[31m"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_names_of_tensors_that_no_model_has(tmp_path, name, suffix):
    (torch.save if suffix == ".pth" else save_file)({name: torch.ones(1)}, tmp_path / f"w{suffix}")
    with pytest.raises(CheckpointError, match=re.escape(f"w{suffix}: got a tensor named ")) as caught:
        read_checkpoint(tmp_path / f"w{suffix}")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
