"""Tests of packed copies begin with none."""

import pytest

import cvt_kernels as ck


@pytest.fixture(autouse=True)
def _no_copies_of_other_tests():
    ck.release_memory()
