"""The search for cases that fail, their shrinking, and the figures of a run."""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from cvt_kernels import messages

from .worker import Ask

_SHRUNK = 2  # how many failures of a kind are shrunk


@dataclasses.dataclass
class Failure:
    """A case that fails, and the simplest one found that fails alike."""

    case: str
    flaw: str
    shrunk: str


@dataclasses.dataclass
class Figures:
    """The figures of one subject, such as an operator.

    Attributes:
        subject: Its name.
        cases: How many cases were tried.
        refused: How many of them no backend served.
        seconds: How long they took, without shrinking.
        failed: How many failed.
        worst_ratio: The largest error of the others, as a part of what is allowed.
        failures: One or two failures of each kind.
    """

    subject: str
    cases: int = 0
    refused: int = 0
    seconds: float = 0.0
    failed: int = 0
    worst_ratio: float = 0.0
    failures: list[Failure] = dataclasses.field(default_factory=list)


#: Given the line of a case, yields lines of simpler cases.
Simplify = Callable[[str], Iterable[str]]


def search(
    subject: str, lines: Iterator[str], ask: Ask, simplify: Simplify, *, cases: int | None,
    seconds: float | None,
) -> Figures:  # fmt: skip
    """Tries cases until there were so many, or so long; None is for no end.

    Args:
        subject: The name for the figures.
        lines: The cases.
        ask: Tries one.
        simplify: Names simpler ones, for shrinking.
        cases: How many.
        seconds: How long.
    """
    figures, kinds = Figures(subject), Counter[str]()
    for line in lines:
        if cases is not None and figures.cases >= cases:
            break
        if seconds is not None and figures.seconds >= seconds:
            break
        started = time.perf_counter()
        answer = ask(line)
        figures.seconds += time.perf_counter() - started
        figures.cases += 1
        figures.refused += not answer.served
        figures.worst_ratio = max(figures.worst_ratio, answer.ratio)
        figures.failed += bool(answer.flaws)
        for flaw in answer.flaws:
            kind = kind_of(flaw)
            kinds[kind] += 1
            if kinds[kind] <= _SHRUNK:
                figures.failures.append(Failure(line, flaw, shrunk(line, flaw, ask, simplify)))
    return figures


def kind_of(flaw: str) -> str:
    """Returns the words of a flaw without its numbers, which tell it from other flaws."""
    return re.sub(r"-?(\d[\d.e+-]*|\binf\b|\bnan\b)", "#", flaw)


def shrunk(line: str, flaw: str, ask: Ask, simplify: Simplify) -> str:
    """Returns the simplest case found that has a flaw of the same kind."""
    kind = kind_of(flaw)
    for simpler in simplify(line):
        if any(kind_of(each) == kind for each in ask(simpler).flaws):
            return shrunk(simpler, flaw, ask, simplify)
    return line


def table(all_figures: list[Figures]) -> list[str]:
    """Returns the lines of a table of figures."""
    headings = ["", "cases", "refused", "per second", "failures", "worst error / allowed"]
    rows = [
        [
            figures.subject,
            str(figures.cases),
            str(figures.refused),
            f"{figures.cases / figures.seconds:.0f}" if figures.seconds else "–",
            str(figures.failed),
            f"{figures.worst_ratio:.2f}",
        ]
        for figures in all_figures
    ]
    return messages.aligned([headings, *rows], right=range(1, len(headings)))
