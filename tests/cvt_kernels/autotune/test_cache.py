"""Tests of the autotuning cache: files, merges, damage, locks, and what a machine's key depends on."""

import errno
import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from cvt_kernels import autotune, caller, machine
from cvt_kernels.autotune import Cache, Entry, Measurement, files
from cvt_kernels.autotune import key as machine_key
from tests.processes import Child, run_python

KEY = {"device": "cpu", "torch": "2.11", "threads": 2}
CPU = torch.device("cpu")

GOOD = Measurement(error=1.25e-7, allowed=3e-7, seconds=0.1 + 0.2, host_seconds=None, flaw=None)
BAD = Measurement(error=0.5, allowed=3e-7, seconds=None, host_seconds=1e-5, flaw="wrong: é")
ENTRY = Entry("cpu", "reference", {"cpu": GOOD, "triton": BAD})
OTHER = Entry("reference", "reference", {"reference": GOOD})

#: The start of a child process's code.
CHILD = f"""
import sys, time
from cvt_kernels.autotune import Cache, Measurement, Entry
cache = Cache({KEY!r})
other = Entry("reference", "reference", {{"reference": Measurement(0.0, 0.0, 1e-6, None, None)}})
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    """Gives each test a cache of its own, and the state of a process that has read nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CVT_KERNELS_TUNED", raising=False)
    monkeypatch.delenv("CVT_KERNELS_AUTOTUNE", raising=False)
    autotune.forget()


@pytest.fixture
def start():
    """Returns a function that starts a child process on code and waits until it says that it is ready."""
    children = []

    def start(code):
        child = Child(CHILD + code)
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def say_go(child):
    child.stdin.write("\n")
    child.stdin.flush()


def content_with(**changes):
    """Returns what is in a file of one entry, with other fields."""
    content = {
        "schema": "cvt-kernels entries",
        "version": 2,
        "machine": KEY,
        "entries": {"q": {**ENTRY._asdict(), "measurements": {"cpu": GOOD._asdict()}}},
    }
    return {**content, **changes}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def with_entry(**changes):
    entry = content_with()["entries"]["q"]
    return content_with(entries={"q": {**entry, **changes}})


def with_measurement(**changes):
    return with_entry(measurements={"cpu": {**GOOD._asdict(), **changes}})


def without(content, *names):
    """Removes the last of the nested names."""
    content = json.loads(json.dumps(content))
    inner = content
    for name in names[:-1]:
        inner = inner[name]
    del inner[names[-1]]
    return content


# The file -------------------------------------------------------------------------------------------------


def test_entries_are_saved_in_a_file_per_key(tmp_path):
    cache, other = Cache(KEY), Cache({**KEY, "threads": 1})
    assert cache.get("q") is None
    cache.remember({"q": ENTRY, "p": OTHER})
    assert cache.get("q") == ENTRY
    assert Cache(KEY).entries() == {"q": ENTRY, "p": OTHER}
    assert other.get("q") is None
    [path] = (tmp_path / "cache" / "cvt_kernels" / "entries").glob("*.json")
    assert path == cache.path != other.path
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["entries"].pop("p")["chosen"] == "reference"
    content["entries"]["q"]["measurements"].pop("triton")
    assert content == content_with()
    assert not list(path.parent.glob(".*"))


def test_numbers_that_json_lacks():
    bare = Measurement(math.nan, math.inf, math.inf, None, None)
    known = Measurement(math.nan, 1.0, None, None, "wrong: NaN in the output")
    cache = Cache(KEY)
    cache.remember({"q": Entry("reference", "reference", {"cpu": bare, "triton": known})})
    measurements = {
        "cpu": Measurement(None, None, None, None, "wrong: its error is nan"),
        "triton": Measurement(None, 1.0, None, None, "wrong: NaN in the output"),
    }
    assert cache.get("q").measurements == measurements
    assert Cache(KEY).get("q").measurements == measurements
    assert "NaN" not in cache.path.read_text().replace("wrong: NaN", "")


def test_caches_merge_and_known_entries_stay_unless_replaced(monkeypatch):
    first, second = Cache(KEY), Cache(KEY)
    assert first.get("q") is second.get("p") is None
    first.remember({"q": ENTRY})
    second.remember({"q": OTHER, "p": OTHER})
    assert second.entries() == Cache(KEY).entries() == {"q": ENTRY, "p": OTHER}
    assert first.get("p") is None  # has not read again
    with first.tuning():
        assert first.get("p") == OTHER
    with monkeypatch.context() as context:
        context.setattr(files, "write", lambda *arguments: pytest.fail("there is nothing new"))
        first.remember({"q": OTHER})
        first.remember({})
    second.remember({"q": OTHER}, replace=True)
    assert second.get("q") == Cache(KEY).get("q") == OTHER


def test_unknown_fields_are_kept_out():
    content = content_with(mood="good")
    content["entries"]["q"]["mood"] = content["entries"]["q"]["measurements"]["cpu"]["mood"] = "good"
    cache = Cache(KEY)
    write(cache.path, content)
    assert cache.get("q") == ENTRY._replace(measurements={"cpu": GOOD})
    cache.remember({"p": OTHER})
    assert "mood" not in cache.path.read_text()


def test_a_hit_needs_no_file(monkeypatch):
    cache = Cache(KEY)
    cache.remember({"q": ENTRY})
    monkeypatch.setattr(files, "read", lambda *arguments, **options: pytest.fail("read"))
    assert (cache.get("q"), cache.get("p")) == (ENTRY, None)


GOOD_TEXT = json.dumps(content_with())
DAMAGED = {
    "empty": ("", "it is not JSON"),
    "truncated": (GOOD_TEXT[: len(GOOD_TEXT) // 2], "it is not JSON"),
    "deep": ("[" * 100_000, "it is not JSON"),
    "list": ([], "file: got"),
    "schema": (content_with(schema="recipe"), "schema: got 'recipe'"),
    "no schema": (without(content_with(), "schema"), "schema: is missing"),
    "version": (content_with(version=1), "version: got 1"),
    "version as text": (content_with(version="2"), "version: got '2'"),
    "machine": (content_with(machine=None), "machine: got None"),
    "entries": (content_with(entries=[]), "entries: got"),
    "entry": (content_with(entries={"q": "cpu"}), "'q': got 'cpu'"),
    "chosen": (with_entry(chosen=None), "'q', chosen: got None"),
    "measurements": (with_entry(measurements=[]), "'q', measurements: got"),
    "measurement": (with_entry(measurements={"cpu": 1}), "'q', cpu: got 1"),
    "error": (with_measurement(error="0"), "'q', cpu, error: got '0'"),
    "bool": (with_measurement(seconds=True), "seconds: got True"),
    "NaN": (with_measurement(error=math.nan), "error: got nan"),
    "huge": (with_measurement(error=10**400), "error: got 1000"),
    "flaw": (with_measurement(flaw=1), "flaw: got 1"),
    "disturbed": (with_measurement(is_disturbed=1), "is_disturbed: got 1"),
    "timings": (with_entry(timings=None), "'q', timings: got None"),
    "foreign": (
        content_with(machine={**KEY, "torch": "2.10", "extra": "x"}),
        "for another machine or installation: extra: x in the file, none here; torch: 2.10 in the file, ",
    ),
}


@pytest.mark.parametrize(("content", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning_and_replaced(content, reason):
    cache = Cache(KEY)
    write(cache.path, content)
    with pytest.warns(RuntimeWarning, match=re.escape(reason)) as caught:
        assert cache.get("q") is None
    assert len(caught) == 1
    assert str(cache.path) in str(caught[0].message)
    assert Cache(KEY).get("q") is None  # no second warning, which would be an error
    cache.remember({"p": OTHER})
    assert Cache(KEY).entries() == {"p": OTHER}


def in_time(function):
    """Returns what a function returns, in a thread; fails if it does not end."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(30)
    assert results, "hangs"
    return results[0]


NO_FILES = {
    "fifo": (os.mkfifo, "it is not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
    "socket": (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), "No such device"),
    "folder": (Path.mkdir, "Is a directory"),
    "huge": (lambda path: (path.touch(), os.truncate(path, 2**24 + 1)), "it has more than 16777216 bytes"),
    "not text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "it is not text: .*utf-8"),
}


@pytest.mark.parametrize("is_shipped", [False, True], ids=["cache", "shipped"])
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_of_entries_is_ignored_at_once(monkeypatch, tmp_path, kind, is_shipped):
    make, reason = NO_FILES[kind]
    path = tmp_path / "shipped" if is_shipped else Cache(KEY).path
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    monkeypatch.setenv("CVT_KERNELS_TUNED", str(path) if is_shipped else "")
    cache = Cache(KEY)
    with pytest.warns(RuntimeWarning, match=f"this file of entries is ignored: {reason}") as caught:
        assert in_time(lambda: cache.get("q")) is None
    assert len(caught) == 1
    if kind != "folder" or is_shipped:
        in_time(lambda: cache.remember({"p": OTHER}) or True)
        assert cache.cached_entries() == {"p": OTHER}


@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder"])
def test_what_stands_in_the_place_of_a_lock_keeps_nobody_waiting(kind):
    cache = Cache(KEY)
    cache.path.parent.mkdir(parents=True)
    for suffix in (".tuning", ".writing"):
        NO_FILES[kind][0](cache.path.with_suffix(suffix))

    def tune():
        with cache.tuning():
            cache.remember({"q": ENTRY})
        return True

    assert in_time(tune)
    assert Cache(KEY).get("q") == ENTRY


# Where nothing can be written -----------------------------------------------------------------------------


def file_as_cache(monkeypatch, tmp_path):
    write(tmp_path / "file", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def read_only(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr(files.tempfile, "NamedTemporaryFile", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)


def full_disk(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "replace", refuse)


def no_home(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


@pytest.mark.parametrize("prevent", [file_as_cache, no_home, read_only, full_disk])
def test_entries_that_cannot_be_written_stay_in_the_process_with_one_warning(monkeypatch, tmp_path, prevent):
    prevent(monkeypatch, tmp_path)
    before = list(tmp_path.iterdir())
    cache = Cache(KEY)
    with cache.tuning():  # at once, without a warning
        assert cache.get("q") is None
    with pytest.warns(RuntimeWarning, match="cannot be remembered") as caught:
        cache.remember({"q": ENTRY})
    assert len(caught) == 1
    for words in (str(cache.path), "XDG_CACHE_HOME", "CVT_KERNELS_TUNED"):
        assert words in str(caught[0].message)
    cache.remember({"q": OTHER, "p": OTHER})
    assert cache.entries() == {"q": ENTRY, "p": OTHER}
    cache.remember({"q": OTHER}, replace=True)
    Cache({**KEY, "threads": 1}).remember({"q": ENTRY})  # no second warning
    with cache.tuning():
        assert cache.get("q") == OTHER
    assert prevent is not no_home or list(tmp_path.iterdir()) == before


def test_an_entry_with_a_fault_of_the_environment_holds_for_this_process_only():
    passing = ENTRY._replace(measurements={"triton": GOOD._replace(flaw="fails here: OSError: no")})
    cache = Cache(KEY)
    cache.remember({"q": OTHER})
    cache.remember({"q": passing, "p": passing, "r": OTHER})
    assert cache.entries() == {"q": OTHER, "p": passing, "r": OTHER}
    assert cache.cached_entries() == Cache(KEY).entries() == {"q": OTHER, "r": OTHER}
    cache.remember({"q": passing}, replace=True)
    assert cache.get("q") == passing
    assert Cache(KEY).get("q") == OTHER
    cache.remember({"q": ENTRY, "p": ENTRY}, replace=True)
    assert cache.entries() == Cache(KEY).entries() == {"q": ENTRY, "p": ENTRY, "r": OTHER}


def test_why_not_remembered(monkeypatch, tmp_path):
    cache = Cache(KEY)
    assert cache.why_not_remembered(may_write=False) is None
    assert not list(tmp_path.iterdir())  # by the permissions alone
    with monkeypatch.context() as context:
        context.setattr(os, "access", lambda path, mode: path != tmp_path)
        assert cache.why_not_remembered(may_write=False) == f"{tmp_path}: Permission denied"
    assert cache.why_not_remembered() is None
    assert not list(cache.path.parent.iterdir())
    file_as_cache(monkeypatch, tmp_path)
    for may_write in (False, True):
        assert str(tmp_path / "file") in Cache(KEY).why_not_remembered(may_write=may_write)


def test_what_could_not_be_written_is_tried_once_and_written_when_it_can_be(monkeypatch, tmp_path):
    cache = Cache(KEY)
    with monkeypatch.context() as context:
        read_only(context, tmp_path)
        assert "Read-only" in cache.why_not_remembered()
    assert "Read-only" in cache.why_not_remembered()
    with monkeypatch.context() as context:
        full_disk(context, tmp_path)
        with pytest.warns(RuntimeWarning, match="No space left"):
            cache.remember({"q": ENTRY})
        assert not list(cache.path.parent.glob(".*"))
    assert "No space left" in cache.why_not_remembered(may_write=False)
    cache.remember({"p": OTHER})
    assert cache.why_not_remembered() is None
    assert Cache(KEY).entries() == {"q": ENTRY, "p": OTHER}
    shutil.rmtree(cache.path.parents[1])  # it may be removed meanwhile
    with cache.tuning():
        cache.remember({"p": OTHER})
    assert Cache(KEY).entries() == {"p": OTHER}


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path", None):
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert autotune.cache_directory() == tmp_path / ".cache" / "cvt_kernels"


# Files that come with an image ----------------------------------------------------------------------------


def shipped_files(monkeypatch, tmp_path, *contents):
    paths = [tmp_path / f"shipped{index}.json" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        write(path, content)
    monkeypatch.setenv("CVT_KERNELS_TUNED", os.pathsep.join(map(str, paths)))
    return paths


def test_shipped_entries_win_and_their_file_is_never_written(monkeypatch, tmp_path):
    Cache(KEY).remember({"q": OTHER, "p": OTHER})
    (path,) = shipped_files(monkeypatch, tmp_path, content_with())
    before = path.read_bytes(), path.stat().st_mtime_ns
    cache = Cache(KEY)
    shipped = ENTRY._replace(measurements={"cpu": GOOD})
    assert cache.entries() == {"q": shipped, "p": OTHER}
    cache.remember({"q": OTHER, "r": OTHER}, replace=True)
    assert cache.entries() == {"q": shipped, "p": OTHER, "r": OTHER}
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert "r" in json.loads(cache.path.read_text())["entries"]
    assert cache.cached_entries() == Cache(KEY).cached_entries() == {"q": OTHER, "p": OTHER, "r": OTHER}


def test_several_shipped_files(monkeypatch, tmp_path):
    gpu = content_with(machine={"device": "cuda", "name": "H200"})
    second = with_entry(chosen="second")
    second["entries"]["p"] = second["entries"]["q"]
    shipped_files(monkeypatch, tmp_path, gpu, content_with(), second)
    file_as_cache(monkeypatch, tmp_path)  # they serve where nothing can be written
    cache = Cache(KEY)
    with cache.tuning():
        assert cache.get("q").chosen == "cpu"  # the earlier file wins
    assert cache.get("p").chosen == "second"
    assert Cache({"device": "cuda", "name": "H200"}).get("q").chosen == "cpu"  # no warning anywhere


@pytest.mark.parametrize("content", [None, "{", content_with(machine={**KEY, "threads": 1})])
def test_a_shipped_file_that_cannot_serve_gives_one_warning(monkeypatch, tmp_path, content):
    bad, _ = shipped_files(monkeypatch, tmp_path, content or "", content_with())
    if content is None:
        bad.unlink()
    with pytest.warns(RuntimeWarning) as caught:
        assert Cache(KEY).get("q").chosen == "cpu"
    [message] = [str(warning.message) for warning in caught]
    assert message.startswith(f"CVT_KERNELS_TUNED: {bad}: this file of entries is ignored: ")
    assert Cache(KEY).get("q").chosen == "cpu"


# Files of others ------------------------------------------------------------------------------------------


def give(monkeypatch, path, user):
    """Lets a file or folder seem to belong to a user."""
    number = path.stat().st_ino

    def seeming(function):
        def status(*args, **kwargs):
            real = function(*args, **kwargs)
            return os.stat_result((*real[:4], user, *real[5:10])) if real.st_ino == number else real

        return status

    for name in ("stat", "fstat"):
        monkeypatch.setattr(os, name, seeming(getattr(os, name)))


def open_to_all(monkeypatch, path, user):
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


@pytest.mark.parametrize("change", [give, open_to_all])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_others_may_write_is_not_trusted(monkeypatch, change, what):
    cache = Cache(KEY)
    write(cache.path, content_with())
    before = cache.path.read_text()
    with monkeypatch.context() as context:
        change(context, cache.path if what == "file" else cache.path.parent, 12345)
        reason = "it belongs to user 12345|every user may write it"
        with pytest.warns(RuntimeWarning, match=reason) as caught:
            assert cache.get("q") is None
        cache.remember({"p": OTHER})  # no second warning
        assert len(caught) == 1
        assert (cache.why_not_remembered(may_write=False) is None) == (what == "file")
        assert cache.get("p") == OTHER
        assert (cache.path.read_text() == before) == (what == "folder")


def test_a_shipped_file_may_be_roots(monkeypatch, tmp_path):
    (path,) = shipped_files(monkeypatch, tmp_path, content_with())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    give(monkeypatch, path, 0)
    assert Cache(KEY).get("q").chosen == "cpu"


@pytest.mark.parametrize("change", [give, open_to_all])
def test_a_shipped_file_that_others_may_write_is_not_trusted(monkeypatch, tmp_path, change):
    (path,) = shipped_files(monkeypatch, tmp_path, content_with())
    change(monkeypatch, path, 12345)
    with pytest.warns(RuntimeWarning, match="is ignored: (it belongs to user 12345|every user may write it)"):
        assert Cache(KEY).get("q") is None


def test_what_is_written_is_trusted_whatever_the_umask():
    umask = os.umask(0)
    try:
        Cache(KEY).remember({"q": ENTRY})
    finally:
        os.umask(umask)
    assert Cache(KEY).get("q") == ENTRY


# What killed processes leave ------------------------------------------------------------------------------


def test_what_killed_processes_have_left_is_removed_by_the_next_one_that_writes(start):
    cache, dead = Cache(KEY), 2**30
    folder, name = cache.path.parent, cache.path.stem
    folder.mkdir(parents=True)
    left = [f".{name}.json.{dead}.0123abcd", f".other.json.{dead}.0123abcd", f".tried.{dead}.abc_d"]
    left += [".tried.abc", "other.tuning", "other.writing"]
    kept = [f".{name}.json.{os.getpid()}.0123abcd", f".tried.{os.getpid()}.abc", "held.tuning", "notes.txt"]
    kept += ["another.json", "another.tuning", f"{name}.tuning"]
    for each in (*left, *kept):
        (folder / each).touch()
        os.utime(folder / each, (time.time() - 7200,) * 2)
    new = [f".{name}.json.{dead}.ffff", "new.tuning"]
    for each in new:
        (folder / each).touch()
    child = start(
        "from cvt_kernels.autotune.locks import held\n"
        "with held(cache.path.with_name('held.tuning'), 9):\n"
        "    print(1, flush=True); time.sleep(60)"
    )
    say_go(child)
    assert child.stdout.readline() == "1\n"
    os.utime(folder / "held.tuning", (time.time() - 7200,) * 2)
    cache.remember({"q": ENTRY})
    assert {path.name for path in folder.iterdir()} == {*kept, *new, f"{name}.json", f"{name}.writing"}


# Timings on a busy machine --------------------------------------------------------------------------------

UNSURE = ENTRY._replace(measurements={"cpu": GOOD._replace(is_disturbed=True), "triton": BAD})


def test_an_unsure_entry_is_timed_again_by_later_processes_a_few_times():
    cache = Cache(KEY)
    cache.remember({"q": UNSURE, "r": UNSURE, "p": ENTRY})
    assert not cache.times_again("q")  # tuned by this process
    assert cache.advice().startswith("2 choices were timed while other programs kept this machine busy: run ")
    for timings in (2, 3):
        later = Cache(KEY)
        assert [later.times_again(cache_key) for cache_key in "qqp"] == [True, False, False]
        later.remember({"q": UNSURE._replace(timings=timings)}, replace=True)
        assert not later.times_again("r")  # the machine is busy still
    assert not Cache(KEY).times_again("q")
    assert Cache(KEY).times_again("r")
    later.remember({"q": ENTRY}, replace=True)
    assert Cache(KEY).advice().startswith("1 choice was timed ")
    later.remember({"r": ENTRY}, replace=True)
    assert Cache(KEY).advice() is None


def test_an_unsure_entry_that_is_shipped_stays(monkeypatch, tmp_path):
    shipped_files(monkeypatch, tmp_path, with_measurement(is_disturbed=True))
    cache = Cache(KEY)
    assert cache.get("q").is_unsure
    assert not cache.times_again("q")
    assert cache.advice() is None


# Warnings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("cvt_kernels", 3), ("cvt_kernels.backends", 3), ("torch.nn.modules.module", 3), ("contextlib", 3),
        ("cvt_kernels_of_others", 1),
    ],
)  # fmt: skip
def test_frames_between_the_package_and_its_caller_are_passed(name, level):
    frames = {"__name__": name, "stacklevel_of_caller": caller.stacklevel_of_caller}
    exec("def inner(): return stacklevel_of_caller()\ndef outer(): return inner()", frames)
    assert frames["outer"]() == level


# Processes and threads ------------------------------------------------------------------------------------


def test_two_processes_lose_nothing_in_50_rounds_each(start):
    code = "for i in range(50): cache.remember({{f'{0} {{i}}': other}})"
    children = [start(code.format(name)) for name in "ab"]
    path = Cache(KEY).path
    for child in children:
        say_go(child)
    reads = 0
    while any(child.poll() is None for child in children):
        Cache(KEY).get("q")  # a damaged file would be a warning, hence an error
        reads += path.exists()
        time.sleep(0.001)
    assert [child.returncode for child in children] == [0, 0]
    assert reads > 10
    assert set(Cache(KEY).entries()) == {f"{name} {i}" for name in "ab" for i in range(50)}
    assert not [file for file in path.parent.iterdir() if file.name.startswith(f".{path.name}")]


def test_tuning_and_writing_go_on_without_locks_in_the_end(monkeypatch, start):
    child = start(
        "from cvt_kernels.autotune.locks import held\n"
        "with cache.tuning(), held(cache.path.with_suffix('.writing'), 9):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    say_go(child)
    assert child.stdout.readline() == "held\n"
    monkeypatch.setattr(autotune.cache, "_TUNING_SECONDS", 0.3)
    monkeypatch.setattr(autotune.cache, "_WRITING_SECONDS", 0.3)
    cache, begin = Cache(KEY), time.perf_counter()
    with cache.tuning() as has_turn:
        assert not has_turn
        assert 0.3 <= time.perf_counter() - begin < 60
        cache.remember({"q": ENTRY})
    assert Cache(KEY).get("q") == ENTRY
    assert child.poll() is None
    child.kill()  # gives the locks back
    monkeypatch.setattr(autotune.cache, "_TUNING_SECONDS", 60)
    with cache.tuning() as has_turn:
        assert has_turn


def test_tuning_may_be_nested_and_is_given_back_after_an_error(start):
    cache = Cache(KEY)
    with pytest.raises(ZeroDivisionError), cache.tuning(), Cache(KEY).tuning():
        raise ZeroDivisionError
    child = start("with cache.tuning(): print('held')")
    with cache.tuning():
        with cache.tuning():
            pass
        say_go(child)
        time.sleep(0.3)
        assert child.poll() is None  # the outer block still holds it
    assert child.stdout.read() == "held\n"


def test_no_lock_outlives_the_process(tmp_path):
    """The destructor of filelock 4.0's fails where Python has taken down the modules that it needs."""
    code = f"""
import atexit, gc, pathlib, filelock
atexit.register(lambda: print(sum(isinstance(each, filelock.BaseFileLock) for each in gc.get_objects())))
from cvt_kernels.autotune.locks import held
with held(pathlib.Path({str(tmp_path / "lock")!r}), 1):
    pass
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stderr


def test_one_thread_at_a_time_tunes():
    cache, inside, most = Cache(KEY), [], []

    def tune(index):
        with cache.tuning():
            inside.append(index)
            most.append(len(inside))
            time.sleep(0.02)
            inside.remove(index)
            cache.remember({f"{index}": OTHER})

    threads = [threading.Thread(target=tune, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert set(Cache(KEY).entries()) == {str(index) for index in range(8)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_while_a_thread_holds_the_guard_goes_on():
    code = f"""
import os, threading
from cvt_kernels import autotune, caller
cache = autotune.Cache({KEY!r})
held, free = threading.Event(), threading.Event()
def hold():
    with autotune.cache._guard:
        held.set()
        free.wait()
threading.Thread(target=hold).start()
held.wait()
if os.fork() == 0:
    cache.remember({{"q": autotune.Entry("cpu", "cpu", {{}})}})
    print(cache.get("q").chosen, flush=True)
    os._exit(0)
os.wait()
free.set()
"""
    child = Child(code)
    try:
        assert in_time(child.communicate)[0] == "cpu\n"
    finally:
        child.kill()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_takes_the_locks_that_its_parent_knows():
    """It does so in each of its threads, and does not take the lock that its parent holds for its own."""
    code = f"""
import os, threading
from cvt_kernels import autotune, caller
from cvt_kernels.autotune.locks import held
cache = autotune.Cache({KEY!r})
entry = autotune.Entry("cpu", "cpu", {{}})
cache.remember({{"parent": entry}})
tuning = cache.path.with_suffix(".tuning")
with held(tuning, 0):
    child = os.fork()
    if child == 0:
        def tune(name):
            with held(tuning, 0) as has:
                assert not has
            cache.remember({{name: entry}})
        thread = threading.Thread(target=tune, args=("thread",))
        thread.start()
        thread.join()
        tune("child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    other = os.fork()
    if other == 0:
        with held(tuning, 30) as has:
            os._exit(0 if has else 1)
assert os.waitpid(other, 0)[1] == 0
with held(tuning, 0) as has:
    print(has, *sorted(autotune.Cache({KEY!r}).entries()))
"""
    result = run_python(code)
    assert result.stdout == "True child parent thread\n", result.stderr


# Settings and keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_tuning_enabled(monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("CVT_KERNELS_AUTOTUNE", value)
    assert autotune.tuning_enabled() is expected
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match="CVT_KERNELS_AUTOTUNE: got 'yes', expected 0 or 1"):
        autotune.tuning_enabled()


@pytest.fixture
def _forgotten():
    """Lets the test compute the costly parts of the key again, and forgets them after it."""
    caches = machine_key._installation, machine_key._cpu_facts, machine_key._gpu_facts
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("_forgotten")
def test_key_of_the_cpu(monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setenv("CVT_KERNELS_CPU", "plain")
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a process"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    key = autotune.machine_key(CPU)
    assert key == json.loads(json.dumps(key)) == autotune.machine_key(CPU)
    expected = {
        "torch": torch.__version__,
        "CVT_KERNELS_CPU": "plain",
        "threads": torch.get_num_threads(),
        "name": machine.cpu_name(),
        "cuDNN": "not usable",
    }
    assert key.items() >= expected.items()


@pytest.mark.usefixtures("_forgotten")
def test_key_changes_with_a_source_file_and_with_the_extension(monkeypatch, tmp_path):
    package = Path(machine.__file__).parent
    sources = {path.relative_to(package).as_posix() for path in machine_key._source_files()}
    assert sources > {
        "autotune/accuracy.py",
        "autotune/tuner.py",
        "ops/linear/primitives.py",
        "ops/attention/triton/forward.py",
    }
    source, extension = tmp_path / "kernel.py", tmp_path / "_C.so"
    monkeypatch.setattr(machine_key, "_source_files", lambda: [source])
    monkeypatch.setattr(machine_key, "_extension_file", lambda: extension if extension.exists() else None)
    keys = []
    for path, content in ((source, "a = 1"), (source, "a = 2"), (extension, "ELF 1"), (extension, "ELF 2")):
        path.write_text(content)
        machine_key._installation.cache_clear()
        keys.append(autotune.machine_key(CPU))
    assert keys[0]["extension"] == "not built"
    for i, name in enumerate(("kernel sources", "extension", "extension")):
        assert {field for field in keys[i] if keys[i][field] != keys[i + 1][field]} == {name}


@pytest.mark.usefixtures("_forgotten")
def test_key_of_a_gpu(monkeypatch):
    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release\nGCC 12.3.0"
    read = Path.read_text

    def read_text(path, **options):
        return version if path == Path("/proc/driver/nvidia/version") else read(path, **options)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(machine, "cuda_driver_version", lambda: 12080)
    monkeypatch.setattr(Path, "read_text", read_text)
    one, two = torch.device("cuda", 0), torch.device("cuda")
    assert machine_key._device_facts(one) == {
        "device": "cuda",
        "name": "NVIDIA H200",
        "capability": "9.0",
        "multiprocessors": 132,
        "driver": "550.54.15, CUDA 12.8",
    }
    # Equal GPUs share a cache, whatever their index and the number of threads.
    assert autotune.cache_for(one) is autotune.cache_for(two) is not autotune.cache_for(CPU)
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))
    assert machine_key._nvidia_driver() == "unknown, CUDA 12.8"


def test_one_cache_per_key():
    cache, threads = autotune.cache_for(CPU), torch.get_num_threads()
    assert autotune.cache_for(torch.device("cpu", 0)) is cache
    try:
        torch.set_num_threads(threads + 1)
        other = autotune.cache_for(CPU)
    finally:
        torch.set_num_threads(threads)
    assert other.path != cache.path
    assert other.key == {**cache.key, "threads": threads + 1}
    assert autotune.cache_for(CPU) is cache


@pytest.mark.parametrize(("value", "expected"), [("", 2.0), ("0", 0.0), ("0.5", 0.5), ("inf", float("inf"))])
def test_tuning_seconds(monkeypatch, value, expected):
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", value)
    assert autotune.tuning_seconds() == expected


@pytest.mark.parametrize("value", ["two", "-1", "nan", "-inf", "2 s"])
def test_wrong_tuning_seconds(monkeypatch, value):
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", value)
    expected = f"CVT_KERNELS_AUTOTUNE_SECONDS: got {value!r}, expected a number of at least 0, or inf"
    with pytest.raises(ValueError, match=re.escape(expected)):
        autotune.tuning_seconds()
