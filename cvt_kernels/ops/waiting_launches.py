"""Launches that a recording may start later, several as one.

A step of training has a hundred sums of partial sums, of two to three microseconds each, whose results are
gradients that nobody reads before the end of a block's backward. In a recording they wait until something
reads or writes what they touch, and one launch serves all that wait then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..launching import Launch

_Together = Callable[[Sequence[Launch]], Launch]

#: The id of a kernel, whose hash would be made of its key, → what makes one launch of several.
_together: dict[int, _Together] = {}


def may_wait(kernel: Any) -> Callable[[_Together], _Together]:
    """Marks a kernel whose launches may wait for one another in a recording.

    The decorated function returns one launch that does what several do, in any order. Their options and
    the argument ``TILE`` are the same.
    """

    def register(together: _Together) -> _Together:
        _together[id(kernel)] = together
        return together

    return register


def gathered(events: Sequence[Any], storages_of: Callable[[Any], Iterable[int]]) -> list[Any]:
    """Returns the events of a recording in an order with the same results, with fewer launches.

    Args:
        events: Launches and operators of PyTorch.
        storages_of: Returns the storages that an event reads or writes, without those that it makes.
    """
    out: list[Any] = []
    waiting: dict[Any, list[Launch]] = {}
    touched: set[int] = set()

    def start() -> None:
        out.extend(_together[key[0]](launches) for key, launches in waiting.items())
        waiting.clear()
        touched.clear()

    for event in events:
        storages = set(storages_of(event))
        if not storages.isdisjoint(touched):
            start()
        if isinstance(event, Launch) and id(event.kernel) in _together:
            key = id(event.kernel), tuple(event.options.items()), event.arguments["TILE"]
            waiting.setdefault(key, []).append(event)
            touched |= storages
        else:
            out.append(event)
    start()
    return out
