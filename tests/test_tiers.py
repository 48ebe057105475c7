"""Every value of every parameter is in the part of the tests that ``make test`` runs."""

import pytest

from tests import tiers

pytest_plugins = ["pytester"]

CASES = """
import pytest

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", ["x", "y"])
@pytest.mark.parametrize("c", [
    pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.rest), 4, 5
])
def test_three(a, b, c):
    pass

def test_plain():
    pass

@pytest.mark.slow
def test_slow():
    pass

@pytest.mark.spread
@pytest.mark.parametrize("pair", [
    pytest.param(0, id="a-gpu", marks=pytest.mark.gpu), pytest.param(1, id="a-x"), pytest.param(2, id="a-y"),
    pytest.param(3, id="b-x"), pytest.param(4, id="b-y"), pytest.param(5, id="c-y"),
])
def test_pairs(pair):
    pass
"""


@pytest.fixture
def items(pytester):
    pytester.makeini("[pytest]\nmarkers =\n    rest\n    slow\n    sanitized\n    gpu\n    spread\n")
    return pytester.getitems(CASES)


def names(items):
    return [item.name for item in items]


def test_the_tiers_are_all_cases(items):
    part, rest = tiers.split(items, "test")
    assert tiers.split(items, "rest") == (rest, part)
    assert sorted(names(part) + names(rest)) == sorted(names(items))
    assert tiers.split(items, "all") == (items, [])


def test_the_part_has_every_value_in_few_cases(items):
    part, _ = tiers.split(items, "test")
    of_three = [item.callspec.params for item in part if item.name.startswith("test_three")]
    assert {params["a"] for params in of_three} == {1, 2, 3}
    assert {params["b"] for params in of_three} == {"x", "y"}
    assert {params["c"] for params in of_three} == {4, 5}  # 0 is slow, and 1 for the rest
    assert len(of_three) == 3
    assert "test_plain" in names(part)
    assert "test_slow" not in names(part)


def test_names_are_spread(items):
    part, _ = tiers.split(items, "test")
    assert [name for name in names(part) if "pairs" in name] == [
        f"test_pairs[{name}]" for name in ("a-gpu", "a-x", "b-y", "c-y")
    ]


def test_what_was_skipped_is_said_in_five_lines():
    few = ["no GPU"] * 2 + ["no compiler"]
    assert tiers.reasons([]) == []
    assert tiers.reasons(few) == ["2 skipped: no GPU", "1 skipped: no compiler"]
    many = few + [f"reason {i}" for i in range(7)] + ["no compiler"]
    assert len(tiers.reasons(many)) == 5
    assert tiers.reasons(many)[-1] == "5 skipped for 5 other reasons: see pytest -rs"
