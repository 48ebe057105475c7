"""Files that are whole whenever the writer dies; links, devices and pipes; full disks."""

import json
import math
import os
import signal
import warnings

import pytest

from cvt.files import check_writable, filling, making, replacing, write_json
from tests.processes import run_python


def replace(path, content):
    with replacing(path) as scratch:
        scratch.write_bytes(content)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("moment", "survivor"), [("write", b"old"), ("fsync", b"old"), ("replace", b"old"), ("open", b"newer")]
)
def test_files_are_whole_whenever_the_writer_is_killed(tmp_path, moment, survivor):
    """Kills it within the file, before the file is on the disk, before it is renamed, and just after that."""
    path = tmp_path / "file"
    replace(path, b"old")

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, in newer Pythons
        child = os.fork()
    if child == 0:
        setattr(os, moment, die)
        with replacing(path) as scratch, open(scratch, "wb") as file:
            file.write(b"new")
            if moment == "write":
                file.flush()
                die()
            file.write(b"er")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert path.read_bytes() == survivor
    replace(path, b"next")  # over what the killed one left
    assert contents(tmp_path) == {"file": b"next"}


def test_a_filled_folder_replaces_files_and_keeps_others(tmp_path):
    for name in ("a", "b"):
        replace(tmp_path / name, b"old")
    with filling(tmp_path) as folder:
        for name in ("b", "c"):
            (folder / name).write_bytes(b"new")
        assert (tmp_path / "b").read_bytes() == b"old"
    assert contents(tmp_path) == {"a": b"old", "b": b"new", "c": b"new"}


def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path):
    replace(tmp_path / "file", b"old")
    for context in (replacing(tmp_path / "file"), filling(tmp_path)):
        with pytest.raises(InterruptedError), context as scratch:  # noqa: PT012
            (scratch / "file" if scratch.is_dir() else scratch).write_bytes(b"new")
            raise InterruptedError
    assert contents(tmp_path) == {"file": b"old"}
    (tmp_path / "file").unlink()
    (tmp_path / "old").mkdir()
    for folder in ("old", "new/below"):
        with pytest.raises(InterruptedError), making(tmp_path / folder), filling(tmp_path / folder):
            raise InterruptedError
    with pytest.raises(OSError, match="name too long"), making(tmp_path / "new/below" / ("n" * 300)):
        pytest.fail("the block was entered")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    with making(tmp_path / "new/below"), filling(tmp_path / "new/below") as scratch:
        (scratch / "file").touch()
    assert (tmp_path / "new/below/file").exists()


def test_json_has_no_numbers_that_json_does_not_have(tmp_path):
    content = {"name": "é", "values": [1, 0.5, None]}
    write_json(tmp_path / "a.json", content)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == content
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "b.json", {"loss": math.nan})
    assert not (tmp_path / "b.json").exists()


# What cannot be written -----------------------------------------------------------------------------------


def test_what_cannot_be_written_fails_before_the_block(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "astray").symlink_to("none/file")
    for context, message in (
        (replacing(tmp_path), "is a directory, expected a file"),
        (replacing(tmp_path / "none" / "file"), "none: cannot be written to: No such file"),
        (replacing(tmp_path / "file" / "below"), "file: cannot be written to: Not a directory"),
        (filling(tmp_path / "none"), "none: cannot be written to: No such file"),
        (replacing(tmp_path / "loop"), "leads back to itself"),
        (replacing(tmp_path / "astray"), "none: cannot be written to"),
    ):
        with pytest.raises(OSError, match=message), context:
            pytest.fail("the block was entered")
    for path, directory, message in (
        ("loop", False, "leads nowhere"),
        ("loop", True, "leads nowhere"),
        ("astray", False, "cannot be written"),
        ("astray", True, "leads nowhere"),
    ):
        with pytest.raises(OSError, match=f"^--option: .*{message}"):
            check_writable("--option", path, directory=directory)
    assert sorted(os.listdir(tmp_path)) == ["astray", "file", "loop"]


# What is not replaced -------------------------------------------------------------------------------------


def test_a_link_stays_and_what_it_leads_to_is_replaced_in_one_piece(tmp_path):
    target, link = tmp_path / "there" / "target", tmp_path / "link.json"
    target.parent.mkdir()
    link.symlink_to("there/target")
    replace(link, b"old")  # makes what it leads to
    check_writable("--json", link, directory=False)
    before = link.stat().st_ino
    with replacing(link) as scratch:
        assert (scratch.parent, scratch.suffix) == (target.parent, ".json")
        scratch.write_bytes(b"new")
        assert target.read_bytes() == b"old"
    assert target.stat().st_ino != before
    assert contents(target.parent) == {"target": b"new"}
    with filling(tmp_path) as folder:
        (folder / link.name).write_bytes(b"newer")
    assert link.is_symlink()
    assert target.read_bytes() == b"newer"


def test_devices_and_pipes_are_written_to(tmp_path):
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "full").symlink_to("/dev/full")
    for path in ("/dev/null", tmp_path / "link"):
        replace(path, b"content")
        check_writable("--json", path, directory=False)
    assert (tmp_path / "link").is_symlink()
    assert not os.path.isfile("/dev/null")
    for path in ("/dev/full", tmp_path / "full"):
        with pytest.raises(OSError, match=f"^{path}: cannot be written to: No space left on device$"):
            replace(path, b"content")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace(pipe, b"content")
    assert os.read(reader, 100) == b"content"
    assert pipe.is_fifo()
    os.close(reader)


# Full disks -----------------------------------------------------------------------------------------------


FULL = """
import resource
from pathlib import Path
import torch
from cvt.checkpoints import Checkpoint, save_safetensors
from cvt.tools.commands import export
from cvt.tools.commands.paths import reporting
from cvt.files import replacing
from cvt.huggingface import save_huggingface
from cvt.tools.training import trainer
from tests.cvt.models import small

def save_within_another(path):
    with replacing(path) as scratch:
        save_safetensors(Checkpoint("", model.state_dict()), scratch)

def write_results(path):
    with reporting(str(path)) as report:
        report({"much": "x" * 10**5})

model = small().eval()
resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, 2**13))
for name, write in {
    "results.json": write_results,
    "last.pth": lambda path: trainer._write({"model": torch.zeros(10**5)}, path),
    "weights.safetensors": save_within_another,
    "model.pt2": lambda path: export.export(model, path, "pt2", image_size=32),
    "folder": lambda path: save_huggingface(model, path),
}.items():
    try:
        write(Path(name))
    except OSError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    """The limit of a file's size is met in the same places as a full disk is."""
    monkeypatch.chdir(tmp_path)
    names = ["results.json", "last.pth", "weights.safetensors", "model.pt2"]
    for name in names:
        (tmp_path / name).write_text("old")
    (tmp_path / "folder").mkdir()
    result = run_python(FULL)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 5
    assert all("File too large" in line or "perhaps the disk is full" in line for line in lines)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "folder"])
    assert not os.listdir(tmp_path / "folder")
    assert all((tmp_path / name).read_text() == "old" for name in names)
