"""Tests of cvt_kernels/verdicts: files, merges, damage, locks, and what a machine's key depends on."""

import errno
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

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


@pytest.fixture
def holder(start):
    """Returns a child process that is proving."""
    child = start("with store.proving():\n    print('held', flush=True); time.sleep(60)")
    say_go(child)
    assert child.stdout.readline() == "held\n"
    return child


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


def test_round_trip_between_stores():
    store = Store(KEY)
    assert store.get("q") is None
    assert store.verdicts() == {}
    store.remember({"q": VERDICT})
    assert store.get("q") == VERDICT
    again = Store(KEY)
    assert again.get("q") == VERDICT
    assert again.verdicts() == {"q": VERDICT}
    assert isinstance(again.get("q").trials["triton"], Trial)


def test_file_is_as_described(tmp_path):
    store = Store(KEY)
    store.remember({"q": VERDICT, "p": OTHER})
    assert store.path.parent == tmp_path / "cache" / "cvt_kernels" / "verdicts"
    content = json.loads(store.path.read_text(encoding="utf-8"))
    assert content["schema"] == "cvt-kernels verdicts"
    assert content["version"] == 2
    assert content["machine"] == KEY
    assert content["verdicts"]["q"]["trials"]["native"] == GOOD._asdict()
    assert store.path.read_text(encoding="utf-8") == json.dumps(content, indent=1, sort_keys=True) + "\n"
    assert not [path for path in store.path.parent.iterdir() if path.name.startswith(".")]


def test_a_key_of_its_own_has_a_file_of_its_own():
    Store(KEY).remember({"q": VERDICT})
    other = Store({**KEY, "threads": 1})
    assert other.get("q") is None
    assert other.path != Store(KEY).path


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


@pytest.mark.parametrize("number", [sys.float_info.max, 5e-324, 0.1 + 0.2, 0.0])
def test_floats_stay_as_they_are(number):
    Store(KEY).remember({"q": Verdict("a", "a", {"a": GOOD._replace(seconds=number)})})
    assert Store(KEY).get("q").trials["a"].seconds == number


def test_stores_merge():
    first, second = Store(KEY), Store(KEY)
    assert first.get("q") is second.get("p") is None
    first.remember({"q": VERDICT})
    second.remember({"p": OTHER})
    assert second.verdicts() == Store(KEY).verdicts() == {"q": VERDICT, "p": OTHER}
    assert first.get("p") is None  # has not read again
    with first.proving():
        assert first.get("p") == OTHER


def test_an_existing_verdict_stays_unless_replaced():
    first, second = Store(KEY), Store(KEY)
    assert second.get("q") is None
    first.remember({"q": VERDICT})
    second.remember({"q": OTHER, "p": OTHER})
    assert second.get("q") == Store(KEY).get("q") == VERDICT
    second.remember({"q": OTHER}, replace=True)
    assert second.verdicts() == Store(KEY).verdicts() == {"q": OTHER, "p": OTHER}


def test_nothing_new_is_not_written(monkeypatch):
    store = Store(KEY)
    store.remember({"q": VERDICT})
    monkeypatch.setattr(files, "write", lambda *arguments: pytest.fail("written"))
    store.remember({"q": OTHER})
    store.remember({})
    assert store.get("q") == VERDICT


def test_unknown_fields_are_kept_out():
    content = content_with(mood="good")
    content["verdicts"]["q"]["mood"] = content["verdicts"]["q"]["trials"]["native"]["mood"] = "good"
    store = Store(KEY)
    write(store.path, content)
    assert store.get("q") == VERDICT._replace(trials={"native": GOOD})
    store.remember({"p": OTHER})
    assert "mood" not in store.path.read_text()


GOOD_TEXT = json.dumps(content_with())
DAMAGED = {
    "empty": ("", "it is not JSON: Expecting value"),
    "truncated": (GOOD_TEXT[: len(GOOD_TEXT) // 2], "line 1"),
    "followed": (GOOD_TEXT + "}", "Extra data"),
    "deep": ("[" * 100_000, "it is not JSON: .*(recursion|depth)"),
    "list": ([], "file: got .*, expected dict"),
    "null": ("null", "file: got None"),
    "schema": (content_with(schema="recipe"), "schema: got 'recipe', expected 'cvt-kernels verdicts'"),
    "no schema": (without(content_with(), "schema"), "schema: is missing"),
    "version": (content_with(version=1), "version: got 1, expected 2"),
    "version as text": (content_with(version="2"), "version: got '2', expected int"),
    "machine": (content_with(machine=None), "machine: got None, expected dict"),
    "verdicts": (content_with(verdicts=[]), "verdicts: got .*, expected dict"),
    "no verdicts": (without(content_with(), "verdicts"), "verdicts: is missing"),
    "verdict": (content_with(verdicts={"q": "native"}), "'q': got 'native', expected dict"),
    "chosen": (with_verdict(chosen=None), "'q', chosen: got None, expected str"),
    "no choice": (
        without(content_with(), "verdicts", "q", "chosen_in_graphs"),
        "chosen_in_graphs: is missing",
    ),
    "trials": (with_verdict(trials=[]), "'q', trials: got"),
    "trial": (with_verdict(trials={"native": 1}), "'q', native: got 1, expected dict"),
    "error": (with_trial(error="0"), "'q', native, error: got '0'"),
    "bool": (with_trial(seconds=True), "seconds: got True, expected a finite number or null"),
    "infinite": (with_trial(seconds=math.inf), "seconds: got inf, expected a finite number"),
    "NaN": (with_trial(error=math.nan), "error: got nan"),
    "huge": (with_trial(error=10**400), "error: got 1000"),
    "flaw": (with_trial(flaw=1), "flaw: got 1, expected str"),
    "disturbed": (with_trial(is_disturbed=1), "is_disturbed: got 1, expected bool"),
    "timings": (with_verdict(timings=None), "'q', timings: got None, expected int"),
    "no flaw": (without(with_trial(), "verdicts", "q", "trials", "native", "flaw"), "flaw: is missing"),
}


@pytest.mark.parametrize(("content", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_with_one_warning_and_replaced(content, reason):
    store = Store(KEY)
    write(store.path, content)
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        assert store.get("q") is None
    assert len(caught) == 1
    assert str(store.path) in str(caught[0].message)
    assert Store(KEY).get("q") is None  # no second warning, which would be an error
    store.remember({"p": OTHER})
    assert Store(KEY).verdicts() == {"p": OTHER}


def test_a_file_that_is_not_text_is_damaged():
    store = Store(KEY)
    store.path.parent.mkdir(parents=True)
    store.path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(RuntimeWarning, match="it is not text: .*utf-8"):
        assert store.get("q") is None


def test_a_folder_in_the_place_of_the_file_is_no_file():
    store = Store(KEY)
    store.path.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="Is a directory|Permission denied"):
        assert store.get("q") is None
    with pytest.warns(RuntimeWarning, match="cannot be remembered"):
        store.remember({"q": VERDICT})
    assert store.get("q") == VERDICT


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


def test_a_foreign_file_is_ignored_with_one_warning_that_names_the_differences():
    store = Store(KEY)
    write(store.path, content_with(machine={**KEY, "torch": "2.10", "extra": "x", "threads": 1}))
    with pytest.warns(RuntimeWarning, match="it was made for another machine or installation: ") as caught:
        assert store.get("q") is None
    assert len(caught) == 1
    assert str(caught[0].message).endswith(
        ": extra: x in the file, none here; threads: 1 in the file, 2 here; "
        "torch: 2.10 in the file, 2.11 here"
    )
    assert Store(KEY).get("q") is None


# Where nothing can be written -----------------------------------------------------------------------------


def file_as_cache(monkeypatch, tmp_path):
    write(tmp_path / "file", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def proc_as_cache(monkeypatch, tmp_path):
    if not Path("/proc/self").exists():
        pytest.skip("needs Linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")


def read_only(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr(files.tempfile, "NamedTemporaryFile", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)


def full_disk(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "replace", refuse)


@pytest.mark.parametrize("prevent", [file_as_cache, proc_as_cache, read_only, full_disk])
def test_verdicts_that_cannot_be_written_stay_in_the_process_with_one_warning(monkeypatch, tmp_path, prevent):
    prevent(monkeypatch, tmp_path)
    store = Store(KEY)
    assert store.get("q") is None
    with store.proving():  # at once, without a warning
        assert store.get("q") is None
    with pytest.warns(RuntimeWarning, match="cannot be remembered") as caught:
        store.remember({"q": VERDICT})
    assert len(caught) == 1
    message = str(caught[0].message)
    assert str(store.path) in message
    assert "XDG_CACHE_HOME" in message
    assert "CVT_KERNELS_VERDICTS" in message
    store.remember({"q": OTHER, "p": OTHER})
    assert store.verdicts() == {"q": VERDICT, "p": OTHER}
    store.remember({"q": OTHER}, replace=True)
    assert store.get("q") == OTHER
    Store({**KEY, "threads": 1}).remember({"q": VERDICT})  # no second warning
    with store.proving():
        assert store.get("q") == OTHER


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
    assert store.why_not_remembered() is None
    assert not list(store.path.parent.iterdir())
    file_as_cache(monkeypatch, tmp_path)
    assert str(tmp_path / "file") in Store(KEY).why_not_remembered()


def test_why_not_remembered_is_tried_once(monkeypatch, tmp_path):
    store = Store(KEY)
    with monkeypatch.context() as context:
        read_only(context, tmp_path)
        assert "Read-only" in store.why_not_remembered()
    assert "Read-only" in store.why_not_remembered()
    store.remember({"q": VERDICT})  # tries again
    monkeypatch.setattr(files, "why_not_writable", lambda folder: pytest.fail("tried again"))
    assert store.why_not_remembered() is None
    store.remember({"p": OTHER})
    with store.proving():
        pass
    with monkeypatch.context() as context:
        full_disk(context, tmp_path)
        with pytest.warns(RuntimeWarning, match="No space left"):
            store.remember({"r": OTHER})
    assert "No space left" in store.why_not_remembered()
    assert "No space left" in store.why_not_remembered(may_write=False)


def test_why_not_remembered_by_the_permissions_alone(monkeypatch, tmp_path):
    assert Store(KEY).why_not_remembered(may_write=False) is None
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert Store(KEY).why_not_remembered(may_write=False) == f"{tmp_path}: Permission denied"
    file_as_cache(monkeypatch, tmp_path)
    assert Store(KEY).why_not_remembered(may_write=False) == f"{tmp_path / 'file'}: Not a directory"


def test_the_folder_may_be_removed_meanwhile():
    store = Store(KEY)
    store.remember({"q": VERDICT})
    shutil.rmtree(store.path.parents[1])
    with store.proving():
        store.remember({"p": OTHER})
    assert Store(KEY).verdicts() == {"p": OTHER}


def test_what_could_not_be_written_is_written_when_it_can_be(monkeypatch, tmp_path):
    store = Store(KEY)
    with monkeypatch.context() as context:
        full_disk(context, tmp_path)
        with pytest.warns(RuntimeWarning, match="No space left"):
            store.remember({"q": VERDICT})
        assert not [path for path in store.path.parent.iterdir() if path.name.startswith(".")]
    store.remember({"p": OTHER})
    assert Store(KEY).verdicts() == {"q": VERDICT, "p": OTHER}


def test_cache_directory(monkeypatch, tmp_path):
    assert verdicts.cache_directory() == tmp_path / "cache" / "cvt_kernels"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert verdicts.cache_directory() == tmp_path / ".cache" / "cvt_kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert verdicts.cache_directory() == tmp_path / ".cache" / "cvt_kernels"


def test_without_a_home_nothing_is_written_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where no home is known
    store = Store(KEY)
    assert store.get("q") is None
    with pytest.warns(RuntimeWarning, match="cannot be remembered"):
        store.remember({"q": VERDICT})
    assert store.get("q") == VERDICT
    assert not list(tmp_path.iterdir())


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
    store = Store(KEY)
    assert store.get("q").chosen == "native"  # the earlier file wins
    assert store.get("p").chosen == "second"
    assert not store.path.exists()
    assert Store({"device": "cuda", "name": "H200"}).get("q").chosen == "native"  # no warning anywhere


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        ("{", "Expecting"),
        (content_with(machine={**KEY, "threads": 1}), "threads: 1 in the file, 2 here"),
    ],
    ids=["missing", "damaged", "foreign"],
)
def test_a_shipped_file_that_cannot_serve_gives_one_warning(monkeypatch, tmp_path, content, reason):
    bad, _ = shipped_files(monkeypatch, tmp_path, content or "", content_with())
    if content is None:
        bad.unlink()
    store = Store(KEY)
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        assert store.get("q").chosen == "native"
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith(f"CVT_KERNELS_VERDICTS: {bad}: this file of verdicts is ignored: ")
    assert message.count(str(bad)) == 1
    assert Store(KEY).get("q").chosen == "native"


def test_shipped_verdicts_serve_where_nothing_can_be_written(monkeypatch, tmp_path):
    shipped_files(monkeypatch, tmp_path, content_with())
    file_as_cache(monkeypatch, tmp_path)
    store = Store(KEY)
    with store.proving():
        assert store.get("q").chosen == "native"


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [(give, "it belongs to user 12345, but this process to user"), (open_to_all, "every user may write it")],
)
def test_a_file_that_others_may_write_is_ignored_with_one_warning_and_replaced(monkeypatch, change, reason):
    store = Store(KEY)
    write(store.path, content_with())
    with monkeypatch.context() as context:
        change(context, store.path, 12345)
        with pytest.warns(RuntimeWarning, match=f"this file of verdicts is ignored: {reason}") as caught:
            assert store.get("q") is None
        store.remember({"p": OTHER})
    assert len(caught) == 1
    assert Store(KEY).verdicts() == {"p": OTHER}


@pytest.mark.parametrize("change", [give, open_to_all])
@pytest.mark.parametrize("has_file", [False, True])
def test_in_a_folder_that_others_may_write_nothing_is_remembered(monkeypatch, change, has_file):
    store = Store(KEY)
    store.path.parent.mkdir(parents=True)
    if has_file:
        write(store.path, content_with())
    before = list(store.path.parent.iterdir())
    change(monkeypatch, store.path.parent, 12345)
    assert str(store.path.parent) in store.why_not_remembered(may_write=False)
    with pytest.warns(RuntimeWarning, match="verdicts cannot be remembered there, .*/verdicts: ") as caught:
        store.remember({"q": OTHER})
    assert len(caught) == 1
    with store.proving():
        assert Store(KEY).get("q") is None
    assert store.get("q") == OTHER
    assert list(store.path.parent.iterdir()) == before


def test_a_shipped_file_may_be_roots_but_no_other_users(monkeypatch, tmp_path):
    (path,) = shipped_files(monkeypatch, tmp_path, content_with())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with monkeypatch.context() as context:
        give(context, path, 0)
        assert Store(KEY).get("q").chosen == "native"
    give(monkeypatch, path, 12345)
    with pytest.warns(RuntimeWarning, match="this file of verdicts is ignored: it belongs to user 12345"):
        assert Store(KEY).get("q") is None


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


def test_who_does_not_wait_for_the_turn_to_prove_has_none(holder):
    begin = time.perf_counter()
    with Store(KEY).proving(waits=False) as has_turn:
        assert not has_turn
    assert time.perf_counter() - begin < 60
    assert holder.poll() is None


# Warnings -------------------------------------------------------------------------------------------------


def test_warnings_point_to_the_caller_of_the_package():
    write(Store(KEY).path, "{")
    with pytest.warns(RuntimeWarning) as caught:
        Store(KEY).get("q")
    verdicts.forget()
    with pytest.warns(RuntimeWarning) as by_contextlib, Store(KEY).proving():
        pass
    assert {each[0].filename for each in (caught, by_contextlib)} == {__file__}


@pytest.mark.parametrize(
    "name", ["cvt_kernels", "cvt_kernels.backends", "torch.nn.modules.module", "contextlib"]
)
def test_frames_between_the_package_and_its_caller_are_passed(name):
    frames = {"__name__": name, "stacklevel_of_caller": verdicts.stacklevel_of_caller}
    exec("def inner(): return stacklevel_of_caller()\ndef outer(): return inner()", frames)
    assert (frames["inner"](), frames["outer"]()) == (2, 3)


def test_the_caller_may_be_the_innermost_frame():
    frames = {"__name__": "cvt_kernels_of_others", "stacklevel_of_caller": verdicts.stacklevel_of_caller}
    exec("def inner(): return stacklevel_of_caller()", frames)
    assert frames["inner"]() == 1


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


def test_of_two_ranks_one_proves(start):
    code = """
with store.proving():
    if store.get("q") is None:
        time.sleep(0.5)
        store.remember({"q": other})
        print("proven")
    else:
        print("known")
"""
    ranks = [start(code) for _ in range(2)]
    for rank in ranks:
        say_go(rank)
    assert sorted(rank.stdout.read() for rank in ranks) == ["known\n", "proven\n"]


def test_a_killed_process_does_not_keep_the_lock(holder):
    done = threading.Event()

    def prove():
        with Store(KEY).proving():
            done.set()

    waiting = threading.Thread(target=prove, daemon=True)
    waiting.start()
    assert not done.wait(0.3)
    holder.kill()
    assert done.wait(60)
    waiting.join()


def test_proving_goes_on_without_the_lock_in_the_end(monkeypatch, holder):
    monkeypatch.setattr(verdicts, "_PROVING_SECONDS", 0.3)
    store, begin = Store(KEY), time.perf_counter()
    with store.proving():
        assert 0.3 <= time.perf_counter() - begin < 60
        store.remember({"q": VERDICT})  # another lock: does not wait
    assert holder.poll() is None
    assert Store(KEY).get("q") == VERDICT


def test_writing_goes_on_without_the_lock_in_the_end(monkeypatch, start):
    monkeypatch.setattr(verdicts, "_WRITING_SECONDS", 0.3)
    child = start(
        "from cvt_kernels.verdicts.locks import held\n"
        "with store.proving(), held(store.path.with_suffix('.writing'), 9):\n"
        "    print(1, flush=True); time.sleep(60)"
    )
    say_go(child)
    assert child.stdout.readline() == "1\n"
    Store(KEY).remember({"q": VERDICT})
    assert Store(KEY).get("q") == VERDICT


def test_proving_may_be_nested_and_is_given_back_after_an_error(start):
    store = Store(KEY)
    with pytest.raises(ZeroDivisionError), store.proving(), store.proving(), Store(KEY).proving():
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
import os, threading, time
from cvt_kernels import verdicts
store = verdicts.Store({KEY!r})
held, free = threading.Event(), threading.Event()
def hold():
    with verdicts._guard:
        held.set()
        free.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    store.remember({{"q": verdicts.Verdict("native", "native", {{}})}})
    os._exit(0)
end = time.monotonic() + 20
while os.waitpid(child, os.WNOHANG) == (0, 0):
    if time.monotonic() > end:
        os.kill(child, 9)
    time.sleep(0.01)
free.set()
print(store.get("q").chosen)
"""
    result = run_python(code)
    assert result.stdout == "native\n", result.stderr


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


def test_proving_enabled_refuses_other_values(monkeypatch):
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
def test_key_where_cudnn_cannot_be_used(monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert verdicts.machine_key(CPU)["cuDNN"] == "not usable"


@pytest.mark.usefixtures("_forgotten")
def test_key_of_the_cpu(monkeypatch):
    monkeypatch.setenv("CVT_KERNELS_CPU", "plain")
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail("a process"))
    key = verdicts.machine_key(CPU)
    assert key == json.loads(json.dumps(key))
    assert key["torch"] == torch.__version__
    assert key["CVT_KERNELS_CPU"] == "plain"
    assert key["threads"] == torch.get_num_threads()
    assert key["name"] == machine.cpu_name()
    assert (key["extension"] == "not built") == (machine_key._extension_file() is None)
    assert verdicts.machine_key(CPU) == key


@pytest.mark.usefixtures("_forgotten")
def test_key_changes_with_a_source_file_and_with_the_extension(monkeypatch, tmp_path):
    source, extension = tmp_path / "kernel.py", tmp_path / "_C.so"
    source.write_text("a = 1")
    monkeypatch.setattr(machine_key, "_source_files", lambda: [source])
    monkeypatch.setattr(machine_key, "_extension_file", lambda: extension if extension.exists() else None)

    def key():
        machine_key._installation.cache_clear()
        return verdicts.machine_key(CPU)

    first = key()
    assert first == key()
    assert first["extension"] == "not built"
    source.write_text("a = 2")
    second = key()
    assert {name for name in first if first[name] != second[name]} == {"kernel sources"}
    extension.write_bytes(b"\x7fELF 1")
    third = key()
    extension.write_bytes(b"\x7fELF 2")
    fourth = key()
    for before, after in ((second, third), (third, fourth)):
        assert {name for name in before if before[name] != after[name]} == {"extension"}


def test_sources_of_the_key():
    package = Path(machine.__file__).parent
    names = {path.relative_to(package).as_posix() for path in machine_key._source_files()}
    assert {
        "accuracy.py",
        "proofs.py",
        "reference.py",
        "ops/linear/primitives.py",
        "ops/attention/triton/forward.py",
    } <= names
    assert not any("verdicts" in name for name in names)


@pytest.mark.usefixtures("_forgotten")
def test_key_of_a_gpu(monkeypatch):
    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(machine, "cuda_driver_version", lambda: 12080)
    one, two = torch.device("cuda", 0), torch.device("cuda")
    key = verdicts.machine_key(one)
    assert key == json.loads(json.dumps(key))
    assert (key["device"], key["name"], key["capability"]) == ("cuda", "NVIDIA H200", "9.0")
    assert key["driver"].endswith(", CUDA 12.8")
    assert key["multiprocessors"] == 132
    assert "threads" not in key
    # Equal GPUs share a store, whatever their index and the number of threads.
    assert verdicts.store_for(one) is verdicts.store_for(two) is not verdicts.store_for(CPU)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (builder@host)",
    ],
)
def test_version_of_the_driver(monkeypatch, line):
    monkeypatch.setattr(
        Path, "read_text", lambda path, encoding: f"{line}\nGCC version:  gcc version 12.3.0\n"
    )
    monkeypatch.setattr(machine, "cuda_driver_version", lambda: 13000)
    assert machine_key._nvidia_driver() == "550.54.15, CUDA 13.0"


@pytest.mark.gpu
def test_key_of_the_gpu_here():
    key = verdicts.machine_key(torch.device("cuda", 0))
    assert key["name"] == torch.cuda.get_device_name(0)
    assert "CUDA 0" not in key["driver"]


def test_one_store_per_key():
    store, threads = verdicts.store_for(CPU), torch.get_num_threads()
    assert verdicts.store_for(CPU) is verdicts.store_for(torch.device("cpu", 0)) is store
    try:
        torch.set_num_threads(threads + 1)
        other = verdicts.store_for(CPU)
    finally:
        torch.set_num_threads(threads)
    assert other is not store
    assert other.path != store.path
    assert other.key == {**store.key, "threads": threads + 1}
    assert verdicts.store_for(CPU) is store


def test_a_hit_needs_no_file(monkeypatch):
    store = Store(KEY)
    store.remember({"q": VERDICT})
    assert store.get("q") == VERDICT
    monkeypatch.setattr(files, "read", lambda *arguments, **options: pytest.fail("read"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get("q") == VERDICT
        assert store.get("p") is None
