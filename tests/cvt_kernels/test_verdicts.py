"""Tests of cvt_kernels/verdicts: files, merges, damage, locks, and what a machine's key depends on."""

import errno
import json
import math
import os
import re
import shutil
import stat
import subprocess
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from cvt_kernels import machine, verdicts
from cvt_kernels.verdicts import Store, Trial, Verdict, files
from cvt_kernels.verdicts import key as machine_key
from tests.processes import Child, run_python

KEY = {"device": "cpu", "torch": "2.11", "threads": 2}
CPU = torch.device("cpu")

GOOD = Trial(error=1.25e-7, allowed=3e-7, seconds=0.1 + 0.2, host_seconds=None, flaw=None)
BAD = Trial(error=0.5, allowed=3e-7, seconds=None, host_seconds=1e-5, flaw="wrong: é")
VERDICT = Verdict("native", "reference", {"native": GOOD, "triton": BAD})
OTHER = Verdict("reference", "reference", {"reference": GOOD})

#: The start of a child process's code.
CHILD = f"""
import sys, time
from cvt_kernels.verdicts import Store, Trial, Verdict
store = Store({KEY!r})
other = Verdict("reference", "reference", {{"reference": Trial(0.0, 0.0, 1e-6, None, None)}})
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    """Gives each test a cache of its own, and the state of a process that has read nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CVT_KERNELS_VERDICTS", raising=False)
    monkeypatch.delenv("CVT_KERNELS_PROVE", raising=False)
    verdicts.forget()


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
    """Returns what is in a file of one verdict, with other fields."""
    content = {
        "schema": "cvt-kernels verdicts",
        "version": 2,
        "machine": KEY,
        "verdicts": {"q": {**VERDICT._asdict(), "trials": {"native": GOOD._asdict()}}},
    }
    return {**content, **changes}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def with_verdict(**changes):
    verdict = content_with()["verdicts"]["q"]
    return content_with(verdicts={"q": {**verdict, **changes}})


def with_trial(**changes):
    return with_verdict(trials={"native": {**GOOD._asdict(), **changes}})


def without(content, *names):
    """Removes the last of the nested names."""
    content = json.loads(json.dumps(content))
    inner = content
    for name in names[:-1]:
        inner = inner[name]
    del inner[names[-1]]
    return content


# The file -------------------------------------------------------------------------------------------------


def test_what_is_remembered_is_a_file_of_the_key(tmp_path):
    store, other = Store(KEY), Store({**KEY, "threads": 1})
    assert store.get("q") is None
    store.remember({"q": VERDICT, "p": OTHER})
    assert store.get("q") == VERDICT
    assert Store(KEY).verdicts() == {"q": VERDICT, "p": OTHER}
    assert other.get("q") is None
    [path] = (tmp_path / "cache" / "cvt_kernels" / "verdicts").glob("*.json")
    assert path == store.path != other.path
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["verdicts"].pop("p")["chosen"] == "reference"
    content["verdicts"]["q"]["trials"].pop("triton")
    assert content == content_with()
    assert not list(path.parent.glob(".*"))


def test_numbers_that_json_lacks():
    bare = Trial(math.nan, math.inf, math.inf, None, None)
    known = Trial(math.nan, 1.0, None, None, "wrong: NaN in the output")
    store = Store(KEY)
    store.remember({"q": Verdict("reference", "reference", {"native": bare, "triton": known})})
    trials = {
        "native": Trial(None, None, None, None, "wrong: its error is nan"),
        "triton": Trial(None, 1.0, None, None, "wrong: NaN in the output"),
    }
    assert store.get("q").trials == trials
    assert Store(KEY).get("q").trials == trials
    assert "NaN" not in store.path.read_text().replace("wrong: NaN", "")


def test_stores_merge_and_known_verdicts_stay_unless_replaced(monkeypatch):
    first, second = Store(KEY), Store(KEY)
    assert first.get("q") is second.get("p") is None
    first.remember({"q": VERDICT})
    second.remember({"q": OTHER, "p": OTHER})
    assert second.verdicts() == Store(KEY).verdicts() == {"q": VERDICT, "p": OTHER}
    assert first.get("p") is None  # has not read again
    with first.proving():
        assert first.get("p") == OTHER
    with monkeypatch.context() as context:
        context.setattr(files, "write", lambda *arguments: pytest.fail("there is nothing new"))
        first.remember({"q": OTHER})
        first.remember({})
    second.remember({"q": OTHER}, replace=True)
    assert second.get("q") == Store(KEY).get("q") == OTHER


def test_unknown_fields_are_kept_out():
    content = content_with(mood="good")
    content["verdicts"]["q"]["mood"] = content["verdicts"]["q"]["trials"]["native"]["mood"] = "good"
    store = Store(KEY)
    write(store.path, content)
    assert store.get("q") == VERDICT._replace(trials={"native": GOOD})
    store.remember({"p": OTHER})
    assert "mood" not in store.path.read_text()


def test_a_hit_needs_no_file(monkeypatch):
    store = Store(KEY)
    store.remember({"q": VERDICT})
    monkeypatch.setattr(files, "read", lambda *arguments, **options: pytest.fail("read"))
    assert (store.get("q"), store.get("p")) == (VERDICT, None)


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
    "verdicts": (content_with(verdicts=[]), "verdicts: got"),
    "verdict": (content_with(verdicts={"q": "native"}), "'q': got 'native'"),
    "chosen": (with_verdict(chosen=None), "'q', chosen: got None"),
    "trials": (with_verdict(trials=[]), "'q', trials: got"),
    "trial": (with_verdict(trials={"native": 1}), "'q', native: got 1"),
    "error": (with_trial(error="0"), "'q', native, error: got '0'"),
    "bool": (with_trial(seconds=True), "seconds: got True"),
    "NaN": (with_trial(error=math.nan), "error: got nan"),
    "huge": (with_trial(error=10**400), "error: got 1000"),
    "flaw": (with_trial(flaw=1), "flaw: got 1"),
    "disturbed": (with_trial(is_disturbed=1), "is_disturbed: got 1"),
    "timings": (with_verdict(timings=None), "'q', timings: got None"),
    "foreign": (
        content_with(machine={**KEY, "torch": "2.10", "extra": "x"}),
        "for another machine or installation: extra: x in the file, none here; torch: 2.10 in the file, ",
    ),
}


@pytest.mark.parametrize(("content", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning_and_replaced(content, reason):
    store = Store(KEY)
    write(store.path, content)
    with pytest.warns(RuntimeWarning, match=re.escape(reason)) as caught:
        assert store.get("q") is None
    assert len(caught) == 1
    assert str(store.path) in str(caught[0].message)
    assert Store(KEY).get("q") is None  # no second warning, which would be an error
    store.remember({"p": OTHER})
    assert Store(KEY).verdicts() == {"p": OTHER}


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
def test_what_is_no_file_of_verdicts_is_ignored_at_once(monkeypatch, tmp_path, kind, is_shipped):
    make, reason = NO_FILES[kind]
    path = tmp_path / "shipped" if is_shipped else Store(KEY).path
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    monkeypatch.setenv("CVT_KERNELS_VERDICTS", str(path) if is_shipped else "")
    store = Store(KEY)
    with pytest.warns(RuntimeWarning, match=f"this file of verdicts is ignored: {reason}") as caught:
        assert in_time(lambda: store.get("q")) is None
    assert len(caught) == 1
    if kind != "folder" or is_shipped:
        in_time(lambda: store.remember({"p": OTHER}) or True)
        assert store.cached_verdicts() == {"p": OTHER}


@pytest.mark.parametrize("kind", ["fifo", "device", "socket", "folder"])
def test_what_stands_in_the_place_of_a_lock_keeps_nobody_waiting(kind):
    store = Store(KEY)
    store.path.parent.mkdir(parents=True)
    for suffix in (".proving", ".writing"):
        NO_FILES[kind][0](store.path.with_suffix(suffix))

    def prove():
        with store.proving():
            store.remember({"q": VERDICT})
        return True

    assert in_time(prove)
    assert Store(KEY).get("q") == VERDICT


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
def test_verdicts_that_cannot_be_written_stay_in_the_process_with_one_warning(monkeypatch, tmp_path, prevent):
    prevent(monkeypatch, tmp_path)
    before = list(tmp_path.iterdir())
    store = Store(KEY)
    with store.proving():  # at once, without a warning
        assert store.get("q") is None
    with pytest.warns(RuntimeWarning, match="cannot be remembered") as caught:
        store.remember({"q": VERDICT})
    assert len(caught) == 1
    for words in (str(store.path), "XDG_CACHE_HOME", "CVT_KERNELS_VERDICTS"):
        assert words in str(caught[0].message)
    store.remember({"q": OTHER, "p": OTHER})
    assert store.verdicts() == {"q": VERDICT, "p": OTHER}
    store.remember({"q": OTHER}, replace=True)
    Store({**KEY, "threads": 1}).remember({"q": VERDICT})  # no second warning
    with store.proving():
        assert store.get("q") == OTHER
    assert prevent is not no_home or list(tmp_path.iterdir()) == before


def test_a_verdict_with_a_fault_of_the_environment_holds_for_this_process_only():
    passing = VERDICT._replace(trials={"triton": GOOD._replace(flaw="fails here: OSError: no")})
    store = Store(KEY)
    store.remember({"q": OTHER})
    store.remember({"q": passing, "p": passing, "r": OTHER})
    assert store.verdicts() == {"q": OTHER, "p": passing, "r": OTHER}
    assert store.cached_verdicts() == Store(KEY).verdicts() == {"q": OTHER, "r": OTHER}
    store.remember({"q": passing}, replace=True)
    assert store.get("q") == passing
    assert Store(KEY).get("q") == OTHER
    store.remember({"q": VERDICT, "p": VERDICT}, replace=True)
    assert store.verdicts() == Store(KEY).verdicts() == {"q": VERDICT, "p": VERDICT, "r": OTHER}


def test_why_not_remembered(monkeypatch, tmp_path):
    store = Store(KEY)
    assert store.why_not_remembered(may_write=False) is None
    assert not list(tmp_path.iterdir())  # by the permissions alone
    with monkeypatch.context() as context:
        context.setattr(os, "access", lambda path, mode: path != tmp_path)
        assert store.why_not_remembered(may_write=False) == f"{tmp_path}: Permission denied"
    assert store.why_not_remembered() is None
    assert not list(store.path.parent.iterdir())
    file_as_cache(monkeypatch, tmp_path)
    for may_write in (False, True):
        assert str(tmp_path / "file") in Store(KEY).why_not_remembered(may_write=may_write)


def test_what_could_not_be_written_is_tried_once_and_written_when_it_can_be(monkeypatch, tmp_path):
    store = Store(KEY)
    with monkeypatch.context() as context:
        read_only(context, tmp_path)
        assert "Read-only" in store.why_not_remembered()
    assert "Read-only" in store.why_not_remembered()
    with monkeypatch.context() as context:
        full_disk(context, tmp_path)
        with pytest.warns(RuntimeWarning, match="No space left"):
            store.remember({"q": VERDICT})
        assert not list(store.path.parent.glob(".*"))
    assert "No space left" in store.why_not_remembered(may_write=False)
    store.remember({"p": OTHER})
    assert store.why_not_remembered() is None
    assert Store(KEY).verdicts() == {"q": VERDICT, "p": OTHER}
    shutil.rmtree(store.path.parents[1])  # it may be removed meanwhile
    with store.proving():
        store.remember({"p": OTHER})
    assert Store(KEY).verdicts() == {"p": OTHER}


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path", None):
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert verdicts.cache_directory() == tmp_path / ".cache" / "cvt_kernels"


# Files that come with an image ----------------------------------------------------------------------------


def shipped_files(monkeypatch, tmp_path, *contents):
    paths = [tmp_path / f"shipped{index}.json" for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        write(path, content)
    monkeypatch.setenv("CVT_KERNELS_VERDICTS", os.pathsep.join(map(str, paths)))
    return paths


def test_shipped_verdicts_win_and_their_file_is_never_written(monkeypatch, tmp_path):
    Store(KEY).remember({"q": OTHER, "p": OTHER})
    (path,) = shipped_files(monkeypatch, tmp_path, content_with())
    before = path.read_bytes(), path.stat().st_mtime_ns
    store = Store(KEY)
    shipped = VERDICT._replace(trials={"native": GOOD})
    assert store.verdicts() == {"q": shipped, "p": OTHER}
    store.remember({"q": OTHER, "r": OTHER}, replace=True)
    assert store.verdicts() == {"q": shipped, "p": OTHER, "r": OTHER}
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert "r" in json.loads(store.path.read_text())["verdicts"]
    assert store.cached_verdicts() == Store(KEY).cached_verdicts() == {"q": OTHER, "p": OTHER, "r": OTHER}


def test_several_shipped_files(monkeypatch, tmp_path):
    gpu = content_with(machine={"device": "cuda", "name": "H200"})
    second = with_verdict(chosen="second")
    second["verdicts"]["p"] = second["verdicts"]["q"]
    shipped_files(monkeypatch, tmp_path, gpu, content_with(), second)
    file_as_cache(monkeypatch, tmp_path)  # they serve where nothing can be written
    store = Store(KEY)
    with store.proving():
        assert store.get("q").chosen == "native"  # the earlier file wins
    assert store.get("p").chosen == "second"
    assert Store({"device": "cuda", "name": "H200"}).get("q").chosen == "native"  # no warning anywhere


@pytest.mark.parametrize("content", [None, "{", content_with(machine={**KEY, "threads": 1})])
def test_a_shipped_file_that_cannot_serve_gives_one_warning(monkeypatch, tmp_path, content):
    bad, _ = shipped_files(monkeypatch, tmp_path, content or "", content_with())
    if content is None:
        bad.unlink()
    with pytest.warns(RuntimeWarning) as caught:
        assert Store(KEY).get("q").chosen == "native"
    [message] = [str(warning.message) for warning in caught]
    assert message.startswith(f"CVT_KERNELS_VERDICTS: {bad}: this file of verdicts is ignored: ")
    assert Store(KEY).get("q").chosen == "native"


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
    store = Store(KEY)
    write(store.path, content_with())
    before = store.path.read_text()
    with monkeypatch.context() as context:
        change(context, store.path if what == "file" else store.path.parent, 12345)
        reason = "it belongs to user 12345|every user may write it"
        with pytest.warns(RuntimeWarning, match=reason) as caught:
            assert store.get("q") is None
        store.remember({"p": OTHER})  # no second warning
        assert len(caught) == 1
        assert (store.why_not_remembered(may_write=False) is None) == (what == "file")
        assert store.get("p") == OTHER
        assert (store.path.read_text() == before) == (what == "folder")


def test_a_shipped_file_may_be_roots(monkeypatch, tmp_path):
    (path,) = shipped_files(monkeypatch, tmp_path, content_with())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    give(monkeypatch, path, 0)
    assert Store(KEY).get("q").chosen == "native"


def test_what_is_written_is_trusted_whatever_the_umask():
    umask = os.umask(0)
    try:
        Store(KEY).remember({"q": VERDICT})
    finally:
        os.umask(umask)
    assert Store(KEY).get("q") == VERDICT


# What killed processes leave ------------------------------------------------------------------------------


def test_what_killed_processes_have_left_is_removed_by_the_next_one_that_writes(start):
    store, dead = Store(KEY), 2**30
    folder, name = store.path.parent, store.path.stem
    folder.mkdir(parents=True)
    left = [f".{name}.json.{dead}.0123abcd", f".other.json.{dead}.0123abcd", f".tried.{dead}.abc_d"]
    left += [".tried.abc", "other.proving", "other.writing"]
    kept = [f".{name}.json.{os.getpid()}.0123abcd", f".tried.{os.getpid()}.abc", "held.proving", "notes.txt"]
    kept += ["another.json", "another.proving", f"{name}.proving"]
    for each in (*left, *kept):
        (folder / each).touch()
        os.utime(folder / each, (time.time() - 7200,) * 2)
    new = [f".{name}.json.{dead}.ffff", "new.proving"]
    for each in new:
        (folder / each).touch()
    child = start(
        "from cvt_kernels.verdicts.locks import held\n"
        "with held(store.path.with_name('held.proving'), 9):\n"
        "    print(1, flush=True); time.sleep(60)"
    )
    say_go(child)
    assert child.stdout.readline() == "1\n"
    os.utime(folder / "held.proving", (time.time() - 7200,) * 2)
    store.remember({"q": VERDICT})
    assert {path.name for path in folder.iterdir()} == {*kept, *new, f"{name}.json", f"{name}.writing"}


# Timings on a busy machine --------------------------------------------------------------------------------

UNSURE = VERDICT._replace(trials={"native": GOOD._replace(is_disturbed=True), "triton": BAD})


def test_an_unsure_verdict_is_timed_again_by_later_processes_a_few_times():
    store = Store(KEY)
    store.remember({"q": UNSURE, "r": UNSURE, "p": VERDICT})
    assert not store.times_again("q")  # proven by this process
    assert store.advice().startswith("2 choices were timed while other programs kept this machine busy: run ")
    for timings in (2, 3):
        later = Store(KEY)
        assert [later.times_again(question) for question in "qqp"] == [True, False, False]
        later.remember({"q": UNSURE._replace(timings=timings)}, replace=True)
        assert not later.times_again("r")  # the machine is busy still
    assert not Store(KEY).times_again("q")
    assert Store(KEY).times_again("r")
    later.remember({"q": VERDICT}, replace=True)
    assert Store(KEY).advice().startswith("1 choice was timed ")
    later.remember({"r": VERDICT}, replace=True)
    assert Store(KEY).advice() is None


def test_an_unsure_verdict_that_is_shipped_stays(monkeypatch, tmp_path):
    shipped_files(monkeypatch, tmp_path, with_trial(is_disturbed=True))
    store = Store(KEY)
    assert store.get("q").is_unsure
    assert not store.times_again("q")
    assert store.advice() is None


# Warnings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("cvt_kernels", 3), ("cvt_kernels.backends", 3), ("torch.nn.modules.module", 3), ("contextlib", 3),
        ("cvt_kernels_of_others", 1),
    ],
)  # fmt: skip
def test_frames_between_the_package_and_its_caller_are_passed(name, level):
    frames = {"__name__": name, "stacklevel_of_caller": verdicts.stacklevel_of_caller}
    exec("def inner(): return stacklevel_of_caller()\ndef outer(): return inner()", frames)
    assert frames["outer"]() == level


# Processes and threads ------------------------------------------------------------------------------------


def test_two_processes_lose_nothing_in_50_rounds_each(start):
    code = "for i in range(50): store.remember({{f'{0} {{i}}': other}})"
    children = [start(code.format(name)) for name in "ab"]
    path = Store(KEY).path
    for child in children:
        say_go(child)
    reads = 0
    while any(child.poll() is None for child in children):
        Store(KEY).get("q")  # a damaged file would be a warning, hence an error
        reads += path.exists()
        time.sleep(0.001)
    assert [child.returncode for child in children] == [0, 0]
    assert reads > 10
    assert set(Store(KEY).verdicts()) == {f"{name} {i}" for name in "ab" for i in range(50)}
    assert not [file for file in path.parent.iterdir() if file.name.startswith(f".{path.name}")]


def test_proving_and_writing_go_on_without_locks_in_the_end(monkeypatch, start):
    child = start(
        "from cvt_kernels.verdicts.locks import held\n"
        "with store.proving(), held(store.path.with_suffix('.writing'), 9):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    say_go(child)
    assert child.stdout.readline() == "held\n"
    monkeypatch.setattr(verdicts, "_PROVING_SECONDS", 0.3)
    monkeypatch.setattr(verdicts, "_WRITING_SECONDS", 0.3)
    store, begin = Store(KEY), time.perf_counter()
    with store.proving() as has_turn:
        assert not has_turn
        assert 0.3 <= time.perf_counter() - begin < 60
        store.remember({"q": VERDICT})
    assert Store(KEY).get("q") == VERDICT
    assert child.poll() is None
    child.kill()  # gives the locks back
    monkeypatch.setattr(verdicts, "_PROVING_SECONDS", 60)
    with store.proving() as has_turn:
        assert has_turn


def test_proving_may_be_nested_and_is_given_back_after_an_error(start):
    store = Store(KEY)
    with pytest.raises(ZeroDivisionError), store.proving(), Store(KEY).proving():
        raise ZeroDivisionError
    child = start("with store.proving(): print('held')")
    with store.proving():
        with store.proving():
            pass
        say_go(child)
        time.sleep(0.3)
        assert child.poll() is None  # the outer block still holds it
    assert child.stdout.read() == "held\n"


def test_one_thread_at_a_time_proves():
    store, inside, most = Store(KEY), [], []

    def prove(index):
        with store.proving():
            inside.append(index)
            most.append(len(inside))
            time.sleep(0.02)
            inside.remove(index)
            store.remember({f"{index}": OTHER})

    threads = [threading.Thread(target=prove, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8
    assert set(Store(KEY).verdicts()) == {str(index) for index in range(8)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_while_a_thread_holds_the_guard_goes_on():
    code = f"""
import os, threading
from cvt_kernels import verdicts
store = verdicts.Store({KEY!r})
held, free = threading.Event(), threading.Event()
def hold():
    with verdicts._guard:
        held.set()
        free.wait()
threading.Thread(target=hold).start()
held.wait()
if os.fork() == 0:
    store.remember({{"q": verdicts.Verdict("native", "native", {{}})}})
    print(store.get("q").chosen, flush=True)
    os._exit(0)
os.wait()
free.set()
"""
    child = Child(code)
    try:
        assert in_time(child.communicate)[0] == "native\n"
    finally:
        child.kill()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_takes_the_locks_that_its_parent_knows():
    """It does so in each of its threads, and does not take the lock that its parent holds for its own."""
    code = f"""
import os, threading
from cvt_kernels import verdicts
from cvt_kernels.verdicts.locks import held
store = verdicts.Store({KEY!r})
verdict = verdicts.Verdict("native", "native", {{}})
store.remember({{"parent": verdict}})
proving = store.path.with_suffix(".proving")
with held(proving, 0):
    child = os.fork()
    if child == 0:
        def prove(name):
            with held(proving, 0) as has:
                assert not has
            store.remember({{name: verdict}})
        thread = threading.Thread(target=prove, args=("thread",))
        thread.start()
        thread.join()
        prove("child")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    other = os.fork()
    if other == 0:
        with held(proving, 30) as has:
            os._exit(0 if has else 1)
assert os.waitpid(other, 0)[1] == 0
with held(proving, 0) as has:
    print(has, *sorted(verdicts.Store({KEY!r}).verdicts()))
"""
    result = run_python(code)
    assert result.stdout == "True child parent thread\n", result.stderr


# Settings and keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_proving_enabled(monkeypatch, value, expected):
    if value is not None:
        monkeypatch.setenv("CVT_KERNELS_PROVE", value)
    assert verdicts.proving_enabled() is expected
    monkeypatch.setenv("CVT_KERNELS_PROVE", "yes")
    with pytest.raises(ValueError, match="CVT_KERNELS_PROVE: got 'yes', expected 0 or 1"):
        verdicts.proving_enabled()


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
    key = verdicts.machine_key(CPU)
    assert key == json.loads(json.dumps(key)) == verdicts.machine_key(CPU)
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
        "accuracy.py",
        "proofs.py",
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
        keys.append(verdicts.machine_key(CPU))
    assert keys[0]["extension"] == "not built"
    for i, name in enumerate(("kernel sources", "extension", "extension")):
        assert {field for field in keys[i] if keys[i][field] != keys[i + 1][field]} == {name}


@pytest.mark.usefixtures("_forgotten")
def test_key_of_a_gpu(monkeypatch):
    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release\nGCC 12.3.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(machine, "cuda_driver_version", lambda: 12080)
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: version)
    one, two = torch.device("cuda", 0), torch.device("cuda")
    assert machine_key._device_facts(one) == {
        "device": "cuda",
        "name": "NVIDIA H200",
        "capability": "9.0",
        "multiprocessors": 132,
        "driver": "550.54.15, CUDA 12.8",
    }
    # Equal GPUs share a store, whatever their index and the number of threads.
    assert verdicts.store_for(one) is verdicts.store_for(two) is not verdicts.store_for(CPU)
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))
    assert machine_key._nvidia_driver() == "unknown, CUDA 12.8"


def test_one_store_per_key():
    store, threads = verdicts.store_for(CPU), torch.get_num_threads()
    assert verdicts.store_for(torch.device("cpu", 0)) is store
    try:
        torch.set_num_threads(threads + 1)
        other = verdicts.store_for(CPU)
    finally:
        torch.set_num_threads(threads)
    assert other.path != store.path
    assert other.key == {**store.key, "threads": threads + 1}
    assert verdicts.store_for(CPU) is store
