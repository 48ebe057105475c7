"""A stand-in for the Hugging Face Hub."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import Hub, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub without models, which ``huggingface_hub`` takes for the Hub, with an empty cache of its own."""
    from huggingface_hub import constants

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
