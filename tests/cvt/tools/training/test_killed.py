"""Trainings that are killed at any file, or that meet in one directory."""

import itertools
from pathlib import Path

import pytest
import torch

from cvt import files
from cvt.tools.training.trainer import LAST, LOCK
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
    assert count in (5, 6)  # the second epoch may be no better
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
        assert names == {"best.pth", LAST, "log.csv", LOCK}


def test_what_the_last_epoch_should_have_logged_is_logged(unkilled, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kill(tmp_path, unkilled[1])  # log.csv
    assert [row["epoch"] for row in rows(tmp_path / "log.csv")] == ["1"]
    ours = trainer(tmp_path, resume=True, **SHORT)
    ours.fit()
    assert [row["epoch"] for row in rows(tmp_path / "log.csv")] == ["1", "2"]
    scalars = EventAccumulator(str(tmp_path)).Reload().Scalars
    assert [event.step for event in scalars("val_loss")] == [2, 4]


OTHER_RUN = """
import os, pathlib, signal
from cvt.tools.training.trainer import _locked

with _locked(pathlib.Path(os.environ["DIRECTORY"])):
    signal.alarm(60)  # if the test should die
    print("locked", flush=True)
    signal.pause()
"""


def test_two_runs_do_not_share_a_directory(tmp_path):
    """The lock of a process ends with it."""
    ours, other = trainer(tmp_path, **SHORT), Child(OTHER_RUN, DIRECTORY=str(tmp_path))
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(ValueError, match=f"output: another process trains in {tmp_path}; wait"):
        ours.fit()
    other.kill()
    other.communicate()
    assert len(ours.fit()) == 2
