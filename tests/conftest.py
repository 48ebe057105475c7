"""Settings and fixtures of every test."""

import gc
import importlib.util
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton and cvt_kernels are imported
# Tests, and processes that they start, do not read the user's choices; the fonts that matplotlib has found
# may lie where they are.
os.environ.pop("CVT_KERNELS_TUNED", None)
os.environ["CVT_KERNELS_CHECK_CACHED"] = "1"
# They run where kernels are missing too; what is said then has tests of its own.
os.environ.setdefault("PYTHONWARNINGS", "ignore:kernels are missing:RuntimeWarning")
os.environ.setdefault("MPLCONFIGDIR", os.path.expanduser("~/.cache/matplotlib"))

from cvt_kernels import backends, machine
from cvt_kernels.tuning import choices
from tests import tiers

machine._said_missing = True
if machine.INTERPRETING and importlib.util.find_spec("triton") is not None:
    from tests import interpreter

    interpreter.patch()
# A shell lets what it starts in the background ignore the interrupt, and so would processes of tests.
signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(__file__).parent / "data"


#: Without a GPU, ``torch.manual_seed`` formats the stack of its caller for each kind of GPU, and keeps that
#: for the day on which one is found. Every test calls this, and every example of hypothesis.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


class TorchRandom:
    """PyTorch's random numbers, as hypothesis wants them: an example has the same ones whenever it is run."""

    seed = staticmethod(_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_torch_random = TorchRandom()  # hypothesis keeps a weak reference only
if importlib.util.find_spec("hypothesis") is not None:  # a machine with a GPU may lack it
    import hypothesis

    hypothesis.register_random(_torch_random)
    # The same examples in every run; `pytest --hypothesis-profile default` looks for others.
    hypothesis.settings.register_profile("repeatable", derandomize=True)
    hypothesis.settings.load_profile("repeatable")


_test_numbers = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that chooses between ``make test`` and the rest of ``make test-all``."""
    parser.addoption("--tier", choices=tiers.TIERS, default="all", help="which cases: see tests/tiers.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the cases of the other tier."""
    kept, others = tiers.split(items, config.getoption("--tier"))
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept


def pytest_configure() -> None:
    """Searches for no garbage until all is imported and collected, which every search would go through again.

    It is no part of the import: the fuzzer imports this file too, and runs for hours.
    """
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Takes what was imported and collected out of the searches for garbage, a tenth of the time."""
    gc.freeze()
    gc.enable()
    # Tests make ten thousand objects in no time; a search through all that lives takes half a second.
    gc.set_threshold(10_000, 10, 10)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """Takes what a file of tests has imported and compiled out of later searches for garbage."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says what was skipped and why in few lines; ``pytest -rs`` names each test."""
    skipped = terminalreporter.stats.get("skipped", [])
    for line in tiers.reasons([report.longrepr[2].removeprefix("Skipped: ") for report in skipped]):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Gives every test the same random numbers and no tuned choices, and undoes its requests for backends."""
    _seed(0)
    backends.reset()
    choices.forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache{next(_test_numbers)}"))
    registry = {name: dict(by_backend) for name, by_backend in backends.implementations.items()}
    monkeypatch.setattr(backends, "implementations", registry)
    yield
    backends.forget()


@pytest.fixture
def _without_tf32():
    """Keeps PyTorch from rounding float32 on a GPU.

    No monkeypatch: it takes what these modules serve by ``__getattr__`` for absent, and would delete it.
    """
    places = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = False
    yield
    for place, allowed in zip(places, before, strict=True):
        place.allow_tf32 = allowed


@pytest.fixture
def _reload(monkeypatch):
    """Makes the test run as in a process that has not loaded the extension."""
    caches = (machine.load_extension, backends._ask_why_unavailable, machine.facts)
    for cache in caches:
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hub without models, which ``huggingface_hub`` takes for the Hub, with an empty cache of its own."""
    from huggingface_hub import constants

    from tests.hub_server import serving

    with serving(tmp_path / "served") as hub:
        home = tmp_path / "home"
        for name, value in {
            "ENDPOINT": hub.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
