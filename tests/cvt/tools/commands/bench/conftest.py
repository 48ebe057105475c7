"""Fixtures of the tests of ``cvt bench``."""

import pytest

from tests.processes import renew_server


@pytest.fixture(autouse=True, scope="module")
def _server_of_its_own():
    """Keeps what the processes of ``cvt bench`` import out of the children of other tests."""
    renew_server()
    yield
    renew_server()
