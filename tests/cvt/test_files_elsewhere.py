"""Links, devices, pipes and open files, which are not replaced, and disks that are full."""

import os
import re
import socket

import pytest

from cvt.files import check_writable, filling, replacing, write_json
from tests.processes import run_python


def replace(path, content):
    with replacing(path) as scratch:
        scratch.write_bytes(content)


@pytest.fixture
def link(tmp_path):
    """Returns a link to a file in another folder."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "target").write_bytes(b"old")
    (tmp_path / "link.json").symlink_to("there/target")
    return tmp_path / "link.json"


def test_a_link_stays_and_what_it_leads_to_is_replaced_in_one_piece(link):
    check_writable("--json", link, directory=False)
    target, before = link.resolve(), link.stat().st_ino
    with replacing(link) as scratch:
        assert (scratch.parent, scratch.suffix) == (target.parent, ".json")
        scratch.write_bytes(b"new")
        assert target.read_bytes() == b"old"
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_ino != before
    assert os.listdir(target.parent) == ["target"]
    with filling(link.parent) as folder:
        (folder / link.name).write_bytes(b"newer")
    assert link.is_symlink()
    assert target.read_bytes() == b"newer"


def test_a_link_to_nothing_makes_what_it_leads_to(link):
    target = link.resolve()
    target.unlink()
    replace(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_links_that_lead_nowhere_are_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "astray").symlink_to("none/file")
    for name, message in (("loop", "leads back to itself"), ("astray", "none: cannot be written to")):
        with pytest.raises(OSError, match=message):
            replace(tmp_path / name, b"")
        with pytest.raises(OSError, match="--json: "):
            check_writable("--json", tmp_path / name, directory=False)
        with pytest.raises(OSError, match=r"--output: .* leads nowhere"):
            check_writable("--output", tmp_path / name, directory=True)
        assert (tmp_path / name).is_symlink()


def test_a_file_that_is_not_open():
    with pytest.raises(OSError, match=r"^--json: /dev/fd/987 is no open file$"):
        check_writable("--json", "/dev/fd/987", directory=False)
    with pytest.raises(OSError, match=r"^/dev/fd/987: is no open file$"):
        replace("/dev/fd/987", b"")


@pytest.mark.parametrize("make", [lambda fd: f"/dev/fd/{fd}", lambda fd: f"/proc/self/fd/{fd}"])
@pytest.mark.parametrize("through_link", [False, True])
def test_an_open_file_is_written_to_from_where_it_stands(tmp_path, make, through_link):
    path = tmp_path / "file"
    with open(path, "wb", buffering=0) as file:
        file.write(b"before ")
        place = make(file.fileno())
        if through_link:
            (tmp_path / "link").symlink_to(place)
            place = tmp_path / "link"
        check_writable("--json", place, directory=False)
        replace(place, b"content")
        file.write(b" after")
    assert path.read_bytes() == b"before content after"


def test_devices_are_written_to(tmp_path):
    (tmp_path / "link").symlink_to("/dev/null")
    for path in ("/dev/null", tmp_path / "link"):
        replace(path, b"content")
        check_writable("--json", path, directory=False)
    assert (tmp_path / "link").is_symlink()
    assert not os.path.isfile("/dev/null")
    (tmp_path / "full").symlink_to("/dev/full")
    for path in ("/dev/full", tmp_path / "full"):
        with pytest.raises(OSError, match=f"^{path}: cannot be written to: No space left on device$"):
            replace(path, b"content")


def test_sockets_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        with pytest.raises(OSError, match="socket: is a socket, expected a file"), replacing("socket"):
            pytest.fail("the block was entered")
        with pytest.raises(OSError, match=r"--json: .*/socket is a socket"):
            check_writable("--json", "socket", directory=False)


def test_of_two_files_the_error_names_the_one_that_is_too_large(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("pathlib.Path.write_text", fail)
        with (
            pytest.raises(OSError, match=re.escape(f"{tmp_path / 'a.json'}: cannot be written to: No space")),
            replacing(tmp_path / "a.json") as a,
            replacing(tmp_path / "b"),
        ):
            write_json(a, {})
    assert not list(tmp_path.iterdir())


FULL = """
import os, resource
from pathlib import Path
import torch
from cvt.checkpoints import Checkpoint, save_safetensors
from cvt.commands import export
from cvt.commands.bench import results
from cvt.files import replacing
from cvt.huggingface import save_huggingface
from cvt.training import trainer
from tests.cvt.models import small

model = small().eval()
tensors = model.state_dict()

def save_within_another(path):
    with replacing(path) as scratch:
        save_safetensors(Checkpoint("", tensors), scratch)

writers = {
    "results.json": lambda path: results.write({"much": "x" * 10**5}, path),
    "last.pth": lambda path: trainer._write({"model": torch.zeros(10**5)}, path),
    "weights.safetensors": save_within_another,
    "model.pt2": lambda path: export.export(model, path, "pt2", image_size=32),
    "folder": lambda path: save_huggingface(model, path),
}
resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, 2**13))
for name, write in writers.items():
    path = Path(name)
    if name == "folder":
        path.mkdir()
    else:
        path.write_text("old")
    try:
        write(path)
    except OSError as error:
        print(error, os.listdir() if path.is_dir() else path.read_text())
assert sorted(os.listdir()) == sorted(writers) and not os.listdir("folder")
"""


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    """The limit of a file's size is met in the same places as a full disk is."""
    monkeypatch.chdir(tmp_path)
    result = run_python(FULL)
    assert result.returncode == 0, result.stderr
    names = ["results.json", "last.pth", "weights.safetensors", "model.pt2", "folder"]
    for line, name in zip(result.stdout.splitlines(), names, strict=True):
        assert line.startswith(f"{name}: cannot be written to: File too large ")
        assert line.endswith("old") or name == "folder"
