"""Files that are whole whenever the writer dies, and what cannot be written."""

import json
import math
import os
import signal
import warnings
from pathlib import Path

import pytest

from cvt.files import filling, making, replacing, write_json


def replace(path, content):
    with replacing(path) as scratch:
        scratch.write_bytes(content)


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
    assert path.read_bytes() == b"next"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["x" * 251 + ".pth", "x" * 255, "x." + "é" * 126, "ü" * 125 + ".json"])
def test_names_of_any_length(tmp_path, name):
    with replacing(tmp_path / name) as scratch:
        assert scratch.name.endswith(Path(name).suffix[:16])
        assert len(list(tmp_path.iterdir())) == 1
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_an_error_leaves_the_file_as_it_was_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    replace(path, b"old")

    def fail(context):
        with context as scratch:
            (scratch / "file" if scratch.is_dir() else scratch).write_bytes(b"new")
            raise InterruptedError

    for context in (replacing(path), filling(tmp_path)):
        with pytest.raises(InterruptedError):
            fail(context)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"old")]


def test_a_filled_folder_replaces_files_and_keeps_others(tmp_path):
    for name in ("a", "b"):
        replace(tmp_path / name, b"old")
    with filling(tmp_path) as folder:
        for name in ("b", "c"):
            (folder / name).write_bytes(b"new")
        assert (tmp_path / "b").read_bytes() == b"old"
    contents = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert contents == {"a": b"old", "b": b"new", "c": b"new"}


def test_a_folder_that_stays_empty_is_not_left_behind(tmp_path):
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


def test_what_cannot_be_written_fails_before_the_block(tmp_path):
    (tmp_path / "file").touch()
    for context, message in (
        (replacing(tmp_path), "is a directory, expected a file"),
        (replacing(tmp_path / "none" / "file"), "none: cannot be written to: No such file"),
        (replacing(tmp_path / "file" / "below"), "file: cannot be written to: Not a directory"),
        (filling(tmp_path / "none"), "none: cannot be written to: No such file"),
    ):
        with pytest.raises(OSError, match=message), context:
            pytest.fail("the block was entered")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_json_has_no_numbers_that_json_does_not_have(tmp_path):
    content = {"name": "é", "values": [1, 0.5, None]}
    write_json(tmp_path / "a.json", content)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == content
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "b.json", {"loss": math.nan})
    assert not (tmp_path / "b.json").exists()


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(pipe) as target:
            target.write_bytes(b"content")
        assert os.read(reader, 100) == b"content"
        assert pipe.is_fifo()
    finally:
        os.close(reader)
