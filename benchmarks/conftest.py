"""Additions of the suites to pytest, and to pytest-benchmark's JSON."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cvt_kernels
from cvt_kernels import machine

from . import models, operators


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds an option."""
    parser.addoption("--tiny", action="store_true", help="shapes of a smoke test, as --benchmark-disable has")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what a smoke test tunes out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        if models.is_tiny(request.config):
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any]:
    """Returns what the figures depend on, without the name of the machine."""
    return {
        **machine.facts()._asdict(),
        "python_version": platform.python_version(),
        "system": platform.system(),
        "cvt_kernels": cvt_kernels.__version__,
        "device": torch.cuda.get_device_name() if models.CUDA else machine.cpu_device(),
        "device_type": models.DEVICE.type,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "tiny": models.is_tiny(config),
    }


def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]
) -> None:
    """Adds the ceilings that the percentages refer to: bytes and operations per second."""
    timed = [row["extra_info"] for row in output_json["benchmarks"] if "flops" in row["extra_info"]]
    if timed and not models.is_tiny(config):
        kinds = {facts["dtype"] for facts in timed}
        output_json["ceilings"] = {"copy": operators.copy_rate(models.DEVICE)} | {
            f"product_{kind}": operators.product_rate(models.DEVICE, getattr(torch, kind))
            for kind in sorted(kinds)
        }
