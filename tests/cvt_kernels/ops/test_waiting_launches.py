"""Launches of recordings that wait for one another: nothing reads or writes what they touch too early."""

from typing import NamedTuple

import pytest

from cvt_kernels.launching import Launch
from cvt_kernels.ops import waiting_launches


class _Kernel:
    pass


SUM, OTHER = _Kernel(), _Kernel()


class Operation(NamedTuple):
    """Stands for an operator of PyTorch's."""

    touched: str


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(waiting_launches, "_together", {})

    @waiting_launches.may_wait(SUM)
    def together(launches):
        return launches[0]._replace(arguments={"TILE": 1, "touched": [_touched(each) for each in launches]})


def _touched(event):
    return event.arguments["touched"] if isinstance(event, Launch) else event.touched


def launch(kernel, touched, tile=1, **options):
    return Launch(kernel, (1,), {"TILE": tile, "touched": touched}, options)


def order(*events):
    """Returns what the gathered events touch, a list for each launch that several became."""
    found = waiting_launches.gathered(events, lambda event: map(ord, _touched(event)))
    return [_touched(each) for each in found]


def test_they_wait_for_the_first_that_touches_what_they_do():
    first, second, third = (launch(SUM, names) for names in ("aA", "bB", "cC"))
    assert order(first, Operation("x"), second, launch(OTHER, "yB"), third, Operation("z")) == [
        "x", ["aA", "bB"], "yB", "z", ["cC"],
    ]  # fmt: skip
    assert order(first, second, Operation("ab")) == [["aA", "bB"], "ab"]


def test_one_that_reads_the_sums_of_another_comes_later():
    assert order(launch(SUM, "aA"), launch(SUM, "Ab")) == [["aA"], ["Ab"]]


def test_launches_with_other_constants_are_not_one():
    found = order(launch(SUM, "aA"), launch(SUM, "bB", tile=2), launch(SUM, "cC"), launch(SUM, "dD", warps=4))
    assert found == [["aA", "cC"], ["bB"], ["dD"]]
