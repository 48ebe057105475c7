"""Trainings that are killed at any file, or that meet in one directory."""

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from cvt.tools.training.locks import LOCK, locked

from cvt import files
from cvt.tools.training.trainer import LAST
from tests.cvt.tools.training.test_trainer import assert_same_bits, rows, trainer
from tests.processes import Child

SHORT = {"epochs": 2, "batch_size": 12}


class Killed(BaseException):
    """The end of a process that has no time to tidy up."""


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory):
    """Returns the directory of a run from which nothing was lost, and how many files it replaced."""
    output, moved, move = tmp_path_factory.mktemp("unkilled"), [], files._move
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_move", lambda *paths: moved.append(paths) or move(*paths))
        trainer(output, **SHORT).fit()
    return output, len(moved)


def kill(output, count):
    """Runs a training that dies when its nth file is to be replaced, with what it was writing left behind."""
    moves, move = itertools.count(1), files._move

    def dying(source, target):
        if next(moves) == count:
            raise Killed
        move(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_move", dying)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        with pytest.raises(Killed):
            trainer(output, **SHORT).fit()


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_file_comes_to_the_same_log_and_weights(unkilled, tmp_path):
    expected, count = unkilled
    assert count in (6, 7)  # the second epoch may be no better
    for moment in range(1, count + 1):
        output = tmp_path / str(moment)
        kill(output, moment)
        resume = (output / LAST).exists()
        assert resume == (moment > 2)
        trainer(output, resume=resume, **SHORT).fit()
        for row, other in zip(rows(output / "log.csv"), rows(expected / "log.csv"), strict=True):
            assert_same_bits(row, other)
        for name in ("best.pth", LAST):
            assert_same_bits(*(torch.load(path / name, weights_only=True) for path in (output, expected)))
        names = {path.name for path in output.iterdir() if not path.name.startswith("events.")}
        assert names == {"best.pth", LAST, "log.csv", "curves.png", LOCK}


def test_what_the_last_epoch_should_have_logged_is_logged(unkilled, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kill(tmp_path, unkilled[1] - 1)  # log.csv
    assert [row["epoch"] for row in rows(tmp_path / "log.csv")] == ["1"]
    (tmp_path / ".unfinished.abc").mkdir()
    (tmp_path / ".unfinished.abc" / "heads.png").touch()
    ours = trainer(tmp_path, resume=True, **SHORT)
    ours.fit()
    assert [row["epoch"] for row in rows(tmp_path / "log.csv")] == ["1", "2"]
    assert not list(tmp_path.glob(".unfinished.*"))
    scalars = EventAccumulator(str(tmp_path)).Reload().Scalars
    assert [event.step for event in scalars("val_loss")] == [2, 4]


OTHER_RUN = """
import os, pathlib, signal
from cvt.tools.training.locks import locked

with locked(pathlib.Path(os.environ["DIRECTORY"])):
    reader = os.fork()
    signal.alarm(60)  # if the test should die
    if reader:
        print(os.getpid(), reader, flush=True)
    else:
        os.close(1)
    signal.pause()
"""


def test_two_runs_do_not_share_a_directory(tmp_path):
    """The lock of a process ends with it; whoever reads images for it may live longer."""
    ours, other = trainer(tmp_path, **SHORT), Child(OTHER_RUN, DIRECTORY=str(tmp_path))
    process, reader = map(int, other.stdout.readline().split())
    try:
        with pytest.raises(ValueError, match=f"output: {tmp_path} is where process {process} of .* trains; "):
            ours.fit()
        other.kill()
        other.communicate()
        assert len(ours.fit()) == 2
    finally:
        os.kill(reader, signal.SIGKILL)
    assert (tmp_path / LOCK).read_text() == ""


def test_a_run_that_came_between_is_noticed(tmp_path):
    late = trainer(tmp_path, **SHORT)
    trainer(tmp_path, **SHORT).fit()
    with pytest.raises(ValueError, match=r"^output: another run has written .*last.pth since this one began"):
        late.fit()


def without_module(patch):
    """Windows has no such module."""
    patch.setitem(sys.modules, "fcntl", None)


def without_locks(patch):
    """Some file systems have none."""

    def lockf(*arguments):
        raise OSError(37, "No locks available")

    patch.setattr("fcntl.lockf", lockf)


@pytest.mark.parametrize(
    ("remove", "reason"), [(without_module, "this system has no POSIX locks"), (without_locks, "No locks")]
)
def test_a_system_without_locks_is_named(tmp_path, monkeypatch, remove, reason):
    remove(monkeypatch)
    message = rf"\.lock: cannot be locked against other runs: {reason}"
    with pytest.warns(UserWarning, match=message), locked(tmp_path):
        assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("precious.txt")])
def test_what_is_no_lock_stays_as_it_is(tmp_path, make):
    (tmp_path / "precious.txt").write_text("precious")
    make(tmp_path / LOCK)
    with pytest.raises(ValueError, match=r"output: .*/\.lock is (a link, expected a|no) regular file$"):
        locked(tmp_path).__enter__()
    assert (tmp_path / "precious.txt").read_text() == "precious"
