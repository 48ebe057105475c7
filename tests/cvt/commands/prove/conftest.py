"""The cache that tests of ``cvt prove`` write into."""

import pytest

from cvt_kernels import verdicts


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Returns an empty cache directory; first-use proofs stay off."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "_stores", {})
    return tmp_path / "cache"
