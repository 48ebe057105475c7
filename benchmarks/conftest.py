"""What the suites add to pytest and to pytest-benchmark's JSON, and the table at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest

from . import suites


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tiny", action="store_true", help="shapes of a smoke test, as --benchmark-disable has")


def pytest_configure(config: pytest.Config) -> None:
    suites.tiny = bool(config.getoption("tiny") or config.getoption("benchmark_disable", False))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Keeps what a smoke test tunes out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        if suites.tiny:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info.pop("node", None)  # the name of the machine is nobody's business
    machine_info |= suites.facts_of_machine()
