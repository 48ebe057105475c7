"""Modules that moved to cvt.tools are the same modules by their former names."""

import importlib

import pytest

from cvt import former_names
from tests.processes import run_python


@pytest.mark.parametrize("name", [*sorted(former_names._MOVED), "training.recipe", "training.trainer"])
def test_a_former_name_warns_and_is_the_module(name):
    program = f"""
import importlib, warnings
import cvt
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    former = importlib.import_module("cvt.{name}")
module = importlib.import_module("cvt.tools.{name}")
assert former is module and module.__spec__.name == module.__name__ == "cvt.tools.{name}", module
assert "cvt.{name} is now cvt.tools.{name}" in [str(warning.message) for warning in caught]
"""
    run_python(program)


def test_other_names_are_not_taken():
    with pytest.raises(ModuleNotFoundError, match=r"cvt\.dataset"):
        importlib.import_module("cvt.dataset")
    with (
        pytest.raises(ModuleNotFoundError, match=r"cvt\.tools\.training\.nothing"),
        pytest.warns(FutureWarning),
    ):
        importlib.import_module("cvt.training.nothing")
