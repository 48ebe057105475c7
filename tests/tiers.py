"""The two tiers of the tests: ``make test`` runs a part of the cases, ``make test-all`` the rest too.

Of a parametrized test the part has every value of every parameter at least once, but not every combination
of them: three dtypes at five shapes are five cases, not fifteen. Of a test marked ``spread`` it has every
part of a name once: of ``gelu-cpu``, ``gelu-triton`` and ``linear-cpu`` the last two. Cases that need a GPU
stand for no others. Tests marked ``rest``, ``slow`` or ``sanitized`` are not in it.
"""

from __future__ import annotations

import collections

import pytest

#: The values of ``--tier``: the part of ``make test``, what ``make test-all`` runs besides, and all.
TIERS = ("test", "rest", "all")


def split(items: list[pytest.Item], tier: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns the cases of a tier, in their order, and the others."""
    if tier == "all":
        return items, []
    by_test = collections.defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("rest", "slow", "sanitized"))):
            by_test[item.nodeid.partition("[")[0]].append(item)
    part = {item for cases in by_test.values() for item in _with_every_value(cases)}
    kept = [item for item in items if (item in part) == (tier == "test")]
    return kept, [item for item in items if (item in part) != (tier == "test")]


def _with_every_value(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns few cases of one test which have every value of every parameter."""
    values = {case: _values_of(case) for case in cases}
    if not any(values.values()):
        return cases
    chosen: list[pytest.Item] = []
    for needs_gpu in (False, True):
        found = [case for case in cases if bool(case.get_closest_marker("gpu")) == needs_gpu]
        missing = set().union(*map(values.get, found)) - set().union(*map(values.get, chosen))
        while missing:
            best = max(found, key=lambda case: len(missing & values[case]))
            missing -= values[best]
            chosen.append(best)
    return chosen


def _values_of(case: pytest.Item) -> set[tuple[int, str]]:
    """Returns the parameters of a case, numbered, each with the name of its value."""
    callspec = getattr(case, "callspec", None)
    names = [] if callspec is None else list(callspec._idlist)
    return set(enumerate("-".join(names).split("-") if case.get_closest_marker("spread") else names))


def reasons(skipped: list[str]) -> list[str]:
    """Returns at most five lines for the reasons of skipped tests, the last for all the rarest."""
    counts = collections.Counter(skipped).most_common()
    shown = counts if len(counts) <= 5 else counts[:4]
    lines = [f"{count} skipped: {reason}" for reason, count in shown]
    rest = counts[len(shown) :]
    if rest:
        total = sum(count for _, count in rest)
        lines.append(f"{total} skipped for {len(rest)} other reasons: see pytest -rs")
    return lines
