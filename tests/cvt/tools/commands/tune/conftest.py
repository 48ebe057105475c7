"""The cache that tests of ``cvt tune`` write into, and quick starts of its processes."""

import dataclasses

import pytest

from cvt import PRESETS
from cvt.tools.commands.tune import worker as worker_module
from cvt_kernels import autotune
from tests.processes import CONTEXT


@pytest.fixture(scope="module", autouse=True)
def _few_blocks():
    """Leaves out seven blocks of CvT-13's last stage, which have the same cache keys as the other three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "cvt_13", dataclasses.replace(PRESETS["cvt_13"], depths=(1, 2, 3)))
        yield


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Returns an empty cache directory; autotuning on first use stays off."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    autotune.forget()
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def quick_start():
    """Lets workers start as copies of a process that has imported torch, in no time.

    The command itself spawns them, as some tests in test_command.py do: a copy of a process that has used a
    GPU would not work.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_module.multiprocessing, "get_context", lambda method: CONTEXT)
        yield
